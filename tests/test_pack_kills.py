"""A pack that is killed at any moment: nothing that opens reads wrong, and the same command ends in the same bytes.

The victim is a fork of the test process. Deaths are placed before every fifth step that changes the disk (writes are torn; with
HYPOTHESIS_PROFILE=searching before every one), with and without losing what was not synced, and at random moments by the clock.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from searching import SEARCHING
from small_checkpoints import Small, files_in, slab_for, small

from vismoe.store import unfinished
from vismoe.store.pack import pack, verify
from vismoe.store.packed import PackedStore, formats_in
from vismoe.store.unfinished import journal_path
from vismoe.types import Format

STEPS = ("open", "pwrite", "write", "fsync", "replace", "ftruncate", "truncate", "unlink")
WRITING = os.O_WRONLY | os.O_RDWR


@pytest.fixture(scope="module", params=[Format.RAW, Format.LOSSLESS])
def format(request) -> Format:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Small:
    return small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def undisturbed(checkpoint, format, tmp_path_factory) -> dict[str, bytes]:
    """The files of a pack that nobody killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(unfinished, "SHARD_BYTES", SHARD_BYTES)
        pack(checkpoint.source, folder, checkpoint.contents(format))
    return files_in(folder)


SHARD_BYTES = 90 * 1024
EVERY = 1 if SEARCHING else 5  # so many steps apart; without and with losing what was not synced before different ones


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Several shards, and a sync after every record that is not among the smallest."""
    monkeypatch.setattr(unfinished, "SHARD_BYTES", SHARD_BYTES)
    monkeypatch.setattr(unfinished, "SYNC_BYTES", 15 * 1024)


class Death:
    """Ends this process before its `step`-th change of the disk; that change is made by half if it is a write."""

    def __init__(self, step: int, loses_unsynced: bool):
        self.left, self.loses_unsynced = step, loses_unsynced
        self.unsynced: dict[int, int] = {}  # descriptor -> the file's bytes when it was last synced
        self.real = {name: getattr(os, name) for name in STEPS}

    def lurk(self) -> None:
        for name in STEPS:
            setattr(os, name, lambda *arguments, name=name, **named: self.act(name, *arguments, **named))

    def act(self, name: str, *arguments, **named):
        if name == "open" and not arguments[1] & WRITING:
            return self.real["open"](*arguments, **named)
        if name in ("pwrite", "write"):
            self.unsynced.setdefault(arguments[0], os.fstat(arguments[0]).st_size)
        if self.left == 0:
            if name in ("pwrite", "write"):
                self.real[name](arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
            if self.loses_unsynced:
                for descriptor, size in self.unsynced.items():
                    self.real["ftruncate"](descriptor, size)
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        result = self.real[name](*arguments, **named)
        if name == "fsync":
            self.unsynced.pop(arguments[0], None)
        return result


def packed_by_child(
    checkpoint: Small, folder: Path, format: Format, death: Death | None = None, dies_after_s: float = 60.0
) -> bool:
    """Whether a child got through its pack."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            if death:
                death.lurk()
            pack(checkpoint.source, folder, checkpoint.contents(format), workers=2)
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + dies_after_s
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
        time.sleep(0.0005)
    assert ended[1] in (0, signal.SIGKILL), ended
    return ended[1] == 0


def assert_never_wrong(checkpoint: Small, folder: Path, format: Format) -> None:
    """What can be opened is complete and reads as it should."""
    assert formats_in(folder) in ((), (format,))
    if formats_in(folder):
        store: PackedStore = checkpoint.open(folder, format)
        assert verify(store) == []
        for expert, weights in checkpoint.weights.items():
            slab = slab_for(store, expert.layer)
            store.read(expert, slab)
            views = store.inventory.layout(expert.layer).views(slab)
            assert all(torch.equal(views[name], value) for name, value in weights.items())


def named_in_journal(folder: Path, format: Format) -> int:
    """Records on whole lines behind the first."""
    path = journal_path(folder, format)
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


@pytest.mark.budget(4)
@pytest.mark.parametrize("loses_unsynced", [False, True], ids=["killed", "power lost"])
def test_death_before_every_step_costs_only_what_was_not_synced(checkpoint, format, undisturbed, tmp_path, loses_unsynced):
    for step in range(loses_unsynced, 1000, EVERY):
        folder = tmp_path / str(step)
        done = packed_by_child(checkpoint, folder, format, Death(step, loses_unsynced))
        if folder.exists():
            assert_never_wrong(checkpoint, folder, format)
        safe = named_in_journal(folder, format) if formats_in(folder) == () else len(checkpoint.weights)
        assert pack(checkpoint.source, folder, checkpoint.contents(format)).resumed_records == safe
        assert files_in(folder) == undisturbed, step
        if done:
            break
    assert step > 50


@pytest.mark.parametrize("seed", range(10 if SEARCHING else 4))
def test_one_death_after_another_ends_in_the_same_bytes(checkpoint, format, undisturbed, tmp_path, seed):
    chance = random.Random(seed)
    for _ in range(200):
        if packed_by_child(checkpoint, tmp_path, format, Death(chance.randrange(30), chance.random() < 0.5)):
            break
        assert_never_wrong(checkpoint, tmp_path, format)
    assert files_in(tmp_path) == undisturbed


def test_death_by_the_clock(checkpoint, format, undisturbed, tmp_path):
    began_s = time.monotonic()
    assert packed_by_child(checkpoint, tmp_path / "timed", format)
    takes_s = time.monotonic() - began_s
    chance, deaths = random.Random(0), 0
    for attempt in range(30 if SEARCHING else 10):
        folder = tmp_path / str(attempt)
        began_s = time.monotonic()
        whole = packed_by_child(checkpoint, folder, format, dies_after_s=chance.uniform(0, takes_s))
        if whole:  # it takes less time than when that was measured
            takes_s = min(takes_s, time.monotonic() - began_s)
        deaths += not whole
        if folder.exists():
            assert_never_wrong(checkpoint, folder, format)
        pack(checkpoint.source, folder, checkpoint.contents(format))
        assert files_in(folder) == undisturbed
    assert deaths > 0


@pytest.mark.parametrize("damage", ["zeroed", "shortened", "gone"])
def test_a_journal_that_promises_what_is_not_there_is_not_believed(checkpoint, format, undisturbed, tmp_path, damage):
    assert not packed_by_child(checkpoint, tmp_path, format, Death(30, loses_unsynced=False))
    (shard, *_) = sorted(tmp_path.glob("*.bin.partial"))
    if damage == "gone":
        shard.unlink()
    else:
        os.truncate(shard, 5000)
        if damage == "zeroed":
            os.truncate(shard, 200_000)
    pack(checkpoint.source, tmp_path, checkpoint.contents(format))
    assert files_in(tmp_path) == undisturbed


@pytest.mark.parametrize("tail", [b"[0, 0", b"[9, 4096, 4096, 1]\n", b"\0" * 40, b"null\n", b"[0.0, 0, 4096, 1]\n"])
def test_tails_that_make_no_sense_are_cut(checkpoint, format, undisturbed, tmp_path, tail):
    assert not packed_by_child(checkpoint, tmp_path, format, Death(30, loses_unsynced=False))
    with open(journal_path(tmp_path, format), "ab") as journal:
        journal.write(tail)
    with open(max(tmp_path.glob("*.bin.partial")), "ab") as shard:
        shard.write(b"what was never named" * 10_000)
    pack(checkpoint.source, tmp_path, checkpoint.contents(format))
    assert files_in(tmp_path) == undisturbed
