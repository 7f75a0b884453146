"""Tiny random models of every family in the zoo, saved the way the hub stores them, and eager references to compare with.

No dimension hides a mistake: 2I differs from H and I from H everywhere, so a transposed or swapped tensor never fits by accident;
some families have more than ten experts, whose names sort differently as text and as numbers; no bias is zero.
A reference holds every parameter in fresh memory, because float32 results depend on the alignment of an operand.
"""

import inspect
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers as T
from family_zoo import IMAGE_TOKEN, TOWER_WIDTH, WIDTH, families, own, tiny_config, zoo
from models_page import refusal_of
from safetensors.torch import load_file, save_file

from vismoe.engine.engine import demo_model
from vismoe.models.family import class_named
from vismoe.models.family.caches import CACHE, cache_in

SELECTED = "vision_feature_select_strategy"  # which llama4 wants to be told in older releases
DEMO = demo_model()
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


def rope(*section: int, **more: Any) -> dict[str, Any]:
    return dict(rope_type="default", rope_theta=10000.0, mrope_section=list(section), **more)


SMALL_PICTURES = dict(image_size=56, patch_size=14)
SAM = dict(image_size=128, patch_size=8, output_channels=16, downsample_channels=[24, 32], mlp_dim=80, global_attn_indexes=[1])
# What a family wants that the zoo's sizes do not say. Sub-configurations are dicts under their names.
DEEPSEEK_VL2: dict[str, Any] = dict(  # views of 2 x 2 tokens
    vision_config=dict(image_size=42, patch_size=14),
    projector_config=dict(input_dim=TOWER_WIDTH, n_embed=WIDTH),
    candidate_resolutions=[[42, 42]],
)
OVERRIDES: dict[str, dict[str, Any]] = {
    "aria": dict(projector_patch_to_query_dict={49: 4}),
    "cohere2_vision + cohere2_moe": dict(vision_config=SMALL_PICTURES, alignment_intermediate_size=96),
    "dbrx": dict(
        d_model=64,
        n_heads=4,
        n_layers=3,
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
        ffn_config=dict(ffn_hidden_size=48, moe_num_experts=6, moe_top_k=2),
    ),
    "deepseek_ocr2": dict(text_config=dict(mlp_layer_types=["dense", "sparse", "sparse"]), vision_config=dict(sam_config=SAM)),
    "deepseek_v3": dict(n_routed_experts=8, n_group=2),
    "dots3_note": dict(
        text_config=dict(
            num_key_value_heads=4,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            swa_q_lora_rank=16,
            swa_kv_lora_rank=16,
            swa_head_dim=24,
            swa_qk_nope_head_dim=16,
            swa_v_head_dim=16,
        ),
        vision_config=dict(adapter_in_dim=32, adapter_out_dim=64, mlp_layer_types=["dense", "sparse"], num_local_experts=4),
        audio_config=dict(adapter_input_size=32, adapter_out_dim=64),
    ),
    "diffusion_gemma": dict(
        text_config=dict(global_head_dim=16), vision_config=dict(model_type="gemma4_vision", position_embedding_size=64)
    ),
    "ernie4_5_vl_moe": dict(text_config=dict(moe_intermediate_size=[24, 12], rope_parameters=rope(3, 3, 2))),
    "flint": dict(mlp_only_layers=[0]),
    "gemma4": dict(
        text_config=dict(
            enable_moe_block=True, global_head_dim=16, hidden_size_per_layer_input=0, vocab_size_per_layer_input=512
        ),
        vision_config=dict(position_embedding_size=64),
    ),
    "glm4_moe": dict(n_routed_experts=11),
    "glm4v_moe": dict(text_config=dict(rope_parameters=rope(2, 1, 1, partial_rotary_factor=0.5))),
    "glm5_next": dict(text_config=dict(num_key_value_heads=4, qk_rope_head_dim=0)),
    "gpt_oss": dict(num_local_experts=11),
    "granitemoehybrid": dict(layer_types=["mamba", "attention", "mamba"], mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16),
    "hy_v4_vl": dict(text_config=dict(rope_parameters=rope(2, 1, 1))),
    "inkling_mm_model": dict(vision_config=dict(n_layers=5, patch_size=4)),
    "internvl + qwen3_moe": dict(vision_config=SMALL_PICTURES),
    "internvl + gpt_oss": dict(vision_config=SMALL_PICTURES),
    "jamba": dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8),
    "kimi_k25 + deepseek_v3": dict(projection_hidden_size=32),
    "lfm2_moe": dict(layer_types=["conv", "full_attention", "conv"]),
    "lfm2_vl + lfm2_moe": dict(
        projector_hidden_size=48,
        text_config=dict(layer_types=["conv", "full_attention", "full_attention"]),
        vision_config=dict(patch_size=4, num_patches=64),
    ),
    "jetmoe": dict(num_experts_per_tok=2, kv_channels=16),
    "llama4": dict(
        text_config=dict(intermediate_size_mlp=80, num_experts_per_tok=1),
        vision_config=dict(
            image_size=56,
            patch_size=14,
            intermediate_size=128,
            projector_input_dim=48,
            projector_output_dim=48,
            vision_output_dim=48,
        ),
    ),
    "llava_onevision + qwen3_moe": dict(vision_config=SMALL_PICTURES, image_grid_pinpoints=[[56, 56]]),
    "longcat_flash": dict(num_layers=2, ffn_hidden_size=96, expert_ffn_hidden_size=24, moe_topk=3, zero_expert_num=2),
    "mellum": dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
    "minimax_m3_vl": dict(projector_hidden_size=48),
    "mistral3 + mistral4": dict(vision_config=SMALL_PICTURES),
    "mistral_large4": dict(vision_config=dict(image_size=64)),
    "muse_spark": dict(
        out_hidden_size=128, projector_hidden_size=48, audio_config=dict(num_hidden_layers=4, hidden_sizes=[16] * 4)
    ),
    "nemotron_h_omni + nemotron_h": dict(
        vision_hidden_size=32,
        projector_hidden_size=48,
        vision_config=dict(patch_size=4, max_img_size=64, mlp_ratio=2.5, video_temporal_patch_size=2),
    ),
    "nemotron_h": dict(layers_block_type=["mamba", "moe", "attention", "moe"]),
    "nllb-moe": dict(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_sparse_step=1,
        decoder_sparse_step=1,
        num_experts=4,
    ),
    "qwen3_5_moe": dict(
        text_config=dict(head_dim=32, rope_parameters=rope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25))
    ),
    "qwen3_moe": dict(num_experts=12),
    "qwen3_omni_moe_thinker": dict(
        text_config=dict(rope_parameters=rope(4, 2, 2, mrope_interleaved=True)),
        vision_start_token_id=498,
        audio_config=dict(
            d_model=32,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=48,
            output_dim=64,
            downsample_hidden_size=16,
            num_mel_bins=16,
        ),
    ),
    "qwen3_vl_moe": dict(text_config=dict(rope_parameters=rope(4, 2, 2, mrope_interleaved=True))),
    "qwen4_exp": dict(
        text_config=dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4)
    ),
    **dict.fromkeys(own(), DEEPSEEK_VL2),
    "deepseek_vl_v2 + deepseek_ocr2_text": DEEPSEEK_VL2 | dict(text_config=dict(mlp_layer_types=["dense", "sparse", "sparse"])),
    "step3p7": dict(
        text_config=dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
        vision_config=dict(image_size=112),
    ),
    "switch_transformers": dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4),
    "unlimited_ocr": dict(vision_config=dict(sam_config=SAM)),
    "zaya": dict(num_experts_per_tok=1),
}
FAMILIES = tuple(family for family in families() if not refusal_of(family))
ZOO = tuple(name for name in zoo() if not refusal_of(name))
WITH_IMAGES = tuple(name for name, family in families().items() if family.with_images)


