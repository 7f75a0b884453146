"""What requests hold beside the model stays within the number in the plan: the pool by itself, and a real server's process."""

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

for needed in ("fastapi", "uvicorn", "openai", "prometheus_client"):  # extras
    pytest.importorskip(needed)

from hostile_images import data_uri, encoded, picture  # noqa: E402
from scripted_engine import ScriptedEngine  # noqa: E402
from searching import SEARCHING  # noqa: E402
from served import served, wait_until  # noqa: E402

from vismoe.app.api_errors import ApiError  # noqa: E402
from vismoe.app.costs import BASE_BYTES, parsing_bytes, pictures_bytes  # noqa: E402
from vismoe.app.decoding import PROCESS_BYTES, Decoder  # noqa: E402
from vismoe.app.request_memory import DECODERS, MemoryKind, RequestMemory  # noqa: E402
from vismoe.config import Settings, format_bytes  # noqa: E402
from vismoe.errors import ConfigError, InputError  # noqa: E402
from vismoe.models.inputs.rgb import decoding_bytes  # noqa: E402

MIB = 2**20
OWN = DECODERS * PROCESS_BYTES
PATIENCE_S = 600


# -- the pool
def pool(mib: int = 400, wait_s: float = 0.02) -> RequestMemory:
    return RequestMemory(OWN + mib * MIB, wait_s, give_back=lambda: None)


def run(coroutine):
    return asyncio.run(coroutine)


@settings(max_examples=200 if SEARCHING else 40)
@given(st.integers(0, 2**32))
def test_whatever_requests_do_no_more_is_promised_than_there_is_and_all_of_it_comes_back(seed):
    """Requests that read bodies, open pictures, wait, fail and are cancelled at any moment, side by side. Only a seed is drawn:
    how often something is chosen depends on the clock."""

    async def request(memory: RequestMemory, numbers: random.Random) -> None:
        share = memory.enter()
        kind = numbers.choice((MemoryKind.LARGE_BODY, MemoryKind.BODY))
        try:
            await share.grow(kind, numbers.randrange(220) * MIB)
            check(memory)
            await asyncio.sleep(numbers.random() / 500)
            await share.grow(kind, numbers.randrange(20) * MIB)
            await share.grow(MemoryKind.PICTURES, (whole := numbers.randrange(240)) * MIB)
            check(memory)
            kept = numbers.randint(0, whole)
            share.decoded(kept * MIB, numbers.randint(0, whole - kept) * MIB)
            share.shrink(kind, 0)
            share.is_built()
            check(memory)
            await asyncio.sleep(numbers.random() / 500)
        except ApiError as error:
            assert error.status in (413, 429)
        finally:
            share.let_go()
            check(memory)

    def check(memory: RequestMemory) -> None:
        assert memory.used_bytes <= memory.total_bytes
        assert all(held >= 0 for held in memory._held.values())
        assert memory._held[MemoryKind.LARGE_BODY] <= memory._most[MemoryKind.LARGE_BODY]
        assert memory._held[MemoryKind.LARGE_BODY] + memory._held[MemoryKind.BODY] <= memory._most[MemoryKind.BODY]

    async def all_of_them() -> None:
        memory, numbers = pool(), random.Random(seed)
        tasks = [asyncio.create_task(request(memory, random.Random(numbers.random()))) for _ in range(numbers.randint(1, 12))]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.001)
            if numbers.random() < 0.3:
                numbers.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not [task for task in tasks if not task.cancelled() and task.exception()]
        assert memory.used_bytes == OWN and memory.waiting == 0

    run(all_of_them())


def test_everybody_who_can_be_served_is_served_although_bodies_fill_their_half():
    async def all_of_them() -> int:
        memory, served = pool(wait_s=30), 0

        async def request() -> None:
            nonlocal served
            share = memory.enter()
            await share.grow(MemoryKind.LARGE_BODY, 40 * MIB)
            await share.grow(MemoryKind.PICTURES, 190 * MIB)  # while it still holds its body
            share.let_go()
            served += 1

        await asyncio.gather(*(request() for _ in range(50)))
        return served

    assert run(all_of_them()) == 50


