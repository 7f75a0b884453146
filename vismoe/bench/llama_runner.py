"""llama.cpp on the CPU, text only, by token ids. Imports neither torch nor transformers, which its worker must not load."""

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vismoe.bench.job import LOGITS, BenchRequest, Job, ParallelAnswers
from vismoe.bench.process import difference, disk_bytes

CONTEXT_STEP = 256  # tokens of a sequence's context are a multiple of this
BATCH_TOKENS, MICRO_BATCH_TOKENS = 2048, 512  # llama.cpp's own defaults


class LlamaRunner:
    """Evaluates the same ids in llama.cpp, with logits of the last token only."""

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
        if use_mmap:
            _leave_as_mapped(llama_cpp.llama_cpp)
        self.logits: tuple[float, ...] = ()
        self._answer: list[int] = []
        self._model = llama_cpp.Llama(
            model_path=str(job.gguf), n_ctx=tokens + job.new_tokens, n_gpu_layers=0, verbose=False, **options
        )
        self.notes = {"llama_cpp": llama_cpp.__version__, "gguf": job.gguf, "kv_type": "f16", **options}

    def request(self, state: str) -> BenchRequest:
        self._model.reset()
        disk, began_s = disk_bytes(), time.perf_counter()
        token_ids = [self._next(self._job.token_ids)]
        first_s, first_disk = time.perf_counter(), disk_bytes()
        while len(token_ids) < self._job.new_tokens:
            token_ids.append(self._next(token_ids[-1:]))
        self._answer = token_ids
        return BenchRequest(
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

    def parallel(self, rows: int) -> ParallelAnswers:
        """So many sequences in a context of their own, with the rows of each step in one batch."""
        llama, job, options = self._llama, self._job, self._model.context_params
        prompts, steps = job.prompts[:rows], job.new_tokens - 1
        before = options.n_ctx, options.n_seq_max, options.n_batch, options.n_ubatch
        each = -(-(len(job.token_ids) + job.new_tokens) // CONTEXT_STEP) * CONTEXT_STEP
        options.n_ctx, options.n_seq_max = rows * each, rows
        options.n_batch, options.n_ubatch = max(options.n_batch, rows), max(options.n_ubatch, rows)
        context = llama.llama_init_from_model(self._model.model, options)
        options.n_ctx, options.n_seq_max, options.n_batch, options.n_ubatch = before
        batch = llama.llama_batch_init(max(options.n_batch, rows), 0, 1)

        def decode(entries: Sequence[tuple[int, int, int, bool]]) -> None:
            """(token, its place, its sequence, whether its logits are wanted) of each entry."""
            batch.n_tokens = len(entries)
            for at, (token, place, row, wanted) in enumerate(entries):
                batch.token[at], batch.pos[at], batch.logits[at] = token, place, wanted
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
            if llama.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode failed with {rows} sequences")

        def greedy(at: int) -> int:
            logits = llama.llama_get_logits_ith(context, at)
            return int(np.ctypeslib.as_array(logits, shape=(self._model.n_vocab(),)).argmax())

        newest = []
        for row, prompt in enumerate(prompts):
            for start in range(0, len(prompt), options.n_batch):
                piece = range(start, min(start + options.n_batch, len(prompt)))
                decode([(prompt[place], place, row, place == len(prompt) - 1) for place in piece])
            newest.append(greedy(batch.n_tokens - 1))
        disk, began_s = disk_bytes(), time.perf_counter()
        for step in range(steps):
            decode([(token, len(prompts[0]) + step, row, True) for row, token in enumerate(newest)])
            newest = [greedy(row) for row in range(rows)]
        seconds, read = time.perf_counter() - began_s, difference(disk_bytes(), disk)
        llama.llama_batch_free(batch)
        llama.llama_free(context)
        return ParallelAnswers(rows, rows * steps, seconds, read)

    def _next(self, token_ids: Sequence[int]) -> int:
        """The greedy token after `token_ids`."""
        self._model.eval(token_ids)
        logits = self._llama.llama_get_logits_ith(self._model.ctx, -1)
        values = np.ctypeslib.as_array(logits, shape=(self._model.n_vocab(),))
        self.logits = self.logits or tuple(values[:: -(-len(values) // LOGITS)].tolist())
        return int(values.argmax())

    def moe_s(self) -> dict[str, float]:
        """Seconds in the routed experts of all layers for the prompt and the last answer, by phase; see ExpertsClock.

        Uses a separate context, so that other requests are not interrupted; the second of two passes counts.
        """
        llama, prompt = self._llama, self._job.token_ids
        clock, options = ExpertsClock(llama), self._model.context_params
        options.cb_eval = clock.callback
        context = llama.llama_init_from_model(self._model.model, options)
        pieces = [prompt[start : start + options.n_batch] for start in range(0, len(prompt), options.n_batch)]
        found = {}
        for _ in range(2):
            llama.llama_memory_clear(llama.llama_get_memory(context), True)
            for phase, batches in (("prefill", pieces), ("decode", [(token,) for token in self._answer[:-1]])):
                clock.total_s = 0.0
                for batch in batches:
                    tokens = (llama.llama_token * len(batch))(*batch)
                    llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(batch)))
                found[phase] = clock.total_s
        llama.llama_free(context)
        return found


def _leave_as_mapped(llama: Any) -> None:
    """Keep llama.cpp from copying weights into its own layout (q4_0), so that it computes from the mapped file."""
    defaults = llama.llama_model_default_params

    def mapped() -> Any:
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    llama.llama_model_default_params = mapped


class ExpertsClock:
    """Adds up the time that llama.cpp takes for the routed experts: products, activation, weighting and sum, without the router.

    llama.cpp calls a callback for every tensor before computing it, and pauses after those that the callback requests. This
    callback pauses it after the routing weights and after the experts' sum, and so times the interval.
    """

    def __init__(self, llama: Any):
        from llama_cpp._ggml import libggml

        self._name_of = libggml.ggml_get_name
        self._name_of.argtypes, self._name_of.restype = [ctypes.c_void_p], ctypes.c_char_p
        self.callback = llama.ggml_backend_sched_eval_callback(self._look)
        self.total_s = self._began_s = 0.0

    def _look(self, tensor: int, ask: bool, data: int) -> bool:
        name = self._name_of(tensor)
        if ask:
            self._began_s = time.perf_counter()  # the next interval ends with this tensor, or a later one
            return name.startswith((b"ffn_moe_weights", b"ffn_moe_out-"))
        if name.startswith(b"ffn_moe_out-"):
            self.total_s += time.perf_counter() - self._began_s
        return True


LOADERS: dict[str, Callable[[Job], LlamaRunner]] = {
    "llama.cpp-mmap": functools.partial(LlamaRunner, use_mmap=True),
    "llama.cpp-resident": functools.partial(LlamaRunner, use_mmap=False),
}
