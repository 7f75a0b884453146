"""Random options of an answer, several at once: at the engine, at transformers' generate() with paged experts, at the schemas.

What is checked: the promises to whoever asks (length, stop strings, a seed, greedy beginnings), the same tokens as eager
transformers gives for the same options, and that what the schemas let through is what the engine takes.
"""

import json

import pytest
import tiny_models
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as runs
from hypothesis import strategies as st
from odd_values import ANYTHING
from pydantic import ValidationError
from searching import examples

import vismoe
from vismoe.app.api_errors import ApiError
from vismoe.app.schemas import ChatRequest, CompletionRequest, parse
from vismoe.config import ANSWERS, COLDEST, Settings, check_answer
from vismoe.errors import InputError, VisMoEError

SHARED = {"suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}
QUESTIONS = ("What is a cache?", "Describe the red circle.", "\n\n", "naïve 图 🙂 \u202e", "a" * 60)


OF_CHAT = sorted(ANSWERS.keys() - {"batch_size", "top_k", "num_beams", "repetition_penalty"})


# ------------------------------------------------------------------ the engine
@pytest.fixture(scope="module")
def engine():
    with vismoe.load(memory="25%", device="cpu", context=160) as engine:
        yield engine
        engine.check_integrity()


shares = st.floats(0.01, 1)
ANSWER_OPTIONS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 8), "sample": st.booleans()},
    optional={
        "temperature": st.one_of(st.floats(COLDEST, 2), st.just(COLDEST)),
        "top_p": shares,
        "seed": st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, -1, 2**32])),
        "stop": st.one_of(
            st.sampled_from(["e", " ", "\n", "图", "is a"]), st.lists(st.sampled_from(["a", "the", "?"]), max_size=4)
        ),
        "reuse": st.booleans(),
        "keep": shares,
        "selection": st.sampled_from(ANSWERS["selection"].choices),
        "image_tokens": st.tuples(st.integers(1, 8), st.integers(8, 64)),
    },
)


def answer(engine, question: str, options: dict) -> tuple[str, int]:
    reply = engine.chat([{"role": "user", "content": question}], **options)
    text = "".join(reply)
    return text, reply.figures.answer_tokens


@runs(max_examples=examples(25), **SHARED)
@given(st.sampled_from(QUESTIONS), ANSWER_OPTIONS)
def test_an_answer_keeps_to_its_options_whatever_they_are(engine, question, options):
    try:
        text, tokens = answer(engine, question, options)
    except InputError as error:
        assert not options["sample"] and options.keys() & {"temperature", "top_p"}, error
        assert "sample=True" in str(error)
        return
    assert 0 < tokens <= options["max_tokens"]
    stops = options.get("stop", ())
    assert not any(stop in text for stop in ([stops] if isinstance(stops, str) else stops))
    if not options["sample"]:
        longer, _ = answer(engine, question, {"max_tokens": 8})
        assert longer.startswith(text.rstrip("\ufffd"))
    elif "seed" in options:
        assert answer(engine, question, options)[0] == text


@runs(max_examples=examples(60), **SHARED)
@given(
    st.dictionaries(
        st.sampled_from(sorted(ANSWERS.keys() - {"batch_size", "top_k", "num_beams", "repetition_penalty"})), ANYTHING
    )
)
def test_options_of_any_kind_are_taken_together_or_refused(engine, options):
    try:
        reply = engine.chat([{"role": "user", "content": "Hi"}], **{**options, "max_tokens": options.get("max_tokens", 1)})
    except VisMoEError as error:
        str(error).encode()
        return
    reply.cancel()
    list(reply)


# ------------------------------------------------------------------ transformers' own generate()
@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(eager, paged) of the same weights."""
    folder = tiny_models.save("qwen3_moe", tmp_path_factory.mktemp("generate") / "model")
    config = vismoe.VisMoEConfig(**vars(Settings(memory="40%", context=256)))
    paged = tiny_models.model_class(folder).from_pretrained(folder, quantization_config=config)
    return tiny_models.reference(folder), paged.eval()


GENERATE_OPTIONS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 5)},
    optional={
        "do_sample": st.booleans(),
        "temperature": st.floats(0.1, 3),
        "top_k": st.integers(0, 600),
        "top_p": shares,
        "min_p": st.floats(0, 1),
        "typical_p": st.floats(0.1, 1),
        "epsilon_cutoff": st.floats(0, 0.9),
        "repetition_penalty": st.floats(0.5, 2),
        "no_repeat_ngram_size": st.integers(0, 3),
        "num_beams": st.integers(1, 3),
        "num_return_sequences": st.integers(1, 3),
        "length_penalty": st.floats(-1, 2),
        "early_stopping": st.booleans(),
        "min_new_tokens": st.integers(0, 5),
        "renormalize_logits": st.booleans(),
        "use_cache": st.booleans(),
        "eos_token_id": st.one_of(st.none(), st.integers(0, 511)),
        "bad_words_ids": st.lists(st.lists(st.integers(3, 511), min_size=1, max_size=2), min_size=1, max_size=2),
        "suppress_tokens": st.lists(st.integers(3, 511), min_size=1, max_size=5),
    },
)


def generated(model, inputs: dict, options: dict):
    """The ids, or the type of the error."""
    torch.manual_seed(3)
    try:
        return model.generate(**inputs, **options)
    except (ValueError, RuntimeError, TypeError) as error:
        return type(error)


@runs(max_examples=examples(25), **SHARED)
@given(GENERATE_OPTIONS, st.integers(1, 2), st.integers(0, 3))
def test_generate_gives_what_eager_experts_give_whatever_its_options(both, one_thread, options, rows, padding):
    inputs = tiny_models.prompt("qwen3_moe", tokens=7, batch=rows)
    if rows > 1 and padding:
        inputs["attention_mask"][0, :padding] = 0
    expected, found = (generated(model, inputs, options) for model in both)
    assert torch.equal(expected, found) if isinstance(expected, torch.Tensor) else expected is found


# ------------------------------------------------------------------ the schemas
def one_of_each(**fields) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries({}, optional=fields)


numbers = st.one_of(st.integers(), st.floats(), st.integers(-1, 4))
texts = st.one_of(st.text(max_size=4), st.lists(st.text(max_size=3), max_size=5))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
OURS = one_of_each(keep=scalars, selection=scalars, image_tokens=st.lists(numbers, max_size=3), policy=scalars, retention=scalars)
SAMPLING = dict.fromkeys(("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "n", "stream"), scalars)
BODIES = one_of_each(**SAMPLING, logit_bias=st.just({}), vismoe=OURS)


@runs(max_examples=examples(300))
@given(BODIES, st.booleans(), st.booleans())
def test_what_the_schemas_let_through_is_what_the_engine_takes(fields, chat, model_samples):
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Hi"}
    try:
        request = parse(ChatRequest if chat else CompletionRequest, json.dumps({**asked, **fields}).encode())
    except (ApiError, ValidationError):
        return
    sampling = request.sampling(model_samples)
    check_answer(**sampling)
    assert sampling["sample"] or sampling["temperature"] is sampling["top_p"] is None
    if chat and request.vismoe:
        tokens = request.vismoe.image_tokens
        check_answer(keep=request.vismoe.keep, selection=request.vismoe.selection, image_tokens=tuple(tokens) if tokens else None)
    if request.max_tokens is not None:
        check_answer(max_tokens=request.max_tokens)
