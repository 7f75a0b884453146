"""torch's caches of compiled CPU kernels, bounded so that they can be planned for.

In 16 bit every new number of rows is a new oneDNN matrix product, whose generated code and descriptors stay in two caches of
1,024 entries each; expert batches have all sizes, and a process grew by 650 MiB. With 128 entries a prefill of 480 to 1,000
tokens over 64 experts took the same processor time as with 1,024 (0.9 s, against 1.15 s with 16), and so did decode.
"""

import os

ENTRIES = 128
BYTES_PER_ENTRY = 540 * 2**10  # of each cache: 64 to 256 entries grew by 0.9 to 1.2 MiB for the pair as shapes came and went
VARIABLES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")  # torch's own cache, and oneDNN's below it
FLOAT32_BYTES = 20 * 2**20  # float32 products go to MKL, which keeps buffers but no kernels per shape


def bound_kernel_caches() -> None:
    """Bound both caches, unless the environment says otherwise. Takes effect when called before the first 16-bit product."""
    for variable in VARIABLES:
        os.environ.setdefault(variable, str(ENTRIES))


def kernel_cache_bytes(dtype: str) -> int:
    """What the caches hold at most for a model of this type (`bfloat16`, `float16`, `float32`)."""
    return FLOAT32_BYTES if dtype == "float32" else len(VARIABLES) * ENTRIES * BYTES_PER_ENTRY
