"""An answer whose length nobody said: to the end of the planned context, without keeping others out, and with the same bits."""

import threading
import time
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
from PIL import Image

import vismoe
from vismoe.engine import request
from vismoe.engine.engine import demo_model
from vismoe.engine.scheduler import Scheduler
from vismoe.options import RequestOptions

PICTURE = Image.open(demo_model().parent / "images" / "demo.png").resize((128, 128))
QUESTIONS = ["Describe the image.", "What is in it?"]
CONTEXT = 80


def ask(text, *images):
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def engine():
    with vismoe.load(memory="25%", device="cpu", context=CONTEXT) as engine:
        yield engine


def wait_until(fact):
    deadline_s = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.005)


def never_ends(engine, monkeypatch):
    """The model has no token that ends an answer."""
    monkeypatch.setattr(engine.model.generation_config, "eos_token_id", None)


# -- every door: the text, its tokens and those of the prompt, with no length said, and with the option of that door
def of_python(engine, most):
    reply = engine.chat(ask("What?", PICTURE), **({"max_tokens": most} if most else {}))
    return "".join(reply), reply.figures.answer_tokens, reply.figures.prompt_tokens


def of_raw_text(engine, most):
    reply = engine.complete("What is", **({"max_tokens": most} if most else {}))
    return "".join(reply), reply.figures.answer_tokens, reply.figures.prompt_tokens


def of_the_command_line(engine, most):
    from argparse import ArgumentParser

    from vismoe.cli.chat import chat_arguments
    from vismoe.flags import given_options

    parser = ArgumentParser()
    chat_arguments(parser)
    arguments = parser.parse_args(["What?", *(["--max-tokens", str(most)] if most else [])])
    reply = engine.chat(ask("What?", PICTURE), RequestOptions(**given_options(arguments)))
    return "".join(reply), reply.figures.answer_tokens, reply.figures.prompt_tokens


def of_the_page(engine, most):
    from vismoe.app.page import Page, PageTurn

    replies, answered = [], engine.chat

    def chat(*given, **named):
        replies.append(answered(*given, **named))
        return replies[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "chat", chat, raising=False)
        *_, last = Page(engine).answer(PageTurn.of("What?", []), (), "me", RequestOptions(max_tokens=most))
    figures = replies[0].figures
    return last.history[-1].answer, figures.answer_tokens, figures.prompt_tokens


def served_at(path, body):
    def of_the_server(engine, most):
        for needed in ("fastapi", "uvicorn", "openai", "prometheus_client"):  # extras
            pytest.importorskip(needed)
        from served import served

        with served(engine, max_tokens=None) as server:
            answer = server.post({**body, **({"max_tokens": most} if most else {})}, path).json()
        if most:  # or where the whole server was told so
            with served(engine, max_tokens=most) as server:
                assert server.post(body, path).json()["usage"] == answer["usage"]
        (choice,), usage = answer["choices"], answer["usage"]
        assert choice["finish_reason"] == "length"
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return text, usage["completion_tokens"], usage["prompt_tokens"]

    return of_the_server


def of_lmms_eval(engine, most):
    pytest.importorskip("lmms_eval")
    from lmms_eval.api.instance import Instance

    from vismoe.eval.lmms_arguments import model_arguments
    from vismoe.eval.lmms_model import VisMoEChat

    given = model_arguments(f"batch_size=2,max_new_tokens={most}" if most else "batch_size=2")
    model = VisMoEChat(engine, **given)
    model.task_dict["made_up"] = {"test": [ask("What?"), ask("What?")]}
    arguments = ("", lambda document: document, {})
    asked = [
        Instance("generate_until", (*arguments, n, "made_up", "test"), 0, {"task": "made_up", "doc_id": n, "repeats": 1})
        for n in range(2)
    ]
    first, second = model.generate_until(asked)
    assert first == second
    return first.text, first.token_counts.output_tokens, first.token_counts.input_tokens


HELLO = {"messages": [{"role": "user", "content": "What?"}], "temperature": 0}
DOORS = {
    "Engine.chat": of_python,
    "Engine.complete": of_raw_text,
    "vismoe chat": of_the_command_line,
    "vismoe ui": of_the_page,
    "/v1/chat/completions": served_at("/v1/chat/completions", HELLO),
    "/v1/completions": served_at("/v1/completions", {"prompt": "What is", "temperature": 0}),
    "lmms-eval": of_lmms_eval,
}


