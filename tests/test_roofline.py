"""The roofline: sizes against the model's own, a few numbers by hand, and docs/gpu.md with its data against the code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vismoe.bench import roofline
from vismoe.bench.roofline import CARDS, MISSES, SHARES, bound, bounds
from vismoe.bench.subject import GeneratedModel, sketch
from vismoe.cli.main import main

DOCS = Path(__file__).parent.parent / "docs"
RTX_4060, RTX_4090, RTX_5090, H200 = CARDS


def test_the_sizes_are_those_of_the_model():
    with sketch(GeneratedModel("qwen3-vl-30b-a3b", None)) as subject:
        parts, text = dict(subject.backbone), subject.config.get_text_config()
        layer = subject.inventory.layers[0]
        assert subject.expert_bytes == roofline.LAYERS * roofline.EXPERTS * roofline.EXPERT_BYTES
    assert (layer.num_experts, layer.top_k) == (roofline.EXPERTS, roofline.TOP_K)
    assert parts["vision tower"] == roofline.TOWER_BYTES
    assert sum(parts.values()) - parts["vision tower"] - parts["embeddings"] == roofline.DENSE_BYTES
    heads = text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    assert 2 * 2 * heads == roofline.KV_TOKEN_BYTES


def test_a_few_numbers_by_hand():
    quarter = bound(H200, "raw", 0.25, "uniform")  # 288 of 384 experts of 9 MiB arrive
    assert quarter.link_bytes == 288 * 9 * 2**20 and quarter.binds == "link"
    assert quarter.least_s == pytest.approx(288 * 9 * 2**20 / 63.015e9, rel=1e-4)
    resident = bound(H200, "raw", 1.0, "uniform")
    assert resident.link_bytes == 0 and resident.binds == "memory"
    assert resident.least_s == pytest.approx((384 * 9 * 2**20 + 2_459_857_408 + 2048 * 98304) / 4.8e12)
    assert bound(RTX_4090, "lossless", 0.25, "uniform").link_bytes == pytest.approx(0.7 * quarter.link_bytes)
    assert bound(RTX_4090, "int4", 0.5, "uniform").link_bytes == 192 * 9 * 2**20 * 4.25 / 16
    assert bound(RTX_4060, "int4", 0.25, "skewed").link_bytes == 192 * 9 * 2**20 * 4.25 / 16  # half of the demands hit


def test_launches_bind_only_where_nothing_else_takes_longer():
    resident, eighth = (bound(H200, "raw", share, "uniform") for share in (1.0, 0.125))
    assert resident.launches == 48 * (4 + 59) + 14 and resident.launched_s == resident.launches * 5e-6 > resident.least_s
    assert eighth.launches == 48 * (6 + 4 * 7 + 59) + 14 and eighth.launched_s == eighth.least_s


def test_what_does_not_fit_is_said_and_not_computed():
    assert bound(RTX_4060, "raw", 0.125, "uniform").unfit == "needs 11.5 GB of 8.6"
    assert bound(RTX_5090, "raw", 0.5, "uniform").unfit is None and bound(RTX_4090, "raw", 0.5, "uniform").unfit
    rows = roofline.report()["tables"][1]["rows"]
    assert len(rows) == len(list(bounds())) == len(CARDS) * len(roofline.FORMATS) * len(SHARES) * len(MISSES)
    assert all((row[-1] is None) == (row[5] is not None) for row in rows)


def test_hits_of_the_skewed_table_are_those_that_were_measured():
    page = (DOCS / "orchestrator.md").read_text()
    for share, hits in ((0.125, "28.4%"), (0.25, "50.0%"), (0.5, "77.0%")):
        assert f"| {100 * share:g}% |" in page and hits in page
        assert f"{1 - MISSES['skewed'][share]:.1%}" == hits


def test_the_page_and_its_data_are_what_the_code_prints(capsys):
    assert main(["gpu-check", "--roofline"]) == 0
    assert capsys.readouterr().out.strip() in (DOCS / "gpu.md").read_text()
    assert main(["gpu-check", "--roofline", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((DOCS / "data" / "gpu.json").read_text())


def test_it_does_not_need_torch():
    code = "import sys; from vismoe.bench import roofline; roofline.markdown(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
