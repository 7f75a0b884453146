"""The demo model's files besides its weights: configuration, tokenizer, chat template, processor and generation settings.

The tokenizer is byte-level like Qwen's, with every word of the demo world as one token and no merges: a known word is looked up
whole (`ignore_merges`), any other text, such as printed capitals, is split into bytes. So any input has tokens, and decoding
restores the exact text.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLMoeConfig

from vismoe.eval.questions import every_word

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # Qwen's
)
CONTEXT_TOKENS = 4096
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}

# As in the templates of LLaVA models, pictures come first, wherever they are in a message, because the model learned no other
# order.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' or 'video' in part %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- endif %}
{%- endfor %}
{%- for part in message.content if 'text' in part %}
{{- part.text }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "size": {"shortest_edge": 128 * 128, "longest_edge": 768 * 768},  # pixels, as in the family: 16 to 576 visual tokens
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
VIDEO_PROCESSOR = IMAGE_PROCESSOR | {"video_processor_type": "Qwen3VLVideoProcessor"}
del VIDEO_PROCESSOR["image_processor_type"]


def splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def vocabulary() -> list[str]:
    """Bytes first, then every word in all its written forms: with and without a space before it, lower case and capitalised."""
    split = splitter()
    pieces = {
        piece
        for text in every_word() | {"user", "assistant", "system", "\n", ' "', '".', '".\n', ".\n", "?\n"}
        for piece in _pieces(split, text)
    }
    words = {form for piece in pieces for form in _written_ways(piece)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # printable stand-ins of the bytes, in the order of GPT-2's table
    return alphabet + sorted(word for word in words if len(word) > 1)


def _pieces(split: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [piece for piece, _ in split.pre_tokenize_str(text)]


def _written_ways(piece: str) -> set[str]:
    word = piece.removeprefix("Ġ")
    if not word.isalpha():
        return {piece}
    lower, upper = word.lower(), word[0].upper() + word[1:].lower()
    return {lower, upper, f"Ġ{lower}", f"Ġ{upper}"}


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=CONTEXT_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLMoeConfig:
    """A small member of the real family: deepstack, interleaved M-RoPE, 8 layers x 32 experts, 4 chosen per token."""
    token = tokenizer.convert_tokens_to_ids
    text = (
        dict(vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=192, intermediate_size=384, num_hidden_layers=8)
        | dict(num_attention_heads=6, num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT_TOKENS)
        | dict(moe_intermediate_size=64, num_experts=32, num_experts_per_tok=4, decoder_sparse_step=1, mlp_only_layers=[])
        | dict(rope_parameters=ROPE, router_aux_loss_coef=0.01, tie_word_embeddings=True, dtype="bfloat16")
        | dict(pad_token_id=token("<|endoftext|>"), eos_token_id=token("<|im_end|>"))
    )
    vision = dict(depth=4, hidden_size=128, intermediate_size=384, num_heads=4, out_hidden_size=192, dtype="bfloat16") | dict(
        patch_size=16,
        temporal_patch_size=2,
        spatial_merge_size=2,
        num_position_embeddings=256,
        deepstack_visual_indexes=[1, 2, 3],
    )
    return Qwen3VLMoeConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["Qwen3VLMoeForConditionalGeneration"],
    )


def write_files(folder: Path, tokenizer: PreTrainedTokenizerFast, config: Qwen3VLMoeConfig) -> None:
    """Write everything except the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    generation = {
        "do_sample": False,
        "eos_token_id": config.text_config.eos_token_id,
        "pad_token_id": config.text_config.pad_token_id,
        "max_new_tokens": 128,
    }
    tables = {
        "preprocessor_config.json": IMAGE_PROCESSOR,
        "video_preprocessor_config.json": VIDEO_PROCESSOR,
        "generation_config.json": generation,
    }
    for name, table in tables.items():
        (folder / name).write_text(json.dumps(table, indent=2) + "\n")
