"""Taking the experts out of a model before its weights are loaded, and the mapped files out of it afterwards.

`strip_experts` runs on the meta device: parameters that are not there when weights are loaded cost no I/O and no memory.
`own_memory` runs after loading: transformers leaves parameters as views of mapped files, at addresses aligned to nothing; a
file truncated later would kill the process, and float32 products change bits with the alignment of an operand. Large ones are
read from the files instead of through the mapping: its page faults wait for the disk one after the other, and its pages count as
the process's memory, beside the copies, until the last tensor of a file has been copied.
"""

import os
from collections.abc import Callable

import torch
from torch import nn

from vismoe.models.family.components import exactly, pass_over, tied_weights
from vismoe.models.family.families import expert_modules, expert_parameters
from vismoe.pools.advice import in_huge_pages
from vismoe.store.files import OpenFiles
from vismoe.store.page_cache import PASSING, mappings
from vismoe.store.tensor_reads import read_new

LARGE_BYTES = 2**20


def strip_experts(model: nn.Module) -> int:
    """Remove every routed expert's parameters from a model on the meta device; return their number of elements.

    The attributes stay, as None. The checkpoint's experts are then neither loaded, nor reported as unexpected, nor initialised.
    """
    tied, elements, names = tied_weights(model), 0, list[str]()
    for path, module in expert_modules(model):
        for name, parameter in expert_parameters(module).items():
            elements += parameter.numel()
            delattr(module, name)
            module.register_parameter(name, None)
            names.append(f"{path}.{name}")
            tied.pop(f"{path}.{name}", None)
        module._is_hf_initialized = True  # type: ignore[assignment]  # or _init_weights would touch the None
        block = model.get_submodule(path.rpartition(".")[0])
        if not block._parameters and not block._buffers:  # some families initialise the experts from there
            block._is_hf_initialized = True  # type: ignore[assignment]
    pass_over(model, map(exactly, names))
    return elements


def own_memory(model: nn.Module, files: OpenFiles | None = None) -> int:
    """Copy every CPU parameter and buffer into anonymous memory, one by one; return bytes copied.

    `files`: to read large ones from that lie mapped; None: through the mapping. Objects stay the same, so ties stay; tensors that
    were the same memory become the same copy. The peak is one tensor more. Raises CheckpointError.
    """
    place = _places(files) if files is not None else None
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    owned: set[int] = set()
    copied_bytes = 0
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "cpu" or id(tensor) in owned or tensor.numel() == 0:
            continue
        owned.add(id(tensor))
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies:
            found = place(tensor) if place is not None else None
            if files is None or found is None:
                copies[key] = in_huge_pages(torch.empty_like(tensor, requires_grad=False)).copy_(tensor.detach())
            else:
                copies[key] = read_new(files, *found, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            copied_bytes += tensor.nbytes
        tensor.data = copies[key]
    return copied_bytes


def _places(files: OpenFiles) -> Callable[[torch.Tensor], tuple[int, int] | None]:
    """Gives the file, by its number, and the offset in bytes where a large tensor lies mapped; None for others."""
    numbers = {os.path.realpath(file.path): number for number, file in enumerate(files.files)}
    with PASSING:
        mapped = [one for one in mappings() if one.path in numbers and not one.has_copies]

    def place(tensor: torch.Tensor) -> tuple[int, int] | None:
        begin, nbytes = tensor.data_ptr(), tensor.nbytes
        if nbytes < LARGE_BYTES or not tensor.is_contiguous():
            return None
        inside = (one for one in mapped if one.start <= begin and begin + nbytes <= one.end)
        return next(((numbers[one.path], begin - one.start + one.offset_bytes) for one in inside), None)

    return place