@pytest.mark.budget(4)
@pytest.mark.parametrize("door", DOORS)
def test_an_answer_goes_on_to_the_end_of_the_context_and_an_option_bounds_it_at_every_door(engine, monkeypatch, door):
    never_ends(engine, monkeypatch)
    whole, tokens, prompt = DOORS[door](engine, None)
    assert prompt + tokens == CONTEXT
    bounded, few, _ = DOORS[door](engine, 5)
    assert few == 5 and whole.startswith(bounded.rstrip("\ufffd"))


def test_an_evaluation_has_an_option_for_tasks_that_do_not_say(monkeypatch):
    pytest.importorskip("lmms_eval")
    from vismoe import flags
    from vismoe.cli import eval as cli_eval
    from vismoe.cli import main as cli
    from vismoe.eval import lmms_run

    asked = []
    monkeypatch.setattr(
        flags, "load_engine", lambda *given, **named: nullcontext(SimpleNamespace(metrics=SimpleNamespace(snapshot=lambda: 0)))
    )
    monkeypatch.setattr(lmms_run, "run_tasks", lambda *given: asked.append(given[-1]) or {"tasks": {}, "answers": []})
    monkeypatch.setattr(cli_eval, "experts_did", lambda *given: {})
    monkeypatch.setattr(cli_eval, "experts_lines", lambda *given: "")
    assert cli.main(["eval", "--lmms", "scenes_ocr"]) == cli.main(["eval", "--lmms", "scenes_ocr", "--max-tokens", "9"]) == 0
    assert asked == [None, 9]


def test_it_holds_a_part_of_the_context_and_lets_others_run_beside_it(engine, monkeypatch):
    monkeypatch.setattr(request, "FIRST_TOKENS", 16)
    never_ends(engine, monkeypatch)
    endless, short = engine.chat(ask("What?", PICTURE)), engine.chat(ask("What?"), max_tokens=3)
    list(short)
    assert engine.load.running == 1 and engine.load.context_tokens < CONTEXT
    endless.cancel()
    list(endless)
    engine.check_integrity()


@cache
def said_alone(engine, **options):
    found = []
    for question in QUESTIONS:
        reply = engine.chat(ask(question, PICTURE), **options)
        found.append(("".join(reply), reply.figures.answer_tokens))
    return found


@pytest.mark.parametrize(
    ("options", "reuse"), [({}, False), ({}, True), ({"sample": True, "temperature": 1.5, "seed": 3}, False)]
)
def test_who_gave_up_its_place_says_what_it_would_have_said(engine, monkeypatch, options, reuse):
    """With growing in small steps and little room, the later ones begin again in the middle of their answers."""
    monkeypatch.setattr(request, "FIRST_TOKENS", 4)
    given_up, put_back = [], Scheduler._put_back
    monkeypatch.setattr(Scheduler, "_put_back", lambda turns, later: (given_up.append(later), put_back(turns, later)))
    never_ends(engine, monkeypatch)
    alone = said_alone(engine, **options)
    pieces = [[] for _ in QUESTIONS]
    replies = [engine.chat(ask(question, PICTURE), reuse=reuse, **options) for question in QUESTIONS]
    for reply, said in zip(replies, pieces, strict=True):
        said.extend(reply)
    assert [("".join(said), reply.figures.answer_tokens) for said, reply in zip(pieces, replies, strict=True)] == alone
    assert given_up, "there was no room for all of them"
    engine.check_integrity()


def test_in_a_hurry_the_answers_nearest_to_their_end_go_first_one_by_one(monkeypatch):
    """As when a server is told to end under load: what has no length, and what is long, takes nothing from the others."""
    lengths, ends, may_begin = [12, 6, None, 20, 9, 6], [], threading.Event()
    with vismoe.load(memory="25%", device="cpu", context=2048) as engine:
        never_ends(engine, monkeypatch)
        held = threading.Thread(target=engine.with_model, args=(lambda model: may_begin.wait(),))
        held.start()
        replies = [engine.chat(ask("What?"), max_tokens=length) for length in lengths]
        for number, reply in enumerate(replies):
            reply.deliver_to(lambda piece, number=number: ends.append(number) if piece is None else None)
        engine.hurry()
        may_begin.set()
        wait_until(lambda: len(ends) == 5)
        assert ends == [1, 5, 4, 0, 3]
        replies[2].cancel()
        assert engine.drain(120)
        held.join()
