"""The model of a benchmark: an existing or generated checkpoint, files derived from a generated one (GGUF twins, a store of
packed experts), and facts that do not need its weights.
"""

import contextlib
import importlib.util
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm

from vismoe.bench.checkpoint import MANIFEST, refuse_small_disk, write_checkpoint
from vismoe.bench.geometry import GEOMETRIES, geometry_config, model_class_of
from vismoe.bench.gguf import gguf_refusal, is_float32, write_gguf
from vismoe.bench.job import BITS_PER_WEIGHT
from vismoe.config import format_bytes
from vismoe.errors import ConfigError, InputError
from vismoe.formats.affine import Affine
from vismoe.machine.profile import profile_file
from vismoe.models.family.components import backbone_bytes
from vismoe.models.load.locate import inventory_of
from vismoe.models.load.preview import describe, experts_in_place
from vismoe.planning.plan import Plan
from vismoe.store.index import index_path
from vismoe.store.pack import pack
from vismoe.store.packed import contents_of
from vismoe.types import ExpertInventory, Format

GGUF_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
ENCODERS = ("vision tower", "audio tower")  # llama.cpp stores them in another file
SAME_SIZE = 0.02  # tolerance for the sizes of files with the same weights: vectors and routers are F32 in GGUF
GENERATED = re.compile(
    rf"({'|'.join(map(re.escape, GEOMETRIES))})-\d+-layers(-mtp)?-skew-.+-seed--?\d+(\.store|(\.[a-z0-9_]+)?\.gguf)?(\.partial)?"
)
OFFLOAD = re.compile(r"offload-(\d+)")  # left by a benchmark with this process number


@dataclass(frozen=True)
class Subject:
    """A model to measure."""

    name: str  # folder or hub name
    revision: str | None
    config: Any
    dtype: str
    files: tuple[Path, ...]  # its safetensors files
    inventory: ExpertInventory
    backbone: tuple[tuple[str, int], ...]  # (component, bytes) in this dtype
    random_weights: dict[str, Any] | None  # geometry, layers, skew and seed of a generated model

    @property
    def language_bytes(self) -> int:
        """Bytes without vision and audio towers."""
        return self.weights_bytes - sum(nbytes for name, nbytes in self.backbone if name in ENCODERS)

    @property
    def weights_bytes(self) -> int:
        return self.expert_bytes + sum(nbytes for _, nbytes in self.backbone)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the routed experts in this dtype, without gaps."""
        return sum(layer.num_experts * self.inventory.layout(layer.index).payload_bytes for layer in self.inventory.layers)

    def expert_share(self, expert_type: str) -> float:
        """Bytes of an expert in a VisMoE format or llama.cpp type in memory, divided by its bytes in this dtype."""
        return BITS_PER_WEIGHT.get(expert_type, self.weight_bits) / self.weight_bits

    def held_bytes(self, plan: Plan) -> int:
        """Bytes of weights that VisMoE keeps in memory."""
        experts = sum(part.bytes for part in plan.parts if part.name.startswith(("pinned prefix", "expert pool")))
        return experts + sum(nbytes for _, nbytes in self.backbone)

    def matrix_bytes(self, expert_type: str) -> int:
        """Bytes of one of an expert's three matrices in such a type; of the largest where experts differ."""
        return int(self.expert_share(expert_type) * max(layout.payload_bytes for layout in self.inventory.layouts)) // 3

    @property
    def weight_bits(self) -> int:
        return 8 * getattr(torch, self.dtype).itemsize

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
    """The default folder of generated checkpoints, beside the machine profile."""
    return profile_file("any").parent / "bench"


@dataclass(frozen=True)
class GeneratedModel:
    """What a generated model is: a published geometry with random weights."""

    geometry: str
    layers: int | None  # None: as published
    skew: float = 0.0
    seed: int = 0
    mtp: bool = False  # with a layer more, that drafts

    @property
    def config(self) -> Any:
        config = geometry_config(self.geometry, self.layers)
        if self.mtp:
            config.get_text_config().num_mtp_layers = 1
        return config


