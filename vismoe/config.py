"""Settings of an engine: one frozen definition of every default. CLI flags, `VisMoEConfig` and `vismoe.load` come from it.

Sizes are written `8GiB`, `512MiB`, a number of bytes, or `25%` (of all expert bytes in the model's dtype).
"""

import dataclasses
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from vismoe.errors import ConfigError
from vismoe.pair import BITS, Format, FormatPair
from vismoe.ranges import Range, Read, check_fields, file_name, option, rules_of, shown

ENGINE_DEFAULTS = {"kernels": "auto"}  # where `vismoe.load`, the command line and the page differ from `Settings`
SERVING_DEFAULTS = {"image_cache": "64MiB"}  # where the server and the page differ from that
SERVER_DEFAULTS = {**SERVING_DEFAULTS, "request_memory": "512MiB"}  # and the server alone
NO_STORE = "none"  # as a setting: read in place, whatever is packed
# Those by which weights are read while libraries are imported (store/read_ahead.py), and what is said beside settings.
READ_AHEAD_BY = ("gguf", "mmproj", "backbone", "memory", "format", "store", "kernels", "reads", "policy", "deterministic")
READ_AHEAD_OPTIONS = ("revision", "dtype")
NO_CALIBRATION = "none"  # as a setting: do without, whatever was calibrated
UNMEASURED_IO_THREADS = 2  # where the disk was not measured
UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
FORMAT_NAMES: dict[str, Format | None] = {
    "lossless": Format.LOSSLESS, "raw": Format.RAW, "own": Format.RAW, "16": Format.RAW, "int8": Format.INT8, "8": Format.INT8,
    "int4": Format.INT4, "4": Format.INT4, "int2": Format.INT2, "2": Format.INT2, "skip": None, "0": None,
}  # fmt: skip
LONGEST_SIZE = 64  # characters
SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]+)?\s*$", re.I)

MOST_BYTES = 2**60  # of any size: more than any machine has
MOST_TOKENS = 2**24  # of a context: more than any model is made for
MOST_LAYERS = 2**12
MOST_ROWS = 128  # of a decode pass: its logits are held at once
AUTO_ROWS, TOKENS_PER_ROW = 64, 256  # bounds of a pass with parallel="auto"
MOST_DRAFTED = 7  # tokens of a draft: with the token before them they are the 8 rows that still count as decode
MOST_IO_THREADS = 64  # more than any disk wants

