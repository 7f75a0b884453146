"""The server's contract, held by the real `openai` client against a real server: a scripted engine shows what reaches the engine
and what comes back in every case, and the demo model (test_serve_demo.py) that it is all true of the real one.
"""

import base64
import dataclasses
import gc
import io
import itertools
import json
import math
import socket
import threading
import time
import weakref
from argparse import ArgumentParser
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from PIL import Image
from scripted_engine import ScriptedEngine
from served import served, wait_until

from vismoe.app import completions, guard, serving
from vismoe.app.options import ServeOptions
from vismoe.cli import serve as cli_serve
from vismoe.cli.serve import OPTIONS, SERVE, serve_options
from vismoe.config import Settings
from vismoe.engine.logprobs import ScoredText, TokenLogprob
from vismoe.errors import BudgetError, ClosedError, ConfigError, ContextError, InputError, TransferError

MODEL = "example/scripted"
HELLO = [{"role": "user", "content": "Hello!"}]


def data_uri(colour: str = "red", side: int = 8) -> str:
    file = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def picture(url: str, **more) -> dict:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def slowly():
    """Says something every few milliseconds, for ever."""
    for number in itertools.count():
        time.sleep(0.003)
        yield f"{number} "


def events(response: httpx.Response) -> list:
    """The JSON of a stream's data lines, and its comments as they are."""
    lines = [line for line in response.text.splitlines() if line]
    return [json.loads(line[6:]) if line.startswith("data: {") else line for line in lines]


@pytest.fixture(scope="module")
def shared():
    engine = ScriptedEngine()
    with served(engine) as server:
        server.engine = engine
        yield server


@pytest.fixture
def server(shared):
    """A server with a fresh script."""
    shared.engine.script.clear()
    shared.engine.calls.clear()
    shared.engine.finish = "stop"
    shared.engine.settings = Settings()
    return shared


# -- answers


def test_a_chat_answer_is_what_the_client_knows_and_our_figures_come_with_it(server):
    answer = server.client().chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion" and answer.model == MODEL and answer.id.startswith("chatcmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (11, 5, 16)
    assert answer.usage.prompt_tokens_details.cached_tokens == 7
    assert answer._request_id == answer.id
    assert answer.vismoe["keep"] == 0.5 and answer.vismoe["selection"] == "affinity"
    assert answer.vismoe["decode_hit_rate"] == 0.75 and answer.vismoe["bytes_read_per_token"] == 250


