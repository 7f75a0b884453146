"""Checks a checkpoint's files before a library reads them: a file that does not fit raises a CheckpointError that names it.

Weights have their own checks (`vismoe.store.safetensors_header`, `locate`); this module checks configuration, index and
vocabulary. `reading_checkpoint` turns the remaining errors of libraries into the same form.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import cached_file

from vismoe.errors import BudgetError, CheckpointError, ConfigError, UnsupportedModelError, VisMoEError
from vismoe.models.family.families import expert_modules, top_k_of
from vismoe.ranges import PATH_BEGINNINGS, file_name, shown, unencodable

AGAIN = "download or copy the file again"
# Files that transformers reads beside config.json and the index; without those it cannot read it continues, with other answers.
JSON_FILES = (
    "generation_config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json",
)  # fmt: skip
TOKENIZER = "tokenizer.json"
ENDS_BYTES = 64
TYPED = ("image_token_id", "video_token_id")  # tokens that a chat template writes for a picture
PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")  # their embeddings are replaced, never looked up
LISTED = 3  # most names in an error


@contextlib.contextmanager
def reading_checkpoint(model: str | Path) -> Iterator[None]:
    """Within it, any exception that a library raises about the files of `model` becomes an error of this package."""
    try:
        yield
    except VisMoEError:
        raise
    except OSError as error:
        raise CheckpointError(f"{model} could not be loaded: {error}. Fix: check that all its files are present") from error
    except Exception as error:  # the boundary to foreign files and to the libraries that read them
        of_host = isinstance(error, RuntimeError) and "not enough memory" in str(error)  # from torch's allocator of host memory
        if of_host or isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise BudgetError(f"{model}: memory ran out while it was read: {first_line(error)}", "a smaller --memory") from error
        _refuse_broken(Path(model) / TOKENIZER)
        raise CheckpointError(
            f"{_config_of(str(model))} and the other files of the model do not match: {type(error).__name__}: "
            f"{first_line(error)}. Fix: check that all files are present and belong to one model, or download it again"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file with a JSON object. Raises CheckpointError."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}. Fix: check that it is a readable file"
        ) from error
    except (ValueError, RecursionError) as error:
        size = path.stat().st_size
        raise CheckpointError(f"{path} ({size} bytes) is not JSON: {first_line(error)}. Fix: {AGAIN}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object. Fix: {AGAIN}")
    return value


def _refuse_broken(path: Path) -> None:
    if path.is_file():
        read_json(path)


def check_json_files(folder: Path) -> None:
    """Raises CheckpointError for the first of a checkpoint's small files that is damaged or missing."""
    for name in JSON_FILES:
        _refuse_broken(folder / name)
    if (folder / TOKENIZER).is_file() and not _is_whole(folder / TOKENIZER):
        read_json(folder / TOKENIZER)


def _is_whole(path: Path) -> bool:
    """Whether a large JSON object has its beginning and end; the library checks the rest."""
    try:
        with open(path, "rb") as file:
            begin = file.read(ENDS_BYTES)
            file.seek(max(0, path.stat().st_size - ENDS_BYTES))
            return begin.lstrip().startswith(b"{") and file.read().rstrip().endswith(b"}")
    except OSError:
        return False


def demo_model() -> Path:
    """The small trained model that ships with the package."""
    here = Path(__file__).parents[2]  # the package
    for assets in (here / "assets", here.parent / "assets"):
        if (assets / "demo-model" / "config.json").is_file():
            return assets / "demo-model"
    raise CheckpointError("the bundled demo model is missing from this installation; reinstall vismoe, or name a model")


def folder_or_name(model: str | Path) -> Path:
    """The name of a model as a path. Raises ConfigError, and CheckpointError for a path without a folder."""
    try:
        if not isinstance(model, str | Path):
            raise ConfigError(f"a text or a path, not a {type(model).__name__}")
        if unencodable(str(model)):
            raise ConfigError(f"in UTF-8; {unencodable(str(model))}")
        path = file_name(model)
        is_folder = path.is_dir()  # raises OSError for a name that no file system allows
    except (ConfigError, OSError) as error:
        raise ConfigError(
            f"model={shown(model)}: expected the folder of a model or its name on the hub, {error}. "
            "Fix: e.g. Qwen/Qwen3-VL-30B-A3B-Instruct, or leave it out for the bundled demo model"
        ) from error
    if not is_folder and str(model).startswith(PATH_BEGINNINGS):  # skips the hub, which takes half a minute offline
        raise CheckpointError(f"{model} is neither a folder here nor a model's name on the hub. Fix: check the path")
    return path


