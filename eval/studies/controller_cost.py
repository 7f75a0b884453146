"""The time of the precision controllers per token: `vismoe eval controllers`, at the routing of Qwen3-30B-A3B.

48 layers of 128 experts, top-8, a quarter of them hot, on synthetic skewed routing that changes half-way. The time of a token is
that of its experts: 48 times 8 int4 experts of 2048 x 768 with the fast kernels, with weights that are in no cache. Controllers
and kernels take turns in one process; results are medians. The goal is at most 1% of a token. `worst` is the slowest token,
including disturbances by other programs. Prints a table, then one JSON object on the last line.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from vismoe.config import PolicyName, Settings
from vismoe.eval.studies.kernels import EXPERTS_OF_A_CALL, FORM, Call, KernelShape, our_calls
from vismoe.flags import SuggestingParser
from vismoe.kernels import cpu
from vismoe.kernels.codecs import codec_of
from vismoe.precision.controller import Precision
from vismoe.precision.importance import heavy_hitters
from vismoe.precision.policy import Policy
from vismoe.trace.synthetic import skewed_trace
from vismoe.types import Format, RecordLayout

GOAL = 0.01  # of a token
LAYERS, EXPERTS, HOT_SHARE = 48, 128, 0.25
POLICIES: tuple[PolicyName, ...] = ("hotness", "importance", "hotness+importance")
ROUNDS = 8
WORKING_SET_BYTES = 2**29

Routing = list[tuple[np.ndarray, np.ndarray]]  # by layer: ids int64 [T, K], weights float32 [T, K]


@dataclass(frozen=True)
class ControllerCost:
    """Cost of one policy in microseconds per token; shares are of a token's time."""

    policy: str
    plain_us: float  # a token without an update
    update_us: float  # a token with an update of the hot sets, every T tokens
    amortised_us: float
    worst_us: float
    prompt_us: float  # a token of a prompt
    share: float  # amortised
    update_share: float


def measure(
    layers: int, experts: int, tokens: int, prompt_tokens: int, calls: Iterator[Call]
) -> tuple[list[ControllerCost], float]:
    """(the cost of every policy, seconds of a token's experts). `calls` compute the experts of one layer."""
    steps, prompt = routing(layers, experts, tokens), prompt_of(layers, experts, prompt_tokens)
    controllers = {name: controller(name, layers, experts) for name in POLICIES}
    took: dict[str, list[tuple[float, bool]]] = {name: [] for name in POLICIES}
    prompts: dict[str, list[float]] = {name: [] for name in POLICIES}
    token_s = []
    for part in np.array_split(np.arange(tokens), ROUNDS):
        for name, precision in controllers.items():
            prompts[name].append(prompt_s(precision, prompt))
            took[name] += [step_s(precision, steps[token]) for token in part]
        token_s.append(experts_s(calls, layers))
    token = statistics.median(token_s)
    period = Settings().hotness_period
    return [cost(name, took[name], prompts[name], period, token) for name in POLICIES], token


def controller(policy: PolicyName, layers: int, experts: int) -> Precision:
    return Precision(
        Policy.of(Settings(policy=policy, formats="4/2")), [experts] * layers, np.full(layers, int(HOT_SHARE * experts))
    )


