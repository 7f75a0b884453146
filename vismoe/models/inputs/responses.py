"""What an answer's text means: words, reasoning, tool calls. transformers' ResponseParser reads it, by a template of the family.

A tokenizer may bring its template; for others FORMS has one, found by what the family's chat template writes. The forms are those
of the models' own pages and chat templates: Qwen3 and others (Hermes), Qwen3-Coder and Qwen3.5, GLM-4.5, DeepSeek-V3 and R1,
gpt-oss (harmony), Gemma 4, Mistral.
"""

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from vismoe.errors import InputError

Json = dict[str, Any]
CALLED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
PARAMETER_END, VALUE_END = "\n</parameter>\n", "</arg_value>\n"
MOST_CHARACTERS = 200_000  # of tools as JSON
MOST_GRAMMAR = 2_000_000  # characters of what a demanded call follows
REASONING = ("reasoning_content", "thinking")  # as response templates name it
LAX = {"allow_non_json": True}  # what is no JSON is told as it is, not refused


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for. arguments: a JSON object as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def function(self) -> dict[str, str]:
        return {"name": self.name, "arguments": self.arguments}


Piece = str | Reasoning | ToolCall


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


def _template(calls: Json, content: Json | None = None, reasoning: Json | None = None) -> Json:
    """A response template of which the parser sees what comes behind the prompt's last header only."""
    thinks = reasoning or {"open": "<think>", "close": "</think>"}
    fields = {"reasoning_content": thinks, "tool_calls": {"repeats": True, **calls}, "content": content or {}}
    if "open_pattern" in fields["content"]:  # words outside of all parts
        fields["outside"] = {"close_pattern": r"<\|start\|>\w*"}
    return {"start_anchor_pattern": r"\A", "fields": fields}


def _quoted(text: str) -> str:
    """A literal of Lark, which `_with_specials` finds again."""
    return f"\0{json.dumps(text)}\0" if text else ""


def _with_specials(grammar: str, tokenizer: Any) -> str:
    """Literals in which special tokens are told by their numbers: llguidance takes text for text only."""
    known = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    between = re.compile("(" + "|".join(map(re.escape, sorted(known, key=len, reverse=True))) + ")") if known else None

    def literal(found: re.Match[str]) -> str:
        text = json.loads(found[1])
        parts = between.split(text) if between else [text]
        return " ".join(f"<[{known[part]}]>" if part in known else json.dumps(part) for part in parts if part)

    return re.sub("\0(.*?)\0", literal, grammar)


def _parameters(tool: Json) -> Json:
    return tool["function"].get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}


def _json_of(schema: Any, root: Json) -> str:
    """In the spaces that chat templates write. root: has what references mean."""
    written = schema if isinstance(schema, dict) else {}
    refers = "$ref" in json.dumps(written)
    meant = {name: root[name] for name in ("$defs", "definitions") if refers and name in root}
    spaced = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f"%json {json.dumps({**written, **meant, 'x-guidance': spaced})}"


def _arguments(tool: Json) -> str:
    return _json_of(_parameters(tool), {})


def _whole_json(tool: Json) -> str:
    """{"name": ..., "arguments": ...}"""
    call = {"name": {"const": tool["function"]["name"]}, "arguments": _parameters(tool)}
    whole = {"type": "object", "properties": call, "required": list(call), "additionalProperties": False}
    return _json_of(whole, _parameters(tool))


def _is_words(schema: Any) -> bool:
    return isinstance(schema, dict) and bool(schema.get("enum")) and all(isinstance(each, str) for each in schema["enum"])


def _is_text(schema: Any) -> bool:
    """Whether values stand between tags as they are; others are JSON there."""
    limits = [schema.get(name, 0) for name in ("minLength", "maxLength")] if isinstance(schema, dict) else [None]
    plain = all(type(limit) is int and limit >= 0 for limit in limits)
    return plain and schema.get("type") == "string" and not schema.keys() & {"enum", "const", "pattern", "format"}


def _fields(tool: Json, begin: str, value: str, end: str) -> str:
    """Each parameter between markers of its own: texts as they are, all else as JSON. begin: with the name as `{}`.

    A text ends with its marker: `text_LEAST_MOST`, a rule of `Spoken.grammar`. Raises InputError for what tags cannot say.
    """
    schema, parts = _parameters(tool), list[str]()
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
        raise _too_large(size)
    for name, its in properties.items():
        if _is_words(its):
            words = f"({' | '.join(map(_quoted, its['enum']))}) {_quoted(end)}"
        elif _is_text(its):
            words = f"text_{its.get('minLength', 0)}_{its.get('maxLength', '')}"
        else:
            words = f"({_json_of(its, schema)}) {_quoted(end)}"
        part = f"{_quoted(begin.replace('{}', name) + value)} {words}"
        parts.append(part if name in needed else f"({part})?")
    return " ".join(parts)


