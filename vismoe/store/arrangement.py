"""How the bytes of a tensor on disk become a section of a record: as they are, or rearranged on the way."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from vismoe.errors import CheckpointError
from vismoe.kernels.relay import relay_awq, relay_gptq

GPTQ_ONES = 0x11111111  # one in each half byte of a word
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs each half byte of a word holds; AutoAWQ's gemm version


@dataclass(frozen=True)
class Arrangement:
    """As they are, in another type at most."""

    whole = False  # whether `copy` gets the whole section, of which it fills its share

    def shape(self, on_disk: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the record of a tensor that has the shape `on_disk` in its file."""
        return on_disk

    def dtype(self, on_disk: torch.dtype) -> torch.dtype:
        """The type in a record of an encoded tensor that has the type `on_disk` in its file."""
        return torch.bfloat16 if on_disk == torch.float8_e8m0fnu else on_disk

    def copy(self, on_disk: Tensor, into: Tensor) -> None:
        """Rearrange and cast. Those of 16-bit weights make no temporary copy."""
        into.copy_(on_disk)

    def filled(self, into: Tensor, first: int, last: int) -> Tensor | None:
        """What rows `first` to `last` of the tensor on disk, even numbers of them, fill of the section `into`; None where only
        the whole tensor can be arranged."""
        return into[first:last]


@dataclass(frozen=True)
class Transposed(Arrangement):
    """[in, out] on disk, [out, in] in the record, or the other way round."""

    def shape(self, on_disk: tuple[int, ...]) -> tuple[int, ...]:
        return (on_disk[1], on_disk[0], *on_disk[2:])

    def copy(self, on_disk: Tensor, into: Tensor) -> None:
        into.copy_(on_disk.transpose(0, 1))

    def filled(self, into: Tensor, first: int, last: int) -> Tensor | None:
        return into[:, first:last]


class Whole(Arrangement):
    """Arranged in one piece."""

    def filled(self, into: Tensor, first: int, last: int) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Deinterleaved(Whole):
    """Takes rows 0 2 4 .. 1 3 5 .. of the tensor on disk."""

    def copy(self, on_disk: Tensor, into: Tensor) -> None:
        into.unflatten(0, (2, -1)).copy_(on_disk.unflatten(0, (-1, 2)).transpose(0, 1))


@dataclass(frozen=True)
class Alternate(Whole):
    """Rows `index`, `index + of`, .. of a section; of a `transposed` matrix, these columns: gate and up that alternate."""

    index: int
    of: int
    transposed: bool = False
    whole = True

    def shape(self, on_disk: tuple[int, ...]) -> tuple[int, ...]:
        return on_disk[::-1] if self.transposed else on_disk

    def copy(self, on_disk: Tensor, into: Tensor) -> None:
        (into.T if self.transposed else into)[self.index :: self.of].copy_(on_disk)


@dataclass(frozen=True)
class RowsRepeated(Whole):
    """Each row stands for `each` rows of a matrix of `rows` rows: scales of blocks, channels and whole tensors."""

    each: int
    rows: int

    def shape(self, on_disk: tuple[int, ...]) -> tuple[int, ...]:
        return (self.rows, *on_disk[1:])

    def copy(self, on_disk: Tensor, into: Tensor) -> None:
        into.copy_(on_disk.repeat_interleave(self.each, 0)[: self.rows])


