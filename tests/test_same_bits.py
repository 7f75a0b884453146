"""What changes no bit on any processor: promises of the README's table, of which `vismoe eval same-bits` measures the rest."""

import json

import pytest

from vismoe.engine.engine import demo_model
from vismoe.errors import ConfigError
from vismoe.eval import same_bits


@pytest.mark.budget(4)
@pytest.mark.parametrize("kernels, dtype", [("fast", "bfloat16"), ("torch", "bfloat16"), ("torch", "float32")])
def test_no_bit_depends_on_memory_nor_on_what_ran_before(kernels, dtype, monkeypatch):
    monkeypatch.setattr(same_bits, "LENGTHS", ((40, 64), (100, 200)))
    try:
        found = same_bits.measured(str(demo_model()), kernels, dtype, prompts=2, seed=1)
    except ConfigError as error:
        pytest.skip(str(error))  # no fast kernels on this processor
    assert {name: found[name]["same"] for name in same_bits.PROMISED} == dict.fromkeys(same_bits.PROMISED, 1.0)


def test_it_prints_a_row_for_each_circumstance(monkeypatch, capsys):
    rows = {"less memory": {"same": 1.0, "largest_difference": 0.0}, "beginning known": {"same": 0.5, "largest_difference": 0.03}}
    monkeypatch.setattr(same_bits, "measured", lambda *arguments: rows)
    assert same_bits.main(["--n", "2"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any("beginning known" in line and "50%, 0.03" in line for line in table)
    assert json.loads(last)["same_bits"]["torch float32"] == rows
