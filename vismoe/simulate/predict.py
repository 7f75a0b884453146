"""Tokens per second of a model on a machine that one does not have: routing through the one residency core in virtual time.

The plan divides the machine's memory as `vismoe plan` would (planning/), the residency core decides what is lent, copied and
evicted (virtual_pager.py), and time is bytes over rates:

    a layer of a pass of B rows = layer_s + B (row_s + flop / flop_per_s)                      arithmetic
                                + (weights beside experts + keys and values + distinct experts) / weights_bytes_per_s    memory
                                + waiting for copies over the link, behind them the disk, or for experts computed in host memory

Over a link, a layer computes what is on the device while the rest is copied. Without one, arithmetic, memory and waiting add
up: the cores that compute also read. No lookahead guesses.
What a policy decides about formats follows from the routing alone, by the code that serves (simulate/precision.py).
Prompts are text; what attention to a prompt's own tokens and a vision tower take is not in it.
Of models with equal layers only some are replayed (SAMPLED_LAYERS), with their share of the slabs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vismoe.config import Settings
from vismoe.errors import ConfigError
from vismoe.machine.choices import PAGE_CACHE_MARGIN
from vismoe.metrics import Snapshot
from vismoe.models.load.host_rates import DECODE_BYTES_PER_S
from vismoe.models.load.reading import place_table
from vismoe.paging.miss import Rates
from vismoe.pair import Format
from vismoe.planning.case import Case
from vismoe.planning.hierarchy import LOSSLESS_SHARE
from vismoe.planning.needs import Footprint
from vismoe.planning.pair_split import quotas
from vismoe.planning.plan import Plan
from vismoe.planning.throughput import PassLayer
from vismoe.precision.controller import Precision
from vismoe.precision.policy import Policy
from vismoe.simulate.demands import Conditions, Demands, RecordedDemand, demands_of_step
from vismoe.simulate.machines import VirtualMachine
from vismoe.simulate.precision import decided, hot_at_first, read
from vismoe.simulate.virtual_pager import TieredPager, TwoFormats
from vismoe.trace.steps import TraceStep
from vismoe.trace.synthetic import SyntheticTrace, drafted_rounds, skewed_trace
from vismoe.types import ExpertInventory, Phase, RecordLayout

SAMPLED_LAYERS = 16  # replayed of more: tests compare with all of them
SETTLING, COUNTED = 32, 32  # decode steps that fill the slabs, and those whose time counts
WARMING = 512  # decode steps from which hotness knows the experts before
ROUNDS = 32  # of drafts; the second half counts
FIDELITY = 0.95  # of the experts that a draft names, the share that its row is routed to: an assumption


@dataclass(frozen=True)
class Described:
    """A model: its name, and what it needs with given settings on a device; bytes of embeddings that can stay on disk."""

    name: str
    needs: Callable[[Settings, str], tuple[Footprint, int]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is asked of the machine. Rows are in the settings (`parallel`)."""

    prompt_tokens: int = 512  # of each row; at least 1
    skew: float = 0.65  # of generated routing, as in trace/synthetic.py
    zipf: bool = True
    accepted: float | None = None  # the chance that a drafted token is right
    trace: tuple[TraceStep, ...] = ()  # recorded decode steps, instead of generated ones
    seed: int = 0


@dataclass(frozen=True)
class Prediction:
    """Simulated figures. Seconds and bytes are those of one token; of several rows, of one token of all rows together."""

    model: str
    machine: str
    memory_bytes: int  # the plan's budget on the device
    resident: float  # share of the experts on the device
    in_host: float  # share of the experts in RAM, on the device or below it
    rows: int
    tokens_per_s: float  # of all rows together
    first_token_s: float  # of one prompt, on a machine that answered before
    hit_rate: float
    arithmetic_s: float
    memory_s: float
    link_s: float
    disk_s: float
    host_s: float  # experts computed in host memory
    waiting_s: float  # what computing does not hide
    link_bytes: float
    disk_bytes: float
    memory_bytes_read: float
    layers_replayed: int
    high: float | None = None  # under a policy, the share of the experts' computations in the more precise format

    @property
    def limit(self) -> str:
        """The part that takes longest."""
        parts = {"compute": self.arithmetic_s, "memory": self.memory_s, "link": self.link_s, "disk": self.disk_s}
        parts["processor (experts in RAM)"] = self.host_s
        return max(parts, key=lambda name: parts[name])

    def to_json(self) -> dict[str, Any]:
        return {"simulated": True, **dataclasses.asdict(self), "limit": self.limit}


