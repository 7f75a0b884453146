"""Tools and reasoning: how each family writes them, read back whole and in pieces; calls that must be made, by random logits; the
demo model with chat templates that know tools, in Python and behind the `openai` client."""

import json
import os
import random
import re
import shutil
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples
from served import served
from test_grammar import DEMO, answered, schema_of
from transformers import AutoTokenizer, GenerationConfig

import vismoe
from vismoe.engine.grammar import Grammars, ReasoningLimit, Thought
from vismoe.engine.logprobs import TokenLogprob, split_at
from vismoe.errors import InputError
from vismoe.models.inputs.responses import FORMS, MessageParser, Reasoning, Spoken
from vismoe.models.inputs.tools import ToolCall, Tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
BOTH = (WEATHER, NOW)
BERLIN = ("get_weather", {"city": "Berlin", "days": 2})
WRITTEN = {  # as the models' pages show it: (reasoning, content, calls) in the family's words
    "<function=": (
        "<think>\nHm.\n</think>\n\nI look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBerlin\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "<arg_key>": (
        "<think>Hm.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Berlin</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
    ),
    "<tool_call>": (
        '<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Berlin", "days": 2}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "```json": (
        "<think>\nHm.\n</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Berlin", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "<｜tool▁calls▁begin｜>": (
        "<think>Hm.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Berlin", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "<|channel|>": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Berlin", "days": 2}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>'
    ),
    "<|tool_call>": (
        '<|channel>thought\nHm.<channel|>I look.<|tool_call>call:get_weather{city:<|"|>Berlin<|"|>,days:2}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>"
    ),
    "[ARGS]": '[THINK]Hm.[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Berlin", "days": 2}[TOOL_CALLS]now[ARGS]{}',
    "[TOOL_CALLS]": (
        '[THINK]Hm.[/THINK]I look.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Berlin", "days": 2}}, '
        '{"name": "now", "arguments": {}}]'
    ),
    "</think>": "<think>\nHm.\n</think>\n\nI look.",
}


def form(mark: str):
    return next(form for form in FORMS if form.marks[-1] == mark)


def spoken(mark: str) -> Spoken:
    return Spoken(form(mark).template, form(mark))


def read(parser: MessageParser, pieces) -> tuple[str, str, list]:
    """(reasoning, content, calls)."""
    found = [piece for text in pieces for piece in parser.feed(text)] + list(parser.end())
    calls = [(call.name, json.loads(call.arguments)) for call in found if isinstance(call, ToolCall) and call.whole]
    reasoning = "".join(piece.text for piece in found if isinstance(piece, Reasoning))
    return reasoning, "".join(piece for piece in found if isinstance(piece, str)), calls


@pytest.mark.parametrize("mark", WRITTEN)
@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.integers(0, 400), max_size=12))
def test_every_family_is_read_however_its_answer_is_cut(mark, cuts):
    text = WRITTEN[mark]
    for places in (sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)}), range(len(text) + 1)):
        pieces = [text[begin:end] for begin, end in zip(places, list(places)[1:], strict=False)]
        calls = [BERLIN, ("now", {})] if mark != "</think>" else []
        assert read(MessageParser(spoken(mark), "<assistant>", BOTH), pieces) == ("Hm.", "I look.", calls)


@pytest.mark.parametrize("mark", [mark for mark in WRITTEN if mark != "</think>"])
def test_an_answer_that_ends_within_a_call_calls_nothing(mark):
    text = WRITTEN[mark]
    first, city = text.index("I look.") + len("I look."), text.index("Berlin")
    for end in range(first, city + 6):
        parser = MessageParser(spoken(mark), "<assistant>", BOTH)
        found = [piece for piece in (*parser.feed(text[:end]), *parser.end()) if not isinstance(piece, Reasoning)]
        begun = [piece for piece in found if isinstance(piece, ToolCall)]
        content = "".join(piece for piece in found if isinstance(piece, str))
        assert not any(call.whole for call in begun) and content.startswith("I look.")
        assert "".join(content.split()).removeprefix("Ilook.") in "".join(text[first:].split())
        said = begun[0].arguments if begun else content
        assert "Berlin"[: max(0, end - city)] in said, "what it has written is in one of them"


