"""How many tokens to draft, by what rounds took: those that an amortisation model promises the most tokens per second of.
No thread and no clock.

A round of k drafted tokens verifies k+1 rows in one pass and yields the accepted ones and the model's own next token:

    A(k) = 1 + sum_{i<=k} prod_{j<=i} alpha_j                     tokens; alpha_j: draft j is right if those before it are
    T(k) = k d + v(k+1) + max(0, B(k+1) - min(f B(k), r k d)) s      seconds
    k*   = argmax A/T with T(k) <= longest_s

d: seconds of a draft pass. v(n): seconds of a pass of n rows without its stalls. B(n): bytes of the experts that such a pass
wants and that are not there when the round begins. f: the share that the draft names of those that the first k rows want; it has
not routed the last row. r: the rate at which they come meanwhile. s: seconds of stalls per byte that is late. After MoE-SpeQ's
amortisation roofline, with every rate measured.

Wrong drafts cost little, since an account in passes limits all that drafting may lose.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from operator import mul
from types import MappingProxyType
from typing import Self

from vismoe.config import MOST_DRAFTED

NONE = "none"  # the kind of a round that drafts nothing
LEARNT = 1 / 8  # of the difference between what a round took and what was believed
LEVEL_LEARNT = 1 / 16  # of a level, from rounds of several rows
ACCEPTANCE_LEARNT, MEAN_LEARNT = 1 / 16, 1 / 32  # of a request's acceptance; of the one that requests begin with
PRIOR_TRIALS, KNOWN_TRIALS = 2, 8  # what a request begins with counts as so many; how many say what the acceptance is
GAIN, IN_ROUNDS = 1.05, 2  # another k must promise so much in so many rounds one after the other
LOSS = 0.015  # of the time, that drafts may lose
CREDIT_PASSES, MOST_CREDIT_PASSES = 5.0, 16.0  # that they may lose before; that earlier gains may pay for
LEAST_LOSS_PASSES = 0.2  # of a probe, for how often there are probes
MOST_FAILURES, AT_BEGINNING = 6, 2  # of probes, that double the time between two: of all requests; when a request begins
REFERENCE_PASSES = 100.0  # while tokens are drafted, an ordinary pass is measured once in so many; the first ones sooner


@dataclass(frozen=True)
class DraftKind:
    """What is believed of a draft before it was tried."""

    pass_share: float  # d over v(1)
    foreseen: float  # f
    acceptance: float  # alpha


KINDS = MappingProxyType({"ngram": DraftKind(0.0, 0.0, 0.6), "self": DraftKind(1.0, 0.9, 0.8), "mtp": DraftKind(0.1, 0.0, 0.8)})


@dataclass(frozen=True)
class MeasuredRound:
    """What a round took; k = 0 and NONE: an ordinary pass."""

    kind: str
    k: int  # tokens that were drafted and verified
    accepted: int  # of them
    draft_s: float
    verify_s: float  # of the pass of k+1 rows, stalls included
    stall_s: float  # of it
    needed_bytes: float  # of the experts that this pass demanded and that were not there when the round began
    hidden_bytes: float = 0.0  # of these, copied before the pass began
    foreseen: float | None = None  # share of the experts demanded by this pass, all its rows, that the draft had named
    agreed: Mapping[str, bool] = field(default_factory=dict)  # of drafts not verified: whether their first token was right

    @classmethod
    def of(
        cls,
        total: Callable[[str], float],
        expert_bytes: float,
        kind: str,
        k: int,
        accepted: int,
        draft_s: float,
        verify_s: float,
        agreed: Mapping[str, bool] = MappingProxyType({}),
    ) -> Self:
        """total: of a counter of the pager, over the round. Copies that promises have brought in time are hidden."""
        demanded = total("hits") + total("misses")
        hidden = max(0.0, total("promised_bytes") - total("wasted_promised_bytes") - total("late") * expert_bytes)
        foreseen = total("foreseen") / demanded if kind == "self" and demanded else None
        needed = total("misses") * expert_bytes + hidden
        return cls(kind, k, accepted, draft_s, verify_s, total("stall_seconds"), needed, hidden, foreseen, agreed)

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify_s


@dataclass(frozen=True)
class Costs:
    """What rounds of one kind of draft take."""

    draft_s: float  # d
    compute_s: Callable[[int], float]  # v(n)
    missing_bytes: Callable[[int], float]  # B(n)
    foreseen: float  # f
    link_bytes_per_s: float  # r
    stall_s_per_byte: float  # s

    def seconds(self, k: int) -> float:
        """T(k)."""
        missing, drafting_s = self.missing_bytes(k + 1), k * self.draft_s
        hidden = min(missing, self.foreseen * self.missing_bytes(k), self.link_bytes_per_s * drafting_s) if k else 0.0
        return drafting_s + self.compute_s(k + 1) + (missing - hidden) * self.stall_s_per_byte


def expected_tokens(acceptance: Iterable[float]) -> list[float]:
    """A(0), A(1), ... for alpha_1, alpha_2, ..."""
    return list(accumulate(accumulate(acceptance, mul), initial=1.0))


class _Rows:
    """y(n) = level (1 + jump [n > 1] + growth (n-1)), of passes of n rows, by least squares that forget.

    Single rows say what the level is, and at once after a while. jump: of several rows, which take another path than one. If all
    passes have had the same number of rows, half of the growth above the prior is attributed to the jump.
    """

    def __init__(self, growth: float):
        self._before = growth
        self.level, self.jump, self.growth = 0.0, 0.0, growth
        self._seen, self._age = 0, 0
        self._sums = [0.0] * 5  # of level, level m, level m m, excess, excess m, where m = n - 1 and excess = y - level

    def __call__(self, rows: int) -> float:
        return self.level * (1 + self.jump + self.growth * (rows - 1)) if rows > 1 else self.level

    def add(self, rows: int, value: float) -> None:
        more = rows - 1
        self._age += 1
        if not more:
            self._seen += 1
            forgotten, before = min(0.5, 1 - (1 - LEARNT) ** self._age), self.level
            self.level += max(forgotten, 1 / self._seen) * (value - self.level)
            if self.level < before:  # what was said of several rows holds in proportion to the level: it may fall to nothing
                self._sums = [each * self.level / before for each in self._sums]
            self._age = 0
            return
        level, excess = self.level, value - self.level
        said = (level, level * more, level * more * more, excess, excess * more)
        self._sums = [(1 - LEARNT) * old + new for old, new in zip(self._sums, said, strict=True)]
        if level > 0:
            self._fit()
        self.level += LEVEL_LEARNT * (value / (1 + self.jump + self.growth * more) - level)

    def _fit(self) -> None:
        """Both beliefs, no jump and the growth before, count as one round of two rows each."""
        n, m, mm, e, em = (each / self.level for each in self._sums)
        n, mm, em = n + 1, mm + 1, em + self._before
        self.jump = max(0.0, (e * mm - em * m) / (n * mm - m * m))
        self.growth = min(max(0.0, (em - self.jump * m) / mm), 4.0)


class _Believed:
    """What an engine's rounds have said of one kind of draft."""

    def __init__(self, before: DraftKind):
        self.before, self.rounds = before, 0
        self.draft_s: float | None = None
        self.foreseen, self.link_bytes_per_s = before.foreseen, 0.0
        self.stall_s = self.late_bytes = 0.0  # of the latest rounds
        self.bias = 1.0  # measured seconds of a round over the model's
        self.failures, self.probed_s = 0, 0.0  # of probes, one after the other; when the last was, in seconds of all rounds
        self.acceptance: list[float] = []  # mean over requests, by position
        self._trials: list[int] = []

    def learn(self, one: MeasuredRound, drafted_share: float) -> None:
        """drafted_share: B(k) / B(k+1)."""
        self.rounds += 1
        self.stall_s = (1 - LEARNT) * self.stall_s + one.stall_s
        self.late_bytes = (1 - LEARNT) * self.late_bytes + one.needed_bytes - one.hidden_bytes
        if one.foreseen is not None:
            self.foreseen += LEARNT * (one.foreseen / max(drafted_share, 0.5) - self.foreseen)
        if one.k:
            each = one.draft_s / one.k
            self.draft_s = each if self.draft_s is None else self.draft_s + LEARNT * (each - self.draft_s)
        if one.k and one.draft_s > 0:
            rate = one.hidden_bytes / one.draft_s
            link_bound = one.hidden_bytes < 0.9 * self.foreseen * drafted_share * one.needed_bytes
            believed = self.link_bytes_per_s
            self.link_bytes_per_s = believed + LEARNT * (rate - believed) if link_bound and believed else max(believed, rate)

    def tried(self, position: int, right: bool) -> None:
        while len(self.acceptance) <= position:
            self.acceptance.append(self.acceptance[-1] if self.acceptance else self.before.acceptance)
            self._trials.append(PRIOR_TRIALS)
        self._trials[position] += 1
        learnt = max(MEAN_LEARNT, 1 / self._trials[position])
        self.acceptance[position] += learnt * (right - self.acceptance[position])

    def mean_acceptance(self, position: int) -> float:
        known = self.acceptance[: position + 1]
        return known[-1] if known else self.before.acceptance