DraftName = Literal["none", "ngram", "self", "mtp", "auto"]
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
Retention = Annotated[float, Range(0.5, 1)]
Tokens = Annotated[int, Range(1, MOST_TOKENS, "tokens")]
Layers = Annotated[int, Range(0, MOST_LAYERS, "layers")]
Threads = Annotated[int, Range(1, MOST_IO_THREADS, "threads")]
Rate = Annotated[float, Range(1, MOST_BYTES, "bytes per second")]
Rows = Annotated[int, Range(1, MOST_ROWS, "requests")]
Seconds = Annotated[float, Range(0, 10**6, "seconds", above=True)]
OneLayer = Annotated[int, Range(1, MOST_LAYERS)]
Drafted = Annotated[int, Range(1, MOST_DRAFTED, "tokens")]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine runs. Each value is checked by its hint when this is made, unknown names are refused; `auto` is settled once,
    at start, and printed. Greek and capital letters in comments are those of the papers' formulas."""

    memory: Memory | Auto = option(  # auto: 80% of what is free on the device
        "auto", "all the memory to use, e.g. 8GiB, or the share of the experts to hold, e.g. 25%", "SIZE|PERCENT"
    )
    host_memory: Size | None = option(None, "with a GPU: bound of the page-locked host memory between disk and GPU", "SIZE")
    context: Tokens = option(4096, "prompt and answer together; memory is planned for it, and it is enforced", "TOKENS")
    parallel: Rows | Auto = option(  # auto: planning/throughput.py, up to one per TOKENS_PER_ROW of the context and AUTO_ROWS
        "auto",
        "most requests that decode in one pass; auto: as many as give the most tokens per second, up to one per 256 tokens of "
        "the context and 64, and on a CPU only where each gets the bits of being alone",
        "REQUESTS",
    )
    latency: Seconds | None = option(
        None, "seconds that a token of several requests may take: as many decode in one pass as keep to it", "SECONDS"
    )
    prefill_chunk: Tokens | None = option(
        None,
        "read prompts in pieces of so many tokens, between which running answers go on; each piece needs nearly all experts "
        "anew; without it prompts are read whole",
        "TOKENS",
    )
    image_cache: Cache = option(0, "encoded images that are kept: an image sent again is not encoded again; 0 for none", "SIZE")
    mask_memory: Size = option(
        "16MiB", "for attention masks of padded batches, and of long new parts of prompts whose beginning is known", "SIZE"
    )
    request_memory: Cache = option(
        0, "what requests of vismoe serve may hold beside the model: bodies, pictures, prompts being made", "SIZE"
    )
    kernels: Literal["auto", "torch", "fast"] = option(  # auto: fast if it can
        "torch", "arithmetic: torch is bit-identical to transformers' eager experts, fast is ours (float32 accumulation)"
    )
    format: Literal["auto", "raw", "lossless", "int8", "int4", "int2"] = option(
        "auto", "format of the experts: auto keeps every bit; int8, int4 and int2 are smaller and need vismoe pack first"
    )
    backbone: Literal["own", "int8"] = option(
        "own",
        "linear layers beside the experts: own as the checkpoint has them; int8 loses bits and needs vismoe pack --backbone int8",
    )
    policy: PolicyName = option(  # exact: all experts are in `format`
        "exact", "what decides formats at run time: hotness (DynaExq), importance (DyMoE), both; exact: they are fixed"
    )
    formats: Pair = option(
        "4/2",
        "the two formats a policy moves experts between: 16/4, 4/2, own/4 (the checkpoint's own), 4/0 (0: skip)",
        "HIGH/LOW",
    )
    retention: Retention = option(
        0.75, "importance: mean share of the demanded experts that get the better format, 0.5 to 1", "SHARE"
    )
    hotness_decay: Annotated[float, Range(0, 1, above=True, below=True)] = option(
        0.99, "hotness: what a score keeps of itself per token; nearer to 1 remembers longer", "ALPHA"
    )
    hotness_period: Tokens = option(16, "hotness: tokens between two looks at which experts are hot", "TOKENS")  # T
    hotness_state: File | None = option(
        None, "hotness: begin with the scores of an earlier run, and leave this one's there", "FILE"
    )
    store: File | None = option(
        None, "packed experts (vismoe pack), none to read in place; without it, those beside the checkpoint", "FOLDER|none"
    )
    gguf: File | None = option(
        None, "take the weights from this GGUF file; configuration and tokenizer are those of MODEL", "FILE"
    )
    mmproj: File | None = option(None, "with --gguf: the vision tower, from the mmproj file that belongs to it", "FILE")
    keep: Kept = option(1.0, "share of the visual tokens that the deeper layers see, e.g. 0.5; 1 is exact", "SHARE")  # beta
    selection: Auto | Selection = option(
        "auto", "which visual tokens are kept; auto takes what was calibrated, else distinct (least like the mean of their image)"
    )
    core_share: Share = option(0.2, "with affinity: share of the kept tokens that saliency alone decides", "SHARE")  # alpha
    expansion_weight: Annotated[float, Range(0, 10**6)] = option(  # lambda
        2.0, "with affinity: what a token loses for experts that the core does not use", "WEIGHT"
    )
    prune_layer: OneLayer | Auto = option(
        "auto", "decoder layers from this one on see the kept visual tokens only; auto takes what was calibrated", "LAYER"
    )
    visual_top_k: Annotated[int, Range(1, 2**12, "experts")] | None = option(
        None, "experts that a visual token uses, fewer than the model's own number; cuts what prefill reads", "K"
    )
    draft: DraftName = option(
        "none",
        "guess the next tokens, and check them in one pass, which keeps the answer: ngram repeats what the text has already; "
        "self asks a copy of all experts in --draft-format (MoE-SpeQ), and fetches the experts it names; mtp asks the layer that "
        "the publisher trained for that, where transformers has one for the family; auto: what pays of ngram and self",
    )
    draft_format: Literal["int4", "int2"] = option(
        "int4", "format of the copy that drafts; it stays in memory beside the experts, and needs vismoe pack --formats int4"
    )
    draft_tokens: Drafted | Auto = option(  # k
        "auto", "tokens guessed before each check, 1 to 7; auto: as many as give the most tokens per second", "TOKENS"
    )
    lookahead: Literal["auto", "none", "gate", "learned"] = option("auto", "what predicts which experts are needed soon")
    calibration: File | None = option(None, "what vismoe calibrate made; without it, that beside the checkpoint", "FOLDER|none")
    window: Annotated[int, Range(1, MOST_LAYERS, "layers")] = option(  # W
        5, "how many MoE layers the lookahead looks ahead, and eviction protects", "LAYERS"
    )
    eviction: Literal["lru", "lfu"] = option("lfu", "which expert leaves first, among those that may leave")
    packed_slabs: Literal["auto", "always", "never"] = option(
        "auto",
        "lossless experts: hold them packed, in 0.70 of the bytes, and decode them when they are computed; auto: as many as pay "
        "by measured rates, where not all fit otherwise; on a GPU with --misses wait",
    )
    pinned_layers: Layers | Auto = option(  # L_pinned
        "auto", "first MoE layers whose experts never leave; auto takes what was calibrated, else none", "LAYERS"
    )
    reads: Literal["auto", "cached", "direct"] = option(  # direct: O_DIRECT
        "auto", "read through the page cache or past it; auto looks at the free RAM and at what vismoe doctor measured"
    )
    embeddings: Literal["auto", "memory", "disk"] = option(
        "auto", "hold the token embeddings, or read rows as tokens need them, to make room for experts"
    )
    io_threads: Threads | Auto = option(
        "auto", "threads that read experts from disk; auto takes what vismoe doctor measured", "THREADS"
    )
    misses: Literal["auto", "wait", "cpu"] = option(
        "auto", "about an expert in host memory, not on the device: wait for its copy, compute it on the CPU, or the sooner"
    )
    deterministic: bool = option(
        False, "what is computed, and where, follows from bytes and tokens, not from what was measured or is queued"
    )
    emulated_link_bytes_per_s: Rate | None = option(
        None, "CPU only: experts arrive as if over a link of this rate, e.g. 16GB", "SIZE"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Path):
                object.__setattr__(self, field.name, str(value))
        pair = self.pair
        if pair is not None and pair.low is None and "hotness" in self.policy:
            raise ConfigError(
                f"formats={self.formats!r} with policy={self.policy!r}: experts that are not hot need a format, too. "
                "Fix: a pair such as 4/2 (--formats 4/2), or --policy importance"
            )
        if pair is not None and self.format != "auto":
            raise ConfigError(
                f"format={self.format!r} is one format for all experts, policy={self.policy!r} chooses from a pair. "
                "Fix: formats='4/2' (--formats 4/2), or policy='exact'"
            )
        if pair is not None and self.draft != "none":
            raise ConfigError(
                f"draft={self.draft!r} checks what was guessed against experts in one fixed format, policy={self.policy!r} "
                "changes their formats between the two. Fix: policy='exact' (--policy exact), or draft='none' (--draft none)"
            )

    @property
    def pair(self) -> FormatPair | None:
        """The formats that the policy chooses from; None for exact. Raises ConfigError."""
        return parse_formats(self.formats) if self.policy != "exact" else None

    @property
    def rows(self) -> int:
        """The most requests that decode in one pass; with parallel="auto" a bound, up to which the plan chooses."""
        return max(1, min(AUTO_ROWS, self.context // TOKENS_PER_ROW)) if self.parallel == "auto" else self.parallel

    @property
    def checked_rows(self) -> int:
        """The most tokens of one sequence that a decode pass gives logits for: a draft and the token before it, else one."""
        if self.draft == "none":
            return 1
        return 1 + (MOST_DRAFTED if self.draft_tokens == "auto" else self.draft_tokens)

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
        """Settings from names and values; an unknown name is refused with the known ones."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values.keys() - known:
            raise ConfigError(f"unknown setting {name!r}; settings are {', '.join(sorted(known))}")
        return cls(**values)


SETTINGS = rules_of(Settings)  # what each can be
