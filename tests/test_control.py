"""The control path's own benchmark: its parts add up, and what it times computes what eager would."""

import pytest

from vismoe.bench.control import measure_control


def test_the_parts_add_up_to_the_whole():
    time = measure_control(layers=3, experts=16, top_k=4, steps=20)
    assert sum(time.parts.values()) == pytest.approx(time.us_per_layer)
    assert time.us_per_layer > time.parts["arithmetic"] > 0 and time.parts["paging"] > 0
    assert "3 MoE layers x 16 experts, top-4" in time.table()
    assert time.to_json()["control_us_per_layer"] == pytest.approx(time.us_per_layer - time.parts["arithmetic"])
