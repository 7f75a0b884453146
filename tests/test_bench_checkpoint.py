"""Checkpoints for benchmarks: layout against save_pretrained, routing against sampling from Zipf, and what happens on failure."""

import copy
import hashlib
import itertools
import json
import math
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers as T
from hypothesis import given
from hypothesis import strategies as st
from small_geometries import small_config

from vismoe.bench import checkpoint, weights
from vismoe.bench.checkpoint import MANIFEST, write_checkpoint
from vismoe.bench.geometry import GEOMETRIES, geometry_config, model_class_of
from vismoe.bench.weights import Noise, WeightRecipe, weights_of
from vismoe.errors import ConfigError
from vismoe.models.family.families import expert_modules, expert_parameters
from vismoe.store.safetensors_header import read_header

TINY = model_class_of("tiny")
ROUTED = T.Qwen3MoeConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
)


def write_tiny(folder: Path, **options) -> checkpoint.Written:
    return write_checkpoint(geometry_config("tiny", 2), TINY, folder, progress=False, **options)


def hashes(folder: Path) -> dict[str, str]:
    """By tensor."""
    found = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        for name, entry in read_header(path).tensors.items():
            found[name] = hashlib.sha256(data[entry.offset_bytes : entry.offset_bytes + entry.nbytes]).hexdigest()
    return found


def small_model(name: str) -> T.PreTrainedModel:
    return model_class_of(name)(small_config(name))


def models() -> dict[str, Callable[[], T.PreTrainedModel]]:
    """Every family of the table, and three that store tied embeddings, Mamba layers, or experts for text and vision together."""
    small = {name: partial(small_model, name) for name in GEOMETRIES}
    return small | {name: partial(tiny_models.build, name) for name in ("diffusion_gemma", "jamba", "ernie4_5_vl_moe")}


@pytest.mark.parametrize("name", models())
def test_tensors_have_the_names_and_shapes_that_save_pretrained_gives_them(name, tmp_path):
    model = models()[name]()
    model.save_pretrained(tmp_path)
    saved = {name: entry.shape for file in tmp_path.glob("*.safetensors") for name, entry in read_header(file).tensors.items()}
    made = weights_of(model.config, type(model), skew=0.0, seed=0)
    assert {name: recipe.shape for name, recipe in made.recipes.items()} == saved
    experts = {p.data_ptr(): p.numel() for _, module in expert_modules(model) for p in expert_parameters(module).values()}
    assert made.expert_bytes == 2 * sum(experts.values())


def test_it_loads_without_a_missing_tensor_and_gives_sane_logits(tmp_path):
    written = write_tiny(tmp_path / "a", skew=1.0, shard_bytes=2**22)
    assert len(list(written.folder.glob("*.safetensors"))) > 3
    model, report = TINY.from_pretrained(written.folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    logits = model(input_ids=torch.arange(5, 45)[None]).logits
    assert 0.5 < logits.float().std() < 2


def test_the_same_arguments_make_the_same_bytes_and_others_do_not(tmp_path):
    first, again, other, skewed = (
        hashes(write_tiny(tmp_path / name, **options).folder)
        for name, options in (("a", {}), ("b", {}), ("c", {"seed": 1}), ("d", {"skew": 1.0}))
    )
    assert first == again
    assert all(other[name] != digest for name, digest in first.items() if ".experts." in name or "mlp.gate" in name)
    assert {name for name in first if skewed[name] != first[name]} >= {name for name in first if "mlp.gate" in name}


def test_no_two_experts_are_equal(tmp_path):
    written = write_tiny(tmp_path / "a")
    model = TINY.from_pretrained(written.folder)
    rows = [row for _, module in expert_modules(model) for tensor in module.parameters() for row in tensor]
    assert len({row.float().sum().item() for row in rows}) == len(rows)


def test_an_equal_checkpoint_is_used_again_and_another_one_is_not_overwritten(tmp_path):
    written = write_tiny(tmp_path / "a", skew=0.5)
    before = (written.folder / MANIFEST).stat().st_mtime_ns
    again = write_tiny(tmp_path / "a", skew=0.5)
    assert again.reused and not written.reused
    assert (again.total_bytes, again.expert_bytes) == (written.total_bytes, written.expert_bytes)
    assert (written.folder / MANIFEST).stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="holds other files"):
        write_tiny(tmp_path / "a", skew=1.0)
    next(written.folder.glob("*.safetensors")).open("ab").write(b"x")
    with pytest.raises(ConfigError, match="holds other files"):
        write_tiny(tmp_path / "a", skew=0.5)


