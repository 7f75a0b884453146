"""`vismoe simulate`: predictions against arithmetic by hand, and that more memory or a faster part never slows a machine."""

import dataclasses
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vismoe.cli import main as cli
from vismoe.config import Settings
from vismoe.errors import ConfigError
from vismoe.pair import FormatPair
from vismoe.planning.needs import CacheLayer, Curve, Footprint
from vismoe.simulate import predict as predicting
from vismoe.simulate.find import find
from vismoe.simulate.machines import DECODE_SHARE, READ_SHARE, HardwarePart, PartsTable, VirtualMachine
from vismoe.simulate.predict import Described, Workload, predict
from vismoe.trace.synthetic import inventory_of, skewed_trace
from vismoe.types import RecordLayout

LAYERS, EXPERTS, TOP_K, RECORD = 4, 16, 4, 10 * 2**20
LOW_RECORD = RECORD // 2  # of a pair's second format
OTHER = 400 * 2**20  # bytes beside the experts that a token reads
TABLE = PartsTable()


def footprint(layers: int = LAYERS, pair: FormatPair | None = None) -> Footprint:
    inventory = inventory_of(layers, EXPERTS, TOP_K, RECORD)
    if pair is not None and pair.low is not None:
        inventory = dataclasses.replace(inventory, low_layouts=(RecordLayout((), LOW_RECORD),), model_layouts=inventory.layouts)
    none = Curve(())
    curves = dict.fromkeys(("prefill", "decode", "encode", "padding"), none)
    sizes = dict(logits_bytes=0, combine_token_bytes=0, image_token_bytes=0, max_image_tokens=0, kernel_bytes=0)
    return Footprint("made-up", "bfloat16", inventory, (("attention", OTHER),), (CacheLayer(0, 0),), **curves, **sizes)


def model(layers: int = LAYERS) -> Described:
    return Described("made-up", lambda settings, device: (footprint(layers, settings.pair), 0))


def machine(**rates: float) -> VirtualMachine:
    """Figures as they are, nothing but bytes takes time."""
    ram = HardwarePart("ram", "ram", rates.get("ram", 50.0), rates.get("ram_gb", 64.0))
    disk = HardwarePart("disk", "disk", rates.get("disk", 1.0))
    cpu = HardwarePart("cpu", "cpu", tflops=1e6, cores=4)
    if "gpu" not in rates:
        return VirtualMachine(ram, disk, cpu, layer_s=0.0, row_s=0.0)
    gpu = HardwarePart("gpu", "gpu", rates["gpu"], rates.get("gpu_gb", 8.0), tflops=1e6)
    return VirtualMachine(ram, disk, cpu, gpu, HardwarePart("link", "link", rates.get("link", 10.0)), layer_s=0.0, row_s=0.0)


def of(memory: str, **further) -> Settings:
    return Settings(**{"memory": memory, "context": 1024, "parallel": 1, "misses": "wait", **further})


UNIFORM = Workload(prompt_tokens=16, skew=0.0)


def test_a_resident_model_takes_its_bytes_over_the_bandwidth():
    told = predict(model(), machine(gpu=200.0), of("100%"), UNIFORM)
    token = OTHER + LAYERS * TOP_K * RECORD
    assert told.tokens_per_s == pytest.approx(200e9 / token, rel=1e-4)
    assert (told.hit_rate, told.link_bytes, told.disk_bytes, told.limit) == (1.0, 0.0, 0.0, "memory")


def test_without_room_every_expert_crosses_the_link():
    told = predict(model(), machine(gpu=200.0, link=10.0), of(f"{2 * 100 / (LAYERS * EXPERTS)}%"), UNIFORM)
    copied = LAYERS * TOP_K * RECORD
    assert told.hit_rate < 0.05 and told.limit == "link"
    assert told.link_bytes == pytest.approx((1 - told.hit_rate) * copied)
    expected = told.link_bytes / 10e9 + (OTHER + copied) / 200e9
    assert 1 / told.tokens_per_s == pytest.approx(expected, rel=0.03)  # the few that are there are computed meanwhile


