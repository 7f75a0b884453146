"""The responses of the OpenAI API, held by the vendor's own client against a real server on the demo model that knows tools."""

import base64
import json

import jsonschema
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel
from served import served
from test_tools import DEMO, WEATHER, engine, folder  # noqa: F401  # fixtures

FUNCTION = {"type": "function", "strict": True, **WEATHER["function"]}
TOOLS = [FUNCTION, {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}, "strict": False}]
PICTURE = base64.b64encode(sorted((DEMO.parent / "images").glob("*.png"))[0].read_bytes()).decode()
IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}", "detail": "auto"}


@pytest.fixture(scope="module")
def server(engine):  # noqa: F811
    with served(engine) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client().responses


def ask(client, conversation="Hello!", **given) -> Response:
    usual = {"model": "tool-model", "temperature": 0, "max_output_tokens": 100}
    return client.create(input=conversation, **{**usual, **given})


def streamed(client, conversation="Hello!", **given):
    usual = {"model": "tool-model", "temperature": 0, "max_output_tokens": 100}
    with client.stream(input=conversation, **{**usual, **given}) as stream:
        events = list(stream)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        return [event.type.removeprefix("response.") for event in events], events[-1].response


def told(response) -> list:
    return [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}, exclude_none=True) for item in response.output]


@pytest.mark.parametrize(
    "conversation", ["Hello!", [{"role": "user", "content": [IMAGE, {"type": "input_text", "text": "What is it?"}]}]]
)
def test_text_is_the_same_as_through_the_other_door_whole_and_streamed(client, server, conversation):
    given = dict(instructions="Be short.", max_output_tokens=12, metadata={"whose": "mine"}, store=False)
    whole, (kinds, response) = ask(client, conversation, **given), streamed(client, conversation, **given)
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:-1] == ["output_text.done", "content_part.done", "output_item.done"] and kinds[-1] == whole.status
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert told(whole) == told(response) and whole.usage.output_tokens == response.usage.output_tokens
    assert whole.metadata == {"whose": "mine"} and whole.instructions == "Be short." and not whole.previous_response_id
    counted = client.input_tokens.count(model="tool-model", input=conversation, instructions="Be short.")
    assert counted.input_tokens == whole.usage.input_tokens == response.usage.input_tokens
    pictures = {"type": "image_url", "image_url": {"url": IMAGE["image_url"]}}
    parts = conversation if isinstance(conversation, str) else [pictures, {"type": "text", "text": "What is it?"}]
    other = {"role": "system", "content": "Be short."}, {"role": "user", "content": parts}
    said = server.post({"messages": other, "temperature": 0, "max_tokens": 12}).json()["choices"][0]
    assert whole.output_text == said["message"]["content"]
    assert (whole.status, said["finish_reason"]) in {("completed", "stop"), ("incomplete", "length")}
    assert (whole.incomplete_details is not None) == (whole.status == "incomplete")


