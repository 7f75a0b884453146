"""Published models by the names that people know: their dimensions, and the smallest `--memory` that the plan accepts.

The values are those of the publishers' config.json as far as they differ from the defaults of the configuration class; the number
of parameters that publishers state says whether they are right. The plan is made on the meta device, for a CPU on which nothing
was measured and everything takes the most that it can: what it accepts is accepted on every CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from family_zoo import zoo
from searching import OLDEST
from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionLayer

from vismoe.bench.geometry import geometry_config
from vismoe.config import Settings, format_bytes
from vismoe.models.family.families import refuse_unsupported
from vismoe.models.load import footprint, preview, reading
from vismoe.models.load.locate import inventory_of
from vismoe.models.moe.adapters import adapt
from vismoe.planning.needs import Hardware
from vismoe.planning.plan import Plan
from vismoe.planning.sizes import size_up
from vismoe.pools.kernel_cache import AMX_BYTES_PER_ENTRY, ENTRIES

ENDLESS = Hardware("cpu", 2**60, 2**60, free_host_bytes=0)
CONTEXT = 8192


@dataclass(frozen=True)
class Published:
    """A published model. `billions` of parameters, as the publisher states them or the checkpoint has them."""

    name: str
    family: str  # in the zoo
    billions: float
    config: Callable[[], PreTrainedConfig]


def of(family: str, **values: Any) -> Callable[[], PreTrainedConfig]:
    """The configuration of a family with the values of a model; those of a part are dicts under its name."""
    kind, *text = family.split(" + ")
    if text:
        values["text_config"] = dict(model_type=text[0]) | values.get("text_config", {})
    return partial(CONFIG_MAPPING[kind], **values)


def at(places: tuple[int, ...], kind: str, other: str, layers: int) -> list[str]:
    """The types of a model's layers: `kind` at these places, and `other`."""
    return [kind if layer in places else other for layer in range(layers)]


