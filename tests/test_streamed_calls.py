"""Calls that are told while they are written: what the parts make is the whole call, in every form, however the text is cut; what
ends in the middle; and the three doors by the vendors' own clients."""

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json
from scripted_engine import ScriptedEngine
from searching import examples
from served import PATIENCE_S, served
from test_tools import BOTH, NOW, WRITTEN, grammars, spoken, tokenizer  # noqa: F401  # fixtures

from vismoe.models.inputs.json_text import JsonText
from vismoe.models.inputs.responses import MessageParser
from vismoe.models.inputs.tools import CallPart, ToolCall, Tools

JSON = ("<tool_call>", "```json", "<｜tool▁calls▁begin｜>", "<|channel|>", "[ARGS]")  # forms whose arguments are JSON
TAGS = ("<function=", "<arg_key>")
WHOLE = ("<|tool_call>", "[TOOL_CALLS]")  # forms whose calls are told when they are whole
MARKS = ("</tool_call>", "<|call|>", "<｜tool▁call▁end｜>", "[TOOL_CALLS]", "<tool_call|>", "</function>\n</tool_call>")
ENDS = (*MARKS, "}", '"', "\\")
FREE = {
    "type": "function",
    "function": {
        "name": "f.g-1",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "any": {"type": ["array", "number"]}}},
    },
}


def write(mark: str, name: str, arguments: str) -> str:
    """A call as this form has it. arguments: JSON."""
    if mark == "<tool_call>":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    if mark == "```json":
        return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
    if mark == "<｜tool▁calls▁begin｜>":
        return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
    if mark == "<|channel|>":
        return f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    if mark == "[ARGS]":
        return f"[TOOL_CALLS]{name}[ARGS]{arguments}"
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in json.loads(arguments).items()}
    if mark == "<function=":
        fields = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"<tool_call>\n<function={name}>\n{fields}</function>\n</tool_call>"
    fields = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{fields}</tool_call>"


def pieces_of(mark: str, texts, tools=(FREE, NOW)) -> list:
    parser = MessageParser(spoken(mark), "<assistant>", tools)
    return [piece for text in texts for piece in parser.feed(text)] + list(parser.end())


def calls_of(pieces) -> list[ToolCall]:
    """The calls; their parts make them."""
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    for call in calls:
        parts = [piece for piece in pieces if isinstance(piece, CallPart) and piece.id == call.id]
        assert [part.name for part in parts] == [call.name] * len(parts) and not (parts and parts[0].arguments)
        assert not parts or "".join(part.arguments for part in parts) == call.arguments
        assert all(part.arguments for part in parts[1:])
    assert {piece.id for piece in pieces if isinstance(piece, CallPart)} <= {call.id for call in calls}
    return calls


def cut(text: str, places) -> list[str]:
    """The text in pieces."""
    ends = sorted({0, *(place % (len(text) + 1) for place in places), len(text)})
    return [text[begin:end] for begin, end in pairwise(ends)]


LETTERS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
TEXTS = st.lists(st.one_of(LETTERS, st.sampled_from(ENDS)), max_size=4).map("".join)
NUMBERS = st.one_of(st.integers(-(10**9), 10**9), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.recursive(
    st.one_of(TEXTS, NUMBERS, st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
WRITER = st.sampled_from([{}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}])
CUTS = st.lists(st.integers(0, 10**4), max_size=12)


@pytest.mark.parametrize("mark", JSON)
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.dictionaries(TEXTS, VALUES, max_size=3), min_size=1, max_size=2), WRITER, CUTS)
def test_the_parts_of_json_are_what_was_written_however_it_is_cut(mark, given, writer, cuts):
    written = [json.dumps(arguments, **writer) for arguments in given]
    text = "I look." + "\n".join(write(mark, "f.g-1", arguments) for arguments in written)
    for texts in ([text], cut(text, cuts), list(text)):
        pieces = pieces_of(mark, texts)
        calls = calls_of(pieces)
        assert [(call.name, call.arguments, call.whole) for call in calls] == [("f.g-1", one, True) for one in written]
        assert "".join(piece for piece in pieces if isinstance(piece, str)).strip() == "I look."


