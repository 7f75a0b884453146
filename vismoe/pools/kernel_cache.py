"""torch's caches of compiled CPU kernels, bounded so that they can be planned for.

In 16 bit every new number of rows is a new oneDNN matrix product, whose generated code and descriptors stay in two caches of
1,024 entries each; expert batches have all sizes, and a process grew by 650 MiB. With 128 entries a prefill of 480 to 1,000
tokens over 64 experts took the same processor time as with 1,024 (0.9 s, against 1.15 s with 16), and so did decode. Where our
kernels compute the experts, only the backbone's products are left: a few shapes per length of a prompt.
"""

import os

ENTRIES, BACKBONE_ENTRIES = 128, 32
BYTES_PER_ENTRY = 540 * 2**10  # of each cache: 64 to 256 entries grew by 0.9 to 1.2 MiB for the pair as shapes came and went
VARIABLES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")  # torch's own cache, and oneDNN's below it
FLOAT32_BYTES = 20 * 2**20  # float32 products go to MKL, which keeps buffers but no kernels per shape


def bound_kernel_caches(kernels: str) -> None:
    """Bound both caches, unless the environment says otherwise: for models whose experts these `kernels` compute (a setting).

    Takes effect when called before the first 16-bit product, and once in a process.
    """
    for variable in VARIABLES:
        os.environ.setdefault(variable, str(_wanted(kernels)))


def kernel_cache_entries(kernels: str) -> int:
    """Entries of both caches together, as they are bounded or would be."""
    return sum(_number(os.environ.get(variable)) or _wanted(kernels) for variable in VARIABLES)


def kernel_cache_bytes(dtype: str, entries: int) -> int:
    """What the caches hold at most for a model of this type (`bfloat16`, `float16`, `float32`)."""
    return FLOAT32_BYTES if dtype == "float32" else entries * BYTES_PER_ENTRY


def _wanted(kernels: str) -> int:
    return ENTRIES if kernels == "torch" else BACKBONE_ENTRIES


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
