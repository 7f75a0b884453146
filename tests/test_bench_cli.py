"""`vismoe bench` from its flags to its JSON line on a generated checkpoint, and what the contestants get to see."""

import json
import os
import re
import shutil
import signal
import sys
import types
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy
import pytest
import tiny_models
import torch
import transformers as T
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vismoe.bench import benchmark, contestants, environment, llama_runner
from vismoe.bench.geometry import geometry_config, model_class_of
from vismoe.bench.job import COLD, WARM, Job
from vismoe.bench.limits import Groups
from vismoe.bench.prompt import model_inputs, picture_tokens, random_ids
from vismoe.bench.run import BenchOutcome
from vismoe.bench.subject import GeneratedModel, GgufFile, generate, gguf_of, subject_of
from vismoe.bench.token_time import token_timer
from vismoe.cli import main as cli
from vismoe.config import Settings
from vismoe.errors import ConfigError, InputError
from vismoe.kernels import rows as row_kernels
from vismoe.machine.facts import facts
from vismoe.machine.profile import Profile
from vismoe.machine.rates import DramRates
from vismoe.timeline import Timeline

REPORT = {
    "command", "commit", "versions", "hardware", "model", "stores", "conditions", "labels", "ceilings", "control", "contestants",
    "runs", "interrupted", "timeline",
}  # fmt: skip
TINY = "bench --geometry tiny --layers 2 --repeats 1 --warm 1 --prompt-tokens 12 --new-tokens 4 --memory 50% --threads 1".split()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Generated checkpoints live here for all tests of this file."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def known_machine(monkeypatch, cache):
    """A machine whose rates are known, so that none is measured."""
    rates = types.SimpleNamespace(
        measured_unix_s=0.0,
        dram_bytes_per_s=1e10,
        best_disk_bytes_per_s=lambda path: 1e9,
        link=lambda device: None,
        facts=types.SimpleNamespace(load_average=0.5, usable_cores=1),
    )
    monkeypatch.setattr(environment, "load_profile", lambda: rates)
    monkeypatch.setattr(benchmark, "imports_bytes", lambda: 320 * 2**20)
    monkeypatch.setenv("VISMOE_CACHE", str(cache))


@pytest.fixture(scope="module")
def tiny(cache):
    """The folder of the checkpoint that TINY asks for."""
    return generate(cache / "bench", GeneratedModel("tiny", 2)).name


def test_a_benchmark_of_three_contestants_ends_with_one_json_line(tiny, capsys, tmp_path):
    timeline = tmp_path / "timeline.json"
    flags = ["--baseline", "accelerate,transformers-eager", "--kernels", "torch", "--image", "64x64", "--trace", str(timeline)]
    assert cli.main([*TINY, *flags, "--parallel", "3", "--token-time"]) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    report = json.loads(last)
    assert set(report) == REPORT and not report["interrupted"]
    rows = report["contestants"]
    assert list(rows) == ["vismoe", "accelerate", "transformers-eager"]
    for name, row in rows.items():
        assert row["failed"] is None, row["failed"]
        for state in (COLD, WARM):
            assert {f"{phase}_tokens_per_s" for phase in ("prefill", "decode")} <= row[state].keys()
            assert row[state]["encode_s"]["median"] > 0
        assert row["agreement"]["same_every_time"]
        assert any(line.startswith(name) and "cold" in line for line in table)
    at_once = {name: row["parallel"]["3"] for name, row in rows.items()}
    assert all(found["tokens_per_s"]["median"] > 0 for found in at_once.values())
    assert [found["by_turns_tokens_per_s"] is None for found in at_once.values()] == [False, True, True]
    assert [found["streamed_share"] is None for found in at_once.values()] == [False, True, True]
    assert any("by turns" in line for line in table)
    parts = rows["vismoe"]["token_ms"]
    named = {"linears", "experts", "routers", "norms", "rotations", "attention", "cache", "head", "embeddings"}
    assert parts.keys() == named | {"between", "timing", "token"} and rows["accelerate"]["token_ms"] is None
    assert sum(parts[part]["ms"] for part in (*named, "between")) == pytest.approx(parts["token"]["ms"])
    assert parts["between"]["ms"] > 0 and all(parts[part]["bytes"] for part in named - {"embeddings"})
    assert parts["attention"]["calls"] == parts["experts"]["calls"] == 2 and any("between" in line for line in table)
    assert rows["vismoe"]["agreement"]["equal_tokens"] == 4  # eager's own arithmetic: not one bit differs
    ours = rows["vismoe"]["cold"]
    assert 0 <= ours["decode_hit_rate"]["median"] <= 1 and ours["decode_bytes_read_per_token"]["median"] > 0
    assert rows["accelerate"]["notes"]["modules"].keys() == {"cpu", "disk"}  # it was given no more than half of the experts
    first, *_ = report["runs"]
    assert first["requests"][0]["visual_tokens"] > 0 and len(first["requests"]) == 2
    assert report["versions"].keys() >= {"python", "torch", "accelerate", "llama_cpp_python"} and "logits" not in first
    tracks = {event["args"]["name"] for event in json.loads(timeline.read_text())["traceEvents"] if event["ph"] == "M"}
    assert {"phase", "compute"} <= tracks
    assert report["timeline"].keys() == {"prefill", "decode"} and 0 < report["timeline"]["decode"]["computing"] < 1
    assert sum(line.startswith("timeline, ") for line in table) == 2


