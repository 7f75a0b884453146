"""What `vismoe calibrate` measures of drafts: rounds worked by hand, the demo model's own copies, and passes fetched by hand."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from vismoe.cli.main import main
from vismoe.engine.engine import load
from vismoe.errors import CheckpointError
from vismoe.lookahead.calibration import JSON, Calibration, RoutingShape
from vismoe.models.load.runtime import runtime_of
from vismoe.predictor_training.drafts import Rounds, fidelities, missing_experts
from vismoe.predictor_training.prompts import scene_prompts
from vismoe.speculate.worth import DraftCurves, Fidelity
from vismoe.trace.steps import DraftedRound, LayerRouting, TraceStep
from vismoe.trace.synthetic import skewed_trace
from vismoe.types import Phase, TokenKind

DEMO = Path(__file__).resolve().parent.parent / "assets" / "demo-model"


def test_rounds_worked_by_hand():
    """One layer, two choices of each token. Of two drafted tokens the first is right, of the next two none."""

    def round_of(drafted: list[list[int]], verified: list[list[int]]) -> DraftedRound:
        passes = [[(np.array([row]), np.ones((1, 2)))] for row in drafted]
        kinds, routed = np.full((len(verified), 1), TokenKind.TEXT, np.uint8), np.array(verified)
        return DraftedRound(passes, TraceStep("", Phase.DECODE, kinds, [LayerRouting(0, routed, np.ones(routed.shape))]))

    rounds = Rounds(2)
    rounds.add(round_of([[0, 1], [2, 3]], [[1, 0], [2, 4], [5, 6]]), accepted=1)
    rounds.add(round_of([[0, 1], [0, 1]], [[0, 7], [0, 1], [0, 1]]), accepted=0)
    assert rounds.fidelity() == Fidelity(
        acceptance=(1 / 2, 0 / 1),  # the second token of a wrong first one says nothing
        same_set=(1 / 2, 0 / 1),
        covered=((2 + 1) / (2 + 2), (3 + 2) / (4 + 3)),
        foreseen=((2 + 2) / (4 + 3), (3 + 2) / (6 + 3)),
        unused=((0 + 0) / (2 + 2), (1 + 0) / (4 + 2)),
    )
    with pytest.raises(ValueError, match="no shares"):
        Rounds(2).fidelity()


def test_copies_of_the_demo_model_draft_it_well(tmp_path, monkeypatch):
    """And it serves as before when that is known."""
    monkeypatch.setattr("vismoe.predictor_training.drafts.PROMPTS", 4)
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    assert main(["pack", str(tmp_path), "--formats", "int4,int2"]) == 0
    prompts = [prompt for prompt in scene_prompts(60, 8) if prompt.kind == "describe"]
    with load(tmp_path, memory="100%", calibration="none") as engine:
        before = "".join(engine.chat(prompts[0].messages(), max_tokens=16))
        found, refused = fidelities(engine, prompts)
        runtime = runtime_of(engine.model)
        assert runtime.drafts is None and runtime.plan.resident_experts == runtime.plan.total_experts
        assert "".join(engine.chat(prompts[0].messages(), max_tokens=16)) == before
    assert not refused
    int4, int2 = found["int4"], found["int2"]
    assert int4.acceptance[0] >= 0.95 and int2.acceptance[0] >= 0.9
    assert int4.same_set[0] >= 0.85 and int4.covered[-1] >= 0.95
    assert int2.covered[-1] >= 0.88
    for fidelity in (int4, int2):
        assert all(all_rows < drafted for all_rows, drafted in zip(fidelity.foreseen, fidelity.covered, strict=True))


def fetched_by_hand(steps, rows: int) -> float:
    """Experts that passes over so many tokens fetch where nothing stays from one pass to the next."""
    ids = [[layer.expert_ids[0].tolist() for layer in step.layers] for step in steps]
    groups = [ids[at : at + rows] for at in range(0, len(ids) - rows + 1, rows)]
    return sum(len(set().union(*layer)) for group in groups for layer in zip(*group, strict=True)) / len(groups)


def test_what_passes_fetch_lies_between_nothing_kept_and_everything_kept():
    trace = skewed_trace(layers=3, experts=16, top_k=2, tokens=64, prompt_tokens=9)
    steps = list(trace)[1:]
    small, half, all_there = missing_experts(trace.inventory, trace, (0.13, 0.5, 1.0))
    assert all_there == (0.0,) * 8
    for rows in (1, 2, 4, 8):
        alone = fetched_by_hand(steps, rows)
        assert 0 < half[rows - 1] < small[rows - 1] <= alone
        assert half[rows - 1] <= rows * half[0] + 1e-9
    assert half[2] == pytest.approx((half[1] + half[3]) / 2)


def test_a_calibration_keeps_what_drafts_are_like_and_older_ones_have_none(tmp_path):
    shares = (0.5, 0.25)
    curves = DraftCurves((0.2, 0.6), ((3.0, 5.0), (1.0, 2.0)), {"int4": Fidelity(shares, shares, shares, shares, shares)})
    calibration = Calibration(tmp_path, "tiny", "", RoutingShape(2, 4, 2, 8), "gate", drafts=curves)
    calibration.save({})
    assert Calibration.read(tmp_path) == calibration
    said = json.loads((tmp_path / JSON).read_text())
    (tmp_path / JSON).write_text(json.dumps(said | {"drafts": said["drafts"] | {"shares": [0.6, 0.2]}}))
    with pytest.raises(CheckpointError, match="no curves"):
        Calibration.read(tmp_path)
    del said["drafts"]
    (tmp_path / JSON).write_text(json.dumps(said))
    assert Calibration.read(tmp_path).drafts is None