QWEN3_30B = (
    dict(vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48)
    | dict(num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8)
    | dict(norm_topk_prob=True, max_position_embeddings=40960)
)
BLOCKS = {"M": "mamba", "E": "moe", "*": "attention"}
NEMOTRON_3_NANO = (
    dict(layers_block_type=[BLOCKS[kind] for kind in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"], hidden_size=2688)
    | dict(num_attention_heads=32, num_key_value_heads=2, head_dim=128, intermediate_size=1856, mamba_num_heads=64)
    | dict(n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712)
)
LFM2_8B = dict(num_hidden_layers=24, layer_types=at((2, 6, 10, 14, 18, 21), "full_attention", "conv", 24))
GRANITE_H_TINY = (
    dict(vocab_size=100352, hidden_size=1536, intermediate_size=512, shared_intermediate_size=1024, num_hidden_layers=40)
    | dict(num_attention_heads=12, num_key_value_heads=4, num_local_experts=64, num_experts_per_tok=6)
    | dict(mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, tie_word_embeddings=True, max_position_embeddings=131072)
    | dict(layer_types=at((5, 15, 25, 35), "attention", "mamba", 40))
)
HUNYUAN_A13B = (
    dict(vocab_size=128167, hidden_size=4096, intermediate_size=3072, num_hidden_layers=32, num_attention_heads=32)
    | dict(num_key_value_heads=8, head_dim=128, num_experts=64, moe_topk=8)
    | dict(tie_word_embeddings=True, max_position_embeddings=32768)
)
MODELS = (
    Published("Qwen3-VL-30B-A3B", "qwen3_vl_moe", 31.1, partial(geometry_config, "qwen3-vl-30b-a3b")),
    Published("Qwen3-VL-235B-A22B", "qwen3_vl_moe", 235.7, partial(geometry_config, "qwen3-vl-235b-a22b")),
    Published("Qwen3.6-35B-A3B, Qwen3.5-35B-A3B", "qwen3_5_moe", 35.1, partial(geometry_config, "qwen3.5-35b-a3b")),
    Published("Qwen3-30B-A3B, Qwen3-Coder-30B-A3B", "qwen3_moe", 30.5, partial(geometry_config, "qwen3-30b-a3b")),
    Published("Qwen3-Next-80B-A3B", "qwen3_next", 79.7, partial(geometry_config, "qwen3-next-80b-a3b")),
    Published("Qwen1.5-MoE-A2.7B", "qwen2_moe", 14.3, partial(geometry_config, "qwen1.5-moe-a2.7b")),
    Published("Mixtral-8x7B", "mixtral", 46.7, partial(geometry_config, "mixtral-8x7b")),
    Published("OLMoE-1B-7B", "olmoe", 6.9, partial(geometry_config, "olmoe-1b-7b")),
    Published("DeepSeek-V2-Lite", "deepseek_v2", 15.7, partial(geometry_config, "deepseek-v2-lite")),
    Published("DeepSeek-VL2-Tiny", "deepseek_vl_v2 + deepseek_ocr2_text", 3.37, partial(geometry_config, "deepseek-vl2-tiny")),
    Published("DeepSeek-VL2-Small", "deepseek_vl_v2 + deepseek_v2", 16.1, partial(geometry_config, "deepseek-vl2-small")),
    Published("DeepSeek-VL2", "deepseek_vl_v2 + deepseek_v3", 27.5, partial(geometry_config, "deepseek-vl2")),
    Published("DeepSeek-V3, DeepSeek-R1", "deepseek_v3", 671, of("deepseek_v3")),
    Published("GLM-4.5V, GLM-4.6V", "glm4v_moe", 106, of("glm4v_moe", text_config=dict(head_dim=128))),
    Published("GLM-4.5-Air", "glm4_moe", 106.9, partial(geometry_config, "glm-4.5-air")),
    Published("GLM-4.7-Flash", "glm4_moe_lite", 30, of("glm4_moe_lite")),
    Published("gpt-oss-20b", "gpt_oss", 20.9, partial(geometry_config, "gpt-oss-20b")),
    Published("gpt-oss-120b", "gpt_oss", 116.8, partial(geometry_config, "gpt-oss-120b")),
    Published("Phi-3.5-MoE", "phimoe", 41.9, of("phimoe", attention_bias=True, lm_head_bias=True)),
    Published("MiniMax-M2", "minimax_m2", 229, of("minimax_m2")),
    Published("Mistral-Small-4-119B", "mistral3 + mistral4", 119, of("mistral3 + mistral4", tie_word_embeddings=False)),
    Published("LFM2-8B-A1B", "lfm2_moe", 8.3, of("lfm2_moe", **LFM2_8B)),
    Published(
        "gemma-4-26B-A4B",
        "gemma4",
        25.8,  # 25.2, and 0.55 of its tower
        of(
            "gemma4",
            text_config=dict(hidden_size=2816, intermediate_size=2112, moe_intermediate_size=704, num_hidden_layers=30)
            | dict(num_attention_heads=16, num_key_value_heads=8, num_global_key_value_heads=2, head_dim=256, global_head_dim=512)
            | dict(attention_k_eq_v=True, enable_moe_block=True, num_experts=128, top_k_experts=8, hidden_size_per_layer_input=0)
            | dict(sliding_window=1024, max_position_embeddings=262144),
            vision_config=dict(hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16)
            | dict(num_key_value_heads=16, head_dim=72),
        ),
    ),
    Published(
        "Llama-4-Scout-17B-16E",
        "llama4",
        109,
        of("llama4", text_config=dict(max_position_embeddings=10485760), vision_config=dict(hidden_size=1408, image_size=336)),
    ),
    Published(
        "InternVL3.5-30B-A3B",
        "internvl + qwen3_moe",
        30.8,
        of("internvl + qwen3_moe", text_config=QWEN3_30B, tie_word_embeddings=False),
    ),
    Published(
        "Kimi-K2.5, Kimi-K2.6",
        "kimi_k25 + deepseek_v3",
        1040,
        of(
            "kimi_k25 + deepseek_v3",
            text_config=dict(vocab_size=163840, num_attention_heads=64, num_key_value_heads=64, n_routed_experts=384)
            | dict(first_k_dense_replace=1, n_group=1, topk_group=1, max_position_embeddings=262144),
            tie_word_embeddings=False,
        ),
    ),
    Published("Nemotron-3-Nano-30B-A3B", "nemotron_h", 31.6, of("nemotron_h", **NEMOTRON_3_NANO)),
    Published("granite-4.0-h-tiny", "granitemoehybrid", 6.9, of("granitemoehybrid", **GRANITE_H_TINY)),
    Published(
        "Aria",
        "aria",
        25.3,
        of(
            "aria",
            text_config=dict(vocab_size=100352, hidden_size=2560, intermediate_size=1664, num_hidden_layers=28)
            | dict(num_attention_heads=20, num_key_value_heads=20, moe_num_experts=64, moe_topk=6, moe_num_shared_experts=2)
            | dict(max_position_embeddings=65536),
            vision_config=dict(model_type="idefics3_vision", hidden_size=1152, intermediate_size=4304, num_hidden_layers=27)
            | dict(num_attention_heads=16, image_size=980, patch_size=14),
            projector_patch_to_query_dict={1225: 128, 4900: 256},
        ),
    ),
    Published("DeepSeek-V3.2", "deepseek_v32", 671, of("deepseek_v32")),  # without its layer for multi-token prediction
    Published("GLM-5", "glm_moe_dsa", 744, of("glm_moe_dsa")),
    Published("MiMo-V2-Flash", "mimo_v2_flash", 309, of("mimo_v2_flash")),
    Published("Solar-Open-100B", "solar_open", 102.6, of("solar_open")),
    Published("A.X-K1", "axk1", 519, of("axk1")),
    Published("FlexOlmo-7x7B-1T", "flex_olmo", 33, of("flex_olmo")),
    Published("Hunyuan-A13B", "hunyuan_v1_moe", 80, of("hunyuan_v1_moe", **HUNYUAN_A13B)),
)


HEAD = f"""
## Published models

The smallest `--memory` is what `vismoe plan MODEL --context {CONTEXT} --kernels torch` accepts on every CPU whose disk was not
measured, for a request of {CONTEXT} tokens, all of them an image's where the model reads images. It is made from the dimensions
in the publisher's config.json, without weights. VisMoE's own kernels take a little less; transformers {OLDEST} takes much more
for some recurrent models. Where it is large beside the weights, the reason is attention to the whole prompt at once (gpt-oss),
an index over it (DeepSeek-V3.2, GLM-5), the tower (Aria, gemma), or layers without experts (Llama 4). A smaller `--context` takes
less.

*Used per token*: all parameters but those of the experts that a token does not choose.

| model | family | parameters | used per token | weights in 16 bits | smallest `--memory` |
|---|---|---|---|---|---|
"""


@contextmanager
def any_cpu() -> Iterator[None]:
    """Whatever this machine is: nothing measured, all memory and none for a page cache, and the most for what varies.

    Only the longest prompt is run, except with running states, which are measured at short prompts and reckoned from there.
    """
    measure, runs = footprint._Forward, {}

    def forward(model: Any, tokens: int, most_rows: int | None, repeated: Any = None) -> Any:
        caches = DynamicCache(config=model.config.get_text_config()).layers
        if not any(isinstance(cache, LinearAttentionLayer) for cache in caches):
            tokens = CONTEXT
        if (tokens, repeated) not in runs:
            runs[tokens, repeated] = measure(model, tokens, most_rows, repeated)
        return runs[tokens, repeated]

    with (
        patch.object(reading, "load_profile", lambda: None),
        patch.object(footprint, "find_spec", lambda name: name),
        patch.object(footprint, "kernel_cache_entries", lambda kernels: 2 * ENTRIES),
        patch.object(footprint, "kernel_cache_bytes", lambda dtype, entries: entries * AMX_BYTES_PER_ENTRY),
        patch.object(footprint, "_Forward", forward),
    ):
        yield


@dataclass(frozen=True)
class Described:
    """A published model on the meta device."""

    model: Any
    parameters: int
    used: int  # by one token

    @classmethod
    def of(cls, published: Published) -> "Described":
        config = published.config()
        config._name_or_path = f"publisher/{published.name}"  # as a name on the hub, which has a tokenizer
        with torch.device("meta"):
            model = zoo()[published.family].model_class._from_config(config, dtype=torch.bfloat16).eval()
        adapt(model)
        refuse_unsupported(model)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        inventory = inventory_of(model, model.dtype)
        unused = [(layer.num_experts - layer.top_k, inventory.layout(layer.index)) for layer in inventory.layers]
        used = parameters - sum(experts * layout.record_bytes // 2 for experts, layout in unused)
        return cls(model, parameters, used)

    def plan(self, memory: str) -> Plan:
        """Raises BudgetError if the plan does not accept this memory."""
        settings = Settings(memory=memory, context=CONTEXT, kernels="torch", pinned_layers=0)
        with any_cpu():
            return preview._preview(self.model, [], settings, ENDLESS)

    def cells(self, memory: str) -> list[str]:
        """What the page says about the model."""
        counts = [f"{number / 1e9:.1f}B" for number in (self.parameters, self.used)]
        return [*counts, format_bytes(2 * self.parameters), f"`{memory}`"]


def section() -> str:
    """The part of the page about published models; measuring them takes half a minute."""
    rows = []
    for published in MODELS:
        described = Described.of(published)
        cells = described.cells(size_up(described.plan("100%").minimum_bytes))
        rows.append(f"| {' | '.join([published.name, f'`{published.family}`', *cells])} |\n")
    return HEAD + "".join(rows)
