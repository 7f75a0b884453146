"""Every option at every door: Python, the command line, the server, lmms-eval. Wrong types, edges and what breaks printing.

Whatever is thrown at a door is taken, and then it has an effect, or refused with one sentence of our errors: which option, what
it can be, and advice that is taken when it is followed. No other exception ever comes out.
"""

import dataclasses
import inspect
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as runs
from hypothesis import strategies as st
from odd_values import ANYTHING, ODD, advised, odd_values, said_well
from PIL import Image
from scripted_engine import ScriptedEngine
from searching import examples
from served import served

import vismoe
from vismoe.app.options import ServeOptions
from vismoe.cli import main as cli
from vismoe.config import SETTINGS, Settings
from vismoe.errors import ConfigError, InputError, VisMoEError
from vismoe.models.family import checkpoint_files as checked
from vismoe.models.load.quantizer import VisMoEConfig
from vismoe.options import OF_SAMPLING, OPTIONS, RequestOptions
from vismoe.ranges import Several, ValueKind, rules_of

PICTURE = Image.new("RGB", (64, 64), "red")
ASKED = sorted(OPTIONS.keys() - {"policy", "formats", "retention", "draft"})  # of Engine.chat; those are refused as settings are


def names_and_values(rules: dict) -> st.SearchStrategy[tuple[str, Any]]:
    return st.sampled_from(sorted(rules)).flatmap(lambda name: st.tuples(st.just(name), odd_values(rules[name])))


def same(held: Any, given: Any) -> bool:
    return type(held) is type(given) and held == given


# ------------------------------------------------------------------ the table
@pytest.mark.parametrize("owner", [Settings, RequestOptions, ServeOptions], ids=lambda owner: owner.__name__)
def test_every_option_has_a_rule_and_its_default_follows_it(owner):
    rules = rules_of(owner)
    assert list(rules) == [field.name for field in dataclasses.fields(owner)]
    for field in dataclasses.fields(owner):
        assert rules[field.name].kinds and rules[field.name].holds(field.default), field.name


@pytest.mark.parametrize("rules", [SETTINGS, OPTIONS, rules_of(ServeOptions)], ids=["settings", "requests", "server"])
def test_every_number_has_two_ends_and_every_size_is_read(rules):
    for name, rule in rules.items():
        for kind in rule.kinds:
            for one in kind.kinds if isinstance(kind, Several) else (kind,):
                if isinstance(one, ValueKind) and one.type in (int, float):
                    assert one.read is not None or all(map(math.isfinite, (one.range.low, one.range.high))), name


# ------------------------------------------------------------------ Python
@runs(max_examples=examples(400))
@given(names_and_values(SETTINGS))
def test_settings_take_a_value_or_say_which_one_they_take(drawn):
    name, value = drawn
    try:
        made = Settings.of(**{name: value})
    except ConfigError as error:
        message = said_well(error, name)
        if "with policy" not in message and "one format for all" not in message:
            Settings.of(**{name: SETTINGS[name].default} | advised(message))
        return
    assert not isinstance(value, bool) or isinstance(SETTINGS[name].default, bool)
    held = getattr(made, name)
    assert same(held, value) or (held == value and type(value) in (int, float))
    assert VisMoEConfig(**{name: value}).settings == made


def not_found(*arguments, **options):
    raise OSError("no such model on the hub")


@runs(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["model", "device", "dtype", "revision"]), ANYTHING)
def test_load_refuses_what_is_no_model_device_type_or_revision(tmp_path, monkeypatch, name, value):
    empty = {} if name == "model" else {"model": tmp_path}
    assume(not (name == "model" and value is None))
    monkeypatch.setattr(checked, "cached_file", not_found)
    with pytest.raises(VisMoEError) as refused:
        vismoe.load(**empty, **{name: value})
    str(refused.value).encode()


@runs(max_examples=examples(40))
@given(names_and_values(SETTINGS))
def test_load_looks_at_settings_before_anything_is_read(drawn):
    name, value = drawn
    assume(not SETTINGS[name].holds(value))
    with pytest.raises(ConfigError, match=name):
        vismoe.load("nobody/nothing", **{name: value})


@pytest.fixture(scope="module")
def engine():
    with vismoe.load(memory="25%", device="cpu", context=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def asked(engine):
    """Requests that would have been run."""
    caught = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine._scheduler, "ask", caught.append)
        yield caught


