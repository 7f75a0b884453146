"""What a GPU's published rates allow: bytes and launches of a decoded token of Qwen3-VL-30B-A3B, and the time nothing can beat.

Arithmetic, not a measurement. A token takes at least as long as its slowest resource: bytes read and written in the card's
memory, bytes over its link, launches. Copies, kernels and launches are taken to overlap perfectly, and every rate to be the
published one, so real times are longer. Every missing expert is taken to be copied: one that the processor computes crosses no
link. Pure; imports neither torch nor transformers. `docs/gpu.md` shows the tables.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vismoe.bench.job import BITS_PER_WEIGHT

GIB = 2**30
DATE = "2026-11-22"
# Qwen3-VL-30B-A3B in bfloat16, as published; tests/test_roofline.py compares with the model.
LAYERS, EXPERTS, TOP_K = 48, 128, 8
EXPERT_BYTES = 3 * 2048 * 768 * 2
DENSE_BYTES = 2_459_857_408  # read by every token: attention, norms, routers, language model head
TOWER_BYTES = 1_077_262_960  # the vision tower: takes memory, and no token reads it
KV_TOKEN_BYTES = LAYERS * 2 * 4 * 128 * 2
CONTEXT = 2048  # tokens whose keys and values a token reads
RUNTIME_BYTES = 512 * 2**20  # context, kernels, workspaces: an estimate, as in a plan
LOSSLESS_SHARE = 0.70  # of the bytes, over the link; slabs hold decoded records
SHARES = (1.0, 0.5, 0.25, 0.125)  # of the experts resident on the card, whatever their format
LAUNCH_S = 5e-6  # the processor's time for one launch, Python included: an assumption
HEAD_LAUNCHES = 14  # of a token outside the layers: embedding, rotary angles, last norm, head


@dataclass(frozen=True)
class GpuCard:
    """The published rates of a card; a link's rate is that of one direction after its line code."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    link: str
    link_bytes_per_s: float
    source: str


@dataclass(frozen=True)
class LayerLaunches:
    """Launches of one MoE layer for one token."""

    experts: int  # inside the routed experts
    rest: int  # attention, norms, router

    def of_token(self) -> int:
        return LAYERS * (self.experts + self.rest) + HEAD_LAUNCHES


@dataclass(frozen=True)
class Bound:
    """One token on a card; times in seconds. `unfit` says why there is none."""

    card: GpuCard
    format: str
    share: float
    routing: str
    needed_bytes: float  # of the card's memory
    memory_bytes: float  # read and written there, per token
    link_bytes: float
    unfit: str | None

    @property
    def memory_s(self) -> float:
        return self.memory_bytes / self.card.memory_bytes_per_s

    @property
    def link_s(self) -> float:
        return self.link_bytes / self.card.link_bytes_per_s

    @property
    def least_s(self) -> float:
        """Time nothing can beat: with the whole token captured in a graph, which is one launch."""
        return max(self.memory_s, self.link_s, LAUNCH_S)

    @property
    def binds(self) -> str:
        times = {"memory": self.memory_s, "link": self.link_s, "launches": LAUNCH_S}
        return max(times, key=lambda name: times[name])

    @property
    def launches(self) -> int:
        """Of the GPU kernels and of transformers' operators, each miss arriving by itself."""
        missed = TOP_K * MISSES[self.routing][self.share]
        return RESIDENT.of_token() if not missed else PAGED.of_token() + round(LAYERS * MISS_LAUNCHES * missed)

    @property
    def launched_s(self) -> float:
        """The time where each kernel is launched by itself."""
        return max(self.least_s, self.launches * LAUNCH_S)


