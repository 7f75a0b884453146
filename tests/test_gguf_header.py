"""The header of GGUF files against gguf-py, and against files that are broken in every way we could think of."""

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vismoe.errors import CheckpointError
from vismoe.formats.encodings import GGML
from vismoe.store import gguf_header
from vismoe.store.gguf_header import TYPES, read_gguf_header, read_gguf_headers

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def info(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def write(path: Path, infos=(), entries=(), data=b"", *, counts=None, magic=b"GGUF", version=3, alignment=32, order="<") -> Path:
    tensors, values = counts or (len(infos), len(entries))
    head = magic + struct.pack(f"{order}IQQ", version, tensors, values) + b"".join(entries) + b"".join(infos)
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


SMALL = dict(infos=[info("a", (4, 2), 0, 0), info("b", (3,), 1, 32)], data=bytes(64))


def test_entries_point_at_the_bytes_that_gguf_py_reads(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_uint32("qwen3moe.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", [f"token {number} ä" for number in range(5000)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 5000)
    writer.add_array("qwen3moe.rope.dimension_sections", [1, 2, 3, 0])
    rng = np.random.default_rng(0)
    arrays = {"plain": rng.standard_normal((3, 5)).astype(np.float32), "half": np.ones(7, dtype=np.float16)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    for number, (kind, _, block_bytes) in TYPES.items():
        if kind in GGML:
            raw = rng.integers(0, 256, (2, 3, block_bytes), dtype=np.uint8)
            writer.add_tensor(kind, raw, raw_dtype=gguf.GGMLQuantizationType(number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header, raw, expected = read_gguf_header(path), path.read_bytes(), gguf.GGUFReader(path)
    assert list(header.tensors) == [tensor.name for tensor in expected.tensors]
    for tensor in expected.tensors:
        found = header.tensors[tensor.name]
        assert found.shape == tuple(map(int, reversed(tensor.shape)))
        assert header.types[tensor.name] == tensor.tensor_type.name
        assert raw[found.offset_bytes : found.offset_bytes + found.nbytes] == tensor.data.tobytes()
    assert (header.file_bytes, header.path) == (len(raw), path)
    assert header.metadata["general.architecture"] == "qwen3moe" and header.metadata["qwen3moe.block_count"] == 2
    assert header.metadata["qwen3moe.rope.dimension_sections"] == [1, 2, 3, 0]
    assert not [key for key in header.metadata if key.startswith("tokenizer")]


def test_types_are_those_of_gguf_py():
    gguf = pytest.importorskip("gguf")
    assert {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items() if kind in TYPES} == TYPES
    assert {name: (encoding.block_inputs, encoding.block_bytes) for name, encoding in GGML.items()} == {
        name: (block, block_bytes) for name, block, block_bytes in TYPES.values() if name in GGML
    }


def test_plain_types_have_torch_types(tmp_path):
    header = read_gguf_header(write(tmp_path / "a.gguf", **SMALL))
    assert [(t.shape, t.dtype) for t in header.tensors.values()] == [((2, 4), torch.float32), ((3,), torch.float16)]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (dict(magic=b"GGML"), "not a GGUF file: it begins with b'GGML'"),
        (dict(version=1), "of version 1; versions 2 and 3"),
        (dict(order=">"), "in big-endian order"),
        (dict(counts=(2**60, 0)), f"{2**60} tensors, more than its"),
        (dict(counts=(2, 2**61)), f"{2**61} metadata entries"),
        (dict(counts=(3, 0)), "truncated|corrupt"),
        (dict(data=bytes(20)), "'a' ends at byte 160, the file has 148"),
        (dict(infos=[info("a", (4, 2), 0, 0), info("b", (3,), 1, 0)]), "'b' begins at byte .* overlaps"),
        (dict(infos=[info("a", (4, 2), 0, 0), info("b", (3,), 1, 64)]), "leaves a hole"),
        (dict(infos=[info("a", (4, 2), 0, 0), info("a", (3,), 1, 32)]), "two tensors 'a'"),
        (dict(infos=[info("a", (2**62, 2**62), 0, 0)]), "truncated: 'a' ends at"),
        (dict(infos=[info("a", (33,), 8, 0)]), r"'a' \(Q8_0\) has rows of 33 weights, not whole blocks of 32"),
        (dict(infos=[info("a", (32,), 77, 0)]), "ggml's type 77"),
        (dict(infos=[info("a", (1,) * 5, 0, 0)]), "5 dimensions"),
        (dict(entries=[entry("general.alignment", 4, struct.pack("<I", 48))]), "alignment is 48"),
        (dict(entries=[entry("general.alignment", 8, text("32"))]), "alignment is '32'"),
        (dict(entries=[entry("x", 77, b"")]), "type 77"),
        (dict(entries=[entry("x", 8, struct.pack("<Q", 2**63))]), "header goes on to byte"),
        (dict(entries=[entry("x", 9, struct.pack("<IQ", 0, 2**40))]), "header goes on to byte"),
        (dict(entries=[entry("x", 9, struct.pack("<IQ", 8, 2**40))]), "header goes on to byte"),
        (dict(entries=[entry("x", 9, struct.pack("<IQ", 9, 1) * 9)]), "type 9"),
    ],
)
def test_broken_files_are_refused_with_the_numbers(broken, message, tmp_path):
    with pytest.raises(CheckpointError, match=message) as refused:
        read_gguf_header(write(tmp_path / "model.gguf", **SMALL | broken))
    assert "model.gguf" in str(refused.value) and "Fix: " in str(refused.value)


def test_a_missing_empty_or_unreadable_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf does not exist"):
        read_gguf_headers(tmp_path / "nowhere.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        read_gguf_header(tmp_path / "empty.gguf")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_gguf_header(tmp_path)


@quick
@given(data=st.data())
def test_no_damage_crashes_or_takes_memory(data, tmp_path, monkeypatch):
    """Any bytes overwritten, any length cut: a header whose tensors lie in the file, or a CheckpointError."""
    values = [entry("general.alignment", 4, struct.pack("<I", 32)), entry("x", 9, struct.pack("<IQ", 8, 2) + text("y") * 2)]
    path = write(tmp_path / "model.gguf", **SMALL | dict(entries=values))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at, changed = data.draw(st.integers(0, len(content) - 1)), data.draw(st.binary(min_size=1, max_size=9))
        content[at : at + len(changed)] = changed
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 2**12)
    try:
        header = read_gguf_header(path)
    except CheckpointError as error:
        assert len(str(error)) < 2000
        return
    for tensor in header.tensors.values():
        assert 0 <= tensor.offset_bytes <= tensor.offset_bytes + tensor.nbytes <= header.file_bytes


@quick
@given(tail=st.binary(max_size=200))
@example(tail=b"\xff" * 100)
def test_no_bytes_crash(tail, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + tail)
    with contextlib.suppress(CheckpointError):
        read_gguf_header(path)


def part(folder: Path, number: int, count: int, tensor: str, *, no: int | None = None, total: int = 2) -> Path:
    said = {"split.no": number - 1 if no is None else no, "split.count": count}
    values = [entry(name, 2, struct.pack("<H", value)) for name, value in said.items()]
    values.append(entry("split.tensors.count", 5, struct.pack("<i", total)))
    return write(folder / f"m-{number:05}-of-{count:05}.gguf", [info(tensor, (8,), 0, 0)], values, bytes(32))


def test_all_parts_of_a_split_file_are_found_from_any_of_them(tmp_path):
    paths = [part(tmp_path, 1, 2, "a"), part(tmp_path, 2, 2, "b")]
    for path in paths:
        headers = read_gguf_headers(path)
        assert [header.path for header in headers] == paths and [*headers[1].tensors] == ["b"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([dict(number=1, tensor="a")], "1 of them are missing, first .*m-00002-of-00002.gguf"),
        ([dict(number=1, tensor="a"), dict(number=2, tensor="b", no=0)], "says that it is part 0 of 2"),
        ([dict(number=1, tensor="a"), dict(number=2, tensor="a")], "1 different tensors among 2"),
        ([dict(number=1, tensor="a", total=5), dict(number=2, tensor="b")], "the first part says 5"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(parts, message, tmp_path):
    paths = [part(tmp_path, count=2, **values) for values in parts]
    with pytest.raises(CheckpointError, match=message):
        read_gguf_headers(paths[0])


def test_a_part_under_another_name_is_refused(tmp_path):
    part(tmp_path, 1, 2, "a").rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"one of 2 parts.*model-00001-of-00002\.gguf"):
        read_gguf_headers(tmp_path / "model.gguf")
