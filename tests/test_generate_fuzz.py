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
from PIL import Image
from pydantic import ValidationError
from searching import examples

import vismoe
from vismoe.app.api_errors import ApiError
from vismoe.app.schemas import ChatRequest, CompletionRequest, parse
from vismoe.config import Settings
from vismoe.engine.stats import Figures
from vismoe.errors import InputError, VisMoEError
from vismoe.options import COLDEST, OF_SAMPLING, OPTIONS, PENALTIES, RequestOptions

SHARED = {"suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}
QUESTIONS = ("What is a cache?", "Describe the red circle.", "\n\n", "naïve 图 🙂 \u202e", "a" * 60)
PICTURE = {"type": "image", "image": Image.new("RGB", (64, 64), "teal")}
CONTEXT = 96
OF_CHAT = sorted(OPTIONS.keys() - {"policy", "formats", "retention"})


# ------------------------------------------------------------------ the engine
@pytest.fixture(scope="module")
def engine():
    with vismoe.load(memory="25%", device="cpu", context=CONTEXT) as engine:
        yield engine
        engine.check_integrity()


shares = st.floats(0.01, 1)
ANSWER_OPTIONS = st.fixed_dictionaries(
    {"sample": st.booleans()},
    optional={
        "max_tokens": st.one_of(st.integers(1, 8), st.integers(1, 8), st.none()),
        "temperature": st.one_of(st.floats(COLDEST, 2), st.just(COLDEST)),
        "top_p": shares,
        "top_k": st.integers(0, 600),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.01, 100),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, 999), st.floats(-100, 100), max_size=3),
        "logprobs": st.integers(0, 20),
        "seed": st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, -1, 2**32])),
        "stop": st.one_of(
            st.sampled_from(["e", " ", "\n", "图", "is a"]), st.lists(st.sampled_from(["a", "the", "?"]), max_size=4)
        ),
        "reuse": st.booleans(),
        "keep": shares,
        "selection": st.sampled_from(OPTIONS["selection"].choices),
        "image_tokens": st.tuples(st.integers(1, 8), st.integers(8, 64)),
    },
)


def answer(engine, question: str, options: dict, images: int = 0) -> tuple[str, Figures]:
    reply = engine.chat([{"role": "user", "content": [PICTURE] * images + [{"type": "text", "text": question}]}], **options)
    return "".join(reply), reply.figures


@pytest.mark.budget(5)
@runs(max_examples=examples(8), **SHARED)
@given(st.sampled_from(QUESTIONS), st.integers(0, 1), ANSWER_OPTIONS)
def test_an_answer_keeps_to_its_options_whatever_they_are(engine, question, images, options):
    try:
        text, figures = answer(engine, question, options, images)
    except InputError as error:
        assert not options["sample"] and options.keys() & set(OF_SAMPLING), error
        assert "sample=True" in str(error)
        return
    most = CONTEXT - figures.prompt_tokens
    assert 0 < figures.answer_tokens <= min(options.get("max_tokens") or most, most)
    if figures.finish == "length":
        assert figures.answer_tokens == min(options.get("max_tokens") or most, most)
    stops = options.get("stop", ())
    assert not any(stop in text for stop in ([stops] if isinstance(stops, str) else stops))
    same = {name: options[name] for name in ("keep", "selection", "image_tokens", *PENALTIES, "logit_bias") if name in options}
    if not options["sample"]:
        other, _ = answer(engine, question, {**same, "max_tokens": 8}, images)
        shorter, longer = sorted((text.rstrip("\ufffd"), other.rstrip("\ufffd")), key=len)
        assert longer.startswith(shorter)
    elif "seed" in options:
        assert answer(engine, question, options, images)[0] == text


@runs(max_examples=examples(60), **SHARED)
@given(st.dictionaries(st.sampled_from(OF_CHAT), ANYTHING, min_size=1, max_size=3))
def test_options_of_any_kind_are_taken_together_or_refused(engine, options):
    try:
        reply = engine.chat([{"role": "user", "content": "Hi"}], **{"max_tokens": 1, **options})
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


@pytest.mark.filterwarnings("ignore:Unfeasible length:UserWarning")
@runs(max_examples=examples(25), **SHARED)
@given(GENERATE_OPTIONS, st.integers(1, 2), st.integers(0, 3))
def test_generate_gives_what_eager_experts_give_whatever_its_options(both, one_thread, options, rows, padding):
    inputs = tiny_models.prompt("qwen3_moe", tokens=7, batch=rows)
    if rows > 1 and padding:
        inputs["attention_mask"][0, :padding] = 0
    expected, found = (generated(model, inputs, options) for model in both)
    assert torch.equal(expected, found) if isinstance(expected, torch.Tensor) else expected is found


# ------------------------------------------------------------------ the schemas
numbers = st.one_of(st.integers(), st.floats(), st.integers(-1, 4))
texts = st.one_of(st.text(max_size=4), st.lists(st.text(max_size=3), max_size=5))
SCALARS = st.one_of(st.none(), st.booleans(), numbers, texts)


def mostly(*usual: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(*usual, *usual, *usual, SCALARS)


WHOLE = mostly(st.integers(1, 2**20))
OURS = st.fixed_dictionaries(
    {},
    optional={
        "keep": mostly(shares),
        "selection": mostly(st.sampled_from(OPTIONS["selection"].choices)),
        "image_tokens": st.lists(st.one_of(st.integers(1, 99), numbers), min_size=2, max_size=3),
        "retention": mostly(st.floats(0.5, 1)),
    },
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": WHOLE,
        "max_completion_tokens": WHOLE,
        "temperature": mostly(st.floats(0, 2)),
        "top_p": mostly(shares),
        "top_k": mostly(st.integers(0, 99)),
        "min_p": mostly(shares),
        "repetition_penalty": mostly(shares),
        "repeat_penalty": mostly(shares),
        "presence_penalty": mostly(shares),
        "frequency_penalty": mostly(shares),
        "logit_bias": mostly(st.dictionaries(st.integers(0, 99).map(str), mostly(shares), max_size=3)),
        "logprobs": mostly(st.booleans()),
        "top_logprobs": mostly(st.integers(0, 20)),
        "seed": mostly(st.integers(-(2**63), 2**63 - 1)),
        "stop": mostly(st.text(min_size=1, max_size=4)),
        "n": st.just(1),
        "stream": st.booleans(),
        "vismoe": OURS,
    },
)


@runs(max_examples=examples(300))
@given(BODIES, st.booleans(), st.booleans())
def test_what_the_schemas_let_through_is_what_the_engine_takes(fields, chat, model_samples):
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Hi"}
    try:
        request = parse(ChatRequest if chat else CompletionRequest, json.dumps({**asked, **fields}).encode())
    except (ApiError, ValidationError):
        return
    options = request.options(RequestOptions(), model_samples)  # which checks itself
    assert options.sample or all(getattr(options, name) is None for name in OF_SAMPLING)
    ours = fields.get("vismoe") or {}
    given = {**fields, **ours, "max_tokens": fields.get("max_completion_tokens") or fields.get("max_tokens")}
    given["repetition_penalty"] = fields.get("repeat_penalty") or fields.get("repetition_penalty")
    for name in ("max_tokens", "seed", "keep", "selection", "retention", *PENALTIES):
        assert getattr(options, name) == given.get(name)
