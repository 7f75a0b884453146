"""The learned lookahead's network: a bottleneck of two BatchNorm-ReLU-Dropout blocks per MoE layer (VisMMoE eq. 8) that refines
`gate`.

    x = [present; use; hidden; visual; log expected]          what features.py makes, standardised
    z = psi(W2 psi(W1 x)),  y = Wo z + a * log p + c * chosen + b

psi is BatchNorm-ReLU-Dropout. `p` and `chosen` are the predictions of the next layers' routers (`Features.expected`), a, b and c
one number for each distance: y starts at the prediction of `gate`, and z learns its errors. Expert numbers have another meaning
in every layer, so each layer has its own weights; they are stacked, and all layers are trained at once. Output `[W, E]`: logits
of `gamma ** (d - 1)` times the probability that layer l + d uses the expert (in prefill: times the share of its tokens).

`Predictor` is trained, in torch. `Folded` runs: standardisation and BatchNorm are folded into the three products, in numpy, in
one thread, so that it can run beside a model. On disk it is float16.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import nn

from vismoe.errors import CheckpointError
from vismoe.lookahead.features import LARGEST, Features, FeatureSizes, half

PARTS = ("history", "hidden", "visual", "gate")
FLOOR = 1e-4  # smaller probabilities count as this
FORMAT, VERSION = "vismoe-predictor", 1


@dataclass(frozen=True)
class Shape:
    """The sizes of a predictor, and which inputs it uses."""

    sizes: FeatureSizes
    parts: tuple[str, ...] = PARTS
    bottleneck: int = 64
    merged: bool = False  # the paper's form: one score per expert number for the whole window

    @property
    def inputs(self) -> int:
        s = self.sizes
        widths = {"history": s.experts * (1 + s.window), "hidden": s.hidden, "visual": s.visual, "gate": s.window * s.experts}
        return sum(widths[part] for part in self.parts)

    @property
    def outputs(self) -> int:
        return self.sizes.experts * (1 if self.merged else self.sizes.window)

    @property
    def deciding(self) -> int:
        """Number of layers that have a next one."""
        return self.sizes.layers - 1


def log_expected(expected: np.ndarray) -> np.ndarray:
    """Logarithms `[..., W, E]` of the probabilities in `[..., 2, W, E]`."""
    return np.log(np.maximum(expected[..., 1, :, :], FLOOR), dtype=np.float32)


class Predictor(nn.Module):
    """Trained on batches with all deciding layers: x `[D, N, inputs]`, gate `[D, N, 2, W, E]` (chosen, log p) or None."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, shape: Shape, dropout: float):
        super().__init__()
        self.shape = shape
        layers, width = shape.deciding, shape.bottleneck
        self.register_buffer("mean", torch.zeros(layers, 1, shape.inputs))
        self.register_buffer("scale", torch.ones(layers, 1, shape.inputs))
        self.w1 = nn.Parameter(torch.randn(layers, shape.inputs, width) * (2 / shape.inputs) ** 0.5)
        self.w2 = nn.Parameter(torch.randn(layers, width, width) * (2 / width) ** 0.5)
        self.wo = nn.Parameter(torch.zeros(layers, width, shape.outputs))
        self.bo = nn.Parameter(torch.zeros(layers, 1, shape.outputs))
        self.norm1, self.norm2 = nn.BatchNorm1d(layers * width), nn.BatchNorm1d(layers * width)
        self.drop = nn.Dropout(dropout)
        said = torch.tensor([1.0, 1.0, 0.0])  # chosen, log p, constant
        self.said = nn.Parameter(said.repeat(layers, shape.sizes.window, 1)) if "gate" in shape.parts else None

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """-> logits `[D, N, W, E]`, or `[D, N, 1, E]` of the merged form."""
        x = (x - self.mean) * self.scale
        z = self._block(torch.bmm(x, self.w1), self.norm1)
        z = self._block(torch.bmm(z, self.w2), self.norm2)
        y = (torch.bmm(z, self.wo) + self.bo).unflatten(-1, (-1, self.shape.sizes.experts))
        if self.said is None:
            return y
        assert gate is not None
        chosen, likely, constant = (self.said[:, None, :, i, None] for i in range(3))  # [D, 1, W, 1]
        said = gate[:, :, 0] * chosen + gate[:, :, 1] * likely + constant
        return y + (said.amax(2, keepdim=True) if self.shape.merged else said)

    def _block(self, z: torch.Tensor, norm: nn.BatchNorm1d) -> torch.Tensor:
        layers, rows, width = z.shape
        z = norm(z.transpose(0, 1).reshape(rows, layers * width)).view(rows, layers, width).transpose(0, 1)
        return self.drop(torch.relu(z))

    def folded(self) -> "Folded":
        """The same function of unnormalised inputs as three products."""
        layers, width = self.shape.deciding, self.shape.bottleneck
        with torch.no_grad():
            gain1, shift1 = _affine(self.norm1, layers, width)
            gain2, shift2 = _affine(self.norm2, layers, width)
            w1 = self.scale.transpose(1, 2) * self.w1  # [D, inputs, B]
            b1 = -(self.mean @ w1)[:, 0]
            arrays = {
                "w1": (w1 * gain1[:, None]).transpose(1, 2),  # [D, B, inputs]
                "b1": b1 * gain1 + shift1,
                "w2": (self.w2 * gain2[:, None]).transpose(1, 2),
                "b2": shift2,
                "wo": self.wo.transpose(1, 2),
                "bo": self.bo[:, 0],
            }
            if self.said is not None:
                arrays["said"] = self.said
        return Folded(self.shape, {name: array.detach().float().cpu().contiguous().numpy() for name, array in arrays.items()})