def pcie(gigatransfers: int, lanes: int) -> float:
    """Bytes per second of one direction of PCI Express 3 to 5: 128 of 130 bits carry data."""
    return gigatransfers * 1e9 * lanes * 128 / 130 / 8


ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
BLACKWELL = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
RTX_4060 = "https://www.nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4060-4060ti/"
H200 = "https://www.nvidia.com/en-us/data-center/h200/"
CARDS = (
    GpuCard("RTX 4060 8 GB", 8 * GIB, 272e9, "PCIe 4.0 x8", pcie(16, 8), RTX_4060),
    GpuCard("RTX 4090", 24 * GIB, 1008e9, "PCIe 4.0 x16", pcie(16, 16), ADA),
    GpuCard("RTX 5090", 32 * GIB, 1792e9, "PCIe 5.0 x16", pcie(32, 16), BLACKWELL),
    GpuCard("H200", 141e9, 4800e9, "PCIe 5.0 x16", pcie(32, 16), H200),
)
# Counted by tests/test_launches.py: torch's arithmetic; the GPU kernels through the pager, where nothing is missing; the same
# once every expert is resident for good. A miss that arrives by itself adds its copy, an upload and two launches.
TORCH, PAGED, RESIDENT = (LayerLaunches(experts, rest=59) for experts in (50, 6, 4))
MISS_LAUNCHES = 4
MISSES = {  # share of a token's experts that are not on the card, by share of resident experts
    "uniform": {share: 1 - share for share in SHARES},
    "skewed": {1.0: 0.0, 0.5: 1 - 0.770, 0.25: 1 - 0.500, 0.125: 1 - 0.284},  # the default order's hits in docs/orchestrator.md
}


@dataclass(frozen=True)
class FormatBytes:
    """Bytes of one expert: read by the kernel, copied over the link, and touched in the card's memory when it arrives."""

    resident: float
    link: float
    arrival: float

    @classmethod
    def of(cls, format: str) -> "FormatBytes":
        if format == "lossless":  # the record is written, read by the decoder, and written decoded
            link = LOSSLESS_SHARE * EXPERT_BYTES
            return cls(EXPERT_BYTES, link, 2 * link + EXPERT_BYTES)
        nbytes = EXPERT_BYTES * BITS_PER_WEIGHT.get(format, 16) / 16
        return cls(nbytes, nbytes, nbytes)


FORMATS = ("raw", "lossless", "int4")


def bound(card: GpuCard, format: str, share: float, routing: str) -> Bound:
    """One token on `card` with `share` of the experts resident."""
    expert, used = FormatBytes.of(format), LAYERS * TOP_K
    missing = used * MISSES[routing][share]
    keys = CONTEXT * KV_TOKEN_BYTES
    needed = share * LAYERS * EXPERTS * expert.resident + DENSE_BYTES + TOWER_BYTES + keys + RUNTIME_BYTES
    unfit = None if needed <= card.memory_bytes else f"needs {needed / 1e9:.1f} GB of {card.memory_bytes / 1e9:.1f}"
    touched = DENSE_BYTES + keys + used * expert.resident + missing * expert.arrival
    return Bound(card, format, share, routing, needed, touched, missing * expert.link, unfit)


def bounds() -> Iterator[Bound]:
    """Every card with every format, share of resident experts and routing."""
    for card in CARDS:
        for format in FORMATS:
            for share in SHARES:
                for routing in MISSES:
                    yield bound(card, format, share, routing)


# ------------------------------------------------------------------ tables
COLUMNS = (
    "card", "format", "resident (%)", "routing", "memory needed (GB)", "memory traffic (GB/token)", "link (GB/token)",
    "memory (ms)", "link (ms)", "at least (ms)", "tokens/s at most", "bound by", "launches", "launches add (ms)",
    "tokens/s with them", "unfit",
)  # fmt: skip


def _row(one: Bound) -> list[Any]:
    head = [one.card.name, one.format, 100 * one.share, one.routing, round(one.needed_bytes / 1e9, 1)]
    if one.unfit:
        return [*head, *[None] * (len(COLUMNS) - len(head) - 1), one.unfit]
    traffic = [round(nbytes / 1e9, 3) for nbytes in (one.memory_bytes, one.link_bytes)]
    times = [round(1e3 * seconds, 2) for seconds in (one.memory_s, one.link_s, one.least_s)]
    added = round(1e3 * (one.launched_s - one.least_s), 2)
    return [
        *head,
        *traffic,
        *times,
        round(1 / one.least_s, 1),
        one.binds,
        one.launches,
        added,
        round(1 / one.launched_s, 1),
        None,
    ]