def test_an_answer_that_was_cut_says_so(server):
    server.engine.finish = "length"
    assert server.client().chat.completions.create(model=MODEL, messages=HELLO).choices[0].finish_reason == "length"
    chunks = list(server.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_stream_brings_every_piece_when_it_is_said(server):
    read = threading.Event()
    server.engine.script.append(["one", lambda: read.wait(10), "two"])
    stream = server.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    said = []
    for chunk in stream:
        said.append(chunk.choices[0].delta.content)
        if said[-1] == "one":  # the engine goes on only when this piece has arrived here
            read.set()
    assert said == ["", "one", "two", None]
    assert chunk.choices[0].finish_reason == "stop" and chunk.vismoe["visual_tokens"] == 8


def test_a_stream_ends_with_usage_where_it_was_asked_for(server):
    chunks = list(
        server.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True})
    )
    *others, last = chunks
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in others)
    assert last.choices == [] and last.usage.total_tokens == 16 and last.vismoe["reused_tokens"] == 7
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_is_server_sent_events_to_its_end(server):
    response = server.post({"messages": HELLO, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == events(response)[0]["id"]
    assert response.text.endswith("data: [DONE]\n\n")


def test_a_stream_without_text_yet_shows_that_it_lives(server, monkeypatch):
    monkeypatch.setattr(completions, "BEAT_S", 0.02)
    server.engine.script.append([lambda: time.sleep(0.2), "late"])
    assert events(server.post({"messages": HELLO, "stream": True})).count(completions.BEAT.decode().strip()) >= 2
    server.engine.script.append([lambda: time.sleep(0.2), "late"])
    chunks = server.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "late"


def test_no_character_of_an_answer_breaks_an_event(server):
    odd = "a\u2028b\x85c\x0bd\r\ne\u00e9\U0001f600"
    server.engine.script.append([odd])
    response = server.post({"messages": HELLO, "stream": True})
    assert [event["choices"][0]["delta"].get("content") for event in events(response)[:-1]] == ["", odd, None]


def test_completions_whole_and_streamed(server):
    answer = server.client().completions.create(model=MODEL, prompt="Once upon")
    assert answer.choices[0].text == "Hello, world" and answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.usage.total_tokens == 16 and answer.vismoe["reused_tokens"] == 7
    said, options = server.engine.calls[-1]
    assert said == "Once upon" and options["max_tokens"] is None
    chunks = list(server.client().completions.create(model=MODEL, prompt=["Once upon"], stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == ["Hello", ", ", "world", ""]
    assert chunks[-1].choices[0].finish_reason == "stop" and chunks[-1].vismoe


def test_what_is_answered_has_every_field_of_the_clients_own_types(server):
    """The client fills its types without looking; here they are checked: what is missing, or of another type, is an error."""
    ask = {"messages": HELLO, "stream_options": {"include_usage": True}, "stream": True}
    *chunks, _ = events(server.post(ask))
    for kind, answer in [
        (ChatCompletion, server.post({"messages": HELLO}).json()),
        (Completion, server.post({"prompt": "Once"}, "/v1/completions").json()),
        (Model, server.get(f"/v1/models/{MODEL}").json()),
        (ErrorObject, server.post({"messages": []}).json()["error"]),
        *((ChatCompletionChunk, chunk) for chunk in chunks),
    ]:
        checked = kind.model_validate(answer, strict=True)
        assert kind is Model or checked.model_extra.keys() <= {"vismoe"}
        assert kind is not ErrorObject or checked.model_fields_set == {"code", "message", "param", "type"}
        for choice in getattr(checked, "choices", ()):
            assert not choice.model_extra and "logprobs" in choice.model_fields_set
            assert not (hasattr(choice, "message") and choice.message.model_extra)
    assert len(chunks) == 6 and checked.usage


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_several_answers_are_choices_of_one_with_seeds_of_their_own(server, path):
    ask = {"messages": HELLO} if "chat" in path else {"prompt": "Once"}
    server.engine.script += [["one"], ["two", "."], ["three"]]
    found = server.post({**ask, "n": 3, "seed": 2**63 - 2}, path).json()
    kind = ChatCompletion if "chat" in path else Completion
    choices = kind.model_validate(found, strict=True).choices
    said = [choice.message.content if "chat" in path else choice.text for choice in choices]
    assert said == ["one", "two.", "three"] and [choice.index for choice in choices] == [0, 1, 2]
    assert [options["seed"] for _, options in server.engine.calls] == [2**63 - 2, 2**63 - 1, -(2**63)]
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (11, 15, 26)
    assert [ours["visual_tokens"] for ours in found["vismoe"]] == [8] * 3


@pytest.mark.parametrize("usage", [False, True])
def test_several_answers_are_streamed_side_by_side(server, usage):
    turn, over = threading.Event(), threading.Event()
    first = ["a", lambda: turn.wait(10), "b"]
    second = ["x", turn.set, "y", over.set]
    server.engine.script += [first, second]
    *chunks, done = events(server.post({"messages": HELLO, "n": 2, "stream": True, "stream_options": {"include_usage": usage}}))
    assert done == "data: [DONE]" and len({chunk["id"] for chunk in chunks}) == 1
    assert all("vismoe" not in chunk for chunk in chunks[:-1]) and len(chunks[-1]["vismoe"]) == 2
    said, ends = {0: "", 1: ""}, {}
    for chunk in chunks:
        for choice in ChatCompletionChunk.model_validate(chunk, strict=True).choices:
            said[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert said == {0: "ab", 1: "xy"} and ends == {0: "stop", 1: "stop"}
    if usage:
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 10
        assert chunks[-1]["usage"]["prompt_tokens"] == 11


@pytest.mark.parametrize("stream", [False, True])
def test_one_answer_that_fails_ends_all_of_them(server, stream):
    server.engine.script += [slowly(), [ContextError("too long")]]
    response = server.post({"messages": HELLO, "n": 2, "stream": stream})
    assert "context_length_exceeded" in response.text and response.status_code == (200 if stream else 400)
    wait_until(lambda: not server.engine.running)
    server.engine.script += [slowly(), ClosedError("not now")]  # before the second has begun
    assert server.post({"messages": HELLO, "n": 2, "stream": stream}).status_code == 503
    wait_until(lambda: not server.engine.running and not len(server.app.state.callers))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_all_of_its_answers(server, stream):
    server.engine.script += [slowly(), slowly(), slowly()]
    before = server.engine.cancelled
    with pytest.raises(httpx.ReadTimeout):
        server.post({"messages": HELLO, "n": 3, "stream": stream}, timeout=0.5) if not stream else _leaves(server)
    wait_until(lambda: not server.engine.running and not len(server.app.state.callers))
    assert server.engine.cancelled == before + 3


def _leaves(server):
    with server.http.stream(
        "POST", f"{server.url}/v1/chat/completions", json={"messages": HELLO, "n": 3, "stream": True}
    ) as reply:
        next(reply.iter_lines())
    raise httpx.ReadTimeout("left after the first line")


def test_answers_that_were_not_asked_of_the_engine_yet_count_as_waiting():
    engine = ScriptedEngine()
    with served(engine, max_waiting=4) as server:
        refused = server.post({"messages": HELLO, "n": 5})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
        assert "5 answers (n for each prompt), but up to 4 may wait" in refused.text and "Fix: " in refused.text
        engine.waiting = 1
        assert server.post({"messages": HELLO, "n": 4}).status_code == 429
        assert server.post({"messages": HELLO, "n": 3}).status_code == 200


def with_tokens():
    """A script of two pieces, whose tokens end one piece later than they begin, and one that comes with no text at all."""
    likely = TokenLogprob(3, b"Hi", -0.5), TokenLogprob(4, b"\xe2", -math.inf)
    first, second = TokenLogprob(1, b"Hel", -0.25, likely), TokenLogprob(2, b"lo \xe2", -1.5, (), 3)
    pieces = ScoredText("Hello "), ScoredText(""), "?"
    pieces[0].logprobs, pieces[1].logprobs = (first,), (second,)
    return pieces


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_come_with_the_text_in_the_form_of_each_api(server, stream):
    server.engine.script += [with_tokens(), with_tokens()]
    ask = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "stream": stream}
    old = {"prompt": "Once", "logprobs": 2, "stream": stream}
    found = []
    for body, path, kind in (
        (ask, "/v1/chat/completions", ChatCompletionChunk if stream else ChatCompletion),
        (old, "/v1/completions", Completion),
    ):
        response = server.post(body, path)
        chunks = [event for event in events(response) if isinstance(event, dict)] if stream else [response.json()]
        for chunk in chunks if kind is Completion else ():  # the client's type has no chunk without an end
            chunk["choices"][0]["finish_reason"] = "stop"
        found.append([choice.logprobs for chunk in chunks for choice in kind.model_validate(chunk, strict=True).choices])
    chat, text = ([one for one in each if one is not None] for each in found)
    assert [len(one.content) for one in chat] == [len(one.tokens) for one in text] == ([1, 1, 0] if stream else [2])
    assert not stream or (found[0][0] is found[0][-1] is found[1][-1] is None), "neither the first nor the last chunk has text"
    first, second = (entry for one in chat for entry in one.content)
    assert (first.token, first.bytes, first.logprob) == ("Hel", [*b"Hel"], -0.25)
    assert [(one.token, one.logprob) for one in first.top_logprobs] == [("Hi", -0.5), ("\\xe2", -9999.0)]
    assert (second.token, second.bytes, second.top_logprobs) == ("lo \\xe2", [*b"lo \xe2"], [])
    joined = {name: [value for one in text for value in getattr(one, name)] for name in type(text[0]).model_fields}
    assert joined == {
        "tokens": ["Hel", "lo \\xe2"],
        "token_logprobs": [-0.25, -1.5],
        "top_logprobs": [{"Hi": -0.5, "\\xe2": -9999.0, "Hel": -0.25}, {"lo \\xe2": -1.5}],
        "text_offset": [0, 3],
    }


def test_models_are_listed_by_name_and_never_by_path(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    with served(ScriptedEngine(name=str(folder))) as server:
        client = server.client()
        assert [model.id for model in client.models.list()] == ["my-model"]
        assert client.models.retrieve("my-model").object == "model" and client.models.retrieve("my-model").max_model_len == 4096
        assert client.chat.completions.create(model="my-model", messages=HELLO).model == "my-model"
        with pytest.raises(openai.NotFoundError, match="Fix: use my-model"):
            client.models.retrieve("other/model")
        with pytest.raises(openai.NotFoundError) as refused:
            client.chat.completions.create(model="other", messages=HELLO)
        assert refused.value.code == "model_not_found" and str(tmp_path) not in refused.value.message
    with served(ScriptedEngine(name=str(folder)), served_model_name="gpt-4o") as server:
        assert server.client().models.retrieve("gpt-4o").id == "gpt-4o"


# -- what reaches the engine

GREEDY = {"sample": False, "temperature": None, "top_p": None}


@pytest.mark.parametrize(
    ("asked", "reaches"),
    [
        ({}, {"sample": True, "temperature": None, "top_p": None, "seed": None, "stop": (), "max_tokens": None, "reuse": True}),
        ({"temperature": 0}, GREEDY),
        ({"temperature": 0, "top_p": 0.9}, GREEDY),
        ({"temperature": 0.7}, {"sample": True, "temperature": 0.7, "top_p": None}),
        ({"top_p": 0.9}, {"sample": True, "temperature": None, "top_p": 0.9}),
        ({"extra_body": {"top_k": 5, "min_p": 0.1}}, {"sample": True, "top_k": 5, "min_p": 0.1}),
        ({"temperature": 0, "extra_body": {"top_k": 5, "min_p": 0.1}}, {**GREEDY, "top_k": None, "min_p": None}),
        ({"presence_penalty": -2, "frequency_penalty": 0.5}, {"presence_penalty": -2, "frequency_penalty": 0.5}),
        ({"extra_body": {"repetition_penalty": 1.1}}, {"repetition_penalty": 1.1, "sample": True}),
        ({"extra_body": {"repeat_penalty": 1.2, "repetition_penalty": 1.2}}, {"repetition_penalty": 1.2}),
        ({"logit_bias": {"0": -100, "42": 1.5}}, {"logit_bias": {0: -100, 42: 1.5}}),
        ({}, {"logprobs": None, "logit_bias": None, "presence_penalty": None}),
        ({"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        ({"seed": 5, "stop": "\n"}, {"seed": 5, "stop": ("\n",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 8}, {"max_tokens": 8}),
        ({"max_completion_tokens": 8, "max_tokens": 8}, {"max_tokens": 8}),
        ({}, {"keep": None, "selection": None, "image_tokens": None}),
        ({"extra_body": {"vismoe": {"keep": 0.5, "selection": "random"}}}, {"keep": 0.5, "selection": "random"}),
        ({"extra_body": {"vismoe": {"image_tokens": [64, 1024]}}}, {"image_tokens": (64, 1024)}),
        ({}, {"policy": None, "formats": None, "retention": None}),
        ({"extra_body": {"vismoe": {"policy": "hotness", "formats": "16/4"}}}, {"policy": "hotness", "formats": "16/4"}),
        ({"extra_body": {"vismoe": {"retention": 0.9}}}, {"retention": 0.9, "keep": None}),
        ({"extra_body": {"vismoe": {"reuse": False}}}, {"reuse": False}),
        ({"extra_body": {"vismoe": {"reuse": True}}}, {"reuse": True}),
        ({"response_format": {"type": "text"}}, {"json_schema": None, "grammar": None}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"enum": [1]}}}},
            {"json_schema": '{"enum": [1]}'},
        ),
        ({"extra_body": {"vismoe": {"grammar": 'start: "a"'}}}, {"grammar": 'start: "a"', "json_schema": None}),
    ],
)
def test_parameters_reach_the_engine(server, asked, reaches):
    server.client().chat.completions.create(model=MODEL, messages=HELLO, **asked)
    _, options = server.engine.calls[-1]
    assert {name: options[name] for name in reaches} == reaches


def test_a_server_that_reuses_nothing_computes_every_prompt_whole():
    engine = ScriptedEngine()
    with served(engine, no_reuse=True) as server:
        for asked in ({}, {"vismoe": {"reuse": True}}):
            server.post({"messages": HELLO, **asked})
            server.post({"prompt": "x", **asked}, "/v1/completions")
    assert [options["reuse"] for _, options in engine.calls] == [False] * 4


def test_a_model_that_decodes_greedily_does_so_unless_it_is_asked_to_sample():
    engine = ScriptedEngine()
    engine.model.generation_config.do_sample = False
    with served(engine) as server:
        for asked in ({}, {"logprobs": None}, {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.5}):
            server.post({"messages": HELLO, **asked})
            server.post({"prompt": "x", **asked}, "/v1/completions")
    assert [options["sample"] for _, options in engine.calls] == [False] * 4 + [True] * 8


def test_a_conversation_with_images_reaches_the_engine_in_order(server):
    client = server.client()
    first = client.chat.completions.create(model=MODEL, messages=HELLO).choices[0].message
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Which?"}, picture(data_uri("red")), picture(data_uri("blue"))]},
        first,  # as a client sends it back
        {"role": "assistant", "content": [{"type": "text", "text": "parts"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [picture(data_uri("lime", 9), detail="low")]},
    ]
    client.chat.completions.create(model=MODEL, messages=messages)
    taken, _ = server.engine.calls[-1]
    assert [message["role"] for message in taken] == ["system", "user", "assistant", "assistant", "assistant", "user"]
    texts = [[part["text"] for part in message["content"] if part["type"] == "text"] for message in taken]
    assert texts == [["Be brief."], ["Which?"], ["Hello, world"], ["parts"], [""], []]
    pixels = [part["image"].getpixel((0, 0)) for message in taken for part in message["content"] if part["type"] == "image"]
    assert pixels == [(255, 0, 0), (0, 0, 255), (0, 255, 0)]


def test_parameters_that_ask_for_nothing_are_taken(server):
    asks_nothing = {
        "n": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0,
        "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"},
        "modalities": ["text"], "store": False, "service_tier": "auto", "user": "somebody", "metadata": {"a": "b"},
        "stop": None, "temperature": None, "seed": None, "max_tokens": None, "stream": None, "stream_options": None,
    }  # fmt: skip
    assert server.post({"messages": HELLO, **asks_nothing}).status_code == 200


# -- formats of experts


def test_every_answer_says_in_which_formats_experts_were_computed_and_what_held(server):
    exact = {"policy": "exact", "pair": None, "retention": None, "formats": {"raw": 1.0}}
    asked = {"policy": "importance", "formats": "4/2", "retention": 0.9}
    held = {"policy": "importance", "pair": "int4/int2", "retention": 0.9, "formats": {"int4": 0.75, "int2": 0.25}}
    for wish, said in (({}, exact), (asked, held)):
        for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "x"})):
            body = body | {"vismoe": wish}
            whole = server.post(body, path).json()["vismoe"]
            *_, last, done = events(server.post(body | {"stream": True}, path))
            assert done == "data: [DONE]"
            for found in (whole, last["vismoe"]):
                assert {name: found[name] for name in said} == said
    (listed,) = server.get("/v1/models").json()["data"]
    assert listed["vismoe"] == {"policy": "importance", "pair": "int4/int2", "retention": 0.75, "fixed_policy": False}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        ConfigError("formats='8/2': /secret/place/vismoe-store holds int4. Fix: vismoe pack /secret/place --formats int8,int2"),
        BudgetError("memory=4GiB: 8/2 does not fit, these do: 4/2" + " and more" * 99, "--memory 5GiB"),
    ],
)
def test_a_change_that_cannot_be_planned_is_refused_with_the_fix_also_when_it_is_known_late(server, error, stream):
    body = {"messages": HELLO, "stream": stream, "vismoe": {"formats": "8/2"}}
    for answer in (error, [error]):  # raised at once, and from the thread that would have changed it
        server.engine.script.append(answer)
        response = server.post(body)
        assert response.status_code == 400, response.text
        refused = response.json()["error"]
        assert refused["code"] == "cannot_be_planned" and "Fix: " in refused["message"] and "secret" not in response.text
    assert server.post(body).status_code == 200
    assert server.post(body | {"vismoe": {"policy": "hotness", "formats": "4/0"}}).status_code == 400, "in no format at all"


