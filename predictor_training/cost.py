"""The cost of running a lookahead: `python -m vismoe.predictor_training.cost` (like figure 13, and the delay of a MoE layer).

Seconds per evaluation (mean, median, 99th percentile) of `gate` and of `learned` while a model runs; and the time of a MoE layer
while the worker evaluates but its results are not used, compared with the time without it: tokens alternate in one process,
medians. On the demo model, and on a generated model with the routing of Qwen3-VL-30B-A3B (128 experts, top-8, hidden 2048, W 5;
12 layers, small experts that arrive over an emulated link as late as whole ones would over 25 GB/s, and from a disk of 1.2 GB/s).
A network of random weights costs the same as a trained one. Prints a table, then one JSON object on the last line.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from vismoe.config import parse_bytes
from vismoe.engine.engine import demo_model
from vismoe.flags import SuggestingParser
from vismoe.lookahead.features import FeatureSizes
from vismoe.lookahead.gate import GateLookahead
from vismoe.lookahead.learned import LearnedLookahead
from vismoe.lookahead.lookahead import Lookahead
from vismoe.lookahead.network import Predictor, Shape
from vismoe.models.load.preview import model_class, read_config
from vismoe.models.load.quantizer import VisMoEConfig
from vismoe.models.load.runtime import runtime_of
from vismoe.models.moe.lookahead_inputs import LookaheadInputs
from vismoe.types import Phase

__all__ = ["LookaheadCost", "measure"]

TOKENS = 240
WARM_TOKENS = 24
EXPERT_WIDTH = 64
EXPERT_BYTES = 9.4e6  # of Qwen3-VL-30B-A3B
RATES = ("25GB", "1.2GB")  # per second: 16 lanes of PCIe 4, and a disk


@dataclass(frozen=True)
class LookaheadCost:
    """The cost of one lookahead on one model. Microseconds; delays are shares of the layer's time without it."""

    model: str
    lookahead: str
    arrival_s: float  # of a missing expert
    mean_us: float
    p50_us: float
    p99_us: float
    evaluations: int
    layer_us: float  # median without the lookahead, with misses
    delay: float
    resident_layer_us: float  # the same with all experts in memory
    resident_delay: float


class _Watched:
    """A lookahead whose evaluations are timed."""

    def __init__(self, lookahead: Lookahead):
        self._lookahead, self.seconds, self.remembers = lookahead, list[float](), lookahead.remembers
        self.begin_request, self.observe, self.snapshot = lookahead.begin_request, lookahead.observe, lookahead.snapshot

    @property
    def memory(self) -> Any:
        return self._lookahead.memory

    @memory.setter
    def memory(self, memory: Any) -> None:
        self._lookahead.memory = memory

    def evaluate(self, snapshot: Any) -> np.ndarray | None:
        began_s = time.perf_counter()
        scores = self._lookahead.evaluate(snapshot)
        self.seconds.append(time.perf_counter() - began_s)
        return scores


class _Unheard(LookaheadInputs):
    """Runs the lookahead without passing its results to the pager."""

    def _tell(self, tick: int, layer: int, scores: np.ndarray) -> None:
        pass


def random_lookahead(model: Any, name: str) -> tuple[Lookahead, GateLookahead]:
    """`gate`, or `learned` with random weights, for a loaded model."""
    inventory = runtime_of(model).store.inventory
    gate = GateLookahead.of(model, inventory, 5)
    assert isinstance(gate, GateLookahead), gate
    if name == "gate":
        return gate, gate
    hidden = model.config.get_text_config().hidden_size
    sizes = FeatureSizes(len(inventory.layers), inventory.layers[0].num_experts, hidden, hidden, 5)
    network = Predictor(Shape(sizes), dropout=0.0).eval().folded()
    return LearnedLookahead(gate, {Phase.PREFILL: network, Phase.DECODE: network}, 0.8, 0.1), gate


def measure(folder: Path, title: str, name: str, arrival_s: float, tokens: int) -> LookaheadCost:
    """The cost of lookahead `name` on the model in `folder`, with a quarter of the experts in memory."""
    settings: dict[str, Any] = {"emulated_link_bytes_per_s": _record_bytes(folder) / arrival_s, "misses": "wait"}
    layers = read_config(str(folder), revision=None).get_text_config().num_hidden_layers
    seconds, layer_us, delay = _layers(folder, name, "25%", tokens, **settings)
    _, resident_us, resident_delay = _layers(folder, name, "100%", tokens, pinned_layers=layers)
    micro = np.array(seconds) * 1e6
    p50, p99 = np.percentile(micro, (50, 99))
    return LookaheadCost(
        title,
        name,
        arrival_s,
        float(micro.mean()),
        float(p50),
        float(p99),
        len(micro),
        layer_us,
        delay,
        resident_us,
        resident_delay,
    )