def test_over_a_link_what_is_there_is_computed_while_the_rest_comes():
    told = predict(model(), machine(gpu=20.0, link=10.0), of("50%"), UNIFORM)
    beside = OTHER + LAYERS * TOP_K * RECORD
    assert told.waiting_s < told.link_s and told.waiting_s + beside / 20e9 == pytest.approx(1 / told.tokens_per_s)
    hidden = told.hit_rate * LAYERS * TOP_K * RECORD / 20e9
    assert told.link_s - told.waiting_s <= hidden * 1.01


def test_what_ram_does_not_hold_comes_from_disk():
    small = machine(gpu=200.0, ram_gb=3.4)  # two GiB are others', one is kept free: a part of the experts is left
    told = predict(model(), small, of("6%"), UNIFORM)
    assert 0 < told.in_host < 1 and told.limit == "disk"
    assert told.disk_bytes / told.link_bytes == pytest.approx(1 - told.in_host, abs=0.15)


def test_a_processor_reads_its_disk_or_its_page_cache():
    warm, cold = (predict(model(), machine(ram_gb=ram), of("25%"), UNIFORM) for ram in (64.0, 3.2))
    assert warm.disk_s == 0 and cold.limit == "disk" and cold.tokens_per_s < warm.tokens_per_s
    expected = cold.disk_bytes / (1e9 * READ_SHARE) + (OTHER + LAYERS * TOP_K * RECORD) / (50e9 * DECODE_SHARE)
    assert 1 / cold.tokens_per_s == pytest.approx(expected, rel=1e-3)


def test_rows_share_what_is_read():
    """16 rows want nearly every expert, once."""
    one, many = (predict(model(), machine(gpu=200.0), of("100%", parallel=rows), UNIFORM) for rows in (1, 16))
    read = OTHER + LAYERS * EXPERTS * RECORD * (1 - (1 - TOP_K / EXPERTS) ** 16)
    assert many.tokens_per_s == pytest.approx(16 * 200e9 / read, rel=0.02)
    assert many.rows == 16 and many.tokens_per_s > 3 * one.tokens_per_s


def test_lossless_records_cross_the_link_in_fewer_bytes():
    raw, lossless = (predict(model(), machine(gpu=200.0), of("25%", format=name), UNIFORM) for name in ("raw", "lossless"))
    assert lossless.hit_rate == raw.hit_rate
    assert lossless.link_bytes == pytest.approx(0.70 * raw.link_bytes)


def test_misses_are_computed_in_host_memory_where_that_is_sooner():
    slow_link = machine(gpu=200.0, link=1.0)
    waits, chooses = (predict(model(), slow_link, of("25%", misses=way), UNIFORM) for way in ("wait", "auto"))
    assert chooses.tokens_per_s > 2 * waits.tokens_per_s and chooses.host_s > 0


@settings(max_examples=15, deadline=None)
@given(
    shares=st.tuples(st.integers(5, 100), st.integers(5, 100)),
    links=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    gpu=st.integers(50, 2000),
)
def test_more_memory_and_a_faster_link_never_slow_a_machine(shares, links, gpu):
    def speed(share: int, link: int) -> float:
        return predict(model(), machine(gpu=float(gpu), link=float(link)), of(f"{share}%"), UNIFORM).tokens_per_s

    low, high = sorted(shares)
    slow, fast = sorted(links)
    assert speed(low, slow) <= speed(low, fast) * 1.0001
    assert speed(low, slow) <= speed(high, slow) * 1.03  # one trace decides which experts a few slabs more hold


@pytest.mark.parametrize("rows", [1, 8])
def test_more_memory_never_slows_a_processor(rows):
    """Its cores compute and copy, one after the other."""
    told = [
        predict(model(), machine(), of(share, parallel=rows, reads="cached"), UNIFORM)
        for share in ("6%", "12%", "25%", "50%", "100%")
    ]
    for less, more in pairwise(told):
        assert more.tokens_per_s >= 0.999 * less.tokens_per_s and more.first_token_s <= 1.001 * less.first_token_s
    for each in told if rows == 1 else ():  # several rows are streamed: the next layer's experts come meanwhile
        assert 1 / each.tokens_per_s == pytest.approx(each.memory_s + each.arithmetic_s, rel=0.02)  # copies count as memory


