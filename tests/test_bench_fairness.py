"""Unfair comparisons are refused with a fix that works; what would exceed the RAM is not started; bytes and shares add up."""

import dataclasses

import pytest
import torch

from vismoe.bench.fairness import Entry, FairConditions, does_not_fit, labels, refusals
from vismoe.bench.job import Contestant
from vismoe.bench.report import expert_read_bytes, share
from vismoe.config import parse_bytes
from vismoe.planning.needs import decode_read_bytes
from vismoe.planning.sizes import size_up
from vismoe.types import ExpertInventory, MoELayer, RecordLayout

GIB = 2**30
IMPORTS_BYTES = 320 * 2**20
LEAST = f"--limit {size_up(2 * GIB + IMPORTS_BYTES)}"  # beside a budget of 2 GiB
OURS = Entry(Contestant("vismoe"), "bfloat16", 10 * GIB, "cpu")
FAIR = FairConditions(2 * GIB, IMPORTS_BYTES, 3 * GIB, 64 * GIB, warm_cache=False, emulated_link=False, picture=False)


def rival(way="llama.cpp-mmap", format="raw", **other):
    return dataclasses.replace(OURS, contestant=Contestant(way, format), **other)


def ours(format):
    return dataclasses.replace(OURS, contestant=Contestant("vismoe", format), weights_bytes=4 * GIB)


def under(**other):
    return dataclasses.replace(FAIR, **other)


def test_the_same_weights_under_the_same_limit_are_fair():
    assert refusals([OURS, rival()], FAIR) == []


@pytest.mark.parametrize(
    ("entry", "conditions", "reason", "fix"),
    [
        (rival(dtype="q4_0"), FAIR, "q4_0 weights, vismoe bfloat16", "--gguf with bfloat16 weights"),
        (rival(format="int4"), FAIR, "llama.cpp-mmap q4_0 has q4_0 experts, but no vismoe contestant has int4", "--formats int4"),
        (
            rival(),
            under(limit_bytes=None),
            "the page cache could hold all 10.00 GiB",
            LEAST,
        ),
        (rival(), under(limit_bytes=GIB), "less than VisMoE's budget of 2.00 GiB", LEAST),
        (rival(), under(limit_bytes=128 * GIB), "more than the 64.00 GiB of RAM", "--limit below 64.00 GiB"),
        (rival(), under(emulated_link=True), "an emulated link slows VisMoE alone", "leave out"),
        (rival(), FAIR, None, None),
    ],
)
def test_one_unfairness_gives_one_reason_with_a_fix(entry, conditions, reason, fix):
    found = refusals([OURS, entry], conditions)
    if reason is None:
        assert not found
    else:
        assert len(found) == 1 and reason in found[0] and fix in found[0].split("Fix: ")[1]


def test_lossy_formats_stand_beside_their_partners_and_whoever_keeps_every_bit():
    partners = [rival(), rival("accelerate"), rival(format="int8"), rival(format="int4")]
    assert refusals([OURS, ours("int8"), ours("int4"), *partners], FAIR) == []
    (reason,) = refusals([OURS, ours("int8"), *partners], FAIR)
    assert "q4_0" in reason
    assert refusals([ours("int4"), rival("transformers")], FAIR) == []


def test_what_a_format_is_held_against_is_said_with_its_bits():
    tight = under(limit_bytes=int(2.4 * GIB))
    said = labels([OURS, ours("int8"), ours("int2"), rival(), rival(format="int8")], tight)
    assert [label.split(";")[0].split(", because")[0] for label in said] == [
        "int8 (8.25 bits per expert weight) is compared with q8_0 (8.5)",
        "int2 (2.5 bits per expert weight) has no rival of equal precision",
    ]
    assert not labels([OURS, ours("lossless"), rival()], tight)


def test_the_largest_of_ours_decides_whether_a_limit_is_needed():
    assert "the page cache could hold all 10.00 GiB" in refusals([ours("int4"), OURS, rival()], under(limit_bytes=None))[0]


def test_another_device_is_refused():
    gpu = dataclasses.replace(OURS, device="cuda")
    assert "--device cpu" in refusals([gpu, rival()], FAIR)[0]


def test_the_limit_that_is_proposed_is_accepted():
    (refused,) = refusals([OURS, rival()], under(limit_bytes=None))
    proposed = parse_bytes(refused.split("--limit ")[1].split(",")[0])
    assert refusals([OURS, rival()], under(limit_bytes=proposed)) == []


@pytest.mark.parametrize("conditions", [under(limit_bytes=None, warm_cache=True), under(limit_bytes=None, memory_bytes=11 * GIB)])
def test_without_a_limit_it_is_allowed_when_asked_for_or_when_everything_fits_and_is_labelled(conditions):
    assert refusals([OURS, rival()], conditions) == []
    assert any("not a memory-limited comparison" in label for label in labels([OURS, rival()], conditions))


def test_ours_alone_needs_no_limit():
    assert refusals([OURS], under(limit_bytes=None, emulated_link=True)) == []


def test_what_needs_more_than_the_ram_is_not_started_without_a_limit_and_under_one_the_group_decides():
    free = under(limit_bytes=None, ram_bytes=8 * GIB)
    resident = rival("transformers")
    assert does_not_fit(resident, free) == "does not fit the RAM: 10.00 GiB of weights, 8.00 GiB of RAM"
    assert does_not_fit(resident, under(ram_bytes=8 * GIB)) is None
    assert does_not_fit(rival(), free) is None
    assert does_not_fit(dataclasses.replace(resident, device="cuda"), free) is None


def test_weights_that_caches_hold_are_said_to_be_small():
    small = dataclasses.replace(OURS, weights_bytes=2**27)
    assert any("128.0 MiB of weights" in label for label in labels([small], FAIR)) and not labels([OURS], FAIR)


def test_a_budget_far_below_the_limit_is_said():
    (label,) = labels([OURS, rival()], under(limit_bytes=4 * GIB))
    assert "2.00 GiB" in label and "4.00 GiB" in label
    assert labels([OURS], under(limit_bytes=4 * GIB)) == labels([OURS, rival()], under(limit_bytes=int(2.4 * GIB))) == []


def test_who_does_not_see_the_picture_is_named():
    (label,) = labels([OURS, rival()], under(picture=True, limit_bytes=int(2.4 * GIB)))
    assert "llama.cpp-mmap" in label and "vismoe" not in label


# ------------------------------------------------------------------ bytes that must be touched
def test_the_embeddings_count_only_where_they_are_the_head():
    parts = [("vision tower", 1), ("embeddings", 10), ("attention", 100)]
    assert decode_read_bytes(parts) == 110
    assert decode_read_bytes([*parts, ("lm head", 1000)]) == 1100


def test_one_token_reads_its_top_k_and_a_long_prompt_every_expert_once():
    layout = RecordLayout.of({"up_proj": (4, 8)}, {"up_proj": torch.bfloat16})
    inventory = ExpertInventory(tuple(MoELayer(i, f"layers.{i}", 16, 3, 0) for i in range(2)), (layout,))
    assert expert_read_bytes(inventory, 1) == pytest.approx(2 * 3 * 64)
    assert expert_read_bytes(inventory, 1000) == pytest.approx(2 * 16 * 64)


def test_a_share_needs_all_three_numbers():
    assert share(50, 2, 100) == 0.25
    assert share(50, 2, None) is share(None, 2, 100) is share(50, 0, 100) is None
