"""Run by test_gpu_kernels.py: attention of one token by the Triton programs, and what it must not depend on."""

import pytest
import torch
from expert_records import rms
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as of_torch

from vismoe.kernels.gpu import attention
from vismoe.kernels.gpu.attention import CHUNK, attend, attend_in_place, takes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.bfloat16, torch.float16)
SHAPES = (  # groups, heads of each, numbers of a key and of a value, tokens
    (4, 8, 128, 128, 1),
    (2, 3, 64, 64, 2),
    (1, 1, 80, 80, CHUNK - 1),
    (2, 1, 192, 128, CHUNK),
    (1, 8, 64, 64, CHUNK + 1),
    (1, 19, 24, 256, 2 * CHUNK),
    (2, 3, 128, 128, 3 * CHUNK + 5),
    (1, 8, 192, 128, 3 * CHUNK + 5),
)
LONG = (attention.PARTS + 1) * CHUNK + 1  # more parts than are combined at once


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def cached(batch: int, groups: int, tokens: int, columns: int, dtype: torch.dtype, room: int = 40) -> Tensor:
    """Keys or values as a cache holds them, with NaN in the room for more tokens."""
    memory = torch.full((batch, groups, tokens + room, columns), torch.nan, dtype=dtype, device=DEVICE)
    memory[:, :, :tokens] = normal(batch, groups, tokens, columns, dtype=dtype)
    return memory[:, :, :tokens]


