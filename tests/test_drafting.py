"""Drafts change how many passes an answer takes, and nothing of it: tokens, logits, keys and values are those of passes of one
token each, whatever is drafted."""

import random

import pytest
import torch
from searching import SEARCHING
from test_serving_engine import DEMO, FIRST, REQUESTS, ask, said

import vismoe
from vismoe.cli.main import main
from vismoe.engine.drafting import Drafter
from vismoe.engine.generate import TokenLoop
from vismoe.engine.request import Request
from vismoe.errors import ConfigError
from vismoe.lookahead.calibration import Calibration, geometry_of, router_digest
from vismoe.speculate.worth import DraftCurves, Fidelity
from vismoe.types import Phase

LOADED = dict(device="cpu", image_cache="1MiB", context=1024)
SAMPLED = ask("Describe it.", FIRST), {"sample": True, "seed": 4, "temperature": 2.0}
TALKS = [(messages, {**options, "max_tokens": 12}) for messages, options in (*REQUESTS[:2], SAMPLED, REQUESTS[5])]


@pytest.fixture
def left(monkeypatch):
    """What each answer has left: its tokens, the logits of each, the keys and values of every layer."""
    found = []
    leave, answer, take = Request._leave, Request._answer, TokenLoop.take

    def taken(self, outputs, said=None):
        self.latest = outputs.logits[0, -1].clone()
        return take(self, outputs, said)

    def answered(self, token, last):
        self.__dict__.setdefault("logits", []).append(self._loop.latest)
        return answer(self, token, last)

    def leaving(self):
        if self._loop is not None:
            layers = [(layer.keys.clone(), layer.values.clone()) for layer in self._loop.cache.layers]
            found.append((self._loop.ids.clone(), torch.stack(self.logits), layers))
        leave(self)

    monkeypatch.setattr(Request, "_answer", answered)
    monkeypatch.setattr(Request, "_leave", leaving)
    monkeypatch.setattr(TokenLoop, "take", taken)
    return found


def equal(one, other):
    (ids, logits, layers), (ids_too, logits_too, layers_too) = one, other
    same = all(torch.equal(a, b) for pair in zip(layers, layers_too, strict=True) for a, b in zip(*pair, strict=True))
    return torch.equal(ids, ids_too) and torch.equal(logits, logits_too) and same


@pytest.fixture(params=["2%", "100%"])  # 2%: two slabs
def engine(request):
    with vismoe.load(memory=request.param, draft="ngram", draft_tokens=7, **LOADED) as engine:
        yield engine
        engine.check_integrity()


def drafting(monkeypatch, draft):
    """From now on `draft(ids, most)` says what is drafted after the sequence `ids`."""
    monkeypatch.setattr(Drafter, "_looked_up", lambda self, loop, most: list(draft(loop.ids[0].tolist(), most))[:most])


def known(answers, ids):
    """What followed this beginning in one of these answers."""
    return next((one[0][0, len(ids) :].tolist() for one in answers if one[0][0, : len(ids)].tolist() == ids), [])


def answers(engine, talks, draft):
    return [said(engine, messages, **options, draft=draft)[1] for messages, options in talks]


@pytest.mark.budget(7)
def test_answers_have_the_bits_of_passes_of_one_token_whatever_is_drafted(engine, left, monkeypatch):
    ends = [one.finish for one in answers(engine, TALKS, "none")]
    alone, chance = left[:], random.Random(3)

    def right(ids, most):
        return known(alone, ids)[:most]

    def wrong_at(ids, most):
        tokens = right(ids, most)
        if tokens:
            at = chance.randrange(len(tokens))
            tokens[at] = (tokens[at] + 1) % 100
        return tokens

    def anything(ids, most):
        return [chance.randrange(100) for _ in range(chance.randint(0, most))]

    rounds = []
    for draft in (right, wrong_at, anything):
        left.clear()
        drafting(monkeypatch, draft)
        figures = answers(engine, TALKS, "ngram")
        assert all(equal(*pair) for pair in zip(left, alone, strict=True)), draft.__name__
        rounds.append([one.drafts for one in figures])
        assert [one.finish for one in figures] == ends
    perfect, broken, _ = (
        [sum(getattr(one, name) for one in each) for name in ("rounds", "drafted", "accepted")] for each in rounds
    )
    assert perfect[1] == perfect[2] > 3 * perfect[0]  # what is right is accepted
    assert 0 < broken[2] < broken[1]
    assert "the bits of being alone" in engine.backends["drafts"]