def tiny_of(family: str) -> T.PreTrainedConfig:
    """The tiny configuration, with what the family and its text model want."""
    own, text = OVERRIDES.get(family, {}), zoo()[family].text
    if text in OVERRIDES:
        own = own | {"text_config": OVERRIDES[text] | own.get("text_config", {})}
    return tiny_config(family, own)


def tiny_text(kind: str) -> T.PreTrainedConfig:
    """The tiny configuration of a text model by its type, e.g. qwen3_5_moe_text."""
    if kind in OVERRIDES or not kind.endswith("_text"):
        return tiny_config(kind, OVERRIDES.get(kind, {}))
    return tiny_of(kind.removesuffix("_text")).get_text_config()


def build(family: str, seed: int = 0) -> T.PreTrainedModel:
    """A float32 model with random weights, the same for the same seed."""
    torch.manual_seed(seed)
    model = mended(zoo()[family].model_class(tiny_of(family)).eval())
    with torch.no_grad():  # zeros, as biases are initialised, would hide a lost tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and tensor.device.type != "meta" and ("bias" in name or not tensor.any()):
                tensor.normal_(0, 0.1)
    return model


def mended(model: T.PreTrainedModel) -> T.PreTrainedModel:
    """The model; llama4, whose forward fails in transformers 5.24.0, with what it lacks."""
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model.language_model.register_forward_hook(lambda *given: given[-1].__dict__.setdefault("image_outputs", None))
    return model


