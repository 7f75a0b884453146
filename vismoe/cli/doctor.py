"""`vismoe doctor`: what the machine has, how fast it reads, the choices that follow, and what would help.

Rates are measured once and stored for this machine (`vismoe/machine/profile.py`); a disk that was not measured yet is added.
"""

import dataclasses
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vismoe import flags

if TYPE_CHECKING:
    from vismoe.machine.ceilings import ModelSize
    from vismoe.machine.facts import Facts
    from vismoe.machine.profile import Profile


def doctor_arguments(parser: ArgumentParser) -> None:
    """The flags of `vismoe doctor`."""
    parser.add_argument("words", nargs="*", metavar="[MODEL]", help="report on this model (default: on three examples)")
    flags.add(parser, "--model MODEL", "the model, given as a flag")
    flags.add(parser, "--revision REV", "branch, tag or commit of a hub model")
    flags.add(parser, "--path PATH", "the disk to measure: a folder or a large file (default: the model's, or the hub cache's)")
    flags.add(parser, "--refresh", "measure again, although there are stored rates of this machine")
    flags.add(parser, "--quick", "measure for about 3 s instead of 20 s")
    flags.add(parser, "--json", "one JSON object, sizes in bytes and rates in bytes per second")


def run_doctor(arguments: Namespace) -> int:
    """Reports stored or newly measured rates, with the choices and advice that follow from them."""
    sizes, folder = models_and_folder(flags.one_model(arguments), arguments.revision)
    path = str(Path(arguments.path).expanduser()) if arguments.path else folder
    from vismoe.machine.facts import facts

    profile = cached_or_measured(path, arguments)
    found = facts()
    report = doctor_report(found, profile, sizes, path)
    if arguments.json:
        flags.print_json(arguments, report)
    else:
        from rich.console import Console

        from vismoe.cli.doctor_print import print_doctor

        print_doctor(Console(), found, profile, report)
    return 0


def models_and_folder(name: str | None, revision: str | None) -> "tuple[tuple[ModelSize, ...], str]":
    """The models to report on, and the folder whose disk holds them or would hold them."""
    from huggingface_hub.constants import HF_HUB_CACHE

    with flags.quick_imports():
        from vismoe.machine.ceilings import EXAMPLES
        from vismoe.machine.disk import nearest_folder

        if name is not None:
            from vismoe.models.load.preview import decode_size, describe

    hub = str(nearest_folder(HF_HUB_CACHE))
    if name is None:
        return EXAMPLES, hub
    model, files = describe(name, revision=revision)
    return (decode_size(name, model),), str(files[0].parent) if files else hub


def cached_or_measured(path: str, arguments: Namespace) -> "Profile":
    """The stored profile if it has this disk; otherwise measures and stores the rates, beside those of other disks."""
    from vismoe.machine.measure import measure, measure_disk
    from vismoe.machine.profile import disk_of, load_profile, merged, save_profile

    kept = load_profile()
    if kept and not arguments.refresh:
        if disk_of(kept, path):
            return kept
        profile = dataclasses.replace(kept, disks=(measure_disk(path, arguments.quick, progress=True), *kept.disks))
    else:
        profile = measure(path, arguments.quick, progress=True)
        profile = merged(kept, profile) if kept else profile
    try:
        save_profile(profile)
    except OSError as error:
        print(f"The rates are not stored: {error}. Fix: set VISMOE_CACHE=FOLDER to a writable folder", file=sys.stderr)
    return profile


def doctor_report(found: "Facts", profile: "Profile", sizes: "tuple[ModelSize, ...]", path: str) -> dict[str, Any]:
    """The JSON object that `--json` prints."""
    import psutil

    from vismoe.machine.advice import advise
    from vismoe.machine.disk import nearest_folder
    from vismoe.machine.profile import disk_of

    disk = disk_of(profile, path)
    return {
        "path": path,
        "free_disk_bytes": psutil.disk_usage(str(nearest_folder(path))).free,
        "facts": {**dataclasses.asdict(found), "usable_cores": found.usable_cores},
        "rates": {
            "age_s": max(0.0, time.time() - profile.measured_unix_s),
            "disk": dataclasses.asdict(disk) if disk else None,
            "dram": dataclasses.asdict(profile.dram),
            "links": [dataclasses.asdict(link) for link in profile.links],
            "lossless": {
                "decoded_bytes_per_s": profile.lossless_bytes_per_s,
                "packed_extra_s_per_byte": profile.packed_extra_s_per_byte,
            },
        },
        "models": [_model_report(found, profile, size, path) for size in sizes],
        "advice": list(advise(found, profile, disk)),
    }


def _model_report(found: "Facts", profile: "Profile", size: "ModelSize", path: str) -> dict[str, Any]:
    """The choices for a model, and its greatest possible speed."""
    from vismoe.machine import ceilings
    from vismoe.machine.choices import choose

    device = "cuda" if found.gpus else "cpu"
    choices = choose(
        profile,
        expert_bytes=size.expert_bytes,
        checkpoint_bytes=size.experts_bytes,
        spare_bytes=ceilings.spare_bytes(size, found.ram_free_bytes),
        cores=found.usable_cores,
        device=device,
        path=path,
    )
    arrives = ceilings.miss_bytes_per_s(profile, size, choices, found.ram_free_bytes, path)
    missing = {
        f"{share:.0%}": ceilings.tokens_per_s(profile, size, device, share, arrives) if arrives else None
        for share in ceilings.MISS_SHARES
    }
    return {
        **dataclasses.asdict(size),
        **dataclasses.asdict(choices),
        "resident_tokens_per_s": ceilings.resident_tokens_per_s(profile, size, device),
        "missing_tokens_per_s": missing,
    }


DOCTOR = flags.Command(
    "report this machine's hardware and speed, the choices that follow, and what would help",
    doctor_arguments,
    run_doctor,
    """\
  vismoe doctor                                                  measure once, about 20 s; later show the stored rates
  vismoe doctor --path /mnt/nvme --refresh                       another disk, measured again
  vismoe doctor Qwen/Qwen3-VL-30B-A3B-Instruct --json | jq .models""",
)
