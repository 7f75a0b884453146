"""Asks an engine many questions at once: they share its decode passes, each on a cache of its own (docs/serving.md)."""

import itertools
import queue
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from vismoe.engine.engine import Engine
from vismoe.engine.generate import Reply

Key = TypeVar("Key", bound=Hashable)


def answered(engine: Engine, questions: Iterable[tuple[Key, Callable[[], Reply]]], together: int) -> Iterator[tuple[Key, Reply]]:
    """Each question's key and ended reply, as they end. `questions`: keys, and calls that ask the engine.

    So many questions are asked `together`, or a pass of the engine has rows if those are more; the next one is asked when one has
    ended. A `deterministic` engine gets them in groups, each at one moment, so that the same questions share passes in every run:
    formats that a policy chooses depend on the company. Raises what asking raises, and a reply's error. Where the iterator is
    left, what runs is cancelled.
    """
    rows = engine.settings.parallel
    together = together if rows == "auto" else max(together, rows)
    left, running = iter(questions), dict[Key, Reply]()
    ended: queue.SimpleQueue[Key] = queue.SimpleQueue()

    def note(key: Key, piece: str | None) -> None:
        if piece is None:
            ended.put(key)

    def ask_next(most: int) -> None:
        for key, ask in itertools.islice(left, most):
            running[key] = reply = ask()
            reply.deliver_to(partial(note, key))

    try:
        while True:
            if not engine.settings.deterministic:
                ask_next(together - len(running))
            elif not running:
                engine.with_model(lambda model: ask_next(together))
            if not running:
                return
            key = ended.get()
            reply = running.pop(key)
            if reply.error is not None:
                raise reply.error
            yield key, reply
    finally:
        for reply in running.values():
            reply.cancel()
