"""Settings of an engine: one frozen definition of every default. CLI flags, `VisMoEConfig` and `vismoe.load` come from it.

Sizes are written `8GiB`, `512MiB`, a number of bytes, or `25%` (of all expert bytes in the model's dtype).
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

from vismoe.errors import ConfigError
from vismoe.pair import BITS, Format, FormatPair

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
SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]+)?\s*$", re.I)

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
                raise ConfigError(f"memory={text!r}: a percentage of the experts lies above 0% and up to 100%, e.g. 25%")
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
    match = SIZE.match(str(text))
    unit = (match.group(2) or "b").lower() if match else ""
    if not match or unit not in UNITS:
        raise ConfigError(f"{text!r} is not a size; write e.g. 8GiB, 512MiB or a number of bytes")
    nbytes = int(float(match.group(1)) * UNITS[unit])
    if nbytes <= 0:
        raise ConfigError(f"{text!r}: a size must be above zero")
    return nbytes


def parse_formats(text: str) -> FormatPair:
    """`"4/2"`, `"16/int8"`, `"lossless/int8"`, `"4/0"` or `"int4/skip"`; raises ConfigError otherwise."""
    high, slash, low = (part.strip() for part in text.partition("/"))
    if not slash or high not in FORMAT_NAMES or low not in FORMAT_NAMES:
        raise ConfigError(f"formats={text!r}: two of {', '.join(FORMAT_NAMES)}, the better one first, e.g. 4/2")
    first, second = FORMAT_NAMES[high], FORMAT_NAMES[low]
    if first is None or BITS[first] <= BITS[second]:
        raise ConfigError(f"formats={text!r}: the first one must have more bits than the second, e.g. 4/2")
    return FormatPair(first, second)


def format_bytes(nbytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine runs. Checked when made; unknown names are refused; `auto` is settled once, at start, and printed."""

    memory: str | int = "auto"  # all we allocate on the device, or a share of the experts; auto: 80% of what is free
    host_memory: str | int | None = None  # bound of the page-locked middle tier of a GPU machine; None: whatever RAM is free
    context: int = 4096  # tokens over all sequences of a batch, prompt and answer: planned for, and enforced
    image_cache: str | int = 0  # bytes of encoded images that are kept for later requests; 0: none
    request_memory: str | int = 0  # bytes that requests of a server hold beside the model: bodies, pictures, prompts being made
    kernels: Literal["auto", "torch", "fast"] = "torch"  # torch: bit-identical to eager experts; fast: ours; auto: fast if it can
    format: Literal["auto", "raw", "lossless", "int8", "int4", "int2"] = "auto"  # of the experts; auto keeps every bit
    policy: PolicyName = "exact"  # who decides formats while the model runs; exact: nobody, all experts are in `format`
    formats: str = "4/2"  # the pair that another policy chooses from, e.g. 16/4, lossless/int8, 4/0 (0: skip)
    retention: float = 0.75  # importance: mean share of the demanded experts that keep the better format, 0.5 to 1
    hotness_decay: float = 0.99  # alpha of hotness, per token
    hotness_period: int = 16  # T: tokens between two looks at who is hot
    hotness_ahead: bool = False  # copy experts that are expected to become hot ahead of time; it won nothing in replays
    hotness_state: str | None = None  # file that hotness begins with, where it is there, and is written to at the end
    store: str | None = None  # folder of the packed experts; None: the one beside the checkpoint; "none": read in place
    keep: float = 1.0  # beta: share of the visual tokens that layers from prune_layer on see; 1.0 is exact
    selection: Literal["auto", "affinity", "saliency", "distinct", "visionzip", "uniform", "random"] = "auto"  # of what is kept
    core_share: float = 0.2  # alpha: share of the visual tokens kept for saliency alone (affinity)
    expansion_weight: float = 2.0  # lambda: what a token loses for experts that the core does not use (affinity)
    prune_layer: int | Literal["auto"] = "auto"  # decoder layers from this one on see kept tokens only; auto: as calibrated
    visual_top_k: int | None = None  # experts that a visual token uses in prefill; None: as many as the model says
    lookahead: Literal["auto", "none", "gate", "learned"] = "auto"
    calibration: str | None = None  # folder that vismoe calibrate made; None: the one beside the checkpoint; "none": do without
    window: int = 5  # W: MoE layers the lookahead looks ahead, and eviction protects
    eviction: Literal["lru", "lfu", "lookahead"] = "lfu"  # order inside an eviction class
    pinned_layers: int | Literal["auto"] = "auto"  # L_pinned: MoE layers whose experts never leave; auto: as calibrated, else 0
    reads: Literal["auto", "cached", "direct"] = "auto"  # through the page cache, or past it with O_DIRECT
    embeddings: Literal["auto", "memory", "disk"] = "auto"  # auto: on disk where that makes room for experts
    io_threads: int | Literal["auto"] = "auto"  # that read experts from disk; auto: as many as keep the measured disk busy
    misses: Literal["auto", "wait", "cpu"] = "auto"  # in host memory: wait for the copy, compute it there, or the sooner
    deterministic: bool = False  # what is computed, and where, follows from bytes and tokens only; when it is fetched does not
    emulated_link_bytes_per_s: float | None = None  # CPU only: copies complete as if over a link of this rate

    def __post_init__(self) -> None:
        if self.memory != "auto":
            Budget.parse(self.memory)
        if self.host_memory is not None:
            parse_bytes(self.host_memory)
        for size in (self.image_cache, self.request_memory):
            if str(size) != "0":
                parse_bytes(size)
        for field in dataclasses.fields(self):
            allowed = getattr(field.type, "__args__", None)
            value = getattr(self, field.name)
            if getattr(field.type, "__origin__", None) is Literal and value not in allowed:  # type: ignore[operator]
                raise ConfigError(f"{field.name}={value!r}: choose one of {', '.join(map(repr, allowed or ()))}")
        least_of = {
            "hotness_period": 1,
            "context": 1,
            "window": 1,
            "io_threads": 1,
            "pinned_layers": 0,
            "prune_layer": 1,
            "visual_top_k": 1,
        }
        for name, least in least_of.items():
            value = getattr(self, name)
            if value != getattr(type(self), name) and (  # a default may be "auto"
                not isinstance(value, int) or value < least
            ):
                raise ConfigError(f"{name}={value!r}: a whole number of at least {least}")
        if not 0 < self.keep <= 1 or not 0 <= self.core_share <= 1 or self.expansion_weight < 0:
            raise ConfigError(
                f"keep={self.keep}, core_share={self.core_share}, expansion_weight={self.expansion_weight}: keep lies above 0 "
                "and up to 1, core_share between 0 and 1, expansion_weight is not negative"
            )
        parse_formats(self.formats)
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
        if not 0.5 <= self.retention <= 1:
            raise ConfigError(
                f"retention={self.retention}: the mean share of critical experts lies between 0.5 and 1, since the cosine "
                "schedule begins with all of them in the first layer"
            )
        if not 0 < self.hotness_decay < 1:
            raise ConfigError(f"hotness_decay={self.hotness_decay}: alpha lies between 0 and 1")
        if self.emulated_link_bytes_per_s is not None and self.emulated_link_bytes_per_s <= 0:
            raise ConfigError(f"emulated_link_bytes_per_s={self.emulated_link_bytes_per_s}: must be above zero")

    @property
    def pair(self) -> FormatPair | None:
        """The formats that the policy chooses from; None for exact. Raises ConfigError."""
        return parse_formats(self.formats) if self.policy != "exact" else None

    @property
    def image_cache_bytes(self) -> int:
        return parse_bytes(self.image_cache) if str(self.image_cache) != "0" else 0

    @property
    def request_memory_bytes(self) -> int:
        return parse_bytes(self.request_memory) if str(self.request_memory) != "0" else 0

    @classmethod
    def of(cls, **values: Any) -> "Settings":
        """Settings from names and values; an unknown name is refused with the nearest known one."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values.keys() - known:
            raise ConfigError(f"unknown setting {name!r}; settings are {', '.join(sorted(known))}")
        return cls(**values)
