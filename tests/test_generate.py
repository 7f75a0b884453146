"""The loop over tokens against transformers' own generate(), and text in pieces against the whole text."""

from itertools import pairwise

import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import set_seed

from vismoe.engine.generate import Reply, StopStrings, TokenLoop, refuse_own_loop
from vismoe.errors import UnsupportedModelError
from vismoe.models.visual.pruned_cache import beginning, can_go_on

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = {"do_sample": False}
WITH_TEXT = ("qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3")  # plain, sliding windows, linear attention, latent attention
OWN_LOOP = "diffusion_gemma"
FAMILIES = [*WITH_TEXT, *(family for family in tiny_models.WITH_IMAGES if family != OWN_LOOP)]
ANEW = {
    "dots3_note",
    "glm5_next",
    "hy_v4_vl",
    "mistral_large4",
    "qwen4_exp",
    "unlimited_ocr",
}  # an index, or a kind of window, of their own


def tokens_of(loop, steps):
    said = []
    for _ in range(steps):
        token, last = loop.step()
        said.append(token)
        if last:
            break
    return said


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_generate(family):
    model, inputs = tiny_models.build(family), tiny_models.prompt(family)
    ends = {"eos_token_id": 3, "max_new_tokens": 6}
    for options in ({**GREEDY, **ends}, {"do_sample": True, "temperature": 3.0, **ends}):
        set_seed(5)
        wanted = model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()
        loop = TokenLoop(model, inputs, options, torch.Generator().manual_seed(5))
        assert tokens_of(loop, 10) == wanted and loop.ids[0, -len(wanted) :].tolist() == wanted


def test_a_model_that_does_not_answer_token_by_token_is_refused():
    with pytest.raises(UnsupportedModelError, match="loop of its own"):
        refuse_own_loop(type(tiny_models.build(OWN_LOOP)), "a-model")


def test_an_answer_ends_at_the_token_that_ends_it():
    model, inputs = tiny_models.build("qwen3_moe"), tiny_models.prompt("qwen3_moe")
    free = tokens_of(TokenLoop(model, inputs, {**GREEDY, "max_new_tokens": 4}), 4)
    loop = TokenLoop(model, inputs, {**GREEDY, "max_new_tokens": 4, "eos_token_id": [499, free[1]]})
    assert tokens_of(loop, 4) == free[:2] and loop.ends_with(free[1]) and not loop.ends_with(free[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_going_on_from_an_earlier_prompt_says_what_beginning_anew_does(family):
    """The longer prompt begins as the earlier one and its answer did; images are not encoded again."""
    model, inputs = tiny_models.build(family), tiny_models.prompt(family)
    earlier = TokenLoop(model, inputs, {**GREEDY, "max_new_tokens": 3})
    tokens_of(earlier, 3)
    more = torch.cat([earlier.ids, torch.tensor([[11, 12, 13, 14]])], dim=1)
    longer = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    for name, value in inputs.items():
        if name.endswith("token_type_ids"):
            longer[name] = torch.nn.functional.pad(value, (0, more.shape[1] - value.shape[1]))
        elif name not in longer:
            longer[name] = value
    images = [name for name in longer if name not in inputs or "pixel" in name or name.startswith("image_")]
    if family in ANEW:
        assert not can_go_on(earlier.cache)
        return
    assert can_go_on(earlier.cache)
    known = earlier.cache.get_seq_length()
    cache = beginning(earlier.cache, known, shared=False)
    loop = TokenLoop(
        model, {name: value for name, value in longer.items() if "pixel_values" not in name}, {**GREEDY, "max_new_tokens": 5}
    )
    loop.begin_with(cache)
    loop.take_over({}, images)
    anew = TokenLoop(model, longer, {**GREEDY, "max_new_tokens": 5})
    assert tokens_of(loop, 5) == tokens_of(anew, 5)
    assert loop.cache.get_seq_length() == anew.cache.get_seq_length() == more.shape[1] + 4


@given(
    text=st.text("ab.", max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    stop=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
)
def test_text_in_pieces_ends_before_the_first_stop_string(text, cuts, stop):
    places = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    strings = StopStrings(stop)
    said = "".join(strings.before(piece) for piece in pieces) + strings.before("", last=True)
    found = [text.find(string) for string in stop if string in text]
    if not found:
        assert said == text and not strings.found
        return
    assert strings.found
    # a stop string that is complete first may begin behind one that is not complete yet
    ends = min(next(n for n in range(len(text) + 1) if string in text[:n]) for string in stop if string in text)
    piece_end = next(place for place in places if place >= ends)
    assert said == text[: min(text[:piece_end].find(string) for string in stop if string in text[:piece_end])]


def test_nothing_is_said_that_may_become_a_stop_string():
    strings = StopStrings(["END"])
    assert [strings.before(piece) for piece in ("so ", "E", "N", "x E", "ND and", "more")] == ["so ", "", "", "ENx ", "", ""]


def test_a_reply_can_be_delivered_instead_of_iterated():
    reply, got = Reply(), []
    reply.emit("early ")
    reply.deliver_to(got.append)
    reply.emit("late")
    error = ValueError("late")
    reply.end(error=error)
    assert got == ["early ", "late", None] and reply.text == "early late" and reply.error is error
