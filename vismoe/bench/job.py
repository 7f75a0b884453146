"""Who can run, what one worker is asked to do, and what it answers: plain data, JSON both ways. Imports nothing heavy.

A *contestant* is one way to run a model. A *job* is one worker process: load, one cold request, some warm ones. *Cold* is the
first request after loading, with the page cache of all weight files dropped; *warm* is every later one of the same process.
"""

import dataclasses
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vismoe.errors import ConfigError

__all__ = ["BASELINES", "COLD", "CONTESTANTS", "OURS", "WARM", "Answer", "Contestant", "Job", "Request", "contestants_of"]

COLD, WARM = "cold", "warm"
OURS = "vismoe"


@dataclass(frozen=True)
class Contestant:
    """One way to run a model."""

    name: str
    baseline: str  # the word of --baseline that asks for it
    package: str
    needs_all: bool  # of the weights in memory: it cannot run where they exceed the RAM
    sees_images: bool
    what: str


MAPPED = "loaded as transformers loads them (weights that it does not convert stay mapped)"
CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant(OURS, "", "vismoe", False, True, "experts paged in under the memory budget"),
        Contestant("transformers", "transformers", "transformers", True, True, MAPPED),
        Contestant("transformers-eager", "transformers", "transformers", True, True, "the same with eager experts"),
        Contestant("accelerate", "accelerate", "accelerate", False, True, "device_map='auto', the rest in a disk folder"),
        Contestant("llama.cpp-mmap", "llama.cpp", "llama_cpp", False, False, "weights mapped from the GGUF file"),
        Contestant("llama.cpp-resident", "llama.cpp", "llama_cpp", True, False, "weights read into memory"),
    )
}
BASELINES = tuple(dict.fromkeys(contestant.baseline for contestant in CONTESTANTS.values() if contestant.baseline))
INSTALL = {"llama_cpp": "llama-cpp-python"}


def contestants_of(words: Iterable[str]) -> tuple[str, ...]:
    """Names of the contestants, ours first, for words of --baseline: a baseline, or one contestant by its own name.

    Raises ConfigError for an unknown word, or a package that is not installed.
    """
    chosen = {OURS: None}
    for word in words:
        found = [contestant for contestant in CONTESTANTS.values() if word == contestant.baseline]
        found = found or [contestant for contestant in CONTESTANTS.values() if word == contestant.name != OURS]
        if not found:
            names = ", ".join((*BASELINES, *(name for name in CONTESTANTS if name not in (OURS, *BASELINES))))
            raise ConfigError(f"--baseline {word}: no such baseline. Fix: choose among {names}")
        package = found[0].package
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"--baseline {word} needs the package {package}. Fix: pip install {INSTALL.get(package, package)}")
        chosen |= dict.fromkeys(contestant.name for contestant in found)
    return tuple(chosen)


@dataclass(frozen=True)
class Job:
    """Everything one worker needs to know."""

    contestant: str
    model: str  # folder or hub name
    dtype: str
    device: str
    token_ids: tuple[int, ...]  # the text of the prompt
    new_tokens: int
    warm_requests: int
    threads: int
    held_bytes: int  # of weights that accelerate may hold in memory: as many as VisMoE's plan holds
    settings: dict[str, Any] = field(default_factory=dict)  # of VisMoE
    revision: str | None = None
    picture: tuple[int, int] | None = None  # width and height in pixels, before the text
    files: tuple[str, ...] = ()  # weights; dropped from the page cache before loading, and before the cold request
    gguf: str | None = None
    offload_folder: str | None = None  # accelerate's
    trace: str | None = None  # VisMoE's timeline, of one more request that is not counted

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        values = json.loads(text)
        for name in ("token_ids", "files", "picture"):
            values[name] = None if values[name] is None else tuple(values[name])
        return cls(**values)


@dataclass(frozen=True)
class Request:
    """One prompt and its greedy continuation. Seconds are wall time; encode, prefill and decode do not overlap."""

    state: str  # COLD or WARM
    encode_s: float
    prefill_s: float
    prompt_tokens: int
    visual_tokens: int
    decode_s: float
    decode_tokens: int  # forward passes after prefill, which gives the first new token
    token_ids: tuple[int, ...]  # the new tokens
    prefill_disk_bytes: int | None  # read from storage meanwhile, encode included; None where the system does not count it
    decode_disk_bytes: int | None
    counters: dict[str, dict[str, float]] | None = None  # VisMoE's, by phase


@dataclass(frozen=True)
class Answer:
    """What a worker found."""

    load_s: float
    requests: tuple[Request, ...]
    peak_rss_bytes: int
    cached_bytes: int  # of the weight files, in the page cache when the cold request began: they could not be dropped
    files_bytes: int  # of the weight files
    notes: dict[str, Any]  # what was chosen and why, e.g. the experts' implementation