def test_a_stream_that_asks_for_another_policy_begins_with_the_first_piece_or_a_beat(server, monkeypatch):
    body = {"messages": HELLO, "stream": True, "vismoe": {"policy": "importance"}}
    said = [event["choices"][0]["delta"].get("content") for event in events(server.post(body))[:-1]]
    assert said == ["", "Hello", ", ", "world", None]
    server.engine.script.append([])
    assert len(events(server.post(body))) == 3, "nothing was said"
    monkeypatch.setattr(completions, "BEAT_S", 0.02)
    server.engine.script.append([lambda: time.sleep(0.1), "late"])
    assert completions.BEAT.decode().strip() in events(server.post(body))


def test_a_server_with_a_fixed_policy_lets_requests_choose_the_retention_only():
    with served(ScriptedEngine(settings=Settings(policy="importance")), fixed_policy=True) as server:
        for wish in ({"policy": "importance"}, {"formats": "8/2"}):
            with pytest.raises(openai.PermissionDeniedError) as refused:
                server.client().chat.completions.create(model=MODEL, messages=HELLO, extra_body={"vismoe": wish})
            assert refused.value.code == "policy_is_fixed" and refused.value.param == f"vismoe.{next(iter(wish))}"
            assert server.post({"prompt": "x", "vismoe": wish}, "/v1/completions").status_code == 403
        answer = server.post({"messages": HELLO, "vismoe": {"retention": 0.6}}).json()
        assert answer["vismoe"]["retention"] == 0.6
        assert server.get("/v1/models").json()["data"][0]["vismoe"]["fixed_policy"] is True