class Governor:
    """Of one engine: its rates, which requests share, and the account of what drafts lost."""

    def __init__(self, most: int = MOST_DRAFTED, fixed: int | None = None, longest_s: float | None = None):
        """fixed: always this k, where the draft offers it. longest_s: of a round, since other requests wait for it."""
        self.most, self.fixed, self.longest_s = most, fixed, longest_s
        self.compute_s, self.missing_bytes = _Rows(0.3), _Rows(0.8)
        self._of = {NONE: _Believed(DraftKind(0.0, 0.0, 0.0)), **{name: _Believed(kind) for name, kind in KINDS.items()}}
        self.credit_passes = CREDIT_PASSES
        self.seconds_in_all = self.reference_s = 0.0  # of rounds; of those since an ordinary pass
        self._predicted: dict[str, list[float]] = {}  # `seconds`, until the next round
        self._usual_s = 0.0  # of an ordinary pass: a slow mean, so that one lucky pass makes no draft look free
        self._ordinary_before = False  # whether the last round drafted nothing

    def begin_request(self) -> "RequestGovernor":
        for believed in self._of.values():
            believed.failures = min(believed.failures, AT_BEGINNING)
        self._ordinary_before = False
        return RequestGovernor(self)

    def of(self, kind: str) -> _Believed:
        return self._of[kind]

    @property
    def measured(self) -> bool:
        """Whether an ordinary pass was: before, nothing can be compared."""
        return self._of[NONE].rounds > 0

    def costs(self, kind: str) -> Costs:
        said, usual = self._of[kind], self._of[NONE]
        stalls = said if said.late_bytes > 0 else usual
        stall = stalls.stall_s / stalls.late_bytes if stalls.late_bytes > 0 else 0.0
        link = said.link_bytes_per_s or (1 / stall if stall else float("inf"))
        draft_s = said.before.pass_share * self.compute_s(1) if said.draft_s is None else said.draft_s
        return Costs(draft_s, self.compute_s, self.missing_bytes, said.foreseen, link, stall)

    def seconds(self, kind: str) -> list[float]:
        """T(0), T(1), ...; T(0) is that of an ordinary pass."""
        if kind not in self._predicted:
            ordinary_s = self._of[NONE].bias * self.costs(NONE).seconds(0)
            bias, costs = self._of[kind].bias, self.costs(kind)
            more = [] if kind == NONE else [bias * costs.seconds(k) for k in range(1, self.most + 1)]
            self._predicted[kind] = [ordinary_s, *more]
        return self._predicted[kind]

    def learn(self, one: MeasuredRound) -> None:
        """Rates and the account, by a round of any request.

        An ordinary pass counts if another one came before it: behind a prompt or a draft it finds other experts, and cold caches.
        """
        self._predicted.clear()
        self.seconds_in_all += one.seconds
        settled, self._ordinary_before = self._ordinary_before, not one.k
        if not one.k and not settled:
            return
        self.compute_s.add(one.k + 1, max(0.0, one.verify_s - one.stall_s))
        self.missing_bytes.add(one.k + 1, one.needed_bytes)
        said = self._of[one.kind]
        wanted = self.missing_bytes(one.k + 1)
        said.learn(one, self.missing_bytes(one.k) / wanted if one.k and wanted > 0 else 1.0)
        model_s = self.costs(one.kind).seconds(one.k)
        if model_s > 0:
            said.bias += LEARNT * (one.seconds / model_s - said.bias)
        if not one.k:
            self._usual_s += max(LEVEL_LEARNT, 1 / said.rounds) * (one.seconds - self._usual_s)
        if self._usual_s > 0:
            passes = one.seconds / self._usual_s
            lost = passes - one.accepted - 1 if one.k else 0.0
            self.credit_passes = min(self.credit_passes + LOSS * passes - lost, MOST_CREDIT_PASSES)
        self.reference_s = self.reference_s + one.seconds if one.k else 0.0


