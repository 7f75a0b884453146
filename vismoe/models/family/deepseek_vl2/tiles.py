"""How DeepSeek-VL2 cuts a picture into views, and which visual token each part of a view becomes. Pure.

The model sees a picture twice: whole, in one square view, and as the tiles of a larger picture with the sides of one of the
`candidates`. Both are letterboxed. A view's patches become a square grid of tokens; those of the tiles are joined to one grid.
The tokens of a picture are: the rows of the whole view, a newline token after each; a separator; the rows of the large grid, a
newline token after each. Source: DeepSeek-VL2 (arXiv 2412.10302), section 3.1, and the published processor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vismoe.vision.layout import TokenLayout

Size = tuple[int, int]  # width and height in pixels
# With more pictures than this in a conversation, none is cut into tiles: the large picture is one tile.
MOST_TILED_PICTURES = 2


@dataclass(frozen=True)
class Tiling:
    """The numbers of a published configuration that decide about views and tokens."""

    candidates: tuple[Size, ...]  # the sides that a large picture may have, in an order that matters: the first is one tile
    patch_size: int  # pixels along a side of a patch
    downsample_ratio: int  # patches along a side of a token

    @classmethod
    def of(cls, candidates: Sequence[Sequence[int]], patch_size: int, downsample_ratio: int) -> "Tiling":
        """From the lists of a file."""
        return cls(tuple((width, height) for width, height in candidates), patch_size, downsample_ratio)

    @property
    def side(self) -> int:
        """Pixels along a side of a view."""
        return self.candidates[0][0]

    @property
    def view_patches(self) -> int:
        """Patches along a side of a view."""
        return self.side // self.patch_size

    @property
    def view_tokens(self) -> int:
        """Tokens along a side of a view; an odd number of patches is padded."""
        return -(-self.view_patches // self.downsample_ratio)

    def best(self, picture: Size, least: int = 0, most: int | None = None) -> Size:
        """The candidate that keeps most of the picture's pixels; of equals the one with the least border, then the first.

        Only candidates with `least` to `most` tokens are considered. Raises ValueError if there is none.
        """
        width, height = picture

        def order(candidate: Size) -> Size:
            scale = min(candidate[0] / width, candidate[1] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - candidate[0] * candidate[1]

        allowed = [size for size in self.candidates if least <= self.tokens(size) and (most is None or self.tokens(size) <= most)]
        if not allowed:
            counts = sorted({self.tokens(size) for size in self.candidates})
            asked = f"{least} to {most}" if least else f"up to {most}"
            raise ValueError(f"no way of cutting a picture gives {asked} visual tokens; they give {_listed(counts)}")
        return max(allowed, key=order)  # of equals the first

    def tiles(self, size: Size) -> tuple[int, int]:
        """Tiles across and down of a picture with these sides."""
        return size[0] // self.side, size[1] // self.side

    def tokens(self, size: Size) -> int:
        """Visual tokens of a picture whose large version has these sides."""
        return tokens_of(self.tiles(size), self.view_tokens)


def tokens_of(tiles: Sequence[int], side: int) -> int:
    """Visual tokens of a picture with (across, down) tiles; `side`: tokens along a side of a view."""
    across, down = tiles
    return side * (side + 1) + 1 + down * side * (across * side + 1)


def token_layout(tiles: Sequence[int], patches: int, side: int) -> TokenLayout:
    """Of a picture with (across, down) tiles; a view has `patches` x `patches` patches and `side` x `side` tokens.

    Newline tokens and the separator have no patches: a newline belongs to its row, the separator to the whole picture. Places are
    those in the large grid.
    """
    across, down = tiles
    whole, large = _numbered(side, side, 0), _numbered(down * side, across * side, side * (side + 1) + 1)
    views = [
        whole,
        *(large[y : y + side, x : x + side] for y in range(0, down * side, side) for x in range(0, across * side, side)),
    ]
    of_patch = np.arange(patches) // -(-patches // side)
    tokens = tokens_of(tiles, side)
    row_of, cell_of = np.full(tokens, -1), np.full(tokens, -1)
    for first, grid in ((0, whole), (side, large)):
        row_of[grid] = first + np.arange(len(grid))[:, None]
        row_of[grid[:, -1] + 1] = first + np.arange(len(grid))  # the newlines
    cell_of[large] = np.arange(large.size).reshape(large.shape)
    return TokenLayout(
        token_of=np.concatenate([view[of_patch][:, of_patch].reshape(-1) for view in views]),
        row_of=row_of,
        cell_of=cell_of,
        grid=(down * side, across * side),
        letterboxed=True,
    )


def _numbered(rows: int, columns: int, first: int) -> np.ndarray:
    """Numbers of the tokens of a grid, int64 `[rows, columns]`, if a newline token follows each row."""
    return first + np.arange(rows)[:, None] * (columns + 1) + np.arange(columns)


def _listed(counts: list[int]) -> str:
    return f"{', '.join(map(str, counts[:-1]))} or {counts[-1]}" if len(counts) > 1 else str(counts[0])
