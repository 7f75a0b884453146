"""Many requests on one engine: by turns they say what each would say alone, and what an earlier one left is used again."""

import gc
import random
import threading
import time

import numpy as np
import pytest
from PIL import Image

import vismoe
from vismoe.engine.engine import demo_model
from vismoe.engine.generate import TokenLoop
from vismoe.engine.request import Request
from vismoe.errors import ClosedError, ContextError, InputError
from vismoe.types import Phase

PICTURES = demo_model().parent / "images"
DEMO, FIRST = Image.open(PICTURES / "demo.png"), Image.open(PICTURES / "first.png")
TALL = Image.linear_gradient("L").convert("RGB").resize((64, 192))


def ask(text="What is in the picture?", *images):
    return [
        {"role": "user", "content": [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]}
    ]


def said(engine, messages, **options):
    reply = engine.chat(messages, **options)
    text = "".join(reply)
    return text, reply.figures


@pytest.fixture(scope="module")
def engine():
    with vismoe.load(memory="25%", device="cpu", image_cache="1MiB", context=1024) as engine:
        yield engine
        engine.check_integrity()


REQUESTS = [
    (ask("What is in the picture?", DEMO), {"max_tokens": 6}),
    (ask("Describe the image.", DEMO), {"max_tokens": 10, "keep": 0.5}),
    (ask("Describe the image.", TALL), {"max_tokens": 5}),
    (ask("How many objects are there?", FIRST), {"max_tokens": 5, "keep": 0.3, "selection": "uniform"}),
    (ask("Describe the image.", FIRST), {"max_tokens": 8, "sample": True, "seed": 4, "temperature": 2.0}),
    (ask("What is this?"), {"max_tokens": 8, "stop": ["the"]}),
    (ask("What differs?", DEMO, FIRST), {"max_tokens": 5}),
]


@pytest.mark.budget(6)
def test_by_turns_each_says_what_it_says_alone(engine):
    alone = [said(engine, messages, **options) for messages, options in REQUESTS]
    order = random.Random(3).sample(range(len(REQUESTS)), len(REQUESTS)) * 2
    replies = [(number, engine.chat(REQUESTS[number][0], **REQUESTS[number][1])) for number in order]
    for number, reply in replies:
        text, figures = alone[number]
        assert "".join(reply) == text, REQUESTS[number]
        assert reply.figures.finish == figures.finish and reply.figures.answer_tokens == figures.answer_tokens
        assert [image.selection.kept.tolist() for image in reply.figures.kept] == [
            i.selection.kept.tolist() for i in figures.kept
        ]
    began = [reply.figures.queue_seconds for _, reply in replies]
    assert began[-1] > 0, "not all fit into the context at once"


def test_requests_that_run_take_turns(engine):
    """A short one that comes second ends before a long one that came first."""
    long, short = engine.chat(ask("Describe the image.", DEMO), max_tokens=60), engine.chat(ask("What is this?"), max_tokens=2)
    list(short)
    assert engine.load.running == 1 and engine.load.context_tokens > 60
    list(long)
    passes = long.figures.passes
    assert [one.phase for one in passes] == [Phase.PREFILL, *[Phase.DECODE] * (len(passes) - 1)]
    assert passes[0].tokens == long.figures.prompt_tokens and all(one.tokens == 1 for one in passes[1:])


def test_the_figures_of_all_requests_add_up_to_the_counters(engine):
    before = engine.metrics.snapshot()
    replies = [engine.chat(*REQUESTS[number][:1], **REQUESTS[number][1]) for number in (0, 1, 2)]
    for reply in replies:
        list(reply)
    happened = engine.metrics.snapshot() - before
    for counter in ("hits", "misses", "steps"):
        assert sum(reply.figures.counters.total(counter) for reply in replies) == happened.total(counter)
        if counter != "steps":
            assert all(
                sum(getattr(one, counter) for one in reply.figures.passes) == reply.figures.counters.total(counter)
                for reply in replies
            )


def test_a_conversation_goes_on_from_where_it_was(engine):
    question = ask("What is in the picture?", DEMO)
    answer, first = said(engine, question, max_tokens=10, reuse=True)
    follow_up = [*question, {"role": "assistant", "content": answer}, *ask("How many objects are there?")]
    anew, _ = said(engine, follow_up, max_tokens=10)
    text, figures = said(engine, follow_up, max_tokens=10, reuse=True)
    assert text == anew and figures.encoded_images == 0
    assert (
        figures.reused_tokens >= first.prompt_tokens and figures.passes[0].tokens == figures.prompt_tokens - figures.reused_tokens
    )
    again, figures = said(engine, follow_up, max_tokens=10, reuse=True)
    assert again == anew and figures.reused_tokens == figures.prompt_tokens - 1, "the same question: all but one token is there"
    assert 0 < engine.load.reusable_tokens <= 1024


