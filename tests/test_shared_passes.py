"""Requests that decode in one pass: each gets the bits of being alone, whatever comes and goes beside it."""

import gc
import itertools
import queue
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples
from test_serving_engine import DEMO, FIRST, REQUESTS, ask, said
from transformers.cache_utils import DynamicLayer

import vismoe
from vismoe.engine import shared_pass
from vismoe.engine.generate import Reply, TokenLoop
from vismoe.engine.request import Request
from vismoe.engine.scheduler import Scheduler
from vismoe.engine.shared_pass import SharedPasses
from vismoe.metrics import COUNTERS, PHASES, Snapshot
from vismoe.models.inputs.prompts import Prompt
from vismoe.models.visual.growing_cache import GrowingLayer
from vismoe.types import Phase

LOADED = dict(memory="25%", device="cpu", image_cache="1MiB", context=2048)


@pytest.fixture
def seen(monkeypatch):
    """Logits of every decode pass, by the sequence that they follow and how its beginning was read: lists of equal ones."""
    found: dict[tuple, list[torch.Tensor]] = {}
    take, answer = TokenLoop.take, Request._answer

    def taken(self, outputs, said=None):
        self.latest = outputs.logits[0, -1].clone()
        return take(self, outputs, said)

    def answered(self, token, last):
        if self._loop is not None:
            ids = self._loop.ids[0, :-1].numpy().tobytes()
            key = ids, tuple(self.prompt.image_names), self.pruning, self._reused_tokens
            found.setdefault(key, []).append(self._loop.latest)
        return answer(self, token, last)

    monkeypatch.setattr(TokenLoop, "take", taken)
    monkeypatch.setattr(Request, "_answer", answered)
    return found


def equal(seen, least):
    """Whether what followed equal sequences was equal, and was compared often enough."""
    compared = [logits for logits in seen.values() if len(logits) > 1]
    assert len(compared) >= least
    return all(torch.equal(one, logits[0]) for logits in compared for one in logits[1:])


@pytest.fixture(scope="module")
def engine():
    with vismoe.load(**LOADED) as engine:
        yield engine
        engine.check_integrity()


def rows_of(figures):
    return [one.rows for one in figures.passes if one.phase is Phase.DECODE]


@pytest.mark.budget(7)
@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_every_logit_is_that_of_a_pass_of_its_own(engine, seen, keep):
    requests = [(messages, {**options, "max_tokens": 9, "keep": keep}) for messages, options in REQUESTS]
    for reuse in (False, True):  # the second time on keys and values that earlier ones have left
        alone = [said(engine, messages, **options, reuse=reuse)[0] for messages, options in requests * (1 + reuse)]
        replies = [engine.chat(messages, **options, reuse=reuse) for messages, options in requests]
        assert ["".join(reply) for reply in replies] == alone[-len(requests) :]
        rows = np.concatenate([rows_of(reply.figures) for reply in replies])
        assert rows.max() >= 4 and (rows > 1).mean() > 0.5
        assert any(reply.figures.reused_tokens for reply in replies) == reuse
    assert equal(seen, 80)
    assert "bits of being alone" in engine._shared.passes.about


def test_requests_come_and_go_at_any_time(engine, seen):
    chance, threads = random.Random(5), []

    def run(messages, options, cancelled_after):
        reply = engine.chat(messages, **options)
        for count, _ in enumerate(reply):
            if count == cancelled_after:
                reply.cancel()

    for number in range(18):
        messages, options = REQUESTS[number % len(REQUESTS)]
        options = {**options, "max_tokens": chance.randint(1, 14)}
        arguments = (messages, options, chance.choice([None, None, 0, 2]))
        threads.append(threading.Timer(chance.random(), run, arguments))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert equal(seen, 10)
    engine.check_integrity()


def test_figures_of_requests_that_share_passes_add_up(engine):
    before = engine.metrics.snapshot()
    replies = [engine.chat(ask("Describe the image.", DEMO), max_tokens=6 + number, reuse=False) for number in range(5)]
    for reply in replies:
        list(reply)
    happened = engine.metrics.snapshot() - before
    counted = sum((reply.figures.counters.values for reply in replies[1:]), replies[0].figures.counters.values)
    assert np.allclose(counted, happened.values)
    assert replies[-1].figures.decode_tokens == 9 == len(rows_of(replies[-1].figures))


