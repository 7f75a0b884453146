"""Files that change while a model is served from them: every answer is right, or an error that names the file.

Random sequences of damage and repair, with dates set back and between any two reads, against experts read in place, packed, and
embeddings on disk. Oracle: transformers' eager experts from the undamaged checkpoint. HYPOTHESIS_PROFILE=searching tries more.
"""

import os
import random
import re
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from searching import SEARCHING

import vismoe
from vismoe import VisMoEConfig
from vismoe.cli import main as cli
from vismoe.errors import CheckpointError, TransferError
from vismoe.store.files import CheckpointFiles
from vismoe.store.packed import STORE_FOLDER
from vismoe.store.safetensors_header import read_header

EXAMPLES = 150 if SEARCHING else 7
CHANGES = (
    "overwrite",
    "overwrite all",
    "set date back",
    "truncate",
    "append",
    "restore",
    "replace",
    "change mode",
    "while reading",
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """A checkpoint, and a store with its experts; never changed."""
    folder = tmp_path_factory.mktemp("pristine") / "model"
    tiny_models.save("qwen3_moe", folder, max_shard_size="100KB")
    assert cli.main(["pack", str(folder), "--formats", "raw"]) == 0
    return folder


@pytest.fixture(scope="module")
def reference(pristine):
    return tiny_models.reference(pristine)


class Files:
    """Copies of the checkpoint's files and what is done to them."""

    def __init__(self, pristine: Path, folder: Path, packed: bool, seed: int):
        shutil.copytree(pristine, folder)
        self.folder, self._pristine, self._rng = folder, pristine, random.Random(seed)
        where = folder / STORE_FOLDER if packed else folder
        self.paths = sorted(where.glob("*.bin" if packed else "*.safetensors"))
        assert len(self.paths) > 1 or packed

    def original(self, path: Path) -> Path:
        return self._pristine / path.relative_to(self.folder)

    def change(self, path: Path, what: str) -> None:
        size, original = path.stat().st_size, self.original(path)
        if what == "overwrite" and size:
            with path.open("r+b") as file:
                file.seek(self._rng.randrange(size))
                file.write(self._rng.randbytes(self._rng.choice([1, 100, 5000])))
        elif what == "overwrite all":
            with path.open("r+b") as file:
                file.write(self._rng.randbytes(original.stat().st_size))
        elif what == "set date back":
            os.utime(path, ns=(original.stat().st_atime_ns, original.stat().st_mtime_ns))
        elif what == "truncate":
            os.truncate(path, self._rng.randrange(size + 1))
        elif what == "append":
            with path.open("ab") as file:
                file.write(self._rng.randbytes(64))
        elif what == "restore":
            with path.open("r+b") as file:
                file.write(original.read_bytes())
                file.truncate()
            self.change(path, "set date back")
        elif what == "replace":
            other = path.with_suffix(".other")
            other.write_bytes(self._rng.randbytes(size))
            other.replace(path)
            self.change(path, "set date back")
        elif what == "change mode":
            path.chmod(0o600 if path.stat().st_mode & 0o044 else 0o644)


def load(folder: Path, packed: bool, reads: str = "auto"):
    config = VisMoEConfig(memory="25%", embeddings="disk", store=None if packed else "none", reads=reads)
    return tiny_models.model_class(folder).from_pretrained(folder, dtype=torch.float32, quantization_config=config)


changes = st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 99), st.booleans()), min_size=1, max_size=6)


