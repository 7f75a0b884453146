"""Models for the simulator, by a published geometry's name, a folder with config.json, or a hub name; no weights are read."""

from typing import Any

import torch

from vismoe.bench.geometry import GEOMETRIES, geometry_config, model_class_of
from vismoe.config import Settings
from vismoe.models.family.families import refuse_unsupported
from vismoe.models.load.embeddings import table_bytes
from vismoe.models.load.preview import describe, stated_needs
from vismoe.models.moe.adapters import adapt
from vismoe.planning.needs import Footprint
from vismoe.simulate.predict import Described


def described(name: str, revision: str | None = None) -> Described:
    """The model of this name. What it needs is measured once for each group of settings that decides it."""
    known: dict[Any, tuple[Footprint, int]] = {}

    def needs(settings: Settings, device: str) -> tuple[Footprint, int]:
        kernels = "torch" if device == "cuda" else "auto"  # without that device, only torch's arithmetic can be planned
        settings = Settings.of(**{**vars(settings), "kernels": kernels, "memory": "auto", "eviction": "lfu"})
        key = settings, device
        if key not in known:
            model = _model(name, revision)
            found, *_ = stated_needs(model, settings, torch.device(device))
            known[key] = found, table_bytes(model)
        return known[key]

    return Described(name, needs)


def _model(name: str, revision: str | None) -> Any:
    """On the meta device."""
    if name not in GEOMETRIES:
        return describe(name, revision=revision)[0]
    with torch.device("meta"):
        model = model_class_of(name)._from_config(geometry_config(name), dtype=torch.bfloat16)
    adapt(model)
    refuse_unsupported(model)
    return model.eval()
