"""Models of experts on the disks of this machine: in the hub's cache, and GGUF files where llama.cpp and LM Studio keep theirs.

Configurations and headers are read, nothing else. Needs no optional package.
"""

import functools
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import CacheNotFound, HFCacheInfo, constants, scan_cache_dir

from vismoe.errors import CheckpointError
from vismoe.models.family.families import EXPERT_COUNTS
from vismoe.models.family.gguf_names import ARCHITECTURES, TOWERS
from vismoe.store.gguf_header import GGUF, PART, read_gguf_headers

log = logging.getLogger("vismoe")

MMPROJ = "mmproj"  # what the name of a file with a vision tower begins with


class ModelOnDisk(NamedTuple):
    """A model on this machine."""

    name: str  # as people know it
    model: str  # a folder or a `.gguf` file
    nbytes: int  # of its files


def models_on_disk() -> Iterator[ModelOnDisk]:
    """Models that have several experts, and their weights here; of the hub first."""
    try:
        hub = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError):
        hub = None
    if hub is not None:
        yield from _of_hub(hub)
    for folder in gguf_folders():
        for file in sorted(folder.rglob(f"*{GGUF}")):
            above = file.relative_to(folder).parts[:-1]
            yield from _of_file(file, "/".join(above))


def gguf_folders() -> list[Path]:
    """Where llama.cpp (LLAMA_CACHE, or the system's place of caches) and LM Studio keep models."""
    home = Path.home()
    caches = home / "Library" / "Caches" if sys.platform == "darwin" else Path(os.environ.get("XDG_CACHE_HOME", home / ".cache"))
    folders = [
        Path(os.environ.get("LLAMA_CACHE", caches / "llama.cpp")),
        home / ".lmstudio" / "models",
        home / ".cache" / "lm-studio" / "models",  # of its earlier versions
    ]
    return [folder for folder in folders if folder.is_dir()]


def vision_tower_beside(file: Path) -> Path | None:
    """The smallest mmproj file that belongs to a GGUF file and lies in its folder, where llama.cpp and LM Studio put it; None:
    there is none, or the model has no tower."""
    model = _looked_into(file)
    if model is None or model.projector is None:
        return None
    towers = [other for other in file.parent.glob(f"*{GGUF}") if _is_tower(other) and _is_for(_looked_into(other), model)]
    return min(towers, key=lambda tower: (tower.stat().st_size, tower.name), default=None)


def _is_tower(file: Path) -> bool:
    """llama.cpp's cache puts the name of the repository in front."""
    return MMPROJ in file.name.lower()


def _of_hub(hub: HFCacheInfo) -> Iterator[ModelOnDisk]:
    for repository in sorted(hub.repos, key=lambda one: one.repo_id.lower()):
        revisions = sorted(repository.revisions, key=lambda one: ("main" in one.refs, one.last_modified), reverse=True)
        if repository.repo_type != "model" or not revisions:
            continue
        folder, paths = revisions[0].snapshot_path, sorted(file.file_path for file in revisions[0].files)
        if any(path.suffix == ".safetensors" for path in paths) and _has_experts(folder / "config.json"):
            yield ModelOnDisk(repository.repo_id, str(folder), revisions[0].size_on_disk)
        for path in paths:
            if path.suffix == GGUF:
                yield from _of_file(path, repository.repo_id)


def _of_file(file: Path, repository: str) -> Iterator[ModelOnDisk]:
    """A GGUF file that is a model of a family that can be served; of a split one, its first part."""
    part = PART.fullmatch(file.name)
    if _is_tower(file) or (part is not None and int(part["number"]) != 1):
        return
    looked, stem = _looked_into(file), part["stem"] if part is not None else file.stem
    if looked is not None and looked.served_bytes:
        yield ModelOnDisk(f"{repository}: {stem}" if repository else stem, str(file), looked.served_bytes)


class _Looked(NamedTuple):
    """What the header of a GGUF file says."""

    served_bytes: int  # of the file and its other parts; 0: no language model of a family that is served
    projector: str | None  # of a vision tower: its kind; of a language model: the kind it needs
    width: int | None  # of what the tower gives, and the model takes


def _is_for(tower: _Looked | None, model: _Looked) -> bool:
    return tower is not None and (tower.projector, tower.width) == (model.projector, model.width)


def _looked_into(file: Path) -> _Looked | None:
    """None for what cannot be read, such as a download under way."""
    try:
        state = file.stat()
        return _read(file, state.st_size, state.st_mtime_ns)
    except (OSError, CheckpointError) as error:
        log.info("not listed: %s", error)
        return None


@functools.lru_cache(256)
def _read(file: Path, _size: int, _mtime_ns: int) -> _Looked:
    headers = read_gguf_headers(file)
    said = headers[0].metadata
    architecture = said.get("general.architecture")
    if architecture == "clip":
        projector = said.get("clip.projector_type", said.get("clip.vision.projector_type"))
        return _Looked(0, projector, said.get("clip.vision.projection_dim"))
    families = [family for family, name in ARCHITECTURES.items() if name == architecture]
    nbytes = sum(header.file_bytes for header in headers) if families else 0
    projector = next((TOWERS[family] for family in families if family in TOWERS), None)
    return _Looked(nbytes, projector, said.get(f"{architecture}.embedding_length"))


def _has_experts(config: Path) -> bool:
    """Whether a configuration counts experts; whether its family can be served is seen when it is planned."""
    try:
        return counts_experts(json.loads(config.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return False


def counts_experts(values: Any) -> bool:
    """Whether a configuration, or one inside it, has several experts."""
    if not isinstance(values, dict):
        return False
    counts = (values.get(name) for name in EXPERT_COUNTS)
    return any(isinstance(count, int) and count > 1 for count in counts) or any(map(counts_experts, values.values()))