@given(st.integers(1, 9), st.integers(0, 2**20))
def test_shares_of_counters_add_up(shares, seed):
    values = np.random.default_rng(seed).integers(0, 50, (len(PHASES), 2, len(COUNTERS))).astype(float)
    parts = Snapshot(values).split(shares)
    assert np.allclose(sum(part.values for part in parts), values)
    counts = [index for index, name in enumerate(COUNTERS) if not name.endswith("seconds")]
    assert all((part.values[..., counts] == np.round(part.values[..., counts])).all() for part in parts)


def test_a_shared_pass_that_fails_ends_its_requests_and_no_others(engine):
    """And leaves nothing of them in memory."""

    def broken(module, arguments):
        raise RuntimeError("broken")

    gc.collect()
    first = engine.chat(ask("Describe the image.", DEMO), max_tokens=200)
    pieces = iter(first)
    next(pieces)
    second = engine.chat(ask("Describe the image.", FIRST), max_tokens=200)
    next(iter(second))
    hook = engine.model.model.language_model.layers[5].register_forward_pre_hook(broken)
    for reply in (first, second):
        with pytest.raises(RuntimeError, match="broken"):
            list(reply)
    hook.remove()
    assert said(engine, ask("What is this?"), max_tokens=4)[1].finish
    del reply, first, second, pieces
    gc.collect()
    assert not any(isinstance(thing, TokenLoop) for thing in gc.get_objects())
    engine.check_integrity()


def test_where_rows_change_bits_requests_share_passes_only_if_that_was_asked_for():
    """torch's products of several rows in float32 differ from those of one."""
    for parallel, deterministic, shared in (("auto", False, False), (4, True, False), (4, False, True)):
        loaded = dict(LOADED, parallel=parallel, deterministic=deterministic, dtype="float32", kernels="torch")
        with vismoe.load(**loaded) as engine:
            replies = [engine.chat(ask("Describe the image.", DEMO), max_tokens=8) for _ in range(3)]
            for reply in replies:
                list(reply)
            about = engine._shared.passes.about
            assert (max(max(rows_of(reply.figures)) for reply in replies) > 1) == shared, about
            assert ("within" in about) == shared and ("one request per pass" in about) != shared, about


def test_a_wrong_shared_pass_is_found_by_the_trial(engine, monkeypatch):
    passes = SharedPasses(engine.model, 4, exactly=False)
    alone = torch.randn(2, 100)
    passes.judge(alone + 0.5, alone)
    assert passes.by_mixer and not passes.refused, "mixers as a whole are tried next"
    passes.judge(alone.flip(0), alone)
    assert "more than rounding explains" in passes.refused


def test_where_only_many_rows_change_bits_fewer_go_on_sharing(monkeypatch):
    why = "rows change a product"
    monkeypatch.setattr(shared_pass, "rows_that_differ", lambda model, rows: why if rows > 2 else None)
    with vismoe.load(**LOADED) as engine:
        assert engine.pace.most_rows == 8
        for number in (2, 5):
            replies = [engine.chat(ask("Describe the image.", DEMO), max_tokens=12, reuse=False) for _ in range(number)]
            for reply in replies:
                list(reply)
            assert max(max(rows_of(reply.figures)) for reply in replies) == 2
        assert engine.pace.most_rows == 2 and not engine._shared.passes.refused


# -- the scheduler
class Row:
    """A scripted request that joins others of its company."""

    def __init__(self, name, steps, company, log):
        self.name, self.left, self.company, self.log = name, steps, company, log
        self.tokens, self.grows, self.may_give_up, self.unwanted = 1, 0, False, False
        self.ended = threading.Event()

    def step(self):
        return self.step_with([])[0]

    def step_with(self, others):
        self.log.append([row.name for row in (self, *others)])
        for row in (self, *others):
            row.left -= 1
        return [row.left > 0 if row.name != "broken" else ValueError("broken") for row in (self, *others)]

    def finish(self):
        self.ended.set()

    def fail(self, error):
        self.error = error
        self.ended.set()


