"""Which experts can be read before it is known how slabs hold them, and where.

While libraries are imported, nothing says yet what a model makes of its tensors. For most checkpoints their names and sizes tell:
a record is an expert's gate, up and down, one behind the other, in the model's 16 bits or as a GGUF file encodes them. Experts
are read to where the slabs of such records will lie. Once the model is open, its store knows which bytes of which file belong in
each record. A slab counts as filled where exactly these were read to exactly these places, so a wrong guess costs time alone.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vismoe.kernels.read import Stretch
from vismoe.store.expert_store import LEAST_ROOMY_BYTES, Lies, begin_in_room, lies
from vismoe.store.file_state import FileState
from vismoe.store.gguf_header import GgufHeader
from vismoe.store.safetensors_header import SafetensorsHeader, TensorEntry
from vismoe.types import ALIGNMENT_BYTES, aligned

EXPERTS = re.compile(r"\.experts\.|_exps\.")  # names of tensors of routed experts
DRAFTS = re.compile(r"\bmtp\.")  # of the layer that drafts, which is served apart
OF_ONE = re.compile(r"\.layers\.(?P<layer>\d+)\..*\.experts\.(?P<expert>\d+)\.(?P<matrix>\w+?)(_proj)?\.weight$")
OF_ALL = re.compile(r"(.*\.layers|blk)\.(?P<layer>\d+)\.(.*\.experts\.|ffn_)(?P<matrix>\w+?)(_proj|_exps\.weight)")
MOST_NAME = 500  # characters of a tensor's name
ORDER = {"gate": 0, "w1": 0, "gate_up": 0, "up": 1, "w3": 1, "down": 2, "w2": 2}  # of matrices in a record


@dataclass(frozen=True)
class EarlyMatrix:
    """Of one expert, in a file."""

    file: int
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True)
class EarlyRecords:
    """Records of the largest group of experts of one size, in the order of their slabs."""

    experts: Sequence[Sequence[EarlyMatrix]]
    experts_bytes: int  # of all groups
    record_bytes: int  # without room
    room_bytes: int

    @property
    def slab_bytes(self) -> int:
        """From slab to slab."""
        return aligned(self.record_bytes, self.room_bytes or ALIGNMENT_BYTES) + self.room_bytes

    def begin(self, slab: int) -> int:
        """At which byte of the slab its record begins."""
        return begin_in_room(self._stretches(slab, 0), self.room_bytes) if self.room_bytes else 0

    def stretches(self, slabs: Sequence[int], slabs_at: int) -> list[Stretch]:
        """What fills some slabs, of those from this address on, in as few reads as possible."""
        every = [one for slab in slabs for one in self._stretches(slab, slabs_at + slab * self.slab_bytes + self.begin(slab))]
        found = list[Stretch]()
        for file, offset_bytes, pieces in sorted(every):
            if found and (file, offset_bytes) == (found[-1].file, found[-1].offset_bytes + found[-1].nbytes):
                pieces, offset_bytes = [*found[-1].pieces, *pieces], found.pop().offset_bytes
            found.append(Stretch(file, offset_bytes, pieces))
        return found

    def lies(self, slab: int, states: Sequence[FileState]) -> Lies:
        """What is in a slab then."""
        return lies(self._stretches(slab, 0), states)

    def _stretches(self, slab: int, record_at: int) -> list[Stretch]:
        found, at = [], record_at
        for matrix in self.experts[slab]:
            found.append(Stretch(matrix.file, matrix.offset_bytes, [(at, matrix.nbytes)]))
            at += matrix.nbytes
        return found


def early_records(
    headers: Sequence[SafetensorsHeader], dtype: str | None, layers: int | None, boundary: int
) -> EarlyRecords | None:
    """Of these files; None where names do not tell. dtype: of the model's numbers; layers: behind which files may have more;
    None: not known. boundary: to what memory is aligned that the disk can write to, 0 where slabs have no room."""
    experts: dict[tuple[int, int], dict[int, EarlyMatrix]] = defaultdict(dict)
    for file, header in enumerate(headers):
        for name, entry in header.tensors.items():
            if not EXPERTS.search(name) or DRAFTS.search(name):
                continue
            encoded = isinstance(header, GgufHeader)
            matrices = _matrices(name, entry, file)
            if not matrices or not (encoded or dtype == str(entry.dtype).removeprefix("torch.")):
                return None
            for layer, expert, order, matrix in matrices:
                if encoded or not isinstance(layers, int) or layer < layers:
                    experts[layer, expert][order] = matrix
    groups: dict[tuple[int, ...], list[list[EarlyMatrix]]] = defaultdict(list)
    for _, found in sorted(experts.items()):
        matrices_of_one = [matrix for _, matrix in sorted(found.items())]
        groups[tuple(matrix.nbytes for matrix in matrices_of_one)].append(matrices_of_one)
    if not groups:
        return None
    sizes, largest = max(groups.items(), key=lambda group: sum(group[0]) * len(group[1]))
    experts_bytes = sum(sum(sizes_of_one) * len(group) for sizes_of_one, group in groups.items())
    records = EarlyRecords(largest, experts_bytes, aligned(sum(sizes)), boundary)
    large = min(aligned(sum(sizes_of_one)) for sizes_of_one in groups) >= LEAST_ROOMY_BYTES
    roomy = large and boundary > 0 and any(map(records.begin, range(len(largest))))
    return replace(records, room_bytes=max(boundary, ALIGNMENT_BYTES) if roomy else 0)


def _matrices(name: str, entry: TensorEntry, file: int) -> Sequence[tuple[int, int, int, EarlyMatrix]]:
    """(layer, expert, order in its record, matrix) of a tensor; none where the name is not known."""
    if len(name) > MOST_NAME or len(entry.shape) < 2 or not entry.nbytes:
        return ()
    found: Any = OF_ONE.search(name) or OF_ALL.fullmatch(name)
    order = ORDER.get(found["matrix"]) if found is not None else None
    if order is None:
        return ()
    layer, alone = int(found["layer"]), found.groupdict().get("expert")
    count = 1 if alone is not None else entry.shape[0]
    each, first = entry.nbytes // count, int(alone or 0)
    places = (entry.offset_bytes + n * each for n in range(count))
    return [(layer, first + n, order, EarlyMatrix(file, at, each)) for n, at in enumerate(places)]
