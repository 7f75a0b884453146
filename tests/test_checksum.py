"""CRC-32C in C++ against known vectors and against the definition, bit by bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vismoe.kernels.checksum import crc32c

LANES = 3 * 4096  # worked on side by side where the processor has the instruction
ways = pytest.mark.parametrize("portable", [False, True], ids=["instruction", "portable"])


def table() -> list[int]:
    rows = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        rows.append(byte)
    return rows


TABLE = table()


def oracle(data: bytes, before: int = 0) -> int:
    crc = before ^ 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


@ways
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # these four: RFC 3720, appendix B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_known_vectors(data, expected, portable):
    assert crc32c(data, portable=portable) == expected == oracle(data)


@ways
@pytest.mark.parametrize("size", [1, 7, 8, 9, 4096, LANES - 1, LANES, LANES + 1, 2 * LANES + 4099])
@pytest.mark.parametrize("shift", [0, 1, 5])
def test_every_length_and_alignment_agrees_with_the_definition(size, shift, portable):
    data = np.random.default_rng(size).integers(0, 256, size + shift, dtype=np.uint8)[shift:]
    assert crc32c(data, portable=portable) == oracle(data.tobytes())


@ways
@given(first=st.binary(max_size=50), second=st.binary(max_size=50), repeats=st.sampled_from([1, 300]))
def test_a_checksum_continues_where_another_ended(portable, first, second, repeats):
    first, second = first * repeats, second * repeats
    assert crc32c(second, crc32c(first, portable=portable), portable=portable) == crc32c(first + second) == oracle(first + second)


def test_every_single_changed_bit_is_seen():
    data = np.random.default_rng(0).integers(0, 256, 600, dtype=np.uint8)
    sums = {crc32c(data)}
    for bit in range(8 * data.size):
        data[bit // 8] ^= 1 << bit % 8
        sums.add(crc32c(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + 8 * data.size


def test_the_bytes_count_whatever_holds_them():
    numbers = torch.arange(24, dtype=torch.int16)
    data = numbers.numpy().tobytes()
    held = [
        data,
        bytearray(data),
        memoryview(data),
        numbers,
        numbers.view(torch.bfloat16).view(4, 6),
        numbers.numpy().reshape(2, 12),
    ]
    assert {crc32c(each) for each in held} == {oracle(data)}
    assert crc32c(numbers[::2]) == oracle(numbers[::2].contiguous().numpy().tobytes())
    assert crc32c(torch.tensor(1.0)) == oracle(np.float32(1).tobytes())
    assert crc32c(torch.empty(0, 3)) == crc32c(np.empty(0)) == 0
