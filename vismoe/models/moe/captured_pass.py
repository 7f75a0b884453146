"""The pass that this thread captures as CUDA graphs, or takes as an example for them: attention and experts ask it what to do."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

_running = threading.local()


class CapturedPass(Protocol):
    """A decode pass of one token."""

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Attention `[1, 1, heads, D]` of query `[1, heads, 1, D]`; None: as in other passes."""

    def mask(self, made: Callable[[], Any]) -> Any:
        """What the decoder's layers are given in place of the mask that `made` makes for them."""

    def experts(self, paged: Any, module: Any, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """The output `[1, H]` of a layer's experts, as of `PagedLayer.run`."""


def captured_pass() -> CapturedPass | None:
    """None: the pass is an ordinary one."""
    return getattr(_running, "captured", None)


@contextlib.contextmanager
def as_captured(captured: CapturedPass) -> Iterator[None]:
    """Within, this thread's pass is that one."""
    _running.captured = captured
    try:
        yield
    finally:
        _running.captured = None