def generate(
    folder: Path, model: GeneratedModel, *, gguf: Sequence[str] = (), formats: Sequence[str] = (), quiet: bool = False
) -> Subject:
    """Writes it, and its GGUF twins with experts of the types `gguf`, unless they exist. Checks that the disk also has room to
    pack `formats`.

    Raises InputError for a folder that cannot be used, ConfigError for a disk that cannot hold all of it.
    """
    config, geometry, skew, seed = model.config, model.geometry, model.skew, model.seed
    layers = config.get_text_config().num_hidden_layers
    target = folder / f"{geometry}-{layers}-layers{'-mtp' * model.mtp}-skew-{skew:g}-seed-{seed}"
    models = {target: "raw", **{_twin(target, kind): kind for kind in gguf}}
    stores = {index_path(_store(target), Format(format)): format for format in formats}
    if missing := {path: kind for path, kind in {**models, **stores}.items() if not path.exists()}:
        refuse_unusable(folder)
        with sketch(model) as planned:
            expert_bytes = sum(planned.expert_share(kind) * planned.expert_bytes for kind in missing.values())
            backbones = (planned.weights_bytes - planned.expert_bytes) * len(models.keys() & missing.keys())
            refuse_small_disk(folder, int(expert_bytes) + backbones)
    made = {"geometry": geometry, "layers": layers, "skew": skew, "seed": seed}
    try:
        written = write_checkpoint(
            config, model_class_of(geometry), target, skew=skew, seed=seed, mtp=model.mtp, progress=not quiet
        )
        if not written.reused:
            shutil.rmtree(_store(target), ignore_errors=True)  # made from files that no longer exist
        subject = subject_of(str(target), None, None, {**made, "total_bytes": written.total_bytes})
        for experts in gguf:
            gguf_of(subject, experts, quiet=quiet)
    except OSError as error:
        raise InputError(f"{target}: {error.strerror or error}. Fix: name another folder with --folder DIR") from error
    return subject


@dataclass(frozen=True)
class Store:
    """The packed experts of a generated subject in one format."""

    format: str
    stored_bytes: int
    bits_per_weight: float
    packed_s: float | None  # None: it existed already


def store_folder(subject: Subject) -> Path:
    """The folder for packed experts of a generated subject: not its own folder, where every contestant would find them."""
    return _store(Path(subject.name))


def packed(subject: Subject, formats: Sequence[str], *, quiet: bool = False) -> list[Store]:
    """Pack the experts of a generated subject in `formats`, unless they are packed. Integer formats are rounded to nearest: that
    is many times as fast as fitting, gives as many bytes, and random weights have no quality to lose."""
    source, transposed = experts_in_place(subject.name, with_mtp=True)
    found = []
    try:
        for format in formats:
            began_s = time.perf_counter()
            with tqdm(total=subject.inventory.total_bytes, unit="B", unit_scale=True, desc=format, disable=quiet) as bar:
                contents = contents_of(source, Format(format), transposed)
                codecs = (replace(codec, nearest=True) if isinstance(codec, Affine) else codec for codec in contents.codecs)
                vars(contents)["codecs"] = tuple(codecs)  # replaces the cached property
                made = pack(source, store_folder(subject), contents, on_bytes=lambda done: bar.update(done - bar.n))
            bits = subject.weight_bits * made.stored_bytes / subject.expert_bytes
            seconds = None if made.resumed_records else time.perf_counter() - began_s
            found.append(Store(format, made.stored_bytes, bits, seconds))
    finally:
        source.close()
    return found