def test_large_bodies_leave_room_to_small_ones_and_wait_in_the_order_of_arrival():
    async def all_of_them():
        memory, order = pool(wait_s=30), []
        shares = [memory.enter() for _ in range(5)]
        await shares[0].grow(MemoryKind.LARGE_BODY, 150 * MIB)

        async def wait(number: int, mib: int) -> None:
            await shares[number].grow(MemoryKind.LARGE_BODY, mib * MIB)
            order.append(number)

        waiting = [asyncio.create_task(wait(number, mib)) for number, mib in ((1, 100), (2, 10), (3, 100))]
        await asyncio.sleep(0)
        await shares[4].grow(MemoryKind.BODY, 30 * MIB)  # at once
        assert memory.waiting == 3
        for number in range(3):
            shares[number].let_go()
            await asyncio.sleep(0)
            await asyncio.sleep(0.01)
        await asyncio.gather(*waiting)
        return order

    assert run(all_of_them()) == [1, 2, 3]


def test_bytes_that_were_freed_are_promised_again_once_they_are_given_back():
    given_back = threading.Event()

    async def all_of_them():
        memory = RequestMemory(OWN + 400 * MIB, 30, given_back.set)
        first, second = memory.enter(), memory.enter()
        await first.grow(MemoryKind.PICTURES, 200 * MIB)
        first.let_go()
        assert not given_back.is_set()
        await second.grow(MemoryKind.PICTURES, 190 * MIB)  # beside the freed ones
        assert not given_back.is_set()
        await memory.enter().grow(MemoryKind.PICTURES, 190 * MIB)
        assert given_back.is_set()

    run(all_of_them())


@pytest.mark.parametrize("kind", MemoryKind)
def test_what_never_fits_is_refused_with_a_size_that_does(kind):
    async def refused(mib: int) -> ApiError:
        with pytest.raises(ApiError) as found:
            await pool(mib).enter().grow(kind, 390 * MIB)
        return found.value

    error = run(refused(400))
    assert error.status == 413 and format_bytes(390 * MIB) in error.message
    enough = re.search(r"--request-memory (\S+)", error.message)[1]
    run(RequestMemory(Settings(request_memory=enough).request_memory_bytes, 1).enter().grow(kind, 390 * MIB))


def test_what_no_two_take_at_a_time_counts_once():
    async def all_of_them():
        memory = pool()
        for _ in range(4):
            share = memory.enter()
            await share.grow(MemoryKind.PICTURES, 100 * MIB)
            share.decoded(10 * MIB, 90 * MIB)
            share.is_built()
        return memory.used_bytes

    assert run(all_of_them()) == OWN + (4 * 10 + 90) * MIB


def test_a_pool_that_holds_no_decoders_is_refused():
    with pytest.raises(ConfigError, match="--request-memory") as refused:
        RequestMemory(MIB, 1)
    enough = Settings(request_memory=re.search(r"--request-memory (\S+)", str(refused.value))[1])
    RequestMemory(enough.request_memory_bytes, 1)


# -- what things cost
KINDS = [
    ("RGB", "PNG", {}), ("RGBA", "PNG", {}), ("P", "PNG", {}), ("I;16", "PNG", {}), ("RGB", "JPEG", {}),
    ("RGB", "JPEG", {"progressive": True, "subsampling": 0}), ("CMYK", "JPEG", {}), ("RGB", "WEBP", {"method": 0}),
    ("RGBA", "WEBP", {"lossless": True, "method": 0}), ("RGB", "TIFF", {}), ("F", "TIFF", {}), ("RGB", "AVIF", {"speed": 10}),
    ("RGB", "GIF", {}), ("RGB", "BMP", {}), ("RGB", "PPM", {}), ("RGB", "JPEG2000", {}),
]  # fmt: skip


def status(field: str, process: int) -> int:
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.M)[1])


