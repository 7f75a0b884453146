"""What a loaded model does with visual tokens: the pruning settings, and the layer at which pruning begins."""

from typing import Any

from vismoe.config import Settings
from vismoe.errors import ConfigError
from vismoe.lookahead.calibration import Calibration
from vismoe.models.visual.prune import VisualPruner
from vismoe.types import ExpertInventory
from vismoe.vision.selection import DEFAULT_SELECTION, Pruning

UNCALIBRATED_DEPTH = 1 / 6  # share of the decoder layers that see all tokens: 8 of 48; the paper pins 8 to 12


def pruning_of(settings: Settings, calibrated: str | None) -> Pruning:
    """The pruning of these settings; `calibrated`: the selection that calibration found."""
    return Pruning(
        keep=settings.keep,
        selection=settings.selection if settings.selection != "auto" else calibrated or DEFAULT_SELECTION,
        core_share=settings.core_share,
        expansion_weight=settings.expansion_weight,
    )


def joined_layers(config: Any) -> int:
    """The number of first decoder layers to whose output visual features are added (deepstack); 0 in most families."""
    return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def default_prune_layer(config: Any) -> int:
    """Without calibration, the first decoder layer that sees only kept tokens: after the last that visual features join."""
    layers = config.get_text_config().num_hidden_layers
    return max(1, joined_layers(config), round(layers * UNCALIBRATED_DEPTH))


def fewer_experts(settings: Settings, inventory: ExpertInventory) -> int | None:
    """Experts per visual token in prefill; None: as many as the router chose. Raises ConfigError for more than that."""
    most = max(layer.top_k for layer in inventory.layers)
    if settings.visual_top_k is not None and settings.visual_top_k > most:
        raise ConfigError(
            f"visual_top_k={settings.visual_top_k}: a token of this model uses {most} experts. "
            f"Fix: visual_top_k={most - 1} or less"
        )
    return settings.visual_top_k


def attach_pruner(model: Any, settings: Settings, calibration: Calibration | None) -> tuple[VisualPruner | None, str]:
    """(the pruner of a loaded model, a sentence about it). `pruner.pruning` applies if a request does not set its own.

    Raises ConfigError if the settings drop tokens and the model does not allow that.
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
    began = "" if pruner.prune_layer == layer else f"; layer {layer} has linear attention"
    begins = f"from decoder layer {pruner.prune_layer} on ({_why(settings.prune_layer, calibrated[0])}{began})"
    selection = f"selection {pruner.pruning.selection} ({_why(settings.selection, calibrated[1])})"
    return pruner, f"keep {settings.keep:g} {begins}; {selection}; saliency: {pruner.images.saliency.source}"


def _why(setting: int | str, calibrated: int | str | None) -> str:
    return "asked for" if setting != "auto" else "not calibrated" if calibrated is None else "calibrated"