def test_what_is_no_call_is_told_as_it_is():
    parser = MessageParser(spoken("<tool_call>"), "<assistant>", BOTH)
    assert read(parser, ["So: <tool_call>\n{not json}\n</tool_call> and", " on "])[1] == (
        "So: <tool_call>\n{not json}\n</tool_call> and on "
    )
    for header, said in product(("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"), ("Hi", "\n\nHi")):
        for pieces in ([said], list(said)):
            assert read(MessageParser(spoken("<tool_call>"), header, BOTH), pieces)[1].lstrip() == "Hi"
            assert header.endswith("\n\n") or read(MessageParser(spoken("<tool_call>"), header, BOTH), pieces)[1] == said
    numbers = {"open": "<n>", "close": "</n>", "content": "int"}  # a template whose own parser refuses a text
    parser = MessageParser(Spoken({"start_anchor": "^", "fields": {"tool_calls": numbers, "content": {}}}, None), "", BOTH)
    assert read(parser, ["a", "\n", "<n>b\n", "</n>", "\nc"])[1] == "a\n<n>b\n</n>\nc"
    parser = MessageParser(spoken("<tool_call>"), "<think>\n", BOTH)
    assert read(parser, ["first ", "this</thi", "nk>\n\n", " that"]) == ("first this", "that", [])
    parser = MessageParser(spoken("<tool_call>"), "", ())  # a message that goes on
    assert read(parser, [" and on"]) == ("", " and on", [])
    unasked = 'It writes <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call> so.'
    _, content, calls = read(MessageParser(spoken("<tool_call>"), "<assistant>", ()), [unasked])
    assert calls == [] and '{"name": "now", "arguments": {}}' in content and content.count("tool_call>") == 2
    for mark, text in (
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "now"}]'),
        ("<tool_call>", '<tool_call>\n{"name": "now", "arguments": ' + "[" * 100_000 + "\n</tool_call>"),
        ("<function=", "<tool_call>\n<function=later>\n<parameter=a>\n1</tool_call>"),
    ):
        assert read(MessageParser(spoken(mark), "<assistant>", BOTH), [text]) == ("", text, [])
    assert read(MessageParser(spoken("<|channel|>"), "<|start|>assistant", BOTH), ['{"a": 1}', " on"])[1] == '{"a": 1} on'


@pytest.mark.parametrize(
    ("schema", "written", "meant"),
    [
        ({"type": "string"}, "007", "007"),
        ({"type": ["integer", "string"]}, "007", "007"),
        ({"type": ["integer", "string"]}, "7", "7"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '"Berlin"', "Berlin"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "Berlin", "Berlin"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/unit"}, '"C"', "C"),
        ({"$ref": "#/properties/a~1b"}, "7", 7),
        ({"$ref": "#/properties/none"}, "7", "7"),
        ({"type": "boolean"}, "True", True),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "array", "items": {}}, '[1, "a"]', [1, "a"]),
        ({"type": "integer"}, "many", "many"),
        ({"anyOf": 5}, "x", "x"),
        (True, "7", "7"),
    ],
    ids=str,
)
def test_a_value_between_tags_means_what_its_schema_says(schema, written, meant):
    parameters = {
        "type": "object",
        "properties": {"a": schema, "a/b": {"type": "integer"}},
        "$defs": {"unit": {"enum": ["C", "F"]}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert read(MessageParser(spoken("<function="), "<assistant>", (tool,)), [text])[2] == [("f", {"a": meant})]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=len(tokenizer)))
    return Grammars(SimpleNamespace(config=config, generation_config=GenerationConfig(eos_token_id=3)), tokenizer)


