"""A model out of a GGUF file: experts and encoded weights are read as in any checkpoint, others when the loader asks for them.

`from_pretrained` is given a state dict that is empty at first. Once the model is on the meta device, the quantizer's hook fills
it with a `Stored` for each parameter that is left; the loader then casts, places and reports as for any checkpoint.
Configuration, tokenizer and processor are those of the model's repository or folder, which needs no weights.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedConfig

from vismoe.config import Settings
from vismoe.errors import CheckpointError, ConfigError, UnsupportedModelError, VisMoEError
from vismoe.models.family.checkpoint_files import config_file, read_json
from vismoe.models.family.components import tied_weights
from vismoe.models.family.gguf_names import ARCHITECTURES, TOWERS, is_vision, source_of
from vismoe.models.load.gguf_tensors import GgufTensors, refuse_other_architecture
from vismoe.models.load.locate import parameter_types
from vismoe.store.files import CheckpointFiles, OpenFiles
from vismoe.store.gguf_header import GGUF
from vismoe.store.safetensors_header import refuse_changed
from vismoe.store.tensor_reads import read_restored
from vismoe.store.tensors import EncodedTensor, TensorPart

REPOSITORY = re.compile(r"(?:https?://huggingface\.co/)?(?P<name>[\w.-]+/[\w.-]+?)(?:\.git)?/?")
NAMED = ("general.source.huggingface.repository", "general.source.repo_url", "general.repo_url")  # then the base models
MOST_REPOSITORIES = 8  # that are looked for
FIX = "vismoe chat MODEL --gguf FILE"
_LOADING: ContextVar["GgufWeights | None"] = ContextVar("gguf weights that a model is loaded from", default=None)


class Stored:
    """A tensor of a model as transformers' loader expects those of safetensors files: it is read and restored when indexed."""

    def __init__(
        self,
        files: OpenFiles,
        parts: list[TensorPart | EncodedTensor],
        dtype: torch.dtype,
        make: Callable[..., torch.Tensor] | None,
        failed: list[VisMoEError],
    ):
        self._files, self._parts, self._dtype, self._make, self._failed = files, parts, dtype, make, failed

    def get_shape(self) -> list[int]:
        return list(self._parts[0].shape)

    def get_dtype(self) -> str:
        return "F32"  # a floating-point type; the loader asks for no more

    def __getitem__(self, index: Any) -> torch.Tensor:
        assert index is ..., index
        try:
            if self._make is None:
                return read_restored(self._files, self._parts[0], self._dtype)
            return self._make(*(read_restored(self._files, part, torch.float32) for part in self._parts)).to(self._dtype)
        except VisMoEError as error:  # the loader only collects it
            self._failed.append(error)
            raise


class GgufWeights:
    """What a model is loaded from: a GGUF file, and for its vision tower an mmproj file or safetensors files of the model."""

    def __init__(self, name: str, config: PreTrainedConfig, settings: Settings, safetensors: list[Path]):
        """`safetensors`: the weight files of the model's folder or repository, if they are there. Raises CheckpointError,
        UnsupportedModelError or ConfigError."""
        assert settings.gguf is not None
        self.name, self.config = name, config
        self._failed: list[VisMoEError] = []
        self.state: dict[str, Any] = {}  # parameter -> Stored, for transformers' loader
        self._text = GgufTensors.open(settings.gguf)
        refuse_other_architecture(self._text, config.model_type)
        self._vision = GgufTensors.open(settings.mmproj) if settings.mmproj else None
        self._safetensors = safetensors
        if self._vision is not None:
            _refuse_other_tower(self._vision, config.model_type)
        files = [tensors for tensors in (self._text, self._vision) if tensors is not None]
        self._files = {id(tensors): CheckpointFiles(tensors.headers) for tensors in files}

    @contextlib.contextmanager
    def loading(self) -> Iterator[dict[str, Any]]:
        """Within, a model that `from_pretrained` makes is filled with these weights; gives the state dict that it wants."""
        before = _LOADING.set(self)
        try:
            with contextlib.ExitStack() as self._open:
                yield self.state
            for files in (self._text, self._vision):
                refuse_changed(files.headers if files else (), "loaded", "load the model again, when no program writes to it")
        except Exception as error:
            if self._failed:
                raise self._failed[0] from error
            raise
        finally:
            _LOADING.reset(before)
            for opened in self._files.values():
                opened.close()

    def fill(self, model: Any, past_cache: bool, threads: int) -> None:
        """For a model on the meta device without its experts; how its weights are read is said to
        `CheckpointFiles.for_loading`. Raises CheckpointError for a tensor that is missing or has another
        shape, UnsupportedModelError for a type that is not read."""
        type_of = parameter_types(model, model.dtype)
        tied = tied_weights(model)
        has_tower = any(is_vision(name) for name, _ in model.named_parameters())
        beside = self._beside() if has_tower and self._vision is None else {}
        opened = {key: files.for_loading(past_cache, threads) for key, files in self._files.items()}
        for name, parameter in model.named_parameters():
            if is_vision(name) and self._vision is None:
                if name not in beside:
                    raise CheckpointError(
                        f"{self._text.path} holds the language model, and safetensors files with the vision tower of {self.name} "
                        f"({name}) are not here. Fix: vismoe chat MODEL --gguf FILE --mmproj FILE, with the mmproj file that "
                        "belongs to it"
                    )
                self.state[name] = beside[name]
                continue
            tensors = self._vision if is_vision(name) and self._vision is not None else self._text
            source = source_of(name, self.config, tensors)
            if source is None:
                raise UnsupportedModelError(
                    f"{self.config.model_type}: how GGUF files call {name} is not known. "
                    "Instead: a safetensors checkpoint of the model"
                )
            if name in tied and source.names[0] not in tensors:
                continue
            found = [tensors[part] for part in source.names]
            if source.make is None and found[0].shape != tuple(parameter.shape):
                raise CheckpointError(
                    f"{tensors.path}: {source.names[0]} has shape {found[0].shape}, the model wants {tuple(parameter.shape)}. "
                    "Fix: name the model that this file was made of"
                )
            self.state[name] = Stored(opened[id(tensors)], found, type_of(name), source.make, self._failed)

    def _beside(self) -> dict[str, Any]:
        """The vision tower in the model's safetensors files, by the names of its parameters."""
        found = {}
        for path in self._safetensors:
            file = self._open.enter_context(safe_open(path, framework="pt"))
            for name in filter(is_vision, file.keys()):
                stored = file.get_slice(name).get_dtype()
                if stored not in ("BF16", "F16", "F32"):
                    raise UnsupportedModelError(
                        f"{path}: {name} is stored as {stored}, and beside a GGUF file vision towers are read in 16 or 32 bits. "
                        "Instead: --mmproj FILE, with the mmproj file that belongs to the GGUF file"
                    )
                found[f"model.{name.removeprefix('model.')}"] = file.get_slice(name)
        return found


