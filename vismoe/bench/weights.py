"""Random weights with sensible statistics: how each tensor of a benchmark's checkpoint is generated.

Activations stay sensible: embeddings have unit variance, and all layers together add about as much again to the residual stream,
so that successive tokens remain as different as at the input. Routers are generated for a *skew* s: the share of an expert
follows Zipf's law, p ~ rank ** -s, with ranks shuffled in every layer; s = 0 is uniform.

The skew enters the weights as follows. Hidden coordinate 0 of every text embedding is a constant; attention and the output head
do not see it (their norms' weight there is zero), and a router reads log p from it. The rest of a router's row is noise: the top
k of log p + Gumbel noise are k draws from p without replacement. Here the noise of a logit over tokens is Gaussian with a Gumbel
variable's standard deviation, and log p is scaled so that both have the same tail where the top k begin. Visual tokens do not
have the constant, so their routing is uniform.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from vismoe.errors import ConfigError
from vismoe.models.family.families import ROUTERS, expert_modules, expert_parameters, refuse_unsupported, top_k_of
from vismoe.models.family.mtp import add_mtp

BLOCK_VALUES = 2**24 - 3  # 32 MiB, drawn once; odd, so that rows of a long matrix never repeat the same stretch
PIECE_VALUES = 2**20
GUMBEL_STD = math.pi / math.sqrt(6)
GROWTH = 1.0  # variance that all feed-forward layers together add to the residual stream's one
CONSTANT = 0.5  # coordinate 0 of an embedding, in units of sqrt(H)
GATED_VARIANCE = 0.36  # of silu(a) * b for standard normal a and b
BIAS_STD = 0.02
WRITERS = re.compile(r"(o_proj|out_proj|down_proj|w2)\.weight$")  # matrices whose output joins the residual stream
FEED_FORWARD = re.compile(r"(down_proj|w2)\.weight$")
BLIND_NORMS = re.compile(r"(input_layernorm|(^|model\.)norm)\.weight$")  # before attention and before the output head
LAYER = re.compile(r"layers\.(\d+)\.")  # number of the decoder layer in a module's path


@dataclass(frozen=True)
class WeightRecipe:
    """How to generate one tensor: `values` as they are, otherwise noise times `std`, with column 0 replaced by `column`."""

    shape: tuple[int, ...]
    std: float = 0.0
    column: torch.Tensor | None = None  # [rows]
    values: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """In bfloat16."""
        return 2 * math.prod(self.shape)


@dataclass(frozen=True)
class Weights:
    """All tensors of a checkpoint, under their names on the hub."""

    recipes: dict[str, WeightRecipe]
    expert_bytes: int  # of routed experts

    @property
    def total_bytes(self) -> int:
        return sum(recipe.nbytes for recipe in self.recipes.values())


class Noise:
    """Standard normal bfloat16 values, equal for equal seed and tensor name, in pieces of at most 2 MiB."""

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self._block = torch.randn(BLOCK_VALUES, generator=generator, dtype=torch.bfloat16)

    def pieces(self, name: str, recipe: WeightRecipe) -> Iterator[torch.Tensor]:
        """The tensor's values in order, flat. Tensors begin at different places of one block, so no two are equal."""
        if recipe.values is not None:
            yield recipe.values.bfloat16().flatten()
            return
        start, done, count = _hash(name) % BLOCK_VALUES, 0, math.prod(recipe.shape)
        while done < count:
            piece = self._block[start : start + min(PIECE_VALUES, count - done)] * recipe.std
            if recipe.column is not None:
                _replace_column(piece, done, recipe)
            yield piece
            done += len(piece)
            start = (start + len(piece)) % BLOCK_VALUES


