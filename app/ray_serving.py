"""`vismoe serve --ray`: the same application as replicas on a Ray cluster, each with its own engine and memory budget.

Ray Serve's proxies listen on the cluster's nodes and pass each request to the replica with the fewest requests. Serve checks the
replicas' health, restarts dead ones, lets removed ones finish their answers, and follows the load if configured.
"""

import contextlib
import logging
import math
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vismoe.app.options import ServeOptions
from vismoe.config import SETTINGS, Settings
from vismoe.errors import ClosedError, ConfigError
from vismoe.flags import quick_imports

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vismoe.engine.engine import Engine

NAME = "vismoe"  # of the application on the cluster, and of its only deployment
LOCAL = "local"  # the address that means a new cluster on this machine
OBJECT_STORE_BYTES = 256 * 2**20  # of a new cluster; request bodies pass through it
POLL_S = 0.5
CONNECT_S = 5.0
HEALTH_PERIOD_S = 5.0
CLOSE_S = 10.0  # further time to close engines, after draining
OUR_ERROR = re.compile(r"^vismoe\.errors\.\w+: (.+(?:\nFix: .+)?)", re.MULTILINE)  # in a traceback

log = logging.getLogger("vismoe.serve")


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Which cluster, the number of replicas, and the resources of each."""

    address: str = "auto"  # of a cluster: auto for that of this machine, HOST:PORT, ray://HOST:PORT; or LOCAL
    replicas: tuple[int, int] = (1, 1)  # at least, at most
    cpus: float | None = None  # of a replica; None: its share of a node
    gpus: float | None = None  # of a replica; None: one, if the cluster has GPUs
    autoscaling: Mapping[str, Any] = field(default_factory=dict)  # further fields of Ray Serve's AutoscalingConfig

    def __post_init__(self) -> None:
        least, most = self.replicas
        if not 1 <= least <= most:
            raise ConfigError(f"replicas={least}..{most}: the first must be at least 1, and not above the second")
        if self.autoscaling and least == most:
            raise ConfigError(f"{least} replicas are a fixed number, so autoscaling does not apply. Fix: --replicas MIN..MAX")
        if (self.cpus is not None and self.cpus <= 0) or (self.gpus is not None and self.gpus < 0):
            raise ConfigError(f"cpus={self.cpus}, gpus={self.gpus}: a replica needs cpus above zero and gpus not below zero")


@dataclass(frozen=True)
class ReplicaShare:
    """The resources that Ray reserves for a replica."""

    cpus: float
    gpus: float


def share_of_a_replica(nodes: Sequence[Mapping[str, float]], options: RayOptions, on_cpu: bool) -> ReplicaShare:
    """`nodes`: resources of each, under Ray's names. Replicas are spread evenly; each has its part of a node's cores.

    With GPUs a replica takes one, and its share of the cores. `on_cpu`: use no GPUs.
    """
    gpus = options.gpus
    if gpus is None:
        gpus = float(not on_cpu and any(node.get("GPU") for node in nodes))
    fitting = [node for node in nodes if node.get("CPU") and node.get("GPU", 0) >= gpus]
    if options.cpus is not None or not fitting:
        return ReplicaShare(options.cpus or 1.0, gpus)
    on_a_node = math.ceil(options.replicas[1] / len(fitting))
    cpus = min(node["CPU"] * (gpus / node["GPU"] if gpus else 1 / on_a_node) for node in fitting)
    return ReplicaShare(float(math.floor(cpus)) if cpus >= 1 else cpus, gpus)


def refuse_shared_memory(loading: Mapping[str, Any], share: ReplicaShare, most: int) -> None:
    """Raises ConfigError if replicas on one machine would each plan with memory that all of them count as free."""
    if most == 1:
        return
    if share.gpus < 1 and loading.get("memory", "auto") == "auto":
        raise ConfigError(f"{most} replicas would each plan with 80% of the free memory. Fix: --memory SIZE, for each replica")
    if share.gpus and loading.get("host_memory") is None:
        raise ConfigError(f"{most} replicas would each plan with all of the free RAM. Fix: --host-memory SIZE, for each replica")


class Replica:
    """The class that Ray Serve creates on a node; it provides the application and its health. `loading`: as for `vismoe.load`."""

    _engine: "Engine | None" = None
    _ended = _failed = 0

    def __init__(self, loading: Mapping[str, Any], options: ServeOptions, log_level: str):
        with quick_imports():
            import torch

            from vismoe.engine.engine import load

        logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(message)s")
        log.setLevel(log_level)
        self._options = options
        self._engine = load(**loading)
        log.info("a replica is ready: process %d, threads %d", os.getpid(), torch.get_num_threads())

    def __serve_build_asgi_app__(self) -> "FastAPI":
        from vismoe.app.api import create_app

        return create_app(self._engine, self._options)

    def check_health(self) -> None:
        """Raises ClosedError if every request that ended since the last call failed; after three times Serve replaces the
        replica."""
        assert self._engine is not None
        load = self._engine.load
        ended, failed = load.requests - self._ended, load.failed - self._failed
        self._ended, self._failed = load.requests, load.failed
        if ended and failed == ended:
            raise ClosedError(f"the last {failed} requests failed")

    def __del__(self) -> None:
        """Serve calls this after the last answer, and after an `__init__` that failed."""
        if self._engine is not None:
            self._engine.close()


def application(loading: Mapping[str, Any], options: ServeOptions, on: RayOptions, share: ReplicaShare, log_level: str) -> Any:
    """The deployment, with `loading` as for `Replica`."""
    from ray import serve

    least, most = on.replicas
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        **({"num_replicas": least} if least == most else {"autoscaling_config": autoscaling(on, rows_of(loading))}),
        ray_actor_options={"num_cpus": share.cpus, "num_gpus": share.gpus},
        max_ongoing_requests=options.max_waiting,
        max_queued_requests=options.max_waiting,
        graceful_shutdown_wait_loop_s=POLL_S,
        graceful_shutdown_timeout_s=options.drain_s + CLOSE_S,
        health_check_period_s=HEALTH_PERIOD_S,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},  # the gate writes it
    )
    return deployment.bind(loading, options, log_level)


def rows_of(loading: Mapping[str, Any]) -> int:
    """Requests that one replica decodes in one pass."""
    return Settings.of(**{name: value for name, value in loading.items() if name in SETTINGS}).rows


def autoscaling(on: RayOptions, rows: int) -> dict[str, Any]:
    """Ray Serve's autoscaling settings: a replica is busy with `rows` requests. Raises ConfigError for unknown ones."""
    from ray.serve.config import AutoscalingConfig

    known = AutoscalingConfig.model_fields
    if unknown := on.autoscaling.keys() - known.keys():
        raise ConfigError(f"Ray Serve has no autoscaling setting {', '.join(sorted(unknown))}. Fix: one of {', '.join(known)}")
    chosen = {"min_replicas": on.replicas[0], "max_replicas": on.replicas[1], "target_ongoing_requests": rows, **on.autoscaling}
    try:
        AutoscalingConfig(**chosen)
    except ValueError as error:
        raise ConfigError(f"Ray Serve refuses these autoscaling settings: {error}") from error
    return chosen


