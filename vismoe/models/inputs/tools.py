"""Tools that a model may call: what a request says of them, and in llguidance's Lark what a call is that must be made."""

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from vismoe.errors import InputError

Json = dict[str, Any]
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
PARAMETER_END, VALUE_END = "\n</parameter>\n", "</arg_value>\n"
MOST_CHARACTERS = 200_000  # of tools as JSON
MOST_GRAMMAR = 2_000_000  # characters of what a demanded call follows


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for. arguments: a JSON object as text; of a call that is not whole its beginning."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    whole: bool = True

    @property
    def function(self) -> dict[str, str]:
        return {"name": self.name, "arguments": self.arguments}


@dataclass(frozen=True)
class CallPart:
    """A piece of a call that is being written. arguments: what it adds to them; the first part has none."""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True)
class Tools:
    """Functions that the model may call, as the OpenAI API writes them, and whether it must.

    choice: auto, none, required, or the name of a function. parallel: more than one call in an answer. Raises InputError.
    """

    functions: tuple[Json, ...]
    choice: str = "auto"
    parallel: bool = True

    def __post_init__(self) -> None:
        for tool in self.functions:
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
                raise InputError(
                    "tools: each is {'type': 'function', 'function': {'name': ..., 'parameters': ...}}. Fix: write them so"
                )
            if not _is_schema(function.get("parameters")):
                raise InputError(
                    f"tools: the parameters of {function['name']} are no JSON schema. Fix: an object with properties"
                )
        try:
            size = len(json.dumps(self.functions))
        except (RecursionError, TypeError, ValueError) as error:
            raise InputError(f"tools: they cannot be written as JSON ({error}). Fix: plain values, less deep") from error
        if size > MOST_CHARACTERS:
            raise InputError(f"tools: {size:,} characters of JSON, at most {MOST_CHARACTERS:,}. Fix: fewer or shorter ones")
        if len(set(self.names)) < len(self.functions):
            raise InputError("tools: two have the same name. Fix: another name for one of them")
        if self.choice not in ("auto", "none", "required", *self.names):
            known = ", ".join(("auto", "none", "required", *self.names))
            raise InputError(f"tool_choice={self.choice!r}: there is no such tool. Fix: {known}")
        if self.choice == "required" and not self.functions:
            raise InputError("tool_choice='required': there are no tools. Fix: give tools, or leave it out")

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.functions]

    @property
    def offered(self) -> tuple[Json, ...]:
        """Those that the model is told of."""
        return () if self.choice == "none" else self.functions

    @property
    def demanded(self) -> tuple[Json, ...]:
        """Those of which it must call one; none: it need not."""
        if self.choice in ("auto", "none"):
            return ()
        return tuple(tool for tool in self.functions if self.choice in ("required", tool["function"]["name"]))


def _is_schema(given: Any) -> bool:
    """Whether a call's arguments may be described so."""
    if given is None:
        return True
    if not isinstance(given, dict):
        return False
    properties, required = given.get("properties", {}), given.get("required", [])
    of_properties = isinstance(properties, dict) and all(isinstance(each, dict | bool) for each in properties.values())
    return of_properties and isinstance(required, list) and all(isinstance(name, str) for name in required)


def further_of(message: Json) -> Json:
    """What a message has beside role and content, as chat templates take it: arguments as objects. Raises InputError."""
    found = {name: message[name] for name in ("tool_call_id", "name", "reasoning_content") if message.get(name)}
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        given = function.get("arguments") if isinstance(function, dict) else None
        try:
            given = json.loads(given) if isinstance(given, str) and given else given or {}
        except (ValueError, RecursionError):
            given = None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(given, dict):
            raise InputError(
                "tool_calls: each is {'type': 'function', 'function': {'name': ..., 'arguments': a JSON object as text}}. "
                "Fix: send them back as they came"
            )
        identity = {"id": call["id"]} if call.get("id") else {}
        calls.append({**identity, "type": "function", "function": {"name": function["name"], "arguments": given}})
    return {**found, "tool_calls": calls} if calls else found


