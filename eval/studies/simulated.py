"""`vismoe simulate` against this machine, and the page of machines for models: `python -m vismoe.eval.studies.simulated`.

Measures decode of a generated checkpoint: from disk, from the page cache, and over emulated links, also under policies. Predicts
each setting from rates that are measured between its answers, and from generated routing of the checkpoint's own skew. Prints a
table, then one JSON object. `--page FILE` makes docs/machines.md instead.
"""

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM

from vismoe.bench.checkpoint import write_checkpoint
from vismoe.bench.geometry import geometry_config, model_class_of
from vismoe.bench.simulated import described
from vismoe.config import Settings, parse_bytes
from vismoe.errors import BudgetError, ConfigError
from vismoe.eval.report import study_parser, told
from vismoe.eval.studies.precision_speed import pack_experts
from vismoe.eval.studies.timed import generated
from vismoe.machine.disk import cached_rate, disk_rates
from vismoe.machine.hardware import cores
from vismoe.machine.rates import QUICK, dram_rates
from vismoe.models.load.quantizer import VisMoEConfig
from vismoe.models.load.runtime import runtime_of
from vismoe.pair import Format
from vismoe.simulate.machines import REQUEST_BYTES, HardwarePart, PartsTable, VirtualMachine, here
from vismoe.simulate.predict import Prediction, Workload, predict
from vismoe.simulate.replay import aligned_columns
from vismoe.types import Phase

GEOMETRY, LAYERS, SKEW, PROMPT, NEW = "olmoe-1b-7b", 4, 0.65, 32, 33
ROUNDS, DISK_ROUNDS = 3, 7  # answers; the rate of a shared disk changes from one to the next
EXACT, DISK, PAGE_CACHE = "exact", "disk", "page cache"


class Setting(NamedTuple):
    """What is measured and predicted: the memory, what lies below it, what misses do, and the policy with its formats."""

    memory: str
    below: str
    misses: str = "wait"
    policy: str = EXACT

    @property
    def link(self) -> str | None:
        return self.below if self.below not in (DISK, PAGE_CACHE) else None

    @property
    def rounds(self) -> int:
        return DISK_ROUNDS if self.below == DISK else ROUNDS

    @property
    def settings(self) -> Settings:
        rule, _, formats = self.policy.partition(" ")
        reads: Any = {DISK: "direct", PAGE_CACHE: "cached"}.get(self.below, "auto")
        return Settings.of(
            memory=self.memory, policy=rule, formats=formats or "16/4", misses=self.misses, reads=reads, parallel=1,
            context=PROMPT + NEW, kernels="auto", lookahead="none",
            emulated_link_bytes_per_s=float(parse_bytes(self.link)) if self.link else None,
        )  # fmt: skip


SETTINGS = (
    *(Setting(share, below) for below in (DISK, PAGE_CACHE) for share in ("25%", "50%", "75%")),
    *(Setting(share, link) for link in ("1GB", "4GB") for share in ("25%", "50%")),
    Setting("100%", "4GB"),
    Setting("25%", "1GB", "cpu"),
    Setting("25%", "1GB", policy="importance 16/4"),
    Setting("50%", "1GB", policy="hotness 16/4"),
)
MODELS = (
    "qwen3-vl-30b-a3b", "qwen3-30b-a3b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b", "qwen3-vl-235b-a22b", "mixtral-8x7b",
    "deepseek-v2-lite", "deepseek-vl2", "gpt-oss-20b", "gpt-oss-120b",
)  # fmt: skip
MACHINES = (
    "ddr5-5600 32GB, nvme4, cpu8-avx512",
    "rtx3060-12gb, ddr4-3200 32GB, nvme",
    "rtx4060-8gb, ddr5-5600 32GB, nvme4",
    "rtx4060ti-16gb, ddr5-5600 64GB, nvme4",
    "rtx4090-24gb, ddr5-5600 64GB, nvme4",
    "rtx5090-32gb, ddr5-6400 128GB, nvme5",
)
FORMAT = "int4"
PAGE = """\
# Which machine for which model

**Simulated, not measured:** `vismoe eval simulated --page docs/machines.md` writes this page; [simulate.md](simulate.md) says
what is computed, what is assumed, and how far predictions were from measurements. Tokens per second of one answer, and in
brackets the seconds until the first token after a text of 512 tokens; behind them the limiting part. *No*: the plan does not fit.

Routing is that of `--routing olmoe`, memory is `--memory auto`, the context 4,096 tokens, other settings are the defaults.
"""


class Measured(NamedTuple):
    """Medians over the answers of a setting. Rates in bytes per second, measured between them, by name."""

    setting: Setting
    tokens_per_s: float
    hits: float
    rates: dict[str, list[float]]


class Compared(NamedTuple):
    """One setting."""

    measured: Measured
    predicted: Prediction

    @property
    def deviation(self) -> float:
        return self.predicted.tokens_per_s / self.measured.tokens_per_s - 1

    def cells(self) -> list[str]:
        own, predicted = self.measured, self.predicted
        rates = ", ".join(f"{name} {statistics.median(each) / 1e9:.1f}" for name, each in own.rates.items())
        hits = [f"{rate:.1%}" for rate in (own.hits, predicted.hit_rate)]
        speeds = [f"{speed:.2f}" for speed in (own.tokens_per_s, predicted.tokens_per_s)]
        return [*own.setting, rates, *hits, *speeds, f"{self.deviation:+.0%}"]


SETTING_COLUMNS = ["memory", "below it", "misses", "policy", "GB/s"]
COLUMNS = [*SETTING_COLUMNS, "hits", "predicted hits", "tokens/s", "predicted", "deviation"]