@pytest.mark.parametrize("count", (1, 2, 3, 6) if SEARCHING else (1, 6))
def test_rounds_of_every_length(count, left, monkeypatch):
    with vismoe.load(memory="25%", draft="ngram", draft_tokens=count, **LOADED) as engine:
        talks = TALKS[:2]
        answers(engine, talks, "none")
        alone = left[:]
        left.clear()
        drafting(monkeypatch, lambda ids, most: known(alone, ids))
        figures = answers(engine, talks, "ngram")
        assert all(equal(*pair) for pair in zip(left, alone, strict=True))
        longest = max(one.tokens for each in figures for one in each.passes if one.phase is Phase.DECODE)
        assert longest == 1 + count
        engine.check_integrity()


def test_what_repeats_takes_fewer_passes():
    talk = ask("Describe the image.", DEMO), {"max_tokens": 60}
    with vismoe.load(memory="50%", draft="ngram", **LOADED) as engine:
        text, figures = said(engine, talk[0], **talk[1])
        assert said(engine, talk[0], **talk[1], draft="none")[0] == text
        assert figures.drafts is not None


def test_a_request_cannot_ask_for_what_was_not_loaded(engine):
    with pytest.raises(ConfigError, match=r"loaded with draft='ngram'.*Fix: load with draft='self' \(--draft self\)"):
        engine.chat(ask("What is this?"), draft="self")
    assert engine.drafts == ("none", "ngram")


def test_requests_that_share_passes_do_not_draft_and_say_what_they_say_alone(monkeypatch):
    with vismoe.load(memory="25%", draft="ngram", **LOADED) as engine:
        alone = [said(engine, messages, **options)[0] for messages, options in TALKS]
        replies = [engine.chat(messages, **options) for messages, options in TALKS]
        assert ["".join(reply) for reply in replies] == alone
        assert max(one.rows for reply in replies for one in reply.figures.passes) > 1


def test_a_cancelled_round_leaves_what_was_said(engine, monkeypatch):
    """A later request goes on from there, with the bits of a cache that never held drafts."""
    messages = ask("Describe the image.", DEMO)
    expected = said(engine, messages, max_tokens=14, reuse=False, draft="none")[0]
    drafting(monkeypatch, lambda ids, most: [5] * most)
    for after in range(4):
        reply = engine.chat(messages, max_tokens=14, reuse=True)
        for count, _ in enumerate(reply):
            if count == after:
                reply.cancel()
        assert said(engine, messages, max_tokens=14, reuse=True)[0] == expected


# ------------------------------------------------------------------ a copy of the experts in few bits drafts
@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    store = tmp_path_factory.mktemp("packed")
    assert main(["pack", "--formats", "int4,int2", "--out", str(store)]) == 0
    return {"store": str(store), **LOADED}


SELF = [("int4", "2%"), ("int2", "50%"), ("int4", "25%"), ("int4", "100%")]


@pytest.mark.parametrize(("format", "memory"), SELF if SEARCHING else SELF[:2])
def test_the_model_drafts_for_itself_and_says_what_it_says_alone(packed, left, format, memory):
    with vismoe.load(memory=memory, draft="self", draft_format=format, draft_tokens=4, **packed) as engine:
        answers(engine, TALKS, "none")
        alone = left[:]
        left.clear()
        figures = answers(engine, TALKS, "self")
        assert all(equal(*pair) for pair in zip(left, alone, strict=True))
        drafts = [one.drafts for one in figures]
        assert sum(one.accepted for one in drafts) > 0.6 * sum(one.drafted for one in drafts)
        promised, foreseen = (sum(getattr(one, name) for one in drafts) for name in ("promised", "foreseen"))
        assert foreseen > 0.85 * promised > 0
        passes = [one.tokens for each in figures for one in each.passes if one.phase is Phase.DRAFT]
        assert sum(passes) == sum(one.drafted for one in drafts)
        engine.check_integrity()


