"""Whether a draft pool is worth the experts that it displaces: two expected rates, one with a full cache and no drafts, one with
what a copy of all experts leaves of the cache, and drafts.

    T(k) = k d + v(k+1) + (B(k+1) - min(f B(k+1), r k d)) / r

as in governor.py, with nothing measured here: B comes from replays of recorded answers, f from rounds over them. What is copied
while drafts are verified is not counted as hidden: replays of whole rounds come out so (eval/studies/draft_replay.py).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from vismoe.config import MOST_DRAFTED
from vismoe.speculate.governor import expected_tokens

LEAST = 1.05  # of the rate without drafts, for a draft pool to be made


@dataclass(frozen=True)
class Fidelity:
    """How well drafts of one format foresee a model. Index k-1: of the k-th drafted token, or of drafts of k tokens."""

    acceptance: tuple[float, ...]  # alpha
    same_set: tuple[float, ...]  # share of the layers in which a token's experts are the model's own ones
    covered: tuple[float, ...]  # share of the experts wanted by the rows that drafted (the first k) which the draft had named
    foreseen: tuple[float, ...]  # f: the same of all k+1 rows that are verified
    unused: tuple[float, ...]  # share of the experts named by a draft that its verification did not want

    def __post_init__(self) -> None:
        lists = (self.acceptance, self.same_set, self.covered, self.foreseen, self.unused)
        if len({len(of) for of in lists}) != 1 or not self.acceptance or not all(0 <= one <= 1 for of in lists for one in of):
            raise ValueError(f"no shares: {self}")


@dataclass(frozen=True)
class DraftCurves:
    """What `vismoe calibrate` finds of a model and of drafts for it."""

    shares: tuple[float, ...]  # of the experts in memory, ascending
    missing: tuple[tuple[float, ...], ...]  # for each share: experts that a pass over 1, 2, ... tokens of an answer fetches
    formats: dict[str, Fidelity] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = {len(of) for of in self.missing}
        if len(self.shares) != len(self.missing) or len(rows) != 1 or 0 in rows or list(self.shares) != sorted(self.shares):
            raise ValueError(f"no curves: shares {self.shares}, {len(self.missing)} of them with {sorted(rows)} rows")

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Self:
        formats = {
            name: Fidelity(**{of: tuple(shares) for of, shares in fidelity.items()}) for name, fidelity in said["formats"].items()
        }
        return cls(tuple(said["shares"]), tuple(map(tuple, said["missing"])), formats)

    def experts_missing(self, share: float, rows: int) -> float:
        """Experts that a pass of `rows` fetches with this share of the experts in memory; 0 where all are."""
        if share >= 1:
            return 0.0
        return float(np.interp(share, (*self.shares, 1.0), (*(of[rows - 1] for of in self.missing), 0.0)))


@dataclass(frozen=True)
class RoundRates:
    """How fast a machine computes and fetches."""

    draft_s: float  # d
    compute_s: Callable[[int], float]  # v(n), of a pass of n rows without its stalls
    expert_bytes: float
    link_bytes_per_s: float  # r, of experts that are missing


@dataclass(frozen=True)
class Worth:
    """What is expected of a draft pool."""

    format: str
    share: float  # of the experts in memory without drafts
    drafted_share: float  # beside a draft pool
    tokens_per_s: float  # without drafts
    drafted_tokens_per_s: float  # 0: the pool leaves no memory for experts
    k: int  # tokens of the drafts with which that is

    @property
    def gain(self) -> float:
        return self.drafted_tokens_per_s / self.tokens_per_s

    @property
    def refusal(self) -> str | None:
        """Why there should be no draft pool; None: there should."""
        if self.gain >= LEAST:
            return None
        without = f"{self.tokens_per_s:.3g} tokens/s are expected with {min(1, self.share):.0%} of the experts in memory"
        if not self.drafted_tokens_per_s:
            why = f"a copy of all experts in {self.format} leaves too little memory for them; without drafts {without}"
        else:
            why = (
                f"without drafts {without}, and {self.drafted_tokens_per_s:.3g} with {min(1, self.drafted_share):.0%} beside a "
                f"copy in {self.format} that drafts {self.k} tokens each time: {self.gain:.2f} times as many, and less than "
                f"{LEAST:g} times is not worth it"
            )
        return why


def worth(
    curves: DraftCurves,
    format: str,
    rates: RoundRates,
    share: float,
    pool_share: float,
    lengths: Iterable[int] = range(1, MOST_DRAFTED + 1),
) -> Worth:
    """share: of the experts that fit into memory without drafts, above 1 where more than all of them would; pool_share: of them
    that a draft pool displaces. lengths: the k that may be drafted; those that were not calibrated are left out."""
    fidelity, left = curves.formats[format], share - pool_share
    tokens, most = expected_tokens(fidelity.acceptance), min(len(curves.missing[0]) - 1, len(fidelity.acceptance))

    def seconds(k: int, share: float) -> float:
        drafting_s = k * rates.draft_s
        missing_s = curves.experts_missing(share, k + 1) * rates.expert_bytes / rates.link_bytes_per_s
        hidden_s = min(fidelity.foreseen[k - 1] * missing_s, drafting_s) if k else 0.0
        return drafting_s + rates.compute_s(k + 1) + missing_s - hidden_s

    best, length = max((tokens[k] / seconds(k, left), k) for k in lengths if k <= most)
    if left < curves.shares[0]:
        best = 0.0
    return Worth(format, share, left, 1 / seconds(0, share), best, length)
