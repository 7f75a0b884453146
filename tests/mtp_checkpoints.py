"""Tiny checkpoints that have the layer which drafts (multi-token prediction), in the layouts of their publishers."""

import json
import shutil
from pathlib import Path

import tiny_models
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

MELLUM = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}


def save(family: str, folder: Path, dtype: torch.dtype = torch.float32, with_layer: bool = True) -> Path:
    """A checkpoint whose config.json speaks of the layer; its weights are there `with_layer`."""
    model = tiny_models.build(family)
    model.to(dtype).save_pretrained(folder)
    add(folder, model, family, with_layer)
    return folder


def demo(folder: Path) -> Path:
    """The bundled model with such a layer of random weights."""
    from transformers import Qwen3VLMoeForConditionalGeneration

    bundled = tiny_models.DEMO
    shutil.copytree(bundled, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("vismoe-*"))
    add(folder, Qwen3VLMoeForConditionalGeneration.from_pretrained(bundled, dtype=torch.bfloat16), "demo")
    return folder


def add(folder: Path, model, family: str, with_layer: bool = True) -> None:
    text = model.config.get_text_config()
    text.num_mtp_layers = 1
    if family == "mellum":
        text.mtp_layer_types, text.mtp_mlp_layer_types = ["sliding_attention"], ["sparse"]
    config = json.loads((folder / "config.json").read_text())
    of_text = config.get("text_config", config)
    if family == "mellum":
        of_text |= {"mtp_layer_types": text.mtp_layer_types, "mtp_mlp_layer_types": text.mtp_mlp_layer_types}
    of_text["num_mtp_layers" if family == "demo" else "num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    if not with_layer:
        return
    torch.manual_seed(1)
    made = MtpModel(model, 1)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, tensor in made.layers[0].to(model.dtype).state_dict().items():
        values = torch.randn(tensor.shape) * 0.1 + (1.0 if "norm" in name else 0.0)
        weights |= _as_published(name, values.to(tensor.dtype), family, text.num_hidden_layers)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file, metadata={"format": "pt"})


def _as_published(name: str, tensor: torch.Tensor, family: str, layers: int) -> dict[str, torch.Tensor]:
    own = name.split(".")[0]
    if family in ("mellum", "demo"):
        place = f"mtp.{MELLUM[own]}.weight" if family == "mellum" and own in MELLUM else f"mtp.layers.0.{name}"
    else:
        place = f"model.layers.{layers}.{name.replace('post_norm', 'shared_head.norm')}"
    place = place.replace(".mtp_block.", ".")
    stem, _, matrix = place.rpartition(".")
    if matrix not in ("gate_up_proj", "down_proj") or family == "demo":
        return {place: tensor}
    halves = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
    return {
        f"{stem}.{expert}.{half}.weight": part
        for expert, whole in enumerate(tensor)
        for half, part in zip(halves, whole.chunk(len(halves)), strict=True)
    }