def _too_large(characters: int) -> InputError:
    return InputError(f"tools: what a demanded call follows has {characters:,} characters. Fix: smaller schemas, or fewer tools")


def _value_of(text: str, schema: Any, root: Json) -> Any:
    """What a text between tags means by its schema."""
    kinds = _kinds(schema, root)
    if _is_text(schema) or _is_words(schema) or not kinds:
        return text
    try:
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (ValueError, RecursionError):
        return text
    if "string" not in kinds or isinstance(value, str) or (value is None and "null" in kinds):
        return value
    return value if isinstance(value, dict | list) and kinds & {"object", "array"} else text


def _kinds(schema: Any, root: Json, depth: int = 0) -> set[str]:
    """The types that a schema names, also by a reference to definitions, a union, or its values."""
    if not isinstance(schema, dict) or depth > 8:
        return set()
    found = {schema["type"]} if isinstance(schema.get("type"), str) else set()
    found |= {kind for kind in schema["type"] if isinstance(kind, str)} if isinstance(schema.get("type"), list) else set()
    place, _, name = str(schema.get("$ref", "")).removeprefix("#/").partition("/")
    if place in ("$defs", "definitions") and isinstance(root.get(place), dict):
        found |= _kinds(root[place].get(name), root, depth + 1)
    for union in ("anyOf", "oneOf", "allOf"):
        for each in schema[union] if isinstance(schema.get(union), list) else ():
            found |= _kinds(each, root, depth + 1)
    values = [
        *(schema["enum"] if isinstance(schema.get("enum"), list) else ()),
        *([schema["const"]] if "const" in schema else ()),
    ]
    return found | {"string" if isinstance(value, str) else "null" if value is None else "other" for value in values}


@dataclass(frozen=True)
class Form:
    """How a family writes calls. call: one of a tool in llguidance's Lark, None: that cannot be demanded; between: two calls."""

    marks: tuple[str, ...]  # all of them are in the family's chat template
    template: Json
    call: Callable[[Json], str] | None
    between: str = "\n"
    before: str = ""  # all calls
    after: str = ""
    value_end: str = ""  # behind a text between tags


def _hermes(tool: Json) -> str:
    return f"{_quoted(OPEN)} {_whole_json(tool)} {_quoted(CLOSE)}"


def _by_tags(tool: Json) -> str:
    begin = _quoted("<tool_call>\n<function=" + tool["function"]["name"] + ">\n")
    fields = _fields(tool, "<parameter={}>\n", "", PARAMETER_END)
    return f"{begin} {fields} {_quoted('</function>' + CLOSE)}"


def _by_keys(tool: Json) -> str:
    begin = _quoted("<tool_call>" + tool["function"]["name"] + "\n")
    fields = _fields(tool, "<arg_key>{}</arg_key>\n", "<arg_value>", VALUE_END)
    return f"{begin} {fields} {_quoted('</tool_call>')}"


def _deepseek(tool: Json, head: str = "", sign: str = "<｜tool▁sep｜>", tail: str = "") -> str:
    begin = f"<｜tool▁call▁begin｜>{head}{tool['function']['name']}{sign}"
    return f"{_quoted(begin)} {_arguments(tool)} {_quoted(tail + '<｜tool▁call▁end｜>')}"


def _mistral(tool: Json) -> str:
    return f"{_quoted('[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]')} {_arguments(tool)}"


def _harmony(tool: Json) -> str:
    begin = f"<|channel|>commentary to=functions.{tool['function']['name']} <|constrain|>json<|message|>"
    return f"{_quoted(begin)} {_arguments(tool)} {_quoted('<|call|>')}"


def _deepseek_template(begin: str) -> Json:
    calls = {"open_pattern": r"\s*<｜tool▁call▁begin｜>" + begin, "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>"}
    around = {"close_pattern": r"\s*<｜tool▁calls▁(?:begin|end)｜>"}
    return _template({**calls, "content": "json", "content_args": LAX, "transform": CALLED}, around)


