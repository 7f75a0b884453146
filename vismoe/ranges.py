"""The allowed values of an option, read from its type hint; `Range` and `Read` in the hint say what a type alone does not.

One sentence refuses every other value: the option, the value, what is allowed, and a value that works. Settings check themselves
by these rules; flags with their help, the server's schema and lmms-eval's arguments are made from them. A number is an int or a
float, but not a bool, a text, NaN or infinity; a text must be encodable in UTF-8.
"""

import contextlib
import dataclasses
import functools
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from vismoe.errors import ConfigError, VisMoEError

SHOWN_CHARACTERS = 60
PATH_BEGINNINGS = ("/", "./", "../", "~")
NOT_A_TEXT = ", not a text"
NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", Path: "a path"}


@dataclass(frozen=True)
class Range:
    """Numbers (or lengths of texts) from `low` to `high`, in `unit`; `above` and `below` exclude the end itself."""

    low: float = -math.inf
    high: float = math.inf
    unit: str = ""
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        enough = value > self.low if self.above else value >= self.low
        return enough and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        if not math.isfinite(self.low):
            return ""
        low, high = f"{self.low:,}", f"{self.high:,}"
        ends = f"from {low} to {high}"
        if self.above or self.below:
            ends = f"{'above' if self.above else 'at least'} {low} and {'below' if self.below else 'at most'} {high}"
        return f" {ends} ({self.unit})" if self.unit else f" {ends}"

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """For a hint within a model of pydantic: the schema of its type, with these ends."""
        low, high = ("gt" if self.above else "ge", "lt" if self.below else "le")
        if source is str:
            low, high = "min_length", "max_length"
        return {**handler(source), low: self.low, high: self.high}


@dataclass(frozen=True)
class Read:
    """A text or number that `parse` accepts; it raises ConfigError for others. `words` describe it, e.g. "a size"."""

    parse: Callable[[Any], Any]
    words: str


@dataclass(frozen=True)
class ValueKind:
    """One of the types that a rule allows."""

    type: Any  # int, float, bool, str, Path or None
    range: Range = Range()
    read: Read | None = None
    choices: tuple[Any, ...] = ()

    def takes(self, value: Any) -> bool:
        """Whether the value is of this kind; raises ConfigError if `read` has a more specific message."""
        if self.type is None:
            return value is None
        wanted = (int, float) if self.type is float else self.type
        if not isinstance(value, wanted) or (isinstance(value, bool) and self.type is not bool):
            return False
        if isinstance(value, str):
            return not unencodable(value) and self._takes_text(value)
        if self.read is not None:
            self.read.parse(value)
        return not isinstance(value, int | float) or (abs(value) < math.inf and value in self.range)

    def _takes_text(self, text: str) -> bool:
        if self.read is not None:
            self.read.parse(text)
        return text in self.choices if self.choices else len(text) in self.range

    @property
    def words(self) -> str:
        if self.type is None:
            return "None"
        if self.choices:
            return ("choose one of " if len(self.choices) > 1 else "") + ", ".join(map(repr, self.choices))
        if self.read is not None:
            return self.read.words
        return f"{NAMES[self.type]}{self.range}"


@dataclass(frozen=True)
class Several:
    """A tuple or list of values, each of one of these kinds."""

    kinds: tuple[ValueKind, ...]
    count: Range  # number of values

    def takes(self, value: Any) -> bool:
        right = isinstance(value, tuple | list) and len(value) in self.count
        return right and all(any(kind.takes(item) for kind in self.kinds) for item in value)

    @property
    def words(self) -> str:
        many = f" of {self.count.low}" if self.count.low == self.count.high else f" of up to {self.count.high}"
        return f"a tuple{many if self.count != Range() else ''}, each {' or '.join(kind.words for kind in self.kinds)}"


