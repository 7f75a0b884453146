"""Drafts by the layer that publishers train for that: it guesses what transformers' own code guesses with it, its experts are
paged like all others, and no answer depends on it."""

import mtp_checkpoints
import pytest
import quantised_checkpoints as quantised
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from test_serving_engine import DEMO, FIRST, ask, said
from transformers import AutoConfig
from transformers.generation.candidate_generator import MTPCandidateGenerator

import vismoe
from vismoe.bench.subject import GeneratedModel, generate
from vismoe.cli.main import main as run
from vismoe.engine.drafting import Drafter, Drafts
from vismoe.engine.generate import TokenLoop
from vismoe.engine.request import Request
from vismoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from vismoe.models.family import mtp
from vismoe.models.load.preview import model_class, preview
from vismoe.models.load.quantizer import VisMoEConfig
from vismoe.models.load.runtime import runtime_of
from vismoe.models.moe.mtp import MtpDrafts, MtpSequence
from vismoe.types import Phase

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("glm4_moe", "deepseek_v3", "mellum")
TWO_SLABS = "9.1%"
PROMPT = torch.randint(5, 490, (1, 20), generator=torch.Generator().manual_seed(3))
TOKENS = 24


def opened(folder, dtype, **settings):
    settings = {"memory": TWO_SLABS, "context": 256, "draft": "mtp", "kernels": "torch", **settings}
    return model_class(AutoConfig.from_pretrained(folder)).from_pretrained(
        folder, dtype=dtype, quantization_config=VisMoEConfig(**settings)
    )


@torch.inference_mode()
def answered(model, kind="mtp", drafted=None, **options):
    """(tokens, the logits of each, by the sequence so far what was guessed, figures) of an answer."""
    runtime, guesses = runtime_of(model), {}
    drafts = model.__dict__.setdefault("drafts", Drafts(model, runtime, runtime.configuration.settings, ()))
    loop = TokenLoop(model, {"input_ids": PROMPT}, {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, **options})
    loop.watched = []
    drafter, before = Drafter(drafts, kind), runtime.metrics.snapshot()
    with runtime.context.reading_prompt():
        said = [loop.step()[0]]
    drafter.passed(0, PROMPT.shape[1], drafts.take_hidden())
    loop.reserve(PROMPT.shape[1] + TOKENS)
    while len(said) < TOKENS:
        ids = tuple(loop.ids[0].tolist())
        one = drafter.draft(loop, TOKENS - len(said) - 1, frozenset())
        guesses[ids] = list(one.tokens)
        verified = drafter.verify(loop, one)
        while verified.goes_on:
            said.append(verified.take()[0])
        drafter.ended()
    return said, torch.cat(loop.watched), guesses, drafter.figures(runtime.metrics.snapshot() - before)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    return mtp_checkpoints.save(request.param, tmp_path_factory.mktemp(request.param))


def guessed_by_transformers(folder, monkeypatch):
    """By the sequence so far, the token that transformers guesses in `generate(use_mtp=True)`; and the answer."""
    model, found = tiny_models.reference(folder), {}
    last = model.config.num_hidden_layers
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{last}\..*", r"^mtp\."])
    candidates = MTPCandidateGenerator.get_candidates

    def noted(self, input_ids, *args, **kwargs):
        guessed, logits = candidates(self, input_ids, *args, **kwargs)
        if logits is not None:
            found[tuple(input_ids[0].tolist())] = guessed[0, input_ids.shape[1]].item()
        return guessed, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "use_mtp": True}
    out = model.generate(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), **options)
    return found, out[0, PROMPT.shape[1] :].tolist()


@pytest.mark.budget(2)
def test_the_first_guesses_are_those_of_transformers(checkpoint, monkeypatch):
    """In float32, with two slabs."""
    wanted, answer = guessed_by_transformers(checkpoint, monkeypatch)
    said, _, guesses, figures = answered(opened(checkpoint, torch.float32, draft_tokens=1))
    assert said == answer
    compared = [ids for ids in wanted if guesses.get(ids)]
    assert len(compared) > 15 and all(guesses[ids][0] == wanted[ids] for ids in compared)
    assert figures.drafted == sum(map(len, guesses.values()))


