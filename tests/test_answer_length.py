"""An answer whose length nobody said: to the end of the planned context, without keeping others out, and with the same bits."""

import pytest
from PIL import Image

import vismoe
from vismoe import request
from vismoe.engine import demo_model
from vismoe.turns import Turns

PICTURE = Image.open(demo_model().parent / "images" / "demo.png").resize((128, 128))
QUESTIONS = ["Describe the image.", "What is in it?"]
CONTEXT = 96


def ask(text, *images):
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def engine():
    with vismoe.load(memory="25%", device="cpu", context=CONTEXT) as engine:
        yield engine


def never_ends(engine, monkeypatch):
    """The model has no token that ends an answer."""
    monkeypatch.setattr(engine.model.generation_config, "eos_token_id", None)


def test_without_a_length_an_answer_goes_on_to_the_end_of_the_context(engine, monkeypatch):
    never_ends(engine, monkeypatch)
    for reply in (engine.chat(ask("What?", PICTURE)), engine.complete("What is")):
        list(reply)
        figures = reply.figures
        assert figures.finish == "length" and figures.prompt_tokens + figures.answer_tokens == CONTEXT


def test_it_holds_a_part_of_the_context_and_lets_others_run_beside_it(engine, monkeypatch):
    monkeypatch.setattr(request, "FIRST_TOKENS", 16)
    never_ends(engine, monkeypatch)
    endless, short = engine.chat(ask("What?", PICTURE)), engine.chat(ask("What?"), max_tokens=3)
    list(short)
    assert engine.load.running == 1 and engine.load.context_tokens < CONTEXT
    endless.cancel()
    list(endless)
    engine.check_integrity()


@pytest.mark.parametrize(
    ("options", "reuse"), [({}, False), ({}, True), ({"sample": True, "temperature": 1.5, "seed": 3}, False)]
)
def test_who_gave_up_its_place_says_what_it_would_have_said(engine, monkeypatch, options, reuse):
    """With growing in small steps and little room, the later ones begin again in the middle of their answers."""
    monkeypatch.setattr(request, "FIRST_TOKENS", 4)
    given_up, put_back = [], Turns._put_back
    monkeypatch.setattr(Turns, "_put_back", lambda turns, later: (given_up.append(later), put_back(turns, later)))
    never_ends(engine, monkeypatch)
    alone = []
    for question in QUESTIONS:
        reply = engine.chat(ask(question, PICTURE), **options)
        alone.append(("".join(reply), reply.figures.answer_tokens))
    pieces = [[] for _ in QUESTIONS]
    replies = [engine.chat(ask(question, PICTURE), reuse=reuse, **options) for question in QUESTIONS]
    for reply, said in zip(replies, pieces, strict=True):
        said.extend(reply)
    assert [("".join(said), reply.figures.answer_tokens) for said, reply in zip(pieces, replies, strict=True)] == alone
    assert given_up, "there was no room for all of them"
    engine.check_integrity()


def test_in_a_hurry_answers_that_would_all_be_late_end_one_by_one():
    with vismoe.load(memory="25%", device="cpu", context=1024) as engine:
        ends = []
        replies = [engine.chat(ask("What?"), max_tokens=12) for _ in range(5)]
        engine.hurry()
        for number, reply in enumerate(replies):
            reply.deliver_to(lambda piece, number=number: ends.append(number) if piece is None else None)
        assert engine.drain(120)
        assert ends == sorted(ends)
