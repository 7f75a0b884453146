"""The clients of a soak, in a separate process.

`python -m vismoe.eval.studies.soak_clients URL --clients 32 --seconds 180 --seed 0`

Each client asks, asks again about the same image, streams or waits, hangs up early, and sends invalid requests, as its own random
numbers decide. The clients also check the server's answers: a good request must get an answer of the right form, a bad one a 4xx
in OpenAI's form. Half of the first questions that are greedy or have a seed ask for no reuse of earlier keys and values, so that
their answers may not depend on the others': when all clients are done, the same is asked once more, alone. Some questions go
through the other doors, whose answers may not differ either; some show a video, and some demand a call of a function. The last
line is one JSON object: counts, times and errors.
"""

import asyncio
import base64
import io
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from vismoe.eval.questions import KINDS, conversation
from vismoe.eval.report import study_parser
from vismoe.eval.scenes import compose

PATIENCE_S = 300  # for one answer; a longer wait means that the server hangs
SCENES = 12  # few, so that images repeat
MOST_TOKENS = 48
CANCELLED = 0.45  # share of the good requests; some of these are answered earlier
BAD = 0.1  # share of all requests
CHECKED = 0.5  # share of the first questions whose answers are compared with those of being alone, where they are repeatable
VIDEO_EVERY = 4  # of the conversations about a picture, one shows it as a video
CALLED = 0.3  # share of the questions before which a call is demanded
CALL_TOKENS = 200
GREETINGS = ("Hello!", "What can you see?", "Thanks.")
KINDS_OF_REQUESTS = ("answered", "cancelled", "refused", "sent away", "compared", "other doors", "with a video", "called")
SHOWN = 10  # most errors in the report