@pytest.mark.budget(3)
@torch.inference_mode()
def test_further_guesses_are_those_of_the_whole_sequence_computed_at_once(checkpoint):
    """The layer gets its own output and its last guess; an oracle computes each guess without keys and values of before."""
    _, _, guesses, _ = answered(opened(checkpoint, torch.float32, draft_tokens=4))
    model = tiny_models.reference(checkpoint)
    with_layer = opened(checkpoint, torch.float32, memory="100%")
    made = mtp.mtp_of(with_layer).model
    runtime_of(with_layer).context.begin_beside(1)
    for ids, tokens in list(guesses.items())[:6]:
        hidden = model.get_decoder()(input_ids=torch.tensor([ids])).last_hidden_state[:, :-1]
        behind, expected = list(ids[1:]), []
        for _ in tokens:
            positions = torch.arange(1, len(behind) + 1)[None]
            out = made.forward_layer(0, hidden, positions, None, input_ids=torch.tensor([behind]))
            expected.append(made._project_to_logits(out[:, -1:]).argmax().item())
            hidden, behind = torch.cat([hidden, out[:, -1:]], dim=1), [*behind, expected[-1]]
        assert tokens == expected


@pytest.mark.budget(4)
@pytest.mark.parametrize("memory", [TWO_SLABS, "100%"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_have_the_bits_of_passes_of_one_token(family, memory, tmp_path, monkeypatch):
    """In bfloat16 with the CPU kernels; also where every other guess is right."""
    model = opened(
        mtp_checkpoints.save(family, tmp_path, torch.bfloat16), torch.bfloat16, memory=memory, kernels="auto", draft_tokens=3
    )
    alone = answered(model, "none")
    drafted = answered(model)
    assert drafted[0] == alone[0] and torch.equal(drafted[1], alone[1])
    logits, known = MtpDrafts.logits, [*PROMPT[0].tolist(), *alone[0]]

    def often_right(self, hidden):
        said, place = logits(self, hidden), int(self.latest) + 1
        if place < len(known) and place % 3:
            said[..., known[place]] = 1e4
        return said

    run_layer = MtpDrafts.run

    def noted(self, hidden, ids, first, cache):
        self.latest = first + ids.shape[1] - 1
        return run_layer(self, hidden, ids, first, cache)

    monkeypatch.setattr(MtpDrafts, "logits", often_right)
    monkeypatch.setattr(MtpDrafts, "run", noted)
    right = answered(model)
    assert right[0] == alone[0] and torch.equal(right[1], alone[1])
    assert right[3].accepted > TOKENS // 3 > drafted[3].accepted
    assert "the bits of being alone" in model.drafts.about
    runtime_of(model).pager.check_integrity()


def test_its_experts_are_one_more_layer_that_is_paged(tmp_path):
    folder = mtp_checkpoints.save("glm4_moe", tmp_path, torch.bfloat16)
    model = opened(folder, torch.bfloat16, memory="30%", draft_tokens=2)
    runtime = runtime_of(model)
    inventory = runtime.configuration.experts.inventory
    assert inventory.layers[-1].path == "mtp.layers.0.mtp_block.mlp.experts"
    counters = answered(model)[3]
    snapshot = runtime.metrics.snapshot()
    assert counters.drafted and snapshot.total("misses", Phase.DRAFT) and snapshot.total("bytes_read", Phase.DRAFT)
    without = runtime_of(opened(folder, torch.bfloat16, memory="30%", draft="none")).plan
    assert runtime.plan.total_experts == without.total_experts + inventory.layers[-1].num_experts
    parts, others = ({part.name: part.bytes for part in plan.parts} for plan in (runtime.plan, without))
    assert [name for name in ("KV cache", "attention", "norms and routers") if parts[name] <= others[name]] == []
    for file in folder.glob("*.safetensors"):  # a plan knows of it as well, before any weight is there
        file.unlink()
    stated = preview(folder, VisMoEConfig(memory="30%", context=256, draft="mtp").settings)
    assert stated.total_experts == runtime.plan.total_experts


# ------------------------------------------------------------------ checkpoints
def test_a_quantised_checkpoint_drafts_as_its_restored_weights_do(tmp_path):
    fp8, restored = tmp_path / "fp8", tmp_path / "restored"
    for folder in (fp8, restored):
        mtp_checkpoints.save("deepseek_v3", folder, torch.bfloat16)
    weights = quantised.encode(fp8, r"(experts\.\d+\.\w+|self_attn\.(o|q_b)_proj|eh_proj)\.weight$")
    save_file(weights, restored / "model.safetensors", metadata={"format": "pt"})
    found, wanted = (answered(opened(folder, torch.bfloat16, draft_tokens=2)) for folder in (fp8, restored))
    assert found[0] == wanted[0] and found[2] == wanted[2]


def test_a_store_is_packed_with_the_layer_and_serves_with_it_and_without(tmp_path, capsys):
    folder = mtp_checkpoints.save("glm4_moe", tmp_path / "model", torch.bfloat16)
    expected = answered(opened(folder, torch.bfloat16, draft_tokens=2))
    assert run(["pack", str(folder)]) == 0 and run(["pack", str(folder), "--verify"]) == 0
    for draft in ("mtp", "none"):
        model = opened(folder, torch.bfloat16, draft_tokens=2, draft=draft)
        assert "lossless, packed" in runtime_of(model).plan.experts
        assert answered(model, draft)[0] == expected[0]
    index = folder / "vismoe-store"
    for file in index.iterdir():
        file.unlink()
    bare = mtp_checkpoints.save("glm4_moe", tmp_path / "model", torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtp, "MtpModel", None)  # as with an older transformers
        assert run(["pack", str(bare)]) == 0
    with pytest.raises(CheckpointError, match=r"packed without the experts of mtp\.layers\.0.*Fix: delete"):
        opened(bare, torch.bfloat16)
    assert answered(opened(bare, torch.bfloat16, draft="none"), "none")[0] == expected[0]


def test_a_store_serves_without_a_layer_whose_experts_have_a_geometry_of_their_own(tmp_path):
    folder = mtp_checkpoints.save("deepseek_v3", tmp_path, torch.bfloat16)
    quantised.encode(folder, r"layers\.[0-2]\..*experts\.\d+\.\w+\.weight$")  # the layer's stay in 16 bits
    assert run(["pack", str(folder), "--formats", "int4"]) == 0 and run(["pack", str(folder), "--verify"]) == 0
    settings = dict(memory="40%", format="int4", draft_tokens=2)
    answers = [answered(opened(folder, torch.bfloat16, draft=draft, **settings), draft)[0] for draft in ("mtp", "none")]
    assert answers[0] == answers[1]


def test_a_layer_that_is_not_whole_is_left_out_of_a_store(tmp_path):
    folder = mtp_checkpoints.save("glm4_moe", tmp_path, torch.bfloat16)
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({name: tensor for name, tensor in weights.items() if "eh_proj" not in name}, file, metadata={"format": "pt"})
    assert run(["pack", str(folder)]) == 0
    assert answered(opened(folder, torch.bfloat16, draft="none"), "none")[0]
    with pytest.raises(CheckpointError, match=r"no weights for 1 of the \d+ parameters"):
        opened(folder, torch.bfloat16)


def test_the_rest_in_int8_is_that_of_the_model_without_the_layer(tmp_path):
    folder = mtp_checkpoints.save("glm4_moe", tmp_path, torch.bfloat16)
    assert run(["pack", str(folder), "--backbone", "int8"]) == 0
    settings = dict(memory="100%", kernels="auto", backbone="int8", draft_tokens=2)
    answers = [answered(opened(folder, torch.bfloat16, draft=draft, **settings), draft)[0] for draft in ("mtp", "none")]
    assert answers[0] == answers[1]


def test_a_generated_checkpoint_has_the_layer_where_it_is_measured(tmp_path):
    subject = generate(tmp_path, GeneratedModel("tiny", None, mtp=True), quiet=True)
    assert answered(opened(subject.name, torch.bfloat16, memory="50%", draft_tokens=2))[3].drafted
    assert generate(tmp_path, GeneratedModel("tiny", None), quiet=True).name != subject.name


@pytest.mark.parametrize(
    ("family", "settings", "error", "says"),
    [
        ("qwen3_moe", {}, UnsupportedModelError, "qwen3_moe has no layer that predicts further tokens"),
        (
            "glm4_moe without",
            {},
            CheckpointError,
            r"no weights for \d+ of the \d+ parameters of the layer that drafts, first mtp",
        ),
        ("glm4_moe old", {}, UnsupportedModelError, "needs transformers 5.23 or newer"),
        ("glm4_moe", {"policy": "importance", "formats": "own/4"}, ConfigError, "checks what was guessed against experts in one"),
    ],
)
def test_what_cannot_draft_is_refused(family, settings, error, says, tmp_path, monkeypatch):
    name, _, how = family.partition(" ")
    if name == "glm4_moe":
        mtp_checkpoints.save(name, tmp_path, torch.bfloat16, with_layer=how != "without")
    else:
        tiny_models.save(name, tmp_path, dtype=torch.bfloat16)
    if how == "old":
        monkeypatch.setattr(mtp, "MtpModel", None)
    with pytest.raises(error, match=says):
        opened(tmp_path, torch.bfloat16, **settings)


def test_a_gguf_file_has_no_such_layer_for_us():
    with pytest.raises(UnsupportedModelError, match="is not read from GGUF files"):
        mtp.add_mtp(None, "model.gguf")


# ------------------------------------------------------------------ in the engine
LOADED = dict(device="cpu", image_cache="1MiB", context=1024)
TALKS = [
    (ask("What is in the picture?", DEMO), {"max_tokens": 12}),
    (ask("Describe the image.", DEMO), {"max_tokens": 12, "keep": 0.5}),
    (ask("Describe it.", FIRST), {"max_tokens": 12, "sample": True, "seed": 4, "temperature": 2.0}),
    (ask("What is this?"), {"max_tokens": 12, "stop": ["the"]}),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with vismoe.load(
        mtp_checkpoints.demo(tmp_path_factory.mktemp("demo")), memory="25%", draft="mtp", draft_tokens=3, **LOADED
    ) as e:
        yield e
        e.check_integrity()


def test_the_engine_says_what_it_says_without(engine):
    for messages, options in TALKS:
        text, figures = said(engine, messages, **options, draft="none", reuse=False)
        with_it, drafted = said(engine, messages, **options, draft="mtp", reuse=False)
        assert with_it == text and drafted.finish == figures.finish
        assert drafted.drafts.drafted and drafted.drafts.lengths["mtp"]
        passes = [one.tokens for one in drafted.passes if one.phase is Phase.DRAFT]
        assert sum(passes) == drafted.drafts.drafted
    assert engine.drafts == ("none", "ngram", "mtp")


def test_going_on_from_an_earlier_answer_and_in_pieces(engine):
    messages = ask("Describe the image.", DEMO)
    first = said(engine, messages, max_tokens=12, reuse=False)[0]
    talk = [*messages, {"role": "assistant", "content": [{"type": "text", "text": first}]}, *ask("What else?")]
    expected = said(engine, talk, max_tokens=12, draft="none", reuse=False)[0]
    said(engine, messages, max_tokens=12, reuse=True)
    text, figures = said(engine, talk, max_tokens=12, reuse=True)
    assert text == expected and figures.reused_tokens and figures.drafts.drafted


def test_shared_passes_leave_it_what_they_saw(engine, monkeypatch):
    """Requests that share passes do not draft; one that is alone again goes on with all that was said, whoever shared."""
    (short, few), (long, _) = TALKS[:2]
    alone = [said(engine, messages, max_tokens=few["max_tokens"], reuse=False, draft="none")[0] for messages in (short, long)]
    unseen, catch_up = [], MtpSequence._catch_up

    def noted(self, ids):
        waiting = sum(hidden.shape[1] for _, hidden in self._waiting)
        unseen.append(ids.shape[1] - 1 - self._cache.get_seq_length() - waiting)
        return catch_up(self, ids)

    monkeypatch.setattr(MtpSequence, "_catch_up", noted)
    brief, wide = (short, {**few, "reuse": False, "draft": "none"}), (long, {"max_tokens": 40, "reuse": False})
    for order in ((brief, wide), (wide, brief)):  # the row before it, or behind, is of a request without drafts
        replies = {id(messages): engine.chat(messages, **options) for messages, options in order}
        texts = {key: "".join(reply) for key, reply in replies.items()}
        assert texts[id(short)] == alone[0] and texts[id(long)].startswith(alone[1])
        assert max(one.rows for one in replies[id(long)].figures.passes) > 1
    assert set(unseen) == {0}


def test_a_request_that_begins_anew_reads_its_prompt_anew(engine, monkeypatch):
    """It gives up keys and values of the layer with its own; what it has said is computed again, and then it drafts on."""
    messages = ask("Describe the image.", DEMO)
    expected = said(engine, messages, max_tokens=40, reuse=False, draft="none")[0]
    passes, step, held = [], Request.step, []

    def stepped(self):
        passes.append(self)
        if len(passes) == 12:
            self.give_up()
            held.append(self._drafter._mtp._cache.get_seq_length())
        going_on = step(self)
        if self._loop is not None:
            held.append(self._drafter._mtp._cache.get_seq_length() - self._loop.ids.shape[1])
        return going_on

    monkeypatch.setattr(Request, "step", stepped)
    assert said(engine, messages, max_tokens=40, reuse=False)[0] == expected
    assert max(held) <= 0 and min(held[-3:]) > -16  # never more than the sequence, and up to date again


def test_requests_without_drafts_leave_no_hidden_states(engine):
    said(engine, ask("What is this?"), max_tokens=1, draft="none", reuse=False)
    assert engine._shared.drafts.mtp.hidden is None


def test_dropped_tokens_and_drafts_whose_mixers_run_by_row(tmp_path):
    """In float32 no pass of several rows has the bits of single ones, so each row's attention runs as a whole."""
    settings = dict(LOADED, dtype="float32", memory="50%", draft="mtp", draft_tokens=3, kernels="torch")
    with vismoe.load(mtp_checkpoints.demo(tmp_path), **settings) as engine:
        for options in ({}, {"keep": 0.5}):
            messages = ask("Describe the image.", DEMO)
            expected = said(engine, messages, max_tokens=12, draft="none", reuse=False, **options)[0]
            assert said(engine, messages, max_tokens=12, reuse=False, **options)[0] == expected


@pytest.mark.budget(2)
@pytest.mark.parametrize("after", range(3))
def test_a_cancelled_answer_leaves_nothing_wrong(engine, after):
    messages = ask("Describe the image.", DEMO)
    expected = said(engine, messages, max_tokens=14, reuse=False, draft="none")[0]
    reply = engine.chat(messages, max_tokens=14, reuse=True)
    for count, _ in enumerate(reply):
        if count == after:
            reply.cancel()
    assert said(engine, messages, max_tokens=14, reuse=True)[0] == expected


def test_prompts_longer_than_a_block_are_read_in_blocks(engine, monkeypatch):
    runs = []
    run_layer = MtpDrafts.run
    monkeypatch.setattr(
        MtpDrafts, "run", lambda self, hidden, ids, *more: runs.append(ids.shape[1]) or run_layer(self, hidden, ids, *more)
    )
    monkeypatch.setattr("vismoe.models.moe.mtp.BLOCK_TOKENS", 50)
    messages = ask("What is in the picture?", DEMO)
    figures = said(engine, messages, max_tokens=6, reuse=False)[1]
    first = runs[: next(n for n in range(1, len(runs)) if sum(runs[:n]) == figures.prompt_tokens)]
    assert max(first) == 50 and len(first) > 2 and first[-1] == 8
