"""`vismoe simulate` against this machine, and the page of machines for models: `python -m vismoe.eval.studies.simulated`.

Measures decode of a generated checkpoint: from disk, from the page cache, and over emulated links. Predicts each setting from the
rates of memory, and of the disk, that are measured right before and after it, and from generated routing of the checkpoint's own
skew. Prints a table, then one JSON object. `--page FILE` makes docs/machines.md instead.
"""

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from vismoe.bench.checkpoint import write_checkpoint
from vismoe.bench.geometry import geometry_config, model_class_of
from vismoe.bench.simulated import described
from vismoe.config import Settings, parse_bytes
from vismoe.errors import BudgetError, ConfigError
from vismoe.eval.report import study_parser, told
from vismoe.eval.studies.timed import generated
from vismoe.machine.disk import disk_rates
from vismoe.machine.hardware import cores
from vismoe.machine.rates import QUICK, dram_rates
from vismoe.models.load.quantizer import VisMoEConfig
from vismoe.models.load.runtime import runtime_of
from vismoe.simulate.machines import REQUEST_BYTES, HardwarePart, PartsTable, VirtualMachine, here
from vismoe.simulate.predict import Prediction, Workload, predict
from vismoe.simulate.replay import aligned_columns
from vismoe.types import Phase

GEOMETRY, LAYERS, SKEW, PROMPT, NEW, ROUNDS = "olmoe-1b-7b", 4, 0.65, 32, 33, 3
SETTINGS: tuple[tuple[str, str, str], ...] = (  # (memory, what lies below it, misses)
    *((share, "disk", "wait") for share in ("25%", "50%", "75%")),
    *((share, "page cache", "wait") for share in ("25%", "50%", "75%")),
    *((share, link, "wait") for link in ("1GB", "4GB") for share in ("25%", "50%")),
    ("100%", "4GB", "wait"),
    ("25%", "1GB", "cpu"),
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


@dataclass(frozen=True)
class Compared:
    """One setting. Rates in bytes per second."""

    memory: str
    below: str
    misses: str
    measured: float  # tokens per second, the median of warm requests
    measured_hits: float
    predicted: Prediction
    memory_rate: float

    @property
    def deviation(self) -> float:
        return self.predicted.tokens_per_s / self.measured - 1

    def cells(self) -> list[str]:
        hits = [f"{rate:.1%}" for rate in (self.measured_hits, self.predicted.hit_rate)]
        speeds = [f"{speed:.2f}" for speed in (self.measured, self.predicted.tokens_per_s)]
        return [self.memory, self.below, self.misses, f"{self.memory_rate / 1e9:.1f}", *hits, *speeds, f"{self.deviation:+.0%}"]


COLUMNS = ["memory", "below it", "misses", "memory GB/s", "hits", "predicted hits", "tokens/s", "predicted", "deviation"]


def measured(folder: Path, settings: Settings) -> tuple[float, float]:
    """(tokens per second, hits) of decode: the median of ROUNDS answers after one that fills the slabs."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", quantization_config=VisMoEConfig(**vars(settings))).eval()
    runtime = runtime_of(model)
    random = torch.Generator().manual_seed(0)
    try:
        speeds, begun = list[float](), runtime.pager.metrics.snapshot()
        for number in range(1 + ROUNDS):
            ids = torch.randint(0, model.config.vocab_size, (1, PROMPT), generator=random)
            if number == 1:
                begun = runtime.pager.metrics.snapshot()
            _, decode_s = generated(model, dict(input_ids=ids), NEW)
            speeds.append((NEW - 1) / decode_s)
        return statistics.median(speeds[1:]), (runtime.pager.metrics.snapshot() - begun).hit_rate(Phase.DECODE) or 0.0
    finally:
        runtime.pager.close()
        runtime.store.close()


def machine(parts: dict[str, HardwarePart], memory_rate: float, disk_rate: float | None, link: str | None) -> VirtualMachine:
    ram = dataclasses.replace(parts["ram"], gb_per_s=memory_rate / 1e9)
    disk = parts["disk"] if disk_rate is None else dataclasses.replace(parts["disk"], gb_per_s=disk_rate / 1e9)
    over = HardwarePart("link", link, parse_bytes(link) / 1e9, measured=True) if link else None
    return VirtualMachine(ram, disk, parts["cpu"], link=over)


def read_rate(folder: Path) -> float:
    """Bytes per second of the disk past the page cache, with as many readers as the pager has at most."""
    curve = disk_rates(folder, QUICK).curve(direct=True, request_bytes=REQUEST_BYTES)
    return max(rate.bytes_per_s for rate in curve if rate.depth <= cores())


def compared(folder: Path, settings: Sequence[tuple[str, str, str]] = SETTINGS) -> Iterator[Compared]:
    """Every setting, measured and predicted. Raises ConfigError without the rates of `vismoe doctor`."""
    parts = {part.kind: part for part in here(folder)}
    config = geometry_config(GEOMETRY, LAYERS)
    config.eos_token_id = None
    model = write_checkpoint(config, model_class_of(GEOMETRY), folder / "simulated", skew=SKEW).folder
    os.sync()  # what was just written would be measured too
    for memory, below, misses in settings:
        link = below if below not in ("disk", "page cache") else None
        rates = [dram_rates(cores(), QUICK.dram_bytes).bytes_per_s]
        disks = [read_rate(folder)] if below == "disk" else []
        reads: Any = {"disk": "direct", "page cache": "cached"}.get(below, "auto")
        asked = Settings.of(
            memory=memory, misses=misses, reads=reads, parallel=1, context=PROMPT + NEW, kernels="auto", lookahead="none",
            emulated_link_bytes_per_s=float(parse_bytes(link)) if link else None,
        )  # fmt: skip
        speed, hits = measured(model, asked)
        rates.append(dram_rates(cores(), QUICK.dram_bytes).bytes_per_s)
        disks += [read_rate(folder)] if disks else []
        rate = statistics.mean(rates)
        place = machine(parts, rate, statistics.mean(disks) if disks else None, link)
        guess = predict(described(str(model)), place, asked, Workload(prompt_tokens=PROMPT, skew=SKEW))
        yield Compared(memory, below, misses, speed, hits, guess, rate)


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
    rows = []
    for each in compared(asked.folder, chosen):
        rows.append(each.cells())
        Console(stderr=True).print("  ".join(each.cells()))
    Console(stderr=True).print(aligned_columns([COLUMNS, *rows], left=3))
    return {"columns": COLUMNS, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