def load_gguf(weights: GgufWeights, kind: type[Any], dtype: torch.dtype, revision: str | None, **options: Any) -> Any:
    """What `kind.from_pretrained` gives for these weights and `options`."""
    try:
        generation = GenerationConfig.from_pretrained(weights.name, revision=revision or "main")
    except OSError:  # the repository has none
        generation = None
    with weights.loading() as state:
        return kind.from_pretrained(
            None, config=weights.config, state_dict=state, dtype=dtype, generation_config=generation, **options
        )


def loaded_weights() -> GgufWeights | None:
    """The weights of the GGUF file that the running `from_pretrained` is to read; None for a checkpoint of its own."""
    return _LOADING.get()


def _refuse_other_tower(tensors: GgufTensors, model_type: str) -> None:
    said = tensors.metadata.get("clip.projector_type", tensors.metadata.get("clip.vision.projector_type"))
    wanted = TOWERS.get(model_type)
    if wanted is None:
        raise UnsupportedModelError(
            f"{model_type}: its mmproj files are not read (those of {', '.join(sorted(TOWERS))} are). "
            "Instead: leave out --mmproj and download the safetensors weights of the model"
        )
    if said != wanted:
        raise CheckpointError(
            f"{tensors.path} is not the vision tower of a {model_type}: its clip.projector_type is {said!r:.60}, not {wanted!r}. "
            "Fix: --mmproj with the mmproj file that belongs to the model, --gguf with that of the language model"
        )


def with_gguf(model: str | Path | None, settings: Settings) -> tuple[str | Path | None, Settings]:
    """(the model whose configuration and tokenizer are used, settings that name the GGUF file): without a model, or with a
    `.gguf` file in its place, the one that the file names. Raises ConfigError or CheckpointError."""
    gguf, mmproj = (str(Path(file).expanduser()) if file else None for file in (settings.gguf, settings.mmproj))
    if isinstance(model, str | Path) and str(model).endswith(GGUF):
        if gguf is not None:
            raise ConfigError(f"two GGUF files: {model} as the model, and gguf={gguf!r}. Fix: {FIX}, with the model's name")
        gguf, model = str(Path(model).expanduser()), None
    if gguf is None:
        if mmproj is not None:
            raise ConfigError(f"mmproj={mmproj!r}: a vision tower belongs to a language model in GGUF. Fix: {FIX} --mmproj FILE")
        return model, settings
    if settings.backbone != "own":
        raise ConfigError(
            f"backbone={settings.backbone!r}: the linear layers of a GGUF file are computed in the types that they have there. "
            "Fix: leave out --backbone, or take a file with other types, e.g. Q8_0"
        )
    return model if model is not None else _named_in(Path(gguf)), dataclasses.replace(settings, gguf=gguf, mmproj=mmproj)


def _named_in(path: Path) -> str:
    """The folder around a GGUF file if it is that of its model, else the first such repository that the file names."""
    metadata = GgufTensors.open(path).metadata
    architecture = metadata.get("general.architecture")
    bases = metadata.get("general.base_model.count", 0)
    keys = (*NAMED, *(f"general.base_model.{number}.repo_url" for number in range(bases if type(bases) is int else 0)))
    matches = [REPOSITORY.fullmatch(str(metadata.get(key, ""))) for key in keys[:MOST_REPOSITORIES]]
    repositories = [match["name"] for match in matches if match is not None]
    folder = [str(path.parent)] if (path.parent / "config.json").is_file() else []
    for candidate in (*folder, *repositories):
        with contextlib.suppress(VisMoEError):  # not there, not reachable
            if ARCHITECTURES.get(read_json(config_file(candidate, None)).get("model_type", "")) == architecture:
                return candidate
    said = f"{', '.join(repositories)} could not be read or is another model" if repositories else "the file does not name it"
    raise CheckpointError(
        f"{path} needs the configuration and the tokenizer of its model, and {said}. "
        f"Fix: name the model: vismoe chat MODEL --gguf {path}"
    )
