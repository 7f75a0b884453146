"""The result of `vismoe calibrate` for one model, in a folder `vismoe-calibration` beside its checkpoint.

`calibration.json` identifies the model by its shape and a digest of its routers' weights; it says from which layer on visual
tokens can be dropped and which are best kept, how many layers are worth pinning, which lookahead was best, and what drafts are
like. `predictor.safetensors` (network.py) is the trained lookahead. A calibration of another model, or of other weights, is
refused. Files are replaced as a whole, the JSON last; it names the predictor's content, so that the JSON of one run is never used
with the predictor of another.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import nn

from vismoe.config import NO_CALIBRATION, Settings
from vismoe.errors import CheckpointError, ConfigError
from vismoe.lookahead.network import Folded, load, predictor_bytes, save_folded
from vismoe.speculate.worth import DraftCurves
from vismoe.store.whole import write_whole
from vismoe.types import ExpertInventory
from vismoe.vision.selection import SELECTIONS

FOLDER = "vismoe-calibration"
JSON, PREDICTOR = "calibration.json", "predictor.safetensors"
FORMAT, VERSION = "vismoe-calibration", 1

Winner = Literal["none", "gate", "learned"]


@dataclass(frozen=True)
class RoutingShape:
    """The shape of a model's routing."""

    layers: int
    experts: int  # of the largest layer
    top_k: int
    hidden: int