def test_only_a_whole_timeline_of_this_benchmark_is_reported(tmp_path):
    file = tmp_path / "timeline.json"
    assert benchmark._phases_of(file, 0.0) is None
    Timeline().write(file)
    assert benchmark._phases_of(file, file.stat().st_mtime) == {}
    assert benchmark._phases_of(file, file.stat().st_mtime + 1) is None
    file.write_text(file.read_text()[:-9])
    assert benchmark._phases_of(file, 0.0) is None and benchmark._phases_of(Path("/dev/null"), 0.0) is None


def test_timed_parts_are_given_back():
    model = tiny_models.build("qwen3_moe").eval()
    model.set_attn_implementation("sdpa")
    model.lm_head.forward = own = model.lm_head.forward
    before = ALL_ATTENTION_FUNCTIONS["sdpa"], T.Cache.update, row_kernels.rotate
    with torch.no_grad(), token_timer(model) as timer:
        model(torch.tensor([[1, 2]]))
        assert not timer.result(1, 1.0).parts
        timer.begin()
        model(torch.tensor([[1, 2]]))
        parts = timer.result(1, 1.0).parts
    assert parts["head"]["calls"] == 1 and parts["head"]["bytes"] == model.lm_head.weight.nbytes
    assert parts["attention"]["calls"] == parts["experts"]["calls"] == len(model.model.layers)
    assert before == (ALL_ATTENTION_FUNCTIONS["sdpa"], T.Cache.update, row_kernels.rotate)
    assert vars(model.lm_head).pop("forward") is own and not any("forward" in vars(module) for module in model.modules())


def test_formats_are_packed_and_run_beside_their_partners(cache, capsys):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is built from source, by hand")
    pytest.importorskip("gguf")
    flags = "--layers 4 --formats raw,packed,int8 --kernels torch --baseline llama.cpp-mmap --warm-cache --moe-time"
    assert cli.main([*TINY, *flags.split()]) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    report = json.loads(last)
    rows = report["contestants"]
    assert list(rows) == ["vismoe", "vismoe packed", "llama.cpp-mmap", "vismoe int8", "llama.cpp-mmap q8_0"]
    for name, row in rows.items():
        assert row["failed"] is None, row["failed"]
        assert row["moe_us"]["prefill"]["median"] > 0 and row["moe_us"]["decode"]["median"] > 0
        assert row["agreement"]["correlation"] > 0.95, name
    assert rows["vismoe packed"]["agreement"]["equal_tokens"] == 4
    assert [store["format"] for store in report["stores"]] == ["raw", "int8"]
    assert all(store["packed_s"] for store in report["stores"]) and 8 < report["stores"][1]["bits_per_weight"] < 10
    assert not [label for label in report["labels"] if label.startswith("warning: the first logits")]
    assert any(re.match(r"vismoe int8 +llama\.cpp-mmap q8_0 .*x, .*x", line) for line in table)


