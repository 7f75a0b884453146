"""DeepSeek-VL2, made of transformers' own parts: a SigLIP tower, a projector, and one of three DeepSeek language models.

Checkpoints are read and written under their published names (`CONVERSION`, `CONVERSION_OF_TOWER`). Source: DeepSeek-VL2 (arXiv
2412.10302), section 3, and the published checkpoints.
"""

from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationMixin,
    PreTrainedModel,
    SiglipVisionModel,
    initialization,
)
from transformers.cache_utils import Cache
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, ConversionOps, MergeModulelist, WeightConverter, WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig
from transformers.utils import can_return_tuple

from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.family.deepseek_vl2.configuration import MODEL_TYPE, DeepseekVLV2Config
from vismoe.models.family.deepseek_vl2.tiles import token_layout, tokens_of
from vismoe.vision.layout import TokenLayout

OF_IMAGES = ("pixel_values", "images_spatial_crop")  # inputs that describe images, not tokens


class DeepseekVLV2PreTrainedModel(PreTrainedModel):
    config: DeepseekVLV2Config
    config_class = DeepseekVLV2Config
    base_model_prefix = "model"
    input_modalities = ("image", "text")
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = False
    _no_split_modules = ("SiglipEncoderLayer", "DeepseekV2DecoderLayer", "DeepseekV3DecoderLayer", "DeepseekOcr2TextDecoderLayer")
    _skip_keys_device_placement = (CACHE,)
    _keys_to_ignore_on_load_unexpected = (r"^vision\.attn_pool\.",)  # in the files, but not a part of the model's computation

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DeepseekVLV2Model):
            for embedding in (module.image_newline, module.view_separator):
                initialization.normal_(embedding, std=len(embedding) ** -0.5)


