"""Settings of an engine: one frozen definition of every default. CLI flags, `VisMoEConfig` and `vismoe.load` come from it.

Sizes are written `8GiB`, `512MiB`, a number of bytes, or `25%` (of all expert bytes in the model's dtype).
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from vismoe.errors import ConfigError, InputError
from vismoe.pair import BITS, Format, FormatPair
from vismoe.ranges import Range, Read, check_fields, file_name, rules_of, shown

ENGINE_DEFAULTS = {"kernels": "auto"}  # where `vismoe.load`, the command line and the page differ from `Settings`
SERVING_DEFAULTS = {"image_cache": "64MiB"}  # where the server and the page differ from that
SERVER_DEFAULTS = {**SERVING_DEFAULTS, "request_memory": "512MiB"}  # and the server alone
NO_STORE = "none"  # as a setting: read in place, whatever is packed
NO_CALIBRATION = "none"  # as a setting: do without, whatever was calibrated
UNMEASURED_IO_THREADS = 2  # where nobody has measured the disk
UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
FORMAT_NAMES: dict[str, Format | None] = {
    "lossless": Format.LOSSLESS, "raw": Format.RAW, "16": Format.RAW, "int8": Format.INT8, "8": Format.INT8,
    "int4": Format.INT4, "4": Format.INT4, "int2": Format.INT2, "2": Format.INT2, "skip": None, "0": None,
}  # fmt: skip
LONGEST_SIZE = 64  # characters
SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]+)?\s*$", re.I)

INT64 = 2**63
MOST_BYTES = 2**60  # of any size: more than any machine has
MOST_TOKENS = 2**24  # of a context: more than any model is made for
MOST_LAYERS = 2**12
MOST_IO_THREADS = 64  # more than any disk wants
MOST_STOPS = 4
MOST_STOP_CHARACTERS = 1000
COLDEST = 1e-9  # of a temperature: logits divided by less than that may be infinite
MOST_ROWS = 2**12  # of a batch

PolicyName = Literal["exact", "hotness", "importance", "hotness+importance"]


@dataclass(frozen=True)
class Budget:
    """How much memory may be used: all of it in bytes, or (share of the experts) what prefix and pools may hold."""

    total_bytes: int | None = None
    expert_share: float | None = None  # 0 < share <= 1

    @classmethod
    def parse(cls, text: str | int | float) -> "Budget":
        """`"20GiB"`, `"25%"` or a number of bytes; raises ConfigError otherwise."""
        if isinstance(text, str) and text.strip().endswith("%"):
            try:
                share = float(text.strip()[:-1]) / 100
            except ValueError:
                share = 0.0
            if not 0 < share <= 1:
                raise ConfigError(f"{shown(text)}: a percentage of the experts lies above 0% and up to 100%, e.g. 25%")
            return cls(expert_share=share)
        return cls(total_bytes=parse_bytes(text))

    def __str__(self) -> str:
        return (
            f"{self.expert_share:.4%}".rstrip("0%").rstrip(".") + "%"
            if self.expert_share
            else format_bytes(self.total_bytes or 0)
        )


def parse_bytes(text: str | int | float) -> int:
    """`"8GiB"` -> 8 * 2**30. Units: B, KiB, MiB, GiB, TiB (powers of 1024), KB, MB, GB, TB (powers of 1000)."""
    if isinstance(text, int) and not isinstance(text, bool):
        nbytes = text
    else:
        match = SIZE.match(str(text)) if len(str(text)) < LONGEST_SIZE else None
        unit = (match.group(2) or "b").lower() if match else ""
        if not match or unit not in UNITS:
            raise ConfigError(f"{shown(text)} is not a size; write e.g. 8GiB, 512MiB or a number of bytes")
        nbytes = int(Fraction(match.group(1)) * UNITS[unit])
    if not 0 < nbytes <= MOST_BYTES:
        raise ConfigError(f"{shown(text)}: a size must be above zero and at most {MOST_BYTES // 2**40:,} TiB, e.g. 8GiB")
    return nbytes


def parse_formats(text: str) -> FormatPair:
    """`"4/2"`, `"16/int8"`, `"lossless/int8"`, `"4/0"` or `"int4/skip"`; raises ConfigError otherwise."""
    high, slash, low = (part.strip() for part in text.partition("/"))
    if not slash or high not in FORMAT_NAMES or low not in FORMAT_NAMES:
        raise ConfigError(f"formats={shown(text)}: two of {', '.join(FORMAT_NAMES)}, the better one first, e.g. 4/2")
    first, second = FORMAT_NAMES[high], FORMAT_NAMES[low]
    if first is None or BITS[first] <= BITS[second]:
        raise ConfigError(f"formats={shown(text)}: the first one must have more bits than the second, e.g. 4/2")
    return FormatPair(first, second)


def format_bytes(nbytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def _size_or_none(size: str | int) -> int:
    return 0 if size in (0, "0") else parse_bytes(size)


Auto = Literal["auto"]
Selection = Literal["affinity", "saliency", "distinct", "visionzip", "uniform", "random"]
Size = Annotated[str | int, Read(parse_bytes, "a size such as 8GiB")]
Memory = Annotated[str | int, Read(Budget.parse, "a size such as 8GiB, or a share of the experts such as 25%")]
Cache = Annotated[str | int, Read(_size_or_none, "a size such as 64MiB, or 0")]
Pair = Annotated[str, Read(parse_formats, "two formats, the better one first, e.g. 4/2")]
File = Annotated[str | Path, Read(file_name, "a path")]
Share = Annotated[float, Range(0, 1)]
Kept = Annotated[float, Range(0, 1, above=True)]
Tokens = Annotated[int, Range(1, MOST_TOKENS, "tokens")]
Layers = Annotated[int, Range(0, MOST_LAYERS, "layers")]
StopText = Annotated[str, Range(1, MOST_STOP_CHARACTERS, "characters")]
Threads = Annotated[int, Range(1, MOST_IO_THREADS, "threads")]
Rate = Annotated[float, Range(1, MOST_BYTES, "bytes per second")]
OneLayer = Annotated[int, Range(1, MOST_LAYERS)]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine runs. Each value is checked by its hint when this is made, unknown names are refused; `auto` is settled once,
    at start, and printed."""

    memory: Memory | Auto = "auto"  # all we allocate on the device, or a share of the experts; auto: 80% of what is free
    host_memory: Size | None = None  # bound of the page-locked middle tier of a GPU machine; None: whatever RAM is free
    context: Tokens = 4096  # tokens over all sequences of a batch, prompt and answer: planned for, and enforced
    image_cache: Cache = 0  # bytes of encoded images that are kept for later requests; 0: none
    mask_memory: Size = "16MiB"  # for attention masks, which padded batches and long new parts of known prompts need
    request_memory: Cache = 0  # bytes that requests of a server hold beside the model: bodies, pictures, prompts being made
    kernels: Literal["auto", "torch", "fast"] = "torch"  # torch: bit-identical to eager experts; fast: ours; auto: fast if it can
    format: Literal["auto", "raw", "lossless", "int8", "int4", "int2"] = "auto"  # of the experts; auto keeps every bit
    policy: PolicyName = "exact"  # who decides formats while the model runs; exact: nobody, all experts are in `format`
    formats: Pair = "4/2"  # the pair that another policy chooses from, e.g. 16/4, lossless/int8, 4/0 (0: skip)
    retention: Annotated[float, Range(0.5, 1)] = 0.75  # importance: mean share of the demanded experts in the better format
    hotness_decay: Annotated[float, Range(0, 1, above=True, below=True)] = 0.99  # alpha of hotness, per token
    hotness_period: Tokens = 16  # T: tokens between two looks at who is hot
    hotness_state: File | None = None  # file that hotness begins with, where it is there, and is written to at the end
    store: File | None = None  # folder of the packed experts; None: the one beside the checkpoint; "none": read in place
    keep: Kept = 1.0  # beta: share of the visual tokens that layers from prune_layer on see; 1.0 is exact
    selection: Auto | Selection = "auto"  # of what is kept
    core_share: Share = 0.2  # alpha: share of the visual tokens kept for saliency alone (affinity)
    expansion_weight: Annotated[float, Range(0, 10**6)] = 2.0  # lambda: what a token loses for experts the core does not use
    prune_layer: OneLayer | Auto = "auto"  # decoder layers from this one on see kept tokens only; auto: as calibrated
    visual_top_k: Annotated[int, Range(1, 2**12, "experts")] | None = None  # of a visual token in prefill; None: the model's own
    lookahead: Literal["auto", "none", "gate", "learned"] = "auto"
    calibration: File | None = None  # folder that vismoe calibrate made; None: the one beside the checkpoint; "none": do without
    window: Annotated[int, Range(1, MOST_LAYERS, "layers")] = 5  # W: MoE layers the lookahead looks ahead, and eviction protects
    eviction: Literal["lru", "lfu"] = "lfu"  # order inside an eviction class
    pinned_layers: Layers | Auto = "auto"  # L_pinned: MoE layers whose experts never leave; auto: as calibrated, else 0
    reads: Literal["auto", "cached", "direct"] = "auto"  # through the page cache, or past it with O_DIRECT
    embeddings: Literal["auto", "memory", "disk"] = "auto"  # auto: on disk where that makes room for experts
    io_threads: Threads | Auto = "auto"  # that read experts from disk; auto: as many as keep the measured disk busy
    misses: Literal["auto", "wait", "cpu"] = "auto"  # in host memory: wait for the copy, compute it there, or the sooner
    deterministic: bool = False  # what is computed, and where, follows from bytes and tokens only; when it is fetched does not
    emulated_link_bytes_per_s: Rate | None = None  # CPU only: copies complete as if over a link of this rate

    def __post_init__(self) -> None:
        check_fields(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Path):
                object.__setattr__(self, field.name, str(value))
        pair = self.pair
        if pair is not None and pair.low is None and "hotness" in self.policy:
            raise ConfigError(
                f"formats={self.formats!r} with policy={self.policy!r}: who is not hot has to be computed in some format. "
                "Fix: a pair such as 4/2 (--formats 4/2), or --policy importance"
            )
        if pair is not None and self.format != "auto":
            raise ConfigError(
                f"format={self.format!r} is one format for all experts, policy={self.policy!r} chooses from a pair. "
                "Fix: formats='4/2' (--formats 4/2), or policy='exact'"
            )

    @property
    def pair(self) -> FormatPair | None:
        """The formats that the policy chooses from; None for exact. Raises ConfigError."""
        return parse_formats(self.formats) if self.policy != "exact" else None

    @property
    def image_cache_bytes(self) -> int:
        return _size_or_none(self.image_cache)

    @property
    def mask_bytes(self) -> int:
        return parse_bytes(self.mask_memory)

    @property
    def request_memory_bytes(self) -> int:
        return _size_or_none(self.request_memory)

    @classmethod
    def of(cls, **values: Any) -> "Settings":
        """Settings from names and values; an unknown name is refused with the nearest known one."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values.keys() - known:
            raise ConfigError(f"unknown setting {name!r}; settings are {', '.join(sorted(known))}")
        return cls(**values)


SETTINGS = rules_of(Settings)  # what each can be


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """What a request may ask for beside its policy and formats: checked as settings are, and never kept."""

    max_tokens: Annotated[int, Range(1, INT64 - 1, "tokens")] | None = None
    sample: bool = False
    temperature: Annotated[float, Range(COLDEST, 2)] | None = None
    top_p: Kept | None = None
    seed: Annotated[int, Range(-INT64, INT64 - 1)] | None = None
    stop: StopText | Annotated[Sequence[StopText], Range(0, MOST_STOPS)] = ()
    image_tokens: tuple[Tokens, Tokens] | None = None
    keep: Kept | None = None
    selection: Selection | None = None
    reuse: bool = False
    batch_size: Annotated[int, Range(1, MOST_ROWS, "requests")] = 1  # of lmms-eval
    top_k: Annotated[int, Range(0, MOST_TOKENS)] | None = None  # these are its tasks' alone
    num_beams: Annotated[int, Range(1, MOST_ROWS)] = 1
    repetition_penalty: Annotated[float, Range(0, 100, above=True)] = 1.0


ANSWERS = rules_of(AnswerOptions)


def check_answer(**options: Any) -> None:
    """Raises InputError for the first option of a request that it cannot have."""
    for name, value in options.items():
        ANSWERS[name].check(value, InputError)