def config_file(model: str | Path, revision: str | None) -> Path:
    """The configuration file of a folder or hub name. Raises CheckpointError, or ConfigError for an invalid name."""
    folder = folder_or_name(model)
    if revision is not None and (not isinstance(revision, str) or not revision):
        raise ConfigError(f"revision={shown(revision)}: not a branch, tag or commit of a hub model. Fix: leave it out for 'main'")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder} has no config.json: it is not the folder of a model. Fix: name the folder that holds it"
            )
        return folder / "config.json"
    try:
        found = cached_file(str(model), "config.json", revision=revision or "main")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{model} is neither a folder here nor a model that could be read from the hub: {first_line(error)}. "
            "Fix: check the name; offline, name a folder or download the model first"
        ) from error
    return Path(str(found))


def weight_files(index: Path) -> list[str]:
    """The names of the files that an index of weights lists. Raises CheckpointError."""
    said = read_json(index)
    weights = said.get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights.values()):
        what = "no weight_map" if weights is None else f"a weight_map that is {shown(weights)}"
        raise CheckpointError(f"{index} has {what}, but needs one that gives the file of each tensor. Fix: {AGAIN}")
    if not isinstance(said.get("metadata"), dict):
        raise CheckpointError(f"{index} has no metadata object beside its weight_map. Fix: {AGAIN}")
    names = sorted(set(weights.values()))
    foreign = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if foreign:
        raise CheckpointError(f"{index} names {shown(foreign[0])}, which is not a .safetensors file beside it. Fix: {AGAIN}")
    return names


def refuse_routing(model: nn.Module) -> None:
    """Raises CheckpointError for a configuration in which a token uses more experts than a layer has."""
    for path, module in expert_modules(model):
        experts = int(module.num_experts)  # type: ignore[arg-type]
        try:
            top_k = top_k_of(model, path)
        except UnsupportedModelError:
            continue  # reported where it is needed
        if top_k > experts:
            config = _config_of(getattr(model.config, "_name_or_path", ""))
            raise CheckpointError(
                f"{config}: a token uses {top_k} experts at {path}, but there are {experts}. Fix: set the number of experts per "
                f"token (num_experts_per_tok or its like) to at most {experts}, or use the config.json of these weights"
            )


def refuse_other_vocabulary(tokenizer: Any, config: Any, model: str) -> None:
    """Raises CheckpointError for a tokenizer with ids that have no embedding in the model."""
    rows = getattr(config.get_text_config(), "vocab_size", None)
    for name in TYPED:
        token = getattr(config, name, None)
        if token is not None and tokenizer.convert_ids_to_tokens(token) is None:
            raise CheckpointError(
                f"{_config_of(model)}: {name} is {token}, but the tokenizer has {len(tokenizer):,} ids. "
                "Fix: use the config.json and the tokenizer of these weights"
            )
    if not isinstance(rows, int):
        return
    replaced = {getattr(config, name, None) for name in PLACEHOLDERS}
    added = {number: str(token) for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    plain = getattr(tokenizer, "vocab_size", 0) - 1  # the last id of the base vocabulary, which counts from 0
    beyond = [number for number in (*sorted(added), plain) if number >= rows and number not in replaced]
    if beyond:
        folder = Path(model)
        raise CheckpointError(
            f"{folder / TOKENIZER if folder.is_dir() else model}: the tokenizer has the id {beyond[0]} "
            f"({shown(added.get(beyond[0], 'the last one'))}), but the model has embeddings for {rows:,} ids (vocab_size of "
            "config.json). Fix: use the config.json and the tokenizer of these weights"
        )


def refuse_unfit(found: dict[str, Any], model: str) -> None:
    """Raises CheckpointError for parameters that no file has, or has in another shape, since a library would invent their values.

    `found`: the loading report of `from_pretrained`.
    """
    for name, on_disk, wanted in sorted(found["mismatched_keys"], key=lambda unfit: str(unfit[0])):
        raise CheckpointError(
            f"{_config_of(model)}: {name} has the shape {tuple(wanted)} here, but {tuple(on_disk)} in the files of weights. "
            "Fix: use the config.json of these weights"
        )
    missing = sorted(found["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{model}: no file has the weights of {len(missing)} parameters, first {', '.join(missing[:LISTED])}. "
            "Fix: check that all files of the model are present and belong to its config.json"
        )


def _config_of(name: str) -> str:
    return str(Path(name) / "config.json") if name and Path(name).is_dir() else f"config.json of {name or 'this model'}"
