"""Torch oracles of the CPU kernels: the same arithmetic without the kernels' roundings, in float64, from weights as matrices.

Shapes: hidden `[T, H]`, pairs of a token and an expert `[P]`, grouped by expert.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from vismoe.models.family.forms import activated
from vismoe.types import ExpertForm


def expert(form: ExpertForm, weights: dict[str, Tensor], rows: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """One expert on rows `[n, H]`, computed in `dtype`; weights by section name, matrices in the model's orientation."""

    def product(x: Tensor, name: str) -> Tensor:
        matrix, bias = weights[name].to(dtype), weights.get(f"{name}_bias")
        return functional.linear(x, matrix.T if form.transposed else matrix, None if bias is None else bias.to(dtype))

    return product(activated(form, product(rows.to(dtype), form.up)), form.down)


def parts(
    form: ExpertForm,
    experts: Sequence[dict[str, Tensor]],
    starts: Sequence[int],
    tokens: Tensor,
    factors: Tensor,
    hidden: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`[P, H]` = factor * expert(hidden[token]); pairs starts[i] .. starts[i + 1] belong to expert i."""
    rows = [expert(form, weights, hidden[tokens[first:last]], dtype) for weights, first, last in zip(experts, starts, starts[1:])]
    return torch.cat(rows) * factors.to(dtype)[:, None]


def add(parts: Tensor, tokens: Tensor, out: Tensor) -> None:
    """out `[T, H]` += the rows of parts `[P, H]` of each token, one after the other in pair order, each sum rounded to out's
    type."""
    for part, token in zip(parts, tokens.tolist()):
        out[token] += part


def combine(parts: Tensor, tokens: Tensor, out: Tensor) -> None:
    """out `[T, H]` = the sum of each token's rows in pair order, in the type of parts, rounded once to the type of out."""
    sums = torch.zeros(out.shape, dtype=parts.dtype)
    add(parts, tokens, sums)
    out.copy_(sums)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `[n, in]` times weight `[out, in]` transposed, plus bias, in float64."""
    return functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def check_choice(choose, logits, chosen: int, normalised: bool) -> torch.Tensor:
    """The weights float32 `[T, chosen]` that `choose` gives logits `[T, E]`, which have to be those of the largest softmax."""
    weights, ids = choose(logits, chosen, normalised, torch.float32)
    likely = logits.double().softmax(-1)
    best = likely.topk(chosen).values
    assert torch.equal(likely.gather(1, ids), best) and (ids.sort().values.diff() > 0).all()
    wanted = best / best.sum(-1, keepdim=True) if normalised else best
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=0)
    return weights
