"""docs/models.md: every mixture-of-experts family, how it was checked, or why it is refused.

`make models` writes the page. It is made of the zoo of the installed transformers and of the tables; which families the oldest
supported transformers has is asked of that one, or read off the page itself.
"""

import sys
from collections.abc import Collection
from pathlib import Path

from family_zoo import Family, possible_composites, zoo
from searching import OLDEST, is_oldest

from vismoe.models.family.families import REFUSED

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
PREFILL_ONLY = {"diffusion_gemma": "it generates blocks by diffusion, not token by token"}
LOOP_OF_ITS_OWN_IN_OLDEST = {"aria"}  # on the experts interface in later releases
FAILS_IN_OLDEST = {"deepseek_v4": "bfloat16"}  # transformers itself does, with or without us
INDEXED = "DynamicIndexedLayer", "an index beside its keys chooses which of them are seen"
HYBRID = "LinearAttentionAndFullAttentionLayer", "its keys pass through convolutions over neighbours"
KEEPS_ALL = {  # families whose visual tokens cannot be dropped: (a part of the pruner's reason, the reason in plain words)
    "diffusion_gemma": ("2 stacks", "an encoder and a decoder see the prompt"),
    "glm5_next": INDEXED,
    "hy_v4_vl": INDEXED,
    **dict.fromkeys(("inkling2", "inkling2_loop"), HYBRID),
    "inkling_mm_model": HYBRID,
    "mistral_large4": INDEXED,
    "nemotron_h_omni + nemotron_h": ("DummyLayer", "its layers of experts are apart from those with keys and values"),
    "qwen4_exp": INDEXED,
    "unlimited_ocr": ("ReferenceSlidingWindowLayer", "a sliding window beside the images, which all layers see whole"),
}
ALONE = {  # families whose requests cannot decode in one pass: (a part of what is said, the reason in plain words)
    "glm5_next": ("number of dimensions", "a layer hands more to the next one than a row of tokens"),
    "hy_v4": ("Shared DSA layers", "layers share what an earlier one has chosen"),
    **dict.fromkeys(
        ("inkling2", "inkling2_loop"), ("must match the size", "its layers are handed distances to one sequence's keys")
    ),
    "llama4": ("attend to chunks", "its layers attend to chunks"),
    "minimax": ("MiniMaxCache", "it has a cache of its own kind"),
    "qwen4_exp": ("Sizes of tensors", "its layers keep more than a row each"),
}
ROUNDED = {  # families whose bits in a shared pass depend on what this processor makes of float32 products: why
    "hy_v4_vl": "its connections between layers are float32 products, which may round by the number of rows",
}
BY_MIXER = {  # families whose attention, or what takes its place, runs row by row with its projections
    *(
        "aria axk1 axk2 bailing_hybrid dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots3_note flint gemma4 "
        "glm4_moe_lite glm_moe_dsa gpt_oss granitemoe_swa hy_v4_vl kimi_linear longcat_flash mimo_v2_flash minimax_m3_vl "
        "mistral4 mistral_large4 muse_spark"
    ).split(),
    "internvl + gpt_oss",
    "mistral3 + mistral4",
    "kimi_k25 + deepseek_v3",
    "deepseek_vl_v2 + deepseek_v2",
    "deepseek_vl_v2 + deepseek_v3",
}
UNTRIED = {  # classes that take their text model from the configuration and are in no list: the reason
    "aya_vision": "the sizes of its tower that transformers has by default fit no model",
    "blip-2": "it runs with an image only",
    "fast_vlm": "its tower is another package's",
    "florence2": "its text model is an encoder-decoder",
    "hyperclovax_vision_v2": "its text model scales logits by a value that others do not have",
    "instructblip": "it runs with an image only",
    "instructblipvideo": "it runs with an image only",
    "paligemma": "its text model has a kind of attention that others do not have",
    "perception_lm": "its tower is another package's",
}
HEAD = f"""# Models

Every family of mixture-of-experts models in transformers, found by inspecting it. `make models` writes this page, and the test
suite checks it; do not edit it by hand.

*Equal* means: a tiny random model of the family, saved, loaded through VisMoE with two slabs per expert geometry, and run on a
padded batch of two, gives bit for bit the logits of transformers' eager experts, in float32 and in bfloat16, over a prefill (with
an image where the input column names them) and greedy steps. That says that the arithmetic is the same. It says nothing about a
real checkpoint of the family, which may never have been tried. *Since*: {OLDEST} is the oldest transformers supported.

*Drops tokens* means: visual tokens can be left out of the deeper layers (`keep` below 1), and what is kept computes, to 1e-5 in
float32, what an independent reference computes that hides the dropped ones. With sliding attention that holds up to the window,
and longer sequences are refused; with linear attention it begins at a layer that has keys and values, one sequence at a time.

*Batches* means: the next tokens of several requests are computed in one pass, and their logits are, in bfloat16 with the CPU
kernels, bit for bit those of a pass each, unless the row says otherwise. By layer: what mixes tokens runs request by request,
and everything else together.

A name with a plus is a composite: a class that takes its text model from its configuration, together with a text model that has
experts. The table has those that publishers combine, and two more (with lfm2_vl and llava_onevision). transformers has no class
for DeepSeek-VL2 (`deepseek_vl_v2`); the one of VisMoE ([families.md](families.md)) has the language model deepseek_ocr2_text in
DeepSeek-VL2-Tiny, deepseek_v2 in Small, and deepseek_v3 in the largest.

| family | class | since | input | drops tokens | batches | result |
|---|---|---|---|---|---|---|
"""


