"""A real server, asked what it should not be asked: every answer is a 4xx in OpenAI's form that tells nothing of the inside.

One server on a socket serves them all, with the bundled model. When the last request is answered, it answers ordinary ones, its
books are right, and it holds no more memory, files or processes than before.
"""

import asyncio
import contextlib
import gc
import json
import os
import re
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from copy import copy

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

for needed in ("fastapi", "uvicorn", "openai", "prometheus_client"):  # extras
    pytest.importorskip(needed)

from hostile_images import data_uri, jpeg_of_many_scans, picture, png_of  # noqa: E402
from hostile_requests import (  # noqa: E402
    BROKEN,
    ELSEWHERE,
    FIELDS,
    HEAD,
    HEADERS,
    ITEMS,
    MESSAGES,
    PAGES,
    PATHS,
    PICTURES,
    PROMPTS,
    RAW,
    REMOTE,
    TOOLS,
    TURNS,
    URIS,
    VALID,
    request,
)
from picture_server import Names, Network, picture_server  # noqa: E402
from served import Served, served, wait_until  # noqa: E402

import vismoe  # noqa: E402
from vismoe.app import images as intake  # noqa: E402
from vismoe.app.messages import MessagesRequest  # noqa: E402
from vismoe.app.responses import ResponsesRequest  # noqa: E402
from vismoe.app.schemas import ChatRequest, CompletionRequest  # noqa: E402
from vismoe.models.inputs.remote_images import RemoteImages  # noqa: E402

CHAT, TEXT, OTHER = "/v1/chat/completions", "/v1/completions", "/v1/messages"
COUNT = f"{OTHER}/count_tokens"
RESPONSES, TOKENIZE = "/v1/responses", "/tokenize"
COUNT_RESPONSES = f"{RESPONSES}/input_tokens"
PEAK_BYTES = 300 * 2**20  # what all of it together may add to the process for a moment: bodies, pictures, a prefill
HELD_BYTES = 100 * 2**20  # and what it may leave behind: caches that fill, arenas of the allocator
LIMITS = {
    "max_body_bytes": 2 * 2**20,
    "max_images": 4,
    "max_image_bytes": 2**20,
    "max_pixels": 2 * 10**6,
    "image_timeout_s": 1.0,
    "body_timeout_s": 0.7,
    "max_waiting": 8,
}
INSIDE = re.compile(r"Traceback|\.py\b|site-packages|0x[0-9a-f]{6}|/work/|/home/|/root/|/tmp/|10\.1\.2\.3|127\.0\.0\.1|<class")


# -- the server
@contextlib.contextmanager
def pictures_of_the_internet() -> Iterator[Network]:
    """A server of PAGES in a thread of its own, as the network that a download sees."""
    ready, found = threading.Event(), []

    async def run() -> None:
        over = asyncio.Event()
        async with picture_server(PAGES) as (_, network, _):
            found.extend((network, asyncio.get_running_loop(), over))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(30)
    network, loop, over = found
    yield network
    loop.call_soon_threadsafe(over.set)
    thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    """Asked ordinary questions before and after everything else."""
    folder = a_folder(tmp_path_factory.mktemp("images"))
    names = Names(pictures_example=["93.184.215.14"], inside_example=["10.1.2.3"], both_example=["8.8.8.8", "10.1.2.3"])
    with (
        pictures_of_the_internet() as network,
        pytest.MonkeyPatch.context() as patch,
        vismoe.load(memory="25%", context=1024, image_cache="8MiB") as engine,
    ):
        patch.setattr(intake, "RemoteImages", lambda: RemoteImages(names, network))
        with served(engine, allow_remote_images=True, image_folder=folder, **LIMITS) as server:
            for _ in range(3):
                ask_ordinary_questions(server)
            gc.collect()
            forget_peak()
            held_before, files_before = memory()[0], open_files()
            yield server
            ask_ordinary_questions(server)
            wait_until(lambda: not (len(server.app.state.callers) or engine.load.running or engine.load.waiting))
            engine.check_integrity()
            gc.collect()
            held, peak = memory()
            assert held - held_before < HELD_BYTES
            assert peak - held_before < PEAK_BYTES
            assert open_files() <= files_before + 16  # kept connections, decoders
            assert len(psutil.Process().children()) <= intake.DECODERS


def a_folder(place):
    """An image folder with what may be read, what may not, and links to elsewhere."""
    folder = place / "images"
    folder.mkdir()
    (folder / "ok.png").write_bytes(picture())
    (folder / "text.png").write_text("not a picture")
    (folder / "empty.png").touch()
    (place / "secret.png").write_bytes(picture())
    (folder / "link.png").symlink_to(place / "secret.png")
    (folder / "up").symlink_to(place)
    os.mkfifo(folder / "fifo.png")
    with (folder / "large.png").open("wb") as file:
        file.truncate(2**40)
    return folder


