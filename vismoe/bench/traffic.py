"""Bytes of experts that a forward pass must touch at least, and the shares of the ceilings that a rate reaches. Pure."""

from vismoe.types import ExpertInventory

__all__ = ["expert_read_bytes", "share"]


def expert_read_bytes(inventory: ExpertInventory, tokens: int) -> float:
    """Weights of the experts that `tokens` tokens of one step are expected to choose, were routing uniform."""
    return sum(
        layer.num_experts * (1 - (1 - layer.top_k / layer.num_experts) ** tokens) * inventory.layout(layer.index).payload_bytes
        for layer in inventory.layers
    )


def share(nbytes: float | None, seconds: float | None, ceiling_bytes_per_s: float | None) -> float | None:
    """Which part of the ceiling `nbytes` in `seconds` are; None where one of them is not known."""
    if not nbytes or not seconds or not ceiling_bytes_per_s:
        return None
    return nbytes / seconds / ceiling_bytes_per_s
