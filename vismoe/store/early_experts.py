"""Which experts can be read before it is known how slabs hold them, and where.

While libraries are imported, nothing says yet what a model makes of its tensors. For most checkpoints their names and sizes tell:
a record is an expert's gate, up and down, one behind the other, in the model's 16 bits or as a GGUF file encodes them. Experts
are read to where the slabs of such records will lie. Once the model is open, its store knows which bytes of which file belong in
each record. A slab counts as filled where exactly these were read to exactly these places, so a wrong guess costs time alone.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vismoe.kernels.read import Stretch
from vismoe.store.expert_store import LEAST_ROOMY_BYTES, Lies, begin_in_block, lies, room_for
from vismoe.store.file_state import FileState
from vismoe.store.gguf_header import GgufHeader
from vismoe.store.safetensors_header import SafetensorsHeader, TensorEntry
from vismoe.types import RecordLayout, aligned

EXPERTS = re.compile(r"\.experts\.|_exps\.")  # names of tensors of routed experts
DRAFTS = re.compile(r"\bmtp\.")  # of the layer that drafts, which is served apart
OF_ONE = re.compile(r"\.layers\.(?P<layer>\d+)\..*\.experts\.(?P<expert>\d+)\.(?P<matrix>\w+?)(_proj)?\.weight$")
OF_ALL = re.compile(r"(.*\.layers|blk)\.(?P<layer>\d+)\.(.*\.experts\.|ffn_)(?P<matrix>\w+?)(_proj|_exps\.weight)")
MOST_NAME = 500  # characters of a tensor's name
PART = 0.9  # of slabs that do not hold all experts, what is filled: a plan of fewer would end it before weights load
ORDER = {"gate": 0, "w1": 0, "gate_up": 0, "up": 1, "w3": 1, "down": 2, "w2": 2}  # of matrices in a record


@dataclass(frozen=True)
class EarlyMatrix:
    """Of one expert, in a file."""

    file: int
    offset_bytes: int
    nbytes: int


def filling(matrices: Sequence[EarlyMatrix], at: int = 0) -> list[Stretch]:
    """What fills a record of these at this address."""
    found = []
    for matrix in matrices:
        found.append(Stretch(matrix.file, matrix.offset_bytes, [(at, matrix.nbytes)]))
        at += matrix.nbytes
    return found


@dataclass(frozen=True)
class EarlyRecords:
    """Records of the largest group of experts of one size, in the order of their slabs."""

    experts: Sequence[Sequence[EarlyMatrix]]
    layout: RecordLayout  # of slabs, without sections

    def begin(self, slab: int) -> int:
        """At which byte of the slab its record begins."""
        return begin_in_block(filling(self.experts[slab])) if self.layout.room_bytes else 0

    def stretches(self, slabs: Sequence[int], slabs_at: int) -> list[Stretch]:
        """What fills some slabs, of those from this address on, in as few reads as possible."""
        begins = [slabs_at + slab * self.layout.record_bytes + self.begin(slab) for slab in slabs]
        every = [one for slab, at in zip(slabs, begins) for one in filling(self.experts[slab], at)]
        found = list[Stretch]()
        for file, offset_bytes, pieces in sorted(every):
            if found and (file, offset_bytes) == (found[-1].file, found[-1].offset_bytes + found[-1].nbytes):
                pieces, offset_bytes = [*found[-1].pieces, *pieces], found.pop().offset_bytes
            found.append(Stretch(file, offset_bytes, pieces))
        return found

    def lies(self, slab: int, states: Sequence[FileState]) -> Lies:
        """What is in a slab then."""
        return lies(filling(self.experts[slab]), states)


def evenly(layers: Sequence[int], share: float) -> list[int]:
    """Which of some experts make up this share of each layer: the first ones. layers: of each expert, ascending."""
    kept, begin = list[int](), 0
    for count in Counter(layers).values():
        kept += range(begin, begin + int(share * (begin + count)) - len(kept))  # so that they add up
        begin += count
    return kept


def early_records(
    headers: Sequence[SafetensorsHeader], dtype: str | None, layers: int | None, boundary: int, slabs_bytes: int
) -> EarlyRecords | None:
    """Of these files; None where names do not tell. dtype: of the model's numbers; layers: behind which files may have more;
    None: not known. boundary: to what memory is aligned that the disk can write to, 0 where slabs have no room. slabs_bytes: that
    slabs will probably take. Where they do not hold all experts, it is the same share of each layer: what a prompt lacks is read
    while it computes these."""
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
    groups: dict[tuple[int, ...], dict[tuple[int, int], list[EarlyMatrix]]] = defaultdict(dict)
    for expert_id, found in sorted(experts.items()):
        matrices_of_one = [matrix for _, matrix in sorted(found.items())]
        groups[tuple(matrix.nbytes for matrix in matrices_of_one)][expert_id] = matrices_of_one
    if not groups:
        return None
    sizes, largest = max(groups.items(), key=lambda group: sum(group[0]) * len(group[1]))
    experts_bytes = sum(sum(sizes_of_one) * len(group) for sizes_of_one, group in groups.items())
    layout = RecordLayout((), aligned(sum(sizes)))
    if min(aligned(sum(sizes_of_one)) for sizes_of_one in groups) >= LEAST_ROOMY_BYTES:
        every = (matrices_of_one for group in groups.values() for matrices_of_one in group.values())
        if room_bytes := room_for((begin_in_block(filling(one)) for one in every), boundary):
            layout = layout.with_room(room_bytes)
    share = slabs_bytes / experts_bytes
    kept = evenly([layer for layer, _ in largest], 1 if share >= 1 else PART * share)
    records = [*largest.values()]
    return EarlyRecords([records[n] for n in kept], layout)


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
