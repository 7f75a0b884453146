"""Bounds torch's caches of compiled CPU kernels, so that the plan can include them.

Where the CPU has instructions for it, every new number of rows of a 16-bit matrix product is a new oneDNN product, whose
generated code and descriptors stay in two caches of 1,024 entries each. Expert batches have all sizes, and a process grew by
650 MiB. With 128 entries a prefill of 480 to 1,000 tokens over 64 experts took the same processor time as with 1,024 (0.9 s;
1.15 s with 16), and so did decode. If the CPU kernels compute the experts, only the backbone's products remain: a few shapes per
prompt length.
"""

import os

import torch

ENTRIES, BACKBONE_ENTRIES = 128, 32
BYTES_PER_ENTRY = 540 * 2**10  # per cache: with 64 to 256 entries, both caches together grew by 0.9 to 1.2 MiB per entry
AMX_BYTES_PER_ENTRY = 620 * 2**10  # on one CPU, where the process of a model with 128 entries grew by 430 to 560 KiB for each
AMX_FIRST_BYTES = 4608 * 2**10  # the first products with AMX take more: a small program 9 MiB, whatever the number of entries
VARIABLES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")  # torch's own cache, and that of oneDNN below it
MKL_BYTES = 20 * 2**20  # other products go to MKL or to torch's own loops, which keep buffers but no kernels per shape


def bound_kernel_caches(kernels: str) -> None:
    """Bound both caches, unless the environment sets them, for models whose experts these `kernels` (a setting) compute.

    Takes effect when called before the first 16-bit product, and once in a process.
    """
    for variable in VARIABLES:
        os.environ.setdefault(variable, str(_wanted(kernels)))


def kernel_cache_entries(kernels: str) -> int:
    """Entries of both caches together, as they are or would be bounded."""
    return sum(_number(os.environ.get(variable)) or _wanted(kernels) for variable in VARIABLES)


def kernel_cache_bytes(dtype: str, entries: int) -> int:
    """The most that the caches hold on this CPU for a model of this type (`bfloat16`, `float16`, `float32`)."""
    if not _computed_by_onednn(dtype):
        return MKL_BYTES
    if torch.cpu._is_amx_tile_supported():
        return AMX_FIRST_BYTES + entries * AMX_BYTES_PER_ENTRY
    return entries * BYTES_PER_ENTRY


def _computed_by_onednn(dtype: str) -> bool:
    """Whether torch gives matrix products of this type to oneDNN here: the same question that torch asks before each."""
    if dtype not in ("bfloat16", "float16") or not torch.backends.mkldnn.is_available():
        return False
    known = torch.ops.mkldnn
    return bool(known._is_mkldnn_bf16_supported() if dtype == "bfloat16" else known._is_mkldnn_fp16_supported())


def _wanted(kernels: str) -> int:
    return ENTRIES if kernels == "torch" else BACKBONE_ENTRIES


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
