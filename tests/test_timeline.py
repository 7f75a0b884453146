"""The timeline: what the pager writes into it, and the file that a trace viewer opens."""

import json

import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples

import vismoe
from vismoe import VisMoEConfig
from vismoe.timeline import COPIES, Timeline


def test_spans_become_complete_events_on_named_tracks(tmp_path):
    timeline = Timeline()
    origin = timeline._origin_s
    timeline.span("compute", "layer 0", origin + 1, origin + 1.5, expert=3)
    timeline.span("stall", "layer 1", origin + 2, origin + 2.25)
    timeline.write(tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [(names[s["tid"]], s["name"], s["ts"], s["dur"]) for s in spans] == [
        ("compute", "layer 0", 1e6, 5e5),
        ("stall", "layer 1", 2e6, 2.5e5),
    ]
    assert spans[0]["args"] == {"expert": 3}


def test_a_paged_forward_writes_one_span_per_copy_and_group_of_experts(tmp_path):
    tiny_models.save("qwen3_moe", tmp_path)
    config = VisMoEConfig(memory="25%", lookahead="none")
    model = tiny_models.model_class(tmp_path).from_pretrained(tmp_path, quantization_config=config)
    pager = vismoe.runtime_of(model).pager
    pager.timeline = Timeline()
    model(**tiny_models.prompt("qwen3_moe"))
    counts, spans = pager.metrics.snapshot(), pager.timeline.spans
    copies = [span for span in spans if span.name in COPIES]
    record_bytes = pager.inventory.layouts[0].record_bytes
    assert sum(span.details["bytes"] for span in copies) == counts.total("bytes_read") > 0
    assert {span.details["bytes"] for span in copies} == {record_bytes}
    computed = [span for span in spans if span.track == "compute"]
    assert sum(len(span.details["experts"]) for span in computed) == counts.total("hits") + counts.total("misses")
    stalled_s = sum(span.ended_s - span.began_s for span in spans if span.track == "stall")
    assert abs(stalled_s - counts.total("stall_seconds")) < 1e-9
    assert all(span.ended_s >= span.began_s for span in spans)


def test_more_spans_than_it_holds_are_dropped_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr("vismoe.timeline.MOST_SPANS", 2)
    timeline = Timeline()
    for _ in range(5):
        timeline.span("compute", "x", 0.0, 1.0)
    timeline.write(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["otherData"]["dropped_spans"] == 3


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


@settings(max_examples=examples(100), deadline=None)
@given(INTERVALS, INTERVALS, st.integers(0, 20), st.integers(1, 30))
def test_shares_of_a_phase_are_those_of_its_moments(tmp_path_factory, copies, computed, began, lasted):
    """Spans last from one whole second to another, so each second is all or nothing."""
    timeline, moments = Timeline(), range(began, began + lasted)
    for number, (start, length) in enumerate(copies):
        timeline.span(f"worker {number % 3}", "copy" if number % 2 else "prefetch", start, start + length, bytes=10)
    for start, length in computed:
        timeline.span("compute", "layer 0", start, start + length)
    timeline.span("stall", "layer 0", 0, 100)
    timeline.span("phase", "decode", began, began + lasted)
    path = tmp_path_factory.mktemp("timeline") / "out.json"
    timeline.write(path)
    found = json.loads(path.read_text())["otherData"]["phases"]["decode"]
    busy = [{second for start, length in spans for second in range(start, start + length)} for spans in (copies, computed)]
    copying, computing = ([moment in seconds for moment in moments] for seconds in busy)
    kinds = list(zip(copying, computing))
    shares = {name: found[name] * lasted for name in ("copying", "computing", "both", "neither")}
    expected = sum(copying), sum(computing), kinds.count((True, True)), kinds.count((False, False))
    assert list(shares.values()) == pytest.approx(expected, abs=1e-9) and found["seconds"] == lasted
    ended = [start + length for start, length in copies if start < began + lasted and start + length > began]
    assert found["copied_bytes"] == 10 * sum(end <= began + lasted for end in ended)
