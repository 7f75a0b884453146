"""Encodes each image alone, so that the vision tower's output does not depend on other images, and caches the result.

It replaces `get_image_features` of the inner model, from which every family's decoder gets its image features. `expect` names the
images of the next call. The tower encodes each image in a separate call unless the cache has it, so a request gets the same bits
whatever its other images are and whichever of them were cached. A call without `expect` goes to the model's own function.
Saliency and grid for a pruner are cached with the image.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vismoe.models.visual.encoded import EncodedImage, EncodedImages

OF_DECODER = ("pooler_output", "deepstack_features")  # the fields of a tower's output that decoders use
LEVELS = "deepstack_features"  # one value per level that a deeper layer adds to the tokens


@dataclass(frozen=True)
class ImageFeatures:
    """A decoder's features of one image: fields of the tower's output, as tensors or lists of tensors."""

    kind: type[Any]  # class of the output
    fields: dict[str, Any]
    listened: bool  # a pruner observed the tower during encoding
    encoded: EncodedImage | None  # what it observed; None: nothing

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for value in self.fields.values() for tensor in _tensors(value))


class ImageCache:
    """Bound to one model. `most_bytes` bounds the cache, 0: no cache; `encoded` counts images that the tower encoded."""

    def __init__(self, inner: nn.Module, most_bytes: int, images: EncodedImages | None):
        self.most_bytes, self.nbytes, self.encoded = most_bytes, 0, 0
        self._inner, self._images = inner, images
        self._kept: OrderedDict[str, ImageFeatures] = OrderedDict()  # least recently used first
        self._expected: tuple[list[str], Callable[[list[int]], Mapping[str, Any]]] | None = None
        self._original = inner.get_image_features
        self._names = list(inspect.signature(self._original).parameters)  # type: ignore[arg-type]

        @functools.wraps(self._original)  # type: ignore[arg-type]
        def features(*args: Any, **kwargs: Any) -> Any:
            return self._features(*args, **kwargs)

        inner.get_image_features = features  # type: ignore[assignment]

    @classmethod
    def of(cls, model: Any, most_bytes: int, images: EncodedImages | None) -> "ImageCache | None":
        """None for a model without images. `images`: observes the tower for a pruner."""
        inner = model.base_model
        return cls(inner, most_bytes, images) if hasattr(inner, "get_image_features") else None

    def expect(self, names: Sequence[str], inputs_of: Callable[[list[int]], Mapping[str, Any]]) -> None:
        """The next call has these images, in this order; `inputs_of` gives the arguments for some of them, by number."""
        self._expected = list(names), inputs_of

    def forget(self) -> None:
        """No longer expect a call."""
        self._expected = None

    def clear(self) -> None:
        """Empty the cache."""
        self._kept.clear()
        self.nbytes = 0

    def remove(self) -> None:
        """Undo the change to the model."""
        self.clear()
        self._inner.__dict__.pop("get_image_features", None)

    def _features(self, *args: Any, **kwargs: Any) -> Any:
        expected, self._expected = self._expected, None
        if expected is None:
            return self._original(*args, **kwargs)  # type: ignore[operator]
        names, inputs_of = expected
        images = []
        for number, name in enumerate(names):
            features = self._found(name)
            if features is None:
                features = self._alone(args, kwargs, inputs_of([number]) if len(names) > 1 else {})
                self._keep(name, features)
            images.append(features)
        return self._joined(images)

    def _alone(self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Mapping[str, Any]) -> ImageFeatures:
        """Encodes one image; `inputs`: its arguments of the call, if these are not all arguments."""
        self.encoded += 1
        listening = self._images is not None and self._images.listening
        if self._images is not None and listening:
            self._images.know([])
        output = self._encode(args, kwargs, inputs)
        told = self._images.known() if self._images is not None and listening else []
        names = [name for name in OF_DECODER if getattr(output, name, None) is not None] or ["last_hidden_state"]
        fields = {name: _copied(getattr(output, name)) for name in names}  # some fields are attributes but not items
        return ImageFeatures(type(output), fields, listening, told[0] if len(told) == 1 else None)

    def _encode(self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Mapping[str, Any]) -> Any:
        """The tower's output, with `inputs` replacing the arguments of the same names."""

        def now(name: str, old: Any) -> Any:
            value = inputs.get(name, old)
            return value.to(old.device) if isinstance(old, torch.Tensor) else value

        positional = tuple(now(name, value) for name, value in zip(self._names, args, strict=False))
        return self._original(*positional, **{name: now(name, value) for name, value in kwargs.items()})  # type: ignore[operator]

    def _joined(self, images: list[ImageFeatures]) -> Any:
        """The tower's output for all these images."""
        told = [features.encoded for features in images if features.encoded is not None]
        if self._images is not None and self._images.listening and len(told) == len(images):
            self._images.know(told)
        output = images[0].kind()
        for name in images[0].fields:
            values = [features.fields[name] for features in images]
            output[name] = [_join(level) for level in zip(*values, strict=True)] if name == LEVELS else _join(values)
        return output

    def _found(self, name: str) -> ImageFeatures | None:
        """The cached image, unless a pruner needs an observation that it lacks."""
        features = self._kept.get(name)
        listening = self._images is not None and self._images.listening
        if features is None or (listening and not features.listened):
            return None
        self._kept.move_to_end(name)
        return features

    def _keep(self, name: str, features: ImageFeatures) -> None:
        if features.nbytes > self.most_bytes:  # the image would fill the whole cache until the next one
            return
        if (old := self._kept.pop(name, None)) is not None:
            self.nbytes -= old.nbytes
        self._kept[name] = features
        self.nbytes += features.nbytes
        while self.nbytes > self.most_bytes:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes


def _join(values: Sequence[Any]) -> Any:
    """Combines the outputs of single images: one tensor over all, or a list with one item per image."""
    if isinstance(values[0], torch.Tensor):
        return torch.cat(list(values)) if len(values) > 1 else values[0]
    return [part for value in values for part in value]


def _copied(value: Any) -> Any:
    """A copy in separate memory: towers return parts of larger tensors."""
    return value.clone() if isinstance(value, torch.Tensor) else [_copied(part) for part in value]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in value:
            yield from _tensors(part)
