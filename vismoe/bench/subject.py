"""The model of a benchmark: a checkpoint that is there or is generated, its GGUF twin, and what is known without its weights."""

import contextlib
import importlib.util
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vismoe.bench.checkpoint import MANIFEST, refuse_small_disk, write_checkpoint
from vismoe.bench.geometry import GEOMETRIES, geometry_config, model_class_of
from vismoe.bench.gguf import gguf_refusal, is_float32, write_gguf
from vismoe.config import format_bytes
from vismoe.errors import ConfigError, InputError
from vismoe.machine.profile import profile_file
from vismoe.models.components import backbone_bytes
from vismoe.models.locate import inventory_of
from vismoe.models.preview import describe
from vismoe.types import ExpertInventory

__all__ = [
    "GgufFile",
    "Subject",
    "bench_folder",
    "clean",
    "generate",
    "gguf_file",
    "gguf_of",
    "refuse_unusable",
    "sketch",
    "subject_of",
]

GGUF_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
ENCODERS = ("vision tower", "audio tower")  # llama.cpp keeps them in another file
SAME_SIZE = 0.02  # by how much the bytes of two files with the same weights differ: vectors and routers are F32 in GGUF
GENERATED = re.compile(rf"({'|'.join(map(re.escape, GEOMETRIES))})-\d+-layers-skew-.+-seed--?\d+(\.gguf)?(\.partial)?")
OFFLOAD = re.compile(r"offload-(\d+)")  # of a benchmark with this process number


@dataclass(frozen=True)
class Subject:
    """A model that can be measured."""

    name: str  # folder or hub name
    revision: str | None
    config: Any
    dtype: str
    files: tuple[Path, ...]  # its safetensors files
    inventory: ExpertInventory
    backbone: tuple[tuple[str, int], ...]  # (component, bytes) in this dtype
    random_weights: dict[str, Any] | None  # geometry, layers, skew and seed of a generated one

    @property
    def language_bytes(self) -> int:
        """Of everything but vision and audio towers."""
        return self.weights_bytes - sum(nbytes for name, nbytes in self.backbone if name in ENCODERS)

    @property
    def weights_bytes(self) -> int:
        experts = sum(layer.num_experts * self.inventory.layout(layer.index).payload_bytes for layer in self.inventory.layers)
        return experts + sum(nbytes for _, nbytes in self.backbone)

    def to_json(self) -> dict[str, Any]:
        moe = [{"experts": layer.num_experts, "top_k": layer.top_k} for layer in self.inventory.layers]
        return {
            "name": self.name,
            "family": self.config.model_type,
            "dtype": self.dtype,
            "weights_bytes": self.weights_bytes,
            "expert_bytes": self.inventory.total_bytes,
            "backbone": dict(self.backbone),
            "moe_layers": moe,
            "random_weights": self.random_weights,
        }


def bench_folder() -> Path:
    """Where generated checkpoints are kept: beside the machine profile."""
    return profile_file("any").parent / "bench"


def generate(
    folder: Path, geometry: str, layers: int | None, skew: float, seed: int, *, gguf: bool = False, quiet: bool = False
) -> Subject:
    """A published geometry with random weights, and its GGUF twin if asked for; written unless they are there.

    Raises InputError for a folder that cannot be used, ConfigError for a disk that cannot hold both.
    """
    config = geometry_config(geometry, layers)
    layers = config.get_text_config().num_hidden_layers
    target = folder / f"{geometry}-{layers}-layers-skew-{skew:g}-seed-{seed}"
    missing = [path for path in (target, *([_twin(target)] if gguf else [])) if not path.exists()]
    if missing:
        refuse_unusable(folder)
        with sketch(geometry, layers) as planned:
            refuse_small_disk(folder, len(missing) * planned.weights_bytes)
    made = {"geometry": geometry, "layers": layers, "skew": skew, "seed": seed}
    try:
        written = write_checkpoint(config, model_class_of(geometry), target, skew=skew, seed=seed, progress=not quiet)
        subject = subject_of(str(target), None, None, {**made, "total_bytes": written.total_bytes})
        if gguf:
            gguf_of(subject, quiet=quiet)
    except OSError as error:
        raise InputError(f"{target}: {error.strerror or error}. Fix: --folder DIR names another place") from error
    return subject


