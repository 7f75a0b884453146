"""The programs that can run, the job of one worker, and its answer: plain data, JSON in both directions. Imports nothing heavy.

A *way* is a program that runs a model, a *contestant* is a way with experts in one format. A *job* is one worker process: load,
one cold request, some warm ones. *Cold* is the first request after loading, with the page cache of all weight files dropped;
*warm* is every later request of the same process.
"""

import dataclasses
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vismoe.errors import ConfigError

COLD, WARM = "cold", "warm"
OURS = "vismoe"
LOGITS = 4096  # most logits of its first new token that a contestant reports, spread evenly over the vocabulary


@dataclass(frozen=True)
class ModelProgram:
    """A program that runs a model."""

    name: str
    baseline: str  # its name in --baseline
    package: str
    needs_all: bool  # it needs all weights in memory, so it cannot run if they exceed the RAM
    sees_images: bool
    what: str


MAPPED = "loaded by transformers (weights that it does not convert stay mapped)"
PROGRAMS = {
    way.name: way
    for way in (
        ModelProgram(OURS, "", "vismoe", False, True, "experts paged in under the memory budget"),
        ModelProgram("transformers", "transformers", "transformers", True, True, MAPPED),
        ModelProgram("transformers-eager", "transformers", "transformers", True, True, "the same, with eager experts"),
        ModelProgram(
            "transformers-compiled", "", "transformers", True, True, "loaded by transformers, static cache, torch.compile (GPU)"
        ),
        ModelProgram("accelerate", "accelerate", "accelerate", False, True, "device_map='auto', the rest in a disk folder"),
        ModelProgram("llama.cpp-mmap", "llama.cpp", "llama_cpp", False, False, "weights mapped from the GGUF file"),
        ModelProgram("llama.cpp-resident", "llama.cpp", "llama_cpp", True, False, "weights read into memory"),
    )
}
BASELINES = tuple(dict.fromkeys(way.baseline for way in PROGRAMS.values() if way.baseline))
INSTALL = {"llama_cpp": "llama-cpp-python"}
EXACT = "exact"  # the precision of formats that keep every bit
IN_PLACE, PACKED = "raw", "packed"  # raw from the checkpoint, and from a store
GGUF_TYPES = ("q8_0", "q4_k", "q4_0")  # both read the same file: VisMoE, too, takes the experts as they lie there
PARTNERS = {"raw": "bf16", "int8": "q8_0", "int4": "q4_0"}  # llama.cpp's types; its two-bit types differ too much from int2
PARTNERS |= {kind: kind for kind in GGUF_TYPES}
BITS_PER_WEIGHT = {"int8": 8.25, "int4": 4.25, "int2": 2.5, "q8_0": 8.5, "q4_k": 4.5, "q4_0": 4.5}  # scales included


@dataclass(frozen=True)
class Contestant:
    """One row of a comparison."""

    way: str
    format: str = IN_PLACE  # of the experts, PACKED, or a type of GGUF files; llama.cpp uses the partner type
    kernels: str | None = None  # VisMoE's kernels, if several are compared

    @property
    def name(self) -> str:
        words = (self.way, None if self.format == IN_PLACE else self.expert_type, self.kernels)
        return " ".join(filter(None, words))

    @property
    def is_ours(self) -> bool:
        return self.way == OURS

    @property
    def package(self) -> str:
        return PROGRAMS[self.way].package

    @property
    def precision(self) -> str:
        """Contestants of equal precision are compared."""
        return EXACT if self.format in (IN_PLACE, PACKED, "lossless") else self.format

    @property
    def setting(self) -> str:
        """The engine's name of the format."""
        return "raw" if self.format == PACKED else "auto" if self.format in GGUF_TYPES else self.format

    @property
    def expert_type(self) -> str:
        """The format of experts in memory: VisMoE's, or llama.cpp's type."""
        return PARTNERS[self.format] if self.package == "llama_cpp" else self.format


def contestants_of(
    words: Iterable[str], formats: Sequence[str] = (IN_PLACE,), kernels: Sequence[str] = ()
) -> tuple[Contestant, ...]:
    """VisMoE in every format and with each of the kernels first, then the words of --baseline: a baseline, or the name of one
    way. llama.cpp runs with the partners of the formats, all others with the checkpoint's own type.

    Raises ConfigError for an unknown word, or a package that is not installed.
    """
    chosen = {Contestant(OURS, format, kernel): None for format in formats for kernel in kernels or (None,)}
    partnered = dict.fromkeys(IN_PLACE if Contestant(OURS, format).precision == EXACT else format for format in formats)
    for word in words:
        found = [way for way in PROGRAMS.values() if word == way.baseline]
        found = found or [way for way in PROGRAMS.values() if word == way.name != OURS]
        if not found:
            names = ", ".join((*BASELINES, *(name for name in PROGRAMS if name not in (OURS, *BASELINES))))
            raise ConfigError(f"--baseline {word}: no such baseline. Fix: choose among {names}")
        package = found[0].package
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"--baseline {word} needs the package {package}. Fix: pip install {INSTALL.get(package, package)}")
        theirs = [format for format in partnered if format in PARTNERS] if package == "llama_cpp" else [IN_PLACE]
        if not theirs:
            raise ConfigError(
                f"--baseline {word} has no type comparable to {', '.join(formats)}. Fix: --formats with {', '.join(PARTNERS)}"
            )
        chosen |= {Contestant(way.name, format): None for way in found for format in theirs}
    return tuple(chosen)