def _replace_column(piece: torch.Tensor, done: int, recipe: WeightRecipe) -> None:
    """Replaces column 0 in the rows that begin in `piece`, which holds a matrix's values from `done` on."""
    width = recipe.shape[-1]
    row = -(-done // width)
    first = piece[row * width - done :: width]
    first.copy_(recipe.column[row : row + len(first)])  # type: ignore[index]


def weights_of(
    config: PreTrainedConfig, model_class: type[PreTrainedModel], *, skew: float, seed: int, mtp: bool = False
) -> Weights:
    """Every tensor of the model under its name on the hub, with its recipe; uses no memory of the tensors' size. mtp: with the
    layer that drafts.

    Raises UnsupportedModelError for a model whose experts cannot be paged, ConfigError for a skew if the model's routers are not
    found.
    """
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=torch.bfloat16)
        if mtp:
            add_mtp(model)
    refuse_unsupported(model)
    _make_vectors(model, seed)
    tied = model.all_tied_weights_keys.keys()  # stored once, under another name
    experts = {f"{path}.{n}": p for path, module in expert_modules(model) for n, p in expert_parameters(module).items()}
    experts = {name: p for name, p in experts.items() if name not in tied}
    down = {name: p for name, p in experts.items() if name.rpartition(".")[2].startswith("down_proj")}
    inner = {name: p for name, p in experts.items() if name not in down}
    state = model.state_dict(keep_vars=True)
    rest = {name: tensor for name, tensor in state.items() if name not in experts and name not in tied}
    scales = _Scales(model, skew, any("shared_expert" in name for name in rest))
    special = _routers(model, scales, seed) | _embedding(model, scales)
    names = {id(tensor): name for name, tensor in rest.items()}

    def backbone(name: str, tensor: torch.Tensor) -> WeightRecipe:  # renaming keeps the tensor, so its model name is known
        return special.get(id(tensor)) or _backbone(names.get(id(tensor), name), tensor, scales)

    recipes = _stored(model, inner, lambda name, tensor: _expert(name, tensor, scales.hidden**-0.5))
    recipes |= _stored(model, down, lambda name, tensor: _expert(name, tensor, scales.down_std(tensor)))
    expert_bytes = sum(recipe.nbytes for recipe in recipes.values())
    return Weights(_stored(model, rest, backbone) | recipes, expert_bytes)


def _stored(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], recipe: Callable[[str, torch.Tensor], WeightRecipe]
) -> dict[str, WeightRecipe]:
    """The tensors as the hub stores them, from transformers' own save conversion."""
    return {name: recipe(name, tensor) for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}


class _Scales:
    """Standard deviations that keep the residual stream's variance at 1 + GROWTH * depth, and the weights of routers."""

    def __init__(self, model: PreTrainedModel, skew: float, has_shared_experts: bool):
        text = model.config.get_text_config()
        self.hidden: int = text.hidden_size
        self.layers: int = text.num_hidden_layers
        self.skew = skew
        self.constant = CONSTANT * math.sqrt(self.hidden) if skew else 0.0
        self.shared = 0.5 if has_shared_experts else 1.0  # shared and routed experts add half of a layer's variance each
        path, module = next(expert_modules(model))
        experts = next(iter(expert_parameters(module).values())).shape[0]
        self.top_k = top_k_of(model, path)
        normalised = getattr(text, "norm_topk_prob", True)
        self.weight_variance = _weight_variance(self.log_odds(experts, 0), self.top_k, normalised)

    def log_odds(self, experts: int, seed: int) -> torch.Tensor:
        """Zipf's log p by expert `[E]`, centred, scaled to Gaussian noise of GUMBEL_STD, with ranks shuffled by `seed`."""
        ranks = torch.randperm(experts, generator=torch.Generator().manual_seed(seed))
        log_p = -self.skew * torch.log1p(ranks)
        return (log_p - log_p.mean()) / _tail_ratio(self.top_k / experts)

    def down_std(self, tensor: torch.Tensor) -> float:
        """Standard deviation of the last matrix of a routed expert, stored `[H, I]` or `[I, H]`, stacked or not."""
        intermediate = math.prod(tensor.shape[-2:]) // self.hidden
        return self._feed_forward_std(intermediate * self.weight_variance) * math.sqrt(self.shared)

    def writer_std(self, name: str, tensor: torch.Tensor) -> float:
        """Standard deviation of a matrix `[H, in]` that adds to the residual stream."""
        fan_in = math.prod(tensor.shape[1:])
        if not FEED_FORWARD.search(name):
            return math.sqrt(GROWTH / self.layers / fan_in)
        return self._feed_forward_std(fan_in) * (math.sqrt(self.shared) if "shared" in name else 1.0)

    def _feed_forward_std(self, fan_in: float) -> float:
        return math.sqrt(GROWTH / self.layers / (GATED_VARIANCE * fan_in))

    def router(self, layer: int, experts: int, seed: int) -> WeightRecipe:
        """Rows `[E, H]`: after the norm, coordinate 0 times column 0 is log p, the rest is noise of GUMBEL_STD over tokens."""
        variance = 1 + GROWTH * layer / self.layers  # of the residual stream without its constant
        norm = math.sqrt(variance + self.constant**2 / self.hidden)
        column = self.log_odds(experts, seed) * norm / self.constant if self.skew else None
        std = GUMBEL_STD * norm / math.sqrt(variance * self.hidden)
        return WeightRecipe((experts, self.hidden), std, column)