@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from([None, "a", "b"])), min_size=1, max_size=9), st.integers(1, 4))
@settings(max_examples=examples(40))
def test_companies_step_together_and_each_row_once_a_round(wishes, most_rows):
    log, scheduler = [], Scheduler(100, most_rows=most_rows)
    rows = [Row(number, steps, company, log) for number, (steps, company) in enumerate(wishes)]
    for row in rows:
        scheduler.ask(row)
    assert all(row.ended.wait(20) for row in rows)
    scheduler.close()
    for together in log:
        assert len(together) <= most_rows and len({wishes[number][1] for number in together}) == 1
        assert len(together) == 1 or wishes[together[0]][1] is not None
    flat = [number for together in log for number in together]
    assert [flat.count(number) for number in range(len(wishes))] == [steps for steps, _ in wishes]


def test_a_row_that_fails_leaves_alone():
    log, scheduler, opened = [], Scheduler(100, most_rows=3), threading.Event()
    rows = [Row(name, 4, "a", log) for name in ("first", "broken", "last")]
    scheduler.run_alone(opened.wait)
    for row in rows:
        scheduler.ask(row)
    opened.set()
    assert all(row.ended.wait(20) for row in rows)
    scheduler.close()
    assert isinstance(rows[1].error, ValueError) and ["last", "first"] in log


def test_steps_together_that_raise_end_their_requests_and_leave_the_thread_alive():
    class Broken(Row):
        def step_with(self, others):
            if others:
                raise ValueError("broken")
            return super().step_with(others)

    scheduler, opened = Scheduler(100, most_rows=3), threading.Event()
    rows = [Broken(number, 4, "a", []) for number in range(2)]
    scheduler.run_alone(opened.wait)
    for row in rows:
        scheduler.ask(row)
    opened.set()
    assert all(row.ended.wait(20) and isinstance(row.error, ValueError) for row in rows)
    last = Row("last", 1, None, [])
    scheduler.ask(last)
    assert last.ended.wait(20)
    scheduler.close()


# -- caches that grow in place
@given(st.data())
@settings(max_examples=examples(60))
def test_a_growing_layer_holds_what_transformers_own_layer_holds(data):
    """Under updates, crops and copies of any order; a copy that goes on leaves what it was made of alone."""
    ours, theirs = [GrowingLayer()], [DynamicLayer()]
    for _ in range(data.draw(st.integers(1, 25))):
        which = data.draw(st.integers(0, len(ours) - 1))
        one, other = ours[which], theirs[which]
        action = data.draw(st.sampled_from(["update"] * 4 + ["crop", "copy", "room"]))
        length = other.get_seq_length()
        if action == "update" or not length:
            new = [torch.randn(1, 2, data.draw(st.integers(1, 3)), 4) for _ in range(2)]
            held, expected = one.update(*new), other.update(*new)
            assert all(map(torch.equal, held, expected))
        elif action == "crop" and len(ours) == 1:  # the engine crops copies only
            left = data.draw(st.integers(1, length))
            one.crop(left - length if left < length else 0), other.crop(left - length if left < length else 0)
        elif action == "copy":
            copied = GrowingLayer.__copy__(one)
            plain = DynamicLayer()
            plain.__dict__.update(other.__dict__)
            ours.append(copied), theirs.append(plain)
        else:
            one.room = data.draw(st.integers(1, 40))
        for one, other in zip(ours, theirs, strict=True):
            assert one.get_seq_length() == other.get_seq_length()
            if other.get_seq_length():
                assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def test_a_growing_layer_copies_what_it_holds_once_in_many_tokens():
    layer = GrowingLayer()
    layer.update(*(torch.randn(1, 2, 10, 4) for _ in range(2)))
    layer.room, places = 600, set()
    for _ in range(500):
        layer.update(*(torch.randn(1, 2, 1, 4) for _ in range(2)))
        places.add(layer.keys.data_ptr())
    assert len(places) == 2 and layer.keys.shape[-2] == 510
    assert layer._held is not None and layer._held[0].shape[-2] <= layer.room