@pytest.mark.parametrize("packed", [False, True], ids=["in place", "packed"])
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(changes=changes, seed=st.integers(0, 2**32))
@torch.inference_mode()
def test_answers_are_right_or_errors_that_name_the_file(pristine, reference, tmp_path_factory, packed, changes, seed):
    files = Files(pristine, tmp_path_factory.mktemp("served") / "model", packed, seed)
    rng, model, touched = random.Random(seed), load(files.folder, packed), set[Path]()
    for what, which, ask in changes:
        path = files.paths[which % len(files.paths)]
        touched.add(path)
        with pytest.MonkeyPatch.context() as patch:
            if what == "while reading":
                strike_before_a_read(patch, rng.randrange(4), lambda path=path: files.change(path, "overwrite all"))
            else:
                files.change(path, what)
            for _ in range(3 if ask else 1):
                ids = torch.tensor([[rng.randrange(5, 490) for _ in range(5)]])
                try:
                    logits = model(ids).logits
                except (CheckpointError, TransferError) as error:
                    assert any(str(path) in str(error) for path in touched) and "Fix: " in str(error), error
                else:
                    assert torch.equal(logits, reference(ids).logits), (what, path)
    vismoe.runtime_of(model).pager.check_integrity()
    vismoe.runtime_of(model).close()
    for path in touched:
        files.change(path, "restore")
    again = load(files.folder, packed)
    assert torch.equal(again(ids).logits, reference(ids).logits)
    vismoe.runtime_of(again).close()
    shutil.rmtree(files.folder)


def strike_before_a_read(patch: pytest.MonkeyPatch, number: int, change) -> None:
    """The file changes after everything was looked at before a read, and before its bytes come."""
    preadv, left = os.preadv, [number]

    def late(*arguments):
        left[0] -= 1
        if left[0] == -1:
            change()
        return preadv(*arguments)

    patch.setattr(os, "preadv", late)


@torch.inference_mode()
def test_what_lies_in_memory_from_before_a_change_goes_on_serving(pristine, reference, tmp_path):
    """It is what the file held when it was opened; nothing that is read afterwards comes beside it."""
    files = Files(pristine, tmp_path / "model", packed=False, seed=1)
    config = VisMoEConfig(memory="100%", embeddings="memory", store="none")
    model = tiny_models.model_class(files.folder).from_pretrained(files.folder, quantization_config=config)
    ids = torch.arange(5, 485)[None]
    assert torch.equal(model(ids).logits, reference(ids).logits)
    there = vismoe.runtime_of(model).pager.residency()
    for path in files.paths:
        files.change(path, "overwrite all")
    few = ids[:, :4]
    assert torch.equal(model(few).logits, reference(few).logits)
    assert (vismoe.runtime_of(model).pager.residency() == there).all()


@pytest.mark.parametrize(("reads", "said"), [("cached", "while it was being loaded"), ("direct", "since it was opened: .*")])
def test_a_checkpoint_that_changes_while_it_is_loaded_is_refused(pristine, tmp_path, monkeypatch, reads, said):
    from vismoe.models.load import quantizer as loading

    files = Files(pristine, tmp_path / "model", packed=False, seed=1)
    strip = loading.strip_experts

    def late(model):
        strip(model)
        with files.paths[0].open("r+b") as file:  # the header stays: weights are read all the same
            file.seek(-8, os.SEEK_END)
            file.write(b"otherone")

    monkeypatch.setattr(loading, "strip_experts", late)
    with pytest.raises(CheckpointError, match=rf"{files.folder}/model-00001.* changed {said}\.? Fix: load the model again"):
        load(files.folder, packed=False, reads=reads)


@pytest.mark.parametrize("when", ["before it is opened", "before it is opened a second time"])
def test_a_file_is_the_one_that_was_examined(pristine, tmp_path, when):
    files = Files(pristine, tmp_path / "model", packed=False, seed=1)
    path = files.paths[0]
    header = read_header(path)
    if when == "before it is opened":
        files.change(path, "replace")
        with pytest.raises(
            CheckpointError, match=rf"{re.escape(str(path))} has changed since it was opened: another file is in its"
        ):
            CheckpointFiles([header])
    else:
        opened = CheckpointFiles([header])
        files.change(path, "replace")
        with pytest.raises(CheckpointError, match="another file is in its place"):
            opened.read_past_cache(4096)


def test_a_folder_that_is_renamed_is_served_on(pristine, tmp_path):
    files = Files(pristine, tmp_path / "model", packed=False, seed=1)
    model = load(files.folder, packed=False)
    ids = torch.arange(5, 9)[None]
    files.folder.rename(tmp_path / "moved")
    assert model(ids).logits.isfinite().all()
