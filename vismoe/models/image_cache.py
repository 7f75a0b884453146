"""Images that were encoded already: what the vision tower made of each is kept, within a bound of bytes, and not made again.

Sits where every family's decoder gets its image features, `get_image_features` of the inner model, and is asked for by name:
`expect` says which images the next call is about. What the tower told a pruner (saliency, grid) is kept with them.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vismoe.models.encoded import EncodedImage, EncodedImages

__all__ = ["ImageCache"]

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Features:
    """What a decoder gets of one image: its tokens `[N, H]`, and what joins them in deeper layers, `[N, H]` each."""

    tokens: torch.Tensor
    deeper: Tensors
    listened: bool  # somebody listened to the tower meanwhile
    encoded: EncodedImage | None  # what it told; None: nothing

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.tokens, *self.deeper))


class ImageCache:
    """Bound to one model. `most_bytes` bounds what is kept; `encoded` counts the images that went through the tower."""

    def __init__(self, inner: nn.Module, most_bytes: int, images: EncodedImages | None):
        self.most_bytes, self.nbytes, self.encoded = most_bytes, 0, 0
        self._inner, self._images = inner, images
        self._kept: OrderedDict[str, Features] = OrderedDict()  # least recently used first
        self._expected: tuple[list[str], Callable[[list[int]], Mapping[str, Any]]] | None = None
        self._kind: type[Any] | None = None  # of the tower's output
        self._flat = False  # what joins deeper layers comes in one tensor per layer; one per image otherwise
        self._original = inner.get_image_features
        self._names = list(inspect.signature(self._original).parameters)  # type: ignore[arg-type]

        @functools.wraps(self._original)  # type: ignore[arg-type]
        def features(*args: Any, **kwargs: Any) -> Any:
            return self._features(*args, **kwargs)

        inner.get_image_features = features  # type: ignore[assignment]

    @classmethod
    def of(cls, model: Any, most_bytes: int, images: EncodedImages | None) -> "ImageCache | None":
        """None for a model without images. `images`: what listens to the tower for a pruner."""
        inner = model.base_model
        return cls(inner, most_bytes, images) if hasattr(inner, "get_image_features") else None

    def expect(self, names: Sequence[str], inputs_of: Callable[[list[int]], Mapping[str, Any]]) -> None:
        """The next call is about these images, in this order; `inputs_of` gives the arguments for some of them, by number."""
        self._expected = list(names), inputs_of

    def forget(self) -> None:
        """No call is expected any more."""
        self._expected = None

    def clear(self) -> None:
        """Forget all images."""
        self._kept.clear()
        self.nbytes = 0

    def remove(self) -> None:
        """Give the model back as it was."""
        self.clear()
        self._inner.__dict__.pop("get_image_features", None)

    def _features(self, *args: Any, **kwargs: Any) -> Any:
        expected, self._expected = self._expected, None
        if expected is None:
            return self._original(*args, **kwargs)  # type: ignore[operator]
        names, inputs_of = expected
        kept = [self._found(name) for name in names]
        missing = [number for number, features in enumerate(kept) if features is None]
        if missing:
            self.encoded += len(missing)
            output = self._encode(args, kwargs, inputs_of(missing) if len(missing) < len(names) else {})
            for number, features in zip(missing, self._parts(output, len(missing)), strict=False):
                kept[number] = features
                self._keep(names[number], features)
            if len(missing) == len(names):
                return output
        return self._joined([features for features in kept if features is not None])

    def _encode(self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Mapping[str, Any]) -> Any:
        """The tower's output, with `inputs` in place of the arguments of the same names."""

        def now(name: str, old: Any) -> Any:
            value = inputs.get(name, old)
            return value.to(old.device) if isinstance(old, torch.Tensor) else value

        positional = tuple(now(name, value) for name, value in zip(self._names, args, strict=False))
        return self._original(*positional, **{name: now(name, value) for name, value in kwargs.items()})  # type: ignore[operator]

    @property
    def _listening(self) -> bool:
        return self._images is not None and self._images.listening

    def _parts(self, output: Any, images: int) -> list[Features]:
        """The output image by image; nothing where this family's does not come apart."""
        tokens, deeper = getattr(output, "pooler_output", None), getattr(output, "deepstack_features", None) or ()
        if not isinstance(tokens, list | tuple) or len(tokens) != images:
            return []
        counts = [len(part) for part in tokens]
        self._flat = all(isinstance(level, torch.Tensor) for level in deeper)
        levels = [level.split(counts) if isinstance(level, torch.Tensor) else level for level in deeper]
        told = self._images.known() if self._images is not None and self._listening else []
        self._kind = type(output)
        return [
            Features(
                tokens[number].clone(),
                tuple(level[number].clone() for level in levels),
                self._listening,
                told[number] if len(told) == images else None,
            )
            for number in range(images)
        ]

    def _joined(self, images: list[Features]) -> Any:
        """The output for these images, as a tower call about all of them would have it."""
        assert self._kind is not None
        told = [features.encoded for features in images if features.encoded is not None]
        if self._images is not None and self._listening and len(told) == len(images):
            self._images.know(told)
        output = self._kind()
        output["pooler_output"] = [features.tokens for features in images]
        if images[0].deeper:
            levels = zip(*(features.deeper for features in images), strict=True)
            output["deepstack_features"] = [torch.cat(level) if self._flat else level for level in levels]
        return output

    def _found(self, name: str) -> Features | None:
        """The image, if what is known of it is enough for who listens."""
        features = self._kept.get(name)
        if features is None or (self._listening and not features.listened):
            return None
        self._kept.move_to_end(name)
        return features

    def _keep(self, name: str, features: Features) -> None:
        if features.nbytes > self.most_bytes:  # it would be alone, and gone with the next one
            return
        if (old := self._kept.pop(name, None)) is not None:
            self.nbytes -= old.nbytes
        self._kept[name] = features
        self.nbytes += features.nbytes
        while self.nbytes > self.most_bytes:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes
