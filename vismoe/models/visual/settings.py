"""What a loaded model does with visual tokens: the settings of pruning, and where in the depth of the model it acts."""

from typing import Any

from vismoe.config import Settings
from vismoe.errors import ConfigError
from vismoe.lookahead.calibration import Calibration
from vismoe.models.visual.prune import VisualPruner
from vismoe.types import ExpertInventory
from vismoe.vision.selection import Pruning

__all__ = ["UNCALIBRATED_SELECTION", "attach_pruner", "default_prune_layer", "fewer_experts", "joined_layers", "pruning_of"]

UNCALIBRATED_SELECTION = "affinity"  # the paper's own
UNCALIBRATED_DEPTH = 1 / 6  # of the decoder layers see all tokens: 8 of 48, where the paper pins 8 to 12


def pruning_of(settings: Settings, calibrated: str | None) -> Pruning:
    """What the settings say about dropping visual tokens; `calibrated`: the selection that calibration found."""
    return Pruning(
        keep=settings.keep,
        selection=settings.selection if settings.selection != "auto" else calibrated or UNCALIBRATED_SELECTION,
        core_share=settings.core_share,
        expansion_weight=settings.expansion_weight,
    )


def joined_layers(config: Any) -> int:
    """How many of the first decoder layers have visual features added to their output (deepstack); 0 in most families."""
    return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def default_prune_layer(config: Any) -> int:
    """The first decoder layer that sees kept tokens only, where nobody calibrated: behind the last that visual features join."""
    layers = config.get_text_config().num_hidden_layers
    return max(1, joined_layers(config), round(layers * UNCALIBRATED_DEPTH))


def fewer_experts(settings: Settings, inventory: ExpertInventory) -> int | None:
    """Experts of a visual token in prefill; None: as many as the router chose. Raises ConfigError for more than that."""
    most = max(layer.top_k for layer in inventory.layers)
    if settings.visual_top_k is not None and settings.visual_top_k > most:
        raise ConfigError(
            f"visual_top_k={settings.visual_top_k}: a token of this model uses {most} experts. "
            f"Fix: visual_top_k={most - 1} or less"
        )
    return settings.visual_top_k


def attach_pruner(model: Any, settings: Settings, calibration: Calibration | None) -> tuple[VisualPruner | None, str]:
    """(the pruner of a loaded model, a sentence about it). `pruner.pruning` is what holds where a request says nothing else.

    Raises ConfigError where tokens shall be dropped and cannot be.
    """
    calibrated = (calibration.prune_layer, calibration.selection) if calibration is not None else (None, None)
    if settings.prune_layer != "auto":
        layer = int(settings.prune_layer)
    else:
        layer = default_prune_layer(model.config) if calibrated[0] is None else calibrated[0]
    pruner = VisualPruner.of(model, layer)
    if isinstance(pruner, str):
        if settings.keep < 1:
            raise ConfigError(f"keep={settings.keep}: {pruner}. Fix: keep=1 (leave --keep out)")
        return None, pruner
    pruner.pruning = pruning_of(settings, calibrated[1])
    began = "" if pruner.prune_layer == layer else f"; {layer} was meant, and has linear attention"
    begins = f"from decoder layer {pruner.prune_layer} on ({_why(settings.prune_layer, calibrated[0])}{began})"
    selection = f"selection {pruner.pruning.selection} ({_why(settings.selection, calibrated[1])})"
    return pruner, f"keep {settings.keep:g} {begins}; {selection}; saliency: {pruner.images.saliency.source}"


def _why(setting: int | str, calibrated: int | str | None) -> str:
    return "asked for" if setting != "auto" else "not calibrated" if calibrated is None else "calibrated"
