"""How the patches of an image become its visual tokens where tokens are no plain grid, as a vision tower may say of itself.

A tower says it by a method `token_layouts(**arguments of its call) -> list[TokenLayout]`, one for each image of the call. Pure.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenLayout:
    """Of one image."""

    token_of: np.ndarray  # int64 [patches]: the token of each patch, in the tower's order, over all views of the image
    row_of: np.ndarray  # int64 [tokens]: a number for each row of tokens; -1: of the whole image
    cell_of: np.ndarray  # int64 [tokens]: the cell of the grid that a token shows, row after row; -1: none
    grid: tuple[int, int]  # rows and columns of cells on the picture
    letterboxed: bool = False  # the grid covers the picture with a border that gives it the grid's proportions

    @property
    def tokens(self) -> int:
        return len(self.row_of)

    def cells(self, tokens: np.ndarray) -> np.ndarray:
        """The cells that these tokens show, int64, without those that show none."""
        cells: np.ndarray = self.cell_of[tokens]
        return cells[cells >= 0]
