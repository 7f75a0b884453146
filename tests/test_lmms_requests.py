"""What lmms-eval asks for, before any model: arguments as settings, generation_kwargs. Needs no lmms-eval."""

import json

import pytest

from vismoe.cli.main import main
from vismoe.config import SETTINGS
from vismoe.errors import ConfigError, InputError
from vismoe.eval.lmms_arguments import SWITCHES, model_arguments
from vismoe.eval.lmms_generation import Generation


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
    assert Generation.of({}, 256) == Generation(max_tokens=256)
    greedy = {"max_new_tokens": 16, "temperature": 0, "do_sample": True, "top_p": 0.9, "num_beams": 1, "until": ["\n\n"]}
    # an empty line is what lmms-eval adds where a task names nothing
    assert Generation.of(greedy, 256) == Generation(max_tokens=16)
    assert Generation.of({"temperature": 0.7, "do_sample": False, "top_p": 0.9}, 8) == Generation(max_tokens=8)
    sampled = Generation.of({"temperature": 0.7, "top_p": 0.9, "until": ["</s>", "\n\n"]}, 8)
    assert sampled == Generation(max_tokens=8, stop=("</s>",), sample=True, temperature=0.7, top_p=0.9)
    assert sampled.for_generate(5) == {
        "max_new_tokens": 5, "do_sample": True, "num_beams": 1, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert Generation.of({"until": "Q:"}, 8).stop == ("Q:",)
    # or the model's own would be used with greedy decoding, and warned of
    assert Generation().for_generate(5)["temperature"] is None
    with pytest.raises(InputError, match="best_of are not supported"):
        Generation.of({"best_of": 3}, 8)


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
