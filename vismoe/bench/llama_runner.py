"""llama.cpp on the CPU, text only, driven by token ids. Imports neither torch nor transformers: a worker must not carry them."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vismoe.bench.job import Job, Request
from vismoe.bench.process import difference, disk_bytes

__all__ = ["LOADERS", "LlamaRunner"]

BATCH_TOKENS, MICRO_BATCH_TOKENS = 2048, 512  # llama.cpp's own defaults


class LlamaRunner:
    """The same ids through llama.cpp's own evaluation, logits of the last token only."""

    def __init__(self, job: Job, use_mmap: bool):
        import llama_cpp

        tokens = len(job.token_ids)
        options: dict[str, Any] = {
            "n_batch": min(tokens, BATCH_TOKENS),
            "n_ubatch": min(tokens, MICRO_BATCH_TOKENS),
            "n_threads": job.threads,
            "n_threads_batch": job.threads,
            "flash_attn": True,
            "use_mmap": use_mmap,
        }
        self._llama, self._job = llama_cpp, job
        self._model = llama_cpp.Llama(
            model_path=str(job.gguf), n_ctx=tokens + job.new_tokens, n_gpu_layers=0, verbose=False, **options
        )
        self.notes = {"llama_cpp": llama_cpp.__version__, "gguf": job.gguf, "kv_type": "f16", **options}

    def request(self, state: str) -> Request:
        self._model.reset()
        disk, began_s = disk_bytes(), time.perf_counter()
        token_ids = [self._next(self._job.token_ids)]
        first_s, first_disk = time.perf_counter(), disk_bytes()
        while len(token_ids) < self._job.new_tokens:
            token_ids.append(self._next(token_ids[-1:]))
        return Request(
            state=state,
            encode_s=0.0,
            prefill_s=first_s - began_s,
            prompt_tokens=len(self._job.token_ids),
            visual_tokens=0,
            decode_s=time.perf_counter() - first_s,
            decode_tokens=len(token_ids) - 1,
            token_ids=tuple(token_ids),
            prefill_disk_bytes=difference(first_disk, disk),
            decode_disk_bytes=difference(disk_bytes(), first_disk),
        )

    def _next(self, token_ids: Sequence[int]) -> int:
        """The greedy token after these."""
        self._model.eval(token_ids)
        logits = self._llama.llama_get_logits_ith(self._model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._model.n_vocab(),)).argmax())


LOADERS: dict[str, Callable[[Job], LlamaRunner]] = {
    "llama.cpp-mmap": functools.partial(LlamaRunner, use_mmap=True),
    "llama.cpp-resident": functools.partial(LlamaRunner, use_mmap=False),
}