def refuse_unmodelled(settings: Settings, workload: Workload, machine: VirtualMachine) -> None:
    """Raises ConfigError for what is not modelled, by name."""
    rows = settings.rows

    def refuse(what: str, why: str, fix: str) -> None:
        raise ConfigError(f"{what} is not simulated: {why}. Fix: {fix}")

    if settings.pair is not None and settings.pair.high is Format.LOSSLESS:
        refuse(f"formats={settings.formats!r}", "a pair's records are of one size each", "--formats 16/4")
    if not isinstance(settings.parallel, int) or rows > 64:
        refuse(f"parallel={settings.parallel}", "rows are 1 to 64", "--parallel 1")
    if settings.draft == "auto":
        refuse("draft='auto'", "what pays depends on measured drafts", "--draft self --draft-tokens 3 --accepted 0.8")
    if settings.draft == "mtp":
        refuse("draft='mtp'", "its layer has experts of its own to fetch", "--draft ngram --draft-tokens 3 --accepted 0.8")
    if settings.draft != "none":
        if workload.accepted is None or settings.draft_tokens == "auto":
            refuse("a draft without its length and acceptance", "both decide what it saves", "--draft-tokens 3 --accepted 0.8")
        if rows > 1 or workload.trace:
            refuse("a draft of several rows or of a recorded trace", "rounds are generated for one row", "--parallel 1")
    if workload.trace and rows > 1:
        refuse("several rows of a recorded trace", "it has its own", "--parallel 1")
    if machine.gpu is None and settings.misses == "cpu" and machine.link is None:
        refuse("misses='cpu'", "there is no host memory below a processor", "--misses auto")


def planned(model: Described, machine: VirtualMachine, settings: Settings) -> tuple[Plan, Footprint, PassLayer]:
    """The plan on this machine, the needs that it is made of, and what a layer of a pass takes. Raises BudgetError."""
    settings = dataclasses.replace(settings, pinned_layers=0, misses="wait")
    if machine.gpu is None and machine.link is not None:
        settings = dataclasses.replace(settings, emulated_link_bytes_per_s=machine.link_bytes_per_s)
    needs, table = model.needs(settings, machine.device)
    if machine.gpu is not None and settings.format == "lossless":
        encoded = tuple(RecordLayout((), int(LOSSLESS_SHARE * layout.record_bytes)) for layout in needs.inventory.layouts)
        needs = dataclasses.replace(needs, encoded=encoded)
    plan, on_disk = place_table(needs, settings, machine.hardware(), table)
    if on_disk:
        needs = dataclasses.replace(
            needs, backbone=tuple((name, size - table if name == "embeddings" else size) for name, size in needs.backbone)
        )
    return plan, needs, Case(needs, settings, machine.hardware()).loads()[0]


def predict(model: Described, machine: VirtualMachine, settings: Settings, workload: Workload) -> Prediction:
    """Raises ConfigError for what is not modelled, BudgetError where the plan does not fit the machine."""
    refuse_unmodelled(settings, workload, machine)
    return SimulatedRun(model.name, *planned(model, machine, settings), machine, settings, workload).prediction()