BUILDERS: dict[str, Callable[[], T.PreTrainedModel]] = {family: partial(build, family) for family in zoo()}


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


def without_windows(folder: Path) -> Path:
    """A saved model whose attention sees all tokens, as every real Qwen3 does."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text["sliding_window"] = None
    if "layer_types" in text:
        text["layer_types"] = ["full_attention"] * len(text["layer_types"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def model_class(folder: Path) -> type[T.PreTrainedModel]:
    """The class that a checkpoint names as its architecture."""
    return class_named(T.AutoConfig.from_pretrained(folder).architectures[0])


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> T.PreTrainedModel:
    """Eager experts, every parameter and buffer cloned to fresh memory, ties kept."""
    model = mended(model_class(folder).from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval())
    for tensor in {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values():
        tensor.data = tensor.data.clone()
    return model


def build_from(folder: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> T.PreTrainedModel:
    """The model of a checkpoint with these weights instead, with eager experts."""
    config = T.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    given = {name: tensor.to(dtype) for name, tensor in weights.items()}
    return (
        model_class(folder)
        .from_pretrained(None, config=config, state_dict=given, dtype=dtype, experts_implementation="eager")
        .eval()
    )


def prompt(family: str, tokens: int = 9, *, dtype: torch.dtype = torch.float32, batch: int = 1) -> dict[str, Any]:
    """Inputs of a prefill; the families with images get one per row, between two stretches of text."""
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(5, 490, (batch, tokens), generator=generator)
    accepted = inspect.signature(zoo()[family].model_class.forward).parameters
    decoder = dict(decoder_input_ids=text[:, :4].clone()) if "decoder_input_ids" in accepted else {}
    if not zoo()[family].with_images:
        return dict(input_ids=text, attention_mask=torch.ones_like(text), **decoder)
    visual = torch.full((batch, image_tokens(family)), IMAGE_TOKEN)
    start, end = torch.full((batch, 1), IMAGE_TOKEN - 2), torch.full((batch, 1), IMAGE_TOKEN - 1)
    ids = torch.cat((text[:, :3], start, visual, end, text[:, 3:]), dim=1)
    kinds = (ids == IMAGE_TOKEN).int()
    typed = {name: kinds for name in ("mm_token_type_ids", "moe_mm_token_type_ids") if name in accepted}
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), **typed, **decoder)
    return inputs | picture(family, batch, dtype, generator)


@torch.inference_mode()
def greedy(model: Any, inputs: dict[str, Any], steps: int) -> Any:
    """What the model's own generate() returns for `steps` greedy tokens; `.logits` has those of the prefill and of each step."""
    exactly = {"max_new_tokens": steps, "min_new_tokens": steps}
    return model.generate(**inputs, do_sample=False, **exactly, return_dict_in_generate=True, output_logits=True)