def memory() -> tuple[int, int]:
    """(resident now, the most since `forget_peak`), bytes."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    held, peak = (1024 * int(lines[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return held, peak


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def ask_ordinary_questions(server: Served) -> None:
    for urls in ([], [data_uri(picture())], ["ok.png", "http://pictures.example/ok.png"]):
        answer = server.post(request(*urls))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 1


def must_be_refused(answer, case: object = None) -> None:
    """4xx, OpenAI's form, and nothing of the inside in it."""
    assert 400 <= answer.status_code < 500, (case, answer.status_code, answer.text[:500])
    error = answer.json()["error"]
    other = str(answer.url.path).startswith(OTHER)
    assert set(error) == ({"message", "type"} if other else {"message", "type", "param", "code"}), case
    assert isinstance(error["type"], str), case
    assert 0 < len(error["message"]) <= 500, case
    assert not INSIDE.search(answer.text), (case, answer.text)


def asked_otherwise(path: str, **changes) -> dict:
    """A valid request of the other API."""
    least = {} if path == COUNT else {"max_tokens": 1}
    return {"messages": [{"role": "user", "content": "hello"}], **least, **changes}


# -- by hand
@pytest.mark.parametrize("path", [CHAT, OTHER, COUNT, RESPONSES, TOKENIZE])
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_request_is_refused(server, name, path):
    must_be_refused(server.post(BROKEN[name], path))


@pytest.mark.parametrize(
    ("field", "number"), [(field, number) for field, values in FIELDS.items() for number in range(len(values))]
)
def test_a_field_with_a_value_that_cannot_be_is_refused(server, field, number):
    changes = {field: FIELDS[field][number]}
    must_be_refused(server.post(request(**changes)), changes)


@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_messages_that_are_none_are_refused(server, number):
    must_be_refused(server.post(request(messages=MESSAGES[number])), MESSAGES[number][:2])


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_prompts_that_are_none_are_refused(server, number):
    must_be_refused(server.post({"prompt": PROMPTS[number], "max_tokens": 1}, TEXT), PROMPTS[number])


@pytest.mark.parametrize("name", PICTURES)
def test_what_is_no_picture_is_refused(server, name):
    must_be_refused(server.post(request(data_uri(PICTURES[name]))))


@pytest.mark.parametrize("number", range(len(TURNS)))
def test_turns_of_the_other_api_that_are_none_are_refused(server, number):
    for path in (OTHER, COUNT):
        must_be_refused(server.post(asked_otherwise(path, messages=TURNS[number]), path), str(TURNS[number])[:300])


@pytest.mark.parametrize("number", range(len(ITEMS)))
def test_items_that_are_none_are_refused(server, number):
    for path in (RESPONSES, COUNT_RESPONSES):
        must_be_refused(server.post({"input": ITEMS[number]}, path), str(ITEMS[number])[:300])


@pytest.mark.parametrize("number", range(len(TOOLS)))
def test_tools_that_are_none_are_refused_through_every_door(server, number):
    """The demo model knows none: what passes every check is refused at the end."""
    tools = TOOLS[number]
    must_be_refused(server.post(request(tools=tools)), str(tools)[:300])
    must_be_refused(server.post(asked_otherwise(OTHER, tools=tools), OTHER), str(tools)[:300])
    listed = list(map(copy, tools)) if isinstance(tools, list) else []
    flat = [{**tool, **tool.pop("function")} if _names(tool) else tool for tool in listed] or tools
    must_be_refused(server.post({"input": "hello", "tools": flat}, RESPONSES), str(flat)[:300])
    plain = [tool.get("function") if isinstance(tool, dict) else tool for tool in tools] if isinstance(tools, list) else tools
    own = [
        {"name": tool.get("name"), "input_schema": tool.get("parameters")} if isinstance(tool, dict) else tool for tool in plain
    ] if isinstance(plain, list) else plain  # fmt: skip
    must_be_refused(server.post(asked_otherwise(OTHER, tools=own), OTHER), str(own)[:300])


def _names(tool: object) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("function"), dict)


NOWHERE = [*URIS.values(), *PATHS, *REMOTE]