def _affine(norm: nn.BatchNorm1d, layers: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """BatchNorm at run time as gain and shift, `[D, B]` each."""
    assert norm.running_var is not None and norm.running_mean is not None
    gain = norm.weight / (norm.running_var + norm.eps).sqrt()
    return gain.view(layers, width), (norm.bias - norm.running_mean * gain).view(layers, width)


@dataclass(frozen=True)
class Folded:
    """A trained predictor of one phase, ready to run; float32 arrays."""

    shape: Shape
    arrays: dict[str, np.ndarray]

    def inputs(self, features: Features) -> np.ndarray:
        """One row of inputs, in the order of the parts."""
        s, parts = self.shape.sizes, []
        if "history" in self.shape.parts:
            parts += [features.present, features.use.ravel()]
        if "hidden" in self.shape.parts:
            parts.append(features.hidden)
        if "visual" in self.shape.parts:
            parts.append(features.visual)
        if "gate" in self.shape.parts:
            assert features.expected is not None and features.expected.shape == (2, s.window, s.experts)
            parts.append(log_expected(features.expected).ravel())
        return np.clip(np.concatenate(parts, dtype=np.float32), -LARGEST, LARGEST)

    def logits(self, layer: int, features: Features) -> np.ndarray:
        """`[W, E]` of the layers after `layer` (`[1, E]` of the merged form). Uses einsum, because BLAS would start threads."""
        a = self.arrays
        z = np.maximum(np.einsum("oi,i->o", a["w1"][layer], self.inputs(features)) + a["b1"][layer], 0)
        z = np.maximum(np.einsum("oi,i->o", a["w2"][layer], z) + a["b2"][layer], 0)
        y = (np.einsum("oi,i->o", a["wo"][layer], z) + a["bo"][layer]).reshape(-1, self.shape.sizes.experts)
        if "said" in a:
            chosen, likely, constant = a["said"][layer].T[..., None]  # [W, 1] each
            assert features.expected is not None
            said = chosen * features.expected[0] + likely * log_expected(features.expected) + constant
            y += said.max(0) if self.shape.merged else said
        return y

    def probabilities(self, layer: int, features: Features, gamma: float) -> np.ndarray:
        """Scores `[W', E]` of the layers after `layer`, without decay: the probability of use, or the share of tokens."""
        rows = min(self.shape.sizes.window, self.shape.sizes.layers - 1 - layer)
        decayed = 1 / (1 + np.exp(-self.logits(layer, features)[:rows]))
        return np.minimum(1, decayed / gamma ** np.arange(rows, dtype=np.float32)[:, None])


def save_folded(networks: dict[str, Folded]) -> bytes:
    """The content of a predictor file: one network per phase, float16."""
    arrays = {f"{phase}.{name}": array for phase, network in networks.items() for name, array in network.arrays.items()}
    about = {"version": VERSION, "shapes": {phase: asdict(network.shape) for phase, network in networks.items()}}
    return bytes(save({name: half(array) for name, array in arrays.items()}, {FORMAT: json.dumps(about)}))


def load(path: str | Path) -> dict[str, Folded]:
    """The networks of a predictor file by phase; raises CheckpointError for another or a damaged file."""
    shapes = _shapes(path)
    with safe_open(path, "numpy") as file:
        names = list(file.keys())
        networks = {
            phase: Folded(
                shape,
                {
                    name.partition(".")[2]: file.get_tensor(name).astype(np.float32)
                    for name in names
                    if name.startswith(f"{phase}.")
                },
            )
            for phase, shape in shapes.items()
        }
    for phase, network in networks.items():
        widths = {"w1": (network.shape.bottleneck, network.shape.inputs), "wo": (network.shape.outputs, network.shape.bottleneck)}
        for name, width in widths.items():
            found = network.arrays[name].shape if name in network.arrays else None
            if found != (network.shape.deciding, *width):
                raise CheckpointError(f"{path}: {phase}.{name} is {found}, not {(network.shape.deciding, *width)}. Fix: {AGAIN}")
    return networks


AGAIN = "run vismoe calibrate again"


def _shapes(path: str | Path) -> dict[str, Shape]:
    """The network sizes in the header of a predictor file."""
    try:
        with safe_open(path, "numpy") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})[FORMAT])
            if about["version"] > VERSION:
                raise CheckpointError(
                    f"{path} has version {about['version']}, but this vismoe reads up to {VERSION}. Fix: update vismoe"
                )
            return {
                phase: Shape(FeatureSizes(**shape["sizes"]), tuple(shape["parts"]), shape["bottleneck"], shape["merged"])
                for phase, shape in about["shapes"].items()
            }
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is not a predictor, or is damaged ({error}). Fix: {AGAIN}") from error


def predictor_bytes(path: str | Path) -> int:
    """Memory of a loaded predictor file (float32 in memory), from its header alone."""
    per_shape = 0
    for shape in _shapes(path).values():
        width = shape.bottleneck
        per_layer = width * (shape.inputs + 1) + width * (width + 1) + shape.outputs * (width + 1) + 3 * shape.sizes.window
        per_shape += 4 * shape.deciding * per_layer
    return per_shape