def test_a_round_that_fails_ends_its_request_and_its_promises(packed):
    with vismoe.load(memory="25%", draft="self", draft_tokens=3, **packed) as engine:
        text = said(engine, TALKS[0][0], max_tokens=9)[0]
        for phase in (Phase.DRAFT, Phase.DECODE):  # while it drafts, and while it verifies
            reply = engine.chat(TALKS[0][0], max_tokens=60)
            next(iter(reply))
            context = engine._runtime.context

            def breaks(module, arguments, phase=phase, context=context):
                if context.step.phase is phase:
                    raise RuntimeError("broken")

            hook = engine.model.model.language_model.layers[5].register_forward_pre_hook(breaks)
            with pytest.raises(RuntimeError, match="broken"):
                list(reply)
            hook.remove()
            assert not engine._runtime.pager.core.promises
            assert said(engine, TALKS[0][0], max_tokens=9)[0] == text
            engine.check_integrity()


def test_drafts_take_part_in_the_plan(packed):
    with vismoe.load(memory="25%", draft="self", **packed) as engine:
        parts = {part.name: part.bytes for part in engine.plan.parts}
        assert parts["draft pool (int4)"] == engine._runtime.drafts.nbytes
        assert engine.drafts == ("none", "ngram", "self")


# ------------------------------------------------------------------ auto: a copy of the experts where a calibration says it pays
@pytest.fixture(scope="module")
def calibrated(packed, tmp_path_factory):
    """A folder with a calibration of the demo model, which says that drafts are right, and how many experts are missing."""
    with vismoe.load(memory="25%", **packed) as engine:
        store = engine._runtime.store.inventory
        shape = geometry_of(store, engine.model.config.get_text_config().hidden_size)
        digest = router_digest(engine.model, store)

    def folder(missing):
        path = tmp_path_factory.mktemp("calibrated")
        right = Fidelity(acceptance=(1.0,) * 7, same_set=(0.9,) * 7, covered=(1.0,) * 7, foreseen=(0.97,) * 7, unused=(0.03,) * 7)
        of_rows = tuple(missing * (1 + 0.1 * row) for row in range(8))
        curves = DraftCurves((0.05, 0.5), (of_rows, of_rows), {"int4": right})
        Calibration(path, "demo-model", digest, shape, "none", drafts=curves).save({})
        return {**packed, "calibration": str(path)}

    return folder


SLOW = {"emulated_link_bytes_per_s": 2e6}  # copies are all that takes time


def test_auto_loads_a_copy_where_it_pays(calibrated):
    with vismoe.load(memory="50%", draft="auto", **SLOW, **calibrated(missing=20.0)) as engine:
        assert engine.drafts == ("none", "ngram", "auto") and engine._runtime.drafts is not None
        assert "draft pool (int4)" in {part.name for part in engine.plan.parts}
        figures = said(engine, TALKS[0][0], max_tokens=9)[1]
        assert figures.drafts is not None


@pytest.mark.parametrize("why", ["it does not pay", "calibrated"])
def test_auto_and_self_load_none_where_that_does_not_pay_or_nothing_says_so(packed, calibrated, why):
    given = calibrated(missing=0.0) if why == "it does not pay" else packed
    says = "times is not worth it" if why == "it does not pay" else "was not calibrated in int4"
    with vismoe.load(memory="50%", draft="auto", **given) as engine:
        assert engine._runtime.drafts is None and any(says in sentence for sentence in engine.plan.reading)
        assert said(engine, TALKS[0][0], max_tokens=4)[1].drafts is not None
    if why == "it does not pay":
        with pytest.raises(ConfigError, match=r"less than 1.05 times is not worth it. Fix: draft='ngram' \(--draft ngram\)"):
            vismoe.load(memory="50%", draft="self", **given)