WHOLE = {"content": "json", "content_args": LAX, "transform": {"type": "function", "function": "{content}"}}
FORMS = (  # the first whose marks are in the chat template
    Form(
        ("<function=",),
        _template(
            {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
                "transform": CALLED,
            }
        ),
        _by_tags,
        value_end=PARAMETER_END,
    ),
    Form(
        ("<arg_key>",),
        _template(
            {
                "open_pattern": r"\s*<tool_call>(?P<name>[\w.-]+)\s*",
                "close": "</tool_call>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                },
                "transform": CALLED,
            }
        ),
        _by_keys,
        value_end=VALUE_END,
    ),
    Form(("<tool_call>",), _template({"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", **WHOLE}), _hermes),
    Form(
        ("<｜tool▁calls▁begin｜>", "```json"),
        _deepseek_template(r"function<｜tool▁sep｜>(?P<name>[\w.-]+)\n```json\n"),
        partial(_deepseek, head="function<｜tool▁sep｜>", sign="\n```json\n", tail="\n```"),
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    Form(
        ("<｜tool▁calls▁begin｜>",),
        _deepseek_template(r"(?P<name>[\w.-]+)<｜tool▁sep｜>"),
        _deepseek,
        between="",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    Form(
        ("<|channel|>",),
        _template(
            {
                "open_pattern": r"(?:to=functions\.(?P<name>[\w.-]+)<\|channel\|>\w+|<\|channel\|>\w+\s+to=functions\."
                r"(?P<name>[\w.-]+))\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>",
                "close": ["<|call|>", "<|end|>"],
                "content": "json",
                "content_args": LAX,
                "transform": CALLED,
            },
            {"open_pattern": r"<\|channel\|>(?:final|commentary)\s*<\|message\|>", "close": ["<|return|>", "<|end|>"]},
            {"open_pattern": r"<\|channel\|>analysis\s*<\|message\|>", "close": "<|end|>"},
        ),
        _harmony,
        between="",
    ),
    Form(
        ("<|tool_call>",),
        _template(
            {
                "open_pattern": r"\s*<\|tool_call>call:(?P<name>[\w.-]+)",
                "close": "<tool_call|>",
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']], **LAX},
                "transform": CALLED,
            },
            reasoning={"open": "<|channel>thought\n", "close": "<channel|>"},
        ),
        None,
    ),
    Form(
        ("[ARGS]",),
        _template(
            {
                "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
                "close_pattern": r"(?=\[TOOL_CALLS\])",
                "content": "json",
                "content_args": LAX,
                "transform": CALLED,
            },
            reasoning={"open": "[THINK]", "close": "[/THINK]"},
        ),
        _mistral,
        between="",
    ),
    Form(
        ("[TOOL_CALLS]",),
        _template(
            {
                "open": "[TOOL_CALLS]",
                "content": "json",
                "content_args": LAX,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
                "transform_each": True,
            },
            reasoning={"open": "[THINK]", "close": "[/THINK]"},
        ),
        None,
    ),
    Form(("</think>",), _template({"open": "<tool_call>", "close": "</tool_call>", **WHOLE}), None),
)


@dataclass(frozen=True)
class Spoken:
    """How a model's answers are read. form: None where the tokenizer brings its own template."""

    template: Json
    form: Form | None

    @classmethod
    def by(cls, tokenizer: Any) -> "Spoken | None":
        """None: answers are plain text."""
        chat = tokenizer.chat_template
        form = next((each for each in FORMS if isinstance(chat, str) and all(mark in chat for mark in each.marks)), None)
        own = getattr(tokenizer, "response_template", None)
        if own is None:
            return cls(form.template, form) if form is not None else None
        return cls(own, form)

    @property
    def around_reasoning(self) -> tuple[str, str] | None:
        """With what the model begins and ends its reasoning; None: it does not, or in several ways."""
        fields = self.template["fields"]
        found = fields.get("reasoning_content") or fields.get("thinking") or {}
        begin, end = found.get("open"), found.get("close")
        return (begin.strip(), end) if isinstance(begin, str) and isinstance(end, str) else None

    def kept_specials(self, tokenizer: Any) -> frozenset[int]:
        """Special tokens that tell the parts of an answer from each other."""
        written = json.dumps(self.template, ensure_ascii=False).replace("\\", "") + (self.form.before if self.form else "")
        specials = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        return frozenset(number for number, text in specials if text in written)

    def grammar(self, tools: Tools, tokenizer: Any) -> str | None:
        """What an answer follows that must be a call, in llguidance's Lark; None: it need not be one. Raises InputError."""
        if not tools.demanded:
            return None
        form = self.form
        if form is None or form.call is None:
            raise InputError(
                f"tool_choice={tools.choice!r}: how this model writes calls is not known. Fix: tool_choice='auto', and say in "
                "the text that a tool is to be called"
            )
        calls = f"call ({_quoted(form.between)} call)*" if tools.parallel else "call"
        once = " | ".join(f"({form.call(tool)})" for tool in tools.demanded)
        rules = [f"start: {_quoted(form.before)} {calls} {_quoted(form.after)}", f"call: {once}"]
        for name, least, most in sorted(
            set(re.findall(r"\b(text_(\d+)_(\d*))\b", re.sub("\0.*?\0|%json .*?x-guidance", "", once)))
        ):
            end = re.escape(form.value_end).replace("/", r"\/").replace("\\\n", r"\n")
            rules.append(f"{name}[lazy]: /(?s:.{{{least},{most}}}){end}/")
        if (size := sum(map(len, rules))) > MOST_GRAMMAR:
            raise _too_large(size)
        return _with_specials("\n".join(rules), tokenizer)


class MessageParser:
    """Reads one answer piece by piece. prompt_end: what the chat template has written of it, e.g. an opened `<think>`; empty
    where a message goes on. What is no whole call of `tools` is told as it was written; without tools, nothing is a call."""

    def __init__(self, spoken: Spoken, prompt_end: str, tools: Sequence[Json]):
        fields = spoken.template["fields"]
        template = load_response_template(spoken.template)
        self._parser = ResponseParser(template, prefix=prompt_end)
        marked = {name: one for name, one in template.fields.items() if one.open_re is not None}  # others end with the next part
        self._marks = {name: (one.open_re, one.close_re) for name, one in marked.items()}
        self._by_tags = fields.get("tool_calls", {}).get("content") == "xml-inline"
        self._schemas = {tool["function"]["name"]: _parameters(tool) for tool in tools}
        self._left = ""  # what was fed and no event has told of
        self._written = self._held = ""  # a call that has begun; spaces that may be the last ones of a part
        self._field, self._begun, self._broken = "content", True, False
        for event in self._parser.initial_events:
            self._field = event["field"] if event["type"] != "region_close" else "content"
        self._begun = self._field == "content"

    @property
    def thinking(self) -> bool:
        """Whether it is in its reasoning now."""
        return self._field in REASONING

    def feed(self, text: str) -> Iterator[Piece]:
        """What this text adds."""
        self._left += text
        if not self._broken:
            try:
                yield from self._pieces(self._parser.feed(text))
                return
            except Exception:  # a parser's own, of a text that its template does not foresee: it is told as it is
                self._broken = True
        yield self._rest()

    def end(self) -> Iterator[Piece]:
        """What was held back."""
        if not self._broken:
            try:
                events = self._parser.finalize()[1]
                yield from self._pieces([one for one in events if (one["type"], one["field"]) != ("region_close", "content")])
            except Exception:  # as above
                self._broken = True
        if rest := self._rest() if self._broken or self._written else self._held if self._field == "content" else "":
            yield rest

    def _rest(self) -> str:
        rest, self._written, self._held, self._left = self._held + self._written + self._left, "", "", ""
        return rest

    def _pieces(self, events: Sequence[Json]) -> Iterator[Piece]:
        """Spaces around the parts are left out."""
        for event in events:
            kind, name = event["type"], event["field"]
            if kind == "region_chunk":
                self._left = self._left[max(0, self._left.find(event["text"])) + len(event["text"]) :]
                if name == "tool_calls":
                    self._written += event["text"]
                else:
                    yield from self._words(event["text"])
            elif kind == "region_open":
                opener = self._behind(self._marks.get(name, (None, None))[0])
                self._written = opener or "" if name == "tool_calls" else ""
                if self._field != name or name == "tool_calls":
                    self._begun = self._begun and self._field == "content" and name not in REASONING and name != "tool_calls"
                    self._field, self._held = name, ""
            else:
                closer = self._behind(self._marks.get(name, (None, None))[1])
                written, self._written = self._written, ""
                self._field, self._held, self._begun = "content", "", False
                if name == "tool_calls":
                    whole = closer is not None or not self._by_tags
                    yield from self._calls(event["value"] if whole else None, written + (closer or ""))

    def _behind(self, mark: Any) -> str | None:
        """The text up to the end of this mark, which is left behind; None: it is not there."""
        found = mark.search(self._left) if mark is not None else None
        if found is None:
            return None
        passed, self._left = self._left[: found.end()], self._left[found.end() :]
        return passed

    def _words(self, text: str) -> Iterator[Piece]:
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
        said = text.rstrip()
        self._held = text[len(said) :] if said or self._begun else ""
        if said:
            self._begun = True
            yield Reasoning(said) if self._field in REASONING else said

    def _calls(self, value: Any, written: str) -> Iterator[Piece]:
        """Calls, or what was written in their place."""
        found = list[Piece]()
        for call in (value if isinstance(value, list) else [value]) if self._schemas else ():
            function = call.get("function") if isinstance(call, dict) else None
            name, given = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
            if isinstance(given, str):
                with contextlib.suppress(ValueError, RecursionError):
                    given = json.loads(given)
            if not isinstance(name, str) or not isinstance(given, dict | None):
                continue
            if self._by_tags and given:
                schema = self._schemas.get(name, {})
                properties = schema.get("properties", {})
                given = {key: _value_of(text, properties.get(key), schema) for key, text in given.items()}
            found.append(ToolCall(name, json.dumps(given or {}, ensure_ascii=False)))
        yield from found or [written]