def test_some_layers_stand_for_all(monkeypatch):
    few = predict(model(40), machine(gpu=200.0), of("25%"), Workload(prompt_tokens=16))
    monkeypatch.setattr(predicting, "SAMPLED_LAYERS", 40)
    every = predict(model(40), machine(gpu=200.0), of("25%"), Workload(prompt_tokens=16))
    assert (few.layers_replayed, every.layers_replayed) == (16, 40)
    assert few.tokens_per_s == pytest.approx(every.tokens_per_s, rel=0.06)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (dict(policy="importance", formats="lossless/4"), "lossless"),
        (dict(parallel="auto"), "parallel"),
        (dict(parallel=65), "parallel"),
        (dict(draft="auto"), "draft"),
        (dict(draft="mtp", draft_tokens=3), "draft='mtp'"),
        (dict(draft="ngram"), "draft"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(changed, named):
    with pytest.raises(ConfigError, match=named):
        predict(model(), machine(), of("25%", **changed), UNIFORM)


def test_drafts_that_are_right_save_passes():
    """With everything resident a round of n-grams takes one pass, and gives as many tokens as are right and one more."""
    box, asked = machine(gpu=200.0), of("100%", draft="ngram", draft_tokens=3)
    told = predict(model(), box, asked, dataclasses.replace(UNIFORM, accepted=0.5))
    read = OTHER + LAYERS * EXPERTS * RECORD * (1 - (1 - TOP_K / EXPERTS) ** 4)
    assert told.tokens_per_s == pytest.approx((1 + 0.5 + 0.25 + 0.125) * 200e9 / read, rel=0.03)
    wrong = predict(model(), box, asked, dataclasses.replace(UNIFORM, accepted=0.0))
    assert wrong.tokens_per_s < predict(model(), box, of("100%"), UNIFORM).tokens_per_s < told.tokens_per_s


def test_a_copy_that_drafts_promises_what_is_missing():
    """Its passes take time, in which the link carries what they name."""
    slow = machine(gpu=20.0, link=5.0)
    asked, work = dict(draft_tokens=3), dataclasses.replace(UNIFORM, accepted=0.9)
    copy, text = (predict(model(), slow, of("50%", draft=kind, **asked), work) for kind in ("self", "ngram"))
    assert copy.waiting_s < text.waiting_s


@pytest.mark.parametrize("share", ["4%", "12%", "50%", "100%"])
def test_a_prompt_takes_at_least_its_arithmetic_whatever_is_resident(share):
    box = machine(gpu=1e6, link=1e6)
    box = dataclasses.replace(box, gpu=dataclasses.replace(box.gpu, tflops=0.05))
    told = predict(model(), box, of(share), Workload(prompt_tokens=64, skew=0.0))
    arithmetic_s = 64 * OTHER / 0.05e12  # two operations for each weight of two bytes; made-up records have no weights
    assert told.first_token_s == pytest.approx(arithmetic_s, rel=0.01)


# -- policies
def test_with_hotness_every_expert_is_there_and_a_token_reads_what_its_formats_take():
    box = machine(gpu=200.0, link=10.0)
    told = predict(model(), box, of("75%", policy="hotness", formats="8/4"), UNIFORM)
    expert = told.high * RECORD + (1 - told.high) * LOW_RECORD
    assert (told.hit_rate, told.waiting_s) == (1.0, pytest.approx(0, abs=1e-9)) and 0.3 < told.high < 0.7
    assert told.memory_bytes_read == pytest.approx(OTHER + LAYERS * TOP_K * expert)
    assert told.tokens_per_s == pytest.approx(200e9 / told.memory_bytes_read, rel=1e-4)


def test_hotness_finds_the_hot_experts_and_promotions_cross_the_link():
    box, asked = machine(gpu=200.0, link=10.0), of("75%", policy="hotness", formats="8/4", hotness_decay=0.9)
    even, skewed = (predict(model(), box, asked, dataclasses.replace(UNIFORM, skew=skew)) for skew in (0.0, 1.5))
    assert skewed.high > even.high + 0.2
    assert even.link_bytes > 0 and even.waiting_s == pytest.approx(0, abs=1e-9)  # no pass waits for a promotion


def test_importance_loads_less_than_the_better_format_alone_and_waits_for_what_is_critical():
    box = machine(gpu=200.0, link=10.0)
    alone = predict(model(), box, of("25%"), UNIFORM)
    both = predict(model(), box, of("25%", policy="importance", formats="8/4", retention=0.5), UNIFORM)
    skips = predict(model(), box, of("25%", policy="importance", formats="8/0", retention=0.5), UNIFORM)
    assert skips.tokens_per_s > both.tokens_per_s > alone.tokens_per_s
    assert skips.link_bytes < both.link_bytes < alone.link_bytes
    assert skips.high == 1.0 and 0.5 < both.high < 1  # a resident copy that is better than wanted serves


def test_both_rules_together_borrow_what_comes_in_time():
    slow, fast = (
        predict(model(), machine(gpu=20.0, link=link), of("75%", policy="hotness+importance", formats="8/4"), UNIFORM)
        for link in (0.1, 500.0)
    )
    assert slow.hit_rate == fast.hit_rate == 1.0 and fast.high > slow.high + 0.1


def test_a_policy_serves_several_rows_and_what_ram_lacks_comes_from_disk():
    asked = dict(policy="importance", formats="8/4")
    one, many = (predict(model(), machine(gpu=200.0), of("50%", parallel=rows, **asked), UNIFORM) for rows in (1, 8))
    assert many.tokens_per_s > 1.5 * one.tokens_per_s and one.disk_bytes == 0
    small = predict(model(), machine(gpu=200.0, ram_gb=3.5), of("12%", **asked), UNIFORM)
    assert small.disk_bytes > 0 and 0 < small.in_host < 1 and small.tokens_per_s < one.tokens_per_s


@pytest.mark.parametrize("policy", ["hotness", "importance"])
def test_a_recorded_trace_is_replayed_under_a_policy_as_generated_routing_of_its_kind(policy):
    """Both of one taste: hotness has seen the experts of either before."""
    steps = skewed_trace(LAYERS, EXPERTS, TOP_K, tokens=64, skew=1.5, zipf=True, prompt_tokens=16, seed=0).steps[1:]
    asked, skewed = of("75%", policy=policy, formats="8/4"), dataclasses.replace(UNIFORM, skew=1.5)
    recorded = predict(model(), machine(gpu=200.0), asked, dataclasses.replace(skewed, trace=tuple(steps)))
    generated, even = (predict(model(), machine(gpu=200.0), asked, work) for work in (skewed, UNIFORM))
    assert recorded.high == pytest.approx(generated.high, abs=0.06) and recorded.hit_rate == pytest.approx(
        generated.hit_rate, abs=0.06
    )
    if policy == "hotness":
        assert recorded.high > even.high + 0.1


def test_some_layers_have_their_share_of_the_hot_experts(monkeypatch):
    """So few that they do not go round: a twelfth of the experts in 40 layers."""
    asked = of("54%", policy="hotness", formats="8/4")
    few = predict(model(40), machine(gpu=200.0), asked, UNIFORM)
    monkeypatch.setattr(predicting, "SAMPLED_LAYERS", 40)
    every = predict(model(40), machine(gpu=200.0), asked, UNIFORM)
    assert 0 < every.high < 0.2 and few.high == pytest.approx(every.high, abs=0.02)


# -- machines
def test_a_machine_is_read_from_its_parts():
    found = TABLE.machine("rtx4060-8gb, ddr5-5600 64GB, pcie4x4, nvme 5GB/s")
    assert found.ram.memory_gb == 64 and found.disk.gb_per_s == 5 and found.assumed == ("cpu8-avx2",)
    assert found.link_bytes_per_s == pytest.approx(0.8 * 7.9e9)  # the slot is slower than the card
    assert TABLE.machine("rtx4060-8gb, pcie5x16").link.name == "pcie4x8"  # and here the card is
    assert TABLE.machine("gpu 24GB 1000GB/s, link 12GB/s").gpu.memory_gb == 24
    assert TABLE.machine("ddr5-5600 32GB").device == "cpu"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rtx4061-8gb", "did you mean rtx4060-8gb.*ddr5-5600.*nvme"),
        ("nvme 5", "sizes and rates"),
        ("gpu 24GB", "no rate"),
        ("gpu 24GB 1000GB/s", "names no link"),
        ("ddr5-5600, ddr4-3200", "both a ram"),
        ("nvme 5GB", "no size here"),
        ("", "names no part"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(text, named):
    with pytest.raises(ConfigError, match=named):
        TABLE.machine(text)


def test_a_table_of_ones_own(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(TABLE.path.read_text().replace("rtx4060-8gb = { memory_gb = 8,", "rtx4060-8gb = { memory_gb = 9,"))
    assert PartsTable(mine).machine("rtx4060-8gb").gpu.memory_gb == 9
    mine.write_text("[gpu]\n")
    with pytest.raises(ConfigError, match="no table of parts"):
        PartsTable(mine)


# -- find
def test_the_smallest_memory_reaches_the_speed_and_less_does_not():
    box = machine(gpu=200.0)
    full = predict(model(), box, of("auto"), UNIFORM).tokens_per_s
    found = find(model(), box, TABLE, of("auto"), UNIFORM, 0.5 * full)
    at = predict(model(), box, of(str(found.memory_bytes)), UNIFORM).tokens_per_s
    below = predict(model(), box, of(str(int(0.9 * found.memory_bytes))), UNIFORM).tokens_per_s
    assert below < 0.5 * full <= at and found.upgrade is None


def test_the_cheapest_upgrade_is_the_first_that_reaches_the_speed():
    box = dataclasses.replace(TABLE.machine("ddr5-5600 3GB, sata"), layer_s=0.0, row_s=0.0)
    now = predict(model(), box, of("auto"), UNIFORM)
    found = find(model(), box, TABLE, of("auto"), UNIFORM, 1.5 * now.tokens_per_s)
    assert found.memory_bytes is None and found.upgrade.part.name == "ddr5-5600" and found.upgrade.price == 16 * 5
    assert found.upgraded.tokens_per_s >= 1.5 * now.tokens_per_s
    assert find(model(), box, TABLE, of("auto"), UNIFORM, 1e9).upgrade is None


# -- the command
def test_the_command_says_that_it_simulates(capsys):
    asked = ["simulate", "tiny", "--machine", "rtx4060-8gb, ddr5-5600 16GB", "--memory", "25%", "--prompt-tokens", "8"]
    assert cli.main(asked) == 0
    printed = capsys.readouterr().out
    assert "simulated, not measured" in printed and "tokens/s" in printed and "assumed: nvme, cpu8-avx2" in printed
    assert cli.main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["simulated"] and told["tokens_per_s"] > 0 and told["routing"] == "olmoe"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["tiny"], "a model and a machine"),
        (["tiny", "--machine", "nvme", "--routing", "odd"], "no such routing"),
        (["tiny", "--machine", "nvme", "--accepted", "2"], "--accepted"),
        (["tiny", "--machine", "nvme", "--parallel", "9", "--context", "512"], "--context 5184"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(words, named, capsys):
    assert cli.main(["simulate", *words]) == 2
    assert named in capsys.readouterr().err


def test_the_command_lists_parts(capsys):
    assert cli.main(["simulate", "--parts"]) == 0
    assert "rtx4060-8gb" in capsys.readouterr().out
