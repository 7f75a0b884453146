"""The configuration of DeepSeek-VL2 checkpoints, as published (tiny, small and base) and as transformers saves it.

A published config.json leaves out what equals the defaults of the original configuration classes, which differ from those of
transformers; `ORIGINAL` fills them in. Its language model is one of three classes of transformers: plain attention with softmax
routing (tiny), latent attention with softmax routing (small), or latent attention with sigmoid routing and a bias (base).
"""

from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, DeepseekV2Config, DeepseekV3Config, PreTrainedConfig, SiglipVisionConfig
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig

from vismoe.errors import UnsupportedModelError
from vismoe.models.family.deepseek_vl2.tiles import Tiling

MODEL_TYPE = "deepseek_vl_v2"
# What the original configuration of the language model takes where config.json is silent.
ORIGINAL: dict[str, Any] = dict(
    vocab_size=102400, hidden_size=4096, intermediate_size=11008, moe_intermediate_size=1407, num_hidden_layers=30,
    num_attention_heads=32, num_key_value_heads=32, n_shared_experts=None, n_routed_experts=None, routed_scaling_factor=1.0,
    kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128, topk_method="greedy",
    n_group=None, topk_group=None, num_experts_per_tok=None, first_k_dense_replace=0, moe_layer_freq=1, norm_topk_prob=False,
    scoring_func="softmax", max_position_embeddings=2048, rms_norm_eps=1e-6, bos_token_id=100000, eos_token_id=100001,
    rope_theta=10000.0, rope_scaling=None, attention_bias=False, hidden_act="silu", use_mla=True,
)  # fmt: skip
TEXT_CLASSES = (DeepseekOcr2TextConfig, DeepseekV2Config, DeepseekV3Config)  # of tiny, small and base
OF_LATENT_ATTENTION = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim")
DEFAULT_TEXT: dict[str, Any] = dict(  # where no language model is named: transformers makes such configurations
    hidden_size=2048, num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64,
    n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, q_lora_rank=None,
)  # fmt: skip
VISION: dict[str, Any] = dict(width=1024, layers=24, heads=16, mlp_ratio=4.0, patch_size=16, image_size=384)
PROJECTOR = dict(input_dim=1152, n_embed=2048, depth=2, downsample_ratio=2)
# The published order, which decides between candidates that fit equally well.
CANDIDATES = tuple(
    (384 * across, 384 * down)
    for across, down in (
        (1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2), (1, 5), (5, 1), (1, 6), (6, 1), (2, 3), (3, 2), (1, 7),
        (7, 1), (1, 8), (8, 1), (2, 4), (4, 2), (1, 9), (9, 1), (3, 3),
    )
)  # fmt: skip
ON_USE: list[Callable[[], None]] = []  # called whenever a configuration is made: a checkpoint of this family is being opened
IMAGE_TOKENS = {129280: 128815, 102400: 100003}  # the id of <image>, by the vocabulary of the published models


