"""Clients as people install them, driven end to end against a real server: `make clients` installs them beside the environment,
`make chat-page` Open WebUI, which is large.

The engine is scripted: what counts here is that the client understands our answers, and the server what the client sends. What a
model calls is in test_tools.py.
"""

import base64
import json
import os
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from scripted_engine import ScriptedEngine
from served import PATIENCE_S, served
from test_browser import CHROMIUM, FLAGS, WAIT_MS

from vismoe.models.inputs.responses import Reasoning
from vismoe.models.inputs.tools import ToolCall

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ROOT / ".venv" / "clients"
PICTURE = ROOT / "assets" / "images" / "demo.png"
CHAT_PAGE = ROOT / ".venv" / "open-webui"
installed = pytest.mark.skipif(not (CLIENTS / ".done").exists(), reason="the clients are not installed: make clients")
chat_page = pytest.mark.skipif(not (CHAT_PAGE / ".done").exists(), reason="Open WebUI is not installed: make chat-page")


@pytest.fixture
def server():
    engine = ScriptedEngine()
    with served(engine, served_model_name="tool-model") as server:
        server.engine = engine
        yield server


def run(server, folder, *command, **more) -> str:
    """What a client's command prints, with our server as what it knows."""
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), "unused")
    home = {"HOME": str(folder), "LLM_USER_PATH": str(folder), "XDG_CONFIG_HOME": str(folder), "MSWEA_CONFIGURED": "true"}
    given = {"PATH": os.environ["PATH"], "OPENAI_BASE_URL": f"{server.url}/v1", "MSWEA_COST_TRACKING": "ignore_errors"}
    given |= {"MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "true"}
    done = subprocess.run(
        [CLIENTS / "bin" / command[0], *command[1:]], env={**keys, **home, **given, **more}, cwd=folder, capture_output=True,
        text=True, timeout=10 * PATIENCE_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


def call(name: str, number: int = 1, **arguments) -> ToolCall:
    return ToolCall(name, json.dumps(arguments), f"call_{number}")


def conversation(server, place: int = -1) -> list:
    """(role, its text) of what the engine was asked."""
    messages, _ = server.engine.calls[place]
    return [(message["role"], "".join(part.get("text", "<image>") for part in message["content"])) for message in messages]


@installed
@pytest.mark.parametrize(
    ("model", "door", "base"),
    [
        ("openai/tool-model", "litellm", "/v1"),
        ("openai/tool-model", "litellm_response", "/v1"),
        ("anthropic/tool-model", "litellm", ""),
    ],
    ids=["chat", "responses", "messages"],
)
def test_an_agent_of_the_command_line_works_through_every_door(server, tmp_path, model, door, base):
    server.engine.script = [
        [Reasoning("Look first."), "I look.", call("bash", 1, command="printf hello > made.txt; cat made.txt")],
        ["Done.", call("bash", 2, command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")],
    ]
    settings = [f"model.model_kwargs.api_base={server.url}{base}", f"model.model_class={door}", "agent.step_limit=4"]
    options = [word for setting in settings for word in ("-c", setting)]
    run(server, tmp_path, "mini", "-y", "--exit-immediately", "-m", model, "-t", "Make a file.", "-c", "mini.yaml", *options)
    assert (tmp_path / "made.txt").read_text() == "hello"
    assert len(server.engine.calls) == 2
    *_, (asked, _), (answered, seen) = conversation(server)
    assert (asked, answered) == ("assistant", "tool") and "hello" in seen
    assistant = server.engine.calls[-1][0][-2]
    assert [one["function"]["name"] for one in assistant["tool_calls"]] == ["bash"]


AGENT = """
import asyncio
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
kind = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[__import__("sys").argv[1]]


@function_tool
def weather(city: str, days: int) -> str:
    "The weather of a city."
    return f"{days} days of rain in {city}"


async def main():
    model = kind(model="tool-model", openai_client=AsyncOpenAI())
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, include_usage=True)
    agent = Agent(name="one", instructions="Be short.", model=model, tools=[weather], model_settings=settings)
    result = await Runner.run(agent, "How is the weather?")
    print(result.final_output, result.context_wrapper.usage.output_tokens)
    streamed = Runner.run_streamed(agent, "And now?")
    kinds = [event.type async for event in streamed.stream_events()]
    print(streamed.final_output, len(kinds) > 3)


asyncio.run(main())
"""


@installed
@pytest.mark.parametrize("door", ["chat", "responses"])
def test_an_agent_of_a_python_library_calls_a_function_whole_and_streamed(server, tmp_path, door):
    server.engine.script = [[call("weather", city="Berlin", days=2)], ["Wet."]] * 2
    (tmp_path / "agent.py").write_text(AGENT)
    said = run(server, tmp_path, "python", "agent.py", door)
    assert said.splitlines() == ["Wet. 10", "Wet. True"]  # 5 tokens each, as the script's figures say
    assert len(server.engine.calls) == 4 and conversation(server)[-1] == ("tool", "2 days of rain in Berlin")
    assert conversation(server)[0] == ("system", "Be short.")


@installed
def test_a_chat_streams_answers_about_pictures_goes_on_and_calls_functions(server, tmp_path):
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: tool-model\n  api_base: {server.url}/v1\n  vision: true\n  supports_tools: true\n"
        "  supports_schema: true\n"
    )
    server.engine.script = [["A ", "train."], ["Red."], [call("upper", text="hi")], ["HI."], ['{"colour": "red"}']]
    assert run(server, tmp_path, "llm", "-m", "ours", "What is it?", "-a", str(PICTURE)) == "A train.\n"
    assert run(server, tmp_path, "llm", "-c", "And its colour?") == "Red.\n"
    assert conversation(server) == [("user", "What is it?<image>"), ("assistant", "A train."), ("user", "And its colour?")]
    functions = "def upper(text: str) -> str:\n    'Uppercase.'\n    return text.upper()"
    assert run(server, tmp_path, "llm", "-m", "ours", "--functions", functions, "Shout hi") == "HI.\n"
    assert conversation(server)[-1] == ("tool", "HI")
    assert json.loads(run(server, tmp_path, "llm", "-m", "ours", "--schema", "colour str", "Which?")) == {"colour": "red"}
    asked = json.loads(server.engine.calls[-1][1]["json_schema"])
    assert asked["properties"] == {"colour": {"type": "string"}}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Open WebUI, connected to our server, without accounts and without the network."""
    engine, folder = ScriptedEngine(), tmp_path_factory.mktemp("open-webui")
    with served(engine, served_model_name="tool-model") as server, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        given = dict(
            PATH=os.environ["PATH"], HOME=str(folder), DATA_DIR=str(folder), WEBUI_AUTH="False", WEBUI_SECRET_KEY="unused",
            OPENAI_API_BASE_URL=f"{server.url}/v1", OPENAI_API_KEY="unused", ENABLE_OLLAMA_API="false", OFFLINE_MODE="true",
            HF_HUB_OFFLINE="1", RAG_EMBEDDING_ENGINE="openai", RAG_EMBEDDING_MODEL_AUTO_UPDATE="false", OMP_NUM_THREADS="1",
            ENABLE_TITLE_GENERATION="false", ENABLE_TAGS_GENERATION="false", ENABLE_FOLLOW_UP_GENERATION="false",
            ENABLE_VERSION_UPDATE_CHECK="false", BYPASS_MODEL_ACCESS_CONTROL="true",
        )  # fmt: skip
        with (folder / "log").open("w") as log:
            command = [CHAT_PAGE / "bin" / "open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)]
            process = subprocess.Popen(command, env=given, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10 * PATIENCE_S, trust_env=False) as http:
                until_s = time.monotonic() + 15 * PATIENCE_S  # it makes a database first
                while process.poll() is None and time.monotonic() < until_s:
                    try:
                        if http.get("/health").status_code == 200:
                            break
                    except httpx.TransportError:
                        time.sleep(0.5)
                signed = http.post("/api/v1/auths/signin", json={"email": "", "password": ""})
                assert signed.status_code == 200, (folder / "log").read_text()[-3000:]
                http.headers["Authorization"] = f"Bearer {signed.json()['token']}"
                http.engine = engine
                yield http
        finally:
            process.terminate()
            process.wait(2 * PATIENCE_S)


@chat_page
def test_a_chat_page_passes_models_pictures_and_streams_on(page):
    assert [model["id"] for model in page.get("/api/models").json()["data"]] == ["tool-model"]
    picture = "data:image/png;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": picture}}]
    body = {"model": "tool-model", "messages": [{"role": "user", "content": parts}]}
    page.engine.script = [["A ", "train."]] * 2
    whole = page.post("/api/chat/completions", json=body)
    assert whole.json()["choices"][0]["message"]["content"] == "A train.", whole.text
    with page.stream("POST", "/api/chat/completions", json={**body, "stream": True}) as streamed:
        events = [json.loads(line[6:]) for line in streamed.iter_lines() if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert [delta for delta in deltas if delta] == ["A ", "train."]
    for messages, _ in page.engine.calls[-2:]:
        assert [part["type"] for part in messages[0]["content"]] == ["text", "image"]


@chat_page
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (Debian, Ubuntu: sudo apt-get install chromium)")
def test_a_person_asks_about_a_picture_in_the_chat_page(page):
    page.engine.script = [[Reasoning("Rails."), "A ", "**red**", " train."], ["It is ", "red."]]
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        tab = browser.new_page()
        tab.set_default_timeout(WAIT_MS)
        tab.goto(str(page.base_url))
        box = tab.locator("#chat-input")
        box.wait_for()
        tab.keyboard.press("Escape")  # what is new in this release
        tab.locator("input[type=file]").first.set_input_files(PICTURE)
        tab.locator("img[src^='data:image'], img[src*='/files/']").first.wait_for()
        for question, answer in (("What is in the picture?", "A red train."), ("Its colour?", "It is red.")):
            box.click()
            tab.keyboard.type(question)
            tab.keyboard.press("Enter")
            tab.get_by_text(answer).first.wait_for()
        browser.close()
    (first, _), (second, _) = page.engine.calls[-2:]
    assert {part["type"] for part in first[-1]["content"]} == {"image", "text"}
    assert [message["role"] for message in second][-3:] == ["user", "assistant", "user"]
