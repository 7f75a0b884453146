"""lmms-eval and VisMoE: real tasks by their own code on local data, the scenes tasks against `vismoe eval --scenes`, likelihoods,
several images, many at once, stop strings, refusals. One demo engine answers everything; nothing is fetched.
"""

import json
import os
import re
import socket
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from importlib.metadata import entry_points

import pytest
import torch
from clips import clip
from PIL import Image
from searching import long

import vismoe
from vismoe.cli.main import main
from vismoe.engine.shared_pass import SharedPasses
from vismoe.errors import ConfigError, ContextError, InputError
from vismoe.eval.lmms import TASKS, manifest
from vismoe.eval.questions import conversation
from vismoe.eval.scenes import compose
from vismoe.eval.studies.lmms_agreement import agreement
from vismoe.eval.world import plural, with_article

lmms_eval = pytest.importorskip("lmms_eval", reason='lmms-eval is not installed: pip install "vismoe[eval]"')

from datasets import Dataset  # noqa: E402
from lmms_eval import evaluator, utils  # noqa: E402
from lmms_eval.api.instance import Instance  # noqa: E402
from lmms_eval.api.task import ConfigurableMessagesTask, ConfigurableTask  # noqa: E402
from lmms_eval.models import get_model  # noqa: E402
from lmms_eval.tasks import TaskManager  # noqa: E402
from lmms_eval.tasks import __file__ as THEIR_TASKS  # noqa: E402
from lmms_eval.tasks.mmbench.mmbench_evals import MMBench_Evaluator  # noqa: E402

from vismoe.eval.lmms_arguments import model_arguments  # noqa: E402
from vismoe.eval.lmms_model import VisMoE, VisMoEChat  # noqa: E402

OFFLINE = ("scenes_pope", "scenes_mmbench", "scenes_ocr", "scenes_mme")
LETTER = "\nAnswer with the option's letter from the given choices directly."


@pytest.fixture(scope="module")
def engine():
    with vismoe.load(memory="100%", device="cpu") as engine:
        yield engine


def talk(kind: str, number: int):
    return conversation(kind, "held-out", number)


def chat_message(kind: str, number: int) -> list[dict]:
    """A message as lmms-eval's chat tasks make it."""
    held_out = talk(kind, number)
    images = [{"type": "image", "url": compose(scene)} for scene in held_out.scenes]
    return [{"role": "user", "content": [*images, {"type": "text", "text": held_out.turns[-1].question}]}]


def requests(model, documents: list, *arguments: tuple, kind: str = "generate_until") -> list[Instance]:
    """One request per document of a made-up task; `arguments` are what stands before (document, task, split)."""
    model.task_dict["made_up"] = {"test": documents}
    return [
        Instance(kind, (*given, number, "made_up", "test"), 0, {"task": "made_up", "doc_id": number, "repeats": 1})
        for number, given in enumerate(arguments)
    ]


def chat(engine, messages: list, kwargs: dict | None = None, **options) -> list:
    model = VisMoEChat(engine, **options)
    given = [("", lambda document: document, kwargs or {}) for _ in messages]
    return model.generate_until(requests(model, messages, *given))


# -- the entry point
def test_lmms_eval_finds_both_classes_by_the_entry_point():
    (found,) = entry_points(group="lmms_eval.models", name="vismoe")
    assert found.load() is manifest
    assert get_model("vismoe") is VisMoEChat
    assert get_model("vismoe", force_simple=True) is VisMoE


