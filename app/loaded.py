"""Which model the chat page's engine is: loading another one, giving back the memory of the one before, and what is told of it.

All visitors share the engine. Only one model is loaded at a time: the engine before is closed, and its memory given back, before
the next one is planned and loaded, in a thread. Every change makes a new `LoadState`, which pages compare with the one they show.
"""

import dataclasses
import gc
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from vismoe.app.choosing import ModelChoice
from vismoe.app.page import LEAVE_S, Page
from vismoe.engine.engine import load
from vismoe.errors import BusyError, VisMoEError
from vismoe.planning.plan import Plan

log = logging.getLogger("vismoe")

LOADING = "vismoe-load"  # the name of the thread


@dataclass(frozen=True)
class LoadState:
    """What is loaded; `number` is another one after each change."""

    phase: Literal["none", "loading", "ready", "failed"]
    choice: ModelChoice | None = None  # that is loading, is loaded, or could not be loaded
    earlier: ModelChoice | None = None  # what was loaded before
    error: str = ""
    number: int = 0


@dataclass
class Loader:
    """Loads models for `page`. `state` begins with the engine that the page has, which `given` asked for."""

    page: Page
    given: ModelChoice | None = None
    state: LoadState = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _describing: threading.Lock = field(default_factory=threading.Lock)  # libraries change settings of the process meanwhile
    _began_s: float = 0.0
    _bar: Any = None  # of what transformers reads

    def __post_init__(self) -> None:
        self.state = LoadState("ready" if self.page.engine is not None else "none", self.given)

    def plan(self, choice: ModelChoice) -> Plan:
        """The plan that loading `choice` would follow, made between answers. It counts on what was free before the loaded engine,
        which is closed first. Raises what loading would raise."""
        with self._describing:
            engine = self.page.engine
            return choice.plan() if engine is None else engine.alone(lambda: choice.plan(engine.hardware))

    def begin(self, choice: ModelChoice) -> None:
        """Loads `choice` in a thread. Raises BusyError while another model is being loaded."""
        with self._lock:
            if self.state.phase == "loading":
                raise BusyError("Another model is being loaded: wait until it is ready.")
            earlier = self.state.choice if self.state.phase == "ready" else self.state.earlier
            self._began_s, self._bar = time.monotonic(), None
            self._tell(phase="loading", choice=choice, earlier=earlier, error="")
        threading.Thread(target=self._load, args=(choice,), daemon=True, name=LOADING).start()

    def progress(self) -> str:
        """What loading has come to, in words."""
        bar, seconds = self._bar, time.monotonic() - self._began_s
        if not isinstance(bar, tqdm) or bar.disable or not bar.total:  # with progress bars off, transformers makes another class
            return f"reading its files ({seconds:.0f} s)"
        return f"{bar.desc.rstrip(': ').lower()}, {bar.n} of {bar.total} tensors ({seconds:.0f} s)"

    def unload(self) -> None:
        """Ends the answers under way, closes the engine, and gives its memory back."""
        engine, self.page.engine = self.page.engine, None
        for running in list(self.page.running.values()):
            running.cancel()
            running.ended.wait(LEAVE_S)
        with self._describing:  # a plan under way ends first
            if engine is not None:
                engine.close()
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _load(self, choice: ModelChoice) -> None:
        before = transformers_logging.set_tqdm_hook(self._watched)
        try:
            self.unload()
            with self._describing:
                self.page.engine, self.page.name = load(choice.model, **choice.options, **choice.settings), choice.name
        except Exception as error:  # the boundary of the thread
            if not isinstance(error, VisMoEError):
                log.error("an error while %s was loaded", choice.name, exc_info=error)
            said = str(error) if isinstance(error, VisMoEError) else f"{type(error).__name__}: {error}"
            self._tell(phase="failed", error=said)
        else:
            self._tell(phase="ready", earlier=None)
        finally:
            transformers_logging.set_tqdm_hook(before)

    def _watched(self, make: Any, args: Any, options: Any) -> Any:
        """The progress bar that transformers asks for."""
        self._bar = make(*args, **options)
        return self._bar

    def _tell(self, **change: Any) -> None:
        self.state = dataclasses.replace(self.state, number=self.state.number + 1, **change)
