"""Routing traces: the experts that every token chose, recorded once; replay, predictor training and the simulator read them.

A trace is a folder: `trace.json` (format, version, model, inventory of experts) and `steps-NNNNNN.safetensors` shards, each with
a whole number of steps (arrays: `steps.py`). Shards and header are written under temporary names and renamed, so a crash loses at
most the steps that were not flushed, and recording to the same folder again appends. Readers ignore unknown arrays; a change that
breaks readers raises the version.
"""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vismoe.errors import ClosedError, TraceError
from vismoe.store.index import layout_from_json, layout_to_json
from vismoe.store.whole import write_whole
from vismoe.trace.steps import LayerRouting, TraceStep, pack, unpack
from vismoe.types import Evidence, ExpertInventory, MoELayer, Phase

VERSION = 1
FORMAT = "vismoe-trace"
HEADER = "trace.json"
FLUSH_BYTES = 8 * 2**20  # buffered before a shard is written; one step may exceed it
RECORD_BYTES = 400  # Python objects per buffered step or layer record (measured); in decode many times the payload


class TraceWriter:
    """Appends routing to a trace folder, and buffers about `flush_bytes` of it in memory."""

    def __init__(
        self,
        path: str | Path,
        inventory: ExpertInventory,
        model: str = "",
        fingerprint: str = "",
        flush_bytes: int = FLUSH_BYTES,
        for_training: bool = False,
        settings: dict[str, Any] | None = None,
    ):
        """Starts a trace, or continues the one at `path`; raises TraceError if that has another model or other `settings` (which
        decide what is recorded and are stored in the header), and if files cannot be written.

        for_training: also records a learned lookahead's evidence; shards then hold whole requests, so that after a kill recording
        continues with the next request.
        """
        self.path, self._flush_bytes, self.for_training = Path(path), flush_bytes, for_training
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TraceError(
                f"{path} cannot be a trace folder: {error.strerror}. Fix: record to a new or empty folder"
            ) from error
        described: dict[str, Any] = {"model": model, "fingerprint": fingerprint, "inventory": _inventory_to_json(inventory)}
        described["settings"] = settings
        self._shards, self._written_steps = 0, 0
        if (self.path / HEADER).exists():
            earlier = Trace.open(self.path)
            for name, value in described.items():
                if earlier.header.get(name) != value:
                    what = f"another {name}" if name != "settings" else f"other settings: {earlier.settings}, not {value}"
                    raise TraceError(f"{path} already holds a trace with {what}. Fix: record to another folder")
            self._id, self._shards, self._written_steps = earlier.header["id"], len(earlier.shards), len(earlier)
        elif any(self.path.iterdir()):
            raise TraceError(f"{path} is a folder with other files. Fix: record to a new or empty folder")
        else:
            self._id = secrets.token_hex(8)
        self._described, self._inventory = described, inventory
        self._request, self._steps, self._bytes, self._closed = "", list[TraceStep](), 0, False
        self._write_header(complete=False)

    def request(self, request: str) -> None:
        """The following steps belong to `request`."""
        if self._bytes >= self._flush_bytes:
            self._flush()
        self._request = request

    def step(self, phase: Phase, kinds: np.ndarray) -> None:
        """Begins a forward pass. `kinds` (TokenKind) is [sequences, tokens]; [T] is one sequence, or T of one token in decode."""
        if self._closed:
            raise ClosedError(f"the trace {self.path} was closed")
        if self._bytes >= self._flush_bytes and not self.for_training:
            self._flush()
        kinds = np.array(kinds, np.uint8)
        if kinds.ndim == 1:
            kinds = kinds[:, None] if phase is Phase.DECODE else kinds[None]
        self._steps.append(TraceStep(self._request, phase, kinds, []))
        self._bytes += RECORD_BYTES + kinds.size

    def layer(
        self,
        layer: int,
        expert_ids: np.ndarray,
        weights: np.ndarray,
        scores: np.ndarray | None = None,
        kept: np.ndarray | None = None,
        evidence: Evidence | None = None,
    ) -> None:
        """Routing of one MoE layer in the current step: ids and weights [T, K], scores [W, E], kept [T] (see LayerRouting)."""
        assert self._steps and not self._closed, "layer() outside a step"
        tokens = self._steps[-1].kinds.size if kept is None else len(kept)
        assert expert_ids.shape == weights.shape and len(expert_ids) == tokens, (expert_ids.shape, weights.shape, tokens)
        assert 0 <= layer < len(self._inventory.layers), layer
        routing = LayerRouting(
            layer,
            np.array(expert_ids, np.int16),  # copies: the caller's buffers are its own
            np.array(weights, np.float16),
            None if scores is None else np.array(scores, np.float16),
            None if kept is None else np.array(kept, np.int32),
            evidence,
        )
        self._steps[-1].layers.append(routing)
        seen = (evidence.hidden, evidence.visual, evidence.expected) if evidence is not None else ()
        arrays = (routing.expert_ids, routing.weights, routing.scores, routing.kept, *seen)
        self._bytes += RECORD_BYTES + sum(array.nbytes for array in arrays if array is not None)

    def close(self) -> None:
        """Writes the buffer and marks the trace complete; a second call does nothing."""
        if not self._closed:
            self._flush()
            self._write_header(complete=True)
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and self.for_training:  # the unfinished request will be collected again
            self._steps = [step for step in self._steps if step.request != self._request]
        self.close()

    def _flush(self) -> None:
        if not self._steps:
            return
        arrays, requests = pack(self._steps)
        about = {"id": self._id, "version": VERSION, "steps": len(self._steps), "requests": requests}
        self._write(_shard_name(self._shards), save(arrays, {FORMAT: json.dumps(about)}))
        self._shards += 1
        self._written_steps += len(self._steps)
        self._steps, self._bytes = [], 0

    def _write_header(self, complete: bool) -> None:
        header: dict[str, Any] = {"format": FORMAT, "version": VERSION, "id": self._id, **self._described, "complete": complete}
        if complete:
            header |= {"shards": self._shards, "steps": self._written_steps}
        self._write(HEADER, json.dumps(header, indent=1).encode())

    def _write(self, name: str, content: bytes) -> None:
        try:
            write_whole(self.path / name, content)
        except OSError as error:
            raise TraceError(
                f"{self.path} cannot be written: {error.strerror or error}. Fix: free some space, or record to another folder"
            ) from error


