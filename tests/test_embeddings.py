"""Token embeddings left on disk, or encoded: the same rows, the same logits, less memory, and a refusal where it cannot be."""

import pytest
import tiny_models
import torch
import transformers as T
from hypothesis import given
from hypothesis import strategies as st

import vismoe
from vismoe import VisMoEConfig
from vismoe.config import Settings
from vismoe.errors import CheckpointError, ConfigError
from vismoe.formats.encodings import W8
from vismoe.models.load.embeddings import EmbeddingOnDisk, Table, table_bytes
from vismoe.models.load.preview import preview
from vismoe.models.moe.linears import EncodedEmbedding
from vismoe.store.checkpoint import TensorPart
from vismoe.store.safetensors_header import read_header

TIED = "lfm2_moe"


def load(folder, dtype=torch.float32, **settings):
    config = VisMoEConfig(**({"memory": "50%"} | settings))
    return tiny_models.model_class(folder).from_pretrained(folder, dtype=dtype, quantization_config=config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as_stored", "cast"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "deepseek_v3"])
def test_logits_are_those_of_the_held_table(family, dtype, tmp_path):
    tiny_models.save(family, tmp_path)
    model = load(tmp_path, dtype, embeddings="disk")
    assert isinstance(model.get_input_embeddings(), EmbeddingOnDisk)
    assert not any("embed_tokens" in name for name, _ in model.named_parameters())
    inputs = tiny_models.prompt(family, dtype=dtype, batch=2)
    reference = tiny_models.reference(tmp_path, dtype)
    with torch.inference_mode():
        assert torch.equal(model(**inputs).logits, reference(**inputs).logits)
        options = dict(do_sample=False, max_new_tokens=5, min_new_tokens=5)
        assert torch.equal(model.generate(**inputs, **options), reference.generate(**inputs, **options))


def test_the_plan_counts_no_table_and_says_so(tmp_path):
    tiny_models.save("qwen3_moe", tmp_path)
    held, left = (vismoe.runtime_of(load(tmp_path, embeddings=where)).plan for where in ("memory", "disk"))
    table_bytes = 512 * 64 * 4
    assert held.bytes_of("embeddings") - left.bytes_of("embeddings") == table_bytes
    assert held.total_bytes - left.total_bytes == table_bytes
    assert "128.0 KiB stay on disk" in left.reading[2] and len(held.reading) == 2


def test_auto_leaves_the_table_on_disk_where_that_makes_room_for_experts_and_nowhere_else(tmp_path, monkeypatch):
    tiny_models.save("qwen3_moe", tmp_path)

    def on_disk(memory) -> bool:
        return isinstance(load(tmp_path, memory=memory).get_input_embeddings(), EmbeddingOnDisk)

    held = vismoe.runtime_of(load(tmp_path, memory="50%", embeddings="memory")).plan
    assert not on_disk(held.total_bytes), "too small to be worth it"
    monkeypatch.setattr("vismoe.models.load.reading.WORTHWHILE_TABLE_BYTES", 1)
    assert on_disk(held.total_bytes), "half of the experts fit beside it, more without it"
    assert not on_disk("50%") and not on_disk("100%"), "a share of the experts is the same with and without it"
    assert not on_disk(held.total_bytes * 2), "everything fits"
    least = vismoe.runtime_of(load(tmp_path, memory="100%")).plan.minimum_bytes
    assert on_disk(least), "only without it does anything fit"


def test_a_preview_settles_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("vismoe.models.load.reading.WORTHWHILE_TABLE_BYTES", 1)
    tiny_models.save("qwen3_moe", tmp_path)
    memory = vismoe.runtime_of(load(tmp_path, memory="50%", embeddings="memory")).plan.total_bytes
    foreseen = preview(tmp_path, Settings(memory=memory))
    loaded = vismoe.runtime_of(load(tmp_path, memory=memory)).plan
    assert foreseen.reading[2] == loaded.reading[2] and foreseen.parts == loaded.parts


def test_a_table_that_the_models_own_code_asks_for_is_held():
    with torch.device("meta"):
        config = T.Llama4TextConfig(
            num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=512
        )
        model = T.Llama4ForCausalLM(config)  # its forward reads embed_tokens.weight.device
    assert table_bytes(model) == 0


def test_a_table_that_another_weight_is_tied_to_is_held_and_asking_for_the_disk_is_an_error(tmp_path):
    model = tiny_models.build(TIED)
    assert model.config.tie_word_embeddings and table_bytes(model) == 0
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"embeddings='disk'.*tied.*Fix: embeddings='auto'"):
        load(tmp_path, embeddings="disk")


@pytest.fixture(scope="module", params=["on disk", "encoded"])
def table(request, tmp_path_factory):
    """(module, the table it reads)."""
    if request.param == "encoded":
        torch.manual_seed(0)
        parts = {"codes": torch.randint(0, 256, (512, 64), dtype=torch.uint8), "scale": torch.rand(512, 1).bfloat16()}
        empty = {name: part.to("meta") for name, part in parts.items()}
        module = EncodedEmbedding(W8, empty, torch.nn.Embedding(512, 64, device="meta"), torch.float32)
        module.fill(parts)
        return module, W8.values(parts, 64)
    folder = tiny_models.save("qwen3_moe", tmp_path_factory.mktemp("rows"))
    (file,) = folder.glob("*.safetensors")
    header = read_header(file)
    entry = header.tensors["model.embed_tokens.weight"]
    part = TensorPart(0, entry.offset_bytes, entry.shape, entry.dtype)
    module = EmbeddingOnDisk(Table("", header, part), torch.float32)
    return module, tiny_models.reference(folder).get_input_embeddings().weight


@given(ids=st.lists(st.lists(st.integers(0, 511), min_size=3, max_size=3), max_size=5))
def test_any_ids_in_any_shape_give_the_rows_of_the_table(table, ids):
    module, weight = table
    tensor = torch.tensor(ids, dtype=torch.long).reshape(-1, 3)
    assert torch.equal(module(tensor), torch.nn.functional.embedding(tensor, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_ids_of_another_type_are_an_error(table, dtype):
    with pytest.raises(TypeError, match="token ids are int64 or int32"):
        table[0](torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("bad", [-1, 512])
def test_an_id_outside_the_vocabulary_is_an_error(table, bad):
    with pytest.raises(IndexError, match="the vocabulary has 512"):
        table[0](torch.tensor([3, bad]))


def test_a_truncated_file_is_an_error_that_says_so(tmp_path):
    tiny_models.save("qwen3_moe", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    header = read_header(file)
    entry = header.tensors["model.embed_tokens.weight"]
    part = TensorPart(0, entry.offset_bytes, entry.shape, entry.dtype)
    module = EmbeddingOnDisk(Table("", header, part), torch.float32)
    with file.open("r+b") as raw:
        raw.truncate(entry.offset_bytes + 64)
    with pytest.raises(CheckpointError, match="truncated after loading"):
        module(torch.tensor([100]))
    module.close()