@dataclass(frozen=True)
class Calibration:
    """The content of `calibration.json`; `folder` contains it."""

    folder: Path
    model: str
    routers: str  # digest of the routers' weights
    geometry: RoutingShape
    lookahead: Winner  # the best one in virtual time
    prune_layer: int | None = None  # None: visual tokens cannot be dropped
    selection: str | None = None  # the selection of kept visual tokens that costs answers least; None: not measured
    pinned_layers: dict[str, int] = field(default_factory=dict)  # best number, by the share of the experts in memory
    least_probability: float = 0.0  # least probability of an expert that the learned lookahead predicts in decode
    gamma: float = 0.8
    has_predictor: bool = False
    predictor: str | None = None  # SHA-256 of its file
    drafts: DraftCurves | None = None  # by which a draft pool is weighed; None: not measured
    figures: dict[str, Any] = field(default_factory=dict)  # measured values, for people

    @classmethod
    def find(cls, checkpoint: str | Path, settings: Settings) -> Self | None:
        """The calibration that the settings select for a checkpoint's folder; None if there is none or none is wanted.

        Raises ConfigError if the named one does not exist, or if there is none and `lookahead="learned"` needs it.
        """
        if settings.calibration == NO_CALIBRATION:
            found = None
        elif settings.calibration is not None:
            found = cls.read(Path(settings.calibration).expanduser())
            if found is None:
                raise ConfigError(
                    f"calibration={settings.calibration!r}: that folder has no {JSON}. Fix: vismoe calibrate MODEL "
                    f"--out {settings.calibration}, another folder, or calibration={NO_CALIBRATION!r}"
                )
        else:
            found = cls.read(Path(checkpoint) / FOLDER)
        if settings.lookahead == "learned" and (found is None or not found.has_predictor):
            raise ConfigError(
                "lookahead='learned' needs a predictor, but this model has none. "
                "Fix: vismoe calibrate MODEL --data FOLDER, or lookahead='gate'"
            )
        return found

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The calibration in a folder; None if there is none. Raises CheckpointError for a damaged or newer one."""
        path = folder / JSON
        if not path.exists():
            return None
        try:
            said = json.loads(path.read_text())
            if said.pop("format") != FORMAT:
                raise ValueError(f"not marked {FORMAT}")
            if (version := said.pop("version")) > VERSION:
                raise CheckpointError(f"{path} has version {version}, but this vismoe reads up to {VERSION}. Fix: update vismoe")
            drafts = DraftCurves.from_json(said["drafts"]) if said.get("drafts") else None
            _refuse_wrong(found := cls(folder, **{**said, "geometry": RoutingShape(**said["geometry"]), "drafts": drafts}))
            return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}). Fix: run vismoe calibrate again, or delete {folder}") from error

    def save(self, networks: dict[str, Folded]) -> None:
        """Writes both files into `folder`; raises ConfigError if that fails."""
        said = {name: value for name, value in asdict(self).items() if name != "folder"}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if networks:
                content = save_folded(networks)
                said["predictor"] = hashlib.sha256(content).hexdigest()
                write_whole(self.folder / PREDICTOR, content)
            write_whole(self.folder / JSON, json.dumps({"format": FORMAT, "version": VERSION, **said}, indent=1).encode() + b"\n")
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot be written: {error.strerror}. Fix: free some space, or name another folder "
                "with --out and load with --calibration FOLDER"
            ) from error

    def networks(self) -> dict[str, Folded]:
        """The predictor's networks; raises CheckpointError if its file is missing, damaged, or not the one saved with this
        JSON."""
        path = self.folder / PREDICTOR
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Fix: run vismoe calibrate again") from error
        if found != self.predictor:
            raise CheckpointError(
                f"{path} is not the predictor that {JSON} beside it was saved with: its SHA-256 is {found}, "
                f"not {self.predictor}. Fix: run vismoe calibrate again"
            )
        return load(path)

    def refuse_others(self, model: nn.Module, inventory: ExpertInventory, hidden: int) -> None:
        """Raises ConfigError if this calibration was made for another model."""
        geometry = geometry_of(inventory, hidden)
        again = f"Fix: vismoe calibrate again, or load with calibration={NO_CALIBRATION!r} (--calibration {NO_CALIBRATION})"
        if geometry != self.geometry:
            raise ConfigError(
                f"the calibration in {self.folder} is for {self.model} with {self.geometry}, this model has {geometry}. {again}"
            )
        if router_digest(model, inventory) != self.routers:
            raise ConfigError(
                f"the calibration in {self.folder} was made for {self.model} with other router weights: "
                f"its predictions are not valid here. {again}"
            )


def predictor_memory_bytes(calibration: Calibration | None, settings: Settings) -> int:
    """Memory of the predictor that these settings load, from its header alone; part of the plan."""
    if calibration is None or not calibration.has_predictor or chosen_lookahead(calibration, settings) != "learned":
        return 0
    return predictor_bytes(calibration.folder / PREDICTOR)


def chosen_lookahead(calibration: Calibration | None, settings: Settings) -> Literal["none", "gate", "learned"]:
    """The lookahead that `auto` selects: the one that was best in calibration, or `gate` without a calibration."""
    if settings.lookahead != "auto":
        return settings.lookahead
    return "gate" if calibration is None else calibration.lookahead


def geometry_of(inventory: ExpertInventory, hidden: int) -> RoutingShape:
    layers = inventory.layers
    return RoutingShape(len(layers), max(layer.num_experts for layer in layers), max(layer.top_k for layer in layers), hidden)


def router_digest(model: nn.Module, inventory: ExpertInventory) -> str:
    """SHA-256 over the routing weights: in each MoE block, every parameter and buffer with a dimension of the number of experts,
    except the experts themselves. The digest does not depend on the dtype of the loaded model: values are rounded to bfloat16,
    and set to 0 below float16's normal numbers, which float16 rounds.
    """
    digest = hashlib.sha256()
    for layer in inventory.layers:
        block_path, _, experts = layer.path.rpartition(".")
        block = model.get_submodule(block_path)
        for name, tensor in sorted((*block.named_parameters(), *block.named_buffers())):
            if layer.num_experts in tensor.shape and not name.startswith(f"{experts}."):
                values = tensor.detach().to("cpu", torch.float32)
                tiny = values.abs() < torch.finfo(torch.float16).tiny
                rounded = values.masked_fill(tiny, 0.0).to(torch.bfloat16).contiguous()
                digest.update(
                    f"{layer.index} {name} {tuple(tensor.shape)}".encode() + rounded.view(torch.uint8).numpy().tobytes()
                )
    return digest.hexdigest()


def _refuse_wrong(said: Calibration) -> None:
    """Raises ValueError or TypeError for values that no calibration has."""
    right = {
        "model": isinstance(said.model, str),
        "routers": isinstance(said.routers, str),
        "lookahead": said.lookahead in get_args(Winner) and (said.has_predictor or said.lookahead != "learned"),
        "prune_layer": said.prune_layer is None or (_whole(said.prune_layer) and said.prune_layer >= 1),
        "selection": said.selection is None or said.selection in SELECTIONS,
        "pinned_layers": all(_percentage(share) and _whole(count) for share, count in said.pinned_layers.items()),
        "least_probability": 0 <= said.least_probability <= 1,
        "gamma": 0 < said.gamma <= 1,
        "has_predictor": isinstance(said.has_predictor, bool),
        "predictor": isinstance(said.predictor, str | None),
    }
    if wrong := [name for name, is_right in right.items() if not is_right]:
        raise ValueError(f"invalid values: {', '.join(f'{name}={getattr(said, name)!r}' for name in wrong)}")


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _percentage(text: str) -> bool:
    return text.endswith("%") and 0 < float(text[:-1]) <= 100