def test_a_format_that_is_not_packed_is_refused_for_somebodys_model(tiny, capsys, tmp_path):
    assert cli.main(["bench", tiny, "--formats", "int4", "--store", str(tmp_path), "--memory", "50%"]) == 2
    assert "vismoe pack" in capsys.readouterr().err


def test_json_prints_nothing_but_the_report_and_ctrl_c_what_there_is(tiny, capsys, monkeypatch):
    from vismoe.bench import benchmark

    monkeypatch.setattr(benchmark, "run_all", lambda jobs, *rest: BenchOutcome((), interrupted=True))
    assert cli.main([*TINY, "--json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert report["interrupted"] and report["contestants"] == {}
    assert "Zipf" not in str(report["labels"]) and any("uniform" in label for label in report["labels"])


def test_a_run_that_failed_is_reported_and_is_not_a_success(tiny, capsys, monkeypatch):
    from vismoe.bench import benchmark

    failed = {"contestant": "vismoe", "repeat": 0, "failed": "BudgetError: too small"}
    monkeypatch.setattr(benchmark, "run_all", lambda jobs, *rest: BenchOutcome((failed,), interrupted=False))
    assert cli.main(TINY) == 2
    *table, last = capsys.readouterr().out.strip().splitlines()
    assert json.loads(last)["contestants"]["vismoe"]["failed"] in "\n".join(table)


def test_sigterm_ends_a_benchmark_as_ctrl_c_does(tiny, capsys, monkeypatch):
    from vismoe.bench import run

    monkeypatch.setattr(run, "run_job", lambda *rest: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(TINY) == 130
    assert "interrupted: some measurements are missing" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("bench ./model --geometry tiny", "replaces the model ./model"),
        ("bench --layers 2", "--geometry NAME"),
        ("bench --geometry tiny --prompt hello", "no tokenizer"),
        ("bench --geometry tinny", "tiny"),
        ("bench --baseline vllm", "choose among"),
        ("bench --formats int3", "int3: choose among raw, packed, lossless"),
        ("bench --kernels torch,triton", "triton: choose among auto, torch, fast"),
        ("bench --new-tokens 1", "at least 2"),
        ("bench --image 12", "WIDTHxHEIGHT"),
        ("bench --limit 3XB", "is not a size"),
        ("bench --gguf model.gguf", "--baseline llama.cpp"),
        ("bench --context 100", "--context 288"),
        ("bench --threads 100000", "--threads"),
        ("bench --trace /no/such/folder/t.json", "the folder /no/such/folder is missing"),
        ("bench --clean --geometry tiny --warm 3", "geometry, warm have no effect"),
        ("bench --geometry tiny --prompt-tokens 5000", "the model has 4096 positions"),
        ("bench --geometry tiny --folder /dev/null", "--folder /dev/null cannot be used"),
        ("bench --memory 25% --geometry tiny --layers 2 --limit 64MiB", "Fix: --limit"),
        ("bench --geometry tiny --layers 2 --baseline accelerate --emulated-link-bytes-per-s 1GB", "slows VisMoE alone"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_fix(flags, message, capsys):
    assert cli.main(flags.split()) == 2
    said = capsys.readouterr()
    assert message in said.err and not said.out


def test_one_gguf_file_cannot_stand_against_a_lossy_format(capsys, monkeypatch):
    installed = types.ModuleType("llama_cpp")
    installed.__spec__ = ModuleSpec("llama_cpp", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", installed)  # which is looked for and not used
    assert cli.main("bench --formats int8 --baseline llama.cpp --gguf model.gguf".split()) == 2
    assert "only makes from generated checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--geometry qwen3-30b-a3b --layers 1 --image 64x64", "cannot see pictures"),
        ("--geometry tiny --limit 64MiB --prompt-tokens 12", r"--limit 64\.0 MiB is too small.*Fix: --limit \d+MiB or more"),
        ("--geometry tiny --layers 2 --baseline llama.cpp --memory 50% --warm-cache", "needs more layers"),
        ("--geometry mixtral-8x7b --layers 1 --memory 50% --warm-cache", "has 1.0 KiB free"),
    ],
)
def test_nothing_is_written_where_something_is_refused(flags, message, tmp_path, capsys, monkeypatch):
    if "llama" in flags:
        pytest.importorskip("llama_cpp", reason="llama-cpp-python is built from source, by hand")
    if "free" in message:
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1024))
    if "--limit" in flags:
        skip_without_groups()
    assert cli.main(["bench", "--folder", str(tmp_path), *flags.split()]) == 2
    assert re.search(message, capsys.readouterr().err, re.S)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def skip_without_groups() -> None:
    try:
        Groups(64 * 2**20)
    except ConfigError as error:
        pytest.skip(f"no control group can be made here: {error}")