def test_what_is_asked_without_reuse_leaves_nothing(engine):
    said(engine, ask("What is this thing here?"), max_tokens=3)
    kept = engine.load.reusable_tokens
    said(engine, ask("What is this thing there?"), max_tokens=3)
    assert engine.load.reusable_tokens == kept


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_a_new_image_in_a_later_turn_is_the_only_one_encoded(engine, keep):
    question = ask(f"Where is the cat at {keep}?", TALL)
    answer, _ = said(engine, question, max_tokens=6, reuse=True, keep=keep)
    later = [*question, {"role": "assistant", "content": answer}, *ask("What differs?", FIRST.rotate(90 if keep == 1 else 180))]
    text, figures = said(engine, later, max_tokens=6, reuse=True, keep=keep)
    assert figures.encoded_images == 1 and figures.reused_tokens > 16 and figures.images == 2
    assert len(figures.kept) == (0 if keep == 1 else 2) and len(figures.kept_maps()) == len(figures.kept)
    anew, wanted = said(engine, later, max_tokens=6, keep=keep)
    assert text == anew
    assert [(k.start, k.selection.kept.tolist()) for k in figures.kept] == [
        (k.start, k.selection.kept.tolist()) for k in wanted.kept
    ]


def test_another_image_or_keep_is_another_conversation(engine):
    system = [{"role": "system", "content": "You look at pictures and say what is in them. " * 3}]
    question = [*system, *ask("What is in the picture?", DEMO)]
    _, figures = said(engine, question, max_tokens=4, reuse=True)
    tokens = figures.prompt_tokens
    for other, options in (([*system, *ask("What is in the picture?", FIRST.resize(DEMO.size))], {}), (question, {"keep": 0.5})):
        text, figures = said(engine, other, max_tokens=4, reuse=True, **options)
        assert 16 <= figures.reused_tokens < tokens - figures.visual_tokens, "up to the image"
        assert text == said(engine, other, max_tokens=4, **options)[0]
    assert said(engine, question, max_tokens=4, reuse=True)[1].reused_tokens == tokens - 1, "the first one is still there"


def test_what_waits_to_be_used_again_makes_room_for_who_comes(engine):
    for number in range(8):
        said(engine, ask(f"What is in the picture number {number}? " * 8, DEMO), max_tokens=4, reuse=True)
        assert engine.load.reusable_tokens <= 1024
    said(engine, ask("word " * 800), max_tokens=100)
    assert engine.load.reusable_tokens + 900 <= 1024


def test_an_image_sent_again_is_not_encoded_again(engine):
    picture = DEMO.rotate(90)
    first, figures = said(engine, ask("What is in the picture?", picture), max_tokens=8)
    assert figures.encoded_images == 1 and figures.encode_seconds > 0
    again, figures = said(engine, ask("What is in the picture?", picture.copy()), max_tokens=8)
    assert again == first and figures.encoded_images == 0 and figures.encode_seconds == 0
    assert 0 < engine.load.image_cache_bytes <= 2**20
    for angle in range(0, 360, 16):
        said(engine, ask("What?", DEMO.rotate(angle).resize((192, 192))), max_tokens=1)
        assert engine.load.image_cache_bytes <= 2**20


def test_cancelling_one_request_leaves_the_others_alone(engine):
    alone, _ = said(engine, ask("Describe the image.", DEMO), max_tokens=20)
    replies = [engine.chat(ask("Describe the image.", DEMO), max_tokens=20) for _ in range(4)]
    for reply in replies[1:3]:
        reply.cancel()
    assert ["".join(reply) for reply in (replies[0], replies[3])] == [alone, alone]
    for reply in replies[1:3]:
        assert alone.startswith("".join(reply)) and reply.figures.finish == "cancelled"


def test_a_request_that_waits_can_be_cancelled(engine):
    slow = engine.model.register_forward_hook(lambda *_: time.sleep(0.05))  # or it may have ended by itself
    long, waiting = (engine.chat(ask("Describe the image.", DEMO), max_tokens=900) for _ in range(2))
    behind = engine.chat(ask("What is this?"), max_tokens=2)
    waiting.cancel()
    assert "".join(waiting) == "" and waiting.figures.answer_tokens == 0 and waiting.figures.finish == "cancelled"
    assert "".join(behind) and engine.load.running == 1, "who stood behind it went by"
    slow.remove()
    long.cancel()
    list(long)


