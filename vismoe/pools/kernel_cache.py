"""Bounds torch's caches of compiled CPU kernels, so that the plan can include them.

In 16 bit every new number of rows creates a oneDNN matrix product, whose generated code and descriptors stay in two caches of
1,024 entries each; expert batches have all sizes, and a process grew by 650 MiB. With 128 entries a prefill of 480 to 1,000
tokens over 64 experts took the same processor time as with 1,024 (0.9 s; 1.15 s with 16), and so did decode. If the CPU kernels
compute the experts, only the backbone's products remain: a few shapes per prompt length.
"""

import os

ENTRIES, BACKBONE_ENTRIES = 128, 32
BYTES_PER_ENTRY = 540 * 2**10  # per cache: with 64 to 256 entries, both caches together grew by 0.9 to 1.2 MiB per entry
VARIABLES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")  # torch's own cache, and that of oneDNN below it
FLOAT32_BYTES = 20 * 2**20  # float32 products go to MKL, which keeps buffers but no kernels per shape


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
    """The most that the caches hold for a model of this type (`bfloat16`, `float16`, `float32`)."""
    return FLOAT32_BYTES if dtype == "float32" else entries * BYTES_PER_ENTRY


def _wanted(kernels: str) -> int:
    return ENTRIES if kernels == "torch" else BACKBONE_ENTRIES


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
