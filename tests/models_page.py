"""docs/models.md: every mixture-of-experts family, how it was checked, or why it is refused.

`make models` writes the page. It is made of the zoo of the installed transformers and of the tables; which families the oldest
supported transformers has is asked of that one, or read off the page itself.
"""

import sys
from collections.abc import Collection
from pathlib import Path

import transformers
from family_zoo import Family, families
from packaging.version import Version

from vismoe.models.family.families import REFUSED

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
OLDEST = "5.17"
PREFILL_ONLY = {"diffusion_gemma": "it generates blocks by diffusion, not token by token"}
LOOP_OF_ITS_OWN_IN_OLDEST = {"aria"}  # on the experts interface in later releases
FAILS_IN_OLDEST = {"deepseek_v4": "bfloat16"}  # transformers itself does, with or without us
INDEXED = "DynamicIndexedLayer", "an index beside its keys chooses which of them are seen"
HYBRID = "LinearAttentionAndFullAttentionLayer", "its keys pass through convolutions over neighbours"
KEEPS_ALL = {  # families whose visual tokens cannot be dropped: (a part of the pruner's reason, the reason in plain words)
    "diffusion_gemma": ("2 stacks", "an encoder and a decoder see the prompt"),
    "glm5_next": INDEXED,
    "inkling2": HYBRID,
    "inkling_mm_model": HYBRID,
    "mistral_large4": INDEXED,
    "qwen4_exp": INDEXED,
    "unlimited_ocr": ("ReferenceSlidingWindowLayer", "a sliding window beside the images, which all layers see whole"),
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

| family | class | since | input | drops tokens | result |
|---|---|---|---|---|---|
"""


def is_oldest() -> bool:
    """Whether the installed transformers is the oldest supported one."""
    return Version(transformers.__version__).release[:2] == Version(OLDEST).release


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
    parts = sorted(REFUSED.keys() - families().keys())  # classes that combine a family with others
    rest = "".join(f"| `{name}` | - | - | - | - | {result_of(name)} |\n" for name in parts)
    return HEAD + "".join(_row(family, of_oldest) for _, family in sorted(families().items())) + rest


def _row(family: Family, of_oldest: Collection[str]) -> str:
    since = OLDEST if family.name in of_oldest else "newer"
    kind = "text, images" if family.with_images else "text"
    return f"| `{family.name}` | {family.class_name} | {since} | {kind} | {_drops(family)} | {result_of(family.name)} |\n"


def _drops(family: Family) -> str:
    """Whether visual tokens can be left out of the deeper layers."""
    if not family.with_images or family.name in REFUSED:
        return "-"
    return f"no: {KEEPS_ALL[family.name][1]}" if family.name in KEEPS_ALL else "yes"


def rows(text: str) -> dict[str, list[str]]:
    """The cells of a page, by family."""
    cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `"))
    return {row[0].strip("`"): row for row in cells}


if __name__ == "__main__":
    if sys.argv[1:] == ["--names"]:
        print(*families())
    else:
        PAGE.write_text(page(set(sys.argv[1:])))
