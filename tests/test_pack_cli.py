"""`vismoe pack` on tiny checkpoints: what it prints, where it writes, exit codes, Ctrl-C, and what it refuses."""

import glob
import json
import os
import re
import shlex
import signal

import pytest
import tiny_models
import torch

from vismoe.cli import main as cli
from vismoe.store import unfinished
from vismoe.store.index import index_path
from vismoe.store.packed import STORE_FOLDER, formats_in
from vismoe.types import Format


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_models.save("qwen3_moe", tmp_path_factory.mktemp("bfloat16"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    return tiny_models.save("qwen3_moe", tmp_path_factory.mktemp("float32"))


def run(*arguments) -> int:
    return cli.main(["pack", *map(str, arguments)])


def result(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def test_the_default_keeps_every_bit_and_goes_beside_the_checkpoint(model, wide_model, capsys):
    for folder, format in ((model, "lossless"), (wide_model, "raw")):
        assert run(folder) == 0
        printed = capsys.readouterr()
        assert f"{format}: packed, " in printed.out and " of memory" in printed.err
        assert formats_in(folder / STORE_FOLDER) == (Format(format),)
        assert run(folder) == 0
        assert f"{format}: was complete" in capsys.readouterr().out
        assert run("--verify", folder) == 0
        assert f"{format}: all 36 records are intact" in capsys.readouterr().out


def test_formats_and_folder_are_as_asked_and_json_has_the_figures(model, tmp_path, capsys):
    assert run(model, "--formats", "int4,raw,int4", "--out", tmp_path / "store", "--json") == 0
    report = result(capsys)
    assert report["folder"] == str(tmp_path / "store")
    assert [row["format"] for row in report["formats"]] == ["int4", "raw"]
    assert all(row["records"] == 36 and row["resumed_records"] == 0 for row in report["formats"])
    assert all(row["stored_bytes"] > 0 and row["memory_bound_bytes"] > 0 for row in report["formats"])
    assert run("--verify", tmp_path / "store", "--json") == 0
    assert [row["records"] for row in result(capsys)["formats"]] == [36, 36]


def test_lossless_is_refused_for_other_types_with_the_fix(wide_model, tmp_path, capsys):
    assert run(wide_model, "--formats", "lossless", "--out", tmp_path / "store") == 2
    assert "packs bfloat16 weights, and these experts are float32. Fix: use format raw" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_verify_lists_bad_records_and_says_what_to_do(model, tmp_path, capsys):
    store = tmp_path / "a store"
    run(model, "--formats", "int8", "--out", store)
    shard = store / "experts.int8.00001.bin"
    data = bytearray(shard.read_bytes())
    for record in json.loads(index_path(store, Format.INT8).read_text())["records"][3:5]:
        data[record[1] + 5] ^= 1
    shard.write_bytes(data)
    capsys.readouterr()
    assert run("--verify", store) == 2
    message = capsys.readouterr().err
    assert "2 of 36 int8 records" in message and "expert 3 of MoE layer 0" in message and "expert 4 of MoE layer 0" in message
    assert follow(message, model) == 0 == run("--verify", store)


def follow(message: str, model) -> int:
    """Does what the last line of a message says, to the letter; the exit code."""
    pattern, command = re.fullmatch("Fix: delete (.*) and run vismoe (.*)", message.splitlines()[-1]).groups()
    found = glob.glob(pattern)
    assert found
    for path in found:
        os.unlink(path)
    return cli.main([word.replace("MODEL", str(model)) for word in shlex.split(command)])


def test_verify_goes_on_behind_a_bad_format(model, tmp_path, capsys):
    run(model, "--formats", "raw,lossless,int8", "--out", tmp_path)
    flip(tmp_path / "experts.raw.00001.bin")
    os.truncate(tmp_path / "experts.lossless.00001.bin", 100)
    capsys.readouterr()
    assert run("--verify", tmp_path) == 2
    printed = capsys.readouterr()
    assert "1 of 36 raw records" in printed.err and "experts.lossless.00001.bin has 100 bytes" in printed.err
    assert "int8: all 36 records are intact" in printed.out and "raw: all" not in printed.out


def flip(shard) -> None:
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)


def test_verify_of_a_model_refuses_the_store_of_another_and_of_a_store_asks_nobody(model, wide_model, tmp_path, capsys):
    run(model, "--formats", "raw,int8", "--out", tmp_path)
    assert run("--verify", model, "--out", tmp_path) == 0 == run("--verify", tmp_path)
    capsys.readouterr()
    assert run("--verify", wide_model, "--out", tmp_path) == 2
    message = capsys.readouterr().err
    assert "experts.raw.json was packed from another checkpoint" in message
    assert "experts.int8.json was packed from another checkpoint" in message


def test_bad_records_as_json_are_one_object(model, tmp_path, capsys):
    run(model, "--formats", "int8", "--out", tmp_path)
    flip(tmp_path / "experts.int8.00001.bin")
    capsys.readouterr()
    assert run("--verify", tmp_path, "--json") == 2
    assert result(capsys)["error"]["type"] == "CheckpointError"


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_says_that_the_same_command_goes_on_and_it_does(model, tmp_path, capsys, monkeypatch, as_json):
    monkeypatch.setattr(unfinished, "SYNC_BYTES", 1)
    append, appended = unfinished.UnfinishedFormat.append, []

    def pressed(self, encoded):
        append(self, encoded)
        appended.append(len(encoded))
        if len(appended) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(unfinished.UnfinishedFormat, "append", pressed)
    command = [model, "--out", tmp_path, *(["--json"] if as_json else [])]
    assert run(*command) == 130
    printed = capsys.readouterr()
    assert "interrupted: what is packed so far is kept, and the same command continues from there" in printed.err
    assert not as_json or json.loads(printed.out)["error"]["type"] == "Interrupted"
    assert formats_in(tmp_path) == ()
    assert run(*command) == 0
    assert len(appended) == 36  # each expert once
    assert run("--verify", tmp_path) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "int5"], "no such format: int5; choose among raw, lossless, int8, int4, int2"),
        (["--verify", "/nowhere/at/all"], "neither a folder here nor a model"),
        (["--verify", "."], "has no complete store. Fix: vismoe pack MODEL"),
        (["one", "two"], "one model at a time"),
    ],
)
def test_what_cannot_be_is_one_message(arguments, message, capsys):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_the_help_states_the_memory(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    assert "memory: five times the largest expert and 16 MiB for each core" in capsys.readouterr().out