def refuse_unusable(folder: Path) -> None:
    """Raises InputError unless files can be created in `folder`, which is created if missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"--folder {folder} cannot be used: {error.strerror}. Fix: name a writable folder") from error


@contextlib.contextmanager
def sketch(model: GeneratedModel) -> Iterator[Subject]:
    """A generated subject before it is written, in a folder that has only its configuration."""
    with tempfile.TemporaryDirectory(prefix="vismoe-bench-") as folder:
        model.config.save_pretrained(folder)
        yield _subject(folder, None, None, {"geometry": model.geometry, "layers": model.layers})


def subject_of(name: str, revision: str | None, dtype: str | None, made: dict[str, Any] | None = None) -> Subject:
    """The facts known before loading. Raises InputError for a hub model whose weights are not on this machine."""
    subject = _subject(name, revision, dtype, made)
    if not subject.files:
        raise InputError(f"{name}: the weights are not on this machine. Fix: download the model first (hf download {name})")
    return subject


def _subject(name: str, revision: str | None, dtype: str | None, made: dict[str, Any] | None) -> Subject:
    model, files = describe(name, revision=revision, dtype=dtype or "auto")
    plain = str(model.dtype).removeprefix("torch.")
    inventory = inventory_of(model, model.dtype)
    return Subject(name, revision, model.config, plain, tuple(files), inventory, backbone_bytes(model), made)


def _twin(folder: Path, experts: str) -> Path:
    return folder.with_name(folder.name + ("" if experts == "bf16" else f".{experts}") + ".gguf")


def _store(folder: Path) -> Path:
    return folder.with_name(folder.name + ".store")


def gguf_file(subject: Subject, experts: str = "bf16") -> Path:
    """The file for the GGUF twin of a generated subject with experts of this type.

    Raises ConfigError for other models, which their users must convert, and for models that cannot be converted.
    """
    if subject.random_weights is None and not (Path(subject.name) / MANIFEST).exists():
        raise ConfigError(f"llama.cpp needs the weights of {subject.name} as GGUF. Fix: --gguf FILE, in {subject.dtype}")
    if reason := gguf_refusal(subject.config):
        raise ConfigError(f"llama.cpp cannot run {subject.config.model_type}: {reason}. Fix: leave it out of --baseline")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("the baseline llama.cpp needs the package gguf. Fix: pip install 'vismoe[bench]'")
    return _twin(Path(subject.name), experts)


def gguf_of(subject: Subject, experts: str = "bf16", *, quiet: bool = False) -> Path:
    """The GGUF twin of a generated subject; written unless it exists and is as new as the weights."""
    file, manifest = gguf_file(subject, experts), Path(subject.name) / MANIFEST
    if not file.exists() or file.stat().st_mtime < manifest.stat().st_mtime:
        write_gguf(subject.name, file, experts=experts, progress=not quiet)
    return file


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says about its model."""

    precision: str  # of its matrices, under torch's name if it has one; if types differ, the smallest
    tensor_bytes: int
    blocks: int
    experts: int
    vocabulary: int

    @classmethod
    def read(cls, file: Path, dtype: str) -> "GgufFile":
        """`precision` is `dtype` only if every matrix has it. Raises InputError for a file that is not a GGUF file."""
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
                f"{file} is not a readable GGUF file of a mixture of experts: {why}. Fix: name another file with --gguf"
            ) from error
        matrices = [tensor for tensor in reader.tensors if not is_float32(tensor.name, len(tensor.shape))]
        kinds = {GGUF_NAMES.get(tensor.tensor_type.name, tensor.tensor_type.name.lower()) for tensor in matrices}
        others = sorted(kinds - {dtype})
        tensor_bytes = sum(int(tensor.n_bytes) for tensor in reader.tensors)
        return cls(" and ".join(others) or dtype, tensor_bytes, blocks, experts, vocabulary)

    def difference(self, subject: Subject) -> str | None:
        """Why the file is not the subject's model; None if it may be. Types are compared elsewhere."""
        text, layers = subject.config.get_text_config(), subject.inventory.layers
        wanted = {"blocks": text.num_hidden_layers, "experts": layers[0].num_experts, "vocabulary": text.vocab_size}
        for name, value in wanted.items():
            if getattr(self, name) != value:
                return f"{name}: {getattr(self, name)}, but the model has {value}"
        if self.precision == subject.dtype and abs(self.tensor_bytes / subject.language_bytes - 1) > SAME_SIZE:
            wanted_bytes = format_bytes(subject.language_bytes)
            return f"{format_bytes(self.tensor_bytes)} of tensors, but the model has {wanted_bytes} without its encoders"
        return None


def clean(folder: Path) -> tuple[list[Path], int]:
    """Delete the files of benchmarks in `folder`, and nothing else; returns (deleted paths, bytes).

    These are generated checkpoints and their GGUF files, finished or not, and offload folders of processes that have ended.
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
