"""The larger model's beginning: the small demo model with more layers and more, narrower experts.

Experts are split as in DeepSeekMoE's fine-grained experts (arXiv 2401.06066) and upcycling with granularity (arXiv 2410.07524);
layers are added as identities, as in LLaMA Pro (arXiv 2401.02415). With SPLIT times as many choices per token the grown model
would compute the small one's function; it begins with half of that, and training does the rest.
"""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from .files import build_config

# The small model's layer that each layer begins with; where it repeats, the layer begins as the identity. The first three stay
# together, because deepstack adds visual features after each of them.
ORIGIN = (0, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 7, 7)
SPLIT = 4  # experts made of each
CHOICES = 8
ROUTER_NOISE = 0.3  # of a router's standard deviation, so that the parts of an expert go separate ways

LAYERS = "model.language_model.layers."


def grown_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLMoeConfig:
    """16 layers x 128 experts of 16 inner units, 8 chosen per token."""
    config = build_config(tokenizer).to_dict()
    text = config["text_config"]
    text |= {"num_hidden_layers": len(ORIGIN), "num_experts_per_tok": CHOICES}
    text |= {"moe_intermediate_size": text["moe_intermediate_size"] // SPLIT}
    text["num_experts"] = text["num_local_experts"] = SPLIT * text["num_local_experts"]
    return Qwen3VLMoeConfig(**config)


def split_experts(gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, H], down [E, H, I] -> [SPLIT*E, 2I/SPLIT, H], [SPLIT*E, H, I/SPLIT]; weights of 1/SPLIT sum to the same."""
    experts, both, width = gate_up.shape
    gate_up = gate_up.view(experts, 2, SPLIT, both // 2 // SPLIT, width).transpose(1, 2).reshape(SPLIT * experts, -1, width)
    down = down.view(experts, width, SPLIT, -1).transpose(1, 2).reshape(SPLIT * experts, width, -1)
    return gate_up, SPLIT * down


def grow(small: Qwen3VLMoeForConditionalGeneration, large: Qwen3VLMoeForConditionalGeneration, seed: int) -> None:
    """Fills the large model with the small one's weights."""
    random = torch.Generator().manual_seed(seed)
    weights = small.state_dict()
    begun = {name: weight for name, weight in weights.items() if not name.startswith(LAYERS)}
    for index, origin in enumerate(ORIGIN):
        prefix = f"{LAYERS}{origin}."
        layer = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        gate_up, down = split_experts(layer["mlp.experts.gate_up_proj"], layer["mlp.experts.down_proj"])
        router = layer["mlp.gate.weight"].repeat_interleave(SPLIT, dim=0)
        router += ROUTER_NOISE * router.std() * torch.randn(router.shape, generator=random)
        layer |= {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": down, "mlp.gate.weight": router}
        if origin in ORIGIN[:index]:
            for name in ("self_attn.o_proj.weight", "mlp.experts.down_proj"):
                layer[name] = torch.zeros_like(layer[name])
        begun |= {f"{LAYERS}{index}.{name}": weight for name, weight in layer.items()}
    large.load_state_dict(begun)
