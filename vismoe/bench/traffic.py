"""The least bytes of experts that a forward pass must read, and the shares of the ceilings that a rate reaches. Pure."""

from vismoe.types import ExpertInventory

__all__ = ["expert_read_bytes", "share"]


def expert_read_bytes(inventory: ExpertInventory, tokens: int) -> float:
    """Expected bytes of the experts that `tokens` tokens of one step choose, if routing is uniform."""
    return sum(
        layer.num_experts * (1 - (1 - layer.top_k / layer.num_experts) ** tokens) * inventory.layout(layer.index).payload_bytes
        for layer in inventory.layers
    )


def share(nbytes: float | None, seconds: float | None, ceiling_bytes_per_s: float | None) -> float | None:
    """The share of the ceiling that `nbytes` in `seconds` reach; None if one of them is unknown."""
    if not nbytes or not seconds or not ceiling_bytes_per_s:
        return None
    return nbytes / seconds / ceiling_bytes_per_s
