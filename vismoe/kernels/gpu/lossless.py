"""Decodes lossless records on a GPU: one launch per record (`programs.decode`)."""

import torch
from torch import Tensor

from vismoe.types import ALIGNMENT_BYTES, RecordLayout, aligned

BLOCK_BYTES = 8192  # of weights that one program restores: a block of formats/lossless.py
WARPS = 4


class GpuDecoder:
    """Of records of one geometry, `raw`. Triton is imported by the first call."""

    def __init__(self, raw: RecordLayout, device: torch.device):
        rows, self._blocks = [], 0
        for section in raw.sections:
            assert section.offset_bytes % ALIGNMENT_BYTES == 0, section
            rows.append((section.offset_bytes, section.nbytes, self._blocks))
            self._blocks += aligned(section.nbytes, BLOCK_BYTES) // BLOCK_BYTES
        self._sections = torch.tensor(rows).T.contiguous().to(device)

    def __call__(self, encoded: Tensor, slab: Tensor) -> None:
        """Fill `slab`, uint8 `[record_bytes]`, on the current stream; gaps between sections have undefined content afterwards.

        encoded: uint8, a record of this geometry, whose header was checked. Both begin on a multiple of 64 bytes.
        """
        from vismoe.kernels.gpu import programs

        sections = self._sections.shape[1]
        programs.decode[(self._blocks,)](encoded, slab, self._sections, SECTIONS=sections, num_warps=WARPS)
