"""By which plan a model's experts are served, and how that changes: between two requests, within the same memory.

Pools are cut for one policy and one pair of formats. Whoever asks for another one queues the change and stands right behind it in
the line of requests, so that requests with different wishes take turns. A change that cannot be planned is refused at once; one
that fails while it is made is undone, and those who waited for it are told.
"""

import gc
import logging
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch

from vismoe.config import Settings
from vismoe.engine.request import Shared
from vismoe.engine.scheduler import Scheduler
from vismoe.engine.stats import PrecisionInfo
from vismoe.errors import ConfigError, InputError, VisMoEError
from vismoe.models.load.origin import Opened, Origin
from vismoe.models.load.quantizer import runtime_of
from vismoe.models.load.serving import serve
from vismoe.models.moe.experts import ExpertBackends
from vismoe.precision.hotness import Hotness
from vismoe.timeline import Timeline

__all__ = ["Plans", "precision_of"]

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


def precision_of(settings: Settings) -> PrecisionInfo | None:
    """Who chooses formats by these settings; None: nobody (exact)."""
    pair = settings.pair
    return None if pair is None else PrecisionInfo(settings.policy, str(pair), settings.retention)


class Plans:
    """`settings`: those of requests that ask for nothing else. `opened`: what serves now, or did until its change began."""

    def __init__(self, model: Any, shared: Shared, scheduler: Scheduler, settings: Settings):
        self.settings, self.opened = settings, model._vismoe_opened
        self._model, self._shared, self._scheduler = model, shared, scheduler
        self._origin: Origin = model._vismoe_origin
        self._runtime = runtime_of(model)
        self._format = settings.format  # of exact
        self._asking = threading.RLock()  # whoever asks for a change, and then for what needs it
        self._next = settings  # what will hold when all who wait have had their turn
        self._hotness: Hotness | None = self._runtime.hotness  # learned so far, also while another policy serves
        self._closer = weakref.finalize(model, lambda: None)  # of stores that a change has opened
        self._told()

    # -- in any thread
    def asked(self, policy: str | None, formats: str | None, retention: float | None) -> Settings:
        """The settings with these in place of theirs. Raises ConfigError."""
        wished = {"policy": policy, "formats": formats, "retention": retention}
        chosen = {**vars(self.settings), **{name: value for name, value in wished.items() if value is not None}}
        chosen["format"] = self._format if chosen["policy"] == "exact" else "auto"
        return Settings.of(**chosen)

    def asked_for_once(self, policy: str | None, formats: str | None, retention: float | None) -> Settings:
        """The same for one request, which may not ask for what its policy does not use. Raises InputError too."""
        settings = self.asked(policy, formats, retention)
        if formats is not None and settings.policy == "exact":
            raise InputError(f"formats={formats!r}: nobody chooses formats with policy='exact'. Fix: a policy, or leave it out")
        if retention is not None and "importance" not in settings.policy:
            raise InputError(
                f"retention={retention}: policy={settings.policy!r} does not look at importance. Fix: policy='importance', or "
                "leave it out"
            )
        return settings

    def why_not(self, policy: str, formats: str | None) -> str | None:
        """Why this policy cannot serve with these formats; None where it can."""
        try:
            with self._asking:
                opened = self._origin.reopen(self._model, self.asked(policy, formats, None))
        except VisMoEError as error:
            return str(error)
        self._origin.close(opened.stores)
        return None

    def behind(self, settings: Settings, ask: Callable[[], Result]) -> Result:
        """What `ask` returns; whoever it queues will find experts served as `settings` say. Raises what planning does."""
        with self._asking:
            self._queue_change(settings)
            return ask()

    def change(self, settings: Settings) -> None:
        """These are the usual ones from now on; returns when they hold. Raises what planning does, and changes nothing then."""
        with self._asking:
            before, change = self.settings, self._queue_change(settings)
            self.settings = settings
            self._shared.retention = settings.retention
        try:
            if change is not None:
                change.result()
        except BaseException:
            with self._asking:
                if self.settings is settings:
                    self.settings, self._shared.retention = before, before.retention
            raise

    def _queue_change(self, settings: Settings) -> "Future[None] | None":
        """Under the lock; None where nothing has to change."""
        if _served_by(settings) == _served_by(self._next):
            return None
        opened = self._origin.reopen(self._model, settings)
        begun = threading.Event()

        def apply() -> None:
            begun.set()
            self._apply(opened)

        try:
            change = self._scheduler.run_alone(apply)
        except BaseException:
            self._origin.close(opened.stores)
            raise
        change.add_done_callback(lambda _: None if begun.is_set() else self._origin.close(opened.stores))
        self._next = settings
        return change

    # -- on the model's thread
    def _apply(self, opened: Opened) -> None:
        """Serve experts by another plan; by the old one again where that fails."""
        before, timeline = self.opened, self._runtime.pager.timeline
        self._hotness = self._runtime.hotness or self._hotness
        self._save_hotness()
        self._shared.forget_what_experts_made()
        self._runtime.stop_serving()
        self._give_back_memory()  # before any other is taken
        try:
            served = self._made(opened)
        except BaseException as error:
            self._origin.close(opened.stores)
            _let_go(error)
            self._give_back_memory()
            with self._asking:
                if _served_by(self._next) == _served_by(opened.settings):
                    self._next = before.settings
            self._serve(before, *self._made(before), timeline)
            self._shared.refused = str(error)
            raise
        self._origin.close(before.stores)
        self._closer.detach()
        self._closer = weakref.finalize(self._model, opened.stores.close)
        self._serve(opened, *served, timeline)

    def _made(self, opened: Opened) -> tuple[ExpertBackends, dict[str, str]]:
        return serve(self._model, opened, self._origin.device, self._shared.metrics, self._hotness)

    def _serve(self, opened: Opened, serving: ExpertBackends, about: dict[str, str], timeline: Timeline | None) -> None:
        serving.pager.timeline = timeline
        self._runtime.serve(serving)
        self._runtime.backends |= about
        self.opened = opened
        self._told()

    def _told(self) -> None:
        """Requests are told what serves."""
        self._shared.running, self._shared.refused = precision_of(self.opened.settings), ""
        self._shared.retention = self.settings.retention

    def _give_back_memory(self) -> None:
        gc.collect()
        if self._origin.device.type == "cuda":
            torch.cuda.empty_cache()  # pools of other sizes do not fit into what the allocator keeps

    def _save_hotness(self) -> None:
        """Leave what was learned about hot experts in the file that the settings name; a file that cannot be written is no reason
        to stop."""
        file = self.settings.hotness_state
        if self._hotness is None or not file:
            return
        try:
            self._hotness.save(Path(file).expanduser(), self.opened.stores.fingerprint)
        except ConfigError as error:
            logger.error("%s", error)

    def close(self) -> None:
        """When no request runs any more: stop copies, keep what was learned, close the files."""
        self._runtime.close()
        if self._runtime.now_serving is not None:
            self._hotness = self._runtime.hotness or self._hotness
        self._save_hotness()
        self.opened.stores.close()
        self._origin.source.close()


def _served_by(settings: Settings) -> tuple[str, str]:
    """What a plan depends on, of what can change while the model runs."""
    return settings.policy, str(settings.pair)


def _let_go(error: BaseException | None) -> None:
    """Of what the frames of a failure hold, pools among it; the error itself can still be raised."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
