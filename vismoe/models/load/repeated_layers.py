"""The decoder layers that repeat each other at the end of a model, which a measurement on the meta device need not all run."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from vismoe.models.family.families import expert_modules

LEAST = 6  # of which it is worth it
OF_THE_LAYER = re.compile(r"layer_(idx|id|index|number)$")  # numbers that say which layer it is
PLAIN = (bool, int, float, str, type(None))


class RepeatedLayers(NamedTuple):
    """A model's list of decoder layers, `owner.name`, of which those from `first` on are alike."""

    owner: nn.Module
    name: str
    layers: nn.ModuleList
    first: int

    @classmethod
    def of(cls, model: Any) -> "RepeatedLayers | None":
        """None for a model that has no such list, or one whose last layers differ."""
        expert = next((path for path, _ in expert_modules(model)), "")
        lists = ((path, one) for path, one in model.named_modules() if isinstance(one, nn.ModuleList))
        path, layers = next(((path, one) for path, one in lists if expert.startswith(f"{path}.")), ("", nn.ModuleList()))
        types = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(layers)
        if len(types) != len(layers):
            return None
        kinds = [(kind, _shape(layer)) for kind, layer in zip(types, layers)]
        first = next((index + 1 for index in reversed(range(len(kinds))) if kinds[index] != kinds[-1]), 0)
        owner, _, name = path.rpartition(".")
        return cls(model.get_submodule(owner), name, layers, first) if len(layers) - first >= LEAST else None

    @property
    def kept(self) -> list[int]:
        """The layers that are run: of those that repeat each other two, and the last, behind which a cache ends."""
        return [*range(self.first + 2), len(self.layers) - 1]

    @property
    def left_out_layers(self) -> range:
        """The others."""
        return range(self.first + 2, len(self.layers) - 1)

    def like(self, index: int) -> int:
        """Which of the kept layers is like this one."""
        return self.first + 1 if index in self.left_out_layers else index

    @contextmanager
    def left_out(self, last_begins: Callable[..., None]) -> Iterator[None]:
        """Within, the model runs those it keeps, and calls this before the last one."""
        setattr(self.owner, self.name, nn.ModuleList(self.layers[index] for index in self.kept))
        hook = self.layers[-1].register_forward_pre_hook(last_begins)
        try:
            yield
        finally:
            hook.remove()
            setattr(self.owner, self.name, self.layers)


def _shape(layer: nn.Module) -> list[Any]:
    """What the memory that a layer takes depends on."""
    found: list[Any] = []
    for path, module in layer.named_modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        plain = {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}
        same = {name: value for name, value in plain.items() if not OF_THE_LAYER.search(name)}
        found.append((path, type(module), [(name, one.shape, one.dtype) for name, one in own], same))
    return found
