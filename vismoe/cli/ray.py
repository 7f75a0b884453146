"""The flags of `vismoe serve --ray`: which cluster, how many replicas, and the resources of each."""

import argparse
import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from vismoe import flags
from vismoe.app.options import ServeOptions
from vismoe.app.ray_serving import RayOptions, serve_on_ray
from vismoe.config import SERVER_DEFAULTS
from vismoe.errors import ConfigError

FOLDERS = ("model", "store", "calibration")  # relative paths must be resolved: replicas have another working folder
FILES = ("hotness_state", "gguf", "mmproj")


def add_ray_flags(parser: ArgumentParser) -> None:
    """Adds the flags of a cluster, absent where they are not given."""
    group = parser.add_argument_group("replicas on a Ray cluster")

    none = argparse.SUPPRESS
    flags.add(group, "--ray", "serve by Ray Serve; --memory is then the memory of each replica")
    where = "auto for the cluster of this machine, HOST:PORT, ray://HOST:PORT, or local for a new one (default: auto)"
    flags.add(group, "--ray-address ADDRESS", where, str, none, dest="address")
    meaning = "number of replicas; within a range it follows the load (default: 1)"
    flags.add(group, "--replicas N|MIN..MAX", meaning, replica_range, none)
    meaning = "cores of each replica; bounds its threads (default: its share of a node)"
    flags.add(group, "--replica-cpus CORES", meaning, float, none, dest="cpus")
    meaning = "GPUs of each replica (default: 1 if the cluster has GPUs and --device is not cpu)"
    flags.add(group, "--replica-gpus GPUS", meaning, float, none, dest="gpus")
    meaning = "a setting of Ray Serve's autoscaling, e.g. target_ongoing_requests=4; repeat for more"
    flags.add(group, "--autoscaling NAME=VALUE", meaning, setting, none, action="append")


def ray_options(arguments: Namespace) -> RayOptions | None:
    """The options from these flags; None without `--ray`. Raises ConfigError."""
    given = {name: getattr(arguments, name) for name in RayOptions.__dataclass_fields__ if name in arguments}
    if not arguments.ray:
        if given:
            raise ConfigError(f"flags for a Ray cluster ({', '.join(given)}) without --ray. Fix: add --ray, or leave them out")
        return None
    return RayOptions(**{**given, "autoscaling": dict(given.get("autoscaling", ()))})


def replica_range(text: str) -> tuple[int, int]:
    """`2` -> (2, 2), `1..4` -> (1, 4)."""
    least, _, most = text.partition("..")
    if not least.isdecimal() or not (most or least).isdecimal():
        raise ArgumentTypeError(f"{text!r} is neither a number of replicas nor MIN..MAX")
    return int(least), int(most or least)


def setting(text: str) -> tuple[str, Any]:
    """`upscale_delay_s=10` -> ("upscale_delay_s", 10); a value that is not JSON stays text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def run_on_ray(arguments: Namespace, options: ServeOptions, on: RayOptions) -> int:
    """Calls `serve_on_ray` with the model and settings of the flags. Raises ConfigError for flags that Ray does not support."""
    if arguments.api_key:
        raise ConfigError(
            "Ray shows command lines, and so API keys, on its dashboard. Fix: --api-key-file FILE instead of --api-key"
        )
    if not options.port:
        raise ConfigError("port=0: Ray Serve listens at the same port on every node. Fix: --port PORT")
    given = flags.model_options(arguments) | flags.given_settings(arguments)
    loading = {**SERVER_DEFAULTS, **given, "model": flags.one_model(arguments)}
    if ":" in loading.get("device", ""):
        raise ConfigError(f"device={loading['device']}: Ray assigns GPUs to replicas. Fix: --device cuda")
    named = {name: Path(loading[name]) for name in FOLDERS if loading.get(name)}
    loading |= {name: str(folder.resolve()) for name, folder in named.items() if folder.is_dir()}
    loading |= {name: str(Path(loading[name]).expanduser().resolve()) for name in FILES if loading.get(name)}
    if options.image_folder is not None:
        options = replace(options, image_folder=options.image_folder.resolve())
    return serve_on_ray(loading, options, on, arguments.log_level.upper())