@pytest.mark.parametrize("mark", TAGS)
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(TEXTS, st.lists(NUMBERS, max_size=3)), min_size=1, max_size=2), CUTS)
def test_the_parts_of_values_between_tags_are_what_they_mean_however_it_is_cut(mark, given, cuts):
    """Closing marks of the call are text within a value; that of the value itself is not."""
    meant = [{"text": text, "any": numbers} for text, numbers in given]
    text = "I look.\n" + "\n".join(write(mark, "f.g-1", json.dumps(arguments)) for arguments in meant)
    for texts in ([text], cut(text, cuts), list(text)):
        pieces = pieces_of(mark, texts)
        calls = calls_of(pieces)
        assert [(call.name, json.loads(call.arguments), call.whole) for call in calls] == [("f.g-1", one, True) for one in meant]
        assert "".join(piece for piece in pieces if isinstance(piece, str)).strip() == "I look."


@pytest.mark.parametrize("mark", [*JSON, *TAGS])
def test_a_long_text_is_told_while_it_is_written(mark):
    parser = MessageParser(spoken(mark), "<assistant>", (FREE,))
    said, text = [], write(mark, "f.g-1", json.dumps({"text": "word " * 400}))
    for place in range(0, len(text), 5):
        said += parser.feed(text[place : place + 5])
        told = "".join(piece.arguments for piece in said if isinstance(piece, CallPart))
        missing = min(place + 5, text.index("word ") + 2000) - text.index("word ") - told.count("word ") * 5
        assert missing < 40, "at most the beginning of what may be a mark is held back"
    assert sum(isinstance(piece, CallPart) for piece in said) > 390


@pytest.mark.parametrize("mark", [*JSON, *TAGS])
def test_a_call_that_ends_anywhere_is_its_beginning_however_it_is_cut(mark):
    text = write(mark, "f.g-1", json.dumps({"text": 'a "b" \\ é\n' * 3, "any": [1.5, 2]}))
    (whole,) = calls_of(pieces_of(mark, [text]))
    for end in range(len(text)):
        once, by_one = pieces_of(mark, [text[:end]]), pieces_of(mark, text[:end])
        found = [[(call.name, call.arguments, call.whole) for call in calls_of(pieces)] for pieces in (once, by_one)]
        assert found[0] == found[1] and len(found[0]) <= 1
        for _, arguments, is_whole in found[0]:
            held = (mark in TAGS) * len("\\n</parameter")  # of a text that ends in what may be a mark
            assert whole.arguments.startswith(arguments[: len(arguments) - held])
            assert is_whole == (arguments == whole.arguments)
            assert isinstance(from_json(arguments or "{}", allow_partial=True), dict), "what clients make of it"
        words = ["".join(piece for piece in pieces if isinstance(piece, str)) for pieces in (once, by_one)]
        assert words[0] == words[1] and (found[0] or not words[0] or words[0] in text)


@pytest.mark.parametrize(
    ("inside", "begun", "behind"),
    [
        ('{"a": 1, oops}', '{"a": 1, ', "oops}}\n</tool_call>"),
        ('{"a": "line\nend"}', '{"a": "line', '\nend"}}\n</tool_call>'),
        ('{"a": NaN}', '{"a":', "NaN}}\n</tool_call>"),
        (r'{"a": "\ud83d"}', '{"a": "', '\\ud83d"}}\n</tool_call>'),
        ('{"a": ' + "[" * 200, '{"a": ' + "[" * 127, "[" * 73 + "}\n</tool_call>"),
    ],
    ids=["word", "line", "nan", "half", "deep"],
)
def test_what_leaves_json_ends_the_call_and_is_told_as_words(inside, begun, behind):
    text = write("<tool_call>", "f.g-1", inside)
    for texts in ([text], list(text)):
        pieces = pieces_of("<tool_call>", texts)
        ((name, arguments, whole),) = [(call.name, call.arguments, call.whole) for call in calls_of(pieces)]
        assert (name, arguments.rstrip(), whole) == ("f.g-1", begun.rstrip(), False)
        assert "".join(piece for piece in pieces if isinstance(piece, str)).strip() == behind.strip()


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ('{"name": "later", "arguments": {"a": "</tool_call>"}}', [("later", {"a": "</tool_call>"})]),  # none of the tools
        ('{"arguments": {"a": 1}, "name": "now"}', [("now", {"a": 1})]),
        ('{"name": "now", "arguments": {}, "id": "7"}', [("now", {})]),
        ('{"name": "now", "arguments": "{\\"a\\": 1}"}', [("now", {"a": 1})]),
        ('{"name": "now", "parameters": {"a": 1}}', [("now", {"a": 1})]),
        ('{"name": "now"}', [("now", {})]),
        ('{"name": "now", "arguments": 5}', []),
    ],
    ids=str,
)
def test_calls_of_unusual_order_are_read_whole(body, calls):
    for text in (f"<tool_call>{body}</tool_call>", f"<tool_call>\n{body}", f"<tool_call>{body}\n<tool_call>{body}"):
        for texts in ([text], list(text)):
            pieces = pieces_of("<tool_call>", texts)
            assert [(call.name, json.loads(call.arguments)) for call in calls_of(pieces)] == calls * (text.count("<tool_call>"))
            words = "".join(piece for piece in pieces if isinstance(piece, str))
            assert words == ("" if calls else text)