def test_a_disk_that_cannot_be_measured_has_no_ceiling_and_what_is_measured_is_kept(monkeypatch, tmp_path):
    def refused(path, **options):
        raise InputError("not writable")

    disk = types.SimpleNamespace(key="mine")
    kept, saved = replace(measured_profile(), disks=()), []
    monkeypatch.setattr(environment, "load_profile", lambda: kept)
    monkeypatch.setattr(environment, "save_profile", saved.append)
    monkeypatch.setattr(environment, "measure_disk", refused)
    ceilings = environment.ceilings_of(tmp_path, "cpu", Settings(), progress=False)
    assert ceilings.disk_bytes_per_s is None and "not writable" in ceilings.doubts[0] and not saved
    assert any("busy machine" in doubt for doubt in ceilings.doubts)
    monkeypatch.setattr(environment, "measure_disk", lambda path, progress: disk)
    monkeypatch.setattr(Profile, "best_disk_bytes_per_s", lambda self, path: 7.0 if self.disks else None)
    assert environment.ceilings_of(tmp_path, "cpu", Settings(), progress=False).disk_bytes_per_s == 7.0
    assert saved[0].disks == (disk,)


def measured_profile() -> Profile:
    busy = replace(facts(), load_average=1000.0)
    return Profile("machine", 0.0, busy, DramRates(1, 1, 1e10, 1e10), (), ())


def test_a_weight_of_another_type_is_found_wherever_it_lies(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "mixed.gguf", "qwen3moe")
    writer.add_block_count(1)
    writer.add_expert_count(2)
    kinds = gguf.GGMLQuantizationType
    values = numpy.ones((8, 32), numpy.float32)
    for name, kind in (
        ("token_embd.weight", kinds.BF16),
        ("blk.0.attn_q.weight", kinds.Q8_0),
        ("blk.0.ffn_gate_inp.weight", None),
    ):
        data = values if kind is None else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFile.read(tmp_path / "mixed.gguf", "bfloat16")
    assert (found.precision, found.blocks, found.experts, found.vocabulary) == ("q8_0", 1, 2, 8)