def quoted(text: str) -> str:
    """A literal of Lark, which `with_specials` finds again."""
    return f"\0{json.dumps(text)}\0" if text else ""


def with_specials(grammar: str, tokenizer: Any) -> str:
    """Literals in which special tokens are told by their numbers: llguidance takes text for text only."""
    known = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    between = re.compile("(" + "|".join(map(re.escape, sorted(known, key=len, reverse=True))) + ")") if known else None

    def literal(found: re.Match[str]) -> str:
        text = json.loads(found[1])
        parts = between.split(text) if between else [text]
        return " ".join(f"<[{known[part]}]>" if part in known else json.dumps(part) for part in parts if part)

    return re.sub("\0(.*?)\0", literal, grammar)


def parameters_of(tool: Json) -> Json:
    return tool["function"].get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}


def _json_of(schema: Any, root: Json) -> str:
    """In the spaces that chat templates write. root: the schema that references are within."""
    written = schema if isinstance(schema, dict) else {}
    if schema is not root and "$ref" in json.dumps(written):
        written = {**_moved(written), "$defs": {"root": _moved(root)}}
    spaced = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f"%json {json.dumps({**written, 'x-guidance': spaced})}"


def _moved(schema: Any) -> Any:
    """The same schema where what its references begin with, `#`, is at `#/$defs/root`."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: f"#/$defs/root{value[1:]}" if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else value if name in ("const", "enum") and not isinstance(value, dict)
        else _moved(value)
        for name, value in schema.items()
    }  # fmt: skip


def _arguments(tool: Json) -> str:
    return _json_of(schema := parameters_of(tool), schema)


def _whole_json(tool: Json) -> str:
    """{"name": ..., "arguments": ...}"""
    parameters = parameters_of(tool)
    arguments = {"$ref": "#"} if "$ref" in json.dumps(parameters) else parameters
    call = {"name": {"const": tool["function"]["name"]}, "arguments": arguments}
    whole = {"type": "object", "properties": call, "required": list(call), "additionalProperties": False}
    return _json_of(whole, parameters)


def _is_words(schema: Any) -> bool:
    return isinstance(schema, dict) and bool(schema.get("enum")) and all(isinstance(each, str) for each in schema["enum"])


def _is_text(schema: Any) -> bool:
    """Whether values stand between tags as they are; others are JSON there."""
    limits = [schema.get(name, 0) for name in ("minLength", "maxLength")] if isinstance(schema, dict) else [None]
    plain = all(type(limit) is int and limit >= 0 for limit in limits)
    return plain and schema.get("type") == "string" and not schema.keys() & {"enum", "const", "pattern", "format"}


def _fields(tool: Json, begin: str, value: str, end: str) -> str:
    """Each parameter between markers of its own: texts as they are, all else as JSON. begin: with the name as `{}`.

    A text ends with its marker: `TEXT_LEAST_MOST`, a rule of `Spoken.grammar`. Raises InputError for what tags cannot say.
    """
    schema, parts = parameters_of(tool), list[str]()
    properties, needed = schema.get("properties", {}), schema.get("required", [])
    odd = [name for name in properties if not re.fullmatch(r"[^<>\n]+", name)] + [one for one in needed if one not in properties]
    odd += [name for name in ("$ref", "anyOf", "oneOf", "allOf", "patternProperties") if name in schema]
    if odd:
        raise InputError(
            f"tools: {tool['function']['name']}: this model writes parameters one by one, which cannot follow {odd[0]!r}. "
            "Fix: properties by name, the required ones among them, or tool_choice='auto'"
        )
    size = len(json.dumps(schema)) * len(properties)
    if size > MOST_GRAMMAR and "$ref" in json.dumps(schema):
        raise too_large(size)
    for name, its in properties.items():
        if _is_words(its):
            words = f"({' | '.join(map(quoted, its['enum']))}) {quoted(end)}"
        elif _is_text(its):
            words = f"TEXT_{its.get('minLength', 0)}_{its.get('maxLength', '')}"
        else:
            words = f"({_json_of(its, schema)}) {quoted(end)}"
        part = f"{quoted(begin.replace('{}', name) + value)} {words}"
        parts.append(part if name in needed else f"({part})?")
    return " ".join(parts)


def too_large(characters: int) -> InputError:
    return InputError(f"tools: what a demanded call follows has {characters:,} characters. Fix: smaller schemas, or fewer tools")


def is_plain(schema: Any, root: Json) -> bool:
    """Whether every text between tags means itself."""
    return _is_text(schema) or _is_words(schema) or not _kinds(schema, root)


def value_of(text: str, schema: Any, root: Json) -> Any:
    """What a text between tags means by its schema."""
    if is_plain(schema, root):
        return text
    kinds = _kinds(schema, root)
    try:
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (ValueError, RecursionError):
        return text
    if "string" not in kinds or isinstance(value, str) or (value is None and "null" in kinds):
        return value
    return value if isinstance(value, dict | list) and kinds & {"object", "array"} else text


def _meant(reference: str, root: Json) -> Any:
    """What a reference within this schema points to; None: nothing."""
    found: Any = root if reference.startswith("#") else None
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _kinds(schema: Any, root: Json, depth: int = 0) -> set[str]:
    """The types that a schema names, also by a reference, a union, or its values."""
    if not isinstance(schema, dict) or depth > 8:
        return set()
    found = {schema["type"]} if isinstance(schema.get("type"), str) else set()
    found |= {kind for kind in schema["type"] if isinstance(kind, str)} if isinstance(schema.get("type"), list) else set()
    if isinstance(schema.get("$ref"), str):
        found |= _kinds(_meant(schema["$ref"], root), root, depth + 1)
    for union in ("anyOf", "oneOf", "allOf"):
        for each in schema[union] if isinstance(schema.get(union), list) else ():
            found |= _kinds(each, root, depth + 1)
    values = [
        *(schema["enum"] if isinstance(schema.get("enum"), list) else ()),
        *([schema["const"]] if "const" in schema else ()),
    ]
    return found | {"string" if isinstance(value, str) else "null" if value is None else "other" for value in values}


def hermes(tool: Json) -> str:
    return f"{quoted(OPEN)} {_whole_json(tool)} {quoted(CLOSE)}"


def by_tags(tool: Json) -> str:
    begin = quoted("<tool_call>\n<function=" + tool["function"]["name"] + ">\n")
    fields = _fields(tool, "<parameter={}>\n", "", PARAMETER_END)
    return f"{begin} {fields} {quoted('</function>' + CLOSE)}"


def by_keys(tool: Json) -> str:
    begin = quoted("<tool_call>" + tool["function"]["name"] + "\n")
    fields = _fields(tool, "<arg_key>{}</arg_key>\n", "<arg_value>", VALUE_END)
    return f"{begin} {fields} {quoted('</tool_call>')}"


def deepseek(tool: Json, head: str = "", sign: str = "<｜tool▁sep｜>", tail: str = "") -> str:
    begin = f"<｜tool▁call▁begin｜>{head}{tool['function']['name']}{sign}"
    return f"{quoted(begin)} {_arguments(tool)} {quoted(tail + '<｜tool▁call▁end｜>')}"


def mistral(tool: Json) -> str:
    return f"{quoted('[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]')} {_arguments(tool)}"


def harmony(tool: Json) -> str:
    begin = f"<|channel|>commentary to=functions.{tool['function']['name']} <|constrain|>json<|message|>"
    return f"{quoted(begin)} {_arguments(tool)} {quoted('<|call|>')}"