@pytest.mark.parametrize("mark", WHOLE)
def test_other_forms_tell_whole_calls_only(mark):
    pieces = pieces_of(mark, WRITTEN[mark], BOTH)
    assert [call.name for call in calls_of(pieces)] == ["get_weather", "now"]
    assert not any(isinstance(piece, CallPart) for piece in pieces)


@settings(max_examples=examples(200), deadline=None)
@given(st.one_of(st.lists(VALUES, max_size=3), st.dictionaries(TEXTS, VALUES, max_size=3)), WRITER, CUTS, TEXTS)
def test_json_ends_where_the_librarys_reader_says(value, writer, cuts, behind):
    text, scan = json.dumps(value, **writer), JsonText()
    left, taken = "", 0
    for more in cut(text + behind, cuts):
        left += more
        taken += (count := scan.read(left)) if not scan.ended else 0
        left = left[count:] if not scan.ended else left
    assert scan.ended and taken == len(text) == json.JSONDecoder().raw_decode(text + behind)[1]


@given(st.text('{}[]":,\\0123456789.eE+-truefalsn \n/bud', max_size=12))
@settings(max_examples=examples(500), deadline=None)
def test_what_ends_is_json_and_what_breaks_is_none(text):
    scan = JsonText()
    count = scan.read(text)
    try:
        value, end = json.JSONDecoder().raw_decode(text.lstrip(" \n"))
    except ValueError:
        assert not scan.ended
    else:
        if isinstance(value, dict | list):
            assert scan.ended and not scan.broken and count == end + len(text) - len(text.lstrip(" \n"))


@pytest.mark.parametrize("mark", JSON)
def test_a_demanded_call_may_say_its_own_closing_mark(tokenizer, grammars, mark):  # noqa: F811
    """The grammar lets it, and it is read so: as characters, where the mark is a special token."""
    tools = Tools((FREE,), "f.g-1", False)
    value = {"text": "".join(MARKS)}
    text = spoken(mark).form.before + write(mark, "f.g-1", json.dumps(value, ensure_ascii=False)) + spoken(mark).form.after
    text = text.removeprefix("<|start|>assistant")
    mask, ids, left = grammars.mask_of_calls(spoken(mark), tools), torch.tensor([[5]]), tokenizer.encode(text)
    while left:
        may = torch.isfinite(mask(ids, torch.zeros(1, len(tokenizer)))[0])
        if not may[left[0]]:  # what is certain is asked for in the tokens that the tokenizer would take for it alone
            said = tokenizer.decode(left)
            fit = [token for token in may.nonzero()[:, 0].tolist() if said.startswith(tokenizer.decode([token]))]
            assert fit, (text, said)
            first = max(fit, key=lambda token: len(tokenizer.decode([token])))
            left = [first, *tokenizer.encode(said.removeprefix(tokenizer.decode([first])))]
        ids, left = torch.cat([ids, torch.tensor([left[:1]])], dim=1), left[1:]
    assert torch.isfinite(mask(ids, torch.zeros(1, len(tokenizer)))[0, 3])  # the end
    assert [json.loads(call.arguments) for call in calls_of(pieces_of(mark, [text], (FREE,)))] == [value]


# -- the doors
@pytest.fixture(scope="module")
def server():
    engine = ScriptedEngine()
    with served(engine, served_model_name="m") as server:
        server.engine = engine
        yield server


ARGUMENTS = {"text": 'é "quoted" </tool_call>\n' * 5, "any": [1.5, {"a": None}]}
ANSWER = "I look.\n" + "\n".join(write("<tool_call>", name, json.dumps(ARGUMENTS)) for name in ("f.g-1", "now"))
PLACES = [len(ANSWER), *range(8, len(ANSWER) - 20, 37), ANSWER.index('"arguments": {') + 14]