def _layers(folder: Path, name: str, memory: str, tokens: int, **settings: Any) -> tuple[list[float], float, float]:
    """(seconds of each evaluation, median microseconds of a layer without it, the increase with it)."""
    config = VisMoEConfig(memory=memory, kernels="auto", lookahead="none", calibration="none", context=1024, **settings)
    model = model_class(read_config(str(folder), revision=None)).from_pretrained(folder, quantization_config=config).eval()
    runtime = runtime_of(model)
    lookahead, gate = random_lookahead(model, name)
    watched = _Watched(lookahead)
    inventory, window = runtime.pager.inventory, runtime.pager.window
    asking = _Unheard(inventory, window, watched, gate, inline=False)
    ways = [LookaheadInputs(inventory, window, None, None, inline=True), asking]
    took: list[list[float]] = [[], []]
    layers = len(runtime.store.inventory.layers)
    try:
        for token, way in _decode(model, tokens):
            runtime.context.look_ahead_by(ways[way])
            before = runtime.pager.metrics.snapshot().total("layer_seconds", Phase.DECODE)
            yield_token = token()
            after = runtime.pager.metrics.snapshot().total("layer_seconds", Phase.DECODE)
            if yield_token >= WARM_TOKENS:
                took[way].append((after - before) / layers)
    finally:
        asking.close()
        runtime.pager.close()
    without, with_it = (float(np.median(seconds)) for seconds in took)
    return watched.seconds, without * 1e6, with_it / without - 1


@torch.inference_mode()
def _decode(model: Any, tokens: int) -> Iterator[tuple[Any, int]]:
    """Alternating decode steps: (function that runs a step and returns its number, index of the turn)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, model.config.get_text_config().vocab_size - 5, (1, tokens + 8), generator=generator)
    cache = model(input_ids=ids[:, :8], use_cache=True).past_key_values

    def step(number: int) -> int:
        with torch.inference_mode():
            model(input_ids=ids[:, 8 + number : 9 + number], past_key_values=cache, use_cache=True)
        return number

    turns = np.random.default_rng(0).permutation(np.arange(tokens) % 2)
    for number, turn in enumerate(turns.tolist()):
        yield (lambda number=number: step(number)), turn


def _record_bytes(folder: Path) -> int:
    """Bytes of one expert of a model in bfloat16."""
    config = read_config(str(folder), revision=None).get_text_config()
    return int(3 * config.hidden_size * config.moe_intermediate_size * torch.bfloat16.itemsize)


@contextmanager
def routing_of_30b(layers: int = 12) -> Iterator[Path]:
    """A checkpoint with the routing of Qwen3-VL-30B-A3B and narrow experts, in a temporary folder."""
    config = Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=EXPERT_WIDTH, num_experts=128, num_experts_per_tok=8, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=1024, intermediate_size=512, norm_topk_prob=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="vismoe-cost-") as folder:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
        yield Path(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = SuggestingParser(
        prog="python -m vismoe.predictor_training.cost", description=" ".join(__doc__.split("\n\n")[0].split())
    )
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, metavar="N", help=f"tokens per measurement, in turns (default: {TOKENS})"
    )
    parser.add_argument("--models", nargs="+", choices=("demo", "30b"), default=("demo", "30b"), help="(default: both)")
    parser.add_argument(
        "--lookaheads", nargs="+", choices=("gate", "learned"), default=("gate", "learned"), help="(default: both)"
    )
    parser.add_argument(
        "--rates", nargs="+", default=RATES, metavar="SIZE", help="rates of links and disks (default: 25GB 1.2GB)"
    )
    given = parser.parse_args(arguments)
    costs = []
    arrivals = [EXPERT_BYTES / parse_bytes(rate) for rate in given.rates]
    if "demo" in given.models:
        costs += [measure(demo_model(), "demo", name, arrivals[0], given.tokens) for name in given.lookaheads]
    if "30b" in given.models:
        with routing_of_30b() as folder:
            costs += [
                measure(folder, "30B routing", name, arrival_s, given.tokens)
                for arrival_s in arrivals
                for name in given.lookaheads
            ]
    table = Table(title="cost of a lookahead", title_justify="left")
    for head in (
        "model",
        "lookahead",
        "expert after ms",
        "mean us",
        "p50",
        "p99",
        "layer us, missing",
        "delay",
        "layer us, resident",
        "delay",
    ):
        table.add_column(head, justify="left" if head in ("model", "lookahead") else "right")
    for cost in costs:
        times = (cost.mean_us, cost.p50_us, cost.p99_us, cost.layer_us)
        cells = [
            *(f"{value:.0f}" for value in times),
            f"{cost.delay:+.1%}",
            f"{cost.resident_layer_us:.0f}",
            f"{cost.resident_delay:+.1%}",
        ]
        table.add_row(cost.model, cost.lookahead, f"{cost.arrival_s * 1e3:.1f}", *cells)
    Console().print(table)
    print(json.dumps({"costs": [asdict(cost) for cost in costs]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
