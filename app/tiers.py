"""The tiers from which one request got the experts' bytes, per token: memory, the link to the device, the disk. HTML, pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from vismoe.config import format_bytes
from vismoe.types import Phase
from vismoe.words import precision_words, share_words

MEANINGS = {
    Phase.PREFILL: "reading the question: many tokens at once need most experts of a layer, each fetched at most once",
    Phase.DECODE: "writing the answer: one token at a time needs a few experts of each layer",
}


@dataclass(frozen=True)
class Sources:
    """What one phase of a request needed: sums over its `PassFigures`, by their names."""

    tokens: int
    seconds: float
    stall_seconds: float
    hits: int
    misses: int
    bytes_read: int  # from disk
    bytes_copied: int  # over the link

    @property
    def hit_rate(self) -> float | None:
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None


def sources(passes: Sequence[Any], phase: Phase) -> Sources:
    """The sum over the passes of one phase."""
    own = [one for one in passes if one.phase == phase]
    return Sources(**{name: sum(getattr(one, name) for one in own) for name in Sources.__dataclass_fields__})


def tiers(figures: Any) -> str:
    """HTML: for prefill and decode, bytes per token of each tier as bars, with the hit rate and the stalled share."""
    capacity = figures.capacity
    record_bytes = capacity["bytes"] / capacity["slabs"] if capacity["slabs"] else 0.0
    cards = [_card(phase, found, record_bytes) for phase in MEANINGS if (found := sources(figures.passes, phase)).tokens]
    if not cards:
        return '<p class="vm-note">Nothing ran.</p>'
    return f'<div class="vm-cards">{"".join(cards)}</div><p class="vm-note">{_formats(figures)}</p>'


def _formats(figures: Any) -> str:
    shares = share_words(figures.formats) or "nothing yet"
    return escape(f"Formats in which experts were computed: {shares} ({precision_words(figures.precision)}).")


def _card(phase: Phase, found: Sources, record_bytes: float) -> str:
    rate = f"{found.hit_rate:.1%}" if found.hit_rate is not None else "no experts needed"
    stalled = found.stall_seconds / found.seconds if found.seconds else 0.0
    per_token = {
        ("hit", "memory"): found.hits * record_bytes / found.tokens,
        ("link", "link to the device"): found.bytes_copied / found.tokens,
        ("disk", "disk"): found.bytes_read / found.tokens,
    }
    most = max(per_token.values()) or 1.0
    bars = "".join(
        f"<tr><th>{name}</th><td>{format_bytes(nbytes)}</td>"
        f'<td class="vm-bar"><i class="vm-{kind}" style="width:{100 * nbytes / most:.1f}%"></i></td></tr>'
        for (kind, name), nbytes in per_token.items()
    )
    return (
        f'<section><h4>{phase} · {found.tokens} token{"s" * (found.tokens != 1)}</h4><p class="vm-note">{MEANINGS[phase]}</p>'
        f"<table><caption>bytes of experts per token, from</caption>{bars}</table>"
        f"<p><b>{rate}</b> hit rate: {found.hits:,} hits, {found.misses:,} misses<br>"
        f"<b>{stalled:.0%}</b> of {found.seconds:.2f} s stalled</p></section>"
    )
