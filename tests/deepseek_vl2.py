"""Tiny DeepSeek-VL2 checkpoints with random weights, as published: config.json, key names, processor and tokenizer files.

Widths are tiny. With views of 384 pixels token counts are the published ones; views of 42 pixels have 2 x 2 tokens.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForImageTextToText

from vismoe.models.family.deepseek_vl2.configuration import CANDIDATES, DeepseekVLV2Config

KINDS = (
    "tiny",
    "small",
    "base",
)  # of the language model: plain attention; latent attention; that with sigmoid routing and a bias
BEGIN, END, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
VOCABULARY = 512
IMAGE_TOKEN = 284  # the first id behind the trained words and the padding
LANGUAGE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, moe_intermediate_size=24, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3,
    first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=None, max_position_embeddings=4096, lm_head=True, rm_head=False,
    model_type="deepseek_v2", topk_method="greedy", bos_token_id=0, eos_token_id=1,
)  # fmt: skip
LATENT = dict(kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
OF_KIND: dict[str, dict[str, Any]] = {
    "tiny": dict(use_mla=False, kv_lora_rank=None, qk_nope_head_dim=0, qk_rope_head_dim=0, v_head_dim=0),
    "small": LATENT,
    "base": LATENT | dict(topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.0),
}
PROCESSOR: dict[str, Any] = dict(
    add_special_token=False, candidate_resolutions=CANDIDATES, downsample_ratio=2, ignore_id=-100, image_mean=[0.5] * 3,
    image_std=[0.5] * 3, image_token="<image>", mask_prompt=False, normalize=True, pad_token=PAD, patch_size=14,
    processor_class="DeepseekVLV2Processor", sft_format="deepseek",
)  # fmt: skip


def candidates(side: int) -> list[list[int]]:
    return [[width // 384 * side, height // 384 * side] for width, height in CANDIDATES]


def published(kind: str, side: int = 384) -> dict[str, Any]:
    """A config.json with the names and gaps of the published ones; `side` of a view in pixels."""
    return dict(
        candidate_resolutions=candidates(side),
        global_view_pos="head",
        image_token_id=IMAGE_TOKEN,  # not in published files, whose vocabularies tell it
        language_config=LANGUAGE | OF_KIND[kind],
        model_type="deepseek_vl_v2",
        projector_config=dict(model_type="mlp_projector", n_embed=64, input_dim=32),
        tile_tag="2D",
        torch_dtype="float32",
        vision_config=dict(
            layers=3, mlp_ratio=3.7362, model_name="siglip_so400m_patch14_384", model_type="vision", patch_size=14, width=32,
            heads=4, image_size=side,
        ),
    )  # fmt: skip


def save(kind: str, folder: Path, dtype: torch.dtype = torch.float32, side: int = 384) -> Path:
    """A checkpoint folder with random weights, the same for the same kind and side."""
    torch.manual_seed(KINDS.index(kind))
    model = AutoModelForImageTextToText.from_config(DeepseekVLV2Config(**published(kind, side)))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(0, 0.1) if tensor.ndim == 1 else tensor.normal_(0, tensor.shape[-1] ** -0.5)
    model.to(dtype).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(published(kind, side) | dict(torch_dtype=str(dtype).removeprefix("torch."))))
    (folder / "generation_config.json").unlink(missing_ok=True)  # published models have none
    save_processor(folder, side)
    return folder


def save_processor(folder: Path, side: int) -> None:
    """The files of a processor, with a tokenizer of a few words that spells everything else by bytes."""
    folder.mkdir(exist_ok=True)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=283, special_tokens=[BEGIN, END], initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator(["What is in the picture? A cat and a dog. "] * 10, trainer)
    words.save(str(folder / "tokenizer.json"))
    tokens = dict(bos_token=BEGIN, eos_token=END, pad_token=PAD, add_bos_token=True, add_eos_token=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="LlamaTokenizerFast", **tokens)))
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR | dict(candidate_resolutions=candidates(side))))