def serve_on_ray(loading: Mapping[str, Any], options: ServeOptions, on: RayOptions, log_level: str) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit code. `loading` as for `Replica`.

    Raises ConfigError for impossible options, before a model is loaded, and for a model that the replicas cannot load.
    """
    if on.address == LOCAL:
        os.environ |= {**private_environment(), **os.environ}
    import ray
    from ray import serve

    from vismoe.app.serving import welcome

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # VisMoE announces the steps itself
    with cluster(on.address, options), contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # replaces Ray's own handler
        on_cpu = loading.get("device") == "cpu"
        share = share_of_a_replica([node["Resources"] for node in ray.nodes() if node["Alive"]], on, on_cpu)
        refuse_shared_memory(loading, share, on.replicas[1])
        if not share.gpus:
            loading = {**loading, "device": "cpu"}
        target = application(loading, options, on, share, log_level)
        with proxies(options, leave=on.address == LOCAL), removed_at_the_end(options.drain_s):
            try:
                serve.run(target, name=NAME)
            except RuntimeError as error:
                raise ConfigError(f"the replicas could not start: {why()}") from error
            print(welcome(options, options.host, options.port), flush=True)
            watch()
    return 0


def private_environment() -> dict[str, str]:
    """Variables for a new cluster, set before ray is imported: it listens on this machine only (its first variable would change
    that), sends no reports, and requires a token, since replicas listen on all addresses anyway."""
    here = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    return here | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextlib.contextmanager
def cluster(address: str, options: ServeOptions) -> Iterator[None]:
    """Connects to the cluster; a new one, on this machine only, ends with the block. Raises ConfigError if none can be
    reached."""
    import ray

    from vismoe.app.serving import listening

    try:
        if address == LOCAL:
            with listening(options):
                pass  # the port is free
            ray.init(
                LOCAL,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                logging_level=logging.WARNING,
            )
        else:
            if ":" in address:  # checked first, because Ray would try for minutes
                host, _, port = address.removeprefix("ray://").rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
            ray.init(address, logging_level=logging.WARNING)
    except (OSError, ValueError) as error:
        fix = "Fix: ray start --head, or --ray-address local"
        raise ConfigError(f"no Ray cluster answers at {address!r} ({error}). {fix}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def proxies(options: ServeOptions, leave: bool) -> Iterator[None]:
    """Ray Serve's proxies, listening where `options` say. If this call starts them and no other application uses them, they end
    with the block unless `leave`.

    Raises ConfigError if the port is taken, or if Serve already runs with an application of this name or listens elsewhere.
    """
    from ray import serve

    before = serve.status()
    if NAME in before.applications:
        raise ConfigError(f"there already is an application {NAME!r}. Fix: end its vismoe serve, or delete it (serve.delete)")
    host = options.host.strip("[]")
    try:
        serve.start(http_options={"host": host, "port": options.port}, logging_config={"log_level": "WARNING"})
    except (RuntimeError, TimeoutError) as error:
        serve.shutdown()
        raise ConfigError(f"Ray Serve cannot listen at {host}, port {options.port}. Fix: another --port") from error
    there = serve.context._get_global_client().http_config
    if (there.host, there.port) != (host, options.port):
        raise ConfigError(
            f"Ray Serve is already running and listens at {there.host}, port {there.port}. "
            f"Fix: --host {there.host} --port {there.port}, or end it first (serve.shutdown)"
        )
    try:
        yield
    finally:
        if not (leave or before.proxies or applications()):
            serve.shutdown()


@contextlib.contextmanager
def removed_at_the_end(drain_s: float) -> Iterator[None]:
    """Deletes the application after the block, and waits for its last answers; after Ctrl-C the cluster does that alone."""
    from ray import serve

    try:
        yield
    except KeyboardInterrupt:
        print(f"\nclosing; running answers have {drain_s:g} s. Press Ctrl-C again to leave at once", flush=True)
        raise
    finally:
        if NAME in applications():
            serve.delete(NAME, _blocking=False)
        deadline_s = time.monotonic() + drain_s + 2 * CLOSE_S
        while NAME in applications() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)


def applications() -> Mapping[str, Any]:
    """All applications of Serve by name; none if Serve was shut down."""
    from ray import serve
    from ray.exceptions import ActorDiedError

    try:
        return serve.status().applications
    except ActorDiedError:
        return {}


def why() -> str:
    """The reason why replicas do not start: the error of their constructor, or Serve's own message."""
    message = applications()[NAME].deployments[NAME].message.strip()
    ours: list[str] = OUR_ERROR.findall(message)
    return ours[-1] if ours else message.rpartition("\n")[2]


def watch() -> None:
    """Prints the number of replicas whenever it changes. Raises ClosedError if another process deletes the application."""
    said = ""
    while NAME in (there := applications()):
        deployments = there[NAME].deployments
        states = deployments[NAME].replica_states if NAME in deployments else {}
        told = ", ".join(f"{count} {state.lower()}" for state, count in sorted(states.items()) if count)
        if told != said:
            print(f"replicas: {told or 'none'}", flush=True)
        said = told
        time.sleep(POLL_S)
    raise ClosedError(f"the application {NAME!r} was deleted on the cluster")
