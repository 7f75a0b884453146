"""The engine as a person meets it: answers, cancelling, faults while serving, closing. On the bundled demo model."""

import json
import re
import shutil
import threading
import time

import pytest
import tiny_models
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import vismoe
from vismoe.engine.engine import demo_model
from vismoe.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    ContextError,
    InputError,
    TransferError,
    UnsupportedModelError,
)
from vismoe.lookahead.calibration import FOLDER, Calibration
from vismoe.trace.files import Trace
from vismoe.types import Phase

PICTURE = Image.linear_gradient("L").convert("RGB")  # 256 x 256


def ask(text="What is in the picture?", image=PICTURE):
    content = [{"type": "image", "image": image}] if image is not None else []
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def engine():
    with vismoe.load(memory="25%", device="cpu") as engine:
        yield engine


@pytest.fixture
def copied_model(tmp_path):
    return shutil.copytree(demo_model(), tmp_path / "model")


def test_the_streamed_answer_is_what_plain_transformers_says(engine):
    reply = engine.chat(ask(), max_tokens=12)
    answer = "".join(reply)
    model = AutoModelForImageTextToText.from_pretrained(engine.name, dtype="auto", experts_implementation="eager")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    text = engine.processor.apply_chat_template(ask(image=PICTURE), tokenize=False, add_generation_prompt=True)
    inputs = engine.processor(text=[text], images=[PICTURE], return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert answer.strip() == engine.processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()
    assert reply.answer == answer


def test_the_figures_add_up(engine):
    reply = engine.chat(ask(), max_tokens=5)
    list(reply)
    figures = json.loads(json.dumps(reply.figures.to_json()))
    assert figures["prefill"]["visual_tokens"] == 64 and figures["encode"]["images"] == 1
    assert figures["decode"]["tokens"] <= 4 and figures["encode"]["seconds"] > 0 and figures["prefill"]["seconds"] > 0
    cache = figures["cache"]
    assert cache["capacity"]["slabs"] == 64 == round(cache["capacity"]["experts"] / 4)
    assert len(cache["per_layer"]) == 8 and sum(layer["prefill"]["misses"] for layer in cache["per_layer"]) > 0
    by_phase = cache["per_phase"].values()
    for name in ("hits", "misses", "late", "evictions", "bytes_read", "prefetched_bytes", "wasted_prefetch_bytes"):
        assert cache[name] == sum(phase[name] for phase in by_phase), name
    assert {"answer", "plan", "encode", "prefill", "decode", "cache"} <= figures.keys() and "stall_seconds" in cache


def test_cancelling_stops_within_a_token_and_the_engine_goes_on(engine):
    expected = "".join(engine.chat(ask(), max_tokens=8))
    slow = engine.model.register_forward_hook(lambda *_: time.sleep(0.05))
    reply = engine.chat(ask("Describe the image."), max_tokens=500)
    reply.cancel()
    text = "".join(reply)
    slow.remove()
    assert reply.figures.cancelled and reply.figures.decode_tokens <= 1
    assert reply.answer == text and list(reply) == [], "a finished reply has no more pieces"
    inputs = tiny_models.prompt("qwen3_moe")["input_ids"]
    assert engine.model.generate(inputs, max_new_tokens=2).shape[1] > inputs.shape[1], "a cancel is of one request"
    assert "".join(engine.chat(ask(), max_tokens=8)) == expected


def test_cancelling_during_prefill_stops_between_two_layers(engine):
    layers = engine.model.model.language_model.layers
    ran = []
    hooks = [layer.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(layers)]
    reply = engine.chat(ask("Describe the image."), max_tokens=50)
    stop = layers[1].register_forward_hook(lambda *_: reply.cancel())
    assert "".join(reply) == ""
    for hook in (*hooks, stop):
        hook.remove()
    assert reply.figures.cancelled and ran == [0, 1] and reply.figures.decode_tokens == 0
    assert "".join(engine.chat(ask(), max_tokens=3))


def test_requests_from_several_threads_queue_and_each_gets_its_own_answer(engine):
    questions = ["What is in the picture?", "Describe the image.", "How many objects are there?"]
    alone = ["".join(engine.chat(ask(q), max_tokens=8)) for q in questions]
    replies = [engine.chat(ask(q), max_tokens=8) for q in questions]
    together = [None] * 3
    threads = [threading.Thread(target=lambda i=i: together.__setitem__(i, "".join(replies[i]))) for i in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone


@pytest.mark.parametrize(
    ("messages", "error", "says"),
    [
        (ask(image="/nowhere/cat.png"), InputError, "/nowhere/cat.png"),
        ([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], InputError, "a.mp4: no such file"),
        ([{"role": "user"}], InputError, "no content"),
        ([{"content": "hello"}], InputError, "needs a role"),
        (["hello"], InputError, "needs a role"),
        (ask("What is <|image_pad|>?"), InputError, "a placeholder of images"),
        ([], InputError, "no message"),
        (ask(image=PICTURE.resize((1000, 2))), InputError, "crop or resize"),
        (ask("word " * 9000), ContextError, "the model's own limit is 4096"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_before_anything_runs(engine, messages, error, says):
    with pytest.raises(error, match=says):
        engine.chat(messages)
    assert "".join(engine.chat(ask(), max_tokens=2))


def test_image_tokens_bound_what_an_image_costs(engine):
    reply = engine.chat(ask(image=PICTURE.resize((512, 512))), max_tokens=1, image_tokens=(4, 36))
    list(reply)
    assert 4 <= reply.figures.visual_tokens <= 36
    more = engine.chat(ask(image=PICTURE.resize((512, 512))), max_tokens=1)
    list(more)
    assert more.figures.visual_tokens > 64


def test_keep_holds_for_one_request_and_is_reported(engine):
    whole = engine.chat(ask(), max_tokens=4)
    list(whole)
    assert whole.figures.to_json()["prefill"]["kept_visual_tokens"] == 64 and whole.figures.kept_maps() == []
    half = engine.chat(ask(), max_tokens=4, keep=0.5, selection="uniform")
    list(half)
    prefill = json.loads(json.dumps(half.figures.to_json()))["prefill"]
    assert prefill["kept_visual_tokens"] == 32 and prefill["pruning"]["images"][0]["kept"] == 32
    assert prefill["pruning"]["keep"] == 0.5 and 0 < prefill["pruning"]["images"][0]["coverage"] < 1
    (shown,) = half.figures.kept_maps()
    assert shown.size == PICTURE.size and shown.tobytes() != PICTURE.tobytes()
    again = engine.chat(ask(), max_tokens=4)
    assert "".join(again) == whole.answer and again.figures.kept == ()


@pytest.mark.parametrize(
    ("settings", "selection", "why"),
    [
        ({}, Calibration.read(demo_model() / FOLDER).selection, "calibrated"),
        ({"calibration": "none"}, "distinct", "not calibrated"),
        ({"selection": "uniform"}, "uniform", "asked for"),
    ],
)
def test_the_selection_is_the_calibrated_one_unless_something_else_is_asked_for(settings, selection, why):
    with vismoe.load(memory="100%", device="cpu", lookahead="none", **settings) as loaded:
        assert f"; selection {selection} ({why});" in loaded.backends["visual tokens"]
        for asked, used in ((None, selection), ("random", "random"), (None, selection)):
            reply = loaded.chat(ask(), max_tokens=1, keep=0.5, selection=asked)
            list(reply)
            assert reply.figures.pruning.selection == used


def test_keep_holds_for_the_images_of_all_turns(engine):
    turns = [*ask(), {"role": "assistant", "content": "A dog."}, *ask("And here?", PICTURE.rotate(90))]
    reply = engine.chat(turns, max_tokens=2, keep=0.25)
    list(reply)
    assert [(image.tokens, len(image.selection.kept)) for image in reply.figures.kept] == [(64, 16), (64, 16)]
    assert len(reply.figures.kept_maps()) == 2
    text = engine.chat(ask(image=None), max_tokens=2, keep=0.25)
    list(text)
    assert text.figures.to_json()["prefill"]["pruning"] is None


def test_an_answer_ends_before_a_sliding_window_that_dropped_tokens_cannot_leave(engine, monkeypatch):
    assert engine._runtime.pruner.most_tokens is None
    monkeypatch.setattr(engine._runtime.pruner, "most_tokens", 70)
    with pytest.raises(ContextError, match=r"sliding window, .* is 70. Fix: keep=1, "):
        engine.chat(ask(), keep=0.5)
    assert "".join(engine.chat(ask(), max_tokens=2))
    monkeypatch.setattr(engine._runtime.pruner, "most_tokens", 83)
    reply = engine.chat(ask(), max_tokens=50, keep=0.5)
    list(reply)
    assert reply.figures.prompt_tokens + reply.figures.decode_tokens < 83


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"keep": "0.5"}, "a number above 0"), ({"keep": 0.0}, "keep=0.0"), ({"keep": 0.5, "selection": "best"}, "choose one of")],
)
def test_a_share_that_cannot_be_is_refused(engine, wrong, says):
    with pytest.raises(InputError, match=says):
        engine.chat(ask(), **wrong)


def test_a_text_model_has_no_visual_tokens_to_drop(tmp_path):
    tiny_models.save("qwen3_moe", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"keep=0.5: the model has no image tokens. Fix: keep=1"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=vismoe.VisMoEConfig(memory="100%", keep=0.5))


def test_fewer_experts_for_visual_tokens_read_less():
    read = []
    for top_k in (None, 1):
        with vismoe.load(memory="25%", device="cpu", visual_top_k=top_k, lookahead="none") as loaded:
            reply = loaded.chat(ask(), max_tokens=2)
            list(reply)
            read.append(reply.figures.counters.total("bytes_read", Phase.PREFILL))
    assert read[1] < 0.97 * read[0]
    with pytest.raises(ConfigError, match=r"a token of this model uses 4 experts. Fix: visual_top_k=3 or less"):
        vismoe.load(memory="25%", device="cpu", visual_top_k=5)


def test_plain_transformers_drops_tokens_as_loaded():
    with vismoe.load(memory="100%", device="cpu", keep=0.5) as loaded:
        by_engine = "".join(loaded.chat(ask(), max_tokens=8))
        text = loaded.processor.apply_chat_template(ask(), tokenize=False, add_generation_prompt=True)
        inputs = loaded.processor(text=[text], images=[PICTURE], return_tensors="pt")
        tokens = loaded.model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert loaded.processor.tokenizer.decode(tokens, skip_special_tokens=True).strip() == by_engine.strip()
        assert "keep 0.5 from decoder layer" in loaded.backends["visual tokens"]


def test_a_conversation_longer_than_the_plan_is_refused_with_the_context_that_works(copied_model):
    says = r"planned context is 64. Fix: load with context=\d+"
    with (
        vismoe.load(copied_model, memory="50%", device="cpu", context=64) as engine,
        pytest.raises(ContextError, match=says) as refused,
    ):
        engine.chat(ask())
    context = int(re.search(r"context=(\d+)", str(refused.value)).group(1))
    with vismoe.load(copied_model, memory="50%", device="cpu", context=context) as engine:
        assert "".join(engine.chat(ask(), max_tokens=4))


def test_a_hub_name_and_a_revision_are_found_in_the_cache_offline(tmp_path, monkeypatch):
    """The layout of the hub's cache: models--owner--name/{refs/<branch>, snapshots/<commit>/...}."""
    for branch, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        repository = tmp_path / "models--someone--demo"
        without = shutil.ignore_patterns("vismoe-calibration")  # which refuses the changed shape
        shutil.copytree(demo_model(), repository / "snapshots" / commit, ignore=without)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    config = json.loads((repository / "snapshots" / ("b" * 40) / "config.json").read_text())
    config["text_config"]["num_experts_per_tok"] = 2  # tells the revisions apart
    (repository / "snapshots" / ("b" * 40) / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for revision, top_k in ((None, 4), ("v2", 2)):
        with vismoe.load("someone/demo", memory="50%", device="cpu", revision=revision) as engine:
            assert engine._runtime.pager.inventory.layers[0].top_k == top_k
            assert "".join(engine.chat(ask(), max_tokens=4))


def test_context_is_enforced_under_plain_generate(copied_model):
    model = AutoModelForImageTextToText.from_pretrained(
        copied_model, quantization_config=vismoe.VisMoEConfig(memory="50%", context=32)
    )
    ids = torch.full((1, 20), 5)
    with pytest.raises(ContextError, match=r"1 x 33 tokens.*context of 32"):
        model.generate(ids, max_new_tokens=30, min_new_tokens=30, do_sample=False)
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] <= 23


def test_a_file_truncated_while_serving_fails_the_request_and_not_the_process(copied_model):
    with vismoe.load(copied_model, memory="25%", device="cpu") as engine:
        expected = "".join(engine.chat(ask(), max_tokens=6))
        weights = copied_model / "model.safetensors"
        whole = weights.read_bytes()
        with weights.open("r+b") as file:
            file.truncate(len(whole) // 10)
        with pytest.raises(TransferError, match=r"model\.safetensors (was truncated|has changed since it was opened: it had)"):
            for question in ("Describe the image.", "Where is the cat?", "Is there a dog?"):
                list(engine.chat(ask(question), max_tokens=8))
        engine._runtime.pager.check_integrity()
        weights.write_bytes(whole)
        with pytest.raises(TransferError, match=r"model\.safetensors has changed since it was opened.*Fix: load the model again"):
            for question in ("Describe the image.", "Where is the cat?", "Is there a dog?"):
                list(engine.chat(ask(question), max_tokens=8))
    with vismoe.load(copied_model, memory="25%", device="cpu") as engine:
        assert "".join(engine.chat(ask(), max_tokens=6)) == expected


def test_closing_while_answering_ends_the_answer_with_an_error(copied_model):
    engine = vismoe.load(copied_model, memory="25%", device="cpu")
    engine.model.register_forward_hook(lambda *_: time.sleep(0.02))
    reply = engine.chat(ask("Describe the image."), max_tokens=400)
    closing = threading.Timer(0.3, engine.close)
    closing.start()
    with pytest.raises(ClosedError):
        while True:
            list(reply)
            reply = engine.chat(ask("Describe the image."), max_tokens=400)
    closing.join(30)
    assert not closing.is_alive()
    engine.close()
    with pytest.raises(ClosedError):
        engine.chat(ask())


def test_recorded_routing_is_what_the_counters_saw(engine, tmp_path):
    with engine.record(tmp_path / "trace"):
        reply = engine.chat(ask(), max_tokens=6)
        list(reply)
    steps = list(Trace.open(tmp_path / "trace"))
    assert steps[0].phase is Phase.PREFILL and all(step.phase is Phase.DECODE for step in steps[1:])
    demanded = sum(len(set(routing.expert_ids.ravel().tolist())) for step in steps for routing in step.layers)
    counts = reply.figures.counters
    assert demanded == counts.total("hits") + counts.total("misses")
    assert (steps[0].kinds == 1).sum() == 64


def test_recording_waits_for_the_running_request_and_refuses_a_second_trace(engine, tmp_path):
    slow = engine.model.register_forward_hook(lambda *_: time.sleep(0.02))
    before = engine.chat(ask("Describe the image."), max_tokens=8)
    with engine.record(tmp_path / "one"):
        list(engine.chat(ask(), max_tokens=2))
        with pytest.raises(ConfigError, match="one trace at a time"), engine.record(tmp_path / "two"):
            pass
    slow.remove()
    assert "".join(before)
    assert {step.request for step in Trace.open(tmp_path / "one")} != {""}


def test_a_text_model_answers_and_says_that_it_cannot_see(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    config = tiny_models.build("qwen3_moe").config
    config.vocab_size = len(tokenizer)
    type(tiny_models.build("qwen3_moe"))(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with vismoe.load(tmp_path, memory="50%", device="cpu") as engine:
        assert isinstance("".join(engine.chat(ask(image=None), max_tokens=4)), str)
        with pytest.raises(InputError, match="text model"):
            engine.chat(ask())


@pytest.mark.parametrize(("name", "error"), [("nobody/no-such-model", CheckpointError), ("/no/such/folder", CheckpointError)])
def test_an_unknown_model_is_refused_with_what_to_do(name, error, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(error, match=r"Fix: check the (name|path)"):
        vismoe.load(name)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing"])
def test_a_damaged_checkpoint_is_refused_before_it_is_loaded(damage, copied_model):
    weights = copied_model / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "garbage":
        weights.write_bytes(b"\xff" * 4096)
    else:
        weights.unlink()
    with pytest.raises(CheckpointError, match=r"(?s)model.*Fix"):
        vismoe.load(copied_model)


@pytest.mark.parametrize("wrong", [{"dtype": "float7"}, {"device": "abacus"}, {"device": "meta"}])
def test_a_type_or_device_that_is_not_there_is_refused(wrong):
    with pytest.raises(ConfigError, match="choose"):
        vismoe.load(**wrong)


def test_an_unknown_setting_is_refused_by_name():
    with pytest.raises(vismoe.VisMoEError, match="memroy"):
        vismoe.load(memroy="1GiB")


def test_a_model_without_experts_is_refused_by_name(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="qwen3 is a dense model"):
        vismoe.load(tmp_path)
