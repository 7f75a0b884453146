"""The lossless format: the oracle against the weights, the C++ codec against the oracle, both against damaged bytes."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from format_oracles import PACKED, STORED, Lossless
from guarded import Guarded
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from vismoe.errors import CheckpointError, ConfigError
from vismoe.eval.studies import lossless as evaluation
from vismoe.eval.studies.lossless import entropy_bits, huffman_bits
from vismoe.formats.lossless import content_bytes
from vismoe.kernels import lossless as kernels
from vismoe.kernels.codecs import codec_of
from vismoe.kernels.lossless import FastLossless, available
from vismoe.types import BLOCK_BYTES, Format, RecordLayout

DEMO = Path(__file__).resolve().parent.parent / "assets/demo-model/model.safetensors"
EDGES = [0, 1, 2, 7, 63, 64, 65, 127, 200, 4095, 4096, 4097, 8192, 8193, 12345]  # chunks are 64 weights, blocks 4096
FILL = 0xA5  # of slabs before they are written
ISAS = available()


def layout(*sizes: int, dtype: torch.dtype = torch.bfloat16, **others: torch.dtype) -> RecordLayout:
    """One section of `dtype` per size, and one of 33 numbers for each other type."""
    shapes = {f"w{i}": (size,) for i, size in enumerate(sizes)} | dict.fromkeys(others, (33,))
    return RecordLayout.of(shapes, {f"w{i}": dtype for i in range(len(sizes))} | others)


def record_of(raw: RecordLayout, seed: int, *, spread: float = 1.0, noise: float = 0.0) -> torch.Tensor:
    """Gaussian weights: few exponents where `spread` is small; a share `noise` of the weights is random bits."""
    generator = torch.Generator().manual_seed(seed)
    record = torch.zeros(raw.record_bytes, dtype=torch.uint8)
    random = torch.randint(0, 256, record.shape, dtype=torch.uint8, generator=generator)
    for view, bits in zip(raw.views(record).values(), raw.views(random).values()):
        values = (torch.randn(view.shape, generator=generator) ** 3 * spread + (1 - spread)).to(view.dtype)
        view.copy_(torch.where(torch.rand(view.shape, generator=generator) < noise, bits, values))
    return record


def decoded(codec: Lossless, encoded: torch.Tensor, fill: int = FILL, **part: int) -> torch.Tensor:
    slab = torch.full((codec.slab.record_bytes,), fill, dtype=torch.uint8)
    codec.decode(encoded, slab, **part)
    return slab


def expected_slab(raw: RecordLayout, record: torch.Tensor) -> torch.Tensor:
    """The sections where they belong, everything else as it was."""
    slab = torch.full((Lossless(raw).slab.record_bytes,), FILL, dtype=torch.uint8)
    for section in raw.sections:
        payload = slice(section.offset_bytes, section.offset_bytes + section.nbytes)
        slab[payload] = record[payload]
    return slab


def codecs(raw: RecordLayout) -> list[Lossless]:
    return [Lossless(raw), *(FastLossless(raw, isa) for isa in ISAS)]


def kinds(encoded: torch.Tensor) -> list[int]:
    """STORED or PACKED, of each section."""
    sections = int(encoded[16:24].view(torch.int64))
    return encoded[24 : 24 + 24 * sections].view(torch.int64).view(-1, 3)[:, 0].tolist()


records = st.builds(
    lambda raw, seed, spread, noise: (raw, record_of(raw, seed, spread=spread, noise=noise)),
    st.builds(
        lambda sizes, others: layout(*sizes, **others),
        st.lists(st.sampled_from(EDGES) | st.integers(0, 9000), min_size=1, max_size=3),
        st.dictionaries(st.sampled_from(["b0", "b1"]), st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
    ),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.sampled_from([0.0, 0.03, 0.5, 1.0]),
)


@given(records)
def test_every_record_comes_back_bit_for_bit_and_gaps_are_left_alone(case):
    raw, record = case
    encoded = Lossless(raw).encode(record)
    for codec in codecs(raw):
        assert torch.equal(decoded(codec, encoded), expected_slab(raw, record))


@given(records)
def test_the_cpp_encoder_writes_the_bytes_of_the_oracle(case):
    raw, record = case
    assert torch.equal(FastLossless(raw).encode(record), Lossless(raw).encode(record))


@given(records)
def test_no_record_is_larger_than_promised_and_all_are_whole_blocks(case):
    raw, record = case
    codec = Lossless(raw)
    encoded = codec.encode(record)
    assert encoded.numel() <= codec.most_bytes and encoded.numel() % BLOCK_BYTES == codec.most_bytes % BLOCK_BYTES == 0
    assert 0 <= encoded.numel() - content_bytes(encoded) < BLOCK_BYTES and not encoded[content_bytes(encoded) :].any()


@given(records)
def test_restoring_gives_the_weights_back_in_the_raw_layout(case):
    raw, record = case
    codec = FastLossless(raw)
    restored = torch.zeros_like(record)
    codec.restore(decoded(codec, codec.encode(record)), restored)
    assert torch.equal(restored, record)


@pytest.mark.parametrize("weights", EDGES)
def test_lengths_at_the_edges_of_chunks_and_blocks(weights):
    raw = layout(weights)
    record = record_of(raw, weights, noise=0.03)
    for codec in codecs(raw):
        assert torch.equal(decoded(codec, codec.encode(record)), expected_slab(raw, record))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "stored"])
def test_all_patterns_of_bfloat16_survive(packed):
    patterns = np.arange(65536, dtype=np.uint16)
    if packed:  # alone they have every exponent equally often, and packing would make them larger
        patterns = np.random.default_rng(0).permutation(np.concatenate([patterns, np.full(65536, 0x3C01, np.uint16)]))
    raw = layout(patterns.size)
    record = torch.from_numpy(patterns.view(np.uint8).copy())
    for codec in codecs(raw):
        encoded = codec.encode(record)
        assert kinds(encoded) == [PACKED if packed else STORED]
        assert torch.equal(decoded(codec, encoded), expected_slab(raw, record))


def test_what_does_not_get_smaller_or_is_not_bfloat16_is_stored_as_it_is():
    raw = layout(5000, 3, 5000, bias=torch.float32)
    record = record_of(raw, 1)
    raw.views(record)["w2"].copy_(raw.views(record_of(raw, 2, noise=1.0))["w2"])
    assert kinds(Lossless(raw).encode(record)) == [PACKED, STORED, STORED, STORED]


def test_equal_counts_of_exponents_are_settled_the_same_way_everywhere():
    exponents = np.repeat(np.arange(20, 40, dtype=np.uint16)[::-1], 3)  # twenty candidates for seven codes
    words = np.concatenate([exponents << 7, np.full(4000, 30 << 7, np.uint16)])
    raw = layout(words.size)
    record = torch.zeros(raw.record_bytes, dtype=torch.uint8)
    record[: words.nbytes] = torch.from_numpy(words.view(np.uint8))
    encoded = Lossless(raw).encode(record)
    assert kinds(encoded) == [PACKED]
    assert encoded[64:72].tolist() == [30, 20, 21, 22, 23, 24, 25, 0]
    assert torch.equal(FastLossless(raw).encode(record), encoded)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_parts_of_a_record_decode_on_their_own_and_together_are_the_whole(isa, parts):
    raw = layout(40_000, 9000, bias=torch.float32)
    record = record_of(raw, parts, noise=0.03)
    codec = FastLossless(raw, isa)
    encoded = codec.encode(record)
    writers = torch.zeros(codec.slab.record_bytes, dtype=torch.int64)
    for part in range(parts):
        slab = decoded(codec, encoded, 0, part=part, parts=parts)
        written = slab == decoded(codec, encoded, 255, part=part, parts=parts)
        assert torch.equal(slab[written], record[written[: record.numel()].nonzero()[:, 0]])
        writers += written
    assert int(writers.sum()) == raw.payload_bytes and int(writers.max()) == 1


def test_a_part_decodes_although_the_rest_of_its_section_is_damaged():
    raw = layout(8 * 4096)
    record = record_of(raw, 3, noise=0.03)
    codec = FastLossless(raw)
    encoded = codec.encode(record)
    planes = 64 + 64 + 8 * 4096 + np.arange(4 * 64 * 24)  # header, head, mantissas; the codes of the first four of eight blocks
    encoded[planes] = 0xFF
    with pytest.raises(CheckpointError):
        decoded(codec, encoded, part=0, parts=2)
    half = decoded(codec, encoded, part=1, parts=2)
    assert torch.equal(half[4 * 8192 :], record[4 * 8192 :]) and (half[: 4 * 8192] == FILL).all()


def test_threads_may_share_a_codec():
    raw = layout(100_000, 999)
    cases = [record_of(raw, seed, noise=0.02) for seed in range(8)]
    codec = FastLossless(raw)
    with ThreadPoolExecutor(4) as threads:
        slabs = list(threads.map(lambda record: decoded(codec, codec.encode(record)), cases))
    assert all(torch.equal(slab, expected_slab(raw, record)) for slab, record in zip(slabs, cases))


def outcome(codec: Lossless, encoded: torch.Tensor) -> torch.Tensor | str:
    """What a slab holds after decoding, or why it was refused."""
    slab = Guarded(torch.full((codec.slab.record_bytes,), FILL, dtype=torch.uint8)).bytes
    try:
        codec.decode(encoded, slab)
    except CheckpointError as error:
        return str(error)
    return slab


def same(one: torch.Tensor | str, other: torch.Tensor | str) -> bool:
    return one == other if isinstance(one, str) or isinstance(other, str) else torch.equal(one, other)


@given(records, st.data())
def test_damaged_bytes_are_refused_or_decoded_as_the_oracle_does_and_never_read_past(case, data):
    raw, record = case
    encoded = Lossless(raw).encode(record)
    content = content_bytes(encoded)
    rows, head, middle = 24, 64, content // 2  # damage to the first bytes of all is seen before the rest is read
    near = st.tuples(st.sampled_from([rows, head, head + 64, middle, content - 128]), st.integers(0, 2000))
    for (start, more), value in data.draw(st.dictionaries(near, st.integers(0, 255), min_size=1, max_size=5)).items():
        encoded[(start + more) % content] = value
    guarded = Guarded(encoded).bytes
    oracle = outcome(Lossless(raw), guarded)
    assert all(same(outcome(FastLossless(raw, isa), guarded), oracle) for isa in ISAS)


@given(records, st.floats(0, 1, exclude_max=True))
def test_a_truncated_record_is_refused(case, share):
    raw, record = case
    encoded = Lossless(raw).encode(record)
    short = Guarded(encoded[: int(content_bytes(encoded) * share)]).bytes
    for codec in codecs(raw):
        with pytest.raises(CheckpointError, match="Fix: "):
            codec.decode(short, torch.empty(codec.slab.record_bytes, dtype=torch.uint8))


def test_a_record_of_another_geometry_is_refused():
    encoded = Lossless(layout(5000, 5000)).encode(record_of(layout(5000, 5000), 0))
    for other in (layout(5000), layout(50_000, 5000), layout(4000, 5000)):
        for codec in codecs(other):
            with pytest.raises(CheckpointError):
                decoded(codec, encoded)


def test_a_reader_may_hand_over_a_buffer_that_is_larger_than_the_record():
    raw = layout(30_000)
    record = record_of(raw, 5)
    buffer = torch.full((Lossless(raw).most_bytes,), 0xEE, dtype=torch.uint8)
    encoded = Lossless(raw).encode(record)
    buffer[: encoded.numel()] = encoded
    for codec in codecs(raw):
        assert torch.equal(decoded(codec, buffer), expected_slab(raw, record))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_are_refused_with_what_to_use_instead(dtype):
    with pytest.raises(ConfigError, match=f"{str(dtype)[6:]}. Fix: use format raw"):
        codec_of(Format.LOSSLESS, layout(64, dtype=dtype), frozenset())


def test_an_instruction_set_that_the_processor_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: ("portable", "avx2"))
    with pytest.raises(ConfigError, match=r"'avx512' is not available here; .*portable, avx2\. Fix: one of them"):
        FastLossless(layout(64), "avx512")
    assert FastLossless(layout(64)).isa is None


def test_memory_that_the_library_must_not_touch_is_refused():
    raw = layout(5000)
    record, codec = record_of(raw, 0), FastLossless(raw)
    with pytest.raises(ValueError, match="at least"):
        codec.encode(record[:-1])
    with pytest.raises(ValueError, match="strides"):
        codec.decode(codec.encode(record), torch.empty(2 * codec.slab.record_bytes, dtype=torch.uint8)[::2])
    with pytest.raises(ValueError, match=r"torch\.int8"):
        codec.encode(record.view(torch.int8))
    with pytest.raises(ValueError, match="meta"):
        codec.encode(record.to("meta"))


def test_the_codec_table_gives_the_lossless_codec_and_its_slabs_are_raw_in_whole_blocks():
    raw = layout(5000)
    codec = codec_of(Format.LOSSLESS, raw, frozenset())
    assert codec.format is Format.LOSSLESS and codec.fixed_bytes is None and codec.slab.sections == raw.sections
    assert codec.slab.record_bytes % BLOCK_BYTES == 0
    assert replace(FastLossless(raw), isa="portable").most_bytes == codec.most_bytes


def test_trained_weights_take_at_most_72_percent_and_no_less_than_their_entropy():
    with safe_open(DEMO, "pt") as file:
        names = [name for name in file.keys() if name.endswith("layers.3.mlp.experts.gate_up_proj")]  # noqa: SIM118
        weights = file.get_tensor(names[0])
    raw = RecordLayout.of({"gate_up_proj": weights.shape[1:]}, {"gate_up_proj": weights.dtype})
    encoded = [Lossless(raw).encode(expert.contiguous().view(torch.uint8).flatten()) for expert in weights]
    ratio = sum(map(content_bytes, encoded)) / weights.nbytes
    counts = torch.bincount((weights.view(torch.int16).flatten().int() >> 7) & 255, minlength=256).numpy()
    assert (8 + entropy_bits(counts)) / 16 <= (8 + huffman_bits(counts)) / 16 <= ratio <= 0.72


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=256).filter(any))
def test_huffman_codes_lie_within_a_bit_of_the_entropy(counts):
    entropy, huffman = entropy_bits(np.array(counts)), huffman_bits(np.array(counts))
    assert entropy - 1e-9 <= huffman <= entropy + 1


def test_huffman_lengths_of_a_worked_example():
    assert huffman_bits(np.array([8, 4, 2, 1, 1])) == pytest.approx((8 * 1 + 4 * 2 + 2 * 3 + 1 * 4 + 1 * 4) / 16)
    assert huffman_bits(np.array([0, 5])) == 1  # a code of one word still takes a bit


def test_the_evaluation_ends_with_one_json_object_whose_figures_are_in_order(monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "WORKING_SET_BYTES", 2**20)
    monkeypatch.setattr(evaluation, "PASSES", 1)
    monkeypatch.setattr(evaluation, "GEOMETRY_30B", layout(30_000))
    monkeypatch.setattr("sys.argv", ["lossless"])
    threads = torch.get_num_threads()
    try:
        evaluation.main()
    finally:
        torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    demo = found["demo model"]
    assert demo["experts"] == 256 and demo["entropy"] <= demo["huffman"] <= demo["ratio"] <= 0.72
    assert set(demo["decode_bytes_per_s"]) == set(ISAS) and len(found) == 2
