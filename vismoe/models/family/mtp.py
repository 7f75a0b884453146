"""The layer that publishers train to say the token after the next one (multi-token prediction, DeepSeek-V3 section 2.2).

It lies in the checkpoint behind the decoder's last layer, and transformers loads a model without it. `add_mtp` hangs it on a
model on the meta device as `mtp.layers.0`, so that its experts are one more MoE layer, located, planned and paged as all others
are, and the rest of it is loaded beside them. The module is transformers' own `MtpLayer`, which is a decoder layer of the family
behind a projection; embeddings and head are the model's. A checkpoint with several such layers drafts with the first one.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import cache_utils, modeling_layers

from vismoe.errors import UnsupportedModelError
from vismoe.models.family.components import pass_over
from vismoe.types import ExpertInventory

PLACE = "mtp"  # where it hangs on the model
MtpModel = getattr(modeling_layers, "MtpModel", None)
if not hasattr(MtpModel, "forward_layer") or not hasattr(MtpModel, "get_weight_conversions"):
    MtpModel = None  # before transformers 5.23 it runs in one piece, or is not there
INSTEAD = "Fix: draft='ngram' (--draft ngram), which needs nothing of a model"


@dataclass(frozen=True, eq=False)
class Mtp:
    """What a model with such a layer has beside its modules. `model`: transformers' `MtpModel`, with one layer."""

    model: Any
    keys: re.Pattern[str]  # of the layer's tensors in a checkpoint


def add_mtp(model: Any, gguf: str | Path | None = None) -> None:
    """Before anything inspects the model's experts. Raises UnsupportedModelError where the family has no such layer, transformers
    none for it, or the weights come from a GGUF file."""
    if gguf is not None:
        raise UnsupportedModelError(f"draft='mtp': the layer that drafts is not read from GGUF files. {INSTEAD}")
    family, text = model.config.model_type, model.config.get_text_config()
    count = getattr(text, "num_mtp_layers", None)
    if not count:
        raise UnsupportedModelError(
            f"draft='mtp': {family} has no layer that predicts further tokens (num_mtp_layers in config.json). {INSTEAD}"
        )
    if MtpModel is None:
        raise UnsupportedModelError(
            f"draft='mtp' needs transformers 5.23 or newer, and this is {transformers.__version__}. "
            "Fix: pip install --upgrade transformers"
        )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        made = MtpModel(model, 1).eval()
    except (AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:  # of transformers' own code
        raise UnsupportedModelError(
            f"draft='mtp': transformers {transformers.__version__} does not make this layer for {family} "
            f"({type(error).__name__}: {error}). {INSTEAD}"
        ) from error
    finally:
        torch.set_default_dtype(usual)
    kinds = {type(layer).__name__ for layer in cache_utils.MtpCache(config=made.config).layers}
    if made.use_shared_post_norm or not kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"}:
        raise UnsupportedModelError(
            f"draft='mtp': the layer of {family} keeps more than keys and values, and cannot give up tokens. {INSTEAD}"
        )
    holder = nn.Module()
    holder.layers = made.layers
    model.add_module(PLACE, holder)
    keys = _keys(text)
    pass_over(model, [keys.pattern])
    model.__dict__["_vismoe_mtp"] = Mtp(made, keys)


def _keys(text: Any) -> re.Pattern[str]:
    """Of the layer's tensors in a checkpoint: behind the decoder's last layer, or in a place of their own."""
    return re.compile(rf"^(?!.*vis(ion|ual))(.*\.)?layers\.{text.num_hidden_layers}\.|^(model\.)?{PLACE}\.")


def mtp_of(model: Any) -> Mtp | None:
    """Of a model that `add_mtp` has changed."""
    return model.__dict__.get("_vismoe_mtp")


def of_mtp(name: str) -> bool:
    """Whether a parameter or module belongs to the layer."""
    return name.startswith(f"{PLACE}.")


def new_cache(mtp: Mtp) -> Any:
    """Empty, for keys and values of the layer."""
    return cache_utils.MtpCache(config=mtp.model.config)


def decoder_layers(inventory: ExpertInventory) -> ExpertInventory:
    """Without the layer: what lookaheads and calibrations know."""
    return replace(inventory, layers=tuple(layer for layer in inventory.layers if not of_mtp(layer.path)))
