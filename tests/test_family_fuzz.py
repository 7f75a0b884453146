"""The first promise beyond the configurations that families are published with: random ones of any family, through few slabs.

Oracle: transformers' eager experts, every parameter in fresh memory; bit for bit, with torch's kernels, over a prefill and greedy
steps of a padded batch. What transformers itself does not run, or makes no finite numbers of, is no case; a model that ends up
without routed experts is refused by name. With HYPOTHESIS_PROFILE=searching there are many times as many examples.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from family_zoo import LAYERS, families
from hypothesis import HealthCheck, event, given, reject, settings
from hypothesis import strategies as st
from models_page import PREFILL_ONLY
from searching import SEARCHING
from test_families import Specimen, first, inventory
from test_footprint import CONTEXT, measured
from transformers import AutoConfig

import vismoe
from vismoe.errors import UnsupportedModelError
from vismoe.models.family.families import EXPERT_COUNTS, TOP_K, expert_modules
from vismoe.models.moe.adapters import adapt

EXAMPLES = 500 if SEARCHING else 8
STEPS = 3
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
OF_A_RUN = {"return_dict", "use_cache", "is_encoder_decoder", "use_mamba_kernels", "use_mambapy", "use_associative_scan"}
# What a field may be, by name; whichever of them a configuration declares is drawn, or left as it is.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act"), st.sampled_from(["silu", "gelu", "relu", "relu2"])),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "moe_num_shared_experts", "zero_expert_num"), st.integers(0, 3)),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), st.integers(0, 3)),
    **dict.fromkeys(("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"), st.integers(1, 2)),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size"), st.sampled_from([4, 9, 32])),
    **dict.fromkeys(("routed_scaling_factor", "route_scale", "residual_multiplier"), st.sampled_from([0.5, 1.0, 2.5])),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_hidden_size"), st.sampled_from([8, 20, 56])),
    "hidden_size": st.sampled_from([32, 64, 96]),
    "num_key_value_heads": st.sampled_from([1, 2, 4]),
    "mlp_only_layers": st.lists(st.integers(0, LAYERS - 1), unique=True),
}
PERIODS = ("expert_layer_period", "attn_layer_period", "layer_group_size")
OFFSETS = ("expert_layer_offset", "attn_layer_offset")
WIDTHS = st.sampled_from([8, 12, 20, 36, 56, 72])  # of experts and other MLPs


@dataclass(frozen=True)
class Case:
    family: str
    overrides: dict[str, Any]
    dtype: torch.dtype
    batch: int
    tokens: int
    padded: int  # tokens of the first row that are padding
    share: float  # of the experts that fit; 0: two slabs per geometry
    settings: dict[str, Any]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(tiny_models.FAMILIES))
    tokens = draw(st.integers(1, 24))
    options = st.fixed_dictionaries(
        {},
        optional={
            "lookahead": st.just("none"),
            "deterministic": st.just(True),
            "eviction": st.sampled_from(["lru", "lfu"]),
            "window": st.integers(1, 3),
            "reads": st.sampled_from(["cached", "direct"]),
            "io_threads": st.integers(1, 3),
        },
    )
    return Case(
        family,
        changed(family, draw(changes(*text_fields(family)))),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(1, 3)),
        tokens,
        draw(st.integers(0, min(3, tokens - 1))),
        draw(st.sampled_from([0, 0, 0.3, 0.7, 1])),
        draw(options),
    )


@st.composite
def changes(draw: st.DrawFn, declared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Values for some of the `declared` fields; `own`: what the tiny configuration sets already."""
    known = {**declared, **own}
    found: dict[str, Any] = {}
    groups = draw(st.integers(1, 3))
    experts = groups * draw(st.integers(2, 13))
    chosen = draw(st.integers(1, min(8, experts)))
    if draw(st.booleans()):
        found |= {name: experts for name in EXPERT_COUNTS if name in declared}
        found |= {name: chosen for name in TOP_K if name in declared}
        if "n_group" in declared:
            found |= {"n_group": groups, "topk_group": draw(st.integers(1, groups))}
    if draw(st.booleans()):
        found |= draw(layers(declared, own))
    for name, value in known.items():
        flag = isinstance(value, bool) and not name.startswith(("_", "output_")) and name not in OF_A_RUN
        width = name.endswith("intermediate_size") and isinstance(value, int)
        kind = FIELDS.get(name, WIDTHS if width else st.booleans() if flag else None)
        if kind is not None and value is not None and draw(st.integers(0, 3)) == 3:
            found[name] = draw(kind)
    return found