# -- what is refused


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": "2"}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logit_bias": {"1": 101}}, "logit_bias[1]"),
        ({"logit_bias": {"1": "5"}}, "logit_bias[1]"),
        ({"logit_bias": {"dog": 5}}, "logit_bias"),
        ({"logit_bias": {"01": 5}}, "logit_bias"),
        ({"logit_bias": {"1" * 30: 5}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": 5}, "model"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"vismoe": {"keep": 0}}, "vismoe.keep"),
        ({"vismoe": {"policy": "x"}}, "vismoe.policy"),
        ({"vismoe": {"formats": "2/4"}}, "vismoe.formats"),
        ({"vismoe": {"formats": "4/2" + " " * 99}}, "vismoe.formats"),
        ({"vismoe": {"formats": 4}}, "vismoe.formats"),
        ({"vismoe": {"retention": 0.49}}, "vismoe.retention"),
        ({"vismoe": {"retention": 1.01}}, "vismoe.retention"),
        ({"vismoe": {"precision": "4/2"}}, "vismoe.precision"),
        ({"vismoe": {"image_tokens": [5, 4]}}, "vismoe"),
        ({"vismoe": {"image_tokens": [1, 10**9]}}, "vismoe.image_tokens[1]"),
        ({"vismoe": {"image_tokens": [1, 10**7]}}, "vismoe.image_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "long " * 300_000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [picture("x") | {"image_url": "x"}]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "system", "content": [picture(data_uri())]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [picture("data:image/png;base64,AAAA")]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [picture("http://127.0.0.1/x.png")]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [picture("/etc/passwd")]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [picture(data_uri())] * 9}]}, "messages"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_the_name_of_the_parameter(server, change, param):
    response = server.post({"messages": HELLO} | change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param and error["message"]
    assert not server.engine.calls and not len(server.app.state.callers)


def test_what_a_client_library_adds_to_the_turns_it_sends_back_is_taken(server):
    added = {"provider_specific_fields": {"refusal": None}}
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}", **added}, **added}
    turn = {"role": "assistant", "content": None, "tool_calls": [call], "annotations": [], "refusal": None, **added}
    response = server.post({"messages": [*HELLO, turn, {"role": "tool", "tool_call_id": "x", "content": "1"}]})
    assert response.status_code == 200, response.text
    messages, _ = server.engine.calls.pop()
    assert messages[1]["tool_calls"] == [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize("prompt", ["", [], [1, "a"], ["a", ""], [1.5], 7, None])
def test_prompts_that_are_neither_text_nor_ids_are_refused(server, prompt):
    response = server.post({"prompt": prompt}, "/v1/completions")
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"messages": NaN}', b'{"a": "\\ud800"}'),
        *(b"[" * 100_000, b'{"a": [' + b"[]," * 1_000_000 + b"1]}", b'{"a": ' + b"9" * 5000 + b"}"),
    ],
    ids=range(10),
)
def test_a_body_that_is_no_json_object_is_refused(server, body):
    response = server.post(body)
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"


def test_other_addresses_and_methods_answer_in_the_same_form(server):
    assert server.get("/v1/embeddings").json()["error"]["code"] == "unknown_url"
    assert server.get("/docs").status_code == 404
    response = server.get("/v1/chat/completions")
    assert response.status_code == 405 and response.json()["error"]["type"] == "invalid_request_error"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (InputError("there is nothing to answer"), 400, None),
        (ContextError("5000 tokens, the planned context is 4096"), 400, "context_length_exceeded"),
        (ClosedError("the engine is closed"), 503, "shutting_down"),
        (TransferError("/secret/path/model.safetensors: read error"), 500, "internal_error"),
        (RuntimeError("/secret/path"), 500, "internal_error"),
    ],
)
def test_errors_have_one_form_and_keep_the_inside_inside(server, caplog, raised, status, code):
    server.engine.script.append(raised)
    with pytest.raises(openai.APIStatusError) as refused:
        server.client().chat.completions.create(model=MODEL, messages=HELLO)
    assert refused.value.status_code == status and refused.value.code == code
    assert "secret" not in refused.value.response.text
    if status == 500:
        mark = refused.value.message.rpartition(" ")[2].rstrip("'}")
        assert any("/secret" in record.exc_text for record in caplog.records if record.exc_text) and mark
    else:
        assert status == 503 or str(raised) in refused.value.message