class DeepseekVLV2Config(PreTrainedConfig):
    """`language_config`, `vision_config` and `projector_config` as published; saved with `text_config`, as transformers names it.

    Raises ValueError for a language model that DeepSeek-VL2 does not have, and UnsupportedModelError for DeepSeek-OCR, which
    names the same model type.
    """

    model_type = MODEL_TYPE
    sub_configs = {"vision_config": SiglipVisionConfig, "text_config": AutoConfig}
    vision_config: dict[str, Any] | PreTrainedConfig | None = None
    text_config: dict[str, Any] | PreTrainedConfig | None = None
    projector_config: dict[str, Any] | None = None
    candidate_resolutions: list[list[int]] | None = None
    image_token_id: int | None = None
    tile_tag: str = "2D"
    global_view_pos: str = "head"
    tie_word_embeddings: bool = False

    def __post_init__(self, language_config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        vision, text = self.vision_config, self.text_config
        if vision is None or isinstance(vision, dict):
            vision = _vision_config(vision or {})
        if text is None or isinstance(text, dict):
            text = _saved_text_config(text) if text else _text_config(language_config or DEFAULT_TEXT)
        self.vision_config, self.text_config = vision, text
        self.projector_config = PROJECTOR | (self.projector_config or {})
        self.candidate_resolutions = [list(map(int, size)) for size in self.candidate_resolutions or CANDIDATES]
        if (self.tile_tag, self.global_view_pos) != ("2D", "head"):
            raise ValueError(
                f"tile_tag={self.tile_tag!r} and global_view_pos={self.global_view_pos!r}: only '2D' and 'head' exist"
            )
        if self.projector_config["downsample_ratio"] != PROJECTOR["downsample_ratio"]:
            raise ValueError(f"downsample_ratio={self.projector_config['downsample_ratio']!r}: only 2 exists")
        if self.projector_config["depth"] != PROJECTOR["depth"] or self.projector_config["n_embed"] != text.hidden_size:
            raise ValueError("projector_config: a projector has two layers and the width of the language model")
        vision.vision_use_head = False
        vision.downsample_ratio = self.projector_config["downsample_ratio"]  # the tower says which patches form a token
        if self.image_token_id is None:
            self.image_token_id = IMAGE_TOKENS.get(text.vocab_size)
        super().__post_init__(**kwargs)
        for function in ON_USE:
            function()

    @property
    def tiling(self) -> Tiling:
        vision: Any = self.vision_config
        return Tiling.of(self.candidate_resolutions or (), vision.patch_size, vision.downsample_ratio)


def _text_config(given: dict[str, Any]) -> PreTrainedConfig:
    """transformers' configuration for the language model that a published `language_config` describes."""
    values = ORIGINAL | {name: value for name, value in given.items() if name in ORIGINAL}
    scoring, latent = values.pop("scoring_func"), values.pop("use_mla")
    if values.pop("moe_layer_freq") != 1:
        raise ValueError("moe_layer_freq: only 1 is supported, experts in every layer behind the dense ones")
    if values.pop("rope_scaling") is not None:
        raise ValueError("rope_scaling: DeepSeek-VL2 has no scaled rotary embedding")
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    values |= {"dtype": given.get("torch_dtype")} if given.get("torch_dtype") else {}
    routing = values["topk_method"], scoring, bool(values["norm_topk_prob"])
    if routing[:2] == ("noaux_tc", "sigmoid") and latent:
        del values["topk_method"]
        return DeepseekV3Config(**values, rope_interleave=True)
    if routing != ("greedy", "softmax", False):
        raise ValueError(
            f"topk_method={routing[0]!r}, scoring_func={routing[1]!r}, norm_topk_prob={routing[2]}, use_mla={latent}: "
            "DeepSeek-VL2 has no such language model"
        )
    del values["norm_topk_prob"]
    if latent:
        return DeepseekV2Config(**values)
    dense = values.pop("first_k_dense_replace")
    for name in OF_LATENT_ATTENTION:
        del values[name]
    kinds = ["dense"] * dense + ["sparse"] * (values["num_hidden_layers"] - dense)
    return DeepseekOcr2TextConfig(**values, mlp_layer_types=kinds)


def _saved_text_config(values: dict[str, Any]) -> PreTrainedConfig:
    named = {cls.model_type: cls for cls in TEXT_CLASSES}
    if values.get("model_type") not in named:
        raise ValueError(f"text_config has the model type {values.get('model_type')!r}, not one of {', '.join(named)}")
    return named[values["model_type"]](**{name: value for name, value in values.items() if name != "model_type"})


def _vision_config(given: dict[str, Any]) -> SiglipVisionConfig:
    """SigLIP's configuration, from the published names or from transformers' own."""
    if isinstance(given.get("width"), dict):
        raise UnsupportedModelError(
            f"DeepSeek-OCR names the model type {MODEL_TYPE} too, but has two other vision towers, which are not supported. "
            "Instead: DeepSeek-OCR-2 (deepseek_ocr2), which transformers supports"
        )
    if "hidden_size" in given:
        return SiglipVisionConfig(**{name: value for name, value in given.items() if name != "model_type"})
    values = VISION | {name: value for name, value in given.items() if name in VISION}
    return SiglipVisionConfig(
        hidden_size=values["width"],
        intermediate_size=int(values["width"] * values["mlp_ratio"]),
        num_hidden_layers=values["layers"],
        num_attention_heads=values["heads"],
        patch_size=values["patch_size"],
        image_size=values["image_size"],
        vision_use_head=False,
    )
