"""The time that dropping visual tokens costs, before it saves any: `vismoe eval compressor` (like figure 13).

Two parts. *Listening* to one block of a vision tower computes the attention that its patches receive, from the block's own
queries and keys; it is compared with one QKV product of that block and with the block itself, at the shape of Qwen3-VL's tower
(27 blocks, 16 heads of 72, random weights). *Selecting* chooses tokens of one image, at the routing of Qwen3-VL-30B-A3B (8 layers
of 128 experts, top-8). One thread; mean, median and 99th percentile of wall time. Prints tables, then one JSON object on the last
line.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionBlock

from vismoe.flags import SuggestingParser
from vismoe.vision.saliency import MOST_QUERIES, attention_received
from vismoe.vision.selection import SELECTIONS, Pruning, select

BLOCKS, HEADS, WIDTH, HIDDEN = 27, 16, 72, 1152
MERGED = 4  # patches that become one token
PREFIX_LAYERS, EXPERTS, TOP_K, FEATURES = 8, 128, 8, 2048


def listening(patches: int, rounds: int) -> dict[str, Any]:
    """Median milliseconds of the three parts, measured in turn, in bfloat16."""
    torch.manual_seed(0)
    config = Qwen3VLMoeVisionConfig(depth=1, hidden_size=HIDDEN, num_heads=HEADS, intermediate_size=4304)
    config._attn_implementation = "sdpa"
    block = Qwen3VLMoeVisionBlock(config).bfloat16().eval()
    hidden = torch.randn(patches, HIDDEN).bfloat16()
    angles = (torch.randn(patches, WIDTH), torch.randn(patches, WIDTH))
    query, key = torch.randn(2, HEADS, patches, WIDTH).bfloat16()
    whole = torch.tensor([0, patches])
    took = in_turns(
        {
            "block": lambda: block(hidden, cu_seqlens=whole, position_embeddings=angles),
            "QKV product": lambda: block.attn.qkv(hidden),
            "listening": lambda: attention_received(query, key, WIDTH**-0.5),
        },
        rounds,
    )
    medians = {name: 1e3 * statistics.median(seconds) for name, seconds in took.items()}
    return {"tokens": patches // MERGED, **medians, "share_of_tower": medians["listening"] / (BLOCKS * medians["block"])}


def selecting(tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of each method that selects half of the tokens."""
    rng = np.random.default_rng(0)
    saliency, features = rng.random(tokens, np.float32), rng.standard_normal((tokens, FEATURES)).astype(np.float32)
    chosen = rng.random((PREFIX_LAYERS, tokens, EXPERTS)).argsort(axis=2)[:, :, :TOP_K]
    active = np.concatenate(list(chosen + EXPERTS * np.arange(PREFIX_LAYERS)[:, None, None]), axis=1)

    def task(name: str) -> Callable[[], Any]:
        return lambda: select(Pruning(0.5, name), saliency, active, PREFIX_LAYERS * EXPERTS, features)

    took = in_turns({name: task(name) for name in SELECTIONS}, rounds)
    rows = []
    for name, seconds in took.items():
        p50, p99 = (1e3 * float(value) for value in np.percentile(seconds, (50, 99)))
        rows.append({"tokens": tokens, "selection": name, "mean": 1e3 * statistics.mean(seconds), "p50": p50, "p99": p99})
    return rows


def in_turns(tasks: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run of every task, after one that does not count."""
    took: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(rounds + 1):
        for name, task in tasks.items():
            began_s = time.perf_counter()
            task()
            if number:
                took[name].append(time.perf_counter() - began_s)
    return took


def main(arguments: Sequence[str] | None = None) -> int:
    parser = SuggestingParser(prog="vismoe eval compressor", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=(256, 1024, 4096), metavar="N", help="visual tokens of an image")
    parser.add_argument("--rounds", type=int, default=30, metavar="R", help="rounds of each selection; listening uses a tenth")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with torch.inference_mode():
        heard = [listening(tokens * MERGED, max(3, given.rounds // 10)) for tokens in given.tokens]
    selected = [row for tokens in given.tokens for row in selecting(tokens, given.rounds)]
    table = Table(title=f"listening to one block, ms (at most {MOST_QUERIES} queries)", title_justify="left")
    for head in ("visual tokens", "listening", "QKV product", "block", "share of 27 blocks"):
        table.add_column(head, justify="right")
    for row in heard:
        cells = (f"{row[name]:.1f}" for name in ("listening", "QKV product", "block"))
        table.add_row(str(row["tokens"]), *cells, f"{row['share_of_tower']:.2%}")
    Console().print(table)
    table = Table(title="selecting half of the tokens, ms", title_justify="left")
    for head in ("visual tokens", "selection", "mean", "p50", "p99"):
        table.add_column(head, justify="left" if head == "selection" else "right")
    for row in selected:
        table.add_row(str(row["tokens"]), row["selection"], *(f"{row[name]:.2f}" for name in ("mean", "p50", "p99")))
    Console().print(table)
    print(json.dumps({"listening_ms": heard, "selecting_ms": selected}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