def routing(layers: int, experts: int, tokens: int) -> list[Routing]:
    """Tokens one after another; in the second half they prefer other experts."""
    rng = np.random.default_rng(0)
    halves = [skewed_trace(layers, experts, EXPERTS_OF_A_CALL, tokens=-(-tokens // 2), seed=seed) for seed in (0, 1)]
    return [
        [(layer.expert_ids.astype(np.int64), weights_of(rng, 1)) for layer in step.layers]
        for step in itertools.chain.from_iterable(half.steps for half in halves)
    ]


def prompt_of(layers: int, experts: int, tokens: int) -> Routing:
    rng = np.random.default_rng(0)
    step = skewed_trace(layers, experts, EXPERTS_OF_A_CALL, prompt_tokens=tokens, tokens=0).steps[0]
    return [(layer.expert_ids.astype(np.int64), weights_of(rng, tokens)) for layer in step.layers]


def weights_of(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Normalised, the largest first, as from a router."""
    return -np.sort(-rng.dirichlet(np.ones(EXPERTS_OF_A_CALL), tokens).astype(np.float32), axis=1)


def step_s(precision: Precision, layers: Routing) -> tuple[float, bool]:
    """(seconds of a decode step, whether it updated the hot sets)."""
    began_s = time.perf_counter()
    for layer, (ids, weights) in enumerate(layers):
        precision.at_layer(layer, True, ids, weights)
    moves = precision.end_step(1)
    return time.perf_counter() - began_s, moves is not None


def prompt_s(precision: Precision, layers: Routing) -> float:
    """Seconds per token of a prompt whose heavy hitters are known."""
    tokens = len(layers[0][0])
    hitters = heavy_hitters(np.random.default_rng(0).random(tokens))
    began_s = time.perf_counter()
    for layer, (ids, weights) in enumerate(layers):
        precision.at_layer(layer, False, ids, weights, hitters)
    precision.end_step(tokens)
    return (time.perf_counter() - began_s) / tokens


def experts_s(calls: Iterator[Call], layers: int) -> float:
    """Seconds of the experts of one token."""
    began_s = time.perf_counter()
    for call in itertools.islice(calls, layers):
        call()
    return time.perf_counter() - began_s


def expert_calls(geometry: KernelShape, working_set_bytes: int) -> Iterator[Call]:
    """One token through 8 int4 experts, other ones at every call."""
    shapes = {FORM.up: (2 * geometry.intermediate, geometry.hidden), FORM.down: (geometry.hidden, geometry.intermediate)}
    raw = RecordLayout.of(shapes, dict.fromkeys(shapes, torch.bfloat16))
    slab = codec_of(Format.INT4, raw, frozenset()).slab
    kernel = cpu.ExpertKernel.of(Format.INT4, raw, slab, FORM)
    assert isinstance(kernel, cpu.ExpertKernel), kernel
    slabs = torch.randint(0, 50, (working_set_bytes // slab.record_bytes, slab.record_bytes), dtype=torch.uint8)
    return our_calls(kernel, slabs, torch.randn(1, geometry.hidden).bfloat16())


def cost(policy: str, took: list[tuple[float, bool]], prompts: list[float], period_tokens: int, token_s: float) -> ControllerCost:
    """`took`: (seconds, whether the hot sets were updated) of every decode step."""
    plain_s = statistics.median(seconds for seconds, update in took if not update)
    update_s = statistics.median([seconds for seconds, update in took if update] or [plain_s])
    amortised_s = plain_s + (update_s - plain_s) / period_tokens
    worst_s = max(seconds for seconds, _ in took)
    plain, update, amortised, worst, prompt = (
        1e6 * seconds for seconds in (plain_s, update_s, amortised_s, worst_s, statistics.median(prompts))
    )
    return ControllerCost(policy, plain, update, amortised, worst, prompt, amortised_s / token_s, update_s / token_s)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = SuggestingParser(prog="vismoe eval controllers", description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=LAYERS, metavar="L", help=f"MoE layers (default: {LAYERS})")
    parser.add_argument("--experts", type=int, default=EXPERTS, metavar="E", help=f"experts of a layer (default: {EXPERTS})")
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="tokens decoded per policy (default: 1024)")
    parser.add_argument("--prompt", type=int, default=1024, metavar="N", help="tokens of a prompt (default: 1024)")
    given = parser.parse_args(arguments)
    backend = cpu.start()
    costs, token_s = measure(
        given.layers, given.experts, given.tokens, given.prompt, expert_calls(KernelShape(), WORKING_SET_BYTES)
    )
    title = f"controllers at {given.layers} x {given.experts}, us per token; a token is {1e3 * token_s:.1f} ms of experts"
    table = Table(title=f"{title} ({backend.isa}, {backend.threads} threads)", title_justify="left")
    for head in ("policy", "plain", "with update", "amortised", "of a token", "worst", "per prompt token"):
        table.add_column(head, justify="left" if head == "policy" else "right")
    for each in costs:
        cells = [f"{value:.0f}" for value in (each.plain_us, each.update_us, each.amortised_us)]
        table.add_row(each.policy, *cells, f"{each.share:.2%}", f"{each.worst_us:.0f}", f"{each.prompt_us:.1f}")
    Console().print(table)
    most = max(each.share for each in costs)
    Console().print(f"goal: at most {GOAL:.0%} of a token; most: {most:.2%}, {'reached' if most <= GOAL else 'missed'}")
    print(json.dumps({"token_ms": 1e3 * token_s, "goal": GOAL, "costs": [asdict(each) for each in costs]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