def tool_of(rng: random.Random, number: int, by_tags: bool) -> dict:
    """Between tags, values have one type that the schema says."""
    parameters: dict = {"type": "null"}
    while parameters.get("type") != "object" or (by_tags and not all(map(plain, parameters["properties"].values()))):
        parameters = schema_of(rng)
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}


def plain(schema: dict) -> bool:
    return schema.get("type") in ("integer", "number", "boolean", "null") or ("maxLength" in schema and "pattern" not in schema)


@pytest.mark.parametrize("mark", [form.marks[-1] for form in FORMS if form.call is not None])
def test_a_call_that_must_be_made_is_made_by_its_schema_whatever_the_logits(tokenizer, grammars, mark):
    for seed in range(12):
        rng = random.Random(seed)
        tools = Tools(tuple(tool_of(rng, number, mark[0] == "<" and mark[1] in "fa") for number in range(2)), "required", False)
        mask = grammars.mask_of_calls(spoken(mark), tools)
        text = answered(tokenizer, mask, torch.Generator().manual_seed(seed), torch.tensor([[5, 6]]))
        assert text is not None
        _, content, calls = read(MessageParser(spoken(mark), "<assistant>", tools.functions), [text])
        (name, arguments), schemas = calls[0], {t["function"]["name"]: t["function"]["parameters"] for t in tools.functions}
        assert content == "" and len(calls) == 1
        jsonschema.validate(arguments, schemas[name])


@pytest.mark.parametrize("mark", ["<function=", "<arg_key>"])
def test_a_text_between_tags_ends_anywhere_and_may_have_tags(tokenizer, grammars, mark):
    free = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tools = Tools(({"type": "function", "function": {"name": "f", "parameters": free}},), "f", False)
    begin, end = {
        "<function=": ("<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"),
        "<arg_key>": ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
    }[mark]
    for value in ("Berlin", "a < b\n<c>", "", "x" * 300, "</function>\n</tool_call>", "</parameter", "</arg_value"):
        mask, ids = grammars.mask_of_calls(spoken(mark), tools), torch.tensor([[5]])
        for token in tokenizer.encode(begin + value + end):
            assert torch.isfinite(mask(ids, torch.zeros(1, len(tokenizer)))[0, token]), value
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        assert torch.isfinite(mask(ids, torch.zeros(1, len(tokenizer)))[0, 3])  # the end
        _, content, calls = read(MessageParser(spoken(mark), "<assistant>", tools.functions), [begin + value + end])
        assert (content, calls) == ("", [("f", {"a": value})])
    for value in ("a</parameter>b", "</parameter>\n</parameter>") if mark == "<function=" else ("a</arg_value>b",):
        mask, ids = grammars.mask_of_calls(spoken(mark), tools), torch.tensor([[5]])
        may = list[bool]()
        for token in tokenizer.encode(begin + value + end):
            may.append(bool(torch.isfinite(mask(ids, torch.zeros(1, len(tokenizer)))[0, token])))
            if not may[-1]:
                break
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        assert not may[-1] and len(may) > 10, "its own closing mark ends it"


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"type": "object", "properties": []}, "no JSON schema"),
        ({"type": "object", "required": 5}, "no JSON schema"),
        ({"type": "object", "properties": {}, "required": ["zz"]}, "'zz'"),
        ({"type": "object", "properties": {"a>b": {"type": "string"}}}, "'a>b'"),
        ({"$ref": "#/$defs/p", "$defs": {"p": {"type": "object"}}}, "'$ref'"),
        ({"type": "object", "properties": {"a": {"const": "x" * 200_000}}}, "at most 200,000"),
    ],
)
def test_schemas_that_tags_cannot_follow_are_refused(grammars, parameters, why):
    with pytest.raises(InputError, match=re.escape(why)):
        grammars.mask_of_calls(
            spoken("<function="), Tools(({"type": "function", "function": {"name": "f", "parameters": parameters}},), "f")
        )


