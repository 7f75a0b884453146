"""Answers that follow a JSON schema or a grammar: our own corpus of schemas with random logits, checked by jsonschema; the demo
model alone, in company, sampled and drafted; what cannot be followed."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples
from transformers import AutoTokenizer, GenerationConfig

import vismoe
from vismoe.engine.grammar import Grammars
from vismoe.errors import InputError
from vismoe.options import RequestOptions

DEMO = Path(__file__).resolve().parent.parent / "assets" / "demo-model"
COUNTED = {
    "type": "object",
    "properties": {"object": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["object", "count"],
    "additionalProperties": False,
}
HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=len(tokenizer) + 7))
    ends = GenerationConfig(eos_token_id=[tokenizer.eos_token_id, 3])
    return Grammars(SimpleNamespace(config=config, generation_config=ends), tokenizer)


def schema_of(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose values are short."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "anyOf"]
    kind = rng.choice(kinds if depth > 2 else [*kinds, "object", "object", "array", "ref"])
    low = rng.randint(-50, 50)
    if kind == "string":
        return {"type": "string", "minLength": (least := rng.randint(0, 3)), "maxLength": least + rng.randint(0, 9)}
    if kind == "integer":
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)}
    if kind == "number":
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 9)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": rng.sample(["red", "a b", "", 'quoted "x"', "ü", 7, -1.5, True, None], rng.randint(1, 5))}
    if kind == "const":
        return {"const": rng.choice(["one", 0, [1, 2], {"a": None}])}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-c]{2,4}$", "^(yes|no)$", r"^\d{4}-\d{2}$", "^x?y+z{0,3}$"]),
            "maxLength": 9,
        }
    if kind == "anyOf":
        return {"anyOf": [schema_of(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": schema_of(rng, depth + 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}
    names = rng.sample(["name", "size", "a b", "ä", "tags", "x1"], rng.randint(0, 4))
    properties = {name: schema_of(rng, depth + 1) for name in names}
    made = {"type": "object", "properties": properties, "additionalProperties": False}
    made["required"] = rng.sample(names, rng.randint(0, len(names)))
    return {"$defs": {"part": made}, "$ref": "#/$defs/part"} if kind == "ref" and not depth else made


def answered(tokenizer, mask, rng: torch.Generator, prompt: torch.Tensor, most: int = 600) -> str | None:
    """What random logits say under a mask; None: it has not ended."""
    ids = prompt
    for _ in range(most):
        scores = mask(ids, torch.randn((1, len(tokenizer) + 20), generator=rng))
        token = int(scores.argmax())
        if token in (tokenizer.eos_token_id, 3):
            return tokenizer.decode(ids[0, prompt.shape[1] :])
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    return None


@pytest.mark.parametrize("part", range(4))
def test_every_answer_to_a_corpus_of_schemas_is_valid(tokenizer, grammars, part):
    prompt = torch.tensor([tokenizer.encode("What?")])
    for seed in range(80 * part, 80 * part + 80):
        schema = schema_of(random.Random(seed))
        options = RequestOptions(json_schema=json.dumps(schema))
        said = answered(tokenizer, grammars.mask_of(options), torch.Generator().manual_seed(seed), prompt)
        assert said is not None, schema
        jsonschema.validate(json.loads(said), schema)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_a_sequence_that_goes_back_has_the_mask_of_one_that_never_was_elsewhere(tokenizer, grammars, seed, ahead):
    """As drafts do: ahead so many tokens, back, and on by one."""
    options, rng = RequestOptions(json_schema=json.dumps(COUNTED)), random.Random(seed)
    walked, ids = grammars.mask_of(options), torch.tensor([[5, 6]])

    def may(mask, at):
        return torch.isfinite(mask(at, torch.zeros(1, len(tokenizer)))[0]).nonzero().flatten().tolist()

    for steps in ahead:
        there = ids
        for _ in range(steps):
            choices = [token for token in may(walked, there) if token not in (tokenizer.eos_token_id, 3)]
            if not choices:
                break
            there = torch.cat([there, torch.tensor([[rng.choice(choices)]])], dim=1)
        fresh = grammars.mask_of(options)
        fresh(ids[:, :2], torch.zeros(1, len(tokenizer)))  # where the answer begins
        now = may(fresh, ids)
        assert may(walked, ids) == now
        choices = [token for token in now if token not in (tokenizer.eos_token_id, 3)]
        if not choices:
            break
        ids = torch.cat([ids, torch.tensor([[rng.choice(choices)]])], dim=1)


@pytest.fixture(scope="module")
def engine():
    with vismoe.load(DEMO, memory="50%", draft="ngram", context=1024, calibration="none") as engine:
        yield engine


@pytest.mark.parametrize("how", [{}, {"sample": True, "temperature": 1.8, "seed": 3}, {"sample": True, "top_p": 0.1, "seed": 4}])
def test_the_model_answers_by_a_schema_drafted_or_not(engine, how):
    replies = [
        engine.chat(HELLO, json_schema=json.dumps(COUNTED), max_tokens=80, draft=draft, **how) for draft in ("none", "ngram")
    ]
    said = ["".join(reply) for reply in replies]
    assert said[0] == said[1] and replies[0].figures.finish == "stop"
    jsonschema.validate(json.loads(said[0]), COUNTED)
    figures = replies[1].figures
    assert figures.grammar_seconds > 0 and figures.to_json()["grammar"] == {"seconds": figures.grammar_seconds}


def test_requests_at_once_follow_a_grammar_each_or_none(engine):
    asked = [
        {"grammar": 'start: "yes" | "no"'},
        {},
        {"json_schema": '{"enum": ["red", "blue"]}'},
        {"grammar": "start: /[ab]{5}/"},
    ]
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda given: "".join(engine.chat(HELLO, max_tokens=20, **given)), asked))
    assert said[0] in ("yes", "no") and json.loads(said[2]) in ("red", "blue") and len(said[3]) == 5 and set(said[3]) <= set("ab")
    assert said[1] == "".join(engine.chat(HELLO, max_tokens=20))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"json_schema": '{"type": "strin"}'}, "Invalid type: strin"),
        ({"json_schema": '{"type": "string", "minLength": 5, "maxLength": 2}'}, "Unsatisfiable schema"),
        ({"json_schema": '{"not": {}}'}, "Unimplemented keys"),
        ({"json_schema": '{"$ref": "#/nowhere"}'}, "does not exist"),
        ({"json_schema": "{"}, "a JSON object that is a schema"),
        ({"json_schema": "[]"}, "a JSON object that is a schema"),
        ({"grammar": "start: nowhere"}, "unknown name"),
        ({"grammar": "start"}, "grammar"),
        ({"grammar": 'start: "a"', "json_schema": "{}"}, "one of them"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_anything_runs(engine, asked, why):
    with pytest.raises(InputError, match=why) as refused:
        engine.chat(HELLO, **asked)
    assert "Fix: " in str(refused.value) and "\n" not in str(refused.value)


def test_a_vocabulary_that_cannot_spell_what_must_follow_fails_the_request(tokenizer, grammars):
    mask = grammars.mask_of(RequestOptions(grammar='start: "x"'))
    with pytest.raises(InputError, match="no token of this model's vocabulary"):
        mask(torch.tensor([[5]]), torch.zeros(1, 2))