@dataclass(frozen=True)
class Rule:
    """The allowed values of one option. `default`: a value that messages advise; None: they advise to leave the option out.

    meaning: a sentence for help texts, in which `placeholder` stands for the value.
    """

    name: str
    kinds: tuple[ValueKind | Several, ...]
    default: Any = None
    meaning: str = ""
    placeholder: str = ""

    def check(self, value: Any, error: type[VisMoEError] = ConfigError) -> None:
        """Raises `error` for a value that the option does not allow."""
        if (why_not := self.why_not(value)) is not None:
            raise error(f"{why_not}. Fix: {self._fix(value)}")

    def why_not(self, value: Any) -> str | None:
        """What is wrong with a value; None if the option allows it."""
        said = None
        for kind in self.kinds:
            try:
                if kind.takes(value):
                    return None
            except ConfigError as refused:
                said = str(refused)  # keeping the error would keep this frame and its callers alive
        if said is not None:
            return said if said.startswith(self.name) else f"{self.name}: {said}"
        return f"{self.name}={shown(value)}: {self.words}{self._but(value)}"

    def read(self, text: str) -> Any:
        """Reads what a user typed: a number if the option allows this number, else the text. Raises ConfigError."""
        number = self._number(text)
        value = text if number is None else number
        if (why_not := self.why_not(value)) is not None:
            raise ConfigError(f"{why_not.removesuffix(NOT_A_TEXT)}. Fix: {self._fix(value)}")
        return value

    @property
    def words(self) -> str:
        return " or ".join(dict.fromkeys(kind.words for kind in self.kinds))

    def holds(self, value: Any) -> bool:
        """Whether the option allows the value."""
        return self.why_not(value) is None

    @property
    def choices(self) -> tuple[str, ...]:
        """The names, if the option allows only names (and None); otherwise empty."""
        named = [kind for kind in self.kinds if kind != ValueKind(None)]
        return named[0].choices if len(named) == 1 and isinstance(named[0], ValueKind) else ()

    @property
    def range(self) -> Range:
        """The range of the option's numbers."""
        kinds = (one for kind in self.kinds for one in (kind.kinds if isinstance(kind, Several) else (kind,)))
        return next((kind.range for kind in kinds if kind.type in (int, float)), Range())

    @property
    def _numbers(self) -> Any:
        """int or float, if the option allows numbers that no `Read` parses; else None."""
        kinds = (kind for kind in self.kinds if isinstance(kind, ValueKind) and kind.read is None)
        return next((kind.type for kind in kinds if kind.type in (int, float)), None)

    def _number(self, text: str) -> Any:
        with contextlib.suppress(ValueError, OverflowError):
            return self._numbers(text) if self._numbers is not None else None
        return None

    def _but(self, value: Any) -> str:
        """What the value is instead, if the error is not the size of a number."""
        if isinstance(value, str):
            return f"; {unencodable(value)}" if unencodable(value) else NOT_A_TEXT if self._numbers is not None else ""
        told = any(isinstance(kind, Several) for kind in self.kinds) and isinstance(value, tuple | list)
        return "" if told or type(value) in (int, float, bool, types.NoneType) else f", not a {type(value).__name__}"

    def _fix(self, value: Any) -> str:
        """A value that works: the number in a text, a percentage as a share, the end of the range, else the default."""
        meant = self._number(value) if isinstance(value, str) else None
        near: list[float] = []
        if self._numbers is float and type(value) in (int, float) and value == value:
            percent = [value / 100] if self.range.high == 1 < value <= 100 else []
            near = [*percent, self.range.low if value <= self.range.low else self.range.high]
        for other in (meant, *near, self.default):
            if other is not None and self.why_not(other) is None:
                return f"{self.name}={other!r}"
        return "leave it out"


def option(default: Any, meaning: str, placeholder: str = "") -> Any:
    """A field of a dataclass of options: its default, what it means to a user, and what stands for its value in a help text."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "placeholder": placeholder})


@functools.cache
def rules_of(owner: Any) -> dict[str, Rule]:
    """The rules of a dataclass's fields, in their order."""
    hints = typing.get_type_hints(owner, include_extras=True)
    return {
        field.name: Rule(
            field.name,
            _joined(_kinds(hints[field.name])),
            None if field.default is dataclasses.MISSING else field.default,
            **field.metadata,
        )
        for field in dataclasses.fields(owner)
    }


def check_fields(values: Any, error: type[VisMoEError] = ConfigError) -> None:
    """Raises `error` for the first field of a dataclass whose value its hint does not allow."""
    owner: Any = type(values)
    for name, rule in rules_of(owner).items():
        rule.check(getattr(values, name), error)


def _kinds(hint: Any, told: ValueKind = ValueKind(None)) -> Iterator[ValueKind | Several]:
    """The kinds that a hint allows; `told`: range and reader of the `Annotated` around it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        for extra in arguments[1:]:
            told = dataclasses.replace(told, **{"range" if isinstance(extra, Range) else "read": extra})
        yield from _kinds(arguments[0], told)
    elif origin in (types.UnionType, typing.Union):
        for one in arguments:
            yield from _kinds(one, told)
    elif origin is Literal:
        yield ValueKind(str, choices=arguments)
    elif origin in (tuple, Sequence):
        pair = origin is tuple and Ellipsis not in arguments
        inner = [kind for kind in _kinds(arguments[0]) if isinstance(kind, ValueKind)]
        yield Several(tuple(inner), Range(2, 2) if pair else told.range)
    else:
        yield dataclasses.replace(told, type=None if hint is types.NoneType else origin or hint)


def _joined(kinds: Iterable[ValueKind | Several]) -> tuple[ValueKind | Several, ...]:
    """The same kinds, with all names in one list."""
    found = tuple(kinds)
    names = tuple(name for kind in found if isinstance(kind, ValueKind) for name in kind.choices)
    others = tuple(kind for kind in found if isinstance(kind, Several) or not kind.choices)
    return (*others, ValueKind(str, choices=names)) if names else others


def file_name(path: str | Path) -> Path:
    """A path that the file system can look up. Raises ConfigError."""
    text = str(path)
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ConfigError(f"a path that can be encoded ({error})") from error
    if not text or b"\0" in encoded:
        raise ConfigError("a path, which is not empty and has no null byte")
    try:
        Path(text).expanduser()
    except RuntimeError as error:  # the user of `~user` has no home
        raise ConfigError(f"a path ({error})") from error
    return Path(text)


def unencodable(text: str) -> str:
    """Says which character of a text has no UTF-8 (half of a surrogate pair); empty if all have."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is U+{ord(text[error.start]):04X}, half of a pair, and has no UTF-8"
    return ""


def shown(value: Any) -> str:
    """Any value as short, printable text for a message."""
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN_CHARACTERS:
        return f"<a whole number of {value.bit_length():,} bits>"
    try:
        text = ascii(value) if isinstance(value, str) and unencodable(value) else repr(value)
    except (ValueError, RecursionError):  # numbers of thousands of digits, deeply nested lists
        text = f"<a {type(value).__name__}>"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."
