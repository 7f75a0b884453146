"""A `forward` on a module object in place of that of its class, and functions of a model's code with other global names.

What the classes and files of transformers hold stays as it is; deleting the object's `forward` gives the old one back.
"""

import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any


def give_forward(found: Iterable[tuple[Any, ...]], forward: Callable[..., Any]) -> int:
    """Let each `(module, *more)` compute by `forward(reference, *more, ...)`; returns how many these are. The reference is weak:
    a cycle would keep a model in memory that nothing else holds."""
    served = list(found)  # first: a search for them may look for modules that have no forward of their own
    for module, *more in served:
        module.forward = partial(forward, weakref.ref(module), *more)
    return len(served)


def was_given(module: Any, forward: Callable[..., Any]) -> bool:
    """Whether the module computes by this forward now."""
    own = vars(module).get("forward")
    return isinstance(own, partial) and own.func is forward


def with_names(function: types.FunctionType, names: Mapping[str, Any]) -> Callable[..., Any]:
    """The same code, in which each of `names` has this value."""
    code, defaults = function.__code__, function.__defaults__
    made = types.FunctionType(code, function.__globals__ | dict(names), function.__name__, defaults, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