def test_an_interrupted_write_leaves_nothing_and_the_next_one_works(tmp_path, monkeypatch):
    pieces = Noise.pieces

    def failing(self, name, recipe):
        if "layers.1" in name:
            raise OSError("no space left on device")
        return pieces(self, name, recipe)

    monkeypatch.setattr(Noise, "pieces", failing)
    with pytest.raises(OSError, match="no space"):
        write_tiny(tmp_path / "a")
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    (tmp_path / "a.partial").mkdir()  # a run that was killed
    (tmp_path / "a.partial" / "model-00001-of-00001.safetensors").write_bytes(b"half")
    assert not write_tiny(tmp_path / "a").reused
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_refused_with_the_numbers_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    with pytest.raises(ConfigError, match=r"1000 B free.*Fix: fewer layers"):
        write_tiny(tmp_path / "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("skew", [-1.0, math.nan, math.inf])
def test_a_skew_that_cannot_be_is_refused(tmp_path, skew):
    with pytest.raises(ConfigError, match="Zipf's exponent"):
        write_tiny(tmp_path / "a", skew=skew)


@given(rows=st.integers(1, 20), width=st.integers(1, 30), piece=st.integers(1, 40), block=st.integers(1, 60))
def test_a_column_is_replaced_and_everything_else_is_noise_wherever_pieces_end(rows, width, piece, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "PIECE_VALUES", piece)
        patch.setattr(weights, "BLOCK_VALUES", block)
        noise = Noise(0)
        column = torch.arange(100, 100 + rows)
        plain = torch.cat(list(noise.pieces("x", WeightRecipe((rows, width), 1.0)))).view(rows, width)
        marked = torch.cat(list(noise.pieces("x", WeightRecipe((rows, width), 1.0, column)))).view(rows, width)
    assert torch.equal(marked[:, 0], column.bfloat16())
    assert torch.equal(marked[:, 1:], plain[:, 1:])


class Routing:
    """Which experts the tokens of a forward pass used, by layer."""

    def __init__(self, folder: Path):
        self.model = T.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.chosen: list[list[torch.Tensor]] = []
        for _, module in expert_modules(self.model):
            self.chosen.append([])
            module.register_forward_pre_hook(lambda _, args, seen=self.chosen[-1]: seen.append(args[1]))

    def hottest_quarter(self, tokens: int = 1024) -> list[float]:
        """Share of the load on the quarter of the experts that are chosen most, by layer."""
        ids = torch.randint(5, 4000, (1, tokens), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            self.model(input_ids=ids)
        return [_hottest_quarter(seen.pop().flatten()) for seen in self.chosen]


def _hottest_quarter(chosen: torch.Tensor) -> float:
    load = torch.bincount(chosen, minlength=ROUTED.num_experts).sort(descending=True).values
    return float(load[: len(load) // 4].sum() / load.sum())


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 1.5])
def test_the_load_of_experts_is_that_of_draws_from_zipf(tmp_path, skew):
    written = write_checkpoint(ROUTED, T.Qwen3MoeForCausalLM, tmp_path / "a", skew=skew, progress=False)
    ranks = torch.arange(1, ROUTED.num_experts + 1).float()
    gumbel = torch.distributions.Gumbel(0, 1).sample((10_000, ROUTED.num_experts))
    drawn = _hottest_quarter((gumbel - skew * ranks.log()).topk(ROUTED.num_experts_per_tok).indices.flatten())
    for share in Routing(written.folder).hottest_quarter():
        assert abs(share - drawn) < 0.1
        assert skew or share < 0.35


def test_uniform_routing_uses_most_experts_within_64_steps_of_greedy_decoding(tmp_path):
    written = write_checkpoint(ROUTED, T.Qwen3MoeForCausalLM, tmp_path / "a", progress=False)
    routing = Routing(written.folder)
    ids = torch.randint(5, 4000, (1, 16), generator=torch.Generator().manual_seed(0))
    routing.model.generate(input_ids=ids, max_new_tokens=65, min_new_tokens=65, do_sample=False)
    for seen in routing.chosen:
        steps = torch.cat(seen[1:])
        assert len(steps) == 64
        assert len(steps.unique()) > 0.6 * ROUTED.num_experts
        repeated = [torch.isin(now, before).float().mean() for before, now in itertools.pairwise(steps)]
        assert sum(repeated) / len(repeated) < 0.2  # chance is 8 of 128


def test_hot_experts_differ_from_layer_to_layer(tmp_path):
    made = weights_of(copy.deepcopy(ROUTED), T.Qwen3MoeForCausalLM, skew=1.0, seed=0)
    columns = [recipe.column for name, recipe in made.recipes.items() if name.endswith("mlp.gate.weight")]
    assert len({int(column.argmax()) for column in columns}) > 1


MEASURE = """
import importlib.util, json, sys
from pathlib import Path
from vismoe.bench.checkpoint import write_checkpoint
from vismoe.bench.geometry import GEOMETRIES, geometry_config, model_class_of
from vismoe.bench.gguf import write_gguf

def status(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

def growth(work):
    baseline = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    work()
    return status("VmHWM") - baseline

config, cls, folder = geometry_config("tiny", 4), model_class_of("tiny"), Path(sys.argv[1])
both = importlib.util.find_spec("gguf") is not None
def convert(checkpoint):
    for experts in ("bf16", "q4_0"):
        write_gguf(folder / checkpoint, folder / f"{checkpoint}.{experts}.gguf", experts=experts, progress=False)

write_checkpoint(config, cls, folder / "warm", progress=False)
if both:
    convert("warm")
config.text_config.moe_intermediate_size = 640
grown = {"checkpoint": growth(lambda: write_checkpoint(config, cls, folder / "large", progress=False, skew=1.0))}
if both:
    grown["gguf"] = growth(lambda: convert("large"))
print(json.dumps(grown))
"""


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> dict[str, int]:
    """By how many bytes a process grew at most while it wrote a checkpoint of more than 130 MB, and GGUF files of it."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("resident size is read from Linux's /proc")
    folder = tmp_path_factory.mktemp("large")
    command = [sys.executable, "-c", MEASURE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(path.stat().st_size for path in (folder / "large").glob("*.safetensors")) > 130e6
    assert "gguf" not in found or (folder / "large.bf16.gguf").stat().st_size > 130e6
    shutil.rmtree(folder)
    return found


def test_memory_does_not_grow_with_the_checkpoint(grown):
    assert grown["checkpoint"] < 64 * 2**20


def test_memory_of_writing_gguf_does_not_grow_with_the_checkpoint(grown):
    pytest.importorskip("gguf")
    assert grown["gguf"] < 64 * 2**20
