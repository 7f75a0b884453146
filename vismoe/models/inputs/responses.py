"""What an answer's text means: words, reasoning, tool calls. transformers' ResponseParser reads it, by a template of the family.

A tokenizer may bring its template; for others FORMS has one, found by what the family's chat template writes. The forms are those
of the models' own pages and chat templates: Qwen3 and others (Hermes), Qwen3-Coder and Qwen3.5, GLM-4.5, DeepSeek-V3 and R1,
gpt-oss (harmony), Gemma 4, Mistral.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from vismoe.errors import InputError
from vismoe.models.inputs.tools import (
    MOST_GRAMMAR,
    PARAMETER_END,
    VALUE_END,
    Json,
    ToolCall,
    Tools,
    by_keys,
    by_tags,
    deepseek,
    harmony,
    hermes,
    mistral,
    parameters_of,
    quoted,
    too_large,
    value_of,
    with_specials,
)

CALLED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
REASONING = ("reasoning_content", "thinking")  # as response templates name it
LAX = {"allow_non_json": True}  # what is no JSON is told as it is, not refused


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


Piece = str | Reasoning | ToolCall


def _template(calls: Json, content: Json | None = None, reasoning: Json | None = None) -> Json:
    """A response template of which the parser sees what comes behind the prompt's last header only."""
    thinks = reasoning or {"open": "<think>", "close": "</think>"}
    fields = {"reasoning_content": thinks, "tool_calls": {"repeats": True, **calls}, "content": content or {}}
    if "open_pattern" in fields["content"]:  # words outside of all parts
        fields["outside"] = {"close_pattern": r"<\|start\|>\w*"}
    return {"start_anchor_pattern": r"\A", "fields": fields}


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
        by_tags,
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
        by_keys,
        value_end=VALUE_END,
    ),
    Form(("<tool_call>",), _template({"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", **WHOLE}), hermes),
    Form(
        ("<｜tool▁calls▁begin｜>", "```json"),
        _deepseek_template(r"function<｜tool▁sep｜>(?P<name>[\w.-]+)\n```json\n"),
        partial(deepseek, head="function<｜tool▁sep｜>", sign="\n```json\n", tail="\n```"),
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    Form(
        ("<｜tool▁calls▁begin｜>",),
        _deepseek_template(r"(?P<name>[\w.-]+)<｜tool▁sep｜>"),
        deepseek,
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
        harmony,
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
        mistral,
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
        calls = f"call ({quoted(form.between)} call)*" if tools.parallel else "call"
        once = " | ".join(f"({form.call(tool)})" for tool in tools.demanded)
        rules = [f"start: {quoted(form.before)} {calls} {quoted(form.after)}", f"call: {once}"]
        for name, least, most in sorted(
            set(re.findall(r"\b(text_(\d+)_(\d*))\b", re.sub("\0.*?\0|%json .*?x-guidance", "", once)))
        ):
            end = re.escape(form.value_end).replace("/", r"\/").replace("\\\n", r"\n")
            rules.append(f"{name}[lazy]: /(?s:.{{{least},{most}}}){end}/")
        if (size := sum(map(len, rules))) > MOST_GRAMMAR:
            raise too_large(size)
        return with_specials("\n".join(rules), tokenizer)


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
        self._schemas = {tool["function"]["name"]: parameters_of(tool) for tool in tools}
        self._left = template.truncate_past_last_anchor(prompt_end) or ""  # what was fed and no event has told of
        self._unsaid = ""  # of that, what is the prompt's
        self._written = self._held = ""  # a call that has begun; spaces that may be the last ones of a part
        self._field, self._begun, self._broken = "content", True, False
        for _ in self._pieces(self._parser.initial_events):
            pass
        self._written = self._held = ""
        self._unsaid, self._begun = self._left, self._field == "content"

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
        self._left, self._unsaid = self._left.removeprefix(self._unsaid), ""
        rest, self._written, self._held, self._left = self._held + self._written + self._left, "", "", ""
        return rest

    def _pieces(self, events: Sequence[Json]) -> Iterator[Piece]:
        """Spaces around the parts are left out."""
        for event in events:
            kind, name = event["type"], event["field"]
            unsaid, self._unsaid = self._unsaid, ""
            if kind == "region_chunk":
                self._left = self._left[max(0, self._left.find(event["text"])) + len(event["text"]) :]
                text = event["text"]
                if unsaid.startswith(text):
                    text, self._unsaid = "", unsaid[len(text) :]
                text = text.removeprefix(unsaid)
                if name == "tool_calls":
                    self._written += text
                else:
                    yield from self._words(text)
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
            name, given = None, None
            if isinstance(function, dict):  # some models write of parameters
                name, given = function.get("name"), function.get("arguments", function.get("parameters"))
            if isinstance(given, str):
                with contextlib.suppress(ValueError, RecursionError):
                    given = json.loads(given)
            if not isinstance(name, str) or not isinstance(given, dict | None):
                continue
            if self._by_tags and given:
                schema = self._schemas.get(name, {})
                properties = schema.get("properties", {})
                given = {key: value_of(text, properties.get(key), schema) for key, text in given.items()}
            found.append(ToolCall(name, json.dumps(given or {}, ensure_ascii=False)))
        yield from found or [written]
