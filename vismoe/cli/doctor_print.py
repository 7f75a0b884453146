"""Prints the report of `vismoe doctor` as tables."""

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vismoe.config import format_bytes
from vismoe.machine.choices import format_rate
from vismoe.machine.facts import Facts
from vismoe.machine.profile import Profile
from vismoe.machine.rates import DiskRates, LinkRates

AGES = ((86_400, "day"), (3_600, "hour"), (60, "minute"))


def print_doctor(console: Console, found: Facts, profile: Profile, report: dict[str, Any]) -> None:
    """`report` is the object that `--json` prints."""
    disk = next((disk for disk in profile.disks if report["rates"]["disk"] and disk.key == report["rates"]["disk"]["key"]), None)
    _heading(console, "This machine")
    _pairs(console, _fact_rows(found, report))
    _heading(console, f"Rates, measured {age_of(report['rates']['age_s'])} (--refresh measures again)")
    _pairs(console, _rate_rows(profile, disk))
    if disk:
        console.print(Padding(_disk_table(disk), (0, 0, 0, 2)))
    _heading(console, "What is chosen, and upper bounds of the tokens per second of any engine on this machine")
    console.print(Padding(_model_table(report["models"]), (0, 0, 0, 2)))
    for model in report["models"]:
        for reason in model["reasons"].values():
            _line(console, f"{model['name']}: {reason}.")
    _heading(console, "What would help")
    for advice in report["advice"] or ["This command found nothing."]:
        _line(console, advice)


def age_of(seconds: float) -> str:
    """`4000` -> `1 hour ago`."""
    for unit_s, unit in AGES:
        if seconds >= unit_s:
            count = int(seconds // unit_s)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"


def _heading(console: Console, text: str) -> None:
    console.print(Text(f"\n{text}" if text != "This machine" else text, style="bold"))


def _line(console: Console, text: str) -> None:
    console.print(Text(f"  {text}"), soft_wrap=True)


def _pairs(console: Console, rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        _line(console, f"{name:<{width}}{value}")


def _fact_rows(found: Facts, report: dict[str, Any]) -> list[tuple[str, str]]:
    disk = report["rates"]["disk"]
    where = f" ({disk['filesystem']})" if disk else ""
    cores = f"{found.usable_cores} of {found.machine_cores} cores usable"
    memory = f"{format_bytes(found.ram_free_bytes)} free of {format_bytes(found.ram_total_bytes)}"
    pages = f", transparent huge pages: {found.huge_pages}" if found.huge_pages else ""
    allocator = f", allocator {found.allocator}" if found.allocator else ""
    gpus = [
        f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, compute capability {gpu.compute_capability}"
        + (f", PCIe {gpu.pci_link}" if gpu.pci_link else "")
        for gpu in found.gpus
    ]
    return [
        ("CPU", f"{found.cpu}, {cores}; {' '.join(found.features) or 'features unknown'}"),
        ("memory", memory + pages),
        ("disk", f"{format_bytes(report['free_disk_bytes'])} free at {report['path']}{where}"),
        *(("GPU", gpu) for gpu in gpus or ["none that torch sees"]),
        ("system", f"{found.system}, {found.libc}{allocator}"),
        ("software", ", ".join(f"{name} {version}" for name, version in found.versions.items())),
    ]


def _rate_rows(profile: Profile, disk: DiskRates | None) -> list[tuple[str, str]]:
    dram = profile.dram
    threads = f"{dram.threads} thread{'s' * (dram.threads > 1)}"
    rows = [("memory", f"{format_rate(dram.bytes_per_s)} with {threads}, {format_rate(dram.single_thread_bytes_per_s)} with one")]
    if profile.lossless_bytes_per_s:
        rows.append(("lossless", f"{format_rate(profile.lossless_bytes_per_s)} of bfloat16 are decoded by all usable cores"))
    if profile.packed_extra_s_per_byte is not None:
        longer = f"{profile.packed_extra_s_per_byte * 1e12:.0f} us longer for each MB of bfloat16"
        rows.append(("", f"an expert's record is computed {longer} than its decoded weights"))
    rows += [(link.device, _link(link)) for link in profile.links]
    if disk:
        rows.append(("page cache", f"{format_rate(disk.cached_bytes_per_s)} when it holds the file"))
        rows.append(
            (
                "disk",
                disk.direct_refused or "random reads in GB/s, past the page cache (O_DIRECT) and through an empty one, by depth",
            )
        )
    return rows


def _link(link: LinkRates) -> str:
    locked, pageable = (link.best_bytes_per_s(page_locked=locked) for locked in (True, False))
    how_locked = "page-locked" if link.registered else "page-locked (allocated so, not as the pager's: --refresh measures that)"
    parts = [f"{format_rate(rate)} {how}" for rate, how in ((locked, how_locked), (pageable, "pageable")) if rate]
    return f"copies {', '.join(parts)}; its memory reads {format_rate(link.device_read_bytes_per_s)}"


def _disk_table(disk: DiskRates) -> Table:
    """Rates in GB/s: a row for each request size, a column for each way of reading and depth."""
    ways = sorted({(not rate.direct, rate.depth) for rate in disk.rates})
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("request")
    for cached, depth in ways:
        table.add_column(f"{'cold' if cached else 'direct'}\nx{depth}", justify="right", no_wrap=True)
    found = {(rate.request_bytes, not rate.direct, rate.depth): rate.bytes_per_s for rate in disk.rates}
    for size in sorted({rate.request_bytes for rate in disk.rates}):
        values = [found.get((size, *way)) for way in ways]
        table.add_row(format_bytes(size), *("" if value is None else f"{value / 1e9:.2f}" for value in values))
    return table


def _model_table(models: list[dict[str, Any]]) -> Table:
    """Sizes, choices, and bounds in tokens per second."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    shares = list(models[0]["missing_tokens_per_s"])
    table.add_column("")
    for name in ("expert", "experts", "reads", "threads", "resident", *(f"{share} miss" for share in shares)):
        table.add_column(name, justify="right", no_wrap=True)
    for model in models:
        table.add_row(
            model["name"],
            format_bytes(model["expert_bytes"]),
            format_bytes(model["experts_bytes"]),
            "O_DIRECT" if model["direct_reads"] else "cache",
            str(model["io_threads"]),
            _tokens(model["resident_tokens_per_s"]),
            *(_tokens(value) for value in model["missing_tokens_per_s"].values()),
        )
    return table


def _tokens(per_s: float | None) -> str:
    return "" if per_s is None else f"{per_s:,.1f}"