def effect(name: str, asked: Any) -> Any:
    """What a request was going to do about an option."""
    return {
        "max_tokens": asked.most_tokens,
        "sample": asked.options.for_generate(1)["do_sample"],
        "temperature": asked.options.for_generate(1).get("temperature"),
        **{name: asked.options.for_generate(1).get(name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")},
        **{name: getattr(asked.options, name) for name in ("presence_penalty", "frequency_penalty", "logit_bias", "logprobs")},
        "seed": asked.options.seed,
        "stop": asked.options.stop,
        "keep": asked.pruning.keep if asked.pruning else 1,
        "selection": asked.pruning.selection if asked.pruning else None,
        "reuse": asked.options.reuse,
        "json_schema": asked.options.json_schema,
        "grammar": asked.options.grammar,
        "reasoning": asked.options.reasoning,
        "reasoning_tokens": asked.options.reasoning_tokens,
    }[name]


@runs(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(ASKED).flatmap(lambda name: st.tuples(st.just(name), odd_values(OPTIONS[name]))))
def test_a_request_takes_an_option_or_says_what_it_can_be(engine, asked, drawn):
    name, value = drawn
    picture = {"type": "image", "image": PICTURE}
    options = {"sample": True} if name in OF_SAMPLING else {"keep": 0.5} if name == "selection" else {}
    options |= {name: value}
    try:
        engine.chat([{"role": "user", "content": [picture, {"type": "text", "text": "What?"}]}], **options)
    except InputError as error:
        message = said_well(error, name)
        if not OPTIONS[name].holds(value):
            RequestOptions(**{**options, name: None if name != "sample" and name != "reuse" else False, **advised(message)})
        return
    done = effect(name, asked[-1]) if name != "image_tokens" else value
    if value is not None:
        wanted = (value,) if isinstance(value, str) and name == "stop" else tuple(value) if name == "stop" else value
        assert done == (min(value, done) if name == "max_tokens" else wanted)


def test_options_are_taken_by_name_or_as_one_and_the_signature_shows_them(engine, asked):
    hello = [{"role": "user", "content": "Hi"}]
    options = RequestOptions(max_tokens=3, sample=True, temperature=0.5, stop="x", seed=4)
    for ask, what in ((engine.chat, hello), (engine.complete, "Hi")):
        ask(what, options)
        ask(what, max_tokens=3, sample=True, temperature=0.5, stop=["x"], seed=4)
        ask(what, options, max_tokens=2)
        assert [request.options for request in asked[-3:]] == [options, options, dataclasses.replace(options, max_tokens=2)]
        with pytest.raises(TypeError, match="length"):
            ask(what, length=3)
    shown = inspect.signature(engine.chat).parameters
    assert set(shown) == {"messages", "options", "tools", "template", *OPTIONS} and shown["max_tokens"].default is None
    assert all(f"{name}: {rule.meaning}" in engine.chat.__doc__ for name, rule in OPTIONS.items())


@pytest.mark.parametrize("option", [{"keep": 0.5}, {"selection": "random"}, {"image_tokens": (4, 8)}], ids=str)
def test_a_text_alone_has_no_options_of_images(engine, option):
    with pytest.raises(InputError, match=r"neither images nor reasoning\. Fix: leave it out"):
        engine.complete("Hi", **option)
    assert not option.keys() & inspect.signature(engine.complete).parameters.keys()


MESSAGES = st.recursive(
    ANYTHING,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.fixed_dictionaries({}, optional={"role": st.one_of(st.just("user"), inner), "content": inner}),
        st.fixed_dictionaries({"type": st.sampled_from(["text", "image", None])}, optional={"text": inner, "image": inner}),
    ),
    max_leaves=4,
)


@runs(max_examples=examples(250), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(MESSAGES, MESSAGES.map(lambda inner: [{"role": "user", "content": inner}])))
def test_a_conversation_is_answered_or_refused(engine, asked, messages):
    try:
        engine.chat(messages, max_tokens=1)
    except InputError as error:
        str(error).encode()
        assert len(str(error)) < 1000 and "Fix: " in str(error), error


@pytest.mark.parametrize("text", ODD, ids=map(str, range(len(ODD))))
def test_a_text_is_gone_on_from_or_refused(engine, asked, text):
    try:
        engine.complete(text, max_tokens=1)
    except InputError as error:
        str(error).encode()
        assert "Fix: " in str(error), error


@runs(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["policy", "formats", "retention"]), ANYTHING)
def test_a_change_is_made_or_refused(engine, name, value):
    try:
        engine.change(**{name: value})
    except VisMoEError as error:
        said_well(error, "") if value is not None else None
    assert engine.settings.policy == "exact"


# ------------------------------------------------------------------ the command line
class Remembering:
    """Stands for loading: what was asked for is kept, and nothing is loaded."""

    def __init__(self):
        self.asked: dict[str, Any] = {}

    def __call__(self, model=None, **asked):
        self.asked = asked
        raise ConfigError("loaded. Fix: none")


@pytest.fixture
def loading(monkeypatch):
    loading = Remembering()
    monkeypatch.setattr("vismoe.engine.engine.load", loading)
    return loading


def typed(value: Any) -> str:
    """As somebody types it."""
    if isinstance(value, int) and value.bit_length() > 9999:
        return "9" * 5000
    return str(value) if value != [10**5000] else "[]"


@runs(max_examples=examples(250), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names_and_values({name: rule for name, rule in SETTINGS.items() if not isinstance(rule.default, bool)}))
def test_a_flag_is_taken_or_refused_with_exit_code_2_and_a_sentence(loading, capsys, drawn):
    name, text = drawn[0], typed(drawn[1])
    loading.asked = {}
    flag = f"--{name.replace('_', '-')}"
    assert cli.main(["chat", "--device", "cpu", f"{flag}={text}", "./model", "Hi?"]) == 2
    said = capsys.readouterr().err
    if loading.asked:
        value = loading.asked[name]
        assert SETTINGS[name].holds(value), "what is passed on is what the table allows"
        assert value == text or value == float(text if name != "emulated_link_bytes_per_s" else value)
    else:
        assert said.startswith("error: ") and (flag in said or name in said) and "Fix: " in said and "Traceback" not in said
        assert len(said) < 6000 and not SETTINGS[name].holds(text)


