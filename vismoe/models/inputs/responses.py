"""What an answer's text means: words, reasoning, tool calls, by a response template of the family, as transformers defines them.

A tokenizer may bring its template; for others FORMS has one, found by what the family's chat template writes. The forms are those
of the models' own pages and chat templates: Qwen3 and others (Hermes), Qwen3-Coder and Qwen3.5, GLM-4.5, DeepSeek-V3 and R1,
gpt-oss (harmony), Gemma 4, Mistral.
"""

import contextlib
import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import regex
from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import load_response_template

from vismoe.errors import InputError
from vismoe.models.inputs.json_text import JsonText
from vismoe.models.inputs.tools import (
    MOST_GRAMMAR,
    PARAMETER_END,
    VALUE_END,
    CallPart,
    Json,
    ToolCall,
    Tools,
    by_keys,
    by_tags,
    deepseek,
    harmony,
    hermes,
    is_plain,
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


Piece = str | Reasoning | CallPart | ToolCall  # a ToolCall ends the parts of its id, where there were any
Steps = Generator[Piece | None, None, Any]  # None: more text is needed, or the end
Mark = tuple[Any, Any, bool]  # the field of a template that it belongs to, its pattern, whether further text cannot lengthen it
OBJECT = regex.compile(r"\s*(?=\{)")
NAMED_OBJECT = regex.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\\x00-\x1f]{1,200})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


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
            set(re.findall(r"\b(TEXT_(\d+)_(\d*))\b", re.sub("\0.*?\0|%json .*?x-guidance", "", once)))
        ):
            mark = re.escape(form.value_end.strip()).replace("/", r"\/")  # with which a value ends wherever it comes
            rules.append(f"{name}: (/(?s:.{{{least},{most}}})/ & ~/(?s:.*){mark}(?s:.*)/) {json.dumps(form.value_end)}")
        if (size := sum(map(len, rules))) > MOST_GRAMMAR:
            raise too_large(size)
        return with_specials("\n".join(rules), tokenizer)


def _opening(field: Any) -> Mark:
    return field, field.open_re, field.open_literals is not None and not field.open_literal_can_extend


def _closing(field: Any) -> Mark:
    return field, field.close_re, field.close_literals is not None and not field.close_literal_can_extend


def _tags(field: Any) -> tuple[Any, Any] | None:
    """With what a parameter begins, or all of them have ended; and with what one ends. None: it has a form of its own."""
    begin, value, end = field.content_args.get("tag_pattern", "").partition("(?P<value>.*?)")
    if field.content != "xml-inline" or len(field.content_args) > 1 or not value or field.close_re is None:
        return None
    either = rf"\s*(?:(?>{begin})(?=.)|{field.close_re.pattern})"
    return regex.compile(either, regex.DOTALL), regex.compile(end, regex.DOTALL)


def _kept(kept: list[str], text: str) -> Iterator[Piece]:
    """In place of telling it."""
    kept.append(text)
    return iter(())


class _ToldCall:
    """A call that is told in parts."""

    def __init__(self, name: str):
        self._call, self._written = ToolCall(name, ""), list[str]()

    def tell(self, text: str) -> Iterator[Piece]:
        if text or not self._written:
            self._written.append(text)
            yield CallPart(self._call.name, text, self._call.id)

    def ended(self, whole: bool) -> ToolCall:
        return replace(self._call, arguments="".join(self._written), whole=whole)