@dataclass
class _Followed:
    """One kind of draft in one request."""

    k: int = 0  # that is drafted
    gains: int = 0  # rounds one after the other in which another k promised GAIN
    acceptance: list[float] = field(default_factory=list)  # by position, of those that were tried
    trials: list[int] = field(default_factory=list)


class RequestGovernor:
    """Chooses the drafts of one request, and learns from its rounds."""

    def __init__(self, governor: Governor):
        self._governor = governor
        self._followed: dict[str, _Followed] = {}
        self._probe: str | None = None  # the kind that the round chosen last is to try
        self._rounds: Counter[tuple[str, int]] = Counter()
        self.accepted = 0  # tokens, in all rounds

    def choose(self, offers: Mapping[str, int]) -> tuple[str, int]:
        """(kind, k) of the next round; (NONE, 0): an ordinary pass. offers: by kind, the most tokens that it could draft now."""
        governor, self._probe = self._governor, None
        offers = {kind: min(most, governor.most) for kind, most in offers.items() if most > 0}
        if governor.fixed is not None:
            return next(((kind, min(governor.fixed, most)) for kind, most in offers.items() if governor.fixed), (NONE, 0))
        return self._best(offers) if offers and governor.measured else (NONE, 0)

    def ended(self, one: MeasuredRound) -> None:
        """The chosen round is over; it may have drafted fewer tokens, or none."""
        self._governor.learn(one)
        self._rounds[one.kind, one.k] += 1
        self.accepted += one.accepted
        for position in range(min(one.k, one.accepted + 1)):
            self._tried(one.kind, position, position < one.accepted)
        for kind, right in one.agreed.items():
            self._tried(kind, 0, right)
        if one.k and one.kind == self._probe:
            self._judge(one)

    def _judge(self, probe: MeasuredRound) -> None:
        """A draft was tried. It is again at once if it was right and its acceptance is not known, otherwise later."""
        rates, believed, followed = self._rates(probe.kind), self._governor.of(probe.kind), self._follow(probe.kind)
        if max(rates) >= GAIN * rates[0]:
            believed.failures, followed.gains = 0, 1
        elif probe.accepted < probe.k or followed.trials[0] >= KNOWN_TRIALS:
            believed.failures = min(believed.failures + 1, MOST_FAILURES)
            believed.probed_s = self._governor.seconds_in_all

    @property
    def lengths(self) -> dict[str, list[int]]:
        """By kind of draft, of how many rounds it drafted 1, 2, ... tokens."""
        kinds = sorted({kind for kind, k in self._rounds if k})
        return {kind: [self._rounds[kind, k] for k in range(1, self._governor.most + 1)] for kind in kinds}

    def _best(self, offers: Mapping[str, int]) -> tuple[str, int]:
        """The (kind, k) that promises most, or what is tried where none promises more than an ordinary pass."""
        governor, ordinary_s = self._governor, self._governor.seconds(NONE)[0]
        of = {kind: self._rates(kind) for kind in offers}
        allowed = {kind: min(most, self._affordable(kind)) for kind, most in offers.items()}
        settled = {kind: min(self._settled(kind, rates), allowed[kind]) for kind, rates in of.items()}
        kind = max(offers, key=lambda kind: of[kind][settled[kind]])
        if of[kind][settled[kind]] > of[kind][0]:
            due = governor.reference_s > min(REFERENCE_PASSES, 2 ** min(governor.of(NONE).rounds, 7)) * ordinary_s
            return (NONE, 0) if due else (kind, settled[kind])
        tries = [(of[kind][k], kind, k) for kind in offers if (k := self._due(kind, of[kind], allowed[kind]))]
        if not tries:
            return NONE, 0
        _, self._probe, k = max(tries)
        return self._probe, k

    def _settled(self, kind: str, rates: Sequence[float]) -> int:
        """The k of this kind: another one than before if that promised GAIN in IN_ROUNDS rounds."""
        followed = self._follow(kind)
        best = max(range(len(rates)), key=rates.__getitem__)
        followed.gains = followed.gains + 1 if rates[best] >= GAIN * rates[followed.k] else 0
        if followed.gains >= IN_ROUNDS:
            followed.k, followed.gains = best, 0
        return followed.k

    def _due(self, kind: str, rates: Sequence[float], allowed: int) -> int:
        """Tokens of a probe, which is tried though it promises nothing: after a failure twice as long as after the one before.
        0: not yet, or more than drafts may lose."""
        governor, believed, seconds = self._governor, self._governor.of(kind), self._governor.seconds(kind)
        k = max(range(1, min(allowed, governor.most if believed.rounds else 1) + 1), key=rates.__getitem__, default=0)
        lost_s = max(seconds[k] * (1 - rates[k] / rates[0]), LEAST_LOSS_PASSES * seconds[0]) if rates[0] else 0.0
        waits_s = (2**believed.failures - 1) * lost_s / LOSS
        may = rates[k] > 0 or not believed.rounds  # how long the first one lasts is not known
        return k if may and governor.seconds_in_all - believed.probed_s >= waits_s else 0

    def _affordable(self, kind: str) -> int:
        """The most tokens that may all be wrong."""
        ordinary_s, *seconds = self._governor.seconds(kind)
        limit_s = (self._governor.credit_passes + 1) * ordinary_s
        return sum(1 for _ in takewhile(lambda each: each <= limit_s, seconds))

    def _rates(self, kind: str) -> list[float]:
        """A(k)/T(k), tokens per second; 0 where a round of k would last too long."""
        seconds, longest_s = self._governor.seconds(kind), self._governor.longest_s
        return [
            tokens / each if each > 0 and (not k or longest_s is None or each <= longest_s) else 0.0
            for k, (tokens, each) in enumerate(zip(expected_tokens(self._acceptance(kind)), seconds, strict=True))
        ]

    def _acceptance(self, kind: str) -> list[float]:
        """alpha_1, alpha_2, ... of this request; of a position not tried yet by the one before and the mean of requests."""
        tried, believed = self._follow(kind).acceptance, self._governor.of(kind)
        found: list[float] = []
        for position in range(self._governor.most):
            if position < len(tried):
                found.append(tried[position])
            elif not position:
                found.append(believed.mean_acceptance(0))
            else:
                before, here = believed.mean_acceptance(position - 1), believed.mean_acceptance(position)
                found.append(found[-1] * min(1.0, here / before) if before else 0.0)
        return found

    def _tried(self, kind: str, position: int, right: bool) -> None:
        followed = self._follow(kind)
        if position == len(followed.acceptance):
            followed.acceptance.append(self._acceptance(kind)[position])
            followed.trials.append(PRIOR_TRIALS)
        followed.trials[position] += 1
        learnt = max(ACCEPTANCE_LEARNT, 1 / followed.trials[position])
        followed.acceptance[position] += learnt * (right - followed.acceptance[position])
        self._governor.of(kind).tried(position, right)

    def _follow(self, kind: str) -> _Followed:
        return self._followed.setdefault(kind, _Followed())