@pytest.mark.budget(5)
def test_tools_are_called_and_answered_with_a_picture(client):
    given = dict(tools=TOOLS, tool_choice={"type": "function", "name": "get_weather"}, parallel_tool_calls=False)
    whole, (kinds, response) = ask(client, **given), streamed(client, **given)
    (call,) = whole.output
    assert (call.type, call.name, whole.status) == ("function_call", "get_weather", "completed")
    jsonschema.validate(json.loads(call.arguments), FUNCTION["parameters"])
    assert told(whole) == told(response)
    assert kinds[2] == "output_item.added" and kinds[-3:-1] == ["function_call_arguments.done", "output_item.done"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert whole.tools[0].name == "get_weather" and whole.tool_choice.name == "get_weather" and not whole.parallel_tool_calls
    output = [{"type": "input_text", "text": "rain"}, IMAGE]
    talk = [{"role": "user", "content": "Hello!"}, *whole.output]  # as the client's own objects
    talk.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    talk.append({"type": None, "role": "user", "content": [IMAGE | {"detail": "original"}]})
    assert ask(client, [*talk, {"role": "user", "content": "So?"}], tools=TOOLS, max_output_tokens=5).output
    assert ask(client, tools=TOOLS, tool_choice="required").output[0].type == "function_call"
    assert ask(client, tools=TOOLS, tool_choice="none", max_output_tokens=5).output[0].type == "message"


def test_reasoning_is_an_item_of_its_own_and_counted(client):
    given = dict(reasoning={"effort": "xhigh", "summary": "auto"}, extra_body={"vismoe": {"reasoning_tokens": 4}})
    given |= dict(max_output_tokens=30, include=["reasoning.encrypted_content"])
    whole, (kinds, response) = ask(client, **given), streamed(client, **given)
    assert [item.type for item in whole.output] == ["reasoning", "message"] and told(whole) == told(response)
    assert {"reasoning_text.delta", "reasoning_text.done"} <= set(kinds)
    thought = whole.usage.output_tokens_details.reasoning_tokens
    assert 0 < thought < whole.usage.output_tokens and thought <= 4
    talk = [{"role": "user", "content": "Hello!"}, *whole.output, {"role": "user", "content": "And?"}]
    again = ask(client, talk, reasoning={"effort": "none"}, max_output_tokens=3)
    assert [item.type for item in again.output] == ["message"] and not again.usage.output_tokens_details.reasoning_tokens


def test_an_answer_follows_its_schema_and_brings_log_probabilities(client):
    class Colour(BaseModel):
        colour: bool

    parsed = client.parse(model="tool-model", input="Hello!", text_format=Colour, max_output_tokens=40, temperature=0)
    assert isinstance(parsed.output_parsed, Colour)
    whole, (_, response) = (
        asked(client, max_output_tokens=5, top_logprobs=2, include=["message.output_text.logprobs"]) for asked in (ask, streamed)
    )
    logprobs = whole.output[0].content[0].logprobs
    assert "".join(bytes(token.bytes).decode() for token in logprobs) == whole.output_text and len(logprobs[0].top_logprobs) == 2
    assert told(whole) == told(response)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (dict(previous_response_id="resp_1"), "nothing is stored"),
        (dict(store=True), "nothing is stored"),
        (dict(background=True), "background"),
        (dict(truncation="auto"), "too long is refused"),
        (dict(tools=[{"type": "web_search"}]), r"tools\[0\].type"),
        (dict(tools=TOOLS, tool_choice={"type": "function", "name": "later"}), "there is no such tool"),
        (dict(text={"verbosity": "high"}), "verbosity"),
        (dict(extra_body={"max_output_tokens": 0}), "max_output_tokens"),
        (dict(extra_body={"something": 1}), "something"),
        (dict(conversation=[{"type": "item_reference", "id": "x"}]), "item_reference"),
        (dict(conversation=[{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]), r"content\[0\]\.file_id"),
        (dict(conversation=[{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]), "file_id"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client, given, named):
    with pytest.raises(openai.BadRequestError, match=named) as refused:
        ask(client, **given)
    assert refused.value.type == "invalid_request_error"


def test_prompts_are_answered_side_by_side_and_may_be_ids(server):
    texts = ["There is a", "What is this thing"]
    ids = [server.post({"prompt": text}, "/tokenize").json()["tokens"] for text in texts]
    alone = [server.client().completions.create(model="tool-model", prompt=text, max_tokens=6, temperature=0) for text in texts]
    for prompt in (texts, ids):
        both = server.client().completions.create(model="tool-model", prompt=prompt, max_tokens=6, temperature=0)
        assert [choice.text for choice in both.choices] == [answer.choices[0].text for answer in alone]
        assert [choice.index for choice in both.choices] == [0, 1]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert getattr(both.usage, name) == sum(getattr(answer.usage, name) for answer in alone)
    given = dict(model="tool-model", prompt=texts, max_tokens=4, n=2, seed=5, temperature=1, echo=True)
    four = server.client().completions.create(**given)
    chunks, said = server.client().completions.create(**given, stream=True), [""] * 4
    for chunk in chunks:
        for choice in chunk.choices:
            said[choice.index] += choice.text
    assert [choice.text for choice in four.choices] == said
    assert [text.startswith(texts[place // 2]) for place, text in enumerate(said)] == [True] * 4
    one = server.client().completions.create(**{**given, "prompt": ids[1], "echo": False})
    assert [texts[1] + choice.text for choice in one.choices] == said[2:], "seeds do not depend on the other prompts"


def test_tokens_are_those_of_the_tokenizer(server, engine):  # noqa: F811
    tokenizer = engine.prompts.tokenizer
    told = server.post({"prompt": "What is this?"}, "/tokenize").json()
    assert told["tokens"] == tokenizer("What is this?")["input_ids"] and told["count"] == len(told["tokens"])
    assert told["max_model_len"] == engine.plan.context
    messages = [{"role": "user", "content": "What is this?"}]
    whole = server.post({"messages": messages, "max_tokens": 1}).json()
    usual = {"add_generation_prompt": True, "add_special_tokens": False, "continue_final_message": False}
    told = server.post({"messages": messages, **usual}, "/tokenize").json()
    back = [*messages, {"role": "assistant", "content": "A dog.", "refusal": None, "annotations": []}, messages[0]]
    assert server.post({"messages": back}, "/tokenize").status_code == 200
    assert told["count"] == whole["usage"]["prompt_tokens"] and "What is this?" in tokenizer.decode(told["tokens"])


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "Hi", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}], "add_special_tokens": True}, "add_special_tokens"),
        ("/v1/responses", {"input": "Hi", "metadata": {"a": "x" * 513}}, "metadata"),
        ("/v1/completions", {"prompt": ["Hi"] * 128}, "128 answers"),
        ("/tokenize", {"prompt": ["Hi", "you"]}, "prompt"),
        ("/v1/completions", {"prompt": [[5, 10**6]]}, "the token 1000000"),
        ("/v1/completions", {"prompt": [5, -1]}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": ["Hi", [1, 2]], "echo": True}, "echo with ids"),
        ("/v1/completions", {"prompt": "Hi", "echo": True, "logprobs": 1}, "echo with logprobs"),
    ],
)
def test_prompts_that_cannot_be_are_refused(server, path, body, named):
    refused = server.post(body, path)
    assert refused.status_code == 400 and named in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (dict(max_output_tokens=0), "max_output_tokens"),
        (dict(input=[{"role": "user", "content": [{"type": "input_text", "text": 5}]}]), "input[0].content[0].text"),
        (dict(input=[{"role": "user", "content": [IMAGE | {"image_url": 5}]}]), "input[0].content[0].image_url"),
        (dict(input=[{"role": "user", "content": [IMAGE | {"image_url": "data:image/png;base64,AAAA"}]}]), "input"),
        (
            dict(
                instructions="Be short.",
                input=[
                    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
                    {"role": "assistant", "content": "Yes?"},
                    {"role": "user", "content": [{"type": "input_text", "text": "So?"}, IMAGE | {"detail": "fine"}]},
                ],
            ),
            "input[2].content[1].detail",
        ),
        (dict(input=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [IMAGE]}]), "input[1]"),
        (dict(input="word " * 3000), "input"),
        (dict(input="word " * 300_000), "input"),
        (dict(tools=[TOOLS[0] | {"name": "a b"}]), "tools[0].name"),
        (dict(tools=TOOLS, tool_choice={"type": "function", "name": 5}), "tool_choice"),
        (dict(reasoning={"effort": "enormous"}), "reasoning.effort"),
        (dict(text={"format": {"type": "json_schema"}}), "text.format"),
        (dict(stop=["a"] * 9), "stop"),
    ],
    ids=[str(number) for number in range(13)],
)
def test_errors_name_the_fields_of_this_door(server, given, param):
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        answer = server.post({"input": "Hello!", **given}, path)
        if path == "/v1/responses" or answer.status_code != 200:
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == param, error
            assert "messages[" not in error["message"] and "max_tokens" not in error["message"]
