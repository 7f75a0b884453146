"""`vismoe serve --ray`: the same application as replicas on a Ray cluster, each with an engine and a memory budget of its own.

Ray Serve's proxies listen on the cluster's nodes and hand each request to the replica that has fewest. Serve looks after the
replicas' health, starts one again that died, lets those that leave finish their answers, and follows the load if it is told to.
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
from vismoe.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vismoe.engine.engine import Engine

__all__ = ["RayOptions", "refuse_shared_memory", "serve_on_ray", "share_of_a_replica"]

NAME = "vismoe"  # of the application on the cluster, and of its one deployment
LOCAL = "local"  # as an address: a cluster of our own on this machine
OBJECT_STORE_BYTES = 256 * 2**20  # of a cluster of our own: request bodies pass through it
POLL_S = 0.5
CONNECT_S = 5.0
HEALTH_PERIOD_S = 5.0
CLOSE_S = 10.0  # beyond the time for draining, to close engines
OUR_ERROR = re.compile(r"^vismoe\.errors\.\w+: (.+(?:\nFix: .+)?)", re.MULTILINE)  # in a traceback

log = logging.getLogger("vismoe.serve")


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Which cluster, how many replicas there are, and what each of them has."""

    address: str = "auto"  # of a cluster: auto for the one of this machine, HOST:PORT, ray://HOST:PORT; or LOCAL
    replicas: tuple[int, int] = (1, 1)  # at least, at most
    cpus: float | None = None  # of a replica; None: its share of a node
    gpus: float | None = None  # of a replica; None: one, where the cluster has any
    autoscaling: Mapping[str, Any] = field(default_factory=dict)  # further fields of Ray Serve's AutoscalingConfig

    def __post_init__(self) -> None:
        least, most = self.replicas
        if not 1 <= least <= most:
            raise ConfigError(f"replicas={least}..{most}: at least 1, and the first not above the second")
        if self.autoscaling and least == most:
            raise ConfigError(f"{least} replicas leave nothing to autoscaling. Fix: --replicas MIN..MAX")
        if (self.cpus is not None and self.cpus <= 0) or (self.gpus is not None and self.gpus < 0):
            raise ConfigError(f"a replica of cpus={self.cpus}, gpus={self.gpus}: cpus above zero, gpus not below")


@dataclass(frozen=True)
class ReplicaShare:
    """What Ray sets aside for a replica."""

    cpus: float
    gpus: float


def share_of_a_replica(nodes: Sequence[Mapping[str, float]], options: RayOptions, on_cpu: bool) -> ReplicaShare:
    """`nodes`: resources of each, by Ray's names. Replicas spread evenly; each has its part of a node's cores.

    With GPUs a replica takes one, and the cores that belong to it. `on_cpu`: GPUs are not wanted.
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
    """Raises ConfigError where replicas on one machine would each plan with memory that all of them see as free."""
    if most == 1:
        return
    if share.gpus < 1 and loading.get("memory", "auto") == "auto":
        raise ConfigError(f"{most} replicas would each plan with 80% of the free memory. Fix: --memory SIZE, for each replica")
    if share.gpus and loading.get("host_memory") is None:
        raise ConfigError(f"{most} replicas would each plan with all of the free RAM. Fix: --host-memory SIZE, for each replica")


class Replica:
    """What Ray Serve makes on a node, and asks for an application and its health. `loading`: what `vismoe.load` takes."""

    _engine: "Engine | None" = None
    _ended = _failed = 0

    def __init__(self, loading: Mapping[str, Any], options: ServeOptions, log_level: str):
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
        """Raises ClosedError when every request that ended since the last time failed; Serve replaces us after the third time."""
        assert self._engine is not None
        load = self._engine.load
        ended, failed = load.requests - self._ended, load.failed - self._failed
        self._ended, self._failed = load.requests, load.failed
        if ended and failed == ended:
            raise ClosedError(f"the last {failed} requests failed")

    def __del__(self) -> None:
        """Serve calls it once the answers are out, and after an `__init__` that failed."""
        if self._engine is not None:
            self._engine.close()


def application(loading: Mapping[str, Any], options: ServeOptions, on: RayOptions, share: ReplicaShare, log_level: str) -> Any:
    """The deployment, with `loading` as for `Replica`."""
    from ray import serve

    least, most = on.replicas
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        **({"num_replicas": least} if least == most else {"autoscaling_config": autoscaling(on)}),
        ray_actor_options={"num_cpus": share.cpus, "num_gpus": share.gpus},
        max_ongoing_requests=options.max_waiting,
        max_queued_requests=options.max_waiting,
        graceful_shutdown_wait_loop_s=POLL_S,
        graceful_shutdown_timeout_s=options.drain_s + CLOSE_S,
        health_check_period_s=HEALTH_PERIOD_S,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},  # the gate writes it
    )
    return deployment.bind(loading, options, log_level)


def autoscaling(on: RayOptions) -> dict[str, Any]:
    """Ray Serve's settings for it. Raises ConfigError for those it does not know."""
    from ray.serve.config import AutoscalingConfig

    known = AutoscalingConfig.model_fields
    if unknown := on.autoscaling.keys() - known.keys():
        raise ConfigError(f"Ray Serve knows no autoscaling by {', '.join(sorted(unknown))}. Fix: one of {', '.join(known)}")
    chosen = {"min_replicas": on.replicas[0], "max_replicas": on.replicas[1], **on.autoscaling}
    try:
        AutoscalingConfig(**chosen)
    except ValueError as error:
        raise ConfigError(f"Ray Serve refuses these autoscaling settings: {error}") from error
    return chosen


