"""Which kernels compute a decoder's rows: those of the processor in whose memory the numbers are."""

from typing import Protocol

from torch import Tensor

from vismoe.kernels import rows
from vismoe.kernels.gpu import rows as gpu_rows


class RowKernels(Protocol):
    """As `kernels.rows` has them."""

    def norm(self, x: Tensor, weight: Tensor | None, eps: float, unit: float = 0.0) -> Tensor: ...

    def rotate(self, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...


def kernels_of(x: Tensor) -> RowKernels | None:
    """None: there are none for this tensor's processor or type."""
    if x.dtype not in rows.NUMBER_OF:
        return None
    return gpu_rows if x.is_cuda else rows if x.is_cpu else None


def alike(x: Tensor, other: Tensor) -> bool:
    """Whether both have one type and are in one memory."""
    return other.dtype is x.dtype and other.device == x.device
