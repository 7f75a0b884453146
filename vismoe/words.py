"""Statistics as words, in one line each; the command line, the page and reports use the same."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vismoe.engine.stats import PrecisionInfo


def share_words(shares: Mapping[str, float]) -> str:
    """`{"int4": 0.71, "int2": 0.29}` -> `71.0% int4, 29.0% int2`, the larger one first."""
    return ", ".join(f"{share:.1%} {name}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))


def draft_words(drafts: Mapping[str, float]) -> str:
    """What the rounds of one answer came to; `drafts` is `DraftFigures` as JSON."""
    if not drafts["rounds"]:
        return "no token was worth guessing"
    accepted = f"{drafts['accepted']:,} of {drafts['drafted']:,} guessed tokens were the model's own"
    promised = f"{drafts['foreseen']:,} of {drafts['promised']:,} experts asked for ahead were demanded"
    return f"{accepted}; {promised}" if drafts["promised"] else accepted


def precision_words(running: "PrecisionInfo | None") -> str:
    """The policy and its formats in one line; `running` is `Engine.precision`."""
    if running is None:
        return "exact: no expert changes its format"
    retained = f", {running.retention:.0%} of the demanded experts in the better one" if "importance" in running.policy else ""
    return f"{running.policy}: {running.formats}{retained}"