def test_a_request_that_failed_leaves_nothing_in_memory(engine):
    """Its error has a traceback, whose frames had the request and all tensors of the pass."""

    def broken(module, arguments):
        raise RuntimeError("broken")

    def alive():
        return sum(isinstance(thing, Request | TokenLoop) for thing in gc.get_objects())

    hook = engine.model.model.language_model.layers[5].register_forward_pre_hook(broken)
    gc.collect()
    gc.disable()
    try:
        before = alive()
        reply = engine.chat(ask("Describe the image.", DEMO), max_tokens=5, reuse=True)
        with pytest.raises(RuntimeError, match="broken"):
            list(reply)
        del reply
        deadline_s = time.monotonic() + 10
        while alive() > before and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert alive() == before and engine.load.failed
    finally:
        gc.enable()
        hook.remove()
    engine.check_integrity()
    assert said(engine, ask("Describe the image.", DEMO), max_tokens=5)[0]


def test_a_short_rest_of_a_prompt_is_counted_as_prompt(engine):
    said(engine, ask("What is in this picture of mine?", DEMO), max_tokens=3, reuse=True)
    _, figures = said(engine, ask("What is in this picture of mine?", DEMO), max_tokens=3, reuse=True)
    assert figures.passes[0].tokens == 1 and figures.passes[0].phase is Phase.PREFILL
    assert figures.counters.total("steps", Phase.PREFILL) == 8
    assert figures.counters.total("steps", Phase.DECODE) == 8 * figures.decode_tokens


def test_a_recording_has_whole_prompts(engine, tmp_path):
    for _ in range(2):
        said(engine, ask("What is recorded of this picture?", DEMO), max_tokens=2, reuse=True)
    with engine.record(tmp_path / "trace"):
        _, figures = said(engine, ask("What is recorded of this picture?", DEMO), max_tokens=2, reuse=True)
    assert figures.reused_tokens == 0


def test_sampling_follows_its_own_seed(engine):
    options = {"max_tokens": 12, "sample": True, "temperature": 2.0}
    one, _ = said(engine, ask("Describe the image.", DEMO), seed=1, **options)
    replies = [engine.chat(ask("Describe the image.", DEMO), seed=seed, **options) for seed in (1, 2, 3, 1)]
    texts = ["".join(reply) for reply in replies]
    assert texts[0] == texts[3] == one and len(set(texts)) > 1


def test_a_stop_string_ends_the_answer_before_it(engine):
    whole, _ = said(engine, ask("Describe the image.", DEMO), max_tokens=30)
    word = whole.split()[4]
    text, figures = said(engine, ask("Describe the image.", DEMO), max_tokens=30, stop=[word, "never"])
    assert text == whole[: whole.index(word)] and figures.finish == "stop" and figures.answer_tokens < 30


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 2**70},
        {"seed": 1.5},
        {"max_tokens": 2.5},
        {"max_tokens": 0},
        {"temperature": 0.0},
        {"temperature": 9.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
)
def test_impossible_sampling_is_refused(engine, options):
    with pytest.raises(InputError, match=f"{next(iter(options))}="):
        engine.chat(ask("What?"), sample=True, **options)


def test_text_goes_on_without_a_template(engine):
    reply = engine.complete("There is a dog in the", max_tokens=3)
    assert "".join(reply) and reply.figures.prompt_tokens == 6 and reply.figures.images == 0
    for text, error in (("", InputError), ("What <|image_pad|>", InputError), ("word " * 2000, ContextError)):
        with pytest.raises(error):
            engine.complete(text)


def test_prompts_are_built_in_many_threads(engine):
    DEMO.load()  # Pillow's pictures of files are read at first use, which is not for several threads
    failed = []

    def build():
        try:
            for number in range(20):
                engine.prompts.build(ask(f"What is in picture {number}?", DEMO), lambda image: image)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_where_experts_are_and_what_they_were_asked(engine):
    residency, (hits, misses) = engine.residency(), engine.heat()
    assert residency.shape == hits.shape == misses.shape == (8, 32) and set(np.unique(residency)) <= {0, 1, 2}
    assert (residency > 0).sum() <= engine.plan.resident_experts
    said(engine, ask("What is this?"), max_tokens=4)
    after = engine.heat()
    assert ((after[0] + after[1]).sum(1) > (hits + misses).sum(1)).all()


def test_draining_ends_what_runs_and_refuses_what_comes():
    engine = vismoe.load(memory="25%", device="cpu")
    reply = engine.chat(ask("Describe the image.", DEMO), max_tokens=10)
    assert engine.drain(60) and "".join(reply)
    with pytest.raises(ClosedError):
        engine.chat(ask("What?"))
    engine.check_integrity()
    assert engine.load.requests == 1
    engine.close()