class DeepseekVLV2VisionModel(SiglipVisionModel):
    """SigLIP without its pooling head. `tiles` tells observers of the tower which views form an image; it computes nothing."""

    def forward(self, pixel_values: torch.Tensor, tiles: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(pixel_values, **kwargs)

    def token_layouts(self, *args: Any, tiles: torch.Tensor | None = None, **kwargs: Any) -> list[TokenLayout]:
        """How the patches of each image of a call become visual tokens (vision/layout.py); empty if the call does not say."""
        patches = self.config.image_size // self.config.patch_size
        side = -(-patches // self.config.downsample_ratio)
        return [token_layout(of_image, patches, side) for of_image in ([] if tiles is None else tiles.tolist())]


class DeepseekVLV2Projector(nn.Module):
    """Joins the features of neighbouring patches into a token, and maps it to the language model's width."""

    def __init__(self, width: int, ratio: int, hidden: int):
        super().__init__()
        self.ratio = ratio
        self.linear_1 = nn.Linear(width * ratio**2, hidden)
        self.act = nn.GELU()
        self.linear_2 = nn.Linear(hidden, hidden)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """`[views, side, side, width]` -> `[views, ceil(side / ratio), ceil(side / ratio), hidden]`; zeros fill an odd edge."""
        views, side, _, width = features.shape
        edge = -side % self.ratio
        tokens = (side + edge) // self.ratio
        padded = nn.functional.pad(features, (0, 0, 0, edge, 0, edge))
        squares = padded.view(views, tokens, self.ratio, tokens, self.ratio, width).permute(0, 1, 3, 5, 2, 4)
        hidden: torch.Tensor = self.linear_2(self.act(self.linear_1(squares.reshape(views, tokens, tokens, -1))))
        return hidden


class DeepseekVLV2Model(DeepseekVLV2PreTrainedModel):
    def __init__(self, config: DeepseekVLV2Config):
        super().__init__(config)
        vision: Any = config.vision_config
        text: Any = config.text_config
        projector: Any = config.projector_config
        self.vision_tower = DeepseekVLV2VisionModel._from_config(vision)
        self.multi_modal_projector = DeepseekVLV2Projector(
            projector["input_dim"], projector["downsample_ratio"], text.hidden_size
        )
        self.image_newline = nn.Parameter(torch.empty(text.hidden_size))
        self.view_separator = nn.Parameter(torch.empty(text.hidden_size))
        self.language_model = _language_model(text)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    def get_image_features(
        self, pixel_values: torch.Tensor, images_spatial_crop: torch.Tensor, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """`pixel_values` `[views, 3, H, W]`: of each image the whole view, then its tiles row by row; `images_spatial_crop` int
        `[images, 2]`: its tiles across and down. `pooler_output` holds the tokens of each image, `[tokens, hidden]`."""
        tower = self.vision_tower
        output = tower(pixel_values.to(tower.dtype), tiles=images_spatial_crop, **kwargs)
        features = output.last_hidden_state
        side = int(features.shape[1] ** 0.5)
        views = self.multi_modal_projector(features.view(len(features), side, side, -1))
        images, first = [], 0
        for across, down in images_spatial_crop.tolist():
            of_image = views[first : first + 1 + across * down]
            if len(of_image) != 1 + across * down:
                raise ValueError(f"{len(views)} views are fewer than those of the images: {images_spatial_crop.tolist()}")
            large = of_image[1:].unflatten(0, (down, across)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
            images.append(torch.cat((self._with_newlines(of_image[0]), self.view_separator[None], self._with_newlines(large))))
            first += len(of_image)
        if first != len(views):
            raise ValueError(f"there are {len(views)} views, but the images have {first}: {images_spatial_crop.tolist()}")
        return BaseModelOutputWithPooling(last_hidden_state=features, pooler_output=images)

    def _with_newlines(self, grid: torch.Tensor) -> torch.Tensor:
        """`[rows, columns, hidden]` -> `[rows * (columns + 1), hidden]`."""
        return torch.cat((grid, self.image_newline.expand(len(grid), 1, -1)), 1).flatten(0, 1)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        images_spatial_crop: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states `[batch, tokens, hidden]`; `kwargs` are the language model's."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            if input_ids is None or self.config.image_token_id is None or images_spatial_crop is None:
                raise ValueError("pixel_values need input_ids, images_spatial_crop and a configuration with an image_token_id")
            images = list(self.get_image_features(pixel_values, images_spatial_crop).pooler_output)
            visual, tokens = torch.eq(input_ids, self.config.image_token_id), [len(image) for image in images]
            ends = _sums(tokens, _images_per_row(visual.sum(1).tolist(), tokens))
            shown = visual & (visual.cumsum(1) <= torch.tensor(ends, device=visual.device)[:, None])
            inputs_embeds = inputs_embeds.masked_scatter(shown[..., None], torch.cat(images).to(inputs_embeds))
        output: BaseModelOutputWithPast = self.language_model(inputs_embeds=inputs_embeds, **kwargs)
        return output


class DeepseekVLV2ForConditionalGeneration(DeepseekVLV2PreTrainedModel, GenerationMixin):
    _tied_weights_keys: dict[str, str] = {}

    def __init__(self, config: DeepseekVLV2Config):
        super().__init__(config)
        text: Any = config.text_config
        self.model = DeepseekVLV2Model(config)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_image_features(
        self, pixel_values: torch.Tensor, images_spatial_crop: torch.Tensor, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        return self.model.get_image_features(pixel_values, images_spatial_crop, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        images_spatial_crop: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[batch, tokens, vocabulary]`, and with `labels` the loss. Images as for `get_image_features`, in the order of
        their tokens. The cache has the name that the installed transformers gives it (caches.py); both are taken."""
        output = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            images_spatial_crop=images_spatial_crop,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{CACHE: past_key_values if cache is None else cache},
            **kwargs,
        )
        hidden = output.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.shape[-1])
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            **{CACHE: cache_in(output)},
        )

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """As transformers' own; then takes the tokens that begin and end a text from the language model, since published files
        name them nowhere else."""
        super().adjust_generation_fn(*args, **kwargs)
        for name in ("bos_token_id", "eos_token_id"):
            if getattr(self.generation_config, name) is None:
                setattr(self.generation_config, name, getattr(self.config.text_config, name))

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, is_first_iteration: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        images = {name: kwargs.pop(name, None) for name in OF_IMAGES}
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        if is_first_iteration or not kwargs.get("use_cache", True):
            inputs.update(images)
        return inputs

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Repeats the images of a sequence as a block, where transformers would repeat each view."""
        images = {name: kwargs.pop(name, None) for name in OF_IMAGES}
        if expand_size > 1 and images["pixel_values"] is not None:
            assert input_ids is not None and self.config.image_token_id is not None
            tiles, side = images["images_spatial_crop"].tolist(), self.config.tiling.view_tokens
            visual = torch.eq(input_ids, self.config.image_token_id).sum(1).tolist()
            per_row = _images_per_row(visual, [tokens_of(of_image, side) for of_image in tiles])
            views = _sums([1 + across * down for across, down in tiles], per_row)
            images = {
                "pixel_values": _repeated(images["pixel_values"], views, expand_size),
                "images_spatial_crop": _repeated(images["images_spatial_crop"], per_row, expand_size),
            }
        ids, rest = super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **kwargs)
        return ids, rest | images


def _images_per_row(visual: list[int], images: list[int]) -> list[int]:
    """How many images each sequence of a batch has, from the image tokens of the sequences and those of the images, in order.

    A sequence takes whole images; image tokens behind them were generated, or guessed by prompt lookup, and show nothing. Raises
    ValueError for images without tokens.
    """
    counts, left = list[int](), list(images)
    for tokens in visual:
        before = len(left)
        while left and left[0] <= tokens:
            tokens -= left.pop(0)
        counts.append(before - len(left))
    if left:
        raise ValueError(f"the text has {sum(visual)} image tokens, the images have {sum(images)}")
    return counts


def _sums(values: list[int], lengths: list[int]) -> list[int]:
    """Sums of consecutive values, so many at a time."""
    each = iter(values)
    return [sum(islice(each, length)) for length in lengths]


def _repeated(tensor: torch.Tensor, lengths: list[int], times: int) -> torch.Tensor:
    """The tensor with each block of rows so many times, one after another."""
    return torch.cat([block for block in tensor.split(lengths) for _ in range(times)])


def _language_model(config: Any) -> PreTrainedModel:
    if not isinstance(config, DeepseekOcr2TextConfig):
        return AutoModel.from_config(config)
    from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2TextModel  # in no Auto class

    return DeepseekOcr2TextModel._from_config(config)


class WithoutFirstAxis(ConversionOps):
    """`[1, ...]` in the file, `[...]` in the model."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        return {target_patterns[0]: _only(input_dict)[0]}

    @property
    def reverse_op(self) -> ConversionOps:
        return WithFirstAxis()


class WithFirstAxis(WithoutFirstAxis):
    """`[...]` in the model, `[1, ...]` in the file."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        return {target_patterns[0]: _only(input_dict)[None]}

    @property
    def reverse_op(self) -> ConversionOps:
        return WithoutFirstAxis()


def _only(tensors: dict[str, Any]) -> torch.Tensor:
    (value,) = tensors.values()
    tensor: torch.Tensor = value[0] if isinstance(value, list) else value
    return tensor


TOWER = "model.vision_tower."
BLOCK = (r"^vision\.blocks\.(\d+)\.", TOWER + r"encoder.layers.\1.")
# (published name, name in the model); no pattern ends with $, which transformers would write into a saved name
RENAMED = (
    (r"^language\.model\.", "model.language_model."),
    (r"^language\.lm_head\.", "lm_head."),
    (r"^image_newline", "model.image_newline"),
    (r"^view_seperator", "model.view_separator"),  # published with this spelling
    (r"^projector\.layers\.0\.", "model.multi_modal_projector.linear_1."),
    (r"^projector\.layers\.2\.", "model.multi_modal_projector.linear_2."),
    (r"^vision\.patch_embed\.proj\.", TOWER + "embeddings.patch_embedding."),
    (r"^vision\.pos_embed", TOWER + "pos_embed"),
    (r"^vision\.norm\.", TOWER + "post_layernorm."),
    *((BLOCK[0] + rf"norm{number}\.", BLOCK[1] + f"layer_norm{number}.") for number in (1, 2)),
    (BLOCK[0] + r"mlp\.", BLOCK[1] + "mlp."),
    (BLOCK[0] + r"attn\.proj\.", BLOCK[1] + "self_attn.out_proj."),
    (BLOCK[0] + r"attn\.qkv\.", BLOCK[1] + "attn.qkv."),
)
CONVERSION = (
    *(WeightRenaming(published, name) for published, name in RENAMED),
    WeightConverter(
        ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
        "mlp.experts.gate_up_proj",
        operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
    ),
    WeightConverter("mlp.experts.*.down_proj.weight", "mlp.experts.down_proj", operations=[MergeModulelist(dim=0)]),
)
# Under the tower's own name: without it, saving would join the language model's queries, keys and values too.
CONVERSION_OF_TOWER = (
    WeightConverter("pos_embed", "embeddings.position_embedding.weight", operations=[WithoutFirstAxis()]),
    *(
        WeightConverter(f"attn.qkv.{kind}", [f"self_attn.{part}_proj.{kind}" for part in "qkv"], operations=[Chunk(dim=0)])
        for kind in ("weight", "bias")
    ),
)


def register() -> None:
    """Tells transformers' Auto classes and loader about this family; a second call changes nothing."""
    register_checkpoint_conversion_mapping(MODEL_TYPE, list(CONVERSION), overwrite=True)
    register_checkpoint_conversion_mapping(DeepseekVLV2VisionModel.__name__, list(CONVERSION_OF_TOWER), overwrite=True)
    AutoModel.register(DeepseekVLV2Config, DeepseekVLV2Model, exist_ok=True)
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):  # the original code names the second
        auto.register(DeepseekVLV2Config, DeepseekVLV2ForConditionalGeneration, exist_ok=True)