def held_by_cache(model: T.PreTrainedModel, tokens: int) -> int:
    """Bytes that a real prompt of `tokens` tokens leaves in the cache, from which a token is decoded."""
    ids = torch.randint(5, 490, (1, tokens))
    with torch.no_grad():
        cache = cache_in(model(input_ids=ids[:, :-1], use_cache=True))
        cache = cache_in(model(input_ids=ids[:, -1:], use_cache=True, **{CACHE: cache}))
    held = 0
    for layer in (*cache.layers, cache):
        for value in vars(layer).values():
            tensors = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            held += sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.ndim)
    return held


def picture(family: str, batch: int, dtype: torch.dtype, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """What the family's processor would make of `batch` small pictures."""
    vision = tiny_of(family).vision_config
    accepted = inspect.signature(image_encoder(family)).parameters
    frames, rows, columns = PATCHES

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    if family == "inkling_mm_model":
        return dict(pixel_values=pixels(batch * 6, vision.temporal_patch_size, *[vision.patch_size] * 2, 3))
    if family.startswith("inkling2"):
        side = vision.patch_size * vision.spatial_merge_size
        return dict(pixel_values=pixels(batch * 6, side, side, 3), image_grid_thw=torch.tensor([(1, 2, 3)] * batch))
    if family.startswith("kimi_k25"):
        shape = (batch * frames * rows * columns, 3, *[vision.patch_size] * 2)
        return dict(pixel_values=pixels(*shape), image_grid_thw=torch.tensor([PATCHES] * batch))
    if "images_spatial_crop" in accepted:  # the whole picture, and its one tile
        side = vision.image_size
        return dict(pixel_values=pixels(batch * 2, 3, side, side), images_spatial_crop=torch.ones(batch, 2, dtype=torch.int64))
    if "image_grid_hw" in accepted:
        shape = (batch * rows * columns, 3 * vision.patch_size**2)
        return dict(pixel_values=pixels(*shape), image_grid_hw=torch.tensor([PATCHES[1:]] * batch))
    if "spatial_shapes" in accepted:
        shape, sizes = (batch, rows * columns, 3 * vision.patch_size**2), torch.tensor([PATCHES[1:]] * batch)
        return dict(
            pixel_values=pixels(*shape), spatial_shapes=sizes, pixel_attention_mask=torch.ones(shape[:2], dtype=torch.int32)
        )
    if "image_grid_thw" in accepted:
        temporal = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
        shape = (batch * frames * rows * columns, 3 * temporal * vision.patch_size**2)
        return dict(pixel_values=pixels(*shape), image_grid_thw=torch.tensor([PATCHES] * batch))
    if "image_position_ids" in accepted:
        side = 2 * vision.pooling_kernel_size
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        shape = (batch, side * side, 3 * vision.patch_size**2)
        return dict(pixel_values=pixels(*shape), image_position_ids=places.expand(batch, -1, -1).clone())
    side = getattr(vision, "image_size", None) or vision.sam_config.image_size
    side = side if isinstance(side, int) else side[0]
    parts = (2,) if family.startswith("llava_onevision") else ()  # the whole picture, and its one part
    values = dict(pixel_values=pixels(batch, *parts, 3, side, side))
    return values | dict(image_sizes=torch.tensor([(side, side)] * batch)) if "image_sizes" in accepted else values


@cache
def image_encoder(family: str) -> Callable[..., Any]:
    """The method that makes features of pixels; some families keep it on an inner model."""
    return next(part.get_image_features for part in build(family).modules() if hasattr(part, "get_image_features"))


@cache
def image_tokens(family: str) -> int:
    """Tokens that one of our pictures takes: the rows that the family's own vision tower makes of it."""
    encoder = image_encoder(family)
    vision = tiny_of(family).vision_config
    asked = SELECTED in inspect.signature(encoder).parameters and hasattr(vision, SELECTED)
    wanted = {SELECTED: getattr(vision, SELECTED)} if asked else {}
    with torch.no_grad():
        output = encoder(**picture(family, 1, torch.float32, torch.Generator()), **wanted)
    features = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    while not isinstance(features, torch.Tensor):
        features = features[0]
    return features.flatten(0, -2).shape[0]