PLANNED = """
Other classes take any text model too. No published model is known that has one of these with experts, and the test suite runs
none of them. It checks that VisMoE finds the experts of one combination each, and that the plan includes the tower:
"""


def possible() -> list[str]:
    """The composites of which only the plan is checked."""
    return [name for name in sorted(possible_composites()) if name.split(" + ")[0] not in UNTRIED]


def refusal_of(family: str) -> str | None:
    """Why the family does not run with the installed transformers; None if it does."""
    if family in LOOP_OF_ITS_OWN_IN_OLDEST and is_oldest():
        return "its experts bypass the experts interface"
    return REFUSED[family].reason if family in REFUSED else None


def result_of(family: str) -> str:
    """The last column: the same under every version of transformers."""
    if family in REFUSED:
        return f"refused: {REFUSED[family].reason}"
    parts = ["equal"]
    if family in PREFILL_ONLY:
        parts.append(f"prefill only: {PREFILL_ONLY[family]}")
    if family in LOOP_OF_ITS_OWN_IN_OLDEST:
        parts.append(f"refused with transformers {OLDEST}")
    if family in FAILS_IN_OLDEST:
        parts.append(f"transformers {OLDEST} itself fails in {FAILS_IN_OLDEST[family]}")
    return "; ".join(parts)


def page(of_oldest: Collection[str]) -> str:
    """The page for the installed transformers, with the families that the oldest supported one has."""
    parts = sorted(REFUSED.keys() - zoo().keys())  # classes that combine a family with others
    rest = "".join(f"| `{name}` | - | - | - | - | - | {result_of(name)} |\n" for name in parts)
    planned = ", ".join(f"`{name}`" for name in possible())
    return HEAD + "".join(_row(family, of_oldest) for _, family in sorted(zoo().items())) + rest + PLANNED + planned + ".\n"


def _row(family: Family, of_oldest: Collection[str]) -> str:
    since = OLDEST if family.name in of_oldest else "newer"
    kind = "text, images" if family.with_images else "text"
    cells = family.class_name, since, kind, _drops(family), _batches(family.name), result_of(family.name)
    return f"| `{family.name}` | {' | '.join(cells)} |\n"


def _drops(family: Family) -> str:
    """Whether visual tokens can be left out of the deeper layers."""
    if not family.with_images or family.name in REFUSED:
        return "-"
    return f"no: {KEEPS_ALL[family.name][1]}" if family.name in KEEPS_ALL else "yes"


def _batches(family: str) -> str:
    """Whether requests can decode in one pass."""
    if family in REFUSED or family in PREFILL_ONLY:
        return "-"
    if family in ALONE:
        return f"no: {ALONE[family][1]}"
    return ("by layer" if family in BY_MIXER else "yes") + (f", to rounding: {ROUNDED[family]}" if family in ROUNDED else "")


def rows(text: str) -> dict[str, list[str]]:
    """The cells of a page, by family."""
    cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `"))
    return {row[0].strip("`"): row for row in cells}


if __name__ == "__main__":
    if sys.argv[1:] == ["--names"]:
        print(*zoo(), sep="\n")
    else:
        from published_models import section

        PAGE.write_text(page(set(sys.argv[1].splitlines())) + section())