def test_no_decoder_takes_more_than_a_header_announces():
    decoder, wide, high = Decoder(), 1600, 1000
    decoder.decode(picture(), 10**6, 60)
    grey = np.random.default_rng(0).integers(0, 2**16, (high // 4, wide // 4), np.uint16)
    photograph = Image.merge(
        "RGB", [Image.fromarray((grey >> shift).astype(np.uint8)).resize((wide, high)) for shift in (0, 4, 8)]
    )
    for mode, kind, options in KINDS:
        image = Image.fromarray(np.kron(grey, np.ones((4, 4), np.uint16))) if mode == "I;16" else photograph.convert(mode)
        data = encoded(image, kind, **options)
        for reduce in (1, 4):
            header = decoder.look(data, 10**9, 60)
            process = decoder._process.pid
            Path(f"/proc/{process}/clear_refs").write_text("5")
            before = status("VmRSS", process)
            found = decoder.decode(data, 10**9, 60, reduce)
            taken = status("VmHWM", process) - before - len(data)
            assert taken <= decoding_bytes(header, reduce) + 4 * MIB, (mode, kind, reduce)
            assert found.size == (wide // reduce, high // reduce)
    decoder.close()


@pytest.mark.parametrize("text", ["a", "\u00e9", "\U0001f600", "\\u00e9"])
def test_text_that_takes_more_than_its_bytes_is_counted(text):
    filler = "a" * 10**6
    body = b'{"x": "' + text.encode() + filler.encode() + b'", "y": "' + filler.encode() + b'"}'
    held = sum(sys.getsizeof(value) for value in json.loads(body).values())
    assert parsing_bytes(body, 2) + len(body) + BASE_BYTES >= held
    assert parsing_bytes(body, 2) < 3.1 * 10**6, "the other string as it is"


def test_pictures_are_decoded_one_after_the_other():
    cost = SimpleNamespace(kept=10, building=30, decoding=100)
    assert pictures_bytes([cost] * 3, 0) == 3 * 10 + 100
    assert pictures_bytes([cost] * 4, 5) == 4 * 10 + 4 * 30 + 5
    assert pictures_bytes([], 7) == 7


# -- the server
def asking(*uris: str) -> dict:
    images = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
    return {"messages": [{"role": "user", "content": [*images, {"type": "text", "text": "What is it?"}]}], "max_tokens": 2}


@pytest.fixture(scope="module")
def scripted():
    engine = ScriptedEngine()
    with served(engine, memory_timeout_s=0.2) as server:
        server.engine = engine
        yield server


def idle(server) -> bool:
    return server.get("/health").json()["request_memory"]["used_bytes"] == OWN


def test_every_way_out_gives_back_what_was_held(scripted):
    body = json.dumps(asking(data_uri(picture()))).encode()
    ways = [
        (200, body, {}),
        (400, body.replace(b"base64,", b"base64,!!"), {}),
        (400, body[:-1], {}),
        (400, b'{"messages": [], "unknown": 1}', {}),
        (404, body.replace(b'{"mess', b'{"model": "other", "mess'), {}),
        (400, json.dumps(asking(data_uri(b"x" * 5 * MIB))).encode(), {}),
    ]
    for wanted, content, headers in ways:
        assert scripted.post(content, headers=headers).status_code == wanted
        wait_until(lambda: idle(scripted))
    scripted.engine.script.append([InputError("no")])
    assert scripted.post(body).status_code == 400
    wait_until(lambda: idle(scripted))
    with scripted.http.stream("POST", scripted.url + "/v1/chat/completions", json=asking(data_uri(picture())) | {"stream": True}):
        pass  # the client leaves
    wait_until(lambda: idle(scripted))
    with socket.create_connection(("127.0.0.1", scripted.port)) as connection:  # in the middle of a body
        connection.sendall(HEAD % (50 * MIB) + b" " * MIB)
        wait_until(lambda: not idle(scripted))
    wait_until(lambda: idle(scripted))


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def test_who_gets_no_memory_is_told_to_come_back_and_small_requests_still_get_theirs(scripted):
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", scripted.port)))
            connection.sendall(HEAD % (32 * MIB))
        wait_until(lambda: scripted.get("/health").json()["request_memory"]["used_bytes"] > OWN + 120 * MIB)
        refused = scripted.post(b" " * (32 * MIB))
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "request_memory"
        assert scripted.post(asking(data_uri(picture()))).status_code == 200
        assert (
            "vismoe_request_memory_used_bytes" in scripted.get("/metrics").text if hasattr(scripted.engine, "metrics") else True
        )
    wait_until(lambda: idle(scripted))


def test_a_picture_that_could_never_be_decoded_is_refused_before_it_is(scripted):
    blank = encoded(Image.new("RGB", (6000, 5000)), "WEBP", lossless=True, method=0)
    refused = scripted.post(asking(data_uri(blank)))
    assert refused.status_code == 413 and "--request-memory" in refused.json()["error"]["message"], refused.text
    assert refused.json()["error"]["code"] == "request_memory"


# -- a real one, and its process
SERVE = """
import json, os, sys
import torch, transformers, vismoe.engine.engine, vismoe.app.serving
from transformers import AutoProcessor
from vismoe.app.options import ServeOptions
from vismoe.app.serving import listening, serve

def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024

baseline = resident()
open("/proc/self/clear_refs", "w").write("5")
options = ServeOptions(port=0, drain_s=0, max_waiting=256, memory_timeout_s=float(sys.argv[1]))
with listening(options) as listener, vismoe.engine.engine.load(memory="25%", context=4096, request_memory="512MiB") as engine:
    plan = engine.plan
    print(json.dumps({"baseline": baseline, "plan": plan.total_bytes, "pool": plan.bytes_of("request memory")}), flush=True)
    serve(engine, options, listener)
"""


class Watched:
    """A server's process, and the most that it and its decoders held at a time."""

    def __init__(self, process: subprocess.Popen):
        self.process, self.most_bytes, self.decoders_bytes = process, 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.02):
            decoders = 0
            for child in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
                for number in child.read_text().split():
                    with contextlib.suppress(OSError, TypeError):
                        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{number}/smaps_rollup").read_text(), re.M)
                        decoders += 1024 * int(found[1])
            self.decoders_bytes = max(self.decoders_bytes, decoders)
            self.most_bytes = max(self.most_bytes, decoders + status("VmRSS", self.process.pid))

    def __enter__(self) -> "Watched":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture(scope="module")
def real():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-c", SERVE, "120" if SEARCHING else "10"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[1]) as process:
        try:
            figures = json.loads(process.stdout.readline())
            port = int(re.search(r"http://127.0.0.1:(\d+)", process.stdout.readline())[1])
            yield SimpleNamespace(process=process, port=port, **figures)
        finally:
            process.kill()


def photograph(seed: int) -> str:
    """A data URI of twelve megapixels."""
    small = np.random.default_rng(seed).integers(0, 255, (375, 500, 3), np.uint8)
    return data_uri(
        encoded(Image.fromarray(small).resize((4000, 3000), Image.Resampling.BICUBIC), "JPEG", quality=85), "image/jpeg"
    )


def test_the_server_holds_no_more_than_its_plan_whatever_it_is_sent(real):
    """Flat pictures that are small as files, photographs, and bodies that do not end, all at the same time."""
    flat = data_uri(encoded(Image.new("RGB", (7999, 4000), "teal"), "PNG"))
    bodies = [json.dumps(asking(*[flat] * 4)).encode()] * (80 if SEARCHING else 3)
    photographs = [json.dumps(asking(photograph(seed))).encode() for seed in range(2)]
    bodies += [photographs[number % 2] for number in range(120 if SEARCHING else 6)]
    random.Random(0).shuffle(bodies)
    answers = []

    def post(body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{real.port}/v1/chat/completions"
        answers.append(httpx.post(url, content=body, headers=headers, timeout=PATIENCE_S, trust_env=False, verify=False))

    def unfinished() -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", real.port), 5) as connection:
            connection.sendall(HEAD % (60 * MIB))
            for _ in range(59):
                connection.sendall(bytes(MIB))
            time.sleep(2)

    threads = [threading.Thread(target=unfinished) for _ in range(30 if SEARCHING else 8)]
    threads += [threading.Thread(target=post, args=(body,)) for body in bodies]
    with Watched(real.process) as watched:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == len(bodies)
    codes = {answer.status_code for answer in answers}
    assert codes <= {200, 429}, next(answer.text for answer in answers if answer.status_code not in (200, 429))
    assert any(answer.status_code == 200 for answer in answers)
    assert all(answer.headers["retry-after"] for answer in answers if answer.status_code == 429)
    grown = max(watched.most_bytes, status("VmHWM", real.process.pid)) - real.baseline
    figures = f"grown {format_bytes(grown)}, planned {format_bytes(real.plan)}, {format_bytes(real.pool)} of it for requests"
    print(figures, {code: sum(answer.status_code == code for answer in answers) for code in codes}, watched.decoders_bytes)
    assert grown <= real.plan, figures
    url = f"http://127.0.0.1:{real.port}"
    wait_until(lambda: httpx.get(f"{url}/health", trust_env=False).json()["request_memory"]["used_bytes"] == OWN)
    scraped = httpx.get(f"{url}/metrics", trust_env=False).text
    assert f"vismoe_request_memory_bytes {512 * MIB / 1e8}e+08" in scraped and 'part="request memory"' in scraped