@dataclass(frozen=True)
class Counted:
    """What a pager did."""

    metrics: Snapshot
    seconds: float
    disk_bytes: float
    computed_bytes: float

    @property
    def high(self) -> float:
        """Share of the experts' computations in the more precise format."""
        high, low = (self.metrics.total(f"computed_{name}") for name in ("high", "low"))
        return high / (high + low) if low else 1.0

    @classmethod
    def by(cls, pager: TieredPager) -> "Counted":
        return cls(pager.metrics.snapshot(), pager.now_s, pager.disk_bytes, pager.computed_bytes)

    def __sub__(self, before: "Counted") -> "Counted":
        return Counted(
            self.metrics - before.metrics,
            self.seconds - before.seconds,
            self.disk_bytes - before.disk_bytes,
            self.computed_bytes - before.computed_bytes,
        )


@dataclass(frozen=True)
class SimulatedRun:
    """One model, plan and workload on a machine."""

    model: str
    plan: Plan
    needs: Footprint
    layer: PassLayer
    machine: VirtualMachine
    settings: Settings
    workload: Workload

    @functools.cached_property
    def sampled(self) -> ExpertInventory:
        """The layers that are replayed. Raises ConfigError for a model whose layers differ."""
        inventory = self.needs.inventory
        kinds = {(layer.num_experts, layer.top_k, layer.geometry) for layer in inventory.layers}
        if len(kinds) != 1:
            raise ConfigError(f"{self.model} is not simulated: its {len(inventory.layers)} MoE layers are not all alike")
        layers = inventory.layers if self.workload.trace else inventory.layers[:SAMPLED_LAYERS]
        return dataclasses.replace(inventory, layers=layers)

    @property
    def scale(self) -> float:
        """All layers over those that are replayed."""
        return len(self.needs.inventory.layers) / len(self.sampled.layers)

    @property
    def rows(self) -> int:
        return self.settings.rows

    @property
    def experts(self) -> int:
        return self.plan.total_experts

    @property
    def cached(self) -> bool:
        """Whether a processor's page cache holds all experts, in all their formats, beside the plan."""
        if self.settings.reads != "auto":
            return self.settings.reads == "cached"
        free = self.machine.hardware().free_host_bytes - self.plan.total_bytes
        record = sum(layout.record_bytes for layout in (self.high_layout, *self.needs.inventory.low_layouts))
        return free >= PAGE_CACHE_MARGIN * self.experts * record * self.stored_share

    @property
    def high_layout(self) -> RecordLayout:
        """Of the slabs; under a policy, of those in the more precise format."""
        return self.needs.inventory.layouts[0]

    @property
    def stored_share(self) -> float:
        """Bytes of a record on disk over those of its slab."""
        return LOSSLESS_SHARE if self.settings.format == "lossless" else 1.0

    @property
    def link_share(self) -> float:
        """Bytes of a record on the link over those of its slab: lossless ones cross encoded and the GPU decodes them."""
        return LOSSLESS_SHARE if self.needs.encoded else 1.0

    @property
    def stored_bytes_per_s(self) -> float:
        """Slabs that disk or page cache fill."""
        machine = self.machine
        read = machine.cached_bytes_per_s if machine.gpu is None and self.cached else machine.disk_bytes_per_s
        if self.settings.format != "lossless":
            return read
        decoded = DECODE_BYTES_PER_S["avx2"] * machine.cpu.cores if not self.needs.encoded else float("inf")
        return min(read / LOSSLESS_SHARE, decoded)

    @property
    def host_records(self) -> int:
        """Of the format that host memory has fewer of."""
        kinds = [each for each in (self.plan.host_slabs, self.plan.low_host_slabs) if each]
        return min(map(sum, kinds)) if self.machine.link is not None and kinds else 0

    @property
    def link_bytes_per_s(self) -> float:
        """Of whatever stands directly below the device, in bytes of slabs."""
        link = self.machine.link_bytes_per_s
        return link / self.link_share if link is not None else self.stored_bytes_per_s

    @property
    def misses(self) -> str:
        """As the settings ask, where that is modelled: computing below the device needs everything there."""
        asked, everything = self.settings.misses, self.host_records >= self.experts and not self.needs.encoded
        if asked == "cpu" and not everything:
            raise ConfigError(
                "misses='cpu' is not simulated: RAM does not hold every expert in a form that a processor computes with. "
                "Fix: --misses auto, or a machine with more RAM"
            )
        if asked == "cpu" and self.hot:
            raise ConfigError("misses='cpu' is not simulated: with hotness every expert is on the device. Fix: --misses auto")
        return asked if everything and not self.hot else "wait"

    def pager(self, conditions: Conditions, high: np.ndarray | None) -> TieredPager:
        """high: bool `[L, E]`, with which experts in the more precise format hotness begins."""
        plan, share = self.plan, len(self.sampled.layers) / len(self.needs.inventory.layers)

        def scaled(counts: Sequence[int]) -> int:
            return max(2, round(sum(counts) * share)) if sum(counts) else 0

        slabs, formats = scaled(plan.slabs), None
        if self.sampled.low_layouts:
            low = scaled(plan.low_slabs)
            if high is not None:  # every expert has a slab, and copies under way have some more
                hot = int(self.quotas.sum())
                slabs, low = hot + sum(plan.transient), sum(layer.num_experts for layer in self.sampled.layers) - hot
            rates = Rates(self.link_bytes_per_s, self.machine.weights_bytes_per_s)
            formats = TwoFormats(Policy.of(self.settings), (low,), high, rates)
        records = [sum(each) for each in (plan.host_slabs, plan.low_host_slabs)]
        host = [int(each * share) if each < self.experts else 2**60 for each in records]
        disk = 0.0 if self.machine.link is None else 1 / self.stored_bytes_per_s
        return TieredPager(self.sampled, (slabs,), self.settings.eviction, conditions, host, disk, formats)

    @property
    def hot(self) -> bool:
        """Whether hotness keeps every expert on the device."""
        return "hotness" in self.settings.policy

    @property
    def quotas(self) -> np.ndarray:
        """int64 `[L]` of the layers that are replayed: the most hot experts."""
        share = len(self.sampled.layers) / len(self.needs.inventory.layers)
        return np.array(quotas(self.sampled, [round(sum(self.plan.hot_quota) * share)]), np.int64)

    def conditions(self, rows: int) -> Conditions:
        """Of a decode pass of so many rows."""
        return self._conditions(self.arithmetic_s(rows) + self.beside_bytes(self.rows) / self.machine.weights_bytes_per_s)

    def _conditions(self, fixed_s: float, token_s: float = 0.0, choice_s: float = 0.0) -> Conditions:
        machine, raw = self.machine, self.needs.inventory.raw_layouts[0].payload_bytes
        below: dict[str, Any] = {}
        if (misses := self.misses) != "wait":  # of bfloat16: a multiplication and an addition for each two bytes
            below = {
                "misses": misses,
                "cpu_bytes_per_s": machine.host_bytes_per_s,
                "cpu_s_per_token": raw / machine.cpu.tflops / 1e12,
            }
        return Conditions(
            window=self.settings.window,
            link_bytes_per_s=self.link_bytes_per_s,
            compute_s_per_layer=fixed_s,
            compute_s_per_token=token_s,
            compute_s_per_choice=choice_s,
            weights_bytes_per_s=machine.weights_bytes_per_s,
            overlaps=machine.link is not None,  # on a processor alone the cores that compute also copy
            **below,
        )

    # -- what computing takes, of one layer
    def arithmetic_s(self, rows: int) -> float:
        return self.machine.layer_s + rows * (self.machine.row_s + self.layer.row_flop / self.machine.flop_per_s)

    def beside_bytes(self, rows: int) -> float:
        """Weights beside the experts, and the keys and values of `rows` sequences."""
        tokens = rows * (self.workload.prompt_tokens + COUNTED // 2)
        return self.layer.other_bytes + self.needs.cache_bytes(tokens, rows) / len(self.needs.inventory.layers)

    def prediction(self) -> Prediction:
        """Fills the slabs with a prompt and some steps, then counts."""
        demands, high = self.demands()
        prompt = [each for each in demands if each.phase is not Phase.DECODE]
        first_s = self.first_token_s(prompt, high)
        if self.settings.draft != "none":
            return self.drafted(prompt, first_s)
        decode = [each for each in demands if each.phase is Phase.DECODE]
        rows, layers = self.rows, len(self.sampled.layers)
        settled = min(SETTLING, len(decode) // layers // 2)
        pager = self.pager(self.conditions(rows), high)
        for demand in [*prompt, *decode[: settled * layers]]:
            pager.run(demand)
        began = Counted.by(pager)
        for demand in decode[settled * layers :]:
            pager.run(demand)
        tokens = (len(decode) // layers - settled) * rows
        return self.told(Counted.by(pager) - began, tokens, self.beside_bytes(rows), self.arithmetic_s(rows), rows, first_s)

    def told(
        self, did: "Counted", tokens: float, beside: float, arithmetic_s: float, of_tokens: float, first_s: float
    ) -> Prediction:
        """did: by the replayed layers while `tokens` came; beside: bytes beside the experts and seconds of a layer, for
        `of_tokens`; first_s: until the first token."""
        layers = len(self.needs.inventory.layers)
        read = beside * layers / of_tokens + did.computed_bytes * self.scale / tokens
        arithmetic_s *= layers / of_tokens
        token_s, copied = did.seconds * self.scale / tokens, did.metrics.total("bytes_read") * self.scale / tokens
        memory_s = read / self.machine.weights_bytes_per_s
        linked, from_cache = self.machine.link is not None, self.machine.gpu is None and self.cached
        below, over = (did.disk_bytes * self.scale / tokens, copied) if linked else (copied, 0.0)
        below_s = below / self.stored_bytes_per_s
        resident, in_host = self.plan.resident_experts / self.experts, min(1.0, self.host_records / self.experts)
        return Prediction(
            model=self.model,
            machine=str(self.machine),
            memory_bytes=self.plan.budget_bytes,
            resident=resident,
            in_host=1.0 if from_cache else max(in_host, resident),
            rows=self.rows,
            tokens_per_s=1 / token_s,
            first_token_s=first_s,
            hit_rate=did.metrics.hit_rate(Phase.DECODE) or 0.0,
            arithmetic_s=arithmetic_s,
            memory_s=memory_s + (below_s if self.cached and not linked else 0.0),
            link_s=over / self.link_bytes_per_s,
            disk_s=0.0 if self.cached and not linked else below_s,
            host_s=did.metrics.total("compute_seconds") * self.scale / tokens,
            waiting_s=max(0.0, token_s - memory_s - arithmetic_s),
            link_bytes=over * self.link_share,
            disk_bytes=below * self.stored_share,
            memory_bytes_read=read,
            layers_replayed=len(self.sampled.layers),
            high=did.high if self.settings.pair is not None else None,
        )

    def first_token_s(self, prompt: list[RecordedDemand], high: np.ndarray | None) -> float:
        """Of a prompt that comes after another one."""
        fixed_s = self.machine.layer_s + self.layer.other_bytes / self.machine.weights_bytes_per_s
        weights = self.needs.inventory.raw_layouts[0].payload_bytes / (4 if self.needs.dtype == "float32" else 2)
        expert_s = 2 * weights / self.machine.flop_per_s  # a multiplication and an addition for each
        others_s = self.layer.row_flop / self.machine.flop_per_s - self.layer.top_k * expert_s
        pager = self.pager(self._conditions(fixed_s, others_s, expert_s), high)
        for demand in prompt:
            pager.run(demand)
        began_s, later = pager.now_s, prompt[0].step + 1
        for demand in prompt:
            pager.run(dataclasses.replace(demand, step=later))
        return (pager.now_s - began_s) * self.scale

    # -- routing
    def demands(self) -> tuple[list[RecordedDemand], np.ndarray | None]:
        """A prompt, and decode steps, of a recorded trace its own; and with which experts hotness begins, bool `[L, E]`: it has
        seen WARMING steps before, or the recorded ones."""
        work, inventory = self.workload, self.sampled
        counted = 0 if work.trace else SETTLING + COUNTED
        prompt, *steps = self.generated(work.prompt_tokens, counted + (WARMING if self.hot and not work.trace else 0)).steps
        asked = [prompt, *steps[:counted], *(dataclasses.replace(step, request="request-0") for step in work.trace)]
        if self.settings.pair is None:
            return Demands.of(SyntheticTrace(inventory, asked)), None
        policy, experts = Policy.of(self.settings), [layer.num_experts for layer in inventory.layers]
        if not self.hot:
            return list(decided(read(SyntheticTrace(inventory, asked)), inventory, Precision(policy, experts))), None
        before = Precision(policy, experts, self.quotas)
        for _ in decided(read(SyntheticTrace(inventory, [prompt, *(work.trace or steps[counted:])])), inventory, before):
            pass
        precision = Precision(policy, experts, self.quotas, before.hotness)
        high = precision.targets.copy() if precision.targets.any() else hot_at_first(inventory, self.quotas)
        return list(decided(read(SyntheticTrace(inventory, asked)), inventory, precision)), high

    def generated(self, prompt_tokens: int, tokens: int) -> SyntheticTrace:
        layer, work = self.sampled.layers[0], self.workload
        sizes = len(self.sampled.layers), layer.num_experts, layer.top_k
        return skewed_trace(
            *sizes, prompt_tokens=prompt_tokens, tokens=tokens, skew=work.skew, zipf=work.zipf, batch=self.rows, seed=work.seed
        )

    def drafted(self, prompt: list[RecordedDemand], first_s: float) -> Prediction:
        """Rounds of drafts and of the pass that checks them; `accepted` of the drafted tokens are right, each by itself.

        n-grams take no time and promise nothing; a copy of the experts drafts in as many passes as tokens.
        """
        count, right, layer, work = self.settings.draft_tokens, self.workload.accepted, self.sampled.layers[0], self.workload
        assert isinstance(count, int) and right is not None  # refuse_unmodelled
        by_copy, checked, layers = self.settings.draft == "self", count + 1, len(self.sampled.layers)
        _, rounds = drafted_rounds(
            layers, layer.num_experts, layer.top_k, rounds=ROUNDS, drafts=count, rows=checked, fidelity=FIDELITY,
            skew=work.skew, zipf=work.zipf, seed=work.seed,
        )  # fmt: skip
        demanded = [
            list(demands_of_step(self.sampled, number + 1, 0, dataclasses.replace(each.verified, request="request-0")))
            for number, each in enumerate(rounds)
        ]
        copied = self.layer.other_bytes + layer.top_k * self.needs.draft_bytes / self.experts if by_copy else 0.0
        guessing_s = self.arithmetic_s(1) if by_copy else 0.0
        draft_s = layers * (guessing_s + copied / self.machine.weights_bytes_per_s)
        pager = self.pager(self.conditions(checked), None)
        for demand in prompt:
            pager.run(demand)
        began = Counted.by(pager)
        for number, (each, verified) in enumerate(zip(rounds, demanded, strict=True)):
            if number == ROUNDS // 2:
                began = Counted.by(pager)
            pager.run_round(each.drafts, draft_s, verified, promises=by_copy)
        tokens = sum(right**guess for guess in range(checked))  # of a round: those that are right, and the one after them
        beside, arithmetic_s = self.beside_bytes(1) + count * copied, self.arithmetic_s(checked) + count * guessing_s
        return self.told(Counted.by(pager) - began, ROUNDS // 2 * tokens, beside, arithmetic_s, tokens, first_s)