@pytest.mark.parametrize("raised", [TransferError("/secret/path"), ClosedError("closed")])
def test_an_error_in_the_middle_of_an_answer_reaches_the_client(server, raised):
    server.engine.script += [["Hel", raised], ["Hel", raised]]
    stream = server.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    said = []
    with pytest.raises(openai.APIError) as failed:
        said.extend(chunk.choices[0].delta.content for chunk in stream)
    assert said == ["", "Hel"] and "secret" not in str(failed.value)
    with pytest.raises(openai.InternalServerError):
        server.client().chat.completions.create(model=MODEL, messages=HELLO)
    assert server.client().chat.completions.create(model=MODEL, messages=HELLO).choices[0].message.content == "Hello, world"


# -- clients that leave, and too many of them


def raw_request(server, body: dict, host: str = "localhost") -> socket.socket:
    """A request whose connection is ours."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_answer(server, stream):
    server.engine.script.append(slowly())
    connection = raw_request(server, {"messages": HELLO, "stream": stream})
    wait_until(lambda: server.engine.running)
    (reply,) = server.engine.running
    connection.close()
    wait_until(lambda: not server.engine.running)
    assert reply.cancelled.is_set() and reply.figures.finish == "cancelled"
    wait_until(lambda: not len(server.app.state.callers))


def test_a_client_that_leaves_while_its_prompt_is_built_never_runs(server):
    server.engine.door.clear()
    server.engine.script.append(slowly())
    connection = raw_request(server, {"messages": HELLO})
    wait_until(lambda: server.engine.calls)
    connection.close()
    (caller,) = server.app.state.callers._here
    wait_until(lambda: caller.left)
    server.engine.door.set()
    wait_until(lambda: server.engine.replies and not server.engine.running)
    assert server.engine.replies[-1].cancelled.is_set()


def test_a_client_that_leaves_before_its_prompt_is_built_never_reaches_the_engine(server):
    server.engine.door.clear()
    connections = [raw_request(server, {"messages": HELLO}) for _ in range(completions.PREPARERS)]
    wait_until(lambda: len(server.engine.calls) == completions.PREPARERS)
    late = raw_request(server, {"messages": HELLO})
    wait_until(lambda: len(server.app.state.callers) == completions.PREPARERS + 1)
    late.close()
    time.sleep(0.05)
    server.engine.door.set()
    wait_until(lambda: not len(server.app.state.callers))
    assert len(server.engine.calls) == completions.PREPARERS
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_was_read_is_not_kept(server, monkeypatch, stream):
    """Replies hold the pictures of their conversation: they go at once, and do not wait for the garbage collector."""
    replies, chat = [], server.engine.chat

    def noted(*arguments, **options):
        reply = chat(*arguments, **options)
        replies.append(weakref.ref(reply))
        return reply

    monkeypatch.setattr(server.engine, "chat", noted)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert server.post({"messages": [{"role": "user", "content": "Hi"}], "stream": stream}).status_code == 200
        server.engine.replies.clear()  # it keeps them for other tests
        wait_until(lambda: all(reply() is None for reply in replies))
    finally:
        gc.enable()


def test_the_client_that_stops_reading_a_stream_stops_the_answer(server):
    server.engine.script.append(slowly())
    with server.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True) as stream:
        next(stream)
        next(stream)
    wait_until(lambda: not server.engine.running)


def test_answers_are_written_side_by_side(server):
    both = threading.Barrier(2)
    server.engine.script += [[lambda: both.wait(10), "a"], [lambda: both.wait(10), "a"]]
    replies = []
    ask = lambda: replies.append(server.post({"messages": HELLO}).status_code)  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert replies == [200, 200]


def test_more_than_may_wait_are_told_to_come_back():
    engine = ScriptedEngine()
    with served(engine, max_waiting=1) as server:
        engine.door.clear()
        with raw_request(server, {"messages": HELLO}) as first:
            wait_until(lambda: engine.calls)
            with pytest.raises(openai.RateLimitError) as refused:
                server.client().chat.completions.create(model=MODEL, messages=HELLO)
            assert int(refused.value.response.headers["retry-after"]) > 0
            assert refused.value.code == "rate_limit_exceeded"
            assert server.get("/health").status_code == 200
            engine.door.set()
            assert b"200 OK" in first.recv(100)
        engine.waiting = 1  # in the engine itself
        assert server.post({"messages": HELLO}).status_code == 429
        engine.waiting = 0
        assert server.post({"messages": HELLO}).status_code == 200


# -- the gate


def test_a_body_is_refused_when_it_is_too_large_before_all_of_it_is_there():
    with served(ScriptedEngine(), max_body_bytes=10_000) as server:
        large = b'{"messages": "' + b"x" * 20_000_000 + b'"}'
        assert server.post(large).status_code == 413
        pieces = (b"x" * 5000 for _ in range(5))
        address, headers = f"{server.url}/v1/chat/completions", {"Content-Type": "application/json"}
        response = server.http.post(address, content=pieces, headers=headers)
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
        assert server.post({"messages": HELLO}).status_code == 200


@pytest.mark.parametrize(("whole_s", "pause_s"), [(0.2, 60), (60, 0.2)])
def test_a_body_that_trickles_or_stands_still_is_given_up(monkeypatch, whole_s, pause_s):
    monkeypatch.setattr(guard, "PAUSE_S", pause_s)
    with served(ScriptedEngine(), body_timeout_s=whole_s) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99"
            connection.sendall(f"{head}\r\n\r\n{{".encode())
            assert b"408" in connection.recv(1000).split(b"\r\n")[0]
        assert not len(server.app.state.callers)


def test_a_connection_without_a_whole_request_is_closed_and_one_that_is_answered_is_not(monkeypatch):
    monkeypatch.setattr(serving, "IDLE_S", 0.1)
    engine = ScriptedEngine([[lambda: time.sleep(0.5), "late"]])
    with served(engine) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: local")
            assert connection.recv(1000) == b""
        assert server.post({"messages": HELLO}).json()["choices"][0]["message"]["content"] == "late"


def test_a_web_page_cannot_use_the_server_through_its_visitors_browser(server):
    assert server.post({"messages": HELLO}, headers={"Host": "evil.example:8000"}).status_code == 421
    assert server.get("/health", headers={"Host": "evil.example"}).status_code == 421
    for host in ("localhost:1", "127.0.0.1", "[::1]:8000"):
        assert server.get("/health", headers={"Host": host}).status_code == 200
    assert server.post(b'{"messages": []}', headers={"Content-Type": "text/plain"}).status_code == 415
    preflight = httpx.options(
        f"{server.url}/v1/models", headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "GET"}
    )
    assert "access-control-allow-origin" not in preflight.headers


def test_further_names_and_pages_are_allowed_by_name():
    with served(ScriptedEngine(), allow_hosts=("Models.Example",), allow_origins=("http://page.example",)) as server:
        assert server.get("/health", headers={"Host": "models.example"}).status_code == 200
        asks = {
            "Origin": "http://page.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "x-any",
        }
        allowed = httpx.options(f"{server.url}/v1/chat/completions", headers=asks)
        assert allowed.headers["access-control-allow-origin"] == "http://page.example"
        refused = server.get("/nothing", headers={"Origin": "http://page.example"})
        assert refused.status_code == 404 and "access-control-allow-origin" in refused.headers


def test_with_keys_only_health_is_open():
    with served(ScriptedEngine(), api_keys=("right", "other")) as server:
        for key in ("right", "other"):
            assert server.client(api_key=key).chat.completions.create(model=MODEL, messages=HELLO).choices
        with pytest.raises(openai.AuthenticationError) as refused:
            server.client(api_key="wrong").chat.completions.create(model=MODEL, messages=HELLO)
        assert refused.value.code == "invalid_api_key" and refused.value.response.headers["www-authenticate"] == "Bearer"
        assert [server.get(path).status_code for path in ("/v1/models", "/metrics", "/nothing")] == [401, 401, 401]
        assert server.get("/health").json()["status"] == "ok"


def test_the_log_has_a_line_a_request_and_no_text_of_it(server, caplog):
    caplog.set_level("INFO", "vismoe.serve")
    server.post({"messages": [{"role": "user", "content": "a secret"}]}, "/v1/chat/completions?key=secret%0Aforged")
    wait_until(lambda: any(line.startswith("POST /v1/chat/completions 200 ") for line in caplog.messages))
    assert "secret" not in caplog.text


# -- the end


def test_at_the_end_answers_finish_and_nobody_new_is_taken():
    read = threading.Event()
    engine = ScriptedEngine([["one ", lambda: read.wait(10), "two"]])
    with served(engine, drain_s=10) as server:
        stream = server.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        next(stream), next(stream)
        server.stop()
        wait_until(lambda: server.app.state.callers.draining)
        health = server.get("/health")
        assert health.status_code == 503
        with pytest.raises(openai.InternalServerError) as refused:
            server.client().chat.completions.create(model=MODEL, messages=HELLO)
        assert refused.value.status_code == 503 and refused.value.code == "shutting_down"
        read.set()
        assert [chunk.choices[0].delta.content for chunk in stream] == ["two", None]
        server.thread.join(10)
        assert not server.thread.is_alive()


@pytest.mark.parametrize("stream", [True, False])
def test_at_the_end_an_answer_that_takes_too_long_is_sent_away_with_the_reason(stream):
    engine = ScriptedEngine([slowly()])
    with served(engine, drain_s=0.1) as server:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(server.post({"messages": HELLO, "stream": stream})))
        thread.start()
        wait_until(lambda: engine.running)
        server.stop()
        thread.join(10)
        assert "shutting_down" in answers[0].text and "[DONE]" not in answers[0].text
        assert answers[0].status_code == (200 if stream else 503)
        assert not engine.running and engine.replies[0].cancelled.is_set()


def test_a_second_signal_sends_everybody_away_at_once():
    engine = ScriptedEngine([slowly()])
    with served(engine, drain_s=60) as server, raw_request(server, {"messages": HELLO, "stream": True}):
        wait_until(lambda: engine.running)
        server.stop()
        server.stop()
        server.thread.join(10)
        assert not server.thread.is_alive()
    engine.close()
    wait_until(lambda: not engine.running)


# -- the command


def arguments(*flags: str):
    parser = ArgumentParser()
    SERVE.add_arguments(parser)
    return parser.parse_args(flags)


def parsed(*flags: str):
    return serve_options(arguments(*flags))


def test_every_option_has_a_flag():
    without = {"api_keys", "max_tokens", "image_tokens"}  # --api-key(-file), and the flags of every command that answers
    assert {field.name for field in dataclasses.fields(ServeOptions)} == set(OPTIONS) | without
    assert parsed() == ServeOptions()


def test_flags_become_options(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one\n\n two \n")
    options = parsed(
        *("--host", "0.0.0.0", "--port", "80", "--api-key", "three", "--api-key-file", str(keys), "--allow-host", "a"),
        *("--allow-host", "b", "--max-body", "1MiB", "--drain-seconds", "2.5", "--image-folder", str(tmp_path)),
        *("--allow-remote-images", "--max-tokens", "9", "--image-tokens", "4..8", "--served-model-name", "m"),
    )
    assert options.api_keys == ("three", "one", "two") and options.allow_hosts == ("a", "b") and options.port == 80
    assert options.max_body_bytes == 2**20 and options.drain_s == 2.5 and options.image_folder == tmp_path
    assert options.allow_remote_images and options.max_tokens == 9 and options.image_tokens == (4, 8)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"host": "0.0.0.0"}, "--api-key-file"),
        ({"host": "gpubox"}, "--no-api-key"),
        ({"host": "::"}, "no API key"),
        ({"api_keys": ("a",), "no_api_key": True}, "only one of them"),
        ({"api_keys": (" ",)}, "API key"),
        ({"port": 70000}, "port"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"body_timeout_s": 0.0}, "body_timeout_s"),
        ({"image_folder": Path("/nowhere/at/all")}, "not a folder"),
        ({"image_folder": Path("/" + 300 * "a")}, "not a folder"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        ServeOptions(**wrong)


@pytest.mark.parametrize(
    "fine", [{"host": "localhost"}, {"host": "::1"}, {"host": "127.0.0.2"}, {"host": "0.0.0.0", "no_api_key": True}]
)
def test_this_machine_needs_no_key_and_others_may_do_without_when_it_is_said(fine):
    assert ServeOptions(**fine)


def test_on_all_addresses_without_a_key_names_are_refused_but_numbers_are_not():
    with served(ScriptedEngine(), host="0.0.0.0", no_api_key=True, allow_hosts=("gpubox",)) as server:
        status = {
            host: server.get("/health", headers={"Host": host}).status_code
            for host in ("10.0.0.7:8000", "gpubox", "evil.example")
        }
        assert status == {"10.0.0.7:8000": 200, "gpubox": 200, "evil.example": 421}


def test_a_port_that_is_taken_is_said_before_anything_is_loaded():
    with served(ScriptedEngine()) as server:
        taken = ServeOptions(port=server.port)
        with pytest.raises(ConfigError, match="another --port"), serving.listening(taken):
            pass


def test_a_missing_package_is_said_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(cli_serve, "PACKAGES", ("fastapi", "a_package_that_is_not_there"))
    with pytest.raises(ConfigError, match=r"a_package_that_is_not_there.*pip install"):
        cli_serve.run_serve(arguments())


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "http://127.0.0.1:80 (this"), ("0.0.0.0", "http://127.0.0.1:80/v1"), ("::", "http://[::1]:80/v1")],
)
def test_the_first_line_says_where_and_how(host, address):
    assert address in serving.welcome(ServeOptions(host=host, api_keys=("k",)), host, 80)
    assert "Bearer" in serving.welcome(ServeOptions(host=host, api_keys=("k",)), host, 80)