@dataclass(frozen=True)
class ZeroPoints(Whole):
    """int32 words of eight 4-bit zero points of consecutive outputs -> uint8 `[o, groups]`.

    On disk `[o / 8, groups]` with `along` 0 (compressed-tensors), `[groups, o / 8]` with `along` 1 (AWQ, GPTQ). `order`: the
    output that each half byte of a word belongs to. `plus`: what is added to a word; GPTQ's first version stores words less
    `GPTQ_ONES`, so that a zero point 0 borrows from the next one.
    """

    along: int
    rows: int
    order: tuple[int, ...] = tuple(range(8))
    plus: int = 0

    def shape(self, on_disk: tuple[int, ...]) -> tuple[int, ...]:
        return (self.rows, on_disk[1 - self.along])

    def dtype(self, on_disk: torch.dtype) -> torch.dtype:
        return torch.uint8

    def copy(self, on_disk: Tensor, into: Tensor) -> None:
        words = on_disk if self.along == 0 else on_disk.T  # [o / 8, groups]
        shifts = torch.tensor([4 * self.order.index(output) for output in range(8)], dtype=torch.int32)
        into.copy_((((words + self.plus)[:, None] >> shifts[:, None]) & 15).flatten(0, 1)[: self.rows])


@dataclass(frozen=True)
class AwqWords(Arrangement):
    """int32 `[i, o / 8]`, eight outputs in a word in AWQ's order -> uint8 `[o, i / 2]`, two inputs in a byte."""

    def shape(self, on_disk: tuple[int, ...]) -> tuple[int, ...]:
        return (8 * on_disk[1], on_disk[0] // 2)

    def dtype(self, on_disk: torch.dtype) -> torch.dtype:
        return torch.uint8

    def copy(self, on_disk: Tensor, into: Tensor) -> None:
        _relaid(relay_awq, on_disk, into)

    def filled(self, into: Tensor, first: int, last: int) -> Tensor | None:
        return into[:, first // 2 : last // 2]


@dataclass(frozen=True)
class GptqWords(Arrangement):
    """int32 `[i / 8, o]`, eight inputs in a word -> uint8 `[o, i / 2]`, two inputs in a byte."""

    def shape(self, on_disk: tuple[int, ...]) -> tuple[int, ...]:
        return (on_disk[1], 4 * on_disk[0])

    def dtype(self, on_disk: torch.dtype) -> torch.dtype:
        return torch.uint8

    def copy(self, on_disk: Tensor, into: Tensor) -> None:
        _relaid(relay_gptq, on_disk, into)

    def filled(self, into: Tensor, first: int, last: int) -> Tensor | None:
        return into[:, 4 * first : 4 * last]


@dataclass(frozen=True)
class NaturalOrder(Whole):
    """Fills nothing: int32 `[i]`, the group that each input belongs to, which must be that of its place (GPTQ's `g_idx`).

    name: of the tensor; group: inputs of a group; row_bytes: of the codes, beside which it is read.
    """

    name: str
    group: int
    row_bytes: int

    def shape(self, on_disk: tuple[int, ...]) -> tuple[int, ...]:
        return (0, self.row_bytes)

    def dtype(self, on_disk: torch.dtype) -> torch.dtype:
        return torch.uint8

    def copy(self, on_disk: Tensor, into: Tensor) -> None:
        """Raises CheckpointError for another order."""
        natural = _natural(len(on_disk), self.group)
        if not torch.equal(on_disk, natural):
            first = int((on_disk != natural).nonzero()[0])
            raise CheckpointError(
                f"{self.name}: input {first} is in group {int(on_disk[first])}, not in {int(natural[first])}: the inputs are in "
                "the order of their activations (desc_act), in which VisMoE does not read them. Instead: a checkpoint that was "
                "quantised with desc_act: false, or one in another format of docs/formats.md"
            )


@cache
def _natural(inputs: int, group: int) -> Tensor:
    """int32 `[i]`: the group of each input, in the order of the inputs."""
    return (torch.arange(inputs) // group).int()


def _relaid(relay: Callable[[Tensor, Tensor], None], on_disk: Tensor, into: Tensor) -> None:
    whole = into if into.is_contiguous() else torch.empty(into.shape, dtype=torch.uint8)
    relay(on_disk, whole)
    if whole is not into:
        into.copy_(whole)


SAME, TRANSPOSED, DEINTERLEAVED = Arrangement(), Transposed(), Deinterleaved()
AWQ_WORDS, GPTQ_WORDS = AwqWords(), GptqWords()