@st.composite
def layers(draw: st.DrawFn, declared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Another number of layers, of the kinds that the family has, in any order."""
    count = draw(st.integers(1, 5))
    found: dict[str, Any] = {"num_hidden_layers": count} if "num_hidden_layers" in declared else {}
    for name, kinds in kinds_of_layers(declared, own).items():
        some = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=len(kinds), unique_by=repr))
        found[name] = draw(st.lists(st.sampled_from(some), min_size=count, max_size=count))
    if "layers_block_type" in found:  # whose length is the number of layers
        found.pop("num_hidden_layers", None)
    found |= {name: draw(st.integers(1, 5)) for name in PERIODS if name in declared}
    return found | {name: draw(st.integers(0, 4)) for name in OFFSETS if name in declared}


def kinds_of_layers(declared: dict[str, Any], own: dict[str, Any]) -> dict[str, list[Any]]:
    """What the fields with one value per layer may say."""
    depth = declared.get("num_hidden_layers")
    found = {}
    for name, value in declared.items():
        mine = own.get(name, value)
        if name not in FIELDS and isinstance(mine, list) and mine and len(value or mine) in (depth, len(mine)):
            found[name] = list({repr(kind): kind for kind in [*(value or []), *mine]}.values())
    return found


def text_fields(family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the configuration of the family's text model declares, what its tiny one sets)."""
    default, base = families()[family].model_class.config_class(), tiny_models.OVERRIDES.get(family, {})
    nested = "text_config" in default.sub_configs
    return vars(default.text_config if nested else default), base.get("text_config", {}) if nested else base


def changed(family: str, found: dict[str, Any]) -> dict[str, Any]:
    """The overrides of the tiny configuration, with these fields of its text model changed."""
    base = tiny_models.OVERRIDES.get(family, {})
    if "text_config" in families()[family].model_class.config_class().sub_configs:
        return base | {"text_config": base.get("text_config", {}) | found}
    return base | found


def answers(model: Any, case: Case) -> list[torch.Tensor]:
    """Logits of a prefill of a padded batch, and of greedy steps."""
    inputs = tiny_models.prompt(case.family, case.tokens, dtype=case.dtype, batch=case.batch)
    inputs["attention_mask"][0, : case.padded] = 0
    with torch.inference_mode():
        prefill = first(model(**inputs, return_dict=True))
    return [prefill, *([] if case.family in PREFILL_ONLY else tiny_models.greedy(model, inputs, STEPS).logits)]


def eager(case: Case, folder: Path) -> tuple[Specimen, list[torch.Tensor]]:
    """The model, and what eager says; a case that transformers does not run is none."""
    try:
        specimen = Specimen(case.family, folder)
        expected = answers(specimen.reference(case.dtype), case)
    except Exception as error:
        event(f"transformers itself: {case.family}: {type(error).__name__}")
        reject()
    if not all(logits.isfinite().all() for logits in expected):
        event("not finite")
        reject()
    return specimen, expected


def has_experts(folder: Path) -> bool:
    with torch.device("meta"):
        model = tiny_models.model_class(folder)._from_config(AutoConfig.from_pretrained(folder))
    adapt(model)
    return any(True for _ in expert_modules(model))


def share_of(specimen: Specimen, case: Case) -> float:
    experts = inventory(specimen.checkpoint(case.dtype), case.dtype)
    least = 2 * sum(layout.record_bytes for layout in experts.layouts) / experts.total_bytes
    return min(1.0, max(case.share, least + 1e-8))


@pytest.mark.budget(10)
@pytest.mark.usefixtures("one_thread")
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), print_blob=True)
@given(cases())
def test_a_random_configuration_of_any_family_is_eagers_bit_for_bit(case):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch, torch.inference_mode(False):
        patch.setitem(tiny_models.OVERRIDES, case.family, case.overrides)
        specimen, expected = eager(case, Path(folder))
        if not has_experts(specimen.checkpoint(case.dtype)):
            with pytest.raises(UnsupportedModelError):
                specimen.load(case.dtype)
            event("no routed experts")
            return
        specimen.context = 3 * (specimen.context + case.tokens + STEPS)
        model = specimen.load(case.dtype, memory=f"{100 * share_of(specimen, case)}%", **case.settings)
        for step, (wanted, ours) in enumerate(zip(expected, answers(model, case), strict=True)):
            assert torch.equal(wanted, ours), f"step {step}: off by {(wanted - ours).abs().max()}"
        runtime = vismoe.runtime_of(model)
        runtime.pager.check_integrity()
        runtime.pager.close()
        event(f"equal: {case.family}")


def several_kinds(family: str) -> bool:
    """Whether the family's layers differ from each other in kind."""
    fields = text_fields(family)
    return "attn_layer_period" in fields[0] or any(len(kinds) > 1 for kinds in kinds_of_layers(*fields).values())


def patterns() -> st.SearchStrategy:
    """(family, what its layers are); asked for when it is tried, because every family's configuration is imported for it."""
    hybrid = [family for family in tiny_models.FAMILIES if several_kinds(family)]
    return st.sampled_from(hybrid).flatmap(lambda family: st.tuples(st.just(family), layers(*text_fields(family))))


@pytest.mark.usefixtures("one_thread")
@settings(max_examples=2 * EXAMPLES, suppress_health_check=list(HealthCheck))
@given(st.deferred(patterns))
def test_layers_in_any_order_are_measured_as_they_run_or_refused_where_transformers_fails(pattern):
    family, found = pattern
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models.OVERRIDES, family, changed(family, found))
        try:
            model = tiny_models.build(family)
        except Exception:
            reject()  # a configuration that contradicts itself
        try:
            held = tiny_models.held_by_cache(model, CONTEXT)
        except Exception as error:
            event(f"refused: {type(error).__name__}")
            with pytest.raises(UnsupportedModelError, match=f"^{family}: .*Instead"):
                measured(family)
            return
        event("measured")
        assert measured(family).cache_bytes(CONTEXT) == held
