"""`vismoe serve --ray`: two replicas on a cluster of this machine, one is killed under load; and the decisions before that.

The command makes and ends the cluster, in a process of its own; what a client reads is looked at, and what processes there are.
"""

import argparse
import base64
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import psutil
import pytest

from vismoe.app.options import ServeOptions
from vismoe.app.ray_serving import RayOptions, Replica, ReplicaShare, autoscaling, refuse_shared_memory, share_of_a_replica
from vismoe.cli.ray import add_ray_flags, ray_options, run_on_ray
from vismoe.engine.engine import demo_model
from vismoe.errors import ClosedError, ConfigError

MODEL = "demo-model"
KEY = "a-key-that-nobody-may-see"
PICTURES = sorted((demo_model().parent / "images").glob("*.png"))
NEEDED_BYTES = 2 * 2**30
CLIENTS = 6
REQUESTS_BEFORE_AND_AFTER = 2  # the kill, of each client
PATIENCE_S = 60
START_S = 180  # of processor time it is 25 s


# -- decisions
@pytest.mark.parametrize(
    ("nodes", "options", "share"),
    [
        ([{"CPU": 8.0}], {"replicas": (2, 2)}, ReplicaShare(4, 0)),
        ([{"CPU": 8.0}, {"CPU": 8.0}], {"replicas": (1, 3)}, ReplicaShare(4, 0)),
        ([{"CPU": 1.0}], {"replicas": (2, 2)}, ReplicaShare(0.5, 0)),
        ([{"CPU": 64.0, "GPU": 4.0}, {"CPU": 32.0}], {"replicas": (4, 4)}, ReplicaShare(16, 1)),
        ([{"CPU": 64.0, "GPU": 4.0}], {"replicas": (8, 8), "gpus": 0.5}, ReplicaShare(8, 0.5)),
        ([{"CPU": 8.0}], {"cpus": 3.0}, ReplicaShare(3, 0)),
        ([{"memory": 1.0}], {}, ReplicaShare(1, 0)),  # a head node without cores; others come when they are asked for
    ],
)
def test_a_replica_gets_its_part_of_a_node(nodes, options, share):
    assert share_of_a_replica(nodes, RayOptions(**options), on_cpu=False) == share


def test_a_replica_on_the_cpu_takes_no_gpu():
    assert share_of_a_replica([{"CPU": 8.0, "GPU": 1.0}], RayOptions(), on_cpu=True) == ReplicaShare(8, 0)


@pytest.mark.parametrize(
    ("loading", "share"),
    [({}, ReplicaShare(1, 0)), ({"memory": "auto"}, ReplicaShare(1, 0.5)), ({"memory": "20GiB"}, ReplicaShare(1, 1))],
)
def test_replicas_do_not_plan_with_the_same_memory(loading, share):
    with pytest.raises(ConfigError, match="for each replica"):
        refuse_shared_memory(loading, share, most=2)
    refuse_shared_memory(loading, share, most=1)
    refuse_shared_memory({"memory": "20GiB", "host_memory": "40GiB"}, share, most=2)


def flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_ray_flags(parser)
    return parser.parse_args(words)


def test_flags_become_options():
    given = flags("--ray", "--replicas", "1..4", "--replica-gpus", "0.5", "--autoscaling", "upscale_delay_s=3")
    assert ray_options(given) == RayOptions(replicas=(1, 4), gpus=0.5, autoscaling={"upscale_delay_s": 3})
    assert ray_options(flags()) is None


@pytest.mark.parametrize(
    "words",
    [
        ["--replicas", "2"],  # without --ray
        ["--ray", "--replicas", "0"],
        ["--ray", "--replicas", "3..2"],
        ["--ray", "--autoscaling", "upscale_delay_s=3"],  # of a fixed number
        ["--ray", "--replica-cpus", "0"],
    ],
)
def test_flags_that_make_no_sense_are_refused(words):
    with pytest.raises(ConfigError):
        ray_options(flags(*words))


@pytest.mark.parametrize(
    ("arguments", "options", "fix"),
    [
        ({"api_key": ["secret"]}, {"api_keys": ("secret",)}, "--api-key-file"),
        ({}, {"port": 0}, "--port"),
        ({"device": "cuda:1"}, {}, "--device cuda"),
    ],
)
def test_what_ray_decides_or_shows_is_refused(arguments, options, fix):
    given = argparse.Namespace(
        **{"api_key": [], "device": None, "dtype": None, "revision": None, "model": None, "words": []} | arguments
    )
    with pytest.raises(ConfigError, match=fix):
        run_on_ray(given, ServeOptions(**options), RayOptions())