@pytest.mark.parametrize("number", range(len(NOWHERE)))
def test_images_from_nowhere_are_refused(server, number):
    must_be_refused(server.post(json.dumps(request(NOWHERE[number])).encode()), NOWHERE[number][:200])
    turns = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": NOWHERE[number]}}]}]
    for path in (OTHER, COUNT):
        must_be_refused(server.post(json.dumps(asked_otherwise(path, messages=turns)).encode(), path), NOWHERE[number][:200])
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": NOWHERE[number]}]}]
    must_be_refused(server.post(json.dumps({"input": items}).encode(), RESPONSES), NOWHERE[number][:200])


@pytest.mark.parametrize(
    "urls",
    [["missing.png", "../secret.png", "/etc/passwd", "link.png"], ["http://localhost/", "http://nothing.invalid/", "http://inside.example/"]],
)  # fmt: skip
def test_refusals_do_not_tell_what_there_is(server, urls):
    assert len({server.post(request(url)).json()["error"]["message"] for url in urls}) == 1


LARGE = data_uri(png_of(1400, 1400, bytes(1401 * 1400)))


@pytest.mark.parametrize(
    "urls", [["ok.png"] * 5, [data_uri(picture())] * 200, ["ok.png", "missing.png"], ["ok.png", LARGE, LARGE, "large.png"]]
)
def test_too_many_images_and_one_bad_one_among_good_ones_are_refused(server, urls):
    must_be_refused(server.post(request(*urls)))


@pytest.mark.parametrize(("method", "path"), ELSEWHERE)
def test_addresses_and_methods_that_there_are_not(server, method, path):
    answer = server.http.request(method, server.url + path, headers={"Content-Type": "application/json"}, content=b"{}")
    if method == "HEAD":  # has no body
        assert 400 <= answer.status_code < 500
    else:
        must_be_refused(answer)


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_others_are_refused(server, name):
    must_be_refused(server.post(VALID, headers=HEADERS[name]))


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br"])
def test_a_compressed_body_is_refused_and_not_unpacked(server, coding):
    body = zlib.compress(VALID, wbits=31 if coding == "gzip" else 15)
    must_be_refused(server.post(body, headers={"Content-Encoding": coding}))


# -- made from the schema
KINDS = {
    "string": st.text(max_size=5),
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False).filter(lambda value: value != int(value)),
    "boolean": st.booleans(),
    "array": st.lists(st.integers(), max_size=2),
    "object": st.dictionaries(st.text(max_size=3), st.integers(), min_size=1, max_size=2),
}
ALSO_TAKEN = {"stop": "string", "prompt": "string", "system": "string", "input": "string"}  # one without its list


def broken_requests(kind: type, valid: dict) -> st.SearchStrategy[dict]:
    """A valid request with one field of a type that it cannot have, or one more field that there is not."""
    schema = kind.model_json_schema()
    unknown = st.text(min_size=1, max_size=20).filter(lambda name: name not in schema["properties"])
    broken = [st.tuples(unknown, st.integers()).map(lambda field: {**valid, field[0]: field[1]})]
    for name, described in schema["properties"].items():
        options = (
            schema["$defs"][option["$ref"][8:]] if "$ref" in option else option for option in described.get("anyOf", [described])
        )
        taken = {option["type"] for option in options} | {ALSO_TAKEN.get(name)}
        taken |= {"integer"} if "number" in taken else set()
        values = st.one_of(*(values for kind, values in KINDS.items() if kind not in taken))
        broken.append(values.map(lambda value, name=name: {**valid, name: value}))
    return st.one_of(*broken)


NAMES = st.sampled_from("role content type text image_url url x".split())
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
MANY = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


@MANY
@given(body=broken_requests(ChatRequest, request()))
def test_a_chat_request_with_any_field_of_another_type_is_refused(server, body):
    must_be_refused(server.post(json.dumps(body).encode()), body)


@MANY
@given(body=broken_requests(CompletionRequest, {"prompt": "hello", "max_tokens": 1}))
def test_a_completion_request_with_any_field_of_another_type_is_refused(server, body):
    must_be_refused(server.post(json.dumps(body).encode(), TEXT), body)


@MANY
@given(body=broken_requests(ResponsesRequest, {"input": "hello", "max_output_tokens": 1}))
def test_a_request_for_a_response_with_any_field_of_another_type_is_refused(server, body):
    must_be_refused(server.post(json.dumps(body).encode(), RESPONSES), body)


@MANY
@given(body=broken_requests(MessagesRequest, asked_otherwise(OTHER)))
def test_a_request_of_the_other_api_with_any_field_of_another_type_is_refused(server, body):
    must_be_refused(server.post(json.dumps(body).encode(), OTHER), body)


BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from("text image tool_use tool_result thinking redacted_thinking document x".split())},
    optional=dict.fromkeys("text source id name input tool_use_id content thinking signature data".split(), JSON_VALUES),
)


