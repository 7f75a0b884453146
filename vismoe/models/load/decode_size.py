"""What one decoded token reads of a model that is known by its configuration only."""

from typing import Any

from vismoe.machine.ceilings import ModelSize
from vismoe.models.family.components import backbone_bytes, decode_read_bytes
from vismoe.models.load.locate import inventory_of

__all__ = ["decode_size"]


def decode_size(name: str, model: Any) -> ModelSize:
    """`model` is on the meta device with its experts' parameters still there (`preview.describe`)."""
    inventory = inventory_of(model, model.dtype)
    return ModelSize(
        name=name,
        expert_bytes=max(layout.record_bytes for layout in inventory.layouts),
        experts_bytes=inventory.total_bytes,
        token_experts_bytes=sum(layer.top_k * inventory.layout(layer.index).record_bytes for layer in inventory.layers),
        dense_bytes=decode_read_bytes(backbone_bytes(model)),
    )
