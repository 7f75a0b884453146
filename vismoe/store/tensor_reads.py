"""Tensors that are held as a whole, read from a checkpoint: as it encodes them, or restored. No bit is lost on the way.

What a tensor takes beside the result is bounded, whatever its size: a few megabytes of the
file, and of float32 values.
"""

import torch
from torch import Tensor

from vismoe.kernels.restore import restore as restore_matrix
from vismoe.pools.advice import in_huge_pages
from vismoe.store.arrangement import SAME
from vismoe.store.files import OpenFiles
from vismoe.store.read_ahead import LARGE_BYTES, take
from vismoe.store.tensors import EncodedTensor, TensorPart

PIECE_BYTES = 2 * 2**20  # of a file that are rearranged at once


def read_new(files: OpenFiles, file: int, offset_bytes: int, nbytes: int) -> Tensor:
    """uint8 `[bytes]` in memory of their own: what was read ahead, or is read now. Raises CheckpointError."""
    ready = take(files.states[file], offset_bytes, nbytes)
    if ready is not None:
        return ready
    into = in_huge_pages(torch.empty(nbytes, dtype=torch.uint8))
    if nbytes < LARGE_BYTES:
        files = files.for_more  # through the page cache: to ask what it holds takes longer than to read so little
    if nbytes:
        files.expect(file, [offset_bytes], nbytes)  # twice as fast as what the system reads ahead by itself
        files.fill_large(file, offset_bytes, into.numpy())
    return into


def read_part(files: OpenFiles, part: TensorPart) -> Tensor:
    """A part as a record would hold it. Raises CheckpointError."""
    dtype = part.arrangement.dtype(part.dtype)
    if part.arrangement is SAME and part.dtype == dtype:
        return read_new(files, part.file, part.offset_bytes, part.nbytes).view(dtype).view(part.result)
    into = in_huge_pages(torch.empty(part.result, dtype=dtype))
    files.expect(part.file, [part.offset_bytes], part.nbytes)
    rows = part.shape[0]
    row_bytes = part.nbytes // max(1, rows)
    each = max(2, PIECE_BYTES // max(1, row_bytes) // 2 * 2)
    if part.arrangement.filled(into, 0, rows) is None:
        each = rows
    for first in range(0, rows, each):
        last = min(first + each, rows)
        piece = part._replace(offset_bytes=part.offset_bytes + first * row_bytes, shape=(last - first, *part.shape[1:]))
        on_disk = torch.empty(piece.shape, dtype=part.dtype)
        _fill(files, piece, on_disk)
        filled = part.arrangement.filled(into, first, last)
        part.arrangement.copy(on_disk, into if filled is None else filled)
    return into


def _fill(files: OpenFiles, part: TensorPart, into: Tensor) -> None:
    if into.numel():
        files.fill_large(part.file, part.offset_bytes, into.view(-1).view(torch.uint8).numpy())


def read_encoded(files: OpenFiles, tensor: EncodedTensor) -> dict[str, Tensor]:
    """The parts of an encoded matrix. Raises CheckpointError, also where its inputs are in another order."""
    parts = {}
    for name in tensor.parts:
        parts[name], *_ = (read_part(files, part) for part in tensor.read_for(name))
    return parts


def read_restored(files: OpenFiles, tensor: TensorPart | EncodedTensor, dtype: torch.dtype) -> Tensor:
    """A tensor in `dtype`, encoded or not. Raises CheckpointError."""
    if not isinstance(tensor, EncodedTensor):
        return read_part(files, tensor).to(dtype)
    into = in_huge_pages(torch.empty(tensor.shape, dtype=dtype))
    restore(files, tensor, into)
    return into


def restore(files: OpenFiles, tensor: EncodedTensor, into: Tensor) -> None:
    """Fill `into`, which has the tensor's shape, with the restored weights in its type. Raises CheckpointError."""
    if len(tensor.shape) > 2:
        for index in range(tensor.shape[0]):
            restore(files, tensor.row(index), into[index])
        return
    restore_matrix(tensor.encoding, read_encoded(files, tensor), into)