class MessageParser:
    """Reads one answer piece by piece. prompt_end: what the chat template has written of it, e.g. an opened `<think>`; empty
    where a message goes on. What is no call of `tools` is told as it was written; without tools, nothing is a call.

    A call of one of them is told in parts, from where its arguments begin; if the text then ends, or leaves the form, the call
    is not whole, and what follows is told as words."""

    def __init__(self, spoken: Spoken, prompt_end: str, tools: Sequence[Json]):
        template = load_response_template(spoken.template)
        self._outside = [_opening(field) for field in template.fields.values() if field.open_re is not None]
        if template.implicit is not None and template.fields[template.implicit].close_re is not None:
            self._outside.append(_closing(template.fields[template.implicit]))
        self._schemas = {tool["function"]["name"]: parameters_of(tool) for tool in tools}
        self._text, self._last = template.truncate_past_last_anchor(prompt_end) or "", False  # what no piece has told of; its end
        self._of_prompt = 0  # characters of this text
        self._field, self._begun, self._held = "content", True, ""  # held: spaces that may be the last ones of a part
        self._steps = self._answer()
        for _ in self._pieces():
            pass
        self._of_prompt, self._held = len(self._text), ""
        self._begun = self._field == "content"

    @property
    def thinking(self) -> bool:
        """Whether it is in its reasoning now."""
        return self._field in REASONING

    def feed(self, text: str) -> Iterator[Piece]:
        """What this text adds."""
        self._text += text
        yield from self._pieces()

    def end(self) -> Iterator[Piece]:
        """What was held back."""
        self._last = True
        yield from self._pieces()

    def _pieces(self) -> Iterator[Piece]:
        for piece in self._steps:
            if piece is None:
                return
            yield piece

    def _answer(self) -> Steps:
        """Spaces around the parts are left out."""
        while found := (yield from self._until(self._outside, self._words)):
            field, mark = found
            opener = self._take(mark.end() - mark.start())
            if field.open_re is None:
                self._enter("content")
            elif field.name == "tool_calls":
                yield from self._call(field, mark.groupdict(), opener)
                continue
            else:
                self._begun = self._begun and field.name == "content"
                self._field, self._held = field.name, ""
                marks = [_closing(field)] if field.close_re is not None else []
                if (closed := (yield from self._until(marks, self._words))) is None:
                    break
                self._take(len(closed[1][0]))
                self._enter("content")
        if self._held and self._field == "content":
            yield self._held

    def _enter(self, name: str) -> None:
        self._field, self._held, self._begun = name, "", False

    def _take(self, count: int) -> str:
        """The next characters, without those of the prompt."""
        taken, self._text = self._text[min(count, self._of_prompt) : count], self._text[count:]
        self._of_prompt = max(0, self._of_prompt - count)
        return taken

    def _until(self, marks: Sequence[Mark], tell: Callable[[str], Iterator[Piece]]) -> Steps:
        """Tells the text before the first of these marks. Returns its field and match, before which the text is now; or None."""
        while True:
            best, hold = None, len(self._text)
            for field, pattern, final in marks:
                found = pattern.search(self._text, partial=not self._last)
                if found is None or (field is not None and field.open_re is None and not (found.partial or found[0])):
                    continue
                if not self._last and (found.partial or (found.end() == len(self._text) and not final)):
                    hold = min(hold, found.start())
                elif best is None or (found.start(), -found.end()) < (best[1].start(), -best[1].end()):
                    best = field, found
            if best is not None and best[1].start() < hold:
                yield from tell(self._take(best[1].start()))
                return best
            yield from tell(self._take(hold))
            if self._last:
                return None
            yield None

    def _meet(self, pattern: Any) -> Steps:
        """Returns the match of this pattern at the front of the text, which stays; None: there is none."""
        while (found := pattern.match(self._text, partial=not self._last)) is not None and found.partial:
            yield None
        return found

    def _words(self, text: str) -> Iterator[Piece]:
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
        said = text.rstrip()
        self._held = text[len(said) :] if said or self._begun else ""
        if said:
            self._begun = True
            yield Reasoning(said) if self._field in REASONING else said

    def _call(self, field: Any, captures: Json, opener: str) -> Steps:
        """One region of calls, behind its opening mark."""
        function = field.transform.get("function") if isinstance(field.transform, dict) else None
        named, name = function == CALLED["function"], captures.get("name") or ""
        by_json = field.content == "json" and not field.content_args.keys() - LAX.keys()
        if not self._schemas:
            yield from self._words(opener)
            return
        if by_json and (named or function == "{content}"):
            head = yield from self._meet(OBJECT if named else NAMED_OBJECT)
            if head is not None and (name := name or head.groupdict().get("name")) in self._schemas:
                yield from self._json_call(field, name, self._take(head.end()))
                return
        tags = _tags(field)
        if tags is not None and named and name in self._schemas:
            yield from self._tags_call(name, *tags)
            return
        body = list[str]()
        collect = partial(_kept, body)
        if by_json:
            whole = yield from self._scanned(JsonText(), 0, collect)
            closer = (yield from self._closer(field)) if whole else ""
        else:
            closed = yield from self._until([_closing(field)] if field.close_re is not None else [], collect)
            closer, whole = self._take(len(closed[1][0])) if closed else "", closed is not None or field.content == "json"
        calls = self._calls(field, "".join(body), captures) if whole else []
        if calls:
            self._enter("content")
            yield from calls
        else:
            yield from self._words("".join((opener, *body, closer)))

    def _closer(self, field: Any) -> Steps:
        """Takes the mark that ends a region, if it comes next. Returns it."""
        if field.close_re is None:
            return ""
        found = yield from self._meet(regex.compile(rf"\s*(?:{field.close_re.pattern})", regex.DOTALL))
        return self._take(found.end()) if found is not None else ""

    def _scanned(self, scan: JsonText, depth: int, tell: Callable[[str], Iterator[Piece]]) -> Steps:
        """Tells JSON. Returns whether it came to the end of the value at this depth."""
        while True:
            yield from tell(self._take(scan.read(self._text, depth)))
            if scan.ended or scan.broken or self._last:
                return scan.ended
            yield None

    def _json_call(self, field: Any, name: str, head: str) -> Steps:
        """head: what comes before the arguments, which are told as they are written."""
        call, scan = _ToldCall(name), JsonText()
        scan.read(head)
        depth = scan.depth
        self._enter("content")
        yield from call.tell("")
        whole = yield from self._scanned(scan, depth, call.tell)
        yield call.ended(whole)
        if whole and (not depth or (yield from self._scanned(scan, 0, partial(_kept, [])))):
            yield from self._closer(field)

    def _tags_call(self, name: str, begin: Any, end: Any) -> Steps:
        """Texts are told as they are written, other values when they are whole."""
        call, schema = _ToldCall(name), self._schemas[name]
        self._enter("content")
        yield from call.tell("")
        before, ends = "{", [(None, end, True)]
        while (found := (yield from self._meet(begin))) is not None:
            self._take(found.end())
            key = found["key"]
            if key is None:
                yield from call.tell("{}" if before == "{" else "}")
                break
            its = schema.get("properties", {}).get(key)
            yield from call.tell(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if is_plain(its, schema):
                yield from call.tell('"')
                ended = yield from self._until(ends, lambda text: call.tell(json.dumps(text, ensure_ascii=False)[1:-1]))
                value = '"'
            else:
                written = list[str]()
                ended = yield from self._until(ends, partial(_kept, written))
                value = json.dumps(value_of("".join(written), its, schema), ensure_ascii=False)
            if ended is None:
                found = None
                break
            self._take(len(ended[1][0]))
            yield from call.tell(value)
        yield call.ended(found is not None)

    def _calls(self, field: Any, body: str, captures: Json) -> list[Piece]:
        """Calls of a region that was read whole; none: it has other things."""
        try:
            value = process_field(body, field, {name: text for name, text in captures.items() if text is not None})
        except Exception:  # a content parser's own, of a text that its template does not foresee
            return []
        found = list[Piece]()
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function") if isinstance(call, dict) else None
            name, given = None, None
            if isinstance(function, dict):  # some models write of parameters
                name, given = function.get("name"), function.get("arguments", function.get("parameters"))
            if isinstance(given, str):
                with contextlib.suppress(ValueError, RecursionError):
                    given = json.loads(given)
            if not isinstance(name, str) or not isinstance(given, dict | None):
                continue
            if field.content == "xml-inline" and given:
                schema = self._schemas.get(name, {})
                properties = schema.get("properties", {})
                given = {key: value_of(text, properties.get(key), schema) for key, text in given.items()}
            found.append(ToolCall(name, json.dumps(given or {}, ensure_ascii=False)))
        return found
