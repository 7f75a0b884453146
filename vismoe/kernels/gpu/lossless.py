"""Decodes lossless records on a GPU: into slabs, one launch per record; or just before they are computed, many by one launch."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vismoe.types import ALIGNMENT_BYTES, MoELayer, RecordLayout, aligned

BLOCK_BYTES = 8192  # of weights that one program restores: a block of formats/lossless.py
WARPS = 4
RING_SLOTS = 16


class GpuDecoder:
    """Of records of one geometry, `raw`. Triton is imported by the first call."""

    def __init__(self, raw: RecordLayout, device: torch.device):
        self._sections, self._blocks = _sections(raw, device)

    def __call__(self, encoded: Tensor, slab: Tensor) -> None:
        """Fill `slab`, uint8 `[record_bytes]`, on the current stream; gaps between sections have undefined content afterwards.

        encoded: uint8, a record of this geometry, whose header was checked. Both begin on a multiple of 64 bytes.
        """
        from vismoe.kernels.gpu import programs

        sections = self._sections.shape[1]
        programs.decode[(self._blocks,)](encoded, slab, self._sections, SECTIONS=sections, num_warps=WARPS)


class DecodingRing:
    """Raw records for the experts that a layer computes next, where slabs hold encoded ones (FluxMoE's compressed tier).

    raw: by geometry the layout of decoded records, None for one whose slabs hold these. All geometries share the `slots`.

    A slot may be overwritten as soon as the kernels that read it are queued: the next decoding is queued behind them, on the same
    stream, or waits for the stream of the last one. While a graph is captured nothing is waited for; whoever replays one on
    another stream than other passes run on has to order them.
    """

    def __init__(self, raw: Sequence[RecordLayout | None], slots: int, device: torch.device):
        self.slots, self._device, self._slot_bytes = slots, device, _slot_bytes(raw)
        self._of = [None if layout is None else _sections(layout, device) for layout in raw]
        self._buffer = torch.empty(slots, self._slot_bytes, dtype=torch.uint8, device=device)
        first = self._buffer.data_ptr()
        assert first % ALIGNMENT_BYTES == 0, "torch aligns what it allocates"
        there = torch.arange(slots) * self._slot_bytes + first
        self.addresses, self.addresses_there = there.numpy(), there.to(device)  # int64 [slots], on the host and on the device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def decodes(self, geometry: int) -> bool:
        """Whether the slabs of a geometry hold encoded records."""
        return self._of[geometry] is not None

    def decode(self, geometry: int, records: Tensor) -> None:
        """Fill the slots 0 .. n of records int64 `[n]`, their addresses on the device, on the current stream, by one launch; the
        slot of an address 0 is left as it is. Gaps between sections have undefined content afterwards.

        The records are of this geometry, their headers were checked, and each begins on a multiple of 64 bytes.
        """
        from vismoe.kernels.gpu import programs

        found = self._of[geometry]
        assert found is not None and len(records) <= self.slots, (geometry, len(records))
        self._behind_the_last()
        sections, blocks = found
        constants = {"SECTIONS": sections.shape[1], "SLOT_BYTES": self._slot_bytes}
        programs.decode_many[(blocks, len(records))](records, self._buffer, sections, **constants, num_warps=WARPS)

    def _behind_the_last(self) -> None:
        """Let the current stream wait for what reads the slots on another one."""
        if self._stream is None:
            return
        stream = torch.cuda.current_stream(self._device)
        if stream != self._stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._stream.record_event())
            self._stream = stream


def ring_slots(layers: Iterable[MoELayer]) -> int:
    """Slots of a ring that is good for these layers: a token's experts fit, or all of a layer."""
    return max(min(max(RING_SLOTS, layer.top_k), layer.num_experts) for layer in layers)


def ring_bytes(raw: Sequence[RecordLayout | None], slots: int) -> int:
    """Of the device's memory that a ring takes."""
    return slots * _slot_bytes(raw)


def _slot_bytes(raw: Sequence[RecordLayout | None]) -> int:
    return max(aligned(layout.record_bytes) for layout in raw if layout is not None)


def _sections(raw: RecordLayout, device: torch.device) -> tuple[Tensor, int]:
    """(`sections` of the programs, blocks of all sections)."""
    rows, blocks = [], 0
    for section in raw.sections:
        assert section.offset_bytes % ALIGNMENT_BYTES == 0, section
        rows.append((section.offset_bytes, section.nbytes, blocks))
        blocks += aligned(section.nbytes, BLOCK_BYTES) // BLOCK_BYTES
    return torch.tensor(rows).T.contiguous().to(device), blocks
