"""What the vision tower outputs for the images of a request, in the order of encoding: tokens, grids and saliency.

Towers encode all images of a prompt before its tokens are processed, in one pass or several; this module holds the images until
then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vismoe.models.inputs.prompts import VISION_TOWERS
from vismoe.models.visual.saliency import VisualSaliency
from vismoe.vision.layout import TokenLayout


@dataclass(frozen=True)
class EncodedImage:
    """One image after its vision tower."""

    tokens: int
    saliency: np.ndarray | None = None  # float32 [tokens]
    grid: tuple[int, int] | None = None  # rows and columns of tokens
    layout: TokenLayout | None = None  # where its tokens are no plain grid; then `grid` is that of the layout


class EncodedImages:
    """Observes a model's tower between `listen()` and `stop()`; otherwise it costs nothing."""

    def __init__(self, model: Any):
        self.saliency = VisualSaliency.of(model)
        self._merge = getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", None) or 1
        self.listening = False
        self._grids: list[EncodedImage] = []
        self._images: list[EncodedImage] = []
        self._used = 0
        towers = [module for path, module in model.named_modules() if path.rpartition(".")[2] in VISION_TOWERS]
        self._hooks = [tower.register_forward_pre_hook(self._note_grids, with_kwargs=True) for tower in towers[:1]]

    def listen(self) -> None:
        """Forget all images and begin to record."""
        self._images, self._grids, self._used, self.listening = [], [], 0, True
        self.saliency.begin()

    def stop(self) -> None:
        self.listening = False
        self.saliency.remove()

    def remove(self) -> None:
        self.stop()
        for hook in self._hooks:
            hook.remove()

    def of_pass(self, per_row: Sequence[int], first: bool) -> list[list[EncodedImage]] | None:
        """The images of a pass with so many visual tokens in each row; None if the tower's images do not match.

        `first`: sequences begin with this pass. Images that it does not use remain for later passes.
        """
        self._collect()
        if first:
            self._used = 0
        images = share_out(per_row, self._images[self._used :])
        if images is not None:
            self._used = self._used + len(images[0]) if len(images) == 1 else len(self._images)
        return images

    def known(self) -> list[EncodedImage]:
        """The images encoded since `listen()`, as far as the tower showed them."""
        self._collect()
        return self._images

    def know(self, images: Sequence[EncodedImage]) -> None:
        """Sets the images, replacing those of the tower, since some were encoded earlier."""
        self._collect()
        self._images, self._used = list(images), 0

    @property
    def heard(self) -> bool:
        """Whether the tower has run since `listen()`."""
        self._collect()
        return bool(self._images)

    def _collect(self) -> None:
        sizes = self.saliency.segments()
        if sizes is None and not self._grids:
            return
        grids, self._grids, self._used = self._grids, [], 0
        if sizes is None:
            self._images = grids
        else:
            salient = self.saliency.take(sizes)
            gridded = [image.tokens for image in grids] == sizes
            self._images = [
                replace(grids[i] if gridded else EncodedImage(tokens), saliency=None if salient is None else salient[i])
                for i, tokens in enumerate(sizes)
            ]
        self.saliency.begin()

    def _note_grids(self, tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Families with images of any shape pass frames, rows and columns of patches to their tower, int `[images, 3]`, or their
        tower says where tokens lie."""
        if not self.listening:
            return
        if hasattr(tower, "token_layouts"):
            layouts = tower.token_layouts(*args, **kwargs)
            self._grids += [EncodedImage(layout.tokens, None, layout.grid, layout) for layout in layouts]
            return
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.ndim == 2 and value.shape[1] == 3:
                for frames, rows, columns in value.tolist():
                    grid = rows // self._merge, columns // self._merge
                    self._grids.append(EncodedImage(frames * grid[0] * grid[1], None, grid if frames == 1 else None))


def share_out(per_row: Sequence[int], images: Sequence[EncodedImage]) -> list[list[EncodedImage]] | None:
    """The images of each row; None if they do not match.

    A single row takes as many images as fill it. Several rows use up all images; if there are too few by a factor, rows were
    repeated that often (beams), and the images of one row serve its copies.
    """
    total = sum(image.tokens for image in images)
    copies = sum(per_row) // total if len(per_row) > 1 and total else 1
    if copies < 1 or len(per_row) % copies or any(len(set(per_row[i : i + copies])) > 1 for i in range(0, len(per_row), copies)):
        return None
    shared, used = list[list[EncodedImage]](), 0
    for tokens in per_row[::copies]:
        first, filled = used, 0
        while filled < tokens and used < len(images):
            filled, used = filled + images[used].tokens, used + 1
        if filled != tokens:
            return None
        shared += [list(images[first:used])] * copies
    return shared if len(per_row) == 1 or used == len(images) else None
