"""The control path's own benchmark: what it times computes what plain torch does, and it says what it timed."""

import pytest
import torch

from vismoe.bench import control
from vismoe.models.moe.eager import OneRow


def test_it_reports_what_was_asked_for_and_leaves_the_arithmetic_out():
    time = control.measure_control(layers=3, experts=16, top_k=4, steps=5)
    assert (time.layers, time.experts, time.top_k) == (3, 16, 4)
    report = time.to_json()
    assert report["control_us_per_layer"] == pytest.approx(report["us_per_layer"] - report["parts"]["arithmetic"])


def test_a_control_path_that_computes_something_else_is_not_timed(monkeypatch):
    monkeypatch.setattr(OneRow, "weigh", lambda rows, expert, output: torch.zeros_like(output))
    with pytest.raises(AssertionError, match="the arithmetic differs"):
        control.measure_control(layers=1, experts=8, top_k=2, steps=1)