def refuse_unusable(folder: Path) -> None:
    """Raises InputError unless files can be made in `folder`, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"--folder {folder} cannot be used: {error.strerror}. Fix: name one that can be written") from error


@contextlib.contextmanager
def sketch(geometry: str, layers: int | None) -> Iterator[Subject]:
    """A generated subject as it will be, in a folder that holds nothing but its configuration."""
    with tempfile.TemporaryDirectory(prefix="vismoe-bench-") as folder:
        geometry_config(geometry, layers).save_pretrained(folder)
        yield _subject(folder, None, None, {"geometry": geometry, "layers": layers})


def subject_of(name: str, revision: str | None, dtype: str | None, made: dict[str, Any] | None = None) -> Subject:
    """What there is to know before loading. Raises InputError for a hub model whose weights are not on this machine."""
    subject = _subject(name, revision, dtype, made)
    if not subject.files:
        raise InputError(f"{name}: the weights are not on this machine. Fix: download the model first (hf download {name})")
    return subject


def _subject(name: str, revision: str | None, dtype: str | None, made: dict[str, Any] | None) -> Subject:
    model, files = describe(name, revision=revision, dtype=dtype or "auto")
    plain = str(model.dtype).removeprefix("torch.")
    inventory = inventory_of(model, model.dtype)
    return Subject(name, revision, model.config, plain, tuple(files), inventory, backbone_bytes(model), made)


def _twin(folder: Path) -> Path:
    return folder.with_name(folder.name + ".gguf")


def gguf_file(subject: Subject) -> Path:
    """Where the GGUF twin of a generated subject lies, or will.

    Raises ConfigError for anything else (converting somebody's model is theirs to decide), and for what cannot be converted.
    """
    if subject.random_weights is None and not (Path(subject.name) / MANIFEST).exists():
        raise ConfigError(f"llama.cpp needs the weights of {subject.name} as GGUF. Fix: --gguf FILE, in {subject.dtype}")
    if reason := gguf_refusal(subject.config):
        raise ConfigError(f"llama.cpp cannot run {subject.config.model_type}: {reason}. Fix: leave it out of --baseline")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("llama.cpp as a baseline needs the package gguf. Fix: pip install 'vismoe[bench]'")
    return _twin(Path(subject.name))


def gguf_of(subject: Subject, *, quiet: bool = False) -> Path:
    """The GGUF twin of a generated subject, written unless it is there and as new as the weights."""
    file, manifest = gguf_file(subject), Path(subject.name) / MANIFEST
    if not file.exists() or file.stat().st_mtime < manifest.stat().st_mtime:
        write_gguf(subject.name, file, progress=not quiet)
    return file


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says of its model."""

    precision: str  # of its matrices, in torch's words where torch has one; where they differ, of the smallest of its types
    tensor_bytes: int
    blocks: int
    experts: int
    vocabulary: int

    @classmethod
    def read(cls, file: Path, dtype: str) -> "GgufFile":
        """`precision` is `dtype` only where every matrix has it. Raises InputError for a file that is no GGUF file."""
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ConfigError("--gguf needs the package gguf to read the file. Fix: pip install 'vismoe[bench]'") from error
        try:
            reader = GGUFReader(file)
            name = reader.fields["general.architecture"].contents()
            blocks, experts = (int(reader.fields[f"{name}.{key}"].contents()) for key in ("block_count", "expert_count"))
            vocabulary = next(int(tensor.shape[-1]) for tensor in reader.tensors if tensor.name == "token_embd.weight")
        except (OSError, ValueError, KeyError, StopIteration) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or error
            raise InputError(
                f"{file} is no GGUF file of a mixture of experts that can be read: {why}. Fix: name another one by --gguf"
            ) from error
        matrices = [tensor for tensor in reader.tensors if not is_float32(tensor.name, len(tensor.shape))]
        kinds = {GGUF_NAMES.get(tensor.tensor_type.name, tensor.tensor_type.name.lower()) for tensor in matrices}
        others = sorted(kinds - {dtype})
        tensor_bytes = sum(int(tensor.n_bytes) for tensor in reader.tensors)
        return cls(" and ".join(others) or dtype, tensor_bytes, blocks, experts, vocabulary)

    def difference(self, subject: Subject) -> str | None:
        """Why this is not the subject's model; None if it may be. Types are held against each other elsewhere."""
        text, layers = subject.config.get_text_config(), subject.inventory.layers
        wanted = {"blocks": text.num_hidden_layers, "experts": layers[0].num_experts, "vocabulary": text.vocab_size}
        for name, value in wanted.items():
            if getattr(self, name) != value:
                return f"{name}: {getattr(self, name)}, and the model has {value}"
        if self.precision == subject.dtype and abs(self.tensor_bytes / subject.language_bytes - 1) > SAME_SIZE:
            wanted_bytes = format_bytes(subject.language_bytes)
            return f"{format_bytes(self.tensor_bytes)} of tensors, and the model has {wanted_bytes} without its encoders"
        return None


def clean(folder: Path) -> tuple[list[Path], int]:
    """Delete what benchmarks left in `folder`, and nothing else; returns (what was deleted, bytes).

    That is generated checkpoints, their GGUF files, either one unfinished, and offload folders of processes that have ended.
    """
    doomed = [path for path in sorted(folder.glob("*")) if _is_ours(path)]
    nbytes = sum(file.stat().st_size for path in doomed for file in ([path] if path.is_file() else path.rglob("*")))
    for path in doomed:
        path.unlink() if path.is_file() else shutil.rmtree(path)
    return doomed, nbytes


def _is_ours(path: Path) -> bool:
    if owner := OFFLOAD.fullmatch(path.name):
        return path.is_dir() and not psutil.pid_exists(int(owner[1]))
    return GENERATED.fullmatch(path.name) is not None