class Trace:
    """A recorded trace; iterating yields its steps in order, one shard in memory at a time."""

    def __init__(self, path: Path, header: dict[str, Any], shards: list[Path], steps: int):
        self.path, self.header, self.shards, self._steps = path, header, shards, steps
        self.model: str = header["model"]
        self.settings: dict[str, Any] | None = header.get("settings")  # settings that decided what was recorded; None: unknown
        self.complete: bool = header["complete"]  # False: the recorder is still running, or was stopped before closing
        self.inventory = _inventory_from_json(header["inventory"])

    @classmethod
    def open(cls, path: str | Path) -> "Trace":
        """Reads and checks the header and the list of shards; raises TraceError for a folder that is not a readable trace."""
        path = Path(path)
        try:
            header = json.loads((path / HEADER).read_text())
            foreign = header.get("format") != FORMAT
        except (OSError, ValueError, AttributeError) as error:
            raise TraceError(f"{path} is not a routing trace: {HEADER} is missing or unreadable ({error})") from error
        if foreign:
            raise TraceError(f"{path} is not a routing trace: {HEADER} is not marked {FORMAT}")
        if header["version"] > VERSION:
            raise TraceError(f"{path} has version {header['version']}, but this vismoe reads up to {VERSION}. Fix: update vismoe")
        shards = sorted(path.glob("steps-*.safetensors"))
        expected = header.get("shards", len(shards))
        if [shard.name for shard in shards] != [_shard_name(i) for i in range(expected)]:
            raise TraceError(f"{path}: shards are missing: {len(shards)} files, expected {_shard_name(0)} to {expected - 1:06d}")
        steps = sum(_about(shard, header["id"])["steps"] for shard in shards)
        if steps != header.get("steps", steps):
            raise TraceError(f"{path}: {steps} steps in the shards, {header['steps']} in {HEADER}; the trace is damaged")
        return cls(path, header, shards, steps)

    def __len__(self) -> int:
        return self._steps

    @property
    def requests(self) -> list[str]:
        """The names of all requests, from the headers of the shards alone."""
        names = (name for shard in self.shards for name in _about(shard, self.header["id"])["requests"])
        return list(dict.fromkeys(names))

    def __iter__(self) -> Iterator[TraceStep]:
        for shard in self.shards:
            requests = _about(shard, self.header["id"])["requests"]
            with safe_open(shard, "numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            yield from unpack(arrays, requests)


def _shard_name(index: int) -> str:
    return f"steps-{index:06d}.safetensors"


def _about(shard: Path, trace_id: str) -> dict[str, Any]:
    try:
        with safe_open(shard, "numpy") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})[FORMAT])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise TraceError(f"{shard} is truncated, or is not a shard of a trace: {error}") from error
    if about["id"] != trace_id:
        raise TraceError(f"{shard} belongs to another trace (id {about['id']}, this one is {trace_id})")
    return about


def _inventory_to_json(inventory: ExpertInventory) -> dict[str, Any]:
    return {
        "layers": [vars(layer) for layer in inventory.layers],
        "geometries": [layout_to_json(layout) for layout in inventory.layouts],
    }


def _inventory_from_json(described: dict[str, Any]) -> ExpertInventory:
    layers = tuple(MoELayer(**layer) for layer in described["layers"])
    return ExpertInventory(layers, tuple(map(layout_from_json, described["geometries"])))
