"""The server on the demo model: what the `openai` client reads is what the engine answers by itself, and nothing stays behind."""

import base64
import os
import re
import signal
import subprocess
import sys
import threading
from typing import Literal

import openai
import pydantic
import pytest
from served import served, wait_until

import vismoe
from vismoe.cli import main as cli
from vismoe.engine.engine import demo_model

MODEL = "demo-model"
PICTURES = sorted((demo_model().parent / "images").glob("*.png"))
QUESTION = "What is in the picture?"
SHORT = "Is there a dog?"  # where the length of the answer proves nothing
PATIENCE_S = 60


def asking(*pictures, question: str = QUESTION) -> list[dict]:
    uris = ["data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode() for picture in pictures]
    images = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
    return [{"role": "user", "content": [{"type": "text", "text": question}, *images]}]


def directly(engine, *pictures, question: str = QUESTION, **options):
    images = [{"type": "image", "image": str(picture)} for picture in pictures]
    reply = engine.chat([{"role": "user", "content": [{"type": "text", "text": question}, *images]}], **options)
    list(reply)
    return reply.figures


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    """The demo model's experts in int4."""
    folder = str(tmp_path_factory.mktemp("store"))
    assert cli.main(["pack", "--formats", "int4", "--out", folder]) == 0
    return folder


@pytest.fixture(scope="module")
def server(store):
    with vismoe.load(memory="35%", context=1024, image_cache="16MiB", store=store) as engine, served(engine) as server:
        server.engine = engine
        yield server


def ask(server, messages, **options):
    return server.client().chat.completions.create(**{"model": MODEL, "messages": messages, "temperature": 0} | options)


@pytest.mark.parametrize("images", [1, 2])
def test_the_answer_is_the_engines_own(server, images):
    figures = directly(server.engine, *PICTURES[:images], question=SHORT)
    answer = ask(server, asking(*PICTURES[:images], question=SHORT))
    assert answer.choices[0].message.content == figures.answer
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == figures.prompt_tokens and answer.usage.completion_tokens == figures.answer_tokens
    assert answer.usage.prompt_tokens_details.image_tokens == answer.vismoe["visual_tokens"] == figures.visual_tokens > 0
    chunks = ask(server, asking(*PICTURES[:images], question=SHORT), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == figures.answer


def test_keep_takes_effect_and_the_answer_says_so(server):
    half = ask(server, asking(PICTURES[0], question=SHORT), extra_body={"vismoe": {"keep": 0.5, "selection": "uniform"}}).vismoe
    assert (half["keep"], half["selection"]) == (0.5, "uniform")
    assert half["kept_visual_tokens"] == pytest.approx(half["visual_tokens"] / 2, abs=1)
    whole = ask(server, asking(PICTURES[0], question=SHORT), extra_body={"vismoe": {"keep": 1.0}}).vismoe
    assert whole["kept_visual_tokens"] == whole["visual_tokens"] and whole["selection"] is None
    with pytest.raises(openai.BadRequestError, match="Input should be"):
        ask(server, asking(PICTURES[0], question=SHORT), extra_body={"vismoe": {"keep": 0.5, "selection": "best"}})


class Seen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["dog", "cat", "tree"]
    count: int = pydantic.Field(ge=0, le=20)


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_gets_the_object_that_it_asked_for(server, stream):
    """By the client's own helper, which makes the schema of a class and reads the answer as one."""
    how = dict(model=MODEL, messages=asking(PICTURES[0]), response_format=Seen, max_tokens=60)
    if stream:
        with server.client().chat.completions.stream(**how) as events:
            answer = events.get_final_completion()
    else:
        answer = server.client().chat.completions.parse(**how)
        assert answer.vismoe["grammar_seconds"] > 0
    assert isinstance(answer.choices[0].message.parsed, Seen)
    with pytest.raises(openai.BadRequestError, match="Invalid type: strin"):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
        ask(server, asking(PICTURES[0]), response_format=form, stream=stream)


def test_a_request_chooses_who_decides_formats_and_the_next_one_has_what_the_server_was_started_with(server):
    exact = ask(server, asking(PICTURES[0]), max_tokens=8)
    wish = {"policy": "importance", "formats": "16/4", "retention": 0.6}
    found = ask(server, asking(PICTURES[0]), max_tokens=8, extra_body={"vismoe": wish})
    assert found.choices[0].message.content  # in which formats it is computed depends on what was in memory
    assert (found.vismoe["policy"], found.vismoe["pair"], found.vismoe["retention"]) == ("importance", "raw/int4", 0.6)
    shares = found.vismoe["formats"]
    assert set(shares) == {"raw", "int4"} and sum(shares.values()) == pytest.approx(1) and 0 < shares["int4"] < 0.6
    *_, last = ask(
        server, asking(PICTURES[0]), max_tokens=8, stream=True, extra_body={"vismoe": {**wish, "policy": "hotness+importance"}}
    )
    assert last.vismoe["policy"] == "hotness+importance" and set(last.vismoe["formats"]) == {"raw", "int4"}
    again = ask(server, asking(PICTURES[0]), max_tokens=8)
    assert again.choices[0].message.content == exact.choices[0].message.content and again.vismoe["formats"] == {"raw": 1.0}
    counted = server.get("/metrics").text
    assert 'vismoe_expert_computations_total{format="int4",phase="prefill"}' in counted
    assert 'vismoe_experts_resident{format="raw"}' in counted
    server.engine.check_integrity()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wish", [{"policy": "importance", "formats": "8/4"}, {"policy": "hotness", "formats": "4/0"}])
def test_formats_that_cannot_be_are_refused_with_the_fix_and_change_nothing(server, stream, wish):
    refused = server.post({"messages": asking(), "stream": stream, "vismoe": wish})
    assert refused.status_code == 400 and "Fix: " in refused.json()["error"]["message"], refused.text
    assert str(vismoe.engine.engine.demo_model().parent) not in refused.text
    assert ask(server, asking()).vismoe["policy"] == "exact"


def test_clients_with_different_policies_wait_for_each_other_and_get_the_answers_of_their_own(server):
    skipping = {"policy": "importance", "formats": "16/0", "retention": 0.5}  # what is skipped depends on the request alone
    wishes = [{}, skipping, {"policy": "importance", "formats": "4/0"}]
    alone = [directly(server.engine, PICTURES[1], max_tokens=8, **wish).answer for wish in wishes]
    said = {}

    def client(number: int) -> None:
        answer = ask(server, asking(PICTURES[1]), max_tokens=8, extra_body={"vismoe": wishes[number % 3]})
        said[number] = answer.choices[0].message.content, answer.vismoe["pair"]

    threads = [threading.Thread(target=client, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    pairs = (None, "raw/skip", "int4/skip")
    assert said == {number: (alone[number % 3], pairs[number % 3]) for number in range(5)}


def test_a_later_turn_encodes_no_image_again_and_takes_over_what_was_computed(server):
    messages = asking(PICTURES[2], question=SHORT)
    first = ask(server, messages)
    second = ask(server, [*messages, first.choices[0].message, {"role": "user", "content": "How many are there?"}])
    assert second.vismoe["images"] == 1 and second.vismoe["encoded_images"] == 0
    assert second.usage.prompt_tokens_details.cached_tokens == second.vismoe["reused_tokens"] > first.usage.prompt_tokens / 2


def test_length_stop_and_seed(server):
    messages = asking(PICTURES[0], question=SHORT)
    whole = ask(server, messages).choices[0].message.content
    cut = ask(server, messages, max_tokens=2)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 2
    word = whole.split()[2]
    stopped = ask(server, messages, stop=[word])
    assert stopped.choices[0].message.content == whole[: whole.index(word)] and stopped.choices[0].finish_reason == "stop"
    assert ask(server, messages, temperature=None).choices[0].message.content == whole  # its generation config
    sampled = [ask(server, messages, temperature=2, seed=2**63 - 1, max_tokens=12) for _ in range(2)]
    assert len({answer.choices[0].message.content for answer in sampled}) == 1


def test_log_probabilities_whole_and_streamed_are_the_engines_own(server):
    asked = dict(messages=asking(PICTURES[0]), logprobs=True, top_logprobs=3, frequency_penalty=0.5, seed=1, temperature=1.5)
    image = {"type": "image", "image": str(PICTURES[0])}
    reply = server.engine.chat(
        [{"role": "user", "content": [{"type": "text", "text": QUESTION}, image]}],
        **dict(logprobs=3, frequency_penalty=0.5, seed=1, sample=True, temperature=1.5, max_tokens=30),
    )
    text = "".join(reply)
    answer = ask(server, max_tokens=30, extra_body={"vismoe": {"reuse": False}}, **asked).choices[0]
    assert answer.message.content == text == b"".join(bytes(entry.bytes) for entry in answer.logprobs.content).decode()
    mine = reply.logprobs[: len(answer.logprobs.content)]
    assert [entry.logprob for entry in answer.logprobs.content] == [entry.logprob for entry in mine]
    assert [[one.token for one in entry.top_logprobs] for entry in answer.logprobs.content] == [
        [one.text for one in entry.top] for entry in mine
    ]
    chunks = list(ask(server, max_tokens=30, stream=True, extra_body={"vismoe": {"reuse": False}}, **asked))
    logprobs = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].delta.content]
    assert [entry for each in logprobs for entry in each.content] == answer.logprobs.content
    old = dict(model=MODEL, prompt="What is", max_tokens=6, temperature=0, logprobs=2)
    found = server.client().completions.create(**old).choices[0]
    assert "".join(found.logprobs.tokens) == found.text and {2, 3} >= set(map(len, found.logprobs.top_logprobs))
    for place, token in zip(found.logprobs.text_offset, found.logprobs.tokens, strict=True):
        assert found.text[place:].startswith(token)


def test_completions_go_on_from_raw_text(server):
    answer = server.client().completions.create(model=MODEL, prompt="What is", temperature=0, max_tokens=4)
    assert answer.usage.completion_tokens <= 4 and answer.choices[0].text


def test_a_conversation_that_is_too_long_says_so(server):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server, asking(question="long " * 3000))
    assert refused.value.code == "context_length_exceeded"


def test_metrics_count(server):
    ask(server, asking(PICTURES[0], question=SHORT))
    found = dict(re.findall(r'^(vismoe_expert_\w+_total)\{phase="decode"\} (\S+)$', server.get("/metrics").text, re.M))
    assert float(found["vismoe_expert_hits_total"]) > 0 and float(found["vismoe_expert_layer_steps_total"]) > 0


def test_clients_that_come_and_go_leave_nothing_behind(server):
    alone = ask(server, asking(PICTURES[1], question=SHORT)).choices[0].message.content
    said = {}

    def client(number: int) -> None:
        stream = ask(server, asking(PICTURES[1], question=SHORT), stream=True)
        for place, chunk in enumerate(stream):
            said[number] = said.get(number, "") + (chunk.choices[0].delta.content or "")
            if number % 2 and place == number // 2:
                stream.close()
                break

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    wait_until(lambda: not len(server.app.state.callers))
    wait_until(lambda: server.engine.load.running == server.engine.load.waiting == 0)
    assert [said[number] for number in (0, 2, 4)] == [alone] * 3
    server.engine.check_integrity()


@pytest.mark.budget(6)
def test_the_command_serves_and_ends_with_success():
    command = [sys.executable, "-m", "vismoe.cli", "serve", "--port", "0", "--memory", "50%", "--served-model-name", "mine"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            address = re.search(r"http://\S+", process.stdout.readline())[0]
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused")
            assert client.chat.completions.create(model="mine", messages=[{"role": "user", "content": "Hello"}]).choices
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()
