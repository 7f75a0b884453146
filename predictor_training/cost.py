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
from vismoe.eval.report import add_several
from vismoe.flags import SuggestingParser
from vismoe.lookahead.features import FeatureSizes
from vismoe.lookahead.gate import GateLookahead
from vismoe.lookahead.learned import LearnedLookahead
from vismoe.lookahead.lookahead import Lookahead
from vismoe.lookahead.network import Predictor, Shape
from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.load.preview import model_class, read_config
from vismoe.models.load.quantizer import VisMoEConfig
from vismoe.models.load.runtime import runtime_of
from vismoe.models.moe.lookahead_inputs import LookaheadInputs
from vismoe.types import Phase

TOKENS, PROMPT_TOKENS = 240, 8
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


def timed(lookahead: Lookahead) -> list[float]:
    """The seconds of each evaluation from now on."""
    evaluate, seconds = lookahead.evaluate, list[float]()

    def timed_evaluate(snapshot: Any) -> np.ndarray | None:
        began_s = time.perf_counter()
        scores = evaluate(snapshot)
        seconds.append(time.perf_counter() - began_s)
        return scores

    lookahead.evaluate = timed_evaluate  # type: ignore[method-assign]
    return seconds


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
    config = read_config(str(folder), revision=None).get_text_config()
    layers, expert_bytes = config.num_hidden_layers, 3 * config.hidden_size * config.moe_intermediate_size * 2  # in bfloat16
    settings: dict[str, Any] = {"emulated_link_bytes_per_s": expert_bytes / arrival_s, "misses": "wait"}
    seconds, layer_us, delay = _layers(folder, name, "25%", tokens, **settings)
    _, resident_us, resident_delay = _layers(folder, name, "100%", tokens, pinned_layers=layers)
    micro = np.array(seconds) * 1e6
    p50, p99 = np.percentile(micro, (50, 99))
    evaluated = float(micro.mean()), float(p50), float(p99), len(micro)
    return LookaheadCost(title, name, arrival_s, *evaluated, layer_us, delay, resident_us, resident_delay)


def _layers(folder: Path, name: str, memory: str, tokens: int, **settings: Any) -> tuple[list[float], float, float]:
    """(seconds of each evaluation, median microseconds of a layer without it, the increase with it)."""
    config = VisMoEConfig(memory=memory, kernels="auto", lookahead="none", calibration="none", context=1024, **settings)
    model = model_class(read_config(str(folder), revision=None)).from_pretrained(folder, quantization_config=config).eval()
    runtime = runtime_of(model)
    lookahead, gate = random_lookahead(model, name)
    seconds = timed(lookahead)
    inventory, window = runtime.pager.inventory, runtime.pager.window
    device = runtime.context.device
    asking = _Unheard(inventory, window, lookahead, gate, inline=False, device=device)
    ways = [LookaheadInputs(inventory, window, None, None, inline=True, device=device), asking]
    took: list[list[float]] = [[], []]
    layers = len(runtime.store.inventory.layers)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, model.config.get_text_config().vocab_size - 5, (1, PROMPT_TOKENS + tokens), generator=draw)
    turns = np.random.default_rng(0).permutation(np.arange(tokens) % 2).tolist()

    def layers_s() -> float:
        return runtime.pager.metrics.snapshot().total("layer_seconds", Phase.DECODE)

    try:
        with torch.inference_mode():
            cache = cache_in(model(input_ids=ids[:, :PROMPT_TOKENS], use_cache=True))
            for number, (token, way) in enumerate(zip(ids[:, PROMPT_TOKENS:].unbind(1), turns, strict=True)):
                runtime.context.look_ahead_by(ways[way])
                before_s = layers_s()
                model(input_ids=token[:, None], use_cache=True, **{CACHE: cache})
                if number >= WARM_TOKENS:
                    took[way].append((layers_s() - before_s) / layers)
    finally:
        asking.close()
        runtime.pager.close()
    without, with_it = map(float, map(np.median, took))
    return seconds, without * 1e6, with_it / without - 1


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
    parser = SuggestingParser(prog="python -m vismoe.predictor_training.cost", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, metavar="N", help=f"tokens per measurement, in turns (default: {TOKENS})"
    )
    parser.add_argument("--models", nargs="+", choices=("demo", "30b"), default=("demo", "30b"), help="(default: both)")
    parser.add_argument(
        "--lookaheads", nargs="+", choices=("gate", "learned"), default=("gate", "learned"), help="(default: both)"
    )
    add_several(parser, "--rates", RATES, "SIZE", "rates of links and disks (default: 25GB 1.2GB)")
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
    for head in ("model", "lookahead"):
        table.add_column(head)
    for head in ("expert after ms", "mean us", "p50", "p99", "layer us, missing", "delay", "layer us, resident", "delay"):
        table.add_column(head, justify="right")
    for cost in costs:
        times = [f"{value:.0f}" for value in (cost.mean_us, cost.p50_us, cost.p99_us, cost.layer_us)]
        cells = [*times, f"{cost.delay:+.1%}", f"{cost.resident_layer_us:.0f}", f"{cost.resident_delay:+.1%}"]
        table.add_row(cost.model, cost.lookahead, f"{cost.arrival_s * 1e3:.1f}", *cells)
    Console().print(table)
    print(json.dumps({"costs": [asdict(cost) for cost in costs]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
