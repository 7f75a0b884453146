"""How tokens are chosen, and how likely they were, against transformers' own generate() on the demo model; drafted, in company,
after giving up a place. The entries of pieces of text against the text."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList

import vismoe
from vismoe.engine import request
from vismoe.engine.engine import demo_model
from vismoe.engine.generate import TextPieces
from vismoe.engine.logprobs import Chances
from vismoe.engine.scheduler import Scheduler
from vismoe.errors import InputError
from vismoe.options import RequestOptions

TEXT = "Once upon a time there was a red"
TEXTS = [TEXT, "How many dogs are there? There are"]
LENGTH = 40


@pytest.fixture(scope="module")
def engine():
    with vismoe.load(memory="50%", device="cpu", draft="ngram", context=512, calibration="none") as engine:
        engine.model.generation_config.eos_token_id = None  # beyond an answer's end the model is less sure, and repeats itself
        yield engine
        engine.check_integrity()


def said(engine, text=TEXT, **options):
    """(tokens, log probabilities) of an answer, with the answer itself."""
    reply = engine.complete(text, **{"max_tokens": LENGTH, "logprobs": 0, **options})
    pieces = list(reply)
    return [entry.token for entry in reply.logprobs], [entry.logprob for entry in reply.logprobs], reply, pieces


def generated(engine, text=TEXT, seed=None, **options):
    """What transformers' loop does with the same model: (tokens, their log probabilities, the logits of each pass)."""
    prompt = engine.prompts.build_text(text)

    def generate(model):
        torch.manual_seed(seed or 0)
        with torch.inference_mode():
            return model.generate(
                **prompt.whole(), max_new_tokens=LENGTH, output_logits=True, return_dict_in_generate=True, **options
            ), model

    out, model = engine.with_model(generate)
    chances = model.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)[0]
    return out.sequences[0, prompt.tokens :].tolist(), chances.tolist(), torch.cat(out.logits).float().log_softmax(-1)


class Counting(LogitsProcessor):
    """OpenAI's formula as its documentation writes it."""

    def __init__(self, presence, frequency):
        self.presence, self.frequency, self.prompt = presence, frequency, None

    def __call__(self, input_ids, scores):
        self.prompt, scores = self.prompt or input_ids.shape[1], scores.clone()
        for token, count in Counter(input_ids[0, self.prompt :].tolist()).items():
            scores[0, token] -= count * self.frequency + (count > 0) * self.presence
        return scores


@pytest.mark.parametrize("draft", ["none", "ngram"])
@pytest.mark.parametrize(
    "how",
    [
        {"sample": True, "temperature": 2.0, "top_k": 3, "seed": 5},
        {"sample": True, "temperature": 2.0, "min_p": 0.3, "seed": 6},
        {"repetition_penalty": 1.7},
        {"sample": True, "temperature": 1.5, "repetition_penalty": 0.6, "seed": 7},
    ],
    ids=str,
)
def test_options_of_transformers_do_what_they_do_there(engine, how, draft):
    usual = {"do_sample": how.get("sample", False)} | {name: how[name] for name in how if name != "sample"}
    tokens, _, _ = generated(engine, **usual)
    assert said(engine, draft=draft, **how)[0] == tokens != said(engine)[0]


@pytest.mark.parametrize("draft", ["none", "ngram"])
@pytest.mark.parametrize("presence, frequency", [(1.5, 0.0), (0.0, 1.5), (-1.0, 2.0), (0.0, -2.0)])
def test_penalties_are_those_of_the_api_drafted_or_not(engine, presence, frequency, draft):
    how = {"presence_penalty": presence, "frequency_penalty": frequency}
    wanted = generated(engine, do_sample=False, logits_processor=LogitsProcessorList([Counting(presence, frequency)]))
    assert said(engine, draft=draft, **how)[0] == wanted[0]
    sampled = how | {"sample": True, "temperature": 1.7, "seed": 4}
    assert said(engine, draft=draft, **sampled)[0] == said(engine, draft="none", **sampled)[0]


def test_a_bias_forbids_a_token_or_forces_one(engine):
    free = said(engine)[0]
    without = said(engine, logit_bias=dict.fromkeys(free[:3], -100))[0]
    assert not set(free[:3]) & set(without) and len(without) > 1
    assert set(said(engine, logit_bias={free[2]: 100}, max_tokens=5)[0]) == {free[2]}
    assert said(engine, logit_bias={})[0] == free