@dataclass(frozen=True)
class Job:
    """Everything that one worker needs to know."""

    way: str
    model: str  # folder or hub name
    dtype: str
    device: str
    token_ids: tuple[int, ...]  # the prompt without its picture
    new_tokens: int
    warm_requests: int
    threads: int
    held_bytes: int  # weights that accelerate may hold in memory: as many as VisMoE's plan holds
    settings: dict[str, Any] = field(default_factory=dict)  # of VisMoE
    revision: str | None = None
    picture: tuple[int, int] | None = None  # width and height in pixels, before the text
    files: tuple[str, ...] = ()  # weights; dropped from the page cache before loading, and before the cold request
    gguf: str | None = None
    offload_folder: str | None = None  # accelerate's
    trace: str | None = None  # file for VisMoE's timeline of a further request, which is not counted
    moe_time: bool = False  # time the routed experts alone in a further request, which is not counted
    token_time: bool = False  # of VisMoE: time the parts of decoding in another one
    first_tokens: tuple[int, ...] = ()  # further warm requests, each with so many of the first tokens of the prompt
    parallel: tuple[int, ...] = ()  # further measurements, each with so many prompts that decode at once
    prompts: tuple[tuple[int, ...], ...] = ()  # for these: of equal length, each another one
    read_bytes: int = 0  # of each read that measures the disk before and after the worker; 0: it is not measured
    io_threads: int = 0  # that read experts, and make these reads; 0: it is not measured

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        values = json.loads(text)
        for name in ("token_ids", "files", "picture", "first_tokens", "parallel"):
            values[name] = None if values[name] is None else tuple(values[name])
        values["prompts"] = tuple(map(tuple, values["prompts"]))
        return cls(**values)


@dataclass(frozen=True)
class BenchRequest:
    """One prompt and its greedy continuation. Seconds are wall time; encode, prefill and decode do not overlap."""

    state: str  # COLD or WARM
    encode_s: float
    prefill_s: float
    prompt_tokens: int
    visual_tokens: int
    decode_s: float
    decode_tokens: int  # forward passes after prefill, which gives the first new token
    token_ids: tuple[int, ...]  # the new tokens
    prefill_disk_bytes: int | None  # read from storage during prefill and encode; None if the system does not count it
    decode_disk_bytes: int | None
    counters: dict[str, dict[str, float]] | None = None  # of VisMoE, by phase
    token_s: tuple[float, ...] = ()  # seconds of each decoded token, where they are known


@dataclass(frozen=True)
class ParallelAnswers:
    """Several prompts that decode at once, after each was read."""

    rows: int
    tokens: int  # decoded, of all rows
    seconds: float
    disk_bytes: int | None  # read from storage meanwhile
    by_turns_s: float | None = None  # of VisMoE: for as many tokens after that, a pass for each row
    streamed: float | None = None  # of VisMoE: share of the layers' demands in streamed passes


@dataclass(frozen=True)
class TokenTime:
    """The parts of decoding in a further request."""

    tokens: int
    seconds: float  # of all of them
    timing_s: float  # of these, what timing takes
    parts: dict[str, dict[str, float]]  # their calls, seconds, and bytes read (of experts 0: they are known by their number)


@dataclass(frozen=True)
class Answer:
    """The results of a worker."""

    load_s: float
    requests: tuple[BenchRequest, ...]
    peak_rss_bytes: int
    cached_bytes: int  # of the weight files that remained in the page cache when the cold request began
    files_bytes: int  # of the weight files
    notes: dict[str, Any]  # choices with reasons, e.g. the experts' implementation
    logits: tuple[float, ...] = ()  # of the first new token, at most LOGITS of them
    parallel: tuple[ParallelAnswers, ...] = ()
    moe_s: dict[str, float] | None = None  # seconds in the routed experts of all MoE layers in a further request, by phase
    token_time: TokenTime | None = None
    load_disk_bytes: int | None = None  # read from storage until it was loaded
    import_s: float = 0.0  # from the first import for its way until it could load
