"""The Anthropic API's door, held by the vendor's own client against a real server on the demo model that knows tools."""

import base64
import json

import jsonschema
import pytest
from served import PATIENCE_S, served
from test_tools import BOTH, DEMO, HELLO, WEATHER, engine, folder  # noqa: F401  # fixtures

SCHEMA = WEATHER["function"]["parameters"]
TOOLS = [
    {"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA},
    {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
PICTURE = base64.b64encode(sorted((DEMO.parent / "images").glob("*.png"))[0].read_bytes()).decode()
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}


@pytest.fixture(scope="module")
def server(engine):  # noqa: F811
    """Without reuse: questions are asked twice, and a prompt's last token by itself can have other bits than in its prompt."""
    with served(engine, api_keys=("secret",), no_reuse=True) as server:
        yield server


@pytest.fixture(scope="module")
def anthropic():
    """Imported by the worker that has these tests: its thousand modules take seconds."""
    import anthropic

    return anthropic


@pytest.fixture(scope="module")
def client(server, anthropic):
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def ask(client, messages=HELLO, **given):
    extra = {"temperature": 0, **given.pop("extra_body", {})}  # newer clients leave sampling to the body
    return client.messages.create(
        **{"model": "tool-model", "messages": messages, "max_tokens": 100, "extra_body": extra, **given}
    )


def streamed(client, messages=HELLO, **given):
    usual = {"model": "tool-model", "messages": messages, "max_tokens": 100, "extra_body": {"temperature": 0}}
    with client.messages.stream(**{**usual, **given}) as stream:
        kinds = [event.type for event in stream]
        return kinds, stream.get_final_message()


def told(message) -> list:
    return [block.model_dump(exclude={"id"}) for block in message.content]


@pytest.mark.parametrize("talk", [HELLO, [{"role": "user", "content": [IMAGE, {"type": "text", "text": "What is it?"}]}]])
def test_text_is_the_same_as_through_the_other_door_whole_and_streamed(client, server, talk):
    given = dict(system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}], max_tokens=12)
    whole = ask(client, talk, metadata={"user_id": "me"}, **given)
    kinds, message = streamed(client, talk, **given)
    assert told(whole) == told(message) and whole.stop_reason == message.stop_reason in ("end_turn", "max_tokens")
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    used = [one.usage.input_tokens + one.usage.cache_read_input_tokens for one in (whole, message)]
    assert used[0] == used[1] and whole.usage.output_tokens == message.usage.output_tokens
    counted = client.messages.count_tokens(model="tool-model", messages=talk, system="Be short.")
    assert counted.input_tokens == used[0]
    pictures = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
    parts = [pictures, {"type": "text", "text": "What is it?"}] if talk is not HELLO else "Hello!"
    other = {"role": "system", "content": "Be short."}, {"role": "user", "content": parts}
    body = {"messages": other, "temperature": 0, "max_tokens": 12}
    said = server.post(body, headers={"x-api-key": "secret"}).json()["choices"][0]["message"]["content"]
    assert whole.content[0].text == said


@pytest.mark.budget(5)
def test_tools_are_called_and_answered_with_a_picture(client):
    given = dict(tools=TOOLS, tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True})
    whole, (kinds, message) = ask(client, **given), streamed(client, **given)
    (call,) = whole.content
    assert whole.stop_reason == message.stop_reason == "tool_use" and call.name == "get_weather"
    jsonschema.validate(call.input, SCHEMA)
    assert told(whole) == told(message) and "input_json" in kinds
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}, IMAGE]}
    assistant = {"role": "assistant", "content": [block.model_dump() for block in whole.content]}
    talk = [*HELLO, assistant, {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]
    assert ask(client, talk, tools=TOOLS, max_tokens=5).content
    failed = {**result, "content": "no net", "is_error": True}
    assert ask(client, [*HELLO, assistant, {"role": "user", "content": [failed]}], tools=TOOLS, max_tokens=5).content
    assert ask(client, tools=TOOLS, tool_choice={"type": "any"}, max_tokens=100).content
    assert ask(client, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=5).stop_reason != "tool_use"


def test_thinking_is_a_block_of_its_own(client):
    given = dict(thinking={"type": "enabled", "budget_tokens": 4}, max_tokens=30)
    whole, (_, message) = ask(client, **given), streamed(client, **given)
    assert [block.type for block in whole.content] == ["thinking", "text"] and told(whole) == told(message)
    talk = [*HELLO, {"role": "assistant", "content": told(whole)}, HELLO[0]]
    assert ask(client, talk, thinking={"type": "disabled"}, max_tokens=3).content[0].type == "text"


def test_a_stop_sequence_and_a_schema_are_told(client):
    text = ask(client, max_tokens=12).content[0].text
    stop = text.split()[1]
    found = ask(client, max_tokens=12, stop_sequences=[stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop) and stop not in found.content[0].text
    schema = {"enum": ["red", "blue"]}
    config = {"format": {"type": "json_schema", "schema": schema}}
    answer = ask(client, extra_body={"output_config": config}).content[0].text
    jsonschema.validate(json.loads(answer), schema)


@pytest.mark.parametrize(
    ("given", "kind", "named"),
    [
        (dict(model="other"), "NotFoundError", "no model of this name"),
        (dict(messages=[]), "BadRequestError", "messages"),
        (dict(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "BadRequestError", "tools"),
        (dict(extra_body={"mcp_servers": []}), "BadRequestError", "mcp_servers"),
        (dict(extra_body={"max_tokens": 0}), "BadRequestError", "max_tokens"),
        (
            dict(messages=[{"role": "user", "content": [{"type": "document", "source": {}}]}]),
            "BadRequestError",
            "messages",
        ),
        (
            dict(messages=[{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "now", "input": {}}]}]),
            "BadRequestError",
            "does not belong to the role user",
        ),
        (
            dict(tools=TOOLS, tool_choice={"type": "tool", "name": "later"}),
            "BadRequestError",
            "there is no such tool",
        ),
    ],
)
def test_what_cannot_be_has_the_vendors_form(client, anthropic, given, kind, named):
    with pytest.raises(getattr(anthropic, kind), match=named) as refused:
        ask(client, **given)
    assert refused.value.body["type"] == "error" and refused.value.body["error"]["message"]


def test_a_wrong_key_and_an_unknown_address_have_it_too(server, anthropic):
    with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0, timeout=PATIENCE_S) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            ask(stranger)
        assert refused.value.body["error"]["type"] == "authentication_error"
    lost = server.get("/v1/messages/nowhere", headers={"x-api-key": "secret"})
    assert lost.status_code == 404 and lost.json()["error"]["type"] == "not_found_error"
