"""Sizes as a person types them, rounded so that the advised setting works."""

import math


def size_up(nbytes: int) -> str:
    """A size of at least `nbytes`: in tenths of GiB, in MiB below one GiB, in bytes below one MiB."""
    return _size(nbytes, math.ceil(nbytes * 10 / 2**30), math.ceil(nbytes / 2**20))


def size_down(nbytes: int) -> str:
    """A size of at most `nbytes`, in the same units."""
    return _size(nbytes, nbytes * 10 // 2**30, nbytes // 2**20)


def _size(nbytes: int, tenths_of_gib: int, mib: int) -> str:
    if nbytes >= 2**30:
        return f"{tenths_of_gib / 10:g}GiB"
    return f"{mib}MiB" if nbytes >= 2**20 else str(nbytes)


def percent_up(part_bytes: int, total_bytes: int) -> str:
    """The smallest percentage, in hundredths, whose share of the total is at least `part_bytes`."""
    hundredths = -(-part_bytes * 10_000 // total_bytes)
    while int(total_bytes * (float(f"{hundredths / 100:g}") / 100)) < part_bytes:
        hundredths += 1
    return f"{hundredths / 100:g}%"