def _tail_ratio(share: float) -> float:
    """Ratio of hazards: how much faster a Gaussian of GUMBEL_STD falls than a Gumbel variable, where `share` lies above."""
    normal, share = NormalDist(), min(share, 0.5)
    gaussian = normal.pdf(normal.inv_cdf(1 - share)) / share / GUMBEL_STD
    gumbel = -math.log1p(-share) * (1 - share) / share
    return gaussian / gumbel


def _weight_variance(log_odds: torch.Tensor, top_k: int, normalised: bool) -> float:
    """Mean sum of squared routing weights of a token: the factor of an expert's variance in the sum over a token's experts."""
    noise = torch.randn(1024, len(log_odds), generator=torch.Generator().manual_seed(0))
    weights = (log_odds + GUMBEL_STD * noise).softmax(-1).topk(top_k).values
    weights = weights / weights.sum(-1, keepdim=True) if normalised else weights
    return float(weights.square().sum(-1).mean())


def _routers(model: PreTrainedModel, scales: _Scales, seed: int) -> dict[int, WeightRecipe]:
    """The weight of every router, by the parameter's id."""
    found = {}
    for path, module in expert_modules(model):
        block = model.get_submodule(path.rpartition(".")[0])
        rows = [
            parameter
            for router in ROUTERS
            if hasattr(block, router)
            for parameter in getattr(block, router).parameters()
            if parameter.shape == (module.num_experts, scales.hidden)
        ]
        layer = LAYER.search(path)
        if len(rows) == 1 and layer:
            found[id(rows[0])] = scales.router(int(layer[1]), len(rows[0]), _hash(f"{seed} {path}"))
        elif scales.skew:
            raise ConfigError(
                f"skew={scales.skew}: {path} has {len(rows)} router matrices of {module.num_experts} x {scales.hidden}, "
                "but needs one. Fix: skew=0, or another model"
            )
    return found


def _embedding(model: PreTrainedModel, scales: _Scales) -> dict[int, WeightRecipe]:
    """The text embeddings, by the parameter's id."""
    weight = model.get_input_embeddings().weight
    column = torch.full((len(weight),), scales.constant) if scales.skew else None
    return {id(weight): WeightRecipe(tuple(weight.shape), 1.0, column)}


def _backbone(name: str, tensor: torch.Tensor, scales: _Scales) -> WeightRecipe:
    """The recipe of a tensor that is not a routed expert, by the model's name for it."""
    shape = tuple(tensor.shape)
    if not tensor.is_meta:
        values = tensor.detach().clone()
        if scales.skew and BLIND_NORMS.search(name) and shape == (scales.hidden,):
            values[0] -= 1  # gives a factor of zero, also in families that multiply by 1 + weight
        return WeightRecipe(shape, values=values)
    if WRITERS.search(name) and shape[0] == scales.hidden:
        return WeightRecipe(shape, scales.writer_std(name, tensor))
    return WeightRecipe(shape, math.prod(shape[1:]) ** -0.5)


def _expert(name: str, tensor: torch.Tensor, std: float) -> WeightRecipe:
    return WeightRecipe(tuple(tensor.shape), BIAS_STD if name.endswith("bias") else std)


def _make_vectors(model: PreTrainedModel, seed: int) -> None:
    """Give all vectors of a model on the meta device the values of its family's initialisation; biases are noise."""
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(seed)
        owners = {module: part for part in model.modules() if isinstance(part, PreTrainedModel) for module in part.modules()}
        for module, owner in owners.items():
            vectors = {name: p for name, p in module.named_parameters(recurse=False) if p.ndim <= 1}
            buffers = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta and b.ndim <= 1}
            for name, parameter in vectors.items():
                setattr(module, name, nn.Parameter(torch.zeros(parameter.shape), requires_grad=False))
            for name, buffer in buffers.items():
                setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))
            if vectors or buffers:
                owner._init_weights(module)
            for name in vectors.keys() & {"bias"}:
                getattr(module, name).normal_(0, BIAS_STD)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
