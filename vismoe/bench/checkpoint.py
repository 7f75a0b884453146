"""A checkpoint of any geometry with random bfloat16 weights, streamed to disk in the hub's layout.

Promises: at most 64 MiB of memory beside the model's description, whatever the checkpoint's size; the same arguments give the
same bytes; a folder with the final name is complete; a folder that already holds the same checkpoint is reused. There is no
tokenizer: benchmarks use token ids.
"""

import copy
import hashlib
import json
import math
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from vismoe.bench.weights import Noise, WeightRecipe, Weights, weights_of
from vismoe.config import format_bytes
from vismoe.errors import ConfigError
from vismoe.machine.hardware import cores

FORMAT = 1  # version of the weights: raise it when the same arguments give other bytes
MANIFEST = "vismoe-bench.json"
SHARD_BYTES = 5 * 10**9
SPARE_BYTES = 2**28  # disk space left free for other programs
MOST_THREADS = 8  # each writes a file, by pieces of 2 MiB


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk."""

    folder: Path
    total_bytes: int  # of all tensors
    expert_bytes: int  # of routed experts
    reused: bool  # it existed already


def write_checkpoint(
    config: PreTrainedConfig,
    model_class: type[PreTrainedModel],
    folder: str | Path,
    *,
    skew: float = 0.0,
    seed: int = 0,
    mtp: bool = False,
    progress: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Write a random model of `config` into `folder`, or reuse the one there; `skew` is Zipf's exponent, see `weights.py`.
    mtp: with the layer that drafts.

    Tied embeddings make greedy decoding repeat one token. Raises ConfigError for an invalid skew, a folder with other content, or
    a disk that is too small.
    """
    if not (math.isfinite(skew) and skew >= 0):
        raise ConfigError(f"skew={skew}: Zipf's exponent must be at least 0 (uniform). Fix: 0, or 1 for a strong skew")
    folder = Path(folder)
    identity = _identity(config, model_class, skew, seed) | ({"mtp": True} if mtp else {})
    manifest = _complete_manifest(folder)
    if manifest is not None and all(manifest.get(key) == value for key, value in identity.items()):
        return Written(folder, manifest["total_bytes"], manifest["expert_bytes"], reused=True)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} holds other files than this checkpoint. Fix: name another folder, or delete this one")
    config = copy.deepcopy(config)
    config.architectures, config.dtype = [model_class.__name__], torch.bfloat16
    weights = weights_of(config, model_class, skew=skew, seed=seed, mtp=mtp)
    folder.parent.mkdir(parents=True, exist_ok=True)
    refuse_small_disk(folder.parent, weights.total_bytes)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    partial.mkdir()
    try:
        files = _write_shards(partial, weights, seed, shard_bytes, progress)
        config.save_pretrained(partial)
        sizes = dict(total_bytes=weights.total_bytes, expert_bytes=weights.expert_bytes)
        (partial / MANIFEST).write_text(json.dumps({**identity, **sizes, "files": files}, indent=1))
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Written(folder, weights.total_bytes, weights.expert_bytes, reused=False)


def _identity(config: PreTrainedConfig, model_class: type, skew: float, seed: int) -> dict[str, Any]:
    """The properties that equal checkpoints share."""
    volatile = ("transformers_version", "architectures", "dtype")
    values = {key: value for key, value in config.to_dict().items() if key not in volatile}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
    return {"format": FORMAT, "model_class": model_class.__name__, "config_sha256": digest, "skew": skew, "seed": seed}


def _complete_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder if all its files have the recorded sizes; otherwise None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError):
        return None
    return manifest if sizes == manifest["files"] else None


def refuse_small_disk(folder: Path, total_bytes: int) -> None:
    """Raises ConfigError unless the disk of `folder` has `total_bytes` and a little more free."""
    free_bytes, needed_bytes = shutil.disk_usage(folder).free, total_bytes + SPARE_BYTES
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"{format_bytes(total_bytes)} must be written, {folder} has {format_bytes(free_bytes)} free, and "
            f"{format_bytes(SPARE_BYTES)} must remain free. Fix: fewer layers, a folder on a larger disk, or free "
            f"{format_bytes(needed_bytes - free_bytes)}"
        )


def _write_shards(folder: Path, weights: Weights, seed: int, shard_bytes: int, progress: bool) -> dict[str, int]:
    """Write all tensors and the index; return the size of every file."""
    shards = list(_split(weights.recipes, shard_bytes))
    noise, weight_map, sizes = Noise(seed), {}, {}
    paths = [folder / f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    stop = threading.Event()
    with (
        tqdm(total=weights.total_bytes, unit="B", unit_scale=True, desc=folder.stem, disable=not progress) as bar,
        ThreadPoolExecutor(min(len(shards), cores(), MOST_THREADS), "vismoe-write") as threads,
    ):
        try:
            written = [threads.submit(_write_shard, path, shard, noise, bar, stop) for path, shard in zip(paths, shards)]
            for done in as_completed(written):
                done.result()
        finally:  # at Ctrl-C, too, and when the disk is full
            stop.set()
    for path, shard in zip(paths, shards):
        weight_map.update(dict.fromkeys(shard, path.name))
        sizes[path.name] = path.stat().st_size
    index = {"metadata": {"total_size": weights.total_bytes}, "weight_map": weight_map}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))
    return sizes


def _split(recipes: dict[str, WeightRecipe], shard_bytes: int) -> Iterator[dict[str, WeightRecipe]]:
    """Groups of consecutive tensors of at most `shard_bytes`; a larger tensor gets its own shard."""
    shard: dict[str, WeightRecipe] = {}
    size = 0
    for name, recipe in recipes.items():
        if shard and size + recipe.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = recipe
        size += recipe.nbytes
    yield shard


def _write_shard(path: Path, shard: dict[str, WeightRecipe], noise: Noise, bar: tqdm, stop: threading.Event) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, recipe in shard.items():
        header[name] = {"dtype": "BF16", "shape": list(recipe.shape), "data_offsets": [offset, offset + recipe.nbytes]}
        offset += recipe.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, recipe in shard.items():
            for piece in noise.pieces(name, recipe):
                if stop.is_set():
                    return
                file.write(piece.view(torch.uint8).numpy().data)
                bar.update(2 * len(piece))
