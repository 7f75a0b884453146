"""transformers' weight conversions, applied to locators instead of tensors: from checkpoint parts to one row per expert.

A *column* is the rows `[E]` that one source pattern contributes to a parameter. Each operation that transformers would run on
the stacked `[E, ...]` tensor while loading has a function here that rearranges columns; one that has none is refused by name.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import core_model_loading as loading

from vismoe.errors import CheckpointError, UnsupportedModelError
from vismoe.store.arrangement import DEINTERLEAVED, SAME, TRANSPOSED, Arrangement
from vismoe.store.tensors import EncodedTensor, TensorPart, Tensors

Row = tuple[TensorPart | EncodedTensor, ...]  # one expert's row of one parameter: parts concatenated along dim 0
LISTED = 3  # names in an error


@dataclass
class ExpertParameter:
    """One expert parameter of the model and what the checkpoint has for it."""

    name: str
    shape: tuple[int, ...]  # [E, ...]
    keys: dict[str, list[str]] = field(default_factory=dict)  # source pattern -> checkpoint keys in expert order
    patterns: Sequence[str] = ()  # all sources, in the order in which operations concatenate them
    operations: Sequence[Any] = ()
    share: tuple[int, int] = (0, 1)  # (index, number) of the parameters that split the keys between them
    spare_rows: int = 0  # tensors that may follow those of the last expert and mean nothing

    @property
    def num_experts(self) -> int:
        return self.shape[0]


def rows_of(parameter: ExpertParameter, parts: Tensors) -> list[Row]:
    """The rows of one parameter, one per expert, checked against the shape that the model wants. Encoded rows are [out, in]."""
    columns = [_column(parameter, pattern, parts) for pattern in _patterns(parameter)]
    for operation in parameter.operations:
        apply = OPERATIONS.get(type(operation))
        if apply is None:
            raise _unsupported(parameter, operation)
        columns = apply(operation, columns, parameter)
    if len(columns) != 1:
        raise UnsupportedModelError(
            f"{parameter.name}: {len(columns)} tensors per expert and no rule to join them; report the model"
        )
    shapes = {row_shape(row) for row in columns[0]}
    wanted = {parameter.shape[1:]}
    if all(isinstance(part, EncodedTensor) for row in columns[0] for part in row):
        wanted.add(parameter.shape[:0:-1])
    if len(shapes) != 1 or not shapes <= wanted:
        raise CheckpointError(
            f"{parameter.name}: the checkpoint holds experts of shape {', '.join(map(str, sorted(shapes)))}, the model wants "
            f"{parameter.shape[1:]}. Fix: use the config.json that belongs to these files"
        )
    return columns[0]


def _patterns(parameter: ExpertParameter) -> Sequence[str]:
    """The sources that must be there: an operation that would decode has one, where experts are in a plain type already."""
    decodes = any(isinstance(operation, DECODING) for operation in parameter.operations)
    return [pattern for pattern in parameter.patterns if pattern in parameter.keys] if decodes else parameter.patterns


def _column(parameter: ExpertParameter, pattern: str, parts: Tensors) -> list[Row]:
    """Rows from one source: a tensor per expert, or one tensor whose row e is expert e."""
    keys = parameter.keys.get(pattern, [])
    unreadable = [key for key in keys if key not in parts]
    if unreadable:
        raise UnsupportedModelError(
            f"{unreadable[0]} is neither stored as bf16, fp16 or fp32 nor in a quantised format that VisMoE reads. "
            "Instead: the original checkpoint of the model, or one in a format of docs/formats.md"
        )
    if any(isinstance(operation, MERGING) for operation in parameter.operations):
        index, targets = parameter.share
        share = math.ceil(len(keys) / targets)
        if len(keys) == parameter.num_experts + parameter.spare_rows:
            keys, share = keys[: parameter.num_experts], parameter.num_experts
        if len(keys) != parameter.num_experts * targets:
            raise _incomplete(parameter, pattern, keys, parameter.num_experts * targets)
        return [(parts[key],) for key in keys[index * share : (index + 1) * share]]
    if len(keys) != 1:
        raise _incomplete(parameter, pattern, keys, 1)
    whole = parts[keys[0]]
    joined = whole.shape == (parameter.num_experts * parameter.shape[1], *parameter.shape[2:])  # the experts' rows as one matrix
    if joined and isinstance(whole, TensorPart):
        whole = whole._replace(shape=parameter.shape)
    if not whole.shape or whole.shape[0] not in (parameter.num_experts, parameter.num_experts + parameter.spare_rows):
        raise CheckpointError(
            f"{keys[0]} has shape {whole.shape}, the model wants {parameter.num_experts} experts. "
            "Fix: use the config.json that belongs to these files"
        )
    return [(whole.row(e),) for e in range(parameter.num_experts)]


def _incomplete(parameter: ExpertParameter, pattern: str, keys: list[str], wanted: int) -> CheckpointError:
    stem = pattern.replace("\\", "").lstrip(".")
    expected = [stem.replace("*", str(e)) for e in range(wanted)]
    absent = [name for name in expected if not any(key.endswith(name) for key in keys)] if len(keys) < wanted else []
    return CheckpointError(
        f"{parameter.name}: the checkpoint has {len(keys)} tensors {stem}, the model wants {wanted}"
        + (f"; missing are {', '.join(absent[:LISTED])}{', ...' if len(absent) > LISTED else ''}" if absent else "")
        + ". Fix: check that all files of the model are there and belong to its config.json"
    )


def _unsupported(parameter: ExpertParameter, operation: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{parameter.name}: transformers loads these experts with {operation!r}, which cannot be read in place. "
        "Instead: save the model once with save_pretrained() in a newer transformers, or report the model"
    )


def row_shape(row: Row) -> tuple[int, ...]:
    shapes = [part.result for part in row]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _rearranged(operation: Any, columns: list[list[Row]], parameter: ExpertParameter, how: Arrangement) -> list[list[Row]]:
    """Mark every part; only a row that is a single, untouched part can be rearranged as a whole."""
    marked: list[Row] = []
    for row in columns[0]:
        if len(columns) != 1 or len(row) != 1 or not isinstance(row[0], TensorPart) or row[0].arrangement is not SAME:
            raise _unsupported(parameter, operation)
        marked.append((row[0]._replace(arrangement=how),))
    return [marked]


def _merge(operation: Any, columns: list[list[Row]], parameter: ExpertParameter) -> list[list[Row]]:
    """Stack a tensor per expert along dim 0: what `_column` has done by taking one key per row."""
    if operation.dim != 0:
        raise _unsupported(parameter, operation)
    return columns


def _concatenate(operation: Any, columns: list[list[Row]], parameter: ExpertParameter) -> list[list[Row]]:
    """`[E, I, H]` and `[E, I, H]` along dim 1: along dim 0 of a row."""
    if operation.dim != 1:
        raise _unsupported(parameter, operation)
    return _joined(columns)


def _joined(columns: list[list[Row]]) -> list[list[Row]]:
    return [[tuple(part for row in rows for part in row) for rows in zip(*columns, strict=True)]]


def _transpose(operation: Any, columns: list[list[Row]], parameter: ExpertParameter) -> list[list[Row]]:
    if {operation.dim0, operation.dim1} != {1, 2}:
        raise _unsupported(parameter, operation)
    if operation.check_dims and len(columns) == 1 and all(row_shape(row) == parameter.shape[1:] for row in columns[0]):
        return columns
    if all(isinstance(part, EncodedTensor) for rows in columns for row in rows for part in row):
        return columns  # in any family
    return _rearranged(operation, columns, parameter, TRANSPOSED)


def _interleave(operation: Any, columns: list[list[Row]], parameter: ExpertParameter) -> list[list[Row]]:
    if operation.dim != 1 or operation.inverse:
        raise _unsupported(parameter, operation)
    return _rearranged(operation, columns, parameter, DEINTERLEAVED)


def _ernie(operation: Any, columns: list[list[Row]], parameter: ExpertParameter) -> list[list[Row]]:
    """One list of experts shared out between text and vision (`_column` takes the share), then gate and up concatenated."""
    if operation.stack_dim != 0 or operation.concat_dim != 1:
        raise _unsupported(parameter, operation)
    return _joined(columns)


def _decoded(operation: Any, columns: list[list[Row]], parameter: ExpertParameter) -> list[list[Row]]:
    """Experts in a plain type; codes with their scales are not read in place."""
    if len(columns) != 1:
        raise _unsupported(parameter, operation)
    return columns


MERGING = (loading.MergeModulelist, loading.ErnieFuseAndSplitTextVisionExperts)
OPERATIONS: dict[type, Callable[[Any, list[list[Row]], ExpertParameter], list[list[Row]]]] = {
    loading.MergeModulelist: _merge,
    loading.Concatenate: _concatenate,
    loading.Transpose: _transpose,
    loading.Interleave: _interleave,
    loading.ErnieFuseAndSplitTextVisionExperts: _ernie,
}
DECODING = tuple(filter(None, [getattr(loading, "Inkling2LoopDequantizeExperts", None)]))  # since transformers 5.24
OPERATIONS |= dict.fromkeys(DECODING, _decoded)