def report() -> dict[str, Any]:
    """All rows, as `docs/data/gpu.json` holds them and `--roofline --json` prints them."""
    cards = [
        [card.name, *(round(rate / 1e9, 1) for rate in (card.memory_bytes, card.memory_bytes_per_s)), card.link,
         round(card.link_bytes_per_s / 1e9, 1), card.source] for card in CARDS
    ]  # fmt: skip
    command = "vismoe gpu-check --roofline --json"
    return {
        "page": "docs/gpu.md",
        "machine": "none: arithmetic on published rates, not a measurement",
        "software": "vismoe/bench/roofline.py",
        "date": DATE,
        "tables": [
            {
                "name": "cards",
                "about": "published rates; a link's is one direction after its line code",
                "command": command,
                "columns": ["card", "memory (GB)", "memory (GB/s)", "link", "link (GB/s)", "source"],
                "rows": cards,
            },
            {
                "name": "roofline",
                "about": "the time no engine can beat for one decoded token of Qwen3-VL-30B-A3B",
                "command": command,
                "columns": list(COLUMNS),
                "rows": [_row(one) for one in bounds()],
            },
        ],
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that is Markdown and stands in columns in a terminal."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = (head, ["-" * width for width in widths], *rows)
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def markdown() -> str:
    """The tables of `docs/gpu.md`, which `--roofline` prints."""
    cards = [
        [card.name, f"{card.memory_bytes / GIB:.0f} GiB", f"{card.memory_bytes_per_s / 1e9:,.0f} GB/s", card.link,
         f"{card.link_bytes_per_s / 1e9:.1f} GB/s"] for card in CARDS
    ]  # fmt: skip
    shares = [f"{share:.1%}".replace(".0%", "%") for share in SHARES]
    parts = [table(["card", "memory", "its rate", "link", "its rate "], cards)]
    for routing in MISSES:
        missed = ", ".join(f"{MISSES[routing][share]:.1%}" for share in SHARES)
        parts.append(
            f"Routing: {routing}. Misses at {', '.join(shares)} resident: {missed}. Bytes per token over link / in memory:"
        )
        parts.append(table(["format", *shares], [[format, *_traffic(format, routing)] for format in FORMATS]))
        parts.append("Tokens per second at most, what binds, and in brackets with each kernel launched by itself:")
        rows = [[card.name, format, *_speeds(card, format, routing)] for card in CARDS for format in FORMATS]
        parts.append(table(["card", "format", *shares], rows))
    ways = {
        "torch computes the experts": TORCH.of_token(),
        "the GPU kernels, through the pager, nothing missing": PAGED.of_token(),
        "the GPU kernels, 6 of 8 experts missing (25%, uniform)": bound(CARDS[-1], "raw", 0.25, "uniform").launches,
        "the GPU kernels, every expert resident": RESIDENT.of_token(),
    }
    counts = [[way, f"{count:,}", f"{1e3 * LAUNCH_S * count:.1f} ms"] for way, count in ways.items()]
    counts.append(["one graph for the whole token", "1", f"{1e3 * LAUNCH_S:.3f} ms"])
    parts.append(table(["launches of one token", "number", f"at {1e6 * LAUNCH_S:.0f} us"], counts))
    return "\n\n".join(parts)


def _traffic(format: str, routing: str) -> list[str]:
    found = [bound(CARDS[0], format, share, routing) for share in SHARES]
    return [f"{one.link_bytes / 1e9:.2f} / {one.memory_bytes / 1e9:.2f} GB" for one in found]


def _speeds(card: GpuCard, format: str, routing: str) -> list[str]:
    found = [bound(card, format, share, routing) for share in SHARES]
    return [one.unfit or f"{1 / one.least_s:.0f} {one.binds} ({1 / one.launched_s:.0f})" for one in found]
