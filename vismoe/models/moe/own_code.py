"""A function of a model's code with other values for some of its global names, beside the one that the model's module keeps."""

import types
from collections.abc import Callable, Mapping
from typing import Any


def with_names(function: types.FunctionType, names: Mapping[str, Any]) -> Callable[..., Any]:
    """The same code, in which each of `names` has this value."""
    code, defaults = function.__code__, function.__defaults__
    made = types.FunctionType(code, function.__globals__ | dict(names), function.__name__, defaults, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
