"""Memory that experts lend to keys and values while requests wait for admission, and take back. On the model's thread, between
rounds; decisions are in planning/boundary.py."""

from vismoe.errors import BusyError, ClosedError
from vismoe.models.load.runtime import Runtime
from vismoe.planning.boundary import Move, next_move, tokens_for
from vismoe.planning.plan import Plan

ROUNDS_A_MOVE = 16  # a slab that comes back costs its pages anew, and its expert a read


class Boundary:
    """Of one engine. What slabs give back is counted in whole pages, what it pays for in whole tokens."""

    def __init__(self, runtime: Runtime):
        self._runtime, self._plan, self._rounds = runtime, runtime.plan, 0
        self.released_bytes = self.released_tokens = 0

    @property
    def context_tokens(self) -> int:
        """Places of all requests together."""
        return self._plan.context + self.released_tokens

    def between(self, rho: float, waits: bool, free_tokens: int) -> int:
        """A round has ended -> the places from now on. waits: for places, a request that could join a pass; free_tokens: of the
        places, those that no request holds."""
        plan: Plan = self._runtime.plan
        if plan is not self._plan:  # pools are new
            self._plan, self.released_bytes, self.released_tokens = plan, 0, 0
            self._runtime.context.more_tokens = 0
        self._rounds += 1
        if self._rounds < ROUNDS_A_MOVE or not (waits or self.released_bytes):
            return self.context_tokens
        move = next_move(rho, waits, self.released_bytes)
        if move is Move.RELEASE or (move is Move.TAKE_BACK and free_tokens >= self._taken_back()):
            self._move(move is Move.RELEASE)
        return self.context_tokens

    def _taken_back(self) -> int:
        """The most places that taking back costs."""
        inventory = self._runtime.configuration.experts.inventory
        nbytes = sum(inventory.layout(layer.index).record_bytes for layer in inventory.layers)
        return self.released_tokens - self._tokens_for(max(0, self.released_bytes - nbytes))

    def _tokens_for(self, released_bytes: int) -> int:
        return tokens_for(self._runtime.configuration.needs, self._plan.context, self._plan.rows, released_bytes)

    def _move(self, more: bool) -> None:
        self._rounds = 0
        try:
            self.released_bytes = self._runtime.pager.lend_memory(more)
        except (BusyError, ClosedError):  # a caller's own pass is under way, or nothing serves: the next move comes later
            return
        self.released_tokens = self._tokens_for(self.released_bytes)
        self._runtime.context.more_tokens = self.released_tokens
