"""What a running model passes to its lookahead at every MoE layer: the routing, the residual stream, and the kinds of rows.

Off while there are no misses: then a layer costs one call that keeps a reference to its routing, and only if the lookahead has a
memory. A trace for training records the same evidence, whichever lookahead runs.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vismoe.config import Settings
from vismoe.errors import ConfigError
from vismoe.lookahead.background import BackgroundLookahead
from vismoe.lookahead.calibration import Calibration, chosen_lookahead
from vismoe.lookahead.features import FeatureSizes
from vismoe.lookahead.gate import GateLookahead
from vismoe.lookahead.learned import LearnedLookahead, Witness
from vismoe.lookahead.lookahead import Lookahead, Seen
from vismoe.lookahead.summary import VisualSummary
from vismoe.paging.pager import Pager
from vismoe.types import Evidence, ExpertInventory, Phase, TokenKind

Critical = Callable[[int, np.ndarray, bool], np.ndarray]


def choose_lookahead(
    model: Any, inventory: ExpertInventory, settings: Settings, calibration: Calibration | None, device: torch.device
) -> tuple[Lookahead | None, GateLookahead | None, str]:
    """(the lookahead, the gate that recordings may use, a sentence about it).

    `auto` is the lookahead that was best when the model was calibrated, else `gate` if the family has one, and none on a GPU: to
    ask it there, and to copy what it names, takes the interpreter longer than the link takes for what it saves (docs/gpu.md).
    Raises ConfigError if the requested one does not exist, or if the calibration belongs to another model.
    """
    if calibration is not None:
        calibration.refuse_others(model, inventory, model.config.get_text_config().hidden_size)
    chosen = chosen_lookahead(calibration, settings)
    won = "" if settings.lookahead != "auto" or calibration is None else "; it was best when the model was calibrated"
    if chosen == "none":
        return None, None, f"none ({won[2:] or 'not requested'})"
    if chosen == "learned":
        assert calibration is not None
        learned = LearnedLookahead.of(model, inventory, calibration)
        return learned, learned.gate, f"learned, {learned.sizes.window} layers ahead ({calibration.folder}{won})"
    gate = GateLookahead.of(model, inventory, settings.window)
    uncalibrated = settings.lookahead == "auto" and calibration is None
    if isinstance(gate, GateLookahead) and uncalibrated and device.type == "cuda":
        return None, gate, "none: on a GPU it costs more than it saves; lookahead='gate' asks it all the same"
    if isinstance(gate, GateLookahead):
        return gate, gate, f"gate, {settings.window} layers ahead{won}"
    if settings.lookahead == "gate":
        raise ConfigError(f"lookahead='gate' does not fit this family: {gate}. Fix: lookahead='none' or 'auto'")
    return None, None, f"none ({gate})"


class LookaheadInputs:
    """Runs `lookahead` for the next `window` layers of a pager (`serve`). `gate` also serves recordings, if the family has one.

    `device`: of the model. On a CPU the lookahead computes on the same cores, so its time is charged to speculation.
    """

    def __init__(
        self,
        inventory: ExpertInventory,
        window: int,
        lookahead: Lookahead | None,
        gate: GateLookahead | None,
        inline: bool,
        device: torch.device,
    ):
        self._told: Pager | None = None
        self.lookahead = lookahead
        self._summary = VisualSummary()
        layers = inventory.layers
        sizes = FeatureSizes(len(layers), max(layer.num_experts for layer in layers), 0, 0, window)
        self._gate, self._recording = gate, Witness(gate, sizes)
        self._critical: Critical | None = None
        charge = (lambda core_s: self._pager.asked(core_s)) if device.type == "cpu" else lambda core_s: None
        gpu = device if device.type == "cuda" else None
        self._ahead = BackgroundLookahead(lookahead, self._tell, inline, charge, gpu) if lookahead is not None else None
        self.remembers = lookahead is not None and lookahead.remembers  # what layers chose

    def serve(self, pager: Pager | None, critical: Critical | None) -> None:
        """Predict for this pager from now on (None: for none). `critical`: (layer, scores `[W, E]`, decoding) -> bool `[W, E]`,
        the predicted experts that need the more precise format; only these are prefetched. None: all.
        """
        self._told, self._critical = pager, critical

    @property
    def _pager(self) -> Pager:
        assert self._told is not None, "nothing serves"
        return self._told

    def begin_step(
        self, embeddings: torch.Tensor | None, kinds: np.ndarray | None, new_sequence: bool, dropping: bool, recorder: Any
    ) -> None:
        """Begins a forward pass: `embeddings` `[B, S, H]`, None if the model itself embeds token ids; `kinds` [B * S]."""
        if new_sequence:
            self._recording.begin_request()
            if self.lookahead is not None:
                self.lookahead.begin_request()
            if self._ahead is not None:
                self._ahead.begin_request()
        if self.remembers or _for_training(recorder):
            self._summary.begin_step(embeddings, None if kinds is None else kinds == TokenKind.VISUAL, new_sequence, dropping)

    def at_layer(
        self,
        layer: int,
        decoding: bool,
        chosen: np.ndarray,
        hidden: torch.Tensor,
        kinds: np.ndarray | None,
        kept: np.ndarray | None,
        recorder: Any,
    ) -> tuple[np.ndarray | None, Evidence | None]:
        """Tell the pager what the next layers will need; off while there are no misses. -> evidence for a recorder.

        chosen `[T, K]`, hidden `[T, H]`, kinds `[T]` TokenKind of these rows (None: unknown, all real); kept `[T]`: their indices
        among the tokens of the step, -1 for none (None: all of them).
        """
        self._observe(layer, chosen, kinds)
        if kept is not None:
            self._summary.dropped(kept)
        core, wanted = self._pager.core, self._wanted
        if not wanted and recorder is None:
            return None, None
        seen = Seen(layer, decoding, chosen, hidden, *_rows(kinds), self._summary.value)
        scores = evidence = None
        if recorder is not None:
            scores, evidence = self._now(seen, wanted), self._witnessed(seen) if _for_training(recorder) else None
        elif self._ahead is not None and wanted:
            began_s = time.perf_counter()
            self._ahead.ask(seen, core.tick)
            self._pager.asked(time.perf_counter() - began_s)
        if self._gate is not None:
            self._gate.forget()
        return scores, evidence

    @property
    def _wanted(self) -> bool:
        """Something is missed at present, and guesses may be copied."""
        core = self._pager.core
        return bool(core.misses_last_step or core.misses_this_step) and core.may_guess

    @property
    def asks(self) -> bool:
        """Whether a layer that is not recorded asks the lookahead now."""
        return self._ahead is not None and self._wanted

    def at_resident_layer(self, layer: int, read: Callable[[], np.ndarray], kinds: np.ndarray | None) -> None:
        """What `at_layer` does in a pass where nothing is asked and nothing recorded. read: makes `chosen`."""
        if self.remembers:
            chosen = read()
            self._observe(layer, chosen, kinds if kinds is not None and kinds.size == len(chosen) else None)

    def _observe(self, layer: int, chosen: np.ndarray, kinds: np.ndarray | None) -> None:
        if self.remembers and self.lookahead is not None:
            alone = kinds is None or len(chosen) == 1
            self.lookahead.observe(layer, chosen if alone else chosen[kinds != TokenKind.PAD])

    def _now(self, seen: Seen, wanted: bool) -> np.ndarray | None:
        """Computes the scores in this thread, as a recording needs them."""
        snapshot = self.lookahead.snapshot(seen) if self.lookahead is not None else None
        if self.lookahead is None or snapshot is None:
            return None
        scores = self.lookahead.evaluate(snapshot)
        if scores is not None and wanted:
            self._tell(self._pager.core.tick, seen.layer, scores)
        return scores

    def _witnessed(self, seen: Seen) -> Evidence | None:
        snapshot = self._recording.snapshot(seen)
        return None if snapshot is None else self._recording.evidence(snapshot)

    def _tell(self, tick: int, layer: int, scores: np.ndarray) -> None:
        """Passes on the scores for the layers after `layer`, unless another layer was demanded meanwhile."""
        self._pager.changes.make(self._tell_now, tick, layer, scores)

    def _tell_now(self, tick: int, layer: int, scores: np.ndarray) -> None:
        if self._pager.core.tick == tick:
            decoding = self._pager.core.phase is Phase.DECODE
            high = None if self._critical is None else self._critical(layer, scores, decoding)
            self._pager.look_ahead(layer, scores, high)

    @property
    def memory(self) -> tuple[Any, VisualSummary]:
        """The state of the running request, for requests that alternate."""
        return self.lookahead.memory if self.lookahead is not None else None, self._summary

    @memory.setter
    def memory(self, memory: tuple[Any, VisualSummary] | None) -> None:
        """None: state of a new request. Results of unfinished evaluations for another request are dropped."""
        remembered, self._summary = memory if memory is not None else (None, VisualSummary())
        if self.lookahead is not None:
            self.lookahead.memory = remembered
        if self._ahead is not None and memory is None:
            self._ahead.begin_request()

    def close(self) -> None:
        """Ends the worker thread."""
        if self._ahead is not None:
            self._ahead.close()


def _for_training(recorder: Any) -> bool:
    return recorder is not None and getattr(recorder, "for_training", False)


def _rows(kinds: np.ndarray | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(real, visual) as bool, each None if it would be the same for all rows."""
    if kinds is None:
        return None, None
    real, visual = kinds != TokenKind.PAD, kinds == TokenKind.VISUAL
    return None if real.all() else real, visual if visual.any() else None
