"""The header parser against the safetensors library, and against files that are broken in every way we could think of."""

import json
import os
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from vismoe.errors import CheckpointError
from vismoe.store.safetensors_header import read_header

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(10, dtype=torch.bfloat16),
    "c": torch.tensor(3, dtype=torch.int64),
    "d": torch.arange(6, dtype=torch.uint8).view(2, 3),
    "empty": torch.empty(0, 4),
}
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def write(path, header, data: bytes):
    """A file with the given header (an object, or raw bytes) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def tensor(begin: int, end: int, dtype: str = "U8") -> dict:
    return {"dtype": dtype, "shape": [end - begin], "data_offsets": [begin, end]}


def test_entries_point_at_the_bytes_that_the_library_reads(file):
    header = read_header(file)
    raw = file.read_bytes()
    with safe_open(file, "pt") as library:
        assert set(header.tensors) == set(library.keys())
        for name, entry in header.tensors.items():
            expected = library.get_tensor(name)
            assert (entry.shape, entry.dtype, entry.nbytes) == (tuple(expected.shape), expected.dtype, expected.nbytes)
            stored = raw[entry.offset_bytes : entry.offset_bytes + entry.nbytes]
            assert stored == expected.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    assert (header.file_bytes, header.path) == (len(raw), file)


def test_a_missing_file_is_named_with_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match=r"shard-2\.safetensors does not exist.*download"):
        read_header(tmp_path / "shard-2.safetensors")


def test_a_folder_in_place_of_a_file_is_an_error_and_not_a_crash(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path)


def test_every_truncation_gives_expected_and_found_sizes(file):
    raw = file.read_bytes()
    for size in range(len(raw)):
        file.write_bytes(raw[:size])
        with pytest.raises(CheckpointError, match=rf"\b{size}\b"):
            read_header(file)
    file.write_bytes(raw[:-1])
    with pytest.raises(CheckpointError, match=rf"truncated: expected {len(raw)} bytes by its header, found {len(raw) - 1}"):
        read_header(file)


def test_bytes_after_the_last_tensor_are_refused(file):
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="longer than its tensors"):
        read_header(file)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ({"a": tensor(0, 8), "b": tensor(4, 12)}, "overlaps"),
        ({"a": tensor(0, 4), "b": tensor(8, 12)}, "leaves a hole"),
        ({"a": tensor(0, 12, "F32")}, "needs 48 bytes"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 12]}}, "needs 4 bytes"),
        ({"a": tensor(0, 12, "F99")}, "type 'F99'"),
        ({"a": tensor(0, 12, [])}, "has the type"),
        ({"a": {"dtype": "U8", "shape": [12]}}, "header entry of 'a'"),
        ({"a": {"dtype": "U8", "shape": [-12], "data_offsets": [0, 12]}}, "shape"),
        ({"a": {"dtype": "U8", "shape": [True, 12], "data_offsets": [0, 12]}}, "shape"),
        ({"a": 3}, "header entry of 'a'"),
        ([1, 2], "not an object"),
        (b"{not json", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 5000, "not JSON"),
    ],
)
def test_a_corrupt_header_is_refused_with_the_reason(tmp_path, header, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        read_header(write(tmp_path / "x.safetensors", header, bytes(12)))


def test_a_header_length_beyond_the_format_is_not_allocated(tmp_path):
    path = tmp_path / "x.safetensors"
    for length, size in ((2**62, 72), (150_000_000, 200_000_000)):  # the second file is sparse and long enough
        path.write_bytes(struct.pack("<Q", length))
        os.truncate(path, size)
        with pytest.raises(CheckpointError, match=f"header of {length} bytes, more than the format's"):
            read_header(path)


@quick
@given(garbage=st.binary(max_size=200))
def test_random_garbage_is_a_checkpoint_error(tmp_path, garbage):
    path = tmp_path / "x.safetensors"
    path.write_bytes(garbage)
    with pytest.raises(CheckpointError):
        read_header(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 40) | st.floats() | st.sampled_from(["U8", "F32", "", "data_offsets"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), inner),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries({"dtype": VALUES, "shape": VALUES, "data_offsets": VALUES}) | VALUES


@quick
@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES), size=st.integers(0, 40))
def test_random_json_is_either_sound_or_a_checkpoint_error(tmp_path, header, size):
    path = write(tmp_path / "x.safetensors", header, bytes(size))
    try:
        entries = read_header(path).tensors
    except CheckpointError:
        return
    assert sum(entry.nbytes for entry in entries.values()) == size


@quick
@given(position=st.integers(0, 400), value=st.integers(0, 255))
def test_one_changed_byte_never_yields_an_entry_outside_the_file(tmp_path, position, value):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    raw = bytearray(path.read_bytes())
    raw[position % len(raw)] = value
    path.write_bytes(raw)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    assert all(0 < entry.offset_bytes <= entry.offset_bytes + entry.nbytes <= len(raw) for entry in header.tensors.values())