@MANY
@given(turns=st.lists(st.tuples(st.sampled_from(["user", "assistant"]), JSON_VALUES | st.lists(BLOCKS, max_size=3)), max_size=3))
def test_turns_of_any_shape_are_answered_or_refused(server, turns):
    messages = [{"role": role, "content": content} for role, content in turns]
    for path in (OTHER, COUNT):
        answer = server.post(json.dumps(asked_otherwise(path, messages=messages)).encode(), path)
        if answer.status_code != 200:
            must_be_refused(answer, messages)


PARTS_OF_ITEMS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            "message function_call function_call_output reasoning input_text output_text input_image x".split()
        )
    },
    optional=dict.fromkeys("role content text image_url call_id name arguments output summary id status".split(), JSON_VALUES),
)


@MANY
@given(items=JSON_VALUES | st.lists(PARTS_OF_ITEMS | JSON_VALUES, max_size=3))
def test_items_of_any_shape_are_answered_or_refused(server, items):
    answer = server.post(json.dumps({"input": items, "max_output_tokens": 1}).encode(), RESPONSES)
    if answer.status_code != 200:
        must_be_refused(answer, items)


@MANY
@given(messages=JSON_VALUES | st.lists(JSON_VALUES, max_size=3))
def test_messages_of_any_shape_are_answered_or_refused(server, messages):
    answer = server.post(json.dumps(request(messages=messages)).encode())
    if answer.status_code != 200:
        must_be_refused(answer, messages)


# -- at the same time, slowly, and below HTTP
@pytest.mark.budget(5)
def test_hostile_requests_do_not_take_the_server_from_others(server):
    slow = request(data_uri(jpeg_of_many_scans(20_000, 1400)))
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(server.post(slow))) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert server.post(request()).status_code == 200
    for thread in threads:
        thread.join()
    assert len(answers) == 5
    for answer in answers:
        must_be_refused(answer)


def has_head(answer: bytes) -> bool:
    return b"\r\n\r\n" in answer


def has_error(answer: bytes) -> bool:
    """Whether a whole error in the API's form has come; perhaps with a second answer behind it, to what came later."""
    with contextlib.suppress(ValueError):
        return bool(json.JSONDecoder().raw_decode(answer.partition(b"\r\n\r\n")[2].decode())[0]["error"]["message"])
    return False


def say(server: Served, data: bytes, hang_up: bool = False, enough: Callable[[bytes], bool] = has_head) -> bytes:
    """What the server answers to these bytes until it is `enough`, nothing if it only closes the connection."""
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection, contextlib.suppress(ConnectionError):
        with contextlib.suppress(ConnectionError):  # it may answer and close before it has heard everything
            connection.sendall(data)
        while not hang_up and not enough(answer) and (piece := connection.recv(65536)):
            answer += piece
    return answer


@pytest.mark.parametrize("name", RAW)
def test_bytes_that_are_no_request_get_a_4xx(server, name):
    answer = say(server, RAW[name], enough=has_error)
    assert re.match(rb"HTTP/1\.1 4\d\d ", answer) and has_error(answer), answer[:400]
    assert not INSIDE.search(answer.decode("latin-1"))


@pytest.mark.parametrize(
    "rest", [b"Content-Length: 50\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"], ids=["length", "chunks"]
)
def test_a_body_that_does_not_arrive_in_time_is_refused(server, rest):
    assert say(server, HEAD + rest).startswith(b"HTTP/1.1 408 ")


def test_a_body_without_end_is_refused_before_it_is_in_memory(server):
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    assert say(server, head + 1000 * (b"10000\r\n" + b" " * 65536 + b"\r\n")).startswith((b"HTTP/1.1 413 ", b""))
    assert server.post(b" " * (LIMITS["max_body_bytes"] + 1)).status_code == 413


@pytest.mark.parametrize("rest", [b"", b"Content-Length: 9\r\n\r\n{", b"Content-Length: %d\r\n\r\n" % len(VALID) + VALID])
def test_clients_that_hang_up_leave_nothing_behind(server, rest):
    for _ in range(5):
        assert say(server, HEAD + rest, hang_up=True) == b""
    assert server.post(request()).status_code == 200


def test_there_are_enough_of_them():
    """Requests by hand, of which some are sent through several doors."""
    several = 5 * len(BROKEN) + 4 * (len(NOWHERE) + len(TOOLS)) + 2 * (len(TURNS) + len(ITEMS))
    assert several + sum(map(len, (MESSAGES, PROMPTS, PICTURES, ELSEWHERE, HEADERS, RAW, *FIELDS.values()))) >= 1000
