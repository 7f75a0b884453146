"""How the policy and the formats of a model's experts change: between two requests, within the same memory.

Pools are cut for one policy and one pair of formats. A request that asks for another one queues the change and stands right
behind it in the line of requests, so that requests with different wishes take turns. A change that cannot be planned is refused
at once; one that fails while it is made is undone, and the requests that waited for it are refused.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from vismoe.config import Settings
from vismoe.engine.request import SharedModel
from vismoe.engine.scheduler import Scheduler
from vismoe.errors import InputError, VisMoEError
from vismoe.options import RequestOptions

Result = TypeVar("Result")


class PlanChanges:
    """`settings`: those of requests that ask for nothing else. Used in any thread."""

    def __init__(self, shared: SharedModel, scheduler: Scheduler, settings: Settings):
        self.settings = settings
        self._shared, self._scheduler, self._runtime = shared, scheduler, shared.runtime
        self._format = settings.format  # of exact
        self._asking = threading.RLock()  # around a change and the request that needs it
        self._next = settings  # what will hold when all changes in the line are made

    def with_options(self, policy: str | None, formats: str | None, retention: float | None) -> Settings:
        """The settings with these in place of theirs. Raises ConfigError."""
        wished = {"policy": policy, "formats": formats, "retention": retention}
        chosen = {**vars(self.settings), **{name: value for name, value in wished.items() if value is not None}}
        chosen["format"] = self._format if chosen["policy"] == "exact" else "auto"
        return Settings.of(**chosen)

    def with_options_of(self, request: RequestOptions) -> Settings:
        """The same for one request, which may not ask for what its policy does not use. Raises InputError too."""
        formats, retention = request.formats, request.retention
        settings = self.with_options(request.policy, formats, retention)
        if formats is not None and settings.policy == "exact":
            raise InputError(f"formats={formats!r}: policy='exact' has one format. Fix: a policy, or leave it out")
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
                planned = self._runtime.configuration.with_settings(self._shared.model, self.with_options(policy, formats, None))
        except VisMoEError as error:
            return str(error)
        planned.close_stores()
        return None

    def behind(self, settings: Settings, ask: Callable[[], Result]) -> Result:
        """What `ask` returns; what it queues will find experts served as `settings` say. Raises what planning does."""
        with self._asking:
            self._queue_change(settings)
            return ask()

    def change(self, settings: Settings) -> None:
        """These are the usual ones from now on; returns when they hold. Raises what planning does, and changes nothing then."""
        with self._asking:
            before, change = self.settings, self._queue_change(settings)
            self.settings = settings
        try:
            if change is not None:
                change.result()
        except BaseException:
            with self._asking:
                if self.settings is settings:
                    self.settings = before
            raise

    def _queue_change(self, settings: Settings) -> "Future[None] | None":
        """Under the lock; None where nothing has to change."""
        if _served_by(settings) == _served_by(self._next):
            return None
        planned = self._runtime.configuration.with_settings(self._shared.model, settings)
        begun = threading.Event()

        def make() -> None:
            """On the model's thread."""
            begun.set()
            self._shared.forget_what_experts_made()
            try:
                self._runtime.reconfigure(self._shared.model, planned)
            except BaseException:
                with self._asking:
                    if _served_by(self._next) == _served_by(settings):
                        self._next = self._runtime.configuration.settings
                raise

        try:
            change = self._scheduler.run_alone(make)
        except BaseException:
            planned.close_stores()
            raise
        change.add_done_callback(lambda _: None if begun.is_set() else planned.close_stores())
        self._next = settings
        return change


def _served_by(settings: Settings) -> tuple[str, str]:
    """What a plan depends on, of what can change while the model runs."""
    return settings.policy, str(settings.pair)