def as_response(chat: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(address, body) of the same request to /v1/responses."""
    turns = [{**turn, "content": [_content(part) for part in _parts(turn)]} for turn in chat["messages"]]
    taken = {name: chat[name] for name in ("model", "temperature", "top_p", "seed", "stop") if name in chat}
    return "/responses", {**taken, **chat["extra_body"], "input": turns, "max_output_tokens": chat["max_tokens"]}


def as_message(chat: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(address, body) of the same request to /v1/messages, which knows no seed."""
    turns = [{**turn, "content": [_block(part) for part in _parts(turn)]} for turn in chat["messages"]]
    taken = {name: chat[name] for name in ("model", "temperature", "top_p", "max_tokens") if name in chat}
    return "/messages", {**taken, **chat["extra_body"], "messages": turns, "stop_sequences": chat.get("stop")}


def tool_bodies(chat: dict[str, Any], tool: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Bodies that demand one call of a function, by address."""
    function = tool["function"]
    named, described = function["name"], {**function, "type": "function"}
    respond, message = as_response(chat)[1], as_message(chat)[1]
    whole = {**{name: value for name, value in chat.items() if name != "extra_body"}, **chat["extra_body"], "tools": [tool]}
    one: dict[str, Any] = {"parallel_tool_calls": False}
    of_message = {"name": named, "description": function["description"], "input_schema": function["parameters"]}
    return {
        "/chat/completions": {**whole, **one, "tool_choice": {"type": "function", "function": {"name": named}}},
        "/responses": {**respond, **one, "tools": [described], "tool_choice": {"type": "function", "name": named}},
        "/messages": {
            **message,
            "tools": [of_message],
            "tool_choice": {"type": "tool", "name": named, "disable_parallel_tool_use": True},
        },
    }


def called(address: str, answer: Any) -> list[tuple[str, str]]:
    """The calls in an answer: names, and arguments in JSON."""
    if address == "/responses":
        return [(item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    if address == "/messages":
        return [(block["name"], json.dumps(block["input"])) for block in answer["content"] if block["type"] == "tool_use"]
    calls = [call["function"] for call in answer["choices"][0]["message"].get("tool_calls") or ()]
    return [(call["name"], call["arguments"]) for call in calls]


def _parts(turn: dict[str, Any]) -> list[dict[str, Any]]:
    content = turn["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _content(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "input_text", "text": part["text"]}
    return {"type": "input_image", "image_url": part["image_url"]["url"]}


def _block(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    return {"type": "image", "source": {"type": "base64", "data": part["image_url"]["url"].partition(",")[2]}}


@dataclass(frozen=True)
class WholeAnswer:
    """A completed answer."""

    text: str
    finish: str  # stop or length

    def goes_on_as(self, whole: "WholeAnswer") -> bool:
        """Whether a longer answer to the same request begins like this; `whole` ended by itself or at more tokens."""
        return self == whole if self.finish == "stop" else whole.text.startswith(self.text.rstrip("\ufffd"))


@dataclass
class Told:
    """The outcome of the requests of all clients."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # of completed answers
    wrong: list[str] = field(default_factory=list)
    # by the request in JSON, without the length of its answer
    repeatable: dict[str, list[WholeAnswer]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        times = sorted(self.seconds) or [0.0]
        return {
            **{name: self.counts[name] for name in KINDS_OF_REQUESTS},
            "requests_alone": len(self.repeatable),
            "wrong": len(self.wrong),
            "first_wrong": self.wrong[:SHOWN],
            "median_s": times[len(times) // 2],
            "longest_s": times[-1],
        }


def talks(seed: int) -> list[list[dict[str, Any]]]:
    """Conversations of one to a few turns, with or without an image: only the user's messages."""
    made, kinds = [], sorted(KINDS)
    for number in range(SCENES):
        talk = conversation(kinds[number % len(kinds)], "held-out", 1000 * seed + number)
        turns: list[dict[str, Any]] = [{"role": "user", "content": turn.question} for turn in talk.turns]
        pictures: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": _uri(compose(scene))}} for scene in talk.scenes
        ]
        if pictures and number % VIDEO_EVERY == 0:
            pictures = [{"type": "video_url", "video_url": {"url": _clip(compose(talk.scenes[0]))}, "max_frames": 4}]
        turns[0]["content"] = [*pictures, {"type": "text", "text": turns[0]["content"]}]
        made.append(turns)
    return [*made, *([{"role": "user", "content": text}] for text in GREETINGS)]


def _uri(image: Any) -> str:
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    return "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()


def _clip(image: Any) -> str:
    """A video of one second, in which nothing moves."""
    import av

    encoded = io.BytesIO()
    with av.open(encoded, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height = image.width // 2 * 2, image.height // 2 * 2
        for frame in (*([av.VideoFrame.from_image(image)] * 8), None):
            for packet in stream.encode(frame):
                container.mux(packet)
    return "data:video/mp4;base64," + base64.b64encode(encoded.getvalue()).decode()


TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Counts what is in a picture.",
        "parameters": {
            "type": "object",
            "properties": {"kind": {"enum": ["dog", "cat", "tree"]}, "most": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["kind", "most"],
            "additionalProperties": False,
        },
    },
}

BAD_REQUESTS: tuple[dict[str, Any], ...] = (
    {"messages": []},
    {"messages": [{"role": "robot", "content": "hello"}]},
    {"messages": [{"role": "user", "content": "word " * 20_000}]},
    {"messages": [{"role": "user", "content": "hello"}], "temperature": -1},
    {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 0},
    {"messages": [{"role": "user", "content": "hello"}], "extra_body": {"vismoe": {"keep": 2}}},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]},
)


class Client:
    """One client, which does one thing after another until it is stopped."""

    def __init__(self, api: openai.AsyncOpenAI, model: str, rng: random.Random, conversations: list, told: Told):
        self._api, self._model, self._rng, self._talks, self._told = api, model, rng, conversations, told

    async def run(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            await self._something(self._bad if self._rng.random() < BAD else self._talk)

    async def _something(self, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await act()
        except openai.RateLimitError:
            self._told.counts["sent away"] += 1
            await asyncio.sleep(self._rng.random())
        except openai.APIError as error:
            self._told.wrong.append(f"{type(error).__name__}: {error}"[:300])

    async def _bad(self) -> None:
        try:
            await self._api.chat.completions.create(model=self._model, **self._rng.choice(BAD_REQUESTS))
        except openai.BadRequestError as error:
            if error.body and error.body.get("message"):  # type: ignore[attr-defined]  # the `error` object of the body
                self._told.counts["refused"] += 1
                return
        self._told.wrong.append("a bad request was not refused")

    async def _talk(self) -> None:
        """A conversation; it ends if this client hangs up."""
        messages: list[dict[str, Any]] = []
        for turn in self._rng.choice(self._talks)[: self._rng.randint(1, 3)]:
            messages.append(turn)
            sampling, own = self._sampling()
            if checked := not messages[1:] and "top_p" not in sampling and self._rng.random() < CHECKED:
                own["reuse"] = False
            options = {"messages": list(messages), "model": self._model, **sampling, "extra_body": {"vismoe": own}}
            if any(part["type"] == "video_url" for turn in messages for part in _parts(turn)):
                self._told.counts["with a video"] += 1
                doors = [self._stream, self._wait]  # the other doors take no videos
            else:
                doors = [self._stream, self._stream, self._wait, self._elsewhere]
                if self._rng.random() < CALLED:
                    await self._call({**options, "max_tokens": CALL_TOKENS})
            ask = self._rng.choice(doors)
            said = await ask({**options, "max_tokens": self._rng.randint(1, MOST_TOKENS)})
            if said is None:
                self._told.counts["cancelled"] += 1
                return
            self._told.counts["answered"] += 1
            if checked:
                self._told.repeatable.setdefault(json.dumps(options), []).append(said)
            messages.append({"role": "assistant", "content": said.text})

    def _sampling(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(how tokens are chosen, fields of `vismoe`)."""
        chosen: dict[str, Any] = self._rng.choice(
            ({"temperature": 0}, {"temperature": 1.0, "seed": 1}, {"top_p": 0.9}, {"stop": ["."], "temperature": 0})
        )
        keep = self._rng.choice((None, 1.0, 0.5))
        return chosen, {"keep": keep} if keep else {}

    async def alone(self) -> None:
        """Ask once more for what is repeatable, as the only client, and compare."""
        for request, answers in self._told.repeatable.items():
            whole = await self._wait({**json.loads(request), "max_tokens": MOST_TOKENS}, alone=True)
            self._told.counts["compared"] += len(answers)
            for said in answers:
                if whole is None or not said.goes_on_as(whole):
                    self._told.wrong.append(f"{said} beside others, {whole} alone"[:300])

    async def _wait(self, options: dict[str, Any], alone: bool = False) -> WholeAnswer | None:
        """A whole answer, or None if this client hung up, which it does not when it is alone."""
        began_s = time.monotonic()
        patience_s = self._rng.expovariate(1.0) if not alone and self._rng.random() < CANCELLED else PATIENCE_S
        try:
            async with asyncio.timeout(patience_s):
                answer = await self._api.chat.completions.create(**options)
        except TimeoutError:
            if patience_s == PATIENCE_S:
                self._told.wrong.append(f"no answer within {PATIENCE_S} s")
            return None
        if not alone:
            self._told.seconds.append(time.monotonic() - began_s)
        if answer.choices[0].finish_reason not in ("stop", "length") or answer.usage is None:
            self._told.wrong.append(f"an odd answer: {answer}"[:300])
        return WholeAnswer(answer.choices[0].message.content, answer.choices[0].finish_reason)

    async def _elsewhere(self, options: dict[str, Any]) -> WholeAnswer:
        """A whole answer through another door."""
        began_s = time.monotonic()
        other = as_response if "seed" in options else self._rng.choice((as_response, as_message))
        address, body = other(options)
        answer: Any = await self._api.post(address, body=body, cast_to=object)
        self._told.seconds.append(time.monotonic() - began_s)
        self._told.counts["other doors"] += 1
        blocks = answer["content"] if other is as_message else [part for item in answer["output"] for part in item["content"]]
        cut = answer["stop_reason"] == "max_tokens" if other is as_message else answer["status"] == "incomplete"
        return WholeAnswer("".join(block["text"] for block in blocks), "length" if cut else "stop")

    async def _call(self, options: dict[str, Any]) -> None:
        """Demands a call through any door; it follows the function's schema, whatever the model makes of the question."""
        address, body = self._rng.choice(list(tool_bodies(options, TOOL).items()))
        answer: Any = await self._api.post(address, body=body, cast_to=object)
        self._told.counts["called"] += 1
        try:
            ((name, arguments),) = called(address, answer)
            given = json.loads(arguments)
            right = name == "count" and given["kind"] in ("dog", "cat", "tree") and 0 <= given["most"] <= 9 and len(given) == 2
        except (ValueError, KeyError, TypeError):
            right = False
        if not right:
            self._told.wrong.append(f"a call that is none: {address} {answer}"[:300])

    async def _stream(self, options: dict[str, Any]) -> WholeAnswer | None:
        began_s = time.monotonic()
        most_chunks = self._rng.randint(0, 12) if self._rng.random() < CANCELLED else None
        stream = await self._api.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        pieces, usage, finish, chunks = [], None, None, 0
        async with stream:
            async for chunk in stream:
                if chunks == most_chunks:
                    return None
                chunks += 1
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    pieces.append(choice.delta.content or "")
        self._told.seconds.append(time.monotonic() - began_s)
        if finish not in ("stop", "length") or usage is None:
            self._told.wrong.append(f"a stream that ended oddly: {finish}, {usage}"[:300])
        return WholeAnswer("".join(pieces), str(finish))


async def soak(url: str, clients: int, seconds: float, seed: int) -> Told:
    """Runs all clients at the same time for the given seconds."""
    told, conversations, until_s = Told(), talks(seed), time.monotonic() + seconds
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=2 * PATIENCE_S) as api:
        model = (await api.models.list()).data[0].id
        everybody = [Client(api, model, random.Random(f"{seed}/{number}"), conversations, told) for number in range(clients)]
        await asyncio.gather(*(client.run(until_s) for client in everybody))
        await everybody[0].alone()
    return told


def main(argv: Sequence[str] | None = None) -> int:
    parser = study_parser(None, __doc__)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    chosen = parser.parse_args(argv)
    print(json.dumps(asyncio.run(soak(chosen.url, chosen.clients, chosen.seconds, chosen.seed)).to_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