def test_files_and_folders_of_the_command_are_found_by_replicas_in_another_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packed").mkdir()
    monkeypatch.setattr("vismoe.cli.ray.serve_on_ray", lambda loading, options, on, log_level: loading)
    kept = {
        "api_key": [],
        "device": None,
        "dtype": None,
        "revision": None,
        "model": None,
        "words": ["some/model"],
        "log_level": "info",
    }
    given = argparse.Namespace(**kept, store="packed", hotness_state="hot.npz")
    loading = run_on_ray(given, ServeOptions(), RayOptions())
    found = {name: loading[name] for name in ("model", "store", "hotness_state")}
    assert found == {"model": "some/model", "store": str(tmp_path / "packed"), "hotness_state": str(tmp_path / "hot.npz")}


def test_a_replica_is_ill_when_everything_fails():
    replica = object.__new__(Replica)
    replica._engine = SimpleNamespace(load=SimpleNamespace(requests=4, failed=1), close=lambda: None)
    replica.check_health()
    replica.check_health()  # nothing ended
    replica._engine.load = SimpleNamespace(requests=6, failed=3)
    with pytest.raises(ClosedError, match="2 requests"):
        replica.check_health()


# -- replicas
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Command:
    """`vismoe serve --ray` in a process, what it has said, and every process that came of it."""

    def __init__(self, folder: Path):
        self.folder, self.said, self.seen = folder, [], {}
        keys = folder / "keys.txt"
        keys.write_text(KEY)
        self.url = f"http://127.0.0.1:{free_port()}"
        words = ["--ray", "--ray-address", "local", "--replicas", "2", "--replica-cpus", "0.5", "--memory", "25%"]
        words += [
            "--port",
            self.url.rpartition(":")[2],
            "--context",
            "2048",
            "--api-key-file",
            str(keys),
            "--drain-seconds",
            "20",
        ]
        environment = os.environ | {
            "RAY_TMPDIR": str(folder),
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "vismoe.cli", "serve", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, text=True, env=environment, start_new_session=True, **pipes)
        threading.Thread(target=lambda: self.said.extend(self.process.stdout), daemon=True).start()

    def client(self, http: httpx.Client, **options) -> openai.OpenAI:
        return openai.OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": KEY, "http_client": http, "timeout": PATIENCE_S} | options
        )

    def wait_to_say(self, text: str, since: int = 0) -> None:
        self.wait_until(lambda: any(text in line for line in self.said[since:]), START_S)

    def wait_until(self, fact, patience_s: float = PATIENCE_S) -> None:
        deadline_s = time.monotonic() + patience_s
        while not fact():
            assert self.process.poll() is None and time.monotonic() < deadline_s, "".join(self.said)
            time.sleep(0.05)

    def replicas(self) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            self.seen[process.pid] = process
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [process] if process.cmdline()[0].startswith("ray::ServeReplica") else []
        return found

    def end(self) -> None:
        """Leaves no process behind, whatever happened."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.replicas()
        self.process.kill()
        for process in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def left(self) -> list[psutil.Process]:
        return [process for process in self.seen.values() if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def ray_serve():
    if importlib.util.find_spec("ray") is None:
        pytest.skip('ray is not installed: pip install "vismoe[ray]"')
    try:
        with warnings.catch_warnings(action="ignore"):
            return importlib.import_module("ray.serve")
    except Exception as error:  # e.g. packages of other extras that do not go with it
        pytest.skip(f"ray.serve cannot be imported here: {error}")


@pytest.fixture
def command(ray_serve):
    if psutil.virtual_memory().available < NEEDED_BYTES:
        pytest.skip("two replicas and Ray take 2 GiB, which are not free")
    command = Command(
        Path(tempfile.mkdtemp(prefix="vm", dir="/tmp"))
    )  # short: Ray's sockets have names of 107 characters at most
    try:
        yield command
    finally:
        command.end()


def question(picture: Path) -> dict:
    uri = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
    content = [{"type": "text", "text": "What is in the picture?"}, {"type": "image_url", "image_url": {"url": uri}}]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24}


def answer(client: openai.OpenAI, picture: Path) -> str:
    return client.chat.completions.create(**question(picture)).choices[0].message.content


def test_a_replica_that_is_killed_under_load_costs_no_request(command):
    command.wait_to_say("replicas: 2 running")
    broken = []
    limits = httpx.Limits(max_keepalive_connections=0)  # each request finds its replica
    hooks = {"response": [lambda response: broken.append(response.status_code) if response.status_code >= 500 else None]}
    with httpx.Client(verify=False, trust_env=False, limits=limits, event_hooks=hooks) as http:
        client = command.client(http, max_retries=5)
        alone = {picture: answer(client, picture) for picture in PICTURES[:CLIENTS]}
        with pytest.raises(openai.AuthenticationError):
            command.client(http, api_key="another", max_retries=0).models.list()
        kill_is_near, killed, said = threading.Barrier(CLIENTS + 1), threading.Event(), []

        def load(picture: Path) -> None:
            said.extend((picture, answer(client, picture)) for _ in range(REQUESTS_BEFORE_AND_AFTER))
            kill_is_near.wait(PATIENCE_S)
            while not killed.is_set():
                said.append((picture, answer(client, picture)))
            said.extend((picture, answer(client, picture)) for _ in range(REQUESTS_BEFORE_AND_AFTER))

        with ThreadPoolExecutor(CLIENTS) as threads:
            clients = [threads.submit(load, picture) for picture in alone]
            try:
                kill_is_near.wait(PATIENCE_S)
                before, lines, count = command.replicas(), len(command.said), len(said)
                assert len(before) == 2
                command.wait_until(lambda: len(said) >= count + CLIENTS)  # both are busy
                before[0].kill()
            finally:
                killed.set()
            for done in clients:
                done.result(PATIENCE_S)  # raises what its client saw
        assert broken, "no request was under way on the replica that was killed"
        assert len(said) >= 2 * CLIENTS * REQUESTS_BEFORE_AND_AFTER and not [told for told in said if told[1] != alone[told[0]]]

        command.wait_to_say("replicas: 1 ", lines)
        command.wait_to_say("replicas: 2 running", lines)
        after = command.replicas()
        assert len(after) == 2 and before[0].pid not in [process.pid for process in after]
        assert [answer(client, picture) for picture in PICTURES[:2]] == [alone[picture] for picture in PICTURES[:2]]

        assert_a_client_that_leaves_is_noticed(client, http, command)
        assert_it_ends_gently(client, command)


def assert_a_client_that_leaves_is_noticed(client: openai.OpenAI, http: httpx.Client, command: Command) -> None:
    """Through Ray's proxy, on whichever replica it was."""

    def cancelled() -> bool:
        with client.completions.create(model=MODEL, prompt="What", max_tokens=1500, temperature=0, stream=True) as stream:
            next(iter(stream))
        text = http.get(f"{command.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        return bool(re.search(r"^vismoe_requests_cancelled_total [1-9]", text, re.M))

    command.wait_until(cancelled)


def assert_it_ends_gently(client: openai.OpenAI, command: Command) -> None:
    """An answer that is being written is finished, the exit code is 0, no process stays, and the key is in no log."""
    stream = client.completions.create(model=MODEL, prompt="What", max_tokens=300, temperature=0, stream=True)
    pieces = iter(stream)
    next(pieces)
    command.replicas()
    command.process.send_signal(signal.SIGTERM)
    assert list(pieces)[-1].choices[0].finish_reason
    assert command.process.wait(PATIENCE_S) == 0
    gone_s = time.monotonic() + PATIENCE_S
    while command.left() and time.monotonic() < gone_s:
        time.sleep(0.05)
    assert not command.left()
    assert not any(KEY in line for line in command.said)
    logs = [file for file in (command.folder / "ray").glob("session_2*/logs/**/*") if file.is_file()]
    assert logs and not [file for file in logs if KEY.encode() in file.read_bytes()]


def test_autoscaling_is_passed_through_and_checked(ray_serve):
    chosen = autoscaling(RayOptions(replicas=(1, 3), autoscaling={"target_ongoing_requests": 4}), 16)
    assert chosen == {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 4}
    assert autoscaling(RayOptions(replicas=(1, 3)), 16)["target_ongoing_requests"] == 16
    for wrong in ({"upscale_delay": 3}, {"upscale_delay_s": -1}):
        with pytest.raises(ConfigError):
            autoscaling(RayOptions(replicas=(1, 3), autoscaling=wrong), 16)