def scripted(server, place: int, times: int) -> None:
    """The engine says the answer up to there, in pieces of three characters."""
    server.engine.finish = "stop" if place == len(ANSWER) else "length"
    texts = [ANSWER[begin : min(begin + 3, place)] for begin in range(0, place, 3)]
    server.engine.script = [pieces_of("<tool_call>", texts) for _ in range(times)]


def expected(place: int) -> list:
    return [(call.name, call.arguments, call.whole) for call in calls_of(pieces_of("<tool_call>", [ANSWER[:place]]))]


@pytest.mark.parametrize("place", PLACES)
def test_the_chat_door_tells_parts_that_make_the_whole_answer(server, place):
    given = {"model": "m", "messages": [{"role": "user", "content": "Hello!"}], "tools": [FREE, NOW]}
    scripted(server, place, 3)
    whole = server.client().chat.completions.create(**given).choices[0]
    deltas = [chunk.choices[0].delta for chunk in server.client().chat.completions.create(**given, stream=True)]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    for number, (name, arguments, _) in enumerate(expected(place)):
        first, *others = [call for call in calls if call.index == number]
        assert first.id and (first.type, first.function.name, first.function.arguments) == ("function", name, "")
        assert all(other.id is None and other.function.name is None and other.function.arguments for other in others)
        assert "".join(other.function.arguments for other in others) == arguments and len(others) > 3 * (len(arguments) > 20)
    with server.client().chat.completions.stream(**given) as stream:
        kinds = [event.type for event in stream]
        last = stream.current_completion_snapshot.choices[0]
    assert place < len(ANSWER) or "tool_calls.function.arguments.delta" in kinds
    for choice in (whole, last):
        made = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        assert made == [(name, arguments) for name, arguments, _ in expected(place)]
        assert choice.finish_reason == ("tool_calls" if place == len(ANSWER) else "length")
    assert whole.message.content == last.message.content


@pytest.mark.parametrize("place", PLACES)
def test_the_responses_door_tells_parts_that_make_the_whole_answer(server, place):
    tools = [{"type": "function", "strict": False, "parameters": None, **tool["function"]} for tool in (FREE, NOW)]
    given = {"model": "m", "input": "Hello!", "tools": tools}
    scripted(server, place, 2)
    whole = server.client().responses.create(**given)
    with server.client().responses.stream(**given) as stream:
        events = list(stream)
    kinds, response = [event.type.removeprefix("response.") for event in events], events[-1].response
    made = [item for item in whole.output if item.type == "function_call"]
    assert [(call.name, call.arguments, call.status == "completed") for call in made] == expected(place)
    seen = [
        [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}, exclude_none=True) for item in one.output]
        for one in (whole, response)
    ]
    assert seen[0] == seen[1] and whole.status == response.status == ("completed" if place == len(ANSWER) else "incomplete")
    assert kinds.count("function_call_arguments.done") == sum(one[2] for one in expected(place))
    for call in (item for item in response.output if item.type == "function_call"):
        of_it = [event for event in events if getattr(event, "item_id", None) == call.id]
        deltas = [event.delta for event in of_it if event.type.endswith("arguments.delta")]
        assert "".join(deltas) == call.arguments and len(deltas) > 3 * (len(call.arguments) > 20)


@pytest.mark.parametrize("place", PLACES)
def test_the_messages_door_tells_parts_that_make_the_whole_answer(server, place):
    import anthropic  # its thousand modules take every other worker seconds

    tools = [{"name": one["function"]["name"], "input_schema": {"type": "object"}} for one in (FREE, NOW)]
    given = {"model": "m", "messages": [{"role": "user", "content": "Hello!"}], "tools": tools, "max_tokens": 100}
    scripted(server, place, 2)
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0, timeout=PATIENCE_S) as client:
        whole = client.messages.create(**given)
        with client.messages.stream(**given) as stream:
            events = list(stream)
            message = stream.get_final_message()
    seen = [[block.model_dump(exclude={"id"}) for block in one.content] for one in (whole, message)]
    assert seen[0] == seen[1] and whole.stop_reason == message.stop_reason
    assert whole.stop_reason == ("tool_use" if place == len(ANSWER) else "max_tokens")
    inputs = [block.input for block in whole.content if block.type == "tool_use"]
    assert inputs == [from_json(arguments or "{}", allow_partial=True) for _, arguments, _ in expected(place)]
    parts = [event.partial_json for event in events if event.type == "input_json"]
    assert "".join(parts) == "".join(arguments for _, arguments, _ in expected(place))
    assert len(parts) > 8 or place < len(ANSWER)
    assert [event.type for event in events].count("content_block_stop") == len(whole.content)
