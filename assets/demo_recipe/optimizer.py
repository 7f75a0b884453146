"""Muon for the matrices inside the network, AdamW for everything else.

Muon (https://kellerjordan.github.io/posts/muon) replaces a momentum matrix by the nearest orthogonal one, found with five
Newton-Schulz steps; expert stacks [E, a, b] are E matrices. Updates are scaled to the size of AdamW's (arXiv 2502.16982), so that
one learning rate serves both.
"""

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.98)


def orthogonalised(matrix: Tensor, steps: int = 5) -> Tensor:
    """[..., a, b] -> about U V^T of its singular value decomposition, in bfloat16."""
    x = matrix.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for parameters of two or three dimensions."""

    def __init__(self, parameters: list[nn.Parameter], weight_decay: float) -> None:
        super().__init__(parameters, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # torch declares a closure, which is optional
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.any():
                    self._update(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _update(self, parameter: nn.Parameter, gradient: Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[parameter]
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.lerp_(gradient, 1 - MOMENTUM)
        update = orthogonalised(gradient.lerp(momentum, MOMENTUM))
        scale = 0.2 * max(parameter.shape[-2:]) ** 0.5
        parameter.mul_(1 - lr * weight_decay).add_(update.to(parameter.dtype), alpha=-lr * scale)


def optimizers(parameters: list[tuple[str, nn.Parameter]], weight_decay: float = 0.02) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices; AdamW for embeddings, routers, norms, biases and the throw-away heads."""
    hidden = [parameter for name, parameter in parameters if is_hidden_matrix(name, parameter)]
    rest = [parameter for name, parameter in parameters if not is_hidden_matrix(name, parameter)]
    return [Muon(hidden, weight_decay), torch.optim.AdamW(rest, lr=0.0, betas=ADAM_BETAS, weight_decay=0.0, fused=True)]


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    inside = any(part in name for part in ("layers.", "visual.blocks.", "merger"))
    return inside and parameter.ndim in (2, 3) and "mlp.gate." not in name