# -- prompts in pieces
LONG = ask("What differs between these pictures, and which of them has more objects? " * 3, DEMO, FIRST, DEMO)


@given(st.data())
@settings(max_examples=examples(60))
def test_pieces_of_a_prompt_are_cut_at_multiples_and_never_inside_an_image(data):
    tokens, chunk, at, places = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 40)), 0, []
    while (begin := at + data.draw(st.integers(1, 30))) < tokens and len(places) < 3:
        places.append((begin, at := min(tokens, begin + data.draw(st.integers(1, 50)))))
    prompt = Prompt({}, tokens, 0, pictures=(None,) * len(places), places=tuple(places))
    first = data.draw(st.sampled_from([0, *(end for _, end in places if end < tokens)]))
    cuts = prompt.cuts(first, chunk)
    assert cuts == sorted(set(cuts)) and cuts[-1] == tokens and cuts[0] > first
    assert not any(begin < cut < end for cut in cuts for begin, end in places)
    edges = {edge for place in places for edge in place}
    assert all(cut % chunk == 0 or cut in edges for cut in cuts[:-1])
    assert all(end - begin <= chunk or {begin, end} & edges for begin, end in itertools.pairwise(cuts))


def cancelled_within(engine, piece: int) -> Reply:
    """A reply to LONG, cancelled in the middle of this pass."""
    passes, asked = itertools.count(), queue.SimpleQueue()

    def cancel(*_) -> None:
        if next(passes) == piece:
            asked.get().cancel()

    hook = engine.model.model.language_model.layers[3].register_forward_pre_hook(cancel)
    reply = engine.chat(LONG, max_tokens=50, reuse=False)
    asked.put(reply)
    list(reply)
    hook.remove()
    return reply


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_a_prompt_in_pieces_has_the_bits_of_the_same_pieces_alone_and_nearly_those_of_the_whole(engine, seen, keep):
    options = dict(max_tokens=4, keep=keep, reuse=False)
    whole_text, whole = said(engine, LONG, **options)
    expected = {len(key[0]): logits[0] for key, logits in seen.items()}
    seen.clear()
    with vismoe.load(**LOADED, prefill_chunk=48) as other:
        text, figures = said(other, LONG, **options)
        pieces = [one.tokens for one in figures.passes if one.phase is Phase.PREFILL]
        assert len(pieces) > 2 and sum(pieces) == figures.prompt_tokens and figures.encoded_images >= 2
        assert text == whole_text and len(figures.kept) == len(whole.kept)
        for key, logits in seen.items():
            cosine = torch.nn.functional.cosine_similarity(logits[0].float(), expected[len(key[0])].float(), dim=0)
            assert cosine > (0.999 if keep == 1 else 0.995)
        replies = [other.chat(LONG, **options), other.chat(ask("What is this?"), max_tokens=12, reuse=False)]
        replies.append(other.chat(LONG, **options))
        assert [text, text] == ["".join(reply) for reply in replies if reply is not replies[1]]
        assert equal(seen, 3)
        for piece in (0, 1, 2):
            reply = cancelled_within(other, piece)
            assert reply.answer == "" and reply.figures.finish == "cancelled"
        assert said(other, LONG, max_tokens=4, keep=keep)[0] == text, "what a cancelled one has left is whole"
        other.check_integrity()


def test_running_answers_go_on_while_a_long_prompt_is_read():
    with vismoe.load(**LOADED, prefill_chunk=32) as engine:
        said(engine, ask("What is this?"), max_tokens=3)
        first = engine.chat(ask("Describe the image.", DEMO), max_tokens=60, reuse=False)
        next(iter(first))
        long = engine.chat(LONG, max_tokens=2, reuse=False)
        list(long), list(first)
        reading = [one for one in long.figures.passes if one.phase is Phase.PREFILL]
        pauses = np.diff([one.began_s for one in first.figures.passes])
        assert len(reading) > 3
        assert sorted(pauses)[-1] < sum(one.seconds for one in reading), "no pause is as long as the whole prompt takes"
