"""What lmms-eval asks for, before any model: arguments as settings, generation_kwargs, rows in batches. Needs no lmms-eval."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vismoe.cli.main import main
from vismoe.config import SETTINGS
from vismoe.errors import ConfigError, InputError
from vismoe.eval.lmms_arguments import SWITCHES, model_arguments
from vismoe.eval.lmms_batches import BatchRow, Generation, batches, left_padded


def test_model_args_have_the_types_that_flags_give():
    text = "pretrained=/a/b,memory=25%,keep=0.5,context=8192,deterministic=true,revision=1e10,image_tokens=64..1024,batch_size=4"
    assert model_arguments(text) == {
        "pretrained": "/a/b", "memory": "25%", "keep": 0.5, "context": 8192, "deterministic": True, "revision": "1e10",
        "image_tokens": (64, 1024), "batch_size": 4,
    }  # fmt: skip
    assert model_arguments("") == {}
    assert model_arguments("deterministic=false, device=cpu,") == {"device": "cpu"}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_passes_through(name):
    texts = ("3", "0.75", "8GiB", "4/2", *SETTINGS[name].choices) if not isinstance(SETTINGS[name].default, bool) else ("true",)
    given = next(text for text in texts if name in SWITCHES or SETTINGS[name].holds(text) or _reads(name, text))
    assert model_arguments(f"{name}={given}").keys() == {name}


def _reads(name: str, text: str) -> bool:
    try:
        SETTINGS[name].read(text)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memroy=25%", "unknown name 'memroy'. Fix: use one of pretrained, .*memory"),
        ("memory", "'memory' has no value. Fix"),
        ("keep=half", "keep='half': a number above 0"),
        ("deterministic=maybe", "choose true or false"),
        ("batch_size=0", "from 1 to"),
        ("lookahead=magic", "invalid choice"),
        ("keep=0.5,keep=1", "given twice"),
    ],
)
def test_model_args_that_cannot_be_are_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        model_arguments(text)


def test_generation_follows_the_task():
    assert Generation.of({}, 256) == Generation(256)
    greedy = {"max_new_tokens": 16, "temperature": 0, "do_sample": True, "top_p": 0.9, "num_beams": 1, "until": ["\n\n"]}
    assert Generation.of(greedy, 256) == Generation(16)  # an empty line is what lmms-eval adds where a task names nothing
    assert Generation.of({"temperature": 0.7, "do_sample": False, "top_p": 0.9}, 8) == Generation(8)
    sampled = Generation.of({"temperature": 0.7, "top_p": 0.9, "until": ["</s>", "\n\n"]}, 8)
    assert sampled == Generation(8, ("</s>",), sample=True, temperature=0.7, top_p=0.9)
    assert sampled.options(5) == {
        "max_new_tokens": 5, "do_sample": True, "num_beams": 1, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert Generation.of({"until": "Q:"}, 8).stop == ("Q:",)
    assert Generation(5).options(5)["temperature"] is None  # or the model's own would be used with greedy decoding, and warned of
    with pytest.raises(InputError, match="best_of are not supported"):
        Generation.of({"best_of": 3}, 8)


def row(tokens: int, number: int = 0, continuation: tuple[int, ...] = (), patches: int = 0) -> BatchRow:
    ids = torch.arange(10, 10 + tokens)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "kinds": torch.full_like(ids, 7)}
    return BatchRow(number, inputs | ({"pixels": torch.full((patches, 2), number)} if patches else {}), continuation)


def test_rows_are_padded_on_the_left_and_images_are_concatenated_in_order():
    batch = left_padded([row(2, 1, patches=1), row(4, 2), row(1, 3, (5, 6), patches=2)], pad_token_id=99)
    assert batch["input_ids"].tolist() == [[99, 99, 10, 11], [10, 11, 12, 13], [99, 10, 5, 6]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]
    assert batch["kinds"].tolist() == [[0, 0, 7, 7], [7, 7, 7, 7], [0, 7, 0, 0]]  # a continuation is text
    assert batch["pixels"].tolist() == [[1, 1], [3, 3], [3, 3]]


@given(
    st.lists(st.integers(1, 40), max_size=20), st.integers(1, 6), st.integers(0, 30), st.integers(20, 200), st.integers(40, 9000)
)  # fmt: skip
def test_batches_keep_the_order_and_never_pass_the_context_nor_the_memory_of_masks(
    lengths, most_rows, new_tokens, context, most_mask
):
    rows = [row(tokens, number) for number, tokens in enumerate(lengths)]

    def fits(count: int, tokens: int) -> bool:
        return count * tokens**2 <= most_mask

    made = list(batches(iter(rows), most_rows, new_tokens, context, fits))
    assert [each.number for batch in made for each in batch] == list(range(len(rows)))
    for batch, after in zip(made, [*made[1:], []]):
        cost = [len(some) * (max(each.tokens for each in some) + new_tokens) for some in (batch, [*batch, *after[:1]])]
        small = [fits(len(some), max(each.tokens for each in some)) for some in (batch, [*batch, *after[:1]])]
        assert len(batch) == 1 or (len(batch) <= most_rows and cost[0] <= context and small[0])
        assert not after or len(batch) == most_rows or cost[1] > context or not small[1], "shorter than it must be"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["scenes_pope"], 'Fix: pip install "vismoe[eval]"'),
        (["scenes_pope", "--seed", "3"], "--seed goes with --scenes and --suite"),
        ([","], "names no task"),
    ],
)
def test_the_command_refuses_before_a_model_is_loaded(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr("vismoe.cli.eval.find_spec", lambda name: None)
    assert main(["eval", "--lmms", *arguments, "--json"]) == 2
    assert said in json.loads(capsys.readouterr().out)["error"]["message"]
