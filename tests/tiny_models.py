"""Tiny random models of twenty MoE families, saved the way the hub stores them, and eager references to compare with.

No dimension hides a mistake: 2I differs from H and I from H everywhere, so a transposed or swapped tensor never fits by accident;
some families have more than ten experts, whose names sort differently as text and as numbers.
A reference holds every parameter in fresh memory, because float32 results depend on the alignment of an operand.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as T
from safetensors.torch import load_file, save_file

IMAGE_TOKEN = 500
PATCHES = (1, 4, 6)  # frames, rows, columns of patches: 6 visual tokens after merging 2 x 2

BASE: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.1,
)
MOE = BASE | dict(moe_intermediate_size=24, num_experts_per_tok=2)
LATENT = MOE | dict(
    num_key_value_heads=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
TOWER = dict(depth=2, hidden_size=32, intermediate_size=80, num_heads=4, spatial_merge_size=2)
TOKENS = dict(image_token_id=IMAGE_TOKEN, video_token_id=501)
MARKED = TOKENS | dict(image_start_token_id=502, image_end_token_id=503, video_start_token_id=504, video_end_token_id=505)


def rope(*section: int, **more: Any) -> dict[str, Any]:
    return dict(rope_type="default", rope_theta=10000.0, mrope_section=list(section), **more)


def qwen3_vl_moe() -> T.PreTrainedModel:
    text = MOE | dict(head_dim=16, num_experts=6, rope_parameters=rope(4, 2, 2, mrope_interleaved=True))
    vision = TOWER | dict(
        patch_size=16, temporal_patch_size=2, out_hidden_size=64, num_position_embeddings=64, deepstack_visual_indexes=[0, 1]
    )
    return T.Qwen3VLMoeForConditionalGeneration(
        T.Qwen3VLMoeConfig(text_config=text, vision_config=vision, vision_start_token_id=502, vision_end_token_id=503, **TOKENS)
    )


def qwen3_5_moe() -> T.PreTrainedModel:
    text = MOE | LINEAR
    text |= dict(num_hidden_layers=4, head_dim=32, shared_expert_intermediate_size=48, num_experts=6)
    text |= dict(rope_parameters=rope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25))
    vision = TOWER | dict(patch_size=16, temporal_patch_size=2, out_hidden_size=64, num_position_embeddings=64)
    return T.Qwen3_5MoeForConditionalGeneration(
        T.Qwen3_5MoeConfig(text_config=text, vision_config=vision, vision_start_token_id=502, vision_end_token_id=503, **TOKENS)
    )


def glm4v_moe() -> T.PreTrainedModel:
    text = MOE | dict(head_dim=16, n_routed_experts=8, first_k_dense_replace=1, n_group=1, topk_group=1)
    text |= dict(rope_parameters=rope(2, 1, 1, partial_rotary_factor=0.5))
    vision = TOWER | dict(patch_size=14, temporal_patch_size=2, out_hidden_size=64, image_size=56)
    return T.Glm4vMoeForConditionalGeneration(T.Glm4vMoeConfig(text_config=text, vision_config=vision, **MARKED))


def ernie4_5_vl_moe() -> T.PreTrainedModel:
    text = BASE | dict(moe_intermediate_size=[24, 12], moe_num_experts=6, moe_k=2, moe_num_shared_experts=1)
    text |= dict(mlp_layer_types=["dense", "sparse", "sparse"], rope_parameters=rope(3, 3, 2))
    vision = TOWER | dict(patch_size=14)
    return T.Ernie4_5_VLMoeForConditionalGeneration(T.Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision, **MARKED))


def gemma4() -> T.PreTrainedModel:
    values = MOE | dict(num_hidden_layers=2, head_dim=16, global_head_dim=16, num_experts=6, top_k_experts=2)
    values |= dict(enable_moe_block=True, layer_types=["sliding_attention", "full_attention"], sliding_window=32)
    values |= dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=512, num_kv_shared_layers=0)
    return T.Gemma4ForCausalLM(T.Gemma4TextConfig(**values))


def gpt_oss() -> T.PreTrainedModel:
    values = BASE | dict(head_dim=16, num_local_experts=6, num_experts_per_tok=2)
    values |= dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    values |= dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0))
    model = T.GptOssForCausalLM(T.GptOssConfig(**values))
    with torch.no_grad():  # biases start at zero, which would hide a lost one
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model


def qwen3_next() -> T.PreTrainedModel:
    values = MOE | LINEAR | dict(num_hidden_layers=4, head_dim=16, shared_expert_intermediate_size=48, num_experts=6)
    return T.Qwen3NextForCausalLM(T.Qwen3NextConfig(**values))


def deepseek_v3() -> T.PreTrainedModel:
    return T.DeepseekV3ForCausalLM(T.DeepseekV3Config(**LATENT, n_routed_experts=8, n_group=2, topk_group=1))


def deepseek_v2() -> T.PreTrainedModel:
    return T.DeepseekV2ForCausalLM(
        T.DeepseekV2Config(**LATENT, n_routed_experts=6, n_group=1, topk_group=1, topk_method="greedy")
    )


def jamba() -> T.PreTrainedModel:
    values = BASE | dict(num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1)
    values |= dict(expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False)
    return T.JambaForCausalLM(T.JambaConfig(**values, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2))


def lfm2_moe() -> T.PreTrainedModel:
    values = MOE | dict(num_experts=6, num_dense_layers=1, layer_types=["conv", "full_attention", "conv"])
    return T.Lfm2MoeForCausalLM(T.Lfm2MoeConfig(**values))


def nemotron_h() -> T.PreTrainedModel:
    values = MOE | dict(layers_block_type=["mamba", "moe", "attention"], n_routed_experts=6, head_dim=16, n_group=1, topk_group=1)
    values |= dict(moe_shared_expert_intermediate_size=24, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=1)
    return T.NemotronHForCausalLM(T.NemotronHConfig(**values))


def ernie4_5_moe() -> T.PreTrainedModel:
    values = BASE | dict(moe_intermediate_size=24, moe_num_experts=6, moe_k=2, moe_layer_start_index=1, moe_num_shared_experts=1)
    return T.Ernie4_5_MoeForCausalLM(T.Ernie4_5_MoeConfig(**values))


def glm4_moe() -> T.PreTrainedModel:
    values = MOE | dict(head_dim=16, n_routed_experts=8, first_k_dense_replace=1, n_group=1, topk_group=1)
    return T.Glm4MoeForCausalLM(T.Glm4MoeConfig(**values))


LOCAL = BASE | dict(num_local_experts=6, num_experts_per_tok=2)
BUILDERS: dict[str, Callable[[], T.PreTrainedModel]] = {
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen3_5_moe": qwen3_5_moe,
    "glm4v_moe": glm4v_moe,
    "ernie4_5_vl_moe": ernie4_5_vl_moe,
    "gemma4": gemma4,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "mixtral": lambda: T.MixtralForCausalLM(T.MixtralConfig(**LOCAL)),
    "qwen2_moe": lambda: T.Qwen2MoeForCausalLM(T.Qwen2MoeConfig(**MOE, shared_expert_intermediate_size=48, num_experts=6)),
    "qwen3_moe": lambda: T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**MOE, head_dim=16, num_experts=12)),
    "qwen3_next": qwen3_next,
    "phimoe": lambda: T.PhimoeForCausalLM(T.PhimoeConfig(**LOCAL)),
    "olmoe": lambda: T.OlmoeForCausalLM(T.OlmoeConfig(**BASE, num_experts=6, num_experts_per_tok=2)),
    "gpt_oss": gpt_oss,
    "glm4_moe": glm4_moe,
    "minimax_m2": lambda: T.MiniMaxM2ForCausalLM(T.MiniMaxM2Config(**LOCAL, head_dim=16)),
    "granitemoe": lambda: T.GraniteMoeForCausalLM(T.GraniteMoeConfig(**LOCAL)),
    "ernie4_5_moe": ernie4_5_moe,
    "lfm2_moe": lfm2_moe,
    "jamba": jamba,
    "nemotron_h": nemotron_h,
}
FAMILIES = tuple(BUILDERS)
WITH_IMAGES = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "ernie4_5_vl_moe")


def build(family: str, seed: int = 0) -> T.PreTrainedModel:
    """A float32 model with random weights, the same for the same seed."""
    torch.manual_seed(seed)
    return BUILDERS[family]().eval()


def save(
    family: str, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", transposed: bool = False
) -> Path:
    """Save a tiny model as a checkpoint folder; `transposed` stores fused experts as `[E, in, out]`, as Qwen3-VL on the hub."""
    build(family).to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if transposed:
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            for name, tensor in tensors.items():
                if ".experts." in name and tensor.ndim == 3:
                    tensors[name] = tensor.transpose(1, 2).contiguous()
            save_file(tensors, file, metadata={"format": "pt"})
    return folder


def model_class(folder: Path) -> type[T.PreTrainedModel]:
    """The class that a checkpoint names as its architecture."""
    return getattr(T, T.AutoConfig.from_pretrained(folder).architectures[0])


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> T.PreTrainedModel:
    """Eager experts, every parameter and buffer cloned to fresh memory, ties kept."""
    model = model_class(folder).from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
    for tensor in {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values():
        tensor.data = tensor.data.clone()
    return model


def prompt(family: str, tokens: int = 9, *, dtype: torch.dtype = torch.float32, batch: int = 1) -> dict[str, Any]:
    """Inputs of a prefill; the families with images get one per row, between two stretches of text."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(5, 490, (batch, tokens), generator=generator)
    if family not in WITH_IMAGES:
        return dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    frames, rows, columns = PATCHES
    visual = torch.full((batch, frames * rows * columns // 4), IMAGE_TOKEN)
    start, end = torch.full((batch, 1), 502), torch.full((batch, 1), 503)
    ids = torch.cat((ids[:, :3], start, visual, end, ids[:, 3:]), dim=1)
    patch, temporal = (16, 2) if family.startswith("qwen") else (14, 1 if family.startswith("ernie") else 2)
    pixels = torch.randn(batch * frames * rows * columns, 3 * temporal * patch * patch, generator=generator)
    kinds = (ids == IMAGE_TOKEN).int()
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds)
    if family == "ernie4_5_vl_moe":
        inputs["moe_mm_token_type_ids"] = kinds
    return inputs | dict(pixel_values=pixels.to(dtype), image_grid_thw=torch.tensor([PATCHES] * batch))