@pytest.mark.parametrize(
    "flag",
    [
        "--max-tokens",
        "--image-tokens",
        "--seed",
        "--top-k",
        "--min-p",
        "--presence-penalty",
        "--device",
        "--dtype",
        "--revision",
        "--model",
    ],
)
@pytest.mark.parametrize("text", [odd for odd in ODD if isinstance(odd, str)], ids=lambda text: ascii(text)[:20])
def test_other_flags_never_end_in_a_traceback(loading, capsys, flag, text):
    assert cli.main(["chat", f"{flag}={text}", "Hi?"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("words", [(odd,) for odd in ODD if isinstance(odd, str)], ids=lambda words: ascii(words[0])[:20])
def test_words_never_end_in_a_traceback(loading, capsys, monkeypatch, words):
    monkeypatch.setattr("builtins.input", lambda prompt="": "/quit")
    assert cli.main(["chat", *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")


# ------------------------------------------------------------------ the server
@pytest.fixture(scope="module")
def server():
    engine = ScriptedEngine()
    with served(engine) as server:
        server.engine = engine
        yield server


def in_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


IN_BODY = (
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "top_logprobs",
    "seed",
    "stop",
    "stream",
    "user",
    "model",
    "n",
    "response_format",
)
OURS = ("keep", "selection", "image_tokens", "policy", "formats", "retention", "draft", "grammar")


def rule_of(name: str):
    return OPTIONS.get(name) or OPTIONS["repetition_penalty" if name == "repeat_penalty" else "max_tokens"]


@runs(max_examples=examples(250), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([*IN_BODY, *OURS]).flatmap(
        lambda name: st.tuples(st.just(name), st.one_of(ANYTHING.filter(in_json), odd_values(rule_of(name)), st.integers()))
    )
)
def test_a_field_of_a_body_is_taken_or_refused_in_the_apis_form(server, drawn):
    name, value = drawn
    field = {"vismoe": {name: value}} if name in OURS else {name: value}
    assume(in_json(field))
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **field}).encode()
    server.engine.calls.clear()
    answer = server.post(body)
    if answer.status_code >= 400:
        assert answer.status_code < 500, answer.text
        error = answer.json()["error"]
        assert error["message"] and error["type"] and len(answer.content) < 10_000
        return
    ((_, options),) = server.engine.calls
    if name in OPTIONS and value is not None and options.get(name) is not None:
        assert OPTIONS[name].holds(options[name])
        several = (value,) if isinstance(value, str) and name == "stop" else tuple(value) if isinstance(value, list) else value
        assert options[name] == several


# ------------------------------------------------------------------ lmms-eval
@runs(max_examples=examples(150))
@given(names_and_values(SETTINGS))
def test_model_args_are_taken_or_refused(drawn):
    from vismoe.eval.lmms_arguments import model_arguments

    name, text = drawn[0], typed(drawn[1])
    assume("," not in text and "=" not in text)
    try:
        read = model_arguments(f"{name}={text}")
    except ConfigError as error:
        assert name in str(error) or name.replace("_", "-") in str(error)
        return
    assert all(SETTINGS[name].holds(value) for value in read.values())


@runs(max_examples=examples(80))
@given(st.sampled_from(["batch_size", "max_new_tokens", "image_tokens"]), ANYTHING)
def test_the_model_class_of_lmms_eval_takes_its_arguments_or_refuses_them(name, value):
    pytest.importorskip("lmms_eval", reason='lmms-eval is not installed: pip install "vismoe[eval]"')
    from vismoe.eval.lmms_model import VisMoE

    text_config = SimpleNamespace(max_position_embeddings=64)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text_config))
    fake = SimpleNamespace(prompts=None, model=model, plan=SimpleNamespace(context=64))
    try:
        made = VisMoE(fake, **{name: value})
    except InputError as error:
        assert "Fix: " in said_well(error, name.replace("max_new", "max"))
        return
    assert getattr(made, name if name == "batch_size" else f"_{name}") == value


KWARGS = ["max_new_tokens", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p", "num_beams", "until"]
KWARGS += ["repetition_penalty", "stop_sequences"]


@runs(max_examples=examples(200))
@given(st.dictionaries(st.sampled_from(KWARGS), ANYTHING, max_size=3))
def test_generation_kwargs_are_followed_or_refused(kwargs):
    from vismoe.eval.lmms_generation import Generation

    try:
        how = Generation.of(kwargs, 16)
    except InputError as error:
        str(error).encode()
        return
    assert all(rule.holds(getattr(how, name)) for name, rule in rules_of(Generation).items())
    assert how.temperature is None or 0 < how.temperature < 1e3
