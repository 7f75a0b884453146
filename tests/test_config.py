"""Settings and sizes: what is accepted, and that refusals name the fix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vismoe.config import SETTINGS, Budget, Settings, format_bytes, parse_bytes
from vismoe.errors import ConfigError
from vismoe.options import OPTIONS
from vismoe.vision.selection import SELECTIONS


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8GiB", 8 * 2**30), ("512 MiB", 2**29), ("1.5GiB", 3 * 2**29), ("2GB", 2 * 10**9), (4096, 4096), ("4096", 4096)],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert parse_bytes(text) == nbytes == Budget.parse(text).total_bytes


@given(st.integers(1, 10**4).map(lambda hundredths: hundredths / 100))
def test_a_percentage_survives_being_printed(percent):
    budget = Budget.parse(f"{percent}%")
    assert Budget.parse(str(budget)).expert_share == pytest.approx(percent / 100)


@pytest.mark.parametrize("text", ["", "8 gigs", "-1GiB", "0", "0%", "101%", "x%", "1e9GiB"])
def test_what_is_not_a_size_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"8GiB|25%|above zero"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"memroy": "1GiB"}, "memroy"),
        ({"memory": "lots"}, "8GiB"),
        ({"eviction": "random"}, "'lru', 'lfu'"),
        ({"lookahead": "oracle"}, "'gate'"),
        ({"context": 0}, "from 1 to"),
        ({"pinned_layers": -1}, "from 0 to"),
        ({"pinned_layers": "some"}, "from 0 to"),
        ({"emulated_link_bytes_per_s": 0.0}, "from 1 to"),
        ({"kernels": "slow"}, "'torch'"),
        ({"selection": "best"}, "'auto', 'affinity'"),
        ({"draft": "mine"}, "'none', 'ngram', 'self', 'mtp', 'auto'"),
        ({"draft_format": "int8"}, "'int4', 'int2'"),
        ({"draft_tokens": 8}, "from 1 to 7"),
        ({"draft_tokens": 0}, "from 1 to 7"),
        ({"draft": "self", "policy": "hotness"}, "policy='exact'"),
        ({"draft": "auto", "policy": "importance"}, "--draft none"),
        ({"draft": "ngram", "policy": "hotness"}, "--draft none"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(values, says):
    with pytest.raises(ConfigError, match=says):
        Settings.of(**values)


@pytest.mark.parametrize(
    ("values", "rows"),
    [({}, 1), ({"draft_tokens": 5}, 1), ({"draft": "self"}, 8), ({"draft": "ngram", "draft_tokens": 3}, 4)],
)
def test_a_draft_and_the_token_before_it_are_checked_in_one_pass(values, rows):
    assert Settings.of(**values).checked_rows == rows


def test_every_selection_is_a_setting():
    assert SETTINGS["selection"].choices == ("auto", *SELECTIONS)
    assert OPTIONS["selection"].holds("affinity") and not OPTIONS["selection"].holds("auto")


def test_bytes_are_printed_in_the_unit_a_person_would_choose():
    printed = [format_bytes(n) for n in (7, 1536, 5 * 2**20, 3 * 2**30, 2**41)]
    assert printed == ["7 B", "1.5 KiB", "5.0 MiB", "3.00 GiB", "2048.00 GiB"]
