"""Token embeddings that stay on disk: a token needs one row of the table, so the memory goes to experts instead.

Only for a plain `nn.Embedding` that no other weight is tied to and whose table no model code asks for. Rows come through the page
cache, bit for bit those of the table.
"""

import inspect
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from vismoe.models.family.components import exactly, pass_over, tied_weights
from vismoe.models.load.locate import locate_tensor
from vismoe.models.moe.linears import distinct_tokens
from vismoe.store.checkpoint import TensorPart
from vismoe.store.files import CheckpointFiles
from vismoe.store.safetensors_header import SafetensorsHeader


class Table(NamedTuple):
    """Token embeddings that could stay on disk."""

    path: str  # of the module
    header: SafetensorsHeader
    part: TensorPart  # its file is `header`


class EmbeddingOnDisk(nn.Module):
    """Stands in for an `nn.Embedding`: ids `[...]` int64 or int32 -> rows `[..., H]` in `dtype`, on the ids' device.

    Raises CheckpointError when the file went bad since loading, IndexError for ids outside the vocabulary.
    """

    def __init__(self, table: Table, dtype: torch.dtype):
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.part.shape
        self.dtype = dtype
        self._part = table.part
        self._files = CheckpointFiles([table.header])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        distinct, position = distinct_tokens(ids, self.num_embeddings)
        rows = torch.empty(len(distinct), self.embedding_dim, dtype=self._part.dtype)
        self._read(distinct.tolist(), rows.view(torch.uint8).numpy())
        return rows.to(self.dtype)[position].to(ids.device)

    def _read(self, ids: Sequence[int], rows: np.ndarray) -> None:
        """Row `i` of `rows` uint8 `[n, H * itemsize]` becomes that of token `ids[i]`."""
        row_bytes = rows.shape[1]
        offsets = [self._part.offset_bytes + token * row_bytes for token in ids]
        files = self._files.hold()
        if len(offsets) > 1:
            files.expect(0, offsets, row_bytes)
        files.fill_rows(0, offsets, rows)

    def close(self) -> None:
        self._files.close()

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, on disk"


def table_of(model: Any, headers: Sequence[SafetensorsHeader]) -> Table | None:
    """The input embeddings of a model on the meta device, in its checkpoint; None where they have to be held."""
    path = _path_of(model)
    place = locate_tensor(model, headers, f"{path}.weight") if path is not None else None
    return Table(path, *place) if path is not None and place is not None else None


def table_bytes(model: Any) -> int:
    """What embeddings that could stay on disk take in memory, checkpoint unseen; 0 where they have to be held."""
    path = _path_of(model)
    return model.get_parameter(f"{path}.weight").nbytes if path is not None else 0


def _path_of(model: Any) -> str | None:
    """Of the input embeddings, unless they are scaled, of another kind, tied, or their table is used otherwise."""
    table = model.get_input_embeddings()
    path = next((path for path, module in model.named_modules() if module is table), None)
    if path is None or type(table) is not nn.Embedding or table.max_norm is not None:
        return None
    tied, name = tied_weights(model), f"{path}.weight"
    parent, _, own = path.rpartition(".")
    owners = [model.get_submodule(parent[: dot.start()] if dot else parent) for dot in (*re.finditer(r"\.", parent), None)]
    read = re.compile(rf"\bself\.(\w+\.)*{own}\.weight\b")  # by the model's own code
    asked = any(_says(owner.__class__, read) for owner in (model, *owners))
    return None if asked or name in tied or name in tied.values() else path


@cache
def _says(kind: type, pattern: re.Pattern[str]) -> bool:
    """Whether the source of a class matches. To find that source Python parses the whole file, which is searched first."""
    whole = inspect.getsource(inspect.getmodule(kind) or kind)
    return pattern.search(whole) is not None and pattern.search(inspect.getsource(kind)) is not None


def leave_on_disk(model: Any, table: Table) -> EmbeddingOnDisk:
    """Replace the embeddings before weights are loaded; the loader then passes their table over."""
    parent, _, name = table.path.rpartition(".")
    module = EmbeddingOnDisk(table, model.get_submodule(table.path).weight.dtype)
    setattr(model.get_submodule(parent), name, module)
    pass_over(model, [exactly(f"{table.path}.weight")])
    return module