REFERRING = {
    "type": "object",
    "$defs": {"short": {"type": "string", "maxLength": 3}},
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 9},
        "b": {"$ref": "#/properties/a"},
        "c": {"type": "array", "items": {"$ref": "#/properties/b"}, "minItems": 1, "maxItems": 2},
        "d": {"$ref": "#/$defs/short"},
        "e": {"enum": ["#/properties/a"]},
    },
    "required": ["a", "b", "c", "d", "e"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("mark", [form.marks[-1] for form in FORMS if form.call is not None])
def test_references_to_anywhere_in_a_schema_are_followed(tokenizer, grammars, mark):
    again = {**REFERRING, "properties": {**REFERRING["properties"], "again": {"$ref": "#"}}}
    for parameters in (REFERRING, again):
        tools = Tools(({"type": "function", "function": {"name": "f", "parameters": parameters}},), "f", False)
        for seed in range(4):
            mask = grammars.mask_of_calls(spoken(mark), tools)
            text = answered(tokenizer, mask, torch.Generator().manual_seed(seed), torch.tensor([[5, 6]]), 2000)
            if text is None:
                assert parameters is again, "only that goes on for good"
                continue
            ((name, arguments),) = read(MessageParser(spoken(mark), "<assistant>", tools.functions), [text])[2]
            assert name == "f"
            jsonschema.validate(arguments, parameters)
    nowhere = {"type": "object", "properties": {"b": {"$ref": "#/properties/z"}}, "required": ["b"]}
    with pytest.raises(InputError, match="/properties/z"):
        grammars.mask_of_calls(
            spoken(mark), Tools(({"type": "function", "function": {"name": "f", "parameters": nowhere}},), "f")
        )


def test_many_definitions_do_not_multiply(grammars):
    count = 300
    definitions = {f"d{n}": {"type": "object", "properties": {"value": {"type": "integer"}}} for n in range(count)}
    schema = {"type": "object", "$defs": definitions, "properties": {f"p{n}": {"$ref": f"#/$defs/d{n}"} for n in range(count)}}
    tools = Tools(({"type": "function", "function": {"name": "f", "parameters": schema}},), "f")
    with pytest.raises(InputError, match="Fix: smaller schemas"):
        grammars.mask_of_calls(spoken("<function="), tools)


def test_reasoning_that_has_ended_is_not_ended_again(tokenizer):
    limit = ReasoningLimit(Thought(tokenizer, "<think>", "</think>", True), 12)
    ids, scores = torch.tensor([[5, 6]]), torch.zeros(1, len(tokenizer))
    for token in tokenizer.encode("hm</think> the answer is here and goes on and on"):
        assert torch.equal(limit(ids, scores), scores)
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


HERMES = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The demo model, whose template knows tools and reasoning."""
    folder = tmp_path_factory.mktemp("hermes") / "tool-model"
    shutil.copytree(DEMO, folder, copy_function=os.symlink)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(HERMES)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    with vismoe.load(folder, memory="50%", draft="ngram", context=1024, calibration="none") as engine:
        yield engine


HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.mark.budget(3)
@pytest.mark.parametrize("how", [{}, {"sample": True, "temperature": 1.5, "seed": 3}])
def test_the_model_calls_what_it_must_drafted_or_not(engine, how):
    for tools, names in ((Tools(BOTH, "get_weather", False), ["get_weather"]), (Tools((NOW,), "required", False), ["now"])):
        replies = [engine.chat(HELLO, tools=tools, max_tokens=100, draft=draft, **how) for draft in ("none", "ngram")]
        assert ["".join(reply) for reply in replies] == ["", ""]
        calls = [[call.function for call in reply.tool_calls] for reply in replies]
        assert calls[0] == calls[1] and [call["name"] for call in calls[0]] == names
        if names == ["get_weather"]:
            jsonschema.validate(json.loads(calls[0][0]["arguments"]), WEATHER["function"]["parameters"])
        assert replies[0].figures.to_json()["tool_calls"] == calls[0]


def test_a_conversation_goes_on_behind_a_call_with_a_picture_in_its_result(engine):
    reply = engine.chat(HELLO, tools=Tools(BOTH, "now", False), max_tokens=100)
    list(reply)
    picture = {"type": "image", "image": str(DEMO.parent / "images" / sorted(os.listdir(DEMO.parent / "images"))[0])}
    result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": [picture, {"type": "text", "text": "noon"}]}
    talk = [*HELLO, reply.message, result]
    prompt = engine.prompts.build(talk, lambda path: vismoe.models.inputs.images.fetch_image(path), tools=Tools(BOTH))
    text = engine.prompts.tokenizer.decode(prompt.inputs["input_ids"][0])
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in text and '"get_weather"' in text
    assert prompt.images == 1 and "noon<|im_end|>" in text
    assert "".join(engine.chat(talk, tools=Tools(BOTH), max_tokens=5))


def test_reasoning_is_told_apart_limited_and_before_a_schema(engine):
    thinking = engine.chat(HELLO, reasoning="high", max_tokens=12)
    assert "".join(thinking) == "" and thinking.reasoning  # it never ends by itself: the model was not trained to
    limited = engine.chat(HELLO, reasoning="high", reasoning_tokens=4, max_tokens=40)
    answer = "".join(limited)
    shown = engine.prompts.tokenizer.encode(limited.reasoning)
    assert answer and "</think>" not in answer and len(shown) <= 5 and limited.figures.to_json()["reasoning"] == limited.reasoning
    drafted = [
        engine.chat(
            HELLO, reasoning="low", reasoning_tokens=4, json_schema='{"enum": ["red", "blue"]}', max_tokens=40, draft=draft
        )
        for draft in ("none", "ngram")
    ]
    said = ["".join(reply) for reply in drafted]
    assert said[0] in ('"red"', '"blue"') and said[0] == said[1]
    assert engine.chat(HELLO, reasoning="none", max_tokens=5).message is not None
    switched = engine.chat(HELLO, template={"enable_thinking": True}, max_tokens=3)
    list(switched)
    assert switched.reasoning


@pytest.mark.parametrize("limit", [1, 4, 7])
@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_log_probabilities_are_of_the_answer_and_not_of_its_reasoning(engine, limit, draft):
    reply = engine.chat(HELLO, reasoning="high", reasoning_tokens=limit, max_tokens=60, logprobs=0, draft=draft)
    entries = [entry for piece in reply for entry in getattr(piece, "logprobs", ())]
    assert reply.reasoning and reply.answer
    assert b"".join(entry.bytes for entry in entries).strip() == reply.answer.encode().strip()
    places = [reply.logprobs.index(entry) for entry in entries]
    assert places == list(range(places[0], places[0] + len(entries))) and places[0] >= limit


def test_words_between_marks_have_the_tokens_that_they_are_made_of():
    one, mark, two, three = (TokenLogprob(n, text, 0.0) for n, text in enumerate((b"a thou", b"ght</think>\n", b"\nHel", b"lo ")))
    assert split_at((one, mark, two, three), "a thought") == ((one, mark), (two, three))
    assert split_at((two, three), "Hello") == ((two, three), ())
    assert split_at((one, mark, two, three), "Hel") == ((two,), (three,))
    assert split_at((two, three), "other") == ((two, three), ())


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (dict(tools=Tools(BOTH, "now"), json_schema="{}"), "a call or follows that"),
        (dict(template={"no_such": 1}), "no variable 'no_such'"),
        (dict(template={"tools": []}), "no variable 'tools'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(engine, asked, why):
    with pytest.raises(InputError, match=why) as refused:
        engine.chat(HELLO, **asked)
    assert "Fix: " in str(refused.value)


@pytest.mark.parametrize(
    ("functions", "choice", "why"),
    [
        (({"name": "x"},), "auto", "each is"),
        ((WEATHER, WEATHER), "auto", "same name"),
        (BOTH, "later", "no such tool"),
        ((), "required", "there are no tools"),
    ],
)
def test_tools_that_cannot_be_are_refused(functions, choice, why):
    with pytest.raises(InputError, match=why):
        Tools(functions, choice)


def test_a_model_without_tools_says_so():
    with vismoe.load(DEMO, memory="50%", context=256, calibration="none") as engine:
        for asked, why in (
            (dict(tools=Tools(BOTH)), "knows no tools"),
            (dict(reasoning="low"), "no switch for that"),
            (dict(reasoning_tokens=4), "is not known"),
            (dict(tools=Tools(BOTH, "now")), "is not known"),
        ):
            with pytest.raises(InputError, match=why):
                engine.chat(HELLO, **asked)
        assert "".join(engine.chat(HELLO, reasoning="none", max_tokens=3))  # it does not think


# -- the server
@pytest.fixture(scope="module")
def server(engine):
    with served(engine) as server:
        yield server


def ask(server, messages=HELLO, **given):
    usual = {"model": "tool-model", "messages": messages, "temperature": 0, "max_tokens": 100}
    return server.client().chat.completions.create(**(usual | given))


def called(arguments: str) -> dict:
    calls = [{"id": "x", "type": "function", "function": {"name": "now", "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


NAMED = {"type": "function", "function": {"name": "get_weather"}}


def test_the_client_gets_calls_whole_and_streamed(server):
    given = dict(tools=list(BOTH), tool_choice=NAMED, parallel_tool_calls=False)
    whole = ask(server, **given).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and whole.message.content is None and call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    with server.client().chat.completions.stream(
        model="tool-model", messages=HELLO, temperature=0, max_tokens=100, **given
    ) as stream:
        for _ in stream:
            pass
        last = stream.get_final_completion().choices[0]
    assert last.finish_reason == "tool_calls" and last.message.tool_calls[0].function.arguments == call.function.arguments
    talk = [*HELLO, whole.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert ask(server, talk, tools=list(BOTH), max_tokens=5).choices[0].message.content


def test_the_client_gets_reasoning_apart(server):
    given = dict(reasoning_effort="medium", extra_body={"vismoe": {"reasoning_tokens": 4}})
    whole = ask(server, **given).choices[0].message
    chunks = list(ask(server, stream=True, **given))
    reasoning = "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks)
    assert whole.reasoning_content == reasoning != "" and whole.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.content
    off = ask(server, max_tokens=5, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
    assert off.content and not hasattr(off, "reasoning_content")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (dict(tool_choice="required"), "there are no tools"),
        (dict(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "now"}}), "no such tool"),
        (dict(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools"),
        (dict(reasoning_effort="xhigh"), "reasoning_effort"),
        (dict(extra_body={"chat_template_kwargs": {"no_such": 1}}), "no_such"),
        (dict(extra_body={"chat_template_kwargs": {"message": 1}}), "no variable 'message'"),
        (dict(extra_body={"chat_template_kwargs": {"": 1}}), "no variable"),
        (dict(extra_body={"chat_template_kwargs": {"enable_thinking": "long " * 300_000}}), "can hold"),
        (dict(messages=[*HELLO, called("[" * 100_000)]), "send them back as they came"),
        (dict(messages=[*HELLO, called('{"a": "\\ud800"}')]), "cannot be used"),
        (dict(messages=[*HELLO, called('{"a": "<|image_pad|>"}')]), "attach the image"),
        (dict(messages=[*HELLO, {"role": "tool", "content": "rain"}]), "tool_call_id"),
        (dict(messages=[{**HELLO[0], "tool_call_id": "x"}]), "tool_call_id"),
        (dict(extra_body={"functions": [{"name": "x"}]}), "called tools now"),
    ],
)
def test_what_cannot_be_is_a_400_that_names_it(server, given, param):
    with pytest.raises(openai.BadRequestError, match=param):
        ask(server, **given)