def test_clean_deletes_what_was_generated_and_nothing_else(cache, tmp_path, capsys):
    generate(tmp_path, GeneratedModel("tiny", 2, seed=3))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").touch()
    (tmp_path / "mine.gguf").touch()
    leftovers = ("tiny-4-layers-skew-0.5-seed-1.q4_0.gguf", "tiny-4-layers-skew-0-seed--1.gguf.partial", "offload-999999999")
    leftovers += ("tiny-4-layers-skew-0-seed-1.store", "tiny-2-layers-mtp-skew-0-seed-0", "tiny-2-layers-skew-0-seed-0.q4_k.gguf")
    leftovers += ("tiny-2-layers-mtp-skew-0-seed-0.iq4_nl.gguf",)
    for name in leftovers:
        (tmp_path / name).touch() if "gguf" in name else (tmp_path / name).mkdir()
    (tmp_path / f"offload-{os.getpid()}").mkdir()
    assert cli.main(["bench", "--clean", "--folder", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["deleted"]) == 1 + len(leftovers) and said["bytes"] > 10**6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine.gguf", f"offload-{os.getpid()}"]


# ------------------------------------------------------------------ prompts and contestants
def test_random_ids_are_seeded_and_never_special():
    config = geometry_config("tiny", 2)
    ids = random_ids(config, 5000, 1)
    assert ids == random_ids(config, 5000, 1) != random_ids(config, 5000, 2)
    assert not {config.image_token_id, config.video_token_id, config.vision_start_token_id} & set(ids)
    assert max(ids) < config.get_text_config().vocab_size


@pytest.mark.parametrize("picture", [(64, 64), (100, 30), (1, 1), None])
def test_a_picture_makes_the_tokens_that_were_counted(picture):
    config = geometry_config("tiny", 2)
    with torch.device("meta"):
        model = model_class_of("tiny")(config)
    inputs = model_inputs(model, (7, 8, 9), picture)
    assert inputs["input_ids"].shape == (1, 3 + picture_tokens(config, picture))
    if picture:
        visual = int((inputs["input_ids"] == config.image_token_id).sum())
        assert visual == inputs["image_grid_thw"].prod() // 4 == inputs["pixel_values"].shape[0] // 4


def test_a_picture_for_a_model_that_sees_none_is_refused():
    with pytest.raises(InputError, match="cannot see pictures"):
        picture_tokens(geometry_config("qwen3-30b-a3b", 1), (64, 64))


def test_somebodys_own_model_is_not_converted_without_being_asked(tmp_path):
    (tmp_path / "model.safetensors").touch()
    subject = types.SimpleNamespace(name=str(tmp_path), dtype="bfloat16", random_weights=None)
    with pytest.raises(ConfigError, match="--gguf FILE, in bfloat16"):
        gguf_of(subject)


def test_llama_cpp_is_given_the_same_weights_and_finds_the_same_tokens(tmp_path, monkeypatch):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is built from source, by hand")
    pytest.importorskip("gguf")
    from vismoe.bench.checkpoint import write_checkpoint

    shape = dict(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_experts=12, num_experts_per_tok=2, head_dim=16
    )
    shape |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512, norm_topk_prob=True)
    config = T.Qwen3MoeConfig(**shape, max_position_embeddings=512, tie_word_embeddings=False)
    written = write_checkpoint(config, T.Qwen3MoeForCausalLM, tmp_path / "model", progress=False)
    subject = subject_of(str(written.folder), None, None)
    file = gguf_of(subject)
    written_s = file.stat().st_mtime_ns
    assert gguf_of(subject).stat().st_mtime_ns == written_s
    found = GgufFile.read(file, "bfloat16")
    assert found == GgufFile("bfloat16", found.tensor_bytes, 2, 12, 512) and found.difference(subject) is None
    for other in (dict(blocks=3), dict(experts=13), dict(vocabulary=511), dict(tensor_bytes=int(1.05 * found.tensor_bytes))):
        assert replace(found, **other).difference(subject)
    assert GgufFile.read(file, "float16").precision == "bfloat16"
    job = Job("llama.cpp-mmap", subject.name, "bfloat16", "cpu", random_ids(config, 20, 0), 6, 1, 1, 0, gguf=str(file))
    answers = [load(job) for load in llama_runner.LOADERS.values()] + [contestants.LOADERS["transformers-eager"](job)]
    assert answers[0].notes | dict(n_batch=20, n_ubatch=20, flash_attn=True, n_threads=1, kv_type="f16") == answers[0].notes
    cold = [runner.request(COLD) for runner in answers]
    assert len({request.token_ids for request in cold}) == 1 and cold[0].decode_tokens == 5
    assert answers[0].request(WARM).token_ids == cold[0].token_ids  # nothing is left of the request before


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "no.gguf").write_bytes(b"not a model" * 10)
    with pytest.raises(InputError, match="is not a readable GGUF file"):
        GgufFile.read(tmp_path / "no.gguf", "bfloat16")
