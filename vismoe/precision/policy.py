"""A policy: the pair of formats, the rule that chooses between them, and its numbers. Frozen data."""

from dataclasses import dataclass

from vismoe.config import Settings
from vismoe.pair import FormatPair

HYSTERESIS = 1.5  # a challenger must be this many times hotter than the expert whose place it takes


@dataclass(frozen=True)
class Policy:
    """The rule that chooses formats while the model runs: hotness (DynaExq), importance (DyMoE), or both."""

    pair: FormatPair
    hotness: bool
    importance: bool
    retention: float = 0.75  # mean share of the demanded experts that are critical, 0.5 to 1
    decay: float = 0.99  # alpha of hotness, per token
    period_tokens: int = 16  # T: tokens between two updates of the hot experts
    hysteresis: float = HYSTERESIS

    @classmethod
    def of(cls, settings: Settings) -> "Policy":
        """The policy of an engine's settings; not for `exact`."""
        pair = settings.pair
        assert pair is not None, "exact has no policy that chooses formats"
        return cls(
            pair,
            hotness="hotness" in settings.policy,
            importance="importance" in settings.policy,
            retention=settings.retention,
            decay=settings.hotness_decay,
            period_tokens=settings.hotness_period,
        )
