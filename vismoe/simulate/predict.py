"""Tokens per second of a model on a machine that one does not have: routing through the one residency core in virtual time.

The plan divides the machine's memory as `vismoe plan` would (planning/), the residency core decides what is lent, copied and
evicted (virtual_pager.py), and time is bytes over rates:

    a layer of a pass of B rows = layer_s + B (row_s + flop / flop_per_s)                      arithmetic
                                + (weights beside experts + keys and values + distinct experts) / weights_bytes_per_s    memory
                                + waiting for copies over the link, behind them the disk, or for experts computed in host memory

Over a link, a layer computes what is on the device while the rest is copied. Without one, arithmetic, memory and waiting add
up: the cores that compute also read. No lookahead guesses.
Prompts are text; what attention to a prompt's own tokens and a vision tower take is not in it.
Of models with equal layers only some are replayed (SAMPLED_LAYERS), with their share of the slabs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vismoe.config import Settings
from vismoe.errors import ConfigError
from vismoe.machine.choices import PAGE_CACHE_MARGIN
from vismoe.metrics import Snapshot
from vismoe.models.load.host_rates import DECODE_BYTES_PER_S
from vismoe.models.load.reading import place_table
from vismoe.planning.case import Case
from vismoe.planning.needs import Footprint
from vismoe.planning.plan import Plan
from vismoe.planning.throughput import PassLayer
from vismoe.simulate.demands import Conditions, Demands, RecordedDemand, demands_of_step
from vismoe.simulate.machines import VirtualMachine
from vismoe.simulate.virtual_pager import TieredPager
from vismoe.trace.steps import TraceStep
from vismoe.trace.synthetic import SyntheticTrace, drafted_rounds, skewed_trace
from vismoe.types import ExpertInventory, Phase, RecordLayout

SAMPLED_LAYERS = 16  # replayed of more: tests compare with all of them
SETTLING, COUNTED = 32, 32  # decode steps that fill the slabs, and those whose time counts
ROUNDS = 32  # of drafts; the second half counts
LOSSLESS_SHARE = 0.70  # of bfloat16's bytes (docs/formats.md)
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

    if settings.policy != "exact":
        refuse(
            f"policy={settings.policy!r}",
            "the replay of policies has no clock",
            "--policy exact, or vismoe eval precision-replay",
        )
    if settings.format == "int2":
        refuse("format='int2'", "only raw, lossless, int8 and int4 are", "--format int4")
    if not isinstance(settings.parallel, int) or rows > 64:
        refuse(f"parallel={settings.parallel}", "rows are 1 to 64", "--parallel 1")
    if settings.draft == "auto":
        refuse("draft='auto'", "what pays depends on measured drafts", "--draft self --draft-tokens 3 --accepted 0.8")
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

    @classmethod
    def by(cls, pager: TieredPager) -> "Counted":
        return cls(pager.metrics.snapshot(), pager.now_s, pager.disk_bytes)

    def __sub__(self, before: "Counted") -> "Counted":
        return Counted(self.metrics - before.metrics, self.seconds - before.seconds, self.disk_bytes - before.disk_bytes)


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
        if len(kinds) != 1 or inventory.low_layouts:
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
        """Whether a processor's page cache holds all experts, beside the plan."""
        if self.settings.reads != "auto":
            return self.settings.reads == "cached"
        free = self.machine.hardware().free_host_bytes - self.plan.total_bytes
        return free >= PAGE_CACHE_MARGIN * self.needs.inventory.slab_bytes * self.stored_share

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
        return sum(self.plan.host_slabs) if self.machine.link is not None else 0

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
        return asked if everything else "wait"

    def pager(self, conditions: Conditions) -> TieredPager:
        share = len(self.sampled.layers) / len(self.needs.inventory.layers)
        slabs = tuple(max(2, round(count * share)) for count in self.plan.slabs)
        host = int(self.host_records * share) if self.host_records < self.experts else 2**60
        disk = 0.0 if self.machine.link is None else 1 / self.stored_bytes_per_s
        return TieredPager(self.sampled, slabs, self.settings.eviction, conditions, host, disk)

    def conditions(self, rows: int, experts: float) -> Conditions:
        """Of a pass of so many rows whose layers read so many bytes of experts."""
        rate = self.machine.weights_bytes_per_s
        return self._conditions(self.arithmetic_s(rows) + self.beside_bytes(self.rows) / rate, experts / rate / rows)

    def _conditions(self, fixed_s: float, token_s: float) -> Conditions:
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

    def expert_bytes(self, demands: Iterable[RecordedDemand]) -> float:
        """Of the distinct experts of a layer, on average; decoding a lossless record on a GPU reads and writes them once more."""
        counts = [len(demand.experts) for demand in demands]
        return float(np.mean(counts)) * self.layer.expert_bytes

    def prediction(self) -> Prediction:
        """Fills the slabs with a prompt and some steps, then counts."""
        demands = self.demands()
        prompt = [each for each in demands if each.phase is not Phase.DECODE]
        if self.settings.draft != "none":
            return self.drafted(prompt)
        decode = [each for each in demands if each.phase is Phase.DECODE]
        rows, layers = self.rows, len(self.sampled.layers)
        settled = min(SETTLING, len(decode) // layers // 2)
        experts = self.expert_bytes(decode)
        pager = self.pager(self.conditions(rows, experts))
        for demand in [*prompt, *decode[: settled * layers]]:
            pager.run(demand)
        began = Counted.by(pager)
        for demand in decode[settled * layers :]:
            pager.run(demand)
        tokens, read = (len(decode) // layers - settled) * rows, self.beside_bytes(rows) + experts
        return self.told(Counted.by(pager) - began, tokens, read, self.arithmetic_s(rows), rows, prompt)

    def told(
        self, did: "Counted", tokens: float, read: float, arithmetic_s: float, of_tokens: float, prompt: list[RecordedDemand]
    ) -> Prediction:
        """did: by the replayed layers while `tokens` came; read, arithmetic_s: bytes and seconds of a layer, for `of_tokens`."""
        layers = len(self.needs.inventory.layers)
        read, arithmetic_s = read * layers / of_tokens, arithmetic_s * layers / of_tokens
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
            in_host=1.0 if from_cache else in_host or resident,
            rows=self.rows,
            tokens_per_s=1 / token_s,
            first_token_s=self.first_token_s(prompt),
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
        )

    def first_token_s(self, prompt: list[RecordedDemand]) -> float:
        """Of a prompt that comes after another one."""
        tokens, rate = self.workload.prompt_tokens, self.machine.weights_bytes_per_s
        fixed_s = self.machine.layer_s + self.layer.other_bytes / rate
        token_s = self.layer.row_flop / self.machine.flop_per_s + self.expert_bytes(prompt) / rate / tokens
        pager = self.pager(self._conditions(fixed_s, token_s))
        for demand in prompt:
            pager.run(demand)
        began_s, later = pager.now_s, prompt[0].step + 1
        for demand in prompt:
            pager.run(dataclasses.replace(demand, step=later))
        return (pager.now_s - began_s) * self.scale

    # -- routing
    def demands(self) -> Demands:
        """A prompt, and decode steps; of a recorded trace its own decode steps."""
        work, inventory = self.workload, self.sampled
        steps = self.generated(work.prompt_tokens, 0 if work.trace else SETTLING + COUNTED).steps
        return Demands.of(SyntheticTrace(inventory, [*steps, *(dataclasses.replace(s, request="request-0") for s in work.trace)]))

    def generated(self, prompt_tokens: int, tokens: int) -> SyntheticTrace:
        layer, work = self.sampled.layers[0], self.workload
        sizes = len(self.sampled.layers), layer.num_experts, layer.top_k
        return skewed_trace(
            *sizes, prompt_tokens=prompt_tokens, tokens=tokens, skew=work.skew, zipf=work.zipf, batch=self.rows, seed=work.seed
        )

    def drafted(self, prompt: list[RecordedDemand]) -> Prediction:
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
        experts = self.expert_bytes(demand for each in demanded for demand in each)
        copied = self.layer.other_bytes + layer.top_k * self.needs.draft_bytes / self.experts if by_copy else 0.0
        guessing_s = self.arithmetic_s(1) if by_copy else 0.0
        draft_s = layers * (guessing_s + copied / self.machine.weights_bytes_per_s)
        pager = self.pager(self.conditions(checked, experts))
        for demand in prompt:
            pager.run(demand)
        began = Counted.by(pager)
        for number, (each, verified) in enumerate(zip(rounds, demanded, strict=True)):
            if number == ROUNDS // 2:
                began = Counted.by(pager)
            pager.run_round(each.drafts, draft_s, verified, promises=by_copy)
        tokens = sum(right**guess for guess in range(checked))  # of a round: those that are right, and the one after them
        read, arithmetic_s = self.beside_bytes(1) + experts + count * copied, self.arithmetic_s(checked) + count * guessing_s
        return self.told(Counted.by(pager) - began, ROUNDS // 2 * tokens, read, arithmetic_s, tokens, prompt)
