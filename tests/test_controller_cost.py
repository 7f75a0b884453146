"""`vismoe eval controllers`: that it runs every policy on what it says, not how fast they are."""

import json

import numpy as np
import pytest

from vismoe.eval.studies import controller_cost
from vismoe.eval.studies.kernels import KernelShape

SMALL = KernelShape(hidden=256, intermediate=128)


def test_updates_are_spread_over_their_period_and_shares_are_of_a_token():
    took = [(2e-6, False)] * 7 + [(10e-6, True)]
    cost = controller_cost.cost("hotness", took, [1e-6], period_tokens=8, token_s=1e-3)
    assert (cost.plain_us, cost.update_us, cost.amortised_us, cost.worst_us) == pytest.approx((2, 10, 3, 10))
    assert (cost.share, cost.update_share, cost.prompt_us) == pytest.approx((0.003, 0.01, 1))
    assert controller_cost.cost("importance", took[:7], [1e-6], 8, 1e-3).amortised_us == pytest.approx(2)


def test_tokens_choose_other_experts_in_the_second_half():
    steps = controller_cost.routing(2, 16, 40)
    assert len(steps) == 40 and steps[0][0][0].dtype == np.int64 and steps[0][0][1].dtype == np.float32
    uses = [np.bincount(np.concatenate([step[0][0].ravel() for step in half]), minlength=16) for half in (steps[:20], steps[20:])]
    assert np.abs(uses[0] - uses[1]).sum() > 0.3 * uses[0].sum()
    assert all(np.all(np.diff(weights) <= 0) for step in steps for _, weights in step)


def test_every_policy_is_measured_and_the_last_line_is_one_json_object(monkeypatch, capsys):
    monkeypatch.setattr(controller_cost, "KernelShape", lambda: SMALL)
    monkeypatch.setattr(controller_cost, "WORKING_SET_BYTES", 2**21)
    assert controller_cost.main(["--layers", "3", "--experts", "16", "--tokens", "64", "--prompt", "20"]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert [cost["policy"] for cost in result["costs"]] == list(controller_cost.POLICIES)
    by_name = {cost["policy"]: cost for cost in result["costs"]}
    assert by_name["hotness"]["update_us"] != by_name["hotness"]["plain_us"]  # hot sets were settled
    assert by_name["importance"]["update_us"] == by_name["importance"]["plain_us"]  # there are none
    assert "goal: at most 1% of a token" in out and result["token_ms"] > 0