def serve_on_ray(loading: Mapping[str, Any], options: ServeOptions, on: RayOptions, log_level: str) -> int:
    """Serves until SIGTERM or Ctrl-C; the exit code. `loading` as for `Replica`.

    Raises ConfigError for what cannot be, before a model is loaded, and for a model that the replicas cannot load.
    """
    if on.address == LOCAL:
        os.environ |= {**private_environment(), **os.environ}
    import ray
    from ray import serve

    from vismoe.app.serving import welcome

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # its steps are ours to announce
    with cluster(on.address, options), contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has just set one of its own
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
    """For a cluster of our own, before ray is imported: it listens on this machine only (the first name says something else),
    reports to nobody, and asks for a token, since replicas listen everywhere all the same."""
    here = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    return here | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextlib.contextmanager
def cluster(address: str, options: ServeOptions) -> Iterator[None]:
    """Connected to it; one of our own, on this machine only, ends with the block. Raises ConfigError where there is none."""
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
            if ":" in address:  # which Ray would try for minutes
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
    """Ray Serve's, listening where `options` say. If we started them and nobody else uses them, they end unless told to `leave`.

    Raises ConfigError where the port is taken, or where Serve runs already and has our name or listens elsewhere.
    """
    from ray import serve

    before = serve.status()
    if NAME in before.applications:
        raise ConfigError(f"an application {NAME!r} is there already. Fix: end its vismoe serve, or delete it (serve.delete)")
    host = options.host.strip("[]")
    try:
        serve.start(http_options={"host": host, "port": options.port}, logging_config={"log_level": "WARNING"})
    except (RuntimeError, TimeoutError) as error:
        serve.shutdown()
        raise ConfigError(f"Ray Serve cannot listen at {host}, port {options.port}. Fix: another --port") from error
    there = serve.context._get_global_client().http_config
    if (there.host, there.port) != (host, options.port):
        raise ConfigError(
            f"Ray Serve runs already and listens at {there.host}, port {there.port}. "
            f"Fix: --host {there.host} --port {there.port}, or end it first (serve.shutdown)"
        )
    try:
        yield
    finally:
        if not (leave or before.proxies or applications()):
            serve.shutdown()


@contextlib.contextmanager
def removed_at_the_end(drain_s: float) -> Iterator[None]:
    """Deletes the application after the block, and waits for its last answers; Ctrl-C leaves that to the cluster."""
    from ray import serve

    try:
        yield
    except KeyboardInterrupt:
        print(f"\nclosing; answers under way have {drain_s:g} s. Ctrl-C again does not wait for them", flush=True)
        raise
    finally:
        if NAME in applications():
            serve.delete(NAME, _blocking=False)
        deadline_s = time.monotonic() + drain_s + 2 * CLOSE_S
        while NAME in applications() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)


def applications() -> Mapping[str, Any]:
    """By name, all that Serve runs; none where somebody shut it down."""
    from ray import serve
    from ray.exceptions import ActorDiedError

    try:
        return serve.status().applications
    except ActorDiedError:
        return {}


def why() -> str:
    """What Serve knows of replicas that do not start: the error of their constructor, or its own words."""
    message = applications()[NAME].deployments[NAME].message.strip()
    ours: list[str] = OUR_ERROR.findall(message)
    return ours[-1] if ours else message.rpartition("\n")[2]


def watch() -> None:
    """Says how many replicas there are whenever that changes. Raises ClosedError when somebody else deletes the application."""
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