def exact(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    keys, values = (x.double().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (keys, values))
    return ((scale * query.double() @ keys.mT).softmax(-1) @ values).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_at_most_that_of_torch(dtype):
    """With room behind the tokens, or with the heads of each token together."""
    ours, theirs = 0.0, 0.0
    for groups, shared, columns, wide, tokens in SHAPES:
        query = normal(2, 1, groups * shared, columns, dtype=dtype).transpose(1, 2)
        keys, values = cached(2, groups, tokens, columns, dtype), normal(2, tokens, groups, wide, dtype=dtype).transpose(1, 2)
        scale = 1.5 * columns**-0.5
        wanted, made = exact(query, keys, values, scale), attend(query, keys, values, scale)
        their = of_torch(query, keys, values, scale=scale, enable_gqa=True).transpose(1, 2)
        assert takes(query, keys, values)
        assert made.dtype is dtype and made.shape == (2, 1, groups * shared, wide) and made.is_contiguous()
        assert rms(made - wanted) <= 1.05 * rms(their - wanted) + 1e-6, (groups, shared, columns, wide, tokens)
        ours, theirs = ours + rms(made - wanted), theirs + rms(their - wanted)
    assert 0 < ours <= 1.05 * theirs


def test_many_parts_are_combined():
    query, keys, values = normal(1, 2, 1, 16, dtype=torch.bfloat16), *(cached(1, 1, LONG, 16, torch.bfloat16) for _ in range(2))
    query *= 3  # some parts count much more than others
    wanted = exact(query, keys, values, 0.5)
    assert rms(attend(query, keys, values, 0.5) - wanted) <= 1.05 * rms(wanted.bfloat16() - wanted)


@pytest.mark.parametrize("size", [80.0, 3000.0])
def test_large_scores_are_no_problem(size):
    """Of both signs, the largest in any of the parts."""
    query, values = torch.ones(1, 1, 1, 16, dtype=torch.float16, device=DEVICE), cached(1, 1, 2 * CHUNK, 16, torch.float16)
    for largest in (0, CHUNK - 1, CHUNK, 2 * CHUNK - 1):
        keys = torch.full((1, 1, 2 * CHUNK, 16), -size / 16, dtype=torch.float16, device=DEVICE)
        keys[:, :, largest] = size / 16
        assert torch.equal(attend(query, keys, values, 1.0)[0, 0], values[0, :, largest])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_depends_on_itself_only(dtype):
    query, keys, values = normal(3, 6, 1, 64, dtype=dtype), *(cached(3, 2, CHUNK + 9, wide, dtype) for wide in (64, 80))
    together = attend(query, keys, values, 0.2)
    for b in range(3):
        one = slice(b, b + 1)
        assert torch.equal(together[one], attend(query[one], keys[one], values[one].contiguous(), 0.2))
    keys[1, :, 3] = torch.nan
    poisoned = attend(query, keys, values, 0.2)
    assert poisoned[1].isnan().all() and torch.equal(poisoned[::2], together[::2])


@pytest.mark.parametrize(
    "groups, shared, columns, wide, dtype",
    [(2, 3, 64, 64, torch.bfloat16), (1, 8, 192, 128, torch.float16), (1, 17, 80, 24, torch.bfloat16)],
)
def test_in_place_is_the_same_to_the_bit_and_stores_the_new_token_only(groups, shared, columns, wide, dtype):
    query, length = normal(1, groups * shared, 1, columns, dtype=dtype), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for stored, room in ((0, 70), (CHUNK - 1, 1), (CHUNK, CHUNK), (2 * CHUNK + 5, 3)):
        after = [cached(1, groups, stored + 1, size, dtype, room) for size in (columns, wide)]
        new = [x[:, :, stored:].transpose(1, 2).contiguous().transpose(1, 2) for x in after]
        wanted = attend(query, *after, 0.2)
        keys, values = memory = [torch.empty_like(x._base) for x in after]
        place = [keys.data_ptr(), values.data_ptr(), keys.stride(1), values.stride(1)]
        places = torch.tensor([[0] * 4, place, [0] * 4], device=DEVICE)
        length.fill_(stored)
        for most_tokens in (stored + 1, stored + 2 * CHUNK):
            for x, expected in zip(memory, after):
                x.copy_(expected._base)[:, :, stored] = torch.nan
            made = attend_in_place(query, *new, places, 1, length, most_tokens, 0.2)
            assert torch.equal(made, wanted), (stored, most_tokens)
            for x, expected in zip(memory, after):
                assert torch.equal(x.view(torch.int16), expected._base.view(torch.int16)), "NaN stays behind the new token"


@pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs are CUDA's")
def test_a_graph_attends_over_more_tokens_at_each_replay():
    query, length = normal(1, 8, 1, 128, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    keys, values = (torch.full((1, 2, 3 * CHUNK, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    new = [normal(1, 2, 1, 128, dtype=torch.bfloat16) for _ in range(2)]
    places = torch.tensor([[keys.data_ptr(), values.data_ptr(), keys.stride(1), values.stride(1)]], device=DEVICE)
    attend_in_place(query, *new, places, 0, length, 3 * CHUNK, 0.2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = attend_in_place(query, *new, places, 0, length, 3 * CHUNK, 0.2)
    for stored in range(3 * CHUNK):
        length.fill_(stored)
        for latest in new:
            latest.copy_(torch.randn(latest.shape))
        graph.replay()
        assert torch.equal(made, attend(query, keys[:, :, : stored + 1], values[:, :, : stored + 1], 0.2)), stored


def test_what_cannot_be_computed_is_said():
    query, keys, values = normal(2, 4, 1, 32, dtype=torch.bfloat16), *(cached(2, 2, 20, 32, torch.bfloat16) for _ in range(2))
    assert takes(query, keys, values) and takes(query[:1], keys[:1, :, :1], values[:1, :, :1])
    assert not takes(query.float(), keys.float(), values.float()) and not takes(query.half(), keys, values)
    assert not takes(query.expand(-1, -1, 2, -1), keys, values) and not takes(query[:, :3], keys, values)
    assert not takes(query[:1], keys, values) and not takes(query, keys[:, :, :19], values)
    assert not takes(query, keys[:, :, :0], values[:, :, :0]) and not takes(query[0], keys[0], values[0])
    assert not takes(query[..., ::2], keys[..., ::2], values) and not takes(query[..., :20], keys[..., :20], values)
    assert not takes(query, keys, values[..., 4:12]), "16 bytes are loaded at once"
    assert takes(query, keys, values[..., 8:16])
    wide = cached(1, 1, 2, 264, torch.bfloat16)
    assert not takes(wide[:, :, :1], wide, wide)