def read_rate(folder: Path) -> float:
    """Bytes per second of the disk past the page cache, with as many readers as the pager has at most."""
    curve = disk_rates(folder, QUICK).curve(direct=True, request_bytes=REQUEST_BYTES)
    return max(rate.bytes_per_s for rate in curve if rate.depth <= cores())


PROBES: dict[str, Callable[[Path], float]] = {
    "memory": lambda _: dram_rates(cores(), QUICK.dram_bytes).bytes_per_s,
    DISK: read_rate,
    PAGE_CACHE: cached_rate,
}


def measured(folder: Path, setting: Setting) -> Measured:
    """Decode of answers after one that fills the slabs, and the rates of the parts that decide, before and after each."""
    config = VisMoEConfig(**vars(setting.settings))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", quantization_config=config).eval()
    runtime, random = runtime_of(model), torch.Generator().manual_seed(0)
    speeds, rates = list[float](), {name: list[float]() for name in PROBES if name in ("memory", setting.below)}

    def answer() -> float:
        ids = torch.randint(0, model.config.vocab_size, (1, PROMPT), generator=random)
        return (NEW - 1) / generated(model, dict(input_ids=ids), NEW)[1]

    def probe() -> None:
        for name, found in rates.items():
            found.append(PROBES[name](folder))

    try:
        answer()
        begun = runtime.pager.metrics.snapshot()
        probe()
        for _ in range(setting.rounds):
            speeds.append(answer())
            probe()
        hits = (runtime.pager.metrics.snapshot() - begun).hit_rate(Phase.DECODE) or 0.0
        return Measured(setting, statistics.median(speeds), hits, rates)
    finally:
        runtime.pager.close()
        runtime.store.close()


def machine(parts: dict[str, HardwarePart], rates: dict[str, float], link: str | None) -> VirtualMachine:
    """This machine with measured rates of memory, and of disk and page cache where they were measured."""
    gb = {name: rate / 1e9 for name, rate in rates.items()}
    ram, disk = dataclasses.replace(parts["ram"], gb_per_s=gb["memory"]), parts["disk"]
    disk = dataclasses.replace(
        disk, gb_per_s=gb.get(DISK, disk.gb_per_s), cached_gb_per_s=gb.get(PAGE_CACHE, disk.cached_gb_per_s)
    )
    over = HardwarePart("link", link, parse_bytes(link) / 1e9, measured=True) if link else None
    return VirtualMachine(ram, disk, parts["cpu"], link=over)


def compared(folder: Path, settings: Sequence[Setting] = SETTINGS) -> list[Compared]:
    """Every setting, measured and predicted: by the median rate of memory of all, and the other rates of its own. Raises
    ConfigError without the rates of `vismoe doctor`."""
    parts = {part.kind: part for part in here(folder)}
    config = geometry_config(GEOMETRY, LAYERS)
    config.eos_token_id = None
    model = write_checkpoint(config, model_class_of(GEOMETRY), folder / "simulated", skew=SKEW).folder
    if any(setting.policy != EXACT for setting in settings):
        pack_experts(str(model), model / "vismoe-store", [Format.INT4])
    os.sync()  # what was just written would be measured too
    found = [measured(model, setting) for setting in track(settings, "measuring", console=Console(stderr=True))]
    memory = statistics.median(rate for each in found for rate in each.rates["memory"])
    rows = []
    for each in found:
        place = machine(
            parts, {name: statistics.median(rates) for name, rates in each.rates.items()} | {"memory": memory}, each.setting.link
        )
        work = Workload(prompt_tokens=PROMPT, skew=SKEW)
        rows.append(Compared(each, predict(described(str(model)), place, each.setting.settings, work)))
    return rows


def page(table: PartsTable) -> str:
    """docs/machines.md."""
    work, asked = Workload(skew=table.routing["olmoe"]["skew"]), Settings.of(context=4096, parallel=1, format=FORMAT)
    text = PAGE + f"\n## {FORMAT}\n\n| model | {' | '.join(MACHINES)} |\n|{'---|' * (1 + len(MACHINES))}\n"
    for model in MODELS:
        subject, cells = described(model), []
        for parts in MACHINES:
            try:
                found = predict(subject, table.machine(parts), asked, work)
                cells.append(f"{found.tokens_per_s:.2g} ({found.first_token_s:.2g} s), {found.limit.partition(' (')[0]}")
            except BudgetError:
                cells.append("no")
            except ConfigError as error:
                cells.append(f"not simulated: {error}".partition(". Fix")[0])
        text += f"| {model} | {' | '.join(cells)} |\n"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = study_parser(None, __doc__ or "")
    parser.add_argument("--folder", type=Path, default=Path("bench"), help="folder of the generated checkpoint (default: bench)")
    parser.add_argument("--only", type=int, nargs="+", help="only these settings, by number from 0")
    parser.add_argument("--page", type=Path, help="write the page of machines for models to this file, and end")
    parser.add_argument("--machines", type=Path, help="another table of parts")
    asked = parser.parse_args(arguments)
    return told(lambda: run(asked))


def run(asked: argparse.Namespace) -> dict[str, Any]:
    if asked.page is not None:
        asked.page.write_text(page(PartsTable(asked.machines)))
        return {"page": str(asked.page)}
    chosen = [SETTINGS[number] for number in asked.only] if asked.only else SETTINGS
    rows = [each.cells() for each in compared(asked.folder, chosen)]
    Console(stderr=True).print(aligned_columns([COLUMNS, *rows], left=5))
    return {"columns": COLUMNS, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
