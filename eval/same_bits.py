"""Which conditions change bits of a model's logits: `vismoe eval same-bits`.

A prompt of random tokens is computed alone, with all experts in memory and one thread, and then again under each of several other
conditions. For each condition the table gives the share of prompts for which every logit of the last token is unchanged. VisMoE's
promises hold on every processor; the rest depends on how torch divides its products, and may differ on yours. Prints a table,
then one JSON object on the last line.
"""

import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedModel

from vismoe import VisMoEConfig
from vismoe.engine.engine import demo_model
from vismoe.errors import ConfigError
from vismoe.flags import SuggestingParser
from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.load.preview import model_class, read_config
from vismoe.models.moe.linears import MOST_ROWS

PROMISED = ("less memory", "after others")  # for both kernels, in every type
LENGTHS = ((40, 64), (64, 400), (400, 900))  # tokens of prompts
CHUNK_TOKENS = 32
CONTEXT = 4 * LENGTHS[-1][-1]
LESS = "25%"


def loaded(name: str, kernels: str, dtype: str, memory: str) -> PreTrainedModel:
    """The model as plain transformers code loads it."""
    settings = VisMoEConfig(memory=memory, kernels=kernels, context=CONTEXT, calibration="none")
    found: PreTrainedModel = model_class(read_config(name)).from_pretrained(
        name, dtype=getattr(torch, dtype), quantization_config=settings
    )
    return found.eval()


def otherwise(
    model: PreTrainedModel, small: PreTrainedModel, ids: torch.Tensor, draw: random.Random
) -> Iterator[tuple[str, torch.Tensor]]:
    """(condition, logits of the last token [vocabulary] under it). ids: [1, tokens]."""
    length = ids.shape[1]
    other, padding = drawn(draw, length), drawn(draw, draw.randint(1, length // 2))
    yield "less memory", last(small(ids))
    model(other)
    yield "after others", last(model(ids))
    torch.set_num_threads(2)
    yield "two threads", last(model(ids))
    torch.set_num_threads(1)
    yield "in a batch of equal lengths", last(model(torch.cat((ids, other))))
    longer = torch.cat((torch.cat((padding, ids), 1), drawn(draw, length + padding.shape[1])))
    mask = torch.ones_like(longer)
    mask[0, : padding.shape[1]] = 0
    yield "in a padded batch", last(model(longer, attention_mask=mask))
    yield "with its beginning known", last(in_parts(model, ids, draw.randint(1, length - 1), length))
    begins = draw.randint(MOST_ROWS + 1, length - MOST_ROWS - 1)
    yield f"the same, both parts longer than {MOST_ROWS}", last(in_parts(model, ids, begins, length))
    yield f"in chunks of {CHUNK_TOKENS}", last(in_parts(model, ids, CHUNK_TOKENS, CHUNK_TOKENS))
    yield "last token by itself", last(in_parts(model, ids, length - 1, 1))


def drawn(draw: random.Random, tokens: int) -> torch.Tensor:
    return torch.tensor([[draw.randrange(5, 1000) for _ in range(tokens)]])


def last(output: Any) -> torch.Tensor:
    logits: torch.Tensor = output.logits[0, -1]
    return logits


def in_parts(model: PreTrainedModel, ids: torch.Tensor, first: int, more: int) -> Any:
    """The output of the last part, if the first has `first` tokens and each other up to `more`."""
    output = model(ids[:, :first], use_cache=True)
    for begin in range(first, ids.shape[1], more):
        output = model(ids[:, begin : begin + more], use_cache=True, **{CACHE: cache_in(output)})
    return output


def measured(name: str, kernels: str, dtype: str, prompts: int, seed: int) -> dict[str, dict[str, float]]:
    """By condition: the share of the prompts for which all bits were the same, and the largest difference of a logit."""
    model, small = (loaded(name, kernels, dtype, memory) for memory in ("100%", LESS))
    draw, same, furthest = random.Random(seed), defaultdict[str, int](int), defaultdict[str, float](float)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for number in track(range(prompts), f"{kernels} {dtype}", console=Console(stderr=True), transient=True):
                ids = drawn(draw, draw.randint(*LENGTHS[number % len(LENGTHS)]))
                alone = last(model(ids))
                for circumstance, logits in otherwise(model, small, ids, draw):
                    same[circumstance] += torch.equal(alone, logits)
                    furthest[circumstance] = max(furthest[circumstance], (alone.float() - logits.float()).abs().max().item())
    finally:
        torch.set_num_threads(threads)
    return {key: {"same": same[key] / prompts, "largest_difference": furthest[key]} for key in same}


def main(words: Sequence[str] | None = None) -> int:
    parser = SuggestingParser(prog="vismoe eval same-bits", description=__doc__.split("\n\n")[1])
    parser.add_argument("model", nargs="?", default=demo_model(), help="hub name or folder (default: the demo model)")
    parser.add_argument("--n", type=int, default=12, help="prompts for each kernels setting and type (default: 12)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for kernels, dtype in (("fast", "bfloat16"), ("torch", "bfloat16"), ("torch", "float32")):
        try:
            rows[f"{kernels} {dtype}"] = measured(arguments.model, kernels, dtype, arguments.n, arguments.seed)
        except ConfigError as error:  # no fast kernels on this processor
            Console(stderr=True).print(f"{kernels} {dtype}: {error}")
    table = Table("the same prompt", *rows)
    for circumstance in next(iter(rows.values())):
        found = [row[circumstance] for row in rows.values()]
        cells = [f"{one['same']:.0%}" + (f", {one['largest_difference']:.1g}" if one["same"] < 1 else "") for one in found]
        table.add_row(circumstance, *cells)
    Console().print(table)
    print(json.dumps({"model": str(arguments.model), "prompts": arguments.n, "seed": arguments.seed, "same_bits": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
