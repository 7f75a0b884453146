"""Advice of the plan that is followed is accepted: for contexts, budgets, prefixes and machines of every size."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st
from searching import examples
from test_plan import GIB, MIB, footprint, inventories, with_fix

from vismoe.config import MOST_TOKENS, Settings, parse_bytes
from vismoe.engine.engine import demo_model
from vismoe.errors import BudgetError, ConfigError
from vismoe.models.load import opening, preview
from vismoe.planning.needs import Curve, Footprint
from vismoe.planning.plan import Hardware, plan

FOLLOWED = 3  # one piece of advice may lead to the next limit, and no further
sizes = st.one_of(st.integers(1, 2**60), st.integers(20, 60).map(lambda power: 2**power))
memories = st.one_of(
    st.just("auto"),
    sizes,
    st.integers(1, 2**20).map(lambda mib: f"{mib}MiB"),
    st.integers(1, 10_000).map(lambda n: f"{n / 100:g}%"),
)
contexts = st.one_of(st.integers(1, MOST_TOKENS), st.integers(0, 24).map(lambda power: 2**power))


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    free, host = draw(st.integers(64 * MIB, 2**42)), draw(st.integers(2 * GIB, 2**42))
    ranks = draw(st.sampled_from([1, 1, 2, 3]))
    if draw(st.booleans()):
        return Hardware("cpu", free, free, free, 4, ranks)
    return Hardware("cuda", free, free, host, 4, ranks)


def squared(need: Footprint, context: int) -> Footprint:
    """With padding that grows as it does in a model, by the square of the tokens."""
    points = [
        (tokens, 3 * tokens**2 // 2)
        for tokens in sorted({0, 4, *(2**k for k in range(13, 24, 2) if 4 * 2**k <= context), context})
    ]
    return dataclasses.replace(need, padding=Curve(tuple(points)))


def followed(settings: Settings, machine: Hardware, fix: str) -> tuple[Settings, Hardware]:
    """The settings and the machine after doing what a BudgetError says."""
    larger = re.fullmatch(r"a machine with (\S+) of free (GPU memory|memory|RAM)(?: and (.*), or a smaller model)?", fix)
    if larger is None:
        return with_fix(settings, fix), machine
    settings = with_fix(settings, larger[3]) if larger[3] else settings
    nbytes = parse_bytes(larger[1])
    if larger[2] == "RAM":
        return settings, dataclasses.replace(machine, free_host_bytes=nbytes)
    both = {"free_bytes": nbytes, "free_host_bytes": nbytes} if machine.device == "cpu" else {"free_bytes": nbytes}
    return settings, dataclasses.replace(machine, **both)


@pytest.mark.budget(5)
@runs(max_examples=examples(150))
@given(inventories(), memories, contexts, st.one_of(st.just("auto"), st.integers(0, 12)), st.integers(1, 4096), machines())
def test_what_a_plan_advises_works_when_it_is_followed(experts, memory, context, pinned, window, machine):
    settings = Settings(memory=memory, context=context, pinned_layers=pinned, window=window)
    need = squared(footprint(experts), context)
    said = []
    for _ in range(FOLLOWED + 1):
        try:
            made = plan(need, settings, machine)
        except ConfigError as refused:
            assert "pinned_layers='auto'" in str(refused)
            settings = dataclasses.replace(settings, pinned_layers="auto")
            continue
        except BudgetError as refused:
            said.append(str(refused))
            settings, machine = followed(settings, machine, refused.fix)
            continue
        assert made.total_bytes <= made.budget_bytes
        return
    raise AssertionError("\n".join(said))


@pytest.mark.parametrize("positions", [None, 2**15, 4096])
@pytest.mark.parametrize("context", [2**20, MOST_TOKENS])
def test_a_context_that_no_machine_holds_gets_advice_that_is_worth_following(context, positions, monkeypatch):
    """Never four tokens where there are gigabytes: as many as the model has, or as fit."""
    machine = Hardware("cpu", 20 * GIB, 32 * GIB, 20 * GIB, 2)
    monkeypatch.setattr(preview, "probe", lambda device: machine)
    measured = opening.footprint
    monkeypatch.setattr(
        opening, "footprint", lambda *given, **named: dataclasses.replace(measured(*given, **named), positions=positions)
    )
    settings = Settings(context=context)
    with pytest.raises(BudgetError) as refused:
        preview.preview(demo_model(), settings)
    advised = with_fix(settings, refused.value.fix)
    assert advised.context >= (positions or 2**15), refused.value
    assert preview.preview(demo_model(), advised).total_bytes <= 20 * GIB


@pytest.mark.parametrize("reads", ["auto", "cached", "direct"])
def test_the_fix_of_a_refused_plan_holds_what_reading_experts_takes(reads, monkeypatch):
    """Buffers of threads that read past the page cache, which are chosen with a plan that lacks them."""
    machine = Hardware("cpu", 20 * GIB, 32 * GIB, 20 * GIB, 2)
    settle, buffer = opening.settle_reading, 50 * MIB
    large = lambda need, settings, machine, reads, table: settle(  # noqa: E731
        need, settings, machine, dataclasses.replace(reads, bounce_bytes=buffer), table
    )
    monkeypatch.setattr(opening, "settle_reading", large)
    settings = Settings(memory="300MiB", reads=reads)
    with pytest.raises(BudgetError) as refused:
        preview.preview(demo_model(), settings, hardware=machine)
    made = preview.preview(demo_model(), with_fix(settings, refused.value.fix), hardware=machine)
    staging = sum(part.bytes for part in made.parts if part.name == "staging")
    assert made.total_bytes <= made.budget_bytes
    assert reads == "auto" or (staging > buffer) == (reads == "direct")
