"""A plugin of pytest, for a process whose Triton programs are interpreted: the interpreter without what it does again and again.

At each launch, and at each call of one program by another, it puts its own functions in place of the language's, where the first
such call leaves them anyway. For each operation it makes a dictionary of numpy's types, and for each shape the types of its
numbers, which nobody asks for. What programs compute is not touched. This is for the release that `make test` installs.
"""

from typing import Any

import triton
from triton.language import core
from triton.runtime import interpreter


def put_functions_in_place_once() -> None:
    put_in_place, scopes = interpreter._patch_lang, {}

    def once(function: Any) -> Any:
        languages = frozenset(id(value) for value in function.__globals__.values() if value is core or value is interpreter.tl)
        if languages not in scopes:
            scopes[languages] = put_in_place(function)
            scopes[languages].restore = lambda: None
        return scopes[languages]

    interpreter._patch_lang = once


def look_types_up() -> None:
    look_up, found = interpreter._get_np_dtype, {}

    def of_scalar(kind: Any) -> Any:
        if not isinstance(kind, core.dtype) or isinstance(kind, (core.pointer_type, core.block_type)):
            return look_up(kind)
        if kind.name not in found:
            found[kind.name] = look_up(kind)
        return found[kind.name]

    def of_any(kind: Any) -> Any:
        return of_scalar(kind.element_ty if isinstance(kind, core.block_type) else kind)

    interpreter._get_np_dtype = of_any


def type_tuples_when_asked() -> None:
    class Type:
        def __get__(self, made: Any, owner: type) -> Any:
            if made is None:
                return self
            if "_type" not in vars(made):
                made._type = core._type_for_tuple_values(made.values)
            return vars(made)["_type"]

        def __set__(self, made: Any, value: Any) -> None:
            made._type = value

    usual = core.tuple.__init__

    def of_values(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            usual(self, args, type)

    core.tuple.type = Type()
    core.tuple.__init__ = of_values


if triton.__version__ == "3.6.0":
    put_functions_in_place_once()
    look_types_up()
    type_tuples_when_asked()