def test_a_grammar_has_the_last_word(engine):
    tokens = {token: 100 for text in ("maybe", "no", " ") for token in engine.tokenizer.encode(text, add_special_tokens=False)}
    for how in ({}, {"sample": True, "temperature": 2.0, "top_k": 2, "min_p": 0.01, "seed": 1}):
        how |= {"logit_bias": tokens, "frequency_penalty": -2, "repetition_penalty": 0.2}
        assert set(said(engine, **how)[0]) <= tokens.keys()
        answer = said(engine, grammar="start: /[xyz]{200}/", **how)[2].answer
        assert len(answer) >= LENGTH and set(answer) <= set("xyz")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"top_k": 3}, "top_k=3 with sample=False"),
        ({"min_p": 0.5, "top_p": 0.5}, "top_p=0.5, min_p=0.5 with sample=False"),
        ({"logit_bias": {-1: 1}}, "logit_bias has -1: 1"),
        ({"logit_bias": {1: 101}}, "logit_bias has 1: 101"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias has 1: nan"),
        ({"logit_bias": {True: 1}}, "logit_bias has True: 1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {10**9: 1}}, "token 1000000000, but the vocabulary ends at"),
        ({"logprobs": 21}, "logprobs=21"),
        ({"presence_penalty": 2.1}, "presence_penalty=2.1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ],
)
def test_what_cannot_be_is_refused(engine, options, why):
    with pytest.raises(InputError, match=why) as refused:
        engine.complete("Hi", **options)
    assert "Fix: " in str(refused.value)


@pytest.mark.parametrize("draft", ["none", "ngram"])
@pytest.mark.parametrize(
    "how", [{}, {"sample": True, "temperature": 2.0, "top_k": 9, "seed": 3}, {"frequency_penalty": 1.0}, {"logit_bias": {5: 50}}]
)
def test_log_probabilities_are_those_of_the_models_own_logits(engine, how, draft):
    """Before temperature, penalties and masks."""
    usual = {"do_sample": how.get("sample", False)} | {
        name: how[name] for name in how if name in ("temperature", "top_k", "seed")
    }
    if "frequency_penalty" in how:
        usual["logits_processor"] = LogitsProcessorList([Counting(0, 1.0)])
    if "logit_bias" in how:
        usual["sequence_bias"] = {(5,): 50.0}
    tokens, chances, all_of_them = generated(engine, **usual)
    found, mine, reply, _ = said(engine, logprobs=4, draft=draft, **how)
    assert found == tokens and len(tokens) == reply.figures.answer_tokens
    assert mine == pytest.approx(chances, abs=1e-4)
    for entry, row in zip(reply.logprobs, all_of_them, strict=True):
        values, ids = row.topk(4)
        assert [one.token for one in entry.top] == ids.tolist()
        assert [one.logprob for one in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
    if draft == "ngram" and not how:
        assert reply.figures.drafts.accepted > 0


def test_log_probabilities_in_company_and_behind_a_kept_prefix_are_those_of_being_alone(engine):
    alone = [said(engine, text, logprobs=2)[2].logprobs for text in TEXTS]
    replies = [engine.complete(text, max_tokens=LENGTH, logprobs=2) for text in TEXTS * 2]
    for reply in replies:
        list(reply)
    assert any(one.rows > 1 for reply in replies for one in reply.figures.passes), "no pass was shared"
    assert [reply.logprobs for reply in replies] == alone * 2
    few = {
        "logprobs": 2,
        "reuse": True,
        "max_tokens": 6,
    }  # keys and values of a prompt that is read in other pieces have other bits
    _, kept = (said(engine, **few)[2] for _ in range(2))
    assert kept.figures.reused_tokens > 0
    for found, wanted in zip(kept.logprobs, alone[0][:6], strict=True):
        assert found.token == wanted.token and found.logprob == pytest.approx(wanted.logprob, abs=0.25)


@pytest.mark.parametrize("how", [{}, {"sample": True, "temperature": 1.5, "seed": 3}])
def test_who_gave_up_its_place_says_each_token_once_as_it_would_have(monkeypatch, how):
    how = {**how, "logprobs": 1, "presence_penalty": 0.5, "frequency_penalty": 0.7, "max_tokens": None}
    monkeypatch.setattr(request, "FIRST_TOKENS", 4)
    given_up, put_back = [], Scheduler._put_back
    monkeypatch.setattr(Scheduler, "_put_back", lambda turns, later: (given_up.append(later), put_back(turns, later)))
    with vismoe.load(memory="25%", device="cpu", context=48) as engine:
        engine.model.generation_config.eos_token_id = None
        alone = [said(engine, text, **how)[2].logprobs for text in TEXTS]
        assert not given_up
        replies = [engine.complete(text, **how) for text in TEXTS]
        for reply, wanted in zip(replies, alone, strict=True):
            entries = [entry for piece in reply for entry in piece.logprobs]
            assert reply.logprobs == wanted and entries == wanted[: len(entries)] and len(entries) >= len(wanted) - 1
        assert given_up


def test_nothing_is_computed_or_carried_where_nothing_was_asked(engine, monkeypatch):
    monkeypatch.setattr(Chances, "of", None)
    monkeypatch.setattr(torch.Tensor, "log_softmax", None)
    _, _, reply, pieces = said(engine, logprobs=None)
    assert reply.logprobs == [] and pieces and {type(piece) for piece in pieces} == {str}


@pytest.mark.parametrize("stop", [[], ["red"], ["e"], [" "], ["never"]], ids=str)
def test_pieces_bring_the_tokens_that_their_text_came_from(engine, stop):
    whole = said(engine)[2]
    _, _, reply, pieces = said(engine, stop=stop)
    entries = [entry for piece in pieces for entry in piece.logprobs]
    assert entries == whole.logprobs[: len(entries)] and reply.logprobs[: len(entries)] == entries
    text = b"".join(entry.bytes for entry in entries).decode()
    assert text.startswith(reply.answer) and (reply.figures.finish == "stop" or text == reply.answer)
    assert all(entry.offset < len(reply.answer) for entry in entries)
    for entry in entries:
        assert text[entry.offset :].startswith(entry.text)


TOKENIZER = AutoTokenizer.from_pretrained(demo_model())


@settings(max_examples=examples(150))
@given(
    st.text(st.sampled_from("ab \n.é图🙂"), max_size=20).map(lambda text: TOKENIZER.encode(text, add_special_tokens=False)),
    st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2),
    st.booleans(),
)
def test_entries_of_any_text_have_its_bytes_whatever_stops_it(tokens, stop, ends):
    entries, pieces = [], []
    text = TextPieces(TOKENIZER, pieces.append, stop, logprobs=entries)
    for token in tokens + [TOKENIZER.eos_token_id] * ends:
        text.add(token, Chances((token, -1.0), []))
        if text.stopped:
            break
    text.end()
    answer, brought = "".join(pieces), [entry for piece in pieces for entry in piece.logprobs]
    assert [entry.token for entry in entries] == (tokens + [TOKENIZER.eos_token_id] * ends)[: len(entries)]
    assert brought == entries[: len(brought)]
    assert b"".join(entry.bytes for entry in brought).startswith(answer.encode())
    if not text.stopped:
        assert b"".join(entry.bytes for entry in brought) == answer.encode() and len(brought) == len(tokens)
    elif brought:
        assert brought[-1].offset < len(answer)
    said_so_far = brought_bytes = 0
    for piece in pieces:  # no token comes before its text, nor later than the piece in which that ends
        said_so_far += len(piece.encode())
        brought_bytes += sum(len(entry.bytes) for entry in piece.logprobs)
        assert brought_bytes <= said_so_far or piece is pieces[-1]


def test_half_a_character_is_written_as_its_bytes():
    options = RequestOptions(logprobs=0)
    assert options.logprobs == 0
    entries = []
    pieces = TextPieces(TOKENIZER, lambda piece: None, logprobs=entries)
    halves = [token for token in range(300) if TOKENIZER.decode([token]) == "\ufffd"][:3]
    for token in halves:
        pieces.add(token, Chances((token, 0.0), [(token, 0.0)]))
    assert len(halves) == 3 and all(len(entry.bytes) == 1 and entry.text.startswith("\\x") for entry in entries)
    assert all(entry.top[0].bytes == entry.bytes for entry in entries)