def test_model_args_load_an_engine_that_shares_a_machine_with_other_processes(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("vismoe.eval.lmms_model.cores", lambda: 6)
    threads = torch.get_num_threads()
    try:
        model = VisMoEChat.create_from_arg_string("memory=1600MB,keep=0.5,device=cpu,batch_size=3", {"batch_size": "1"})
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    plan = model._engine.plan
    assert (plan.budget_bytes, model._engine.settings.keep, model.batch_size) == (800 * 10**6, 0.5, 3)
    model.clean()  # it has loaded the engine, so it closes it
    with pytest.raises(vismoe.VisMoEError, match="closed"):
        list(model._engine.chat([{"role": "user", "content": "Hello"}]))
    with pytest.raises(InputError, match="--batch_size='auto': a whole number"):
        VisMoEChat.create_from_arg_string("", {"batch_size": "auto"})
    with pytest.raises(ConfigError, match="unknown name 'precision'"):
        VisMoEChat.create_from_arg_string("precision=half")


def test_model_args_choose_who_decides_formats_and_the_results_say_in_which_experts_were_computed(tmp_path):
    assert main(["pack", "--formats", "int4", "--out", str(tmp_path)]) == 0
    arguments = f"memory=60%,device=cpu,store={tmp_path},policy=importance,formats=16/4,retention=0.6,batch_size=2"
    model = VisMoEChat.create_from_arg_string(arguments)
    try:
        held = model._engine.precision
        assert (held.policy, held.formats, held.retention) == ("importance", "raw/int4", 0.6)
        found = evaluate(model, local_task("scenes_pope"), limit=4)
        assert found["results"]["scenes_pope"]["pope_accuracy,none"] >= 0.5
        logged = found["throughput"]
        assert logged["avg_in_raw"] + logged["avg_in_int4"] == pytest.approx(1) and logged["avg_in_int4"] > 0
    finally:
        model._engine.close()
    with pytest.raises(ConfigError, match="retention=0"):
        VisMoEChat.create_from_arg_string("policy=importance,retention=0.3")


# -- the scenes tasks
@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_the_scenes_tasks_say_what_vismoe_eval_scenes_says(engine, keep):
    with vismoe.load(memory="100%", device="cpu", keep=keep) if keep < 1 else nullcontext(engine) as asked:
        rows = agreement(asked, 2)
    assert [row["task"] for row in rows] == list(OFFLINE)
    for row in rows:
        assert row["questions"] == row["same"] == 2
        assert row["lmms"] == row["scenes"]


def evaluate(model, task, **options) -> dict:
    """The harness on a task that was made already: there is nothing to look up."""
    nothing = TaskManager(include_defaults=False)
    return evaluator.simple_evaluate(model=model, tasks=[task], task_manager=nothing, **options)


def local_task(name: str, form=ConfigurableMessagesTask, **changes):
    config = utils.load_yaml_config(str(TASKS / f"{name}.yaml"))
    return form(config={**config, **changes}, model_name="vismoe")


def test_scenes_documents_are_true_and_pairs_have_both_answers():
    documents = list(local_task("scenes_mme").test_docs())
    assert len(documents) == 500
    for first, second in zip(documents[::2], documents[1::2], strict=True):
        assert first["question_id"] == second["question_id"] and first["number"] == second["number"]
        assert {first["answer"], second["answer"]} == {"Yes", "No"} and (first["held_out"], second["held_out"]) == (True, False)
        scenes = talk(first["kind"], first["number"]).scenes
        if first["kind"] == "compare":
            scenes = scenes[:1] if "first" in second["question"] else scenes[1:]
        shown = any(names(second["question"], noun) for scene in scenes for noun in scene.nouns)
        assert shown == (second["answer"] == "Yes")
    choices = list(local_task("scenes_mmbench").test_docs())
    assert {document["category"] for document in choices} == {"what", "which", "where", "count"}
    assert all(document[document["answer"]] in document["question"] for document in choices)
    assert all(document["answer"].isalnum() for document in local_task("scenes_ocr").test_docs())


def names(question: str, noun: str) -> bool:
    return re.search(rf"\b({with_article(noun)}|{plural(noun)})\b", question) is not None


def test_wrong_answers_lose_points_and_an_odd_number_of_them_is_no_pairs():
    from vismoe.eval.tasks import scenes

    yes = {"question_id": "1", "answer": "yes", "category": "existence"}
    assert scenes.pope_results(yes, ["Yes, there is a cat."])["pope_accuracy"]["score"] == 1
    assert scenes.pope_results(yes, ["No, there is no cat."])["pope_accuracy"]["score"] == 0
    text = {"answer": "MENU", "dataset": "scenes", "question_type": "Regular Text Recognition"}
    assert scenes.ocr_results(text, ['It says "MENU".']) == {"ocr_accuracy": 1, "ocr_characters": 1}
    assert scenes.ocr_results(text, ['It says "MEAL".']) == {"ocr_accuracy": 0, "ocr_characters": 0.5}
    right, wrong = (scenes.mme_results(yes, [said])["mme_perception_score"] for said in ("Yes.", "No."))
    assert scenes.mme_score([right, wrong]) == 50  # one of two right: 50 of 100, and no pair
    with pytest.raises(InputError, match="even --limit"):
        scenes.mme_score([right])
    options = {"A": "cat", "B": "dog", "C": "cow", "D": "pig", "question": "What is at the top?", "category": "what"}
    said = [scenes.mmbench_results({**options, "index": n, "answer": "B"}, [text]) for n, text in enumerate(("B.", "A", "dog"))]
    assert scenes.mmbench_accuracy([each["mmbench_accuracy"] for each in said]) == pytest.approx(200 / 3)


def test_the_command_prints_one_json_object(capsys, monkeypatch, tmp_path):
    assert main(["eval", "--lmms", "scenes_pope,scenes_ocr", "--limit", "3", "--memory", "100%", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"]["scenes_pope"]["pope_accuracy"] == 1 and found["cache"]["hits"] > 0
    assert {(each["task"], each["document"]): each["score"] for each in found["answers"]} == {
        (task, number): 1 for task in ("scenes_pope", "scenes_ocr") for number in range(3)
    }
    monkeypatch.setattr("lmms_eval.tasks.__file__", str(tmp_path / "none"))  # two thousand tasks take seconds to list
    assert main(["eval", "--lmms", "scenes_pop", "--memory", "100%", "--json"]) == 2
    assert "no such task: scenes_pop. VisMoE's tasks are" in json.loads(capsys.readouterr().out)["error"]["message"]


# -- real tasks: their own YAML and code, on data of their schema
def photo(number: int) -> Image.Image:
    return compose(talk("what", number).scenes[0])


def real_data(name: str) -> list[dict]:
    question, image = "What is in the image?", photo(0)
    if name == "pope":
        row = {"id": "0", "question_id": "1", "question": "Is there a dog in the image?", "answer": "no", "image_source": "x.jpg"}
        return [
            {**row, "image": image, "category": "random"},
            {**row, "question_id": "2", "image": photo(1), "category": "random"},
        ]
    if name == "mme":
        row = {"question_id": "code/1.png", "image": image, "category": "existence"}
        asked = "Is there a {} in this image? Please answer yes or no."
        return [{**row, "question": asked.format(noun), "answer": said} for noun, said in (("cat", "Yes"), ("dog", "No"))]
    if name.startswith("mmbench"):
        row = {
            "question": question,
            "hint": "nan",
            "A": "cat",
            "B": "dog",
            "C": "sun",
            "D": "key",
            "category": "c",
            "image": image,
        }
        row |= {"L2-category": "l2", "source": "s", "split": "dev", "comment": "nan"}
        return [{**row, "index": 1, "answer": "A"}, {**row, "index": 2, "answer": "B"}]
    if name == "ocrbench":
        row = {"dataset": "IIIT5K", "question": "what is written in the image?", "question_type": "Regular Text Recognition"}
        return [{**row, "answer": ["MENU"], "image": image}, {**row, "answer": ["CAFE", "cafe"], "image": photo(2)}]
    row = {"image_id": "a", "question_id": 7, "question": "what does it say?", "image": image, "image_width": 256}
    row |= {"image_height": 256, "ocr_tokens": ["a"], "set_name": "val", "image_classes": ["x"], "flickr_original_url": "u"}
    return [{**row, "answers": ["menu"] * 10}, {**row, "question_id": 8, "answers": ["stop"] * 9 + ["go"]}]


REAL = {  # task: (its YAML, split, what it scores)
    "pope": ("pope/pope.yaml", "test", {"pope_accuracy", "pope_f1_score"}),
    "mme": ("mme/mme.yaml", "test", {"mme_perception_score"}),
    "mmbench_en_dev": ("mmbench/mmbench_en_dev.yaml", "dev", {"gpt_eval_score"}),
    "mmbench_en_dev_static": ("mmbench/mmbench_en_dev_static.yaml", "dev", {"gpt_eval_score"}),
    "ocrbench": ("ocrbench/ocrbench.yaml", "test", {"ocrbench_accuracy"}),
    "textvqa_val": ("textvqa/textvqa_val.yaml", "validation", {"exact_match"}),
}


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Results go into a temporary folder; whoever asks a language model or a hub fails at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(MMBench_Evaluator, "get_chat_response", lambda *_, **__: "Failed to obtain answer via API")


@pytest.mark.parametrize("name", REAL)
def test_a_real_task_runs_by_its_own_code(engine, name, offline, tmp_path):
    yaml, split, metrics = REAL[name]
    rows = real_data(name)
    Dataset.from_list(rows).to_parquet(tmp_path / "data.parquet")
    config = utils.load_yaml_config(THEIR_TASKS.replace("__init__.py", yaml))
    here = {"data_files": {split: str(tmp_path / "data.parquet")}}
    config |= {"dataset_path": "parquet", "dataset_name": None, "dataset_kwargs": here}
    task = ConfigurableMessagesTask(config=config, model_name="vismoe")
    model = VisMoEChat(engine, batch_size=2)
    found = evaluate(model, task, cli_args=Namespace(output_path=str(tmp_path), process_with_media=True))
    scores = found["results"][name]
    assert {f"{metric},none" for metric in metrics} <= scores.keys()
    said = [sample["filtered_resps"][0] for sample in found["samples"][name]]
    assert len(said) == 2 and all(isinstance(answer, str) and answer for answer in said)


# -- prompts, and many at once
def test_several_images_between_texts_are_asked_as_the_engine_asks_them(engine):
    held_out = talk("compare", 0)
    first, second = map(compose, held_out.scenes)
    question = held_out.turns[-1].question
    parts = [{"type": "image", "url": first}, {"type": "text", "text": question}, {"type": "image", "url": second}]
    ours = [{"type": "image", "image": part["url"]} if part["type"] == "image" else part for part in parts]
    (said,) = chat(engine, [[{"role": "user", "content": parts}]])
    assert said.text == "".join(engine.chat([{"role": "user", "content": ours}]))
    (said,) = chat(engine, [chat_message("compare", 0)])
    assert said.text == held_out.turns[-1].answer


def test_the_simple_form_places_images_where_the_text_names_them(engine):
    model = VisMoE(engine)
    images = [photo(0), photo(1)]
    (before, named) = requests(model, [images, images], ("What?", {}, list), ("A <image> B <image>", {}, list))
    (message,) = model._messages(before)
    assert [part["type"] for part in message["content"]] == ["image", "image", "text"]
    (message,) = model._messages(named)
    assert [part.get("text") for part in message["content"]] == ["A ", None, " B ", None]
    assert message["content"][3]["image"] is images[1]


@pytest.mark.parametrize("kwargs", [{}, {"do_sample": True, "temperature": 5.0, "top_k": 9, "repetition_penalty": 1.3}])
def test_requests_that_share_passes_say_what_they_say_alone_in_the_order_of_the_requests(engine, monkeypatch, kwargs):
    messages = [chat_message(kind, number) for number in range(2) for kind in ("compare", "text", "exists")]
    rows, run = [], SharedPasses.run
    monkeypatch.setattr(SharedPasses, "run", lambda *given: rows.append(len(given[1])) or run(*given))
    said = {}
    for together in (1, 4):
        torch.manual_seed(3)
        said[together] = chat(engine, messages, {"max_new_tokens": 20, **kwargs}, batch_size=together)
        assert max(rows, default=1) == together
    assert [(each.text, each.token_counts) for each in said[4]] == [(each.text, each.token_counts) for each in said[1]]
    assert kwargs or said[4][1].text == talk("text", 0).turns[-1].answer


def test_beams_are_searched_one_request_at_a_time(engine):
    messages = [chat_message("describe", number) for number in range(2)]
    whole = chat(engine, messages, {"num_beams": 2, "max_new_tokens": 12}, batch_size=2)
    cut = chat(engine, messages, {"num_beams": 2, "max_new_tokens": 12, "until": [" is"]}, batch_size=2)
    assert all(each.text.startswith("There") and each.token_counts.output_tokens == 12 for each in whole)
    assert [each.text for each in cut] == [each.text.split(" is")[0] for each in whole]


def test_an_answer_ends_before_a_stop_string_and_no_more_is_generated(engine):
    messages = [chat_message("describe", number) for number in range(3)]
    whole = chat(engine, messages, batch_size=3)
    for stop in (" is", "There is a"):
        cut = chat(engine, messages, {"until": [stop, "never said"]}, batch_size=3)
        assert [each.text for each in cut] == [each.text.split(stop)[0] for each in whole]
        assert all(few.token_counts.output_tokens < each.token_counts.output_tokens for few, each in zip(cut, whole, strict=True))


def test_sampling_follows_the_task_and_torch_s_seed(engine):
    kwargs = {"do_sample": True, "temperature": 5.0, "max_new_tokens": 12}
    said = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        said.append(chat(engine, [chat_message("describe", 0)], kwargs)[0].text)
    assert said[0] == said[1] != said[2]


def test_a_prompt_beyond_the_context_is_refused_with_its_task_and_a_fix_and_answers_end_at_it(engine):
    long = [[{"role": "user", "content": [{"type": "text", "text": "Is there a cat? " * 2000}]}]]
    with pytest.raises(ContextError, match=r"task made_up, document 0: .* \d+ tokens, .* 4096. Fix: shorten"):
        chat(engine, long)
    (said,) = chat(engine, [chat_message("exists", 0)], {"max_new_tokens": 32_768})
    assert said.text == talk("exists", 0).turns[-1].answer


# -- likelihoods
def by_hand(engine, messages: list, continuation: str) -> tuple[float, bool]:
    """The same from single steps: each token's own pass over everything before it, without a batch."""
    prompt = engine.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )

    def steps(model):
        total, greedy, inputs = 0.0, True, dict(prompt)
        for token in engine.tokenizer(continuation, add_special_tokens=False)["input_ids"]:
            with torch.inference_mode():
                logits = model(**inputs).logits[0, -1].double()
            total, greedy = total - logits.log_softmax(-1)[token].item(), greedy and int(logits.argmax()) == token
            for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
                new = {"input_ids": token, "attention_mask": 1}.get(name, 0)
                inputs[name] = torch.cat([inputs[name], torch.tensor([[new]])], dim=1)
        return total, greedy

    return engine.with_model(steps)


def test_likelihoods_are_sums_over_the_continuation_s_tokens(engine):
    held_out = talk("exists", 0)
    image, turn = compose(held_out.scenes[0]), held_out.turns[-1]
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": turn.question}]}]
    continuations = [turn.answer, "Yes, there is a pizza.", "No"]
    model = VisMoE(engine, batch_size=3)
    given = [(turn.question, f" {continuation}", lambda document: [image]) for continuation in continuations]
    found = model.loglikelihood(requests(model, [None] * 3, *given, kind="loglikelihood"))
    (right, said), (wrong, unsaid), _ = found
    assert right < wrong and said and not unsaid
    for (total, greedy), continuation in zip(found, continuations, strict=True):
        expected, as_said = by_hand(engine, messages, continuation)
        assert total == pytest.approx(expected, rel=0.05, abs=0.05) and greedy == as_said  # bfloat16, and other rows beside it


def test_multiple_choice_of_the_harness_takes_the_likeliest_option(engine):
    choices = {
        "doc_to_choice": list("ABCD"),
        "output_type": "multiple_choice",
        "generation_kwargs": None,
        "process_results": None,
    }
    metrics = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    task = local_task("scenes_mmbench", ConfigurableTask, **choices, metric_list=metrics)
    found = evaluate(VisMoE(engine, batch_size=4), task, limit=6)
    assert found["results"]["scenes_mmbench"]["acc,none"] == 1


# -- caching, refusals
def test_answers_of_the_response_cache_are_not_asked_again(engine, tmp_path, monkeypatch):
    ask = partial(evaluate, VisMoEChat(engine), limit=2, use_cache=str(tmp_path))
    scores = ask(local_task("scenes_pope"))["results"]["scenes_pope"]
    monkeypatch.setattr(engine, "answer", None)
    assert ask(local_task("scenes_pope"))["results"]["scenes_pope"] == scores and scores["pope_accuracy,none"] == 1


def test_videos_of_tasks_in_both_forms_are_answered_as_the_engine_answers(engine, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(clip(frames=12))
    how = dict(fps=2.0, max_num_frames=4, image_tokens=(4, 16))
    part = {"type": "video", "video": str(tmp_path / "clip.mp4"), "fps": 2, "max_frames": 4, "image_tokens": [4, 16]}
    reply = engine.chat([{"role": "user", "content": [part, {"type": "text", "text": "What happens?"}]}], max_tokens=6)
    message = [{"role": "user", "content": [{"type": "video", "url": part["video"]}, {"type": "text", "text": "What happens?"}]}]
    assert [one.text for one in chat(engine, [message], {"max_new_tokens": 6}, **how)] == ["".join(reply)]
    model = VisMoE(engine, **how)
    clips = requests(model, [part["video"]], ("What happens?", {"max_new_tokens": 6}, lambda document: [document]))
    assert [one.text for one in model.generate_until(clips)] == [reply.text]
    assert 0 < reply.figures.visual_tokens <= 2 * 16
    loaded = model_arguments("fps=0.5,max_num_frames=32")
    assert loaded == {"fps": 0.5, "max_num_frames": 32}
    with pytest.raises(InputError, match="max_frames: a whole number"):
        VisMoE(engine, max_num_frames=0)


def test_what_cannot_be_answered_is_refused_by_the_task_s_name(engine):
    for kind, words in (("video", r"clip\.mp4: no such file"), ("audio", "a message part of type 'audio'")):
        message = [{"role": "user", "content": [{"type": kind, "url": "clip.mp4"}, {"type": "text", "text": "What happens?"}]}]
        with pytest.raises(InputError, match=rf"task made_up, document 0: {words}"):
            chat(engine, [message])
    model = VisMoE(engine)
    clip = requests(model, ["clip.mp4"], ("What happens?", {}, lambda document: [document]))
    with pytest.raises(InputError, match=r"task made_up, document 0: .*clip\.mp4"):
        model.generate_until(clip)
    with pytest.raises(InputError, match="task made_up has several rounds"):
        model.generate_until_multi_round(clip)
    with pytest.raises(InputError, match="task made_up, document 0: generation_kwargs: best_of"):
        chat(engine, [chat_message("exists", 0)], {"best_of": 2})


# -- several processes
PROCESSES = """
import os, sys
import vismoe
import lmms_eval.tasks, lmms_eval.__main__, vismoe.eval.lmms_model
from vismoe.eval.lmms import main
lmms_eval.tasks.__file__ = sys.argv[1]  # two thousand tasks take seconds to list
rank = int(os.fork() == 0)  # after the imports, which take longer than all the rest
os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
main(sys.argv[2:])
sys.exit(rank == 0 and os.waitstatus_to_exitcode(os.wait()[1]))
"""


@long
def test_two_processes_share_the_documents_and_gather_the_answers(tmp_path):
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    arguments = ["--model", "vismoe", "--model_args", "memory=100%,device=cpu", "--tasks", "scenes_pope", "--limit", "5"]
    arguments += ["--batch_size", "2", "--log_samples", "--output_path", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", PROCESSES, str(tmp_path / "none"), *arguments],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = tmp_path.rglob("*_samples_scenes_pope.jsonl")
    said = {row["doc_id"]: row["filtered_resps"] for row in map(json.loads, samples.read_text().splitlines())}
    assert said == {number: talk("exists", number).turns[-1].answer for number in range(5)}
    (results,) = tmp_path.rglob("*_results.json")
    assert json.loads(results.read_text())["results"]["scenes_pope"]["pope_accuracy,none"] == 1


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]
