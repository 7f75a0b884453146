"""What a policy is: the pair of formats it chooses from, who decides, and with which numbers. Frozen data."""

from dataclasses import dataclass

from vismoe.config import Settings
from vismoe.pair import FormatPair

__all__ = ["HYSTERESIS", "Policy"]

HYSTERESIS = 1.5  # how many times hotter a challenger must be than the expert whose place it takes


@dataclass(frozen=True)
class Policy:
    """Who decides formats while the model runs: hotness (DynaExq), importance (DyMoE), or both."""

    pair: FormatPair
    hotness: bool
    importance: bool
    retention: float = 0.75  # mean share of the demanded experts that are critical, 0.5 to 1
    decay: float = 0.99  # alpha of hotness, per token
    period_tokens: int = 16  # T: tokens between two looks at who is hot
    hysteresis: float = HYSTERESIS

    @classmethod
    def of(cls, settings: Settings) -> "Policy":
        """The policy of an engine's settings, which are not those of `exact`."""
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
