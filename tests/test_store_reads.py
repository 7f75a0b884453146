"""The measurement of a store's reads runs, and says what it measured; its figures on a few small records mean nothing."""

import json
import sys

import pytest
from small_checkpoints import small

from vismoe.eval.studies import store_reads
from vismoe.store.pack import pack
from vismoe.store.packed import PackedStore
from vismoe.types import Format


@pytest.mark.parametrize("format", [Format.LOSSLESS, Format.INT8])
def test_the_last_line_is_json_with_both_rates_and_the_share(format, tmp_path, monkeypatch, capsys):
    checkpoint = small(tmp_path)
    pack(checkpoint.source, tmp_path / "store", checkpoint.contents(format))
    if refused := checkpoint.open(tmp_path / "store", format).read_past_cache():
        pytest.skip(refused)
    monkeypatch.setattr(
        sys, "argv", ["store_reads", str(tmp_path / "store"), "--rounds", "2", "--seconds", "0.01", "--threads", "2"]
    )
    assert store_reads.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rates = found["bytes_per_s"]
    assert found["format"] == format and set(rates) == {"store", "plain_1", "plain_2"}
    assert found["share"] == pytest.approx(rates["store"] / max(rates["plain_1"], rates["plain_2"]))


def test_a_filesystem_without_o_direct_is_refused(tmp_path, monkeypatch, capsys):
    checkpoint = small(tmp_path)
    pack(checkpoint.source, tmp_path / "store", checkpoint.contents(Format.RAW))
    monkeypatch.setattr(PackedStore, "read_past_cache", lambda store: "the filesystem of x has no O_DIRECT")
    monkeypatch.setattr(sys, "argv", ["store_reads", str(tmp_path / "store")])
    assert store_reads.main() == 2
    assert "the filesystem of x has no O_DIRECT: this would only measure memory. Fix:" in capsys.readouterr().err
