"""Puts families whose experts run in their own loop on the experts interface: with the same arithmetic, rows and order.

An adapter is a mixin over the family's own class. It sets the interface's attributes and passes a routing to `run_experts`;
`page_expert` holds what a family computes differently in one expert. `adapt` runs on the meta device, before any code inspects
the model's experts.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from vismoe.models.moe.experts import paged_experts


class OnInterface:
    """An experts module `forward(hidden [T, H], top_k_index [T, K], top_k_weights [T, K])` that lacks only the dispatch."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True
    spare_rows = 0  # rows after the last expert in the checkpoint
    row_groups = 1  # an expert gets at most this fraction of the rows
    run_experts = paged_experts

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return self.run_experts(hidden, index, factors)

    def adopt(self, block: nn.Module, config: Any) -> None:
        """Set the attributes that the interface needs and the family's `__init__` does not set; `block` contains this module."""
        self.config = config


class LongcatFlashExperts(OnInterface):
    """Ids from the number of routed experts on are identity experts: they have no weights and come last in the sum."""

    def adopt(self: Any, block: nn.Module, config: Any) -> None:
        self.config, self.num_experts, self.spare_rows = config, self.num_routed_experts, self.zero_expert_num
        self.gate_up_proj = nn.Parameter(self.gate_up_proj[: self.num_experts])

    def _apply_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self: Any, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        out = self.run_experts(hidden, index, factors)
        for expert in range(self.num_routed_experts, self.total_experts):
            choice, token = index.T.eq(expert).nonzero(as_tuple=True)
            out.index_add_(0, token, (hidden[token] * factors[token, choice, None]).to(out.dtype))
        return out


class DbrxExpertGLU(OnInterface):
    """Three matrices `[E * I, H]`; the parent experts module has the loop."""

    transposed_matrices = frozenset({"w2"})

    def adopt(self: Any, block: Any, config: Any) -> None:
        self.config, self.num_experts, self.top_k = config, self.moe_num_experts, config.ffn_config.moe_top_k
        for name in ("w1", "v1", "w2"):
            matrix = getattr(self, name)
            setattr(self, name, nn.Parameter(matrix.view(self.num_experts, self.ffn_hidden_size, self.hidden_size)))

    def page_expert(self: Any, weights: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        return (self.activation_fn(rows @ weights["w1"].T) * (rows @ weights["v1"].T)) @ weights["w2"]


class DbrxExperts:
    """The loop over the experts that `mlp` contains."""

    def forward(self: Any, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return self.mlp(hidden.reshape(-1, self.hidden_size), index, factors).view(len(hidden), -1, self.hidden_size)


class Llama4TextExperts(OnInterface):
    """Transposed matrices without a bias; its block, below, routes."""

    is_transposed = True

    def adopt(self: Any, block: Any, config: Any) -> None:
        self.config, self.top_k, self.row_groups = config, block.top_k, self.num_experts

    def _apply_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * self.act_fn(gate)


class Llama4TextMoe:
    """The router's score scales an expert's input, and each expert computes all tokens, most of which did not choose it.

    The rows of those tokens are zero and stay zero, but the product must include them, because its bits depend on the number of
    rows.
    """

    def forward(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden.reshape(-1, self.hidden_dim)
        scores, logits = self.router(hidden)
        used = torch.zeros(self.num_experts, dtype=torch.bool, device=hidden.device)
        used[torch.topk(logits, self.top_k, dim=1).indices] = True
        chosen = used.nonzero()[:, 0]
        rows = (hidden * scores[:, chosen].T[..., None]).flatten(0, 1)  # [chosen * T, H]
        ones = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        routed = self.experts(rows, chosen.repeat_interleave(len(hidden))[:, None], ones).view(len(chosen), *hidden.shape)
        del rows  # frees memory for the sum, which may need as much
        out = self.shared_expert(hidden)
        out.add_((routed if self.top_k <= 2 else self._of_all(routed, chosen)).sum(dim=0))
        return out, logits

    def _of_all(self: Any, routed: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """`routed` [chosen, T, H] among the zeros of all other experts, `[E, T, H]`. torch sums in blocks of rows, so the number
        of zeros between three or more addends decides where their sum is rounded. A sum of two is rounded once.
        """
        if len(chosen) == self.num_experts:
            return routed
        return routed.new_zeros(self.num_experts, *routed.shape[1:]).index_copy_(0, chosen, routed)


ADAPTERS: dict[str, type] = {
    "Step3p7Experts": OnInterface,
    "LongcatFlashExperts": LongcatFlashExperts,
    "DbrxExpertGLU": DbrxExpertGLU,
    "DbrxExperts": DbrxExperts,
    "Llama4TextExperts": Llama4TextExperts,
    "Llama4TextMoe": Llama4TextMoe,
}


def adapt(model: Any) -> None:
    """Put the experts of the families above on the interface, in place; other models are not changed."""
    config = model.config.get_text_config()
    for block in list(model.modules()):
        for module in (block, *block.children()):
            adapter = ADAPTERS.get(type(module).__name__)
            if adapter is None or isinstance(module, adapter):
                continue
            module.__class__ = type(type(module).__name__, (adapter, type(module)), {})
            if isinstance(module, OnInterface):
                module.adopt(block, config)
    if type(model).__name__ == "Llama4ForConditionalGeneration" and not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        hooks = model.language_model._forward_hooks.values()
        if _without_images not in hooks:
            model.language_model.register_forward_hook(_without_images)


def _without_images(module: nn.Module, args: Any, output: Any) -> None:
    """transformers 5.24.0 asks llama4's language model for what only the model with images has."""
    if not hasattr(output, "image_outputs"):
        output.image_outputs = None
