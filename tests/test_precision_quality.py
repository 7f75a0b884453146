"""The measurement of what dynamic precision costs: one forward against decoding step by step, rules against what they promise,
figures worked out by hand, runs that go on.
"""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, LogitsProcessor

from vismoe.eval.answer_file import questions
from vismoe.eval.studies import precision_judge, precision_quality
from vismoe.eval.studies.format_quality import ExpertWeights, FormatContestant, log_probabilities, with_answers
from vismoe.eval.studies.precision_judge import COUNTS, HOTNESS, RANDOM, JudgedAnswer, calibration, judged, orders_of
from vismoe.eval.studies.precision_model import LISTENERS, SKIP, LayerCall, MixedExperts, attention_received
from vismoe.eval.studies.precision_quality import main
from vismoe.eval.studies.precision_rules import ALIKE, Demoted, Everywhere, InOneLayer, Retained, RuleInputs, coldest
from vismoe.eval.studies.precision_tables import Column, Summary, TableLine, rank_correlation
from vismoe.eval.world import assets_folder
from vismoe.models.inputs.processor import load_processor
from vismoe.models.load.locate import inventory_of
from vismoe.models.moe.heavy_hitters import HeavyHitters
from vismoe.pair import FormatPair
from vismoe.precision.depth import critical_count, ratios_of
from vismoe.types import Format

DEMO = assets_folder() / "demo-model"
FORMATS = (Format.RAW, Format.INT4, Format.INT2)
RAW_INT2, INT4_INT2, INT4_SKIP = (
    FormatPair(high, low) for high, low in ((Format.RAW, Format.INT2), (Format.INT4, Format.INT2), (Format.INT4, None))
)
CHOOSING = [
    Retained(INT4_SKIP, 0.5),
    Retained(INT4_SKIP, 0.6, renormalise=False),
    Retained(INT4_SKIP, 0.5, "random", "equal"),
    Retained(INT4_INT2, 0.5, hitters=0.05),
    Demoted(RAW_INT2, 0.5, ALIKE),
]


def plain_model():
    return AutoModelForImageTextToText.from_pretrained(
        DEMO, dtype="auto", experts_implementation="eager", attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def processor():
    return load_processor(DEMO)


@pytest.fixture(scope="module")
def experts():
    return MixedExperts(plain_model(), FORMATS)


@pytest.fixture
def encoded_once(experts, monkeypatch):
    """The command finds the experts that are there already."""
    monkeypatch.setattr(precision_quality, "MixedExperts", lambda model, formats: experts)


@pytest.fixture(scope="module")
def facts():
    scores = np.random.default_rng(5).random((8, 32))
    return RuleInputs(FORMATS, {(HOTNESS, 0): scores})


@pytest.fixture(scope="module")
def talks():
    """Of different lengths, with answers of different lengths."""
    return [questions(kind, [3], 1)[0] for kind in ("turns", "exists", "count")]


def calls_of(experts, processor, talks, contestant, facts) -> tuple[list[torch.Tensor], list[tuple[LayerCall, np.ndarray]]]:
    """Log-probabilities of the true answers, and every call with the formats that served it."""
    seen = []

    def rule(call):
        served = contestant.serve(call, facts)
        seen.append((call, served.formats))
        return served

    inputs, targets = with_answers(processor, talks)
    with experts.ruled(rule, [len(target) for target in targets]):
        return log_probabilities(experts.model, inputs, targets), seen


def by_place(seen) -> dict[tuple[int, int, int], list[int]]:
    """Formats by layer, sequence and place in it."""
    return {
        (call.layer, int(row), int(place)): formats.tolist()
        for call, its in seen
        for row, place, formats in zip(call.sequence, call.position, its)
    }


class TrueAnswers(LogitsProcessor):
    """Makes generate() say the true answers, and keeps what it would have said."""

    def __init__(self, targets):
        self.targets, self.said = targets, []

    def __call__(self, ids, scores):
        step = len(self.said)
        self.said.append(scores.double().log_softmax(-1))
        forced = torch.full_like(scores, -math.inf)
        for row, target in enumerate(self.targets):
            forced[row, target[min(step, len(target) - 1)]] = 0
        return forced


@pytest.mark.parametrize("contestant", CHOOSING, ids=str)
def test_one_forward_decides_and_computes_as_prefill_and_decode_steps_do(experts, processor, talks, facts, contestant):
    rows, at_once = calls_of(experts, processor, talks, contestant, facts)
    stepwise = []

    def rule(call):
        served = contestant.serve(call, facts)
        stepwise.append((call, served.formats))
        return served

    _, targets = with_answers(processor, talks)
    prompts = precision_judge.prompts(processor, talks)
    forced = TrueAnswers(targets)
    with experts.ruled(rule), torch.no_grad():
        experts.model.generate(**prompts, max_new_tokens=max(map(len, targets)), do_sample=False, logits_processor=[forced])
    for row, (target, mine) in enumerate(zip(targets, rows)):
        steps = torch.stack([forced.said[step][row] for step in range(len(target))])
        torch.testing.assert_close(mine, steps, atol=2e-4, rtol=0)
    first, second = by_place(at_once), by_place(stepwise)
    lengths = {row: max(place for _, its, place in first if its == row) for row in range(len(talks))}
    fed = {key for key in first if key[2] < lengths[key[1]]}  # what ends an answer is said, and never fed
    assert fed <= second.keys() and all(first[key] == second[key] for key in fed)
    assert {call.decoding for call, _ in stepwise} == {True, False} and len({tuple(formats) for formats in first.values()}) > 2


def test_one_format_everywhere_is_the_model_with_its_experts_replaced(experts, processor, facts):
    talk = questions("describe", [4], 2)
    model = plain_model()
    weights = ExpertWeights(model, [FormatContestant(Format.RAW), FormatContestant(Format.INT2)])
    inputs, targets = with_answers(processor, talk)
    for format in (Format.RAW, Format.INT2):
        weights.put(FormatContestant(format))
        plain = log_probabilities(model, inputs, targets)
        (mixed,), _ = calls_of(experts, processor, talk, Everywhere(format), facts)
        assert torch.equal(mixed, plain[0])


def test_nobody_computes_without_a_rule(experts, processor, talks):
    with pytest.raises(AssertionError, match="no rule chooses formats"):
        experts.model(**precision_judge.prompts(processor, talks))


def test_a_question_is_judged_alike_alone_and_in_company(experts, processor, talks, facts):
    some = [CHOOSING[0], CHOOSING[2], CHOOSING[4]]
    together = dict(judged(experts, processor, talks, some, facts, True))
    for place, talk in enumerate(talks):
        for contestant, (alone,) in judged(experts, processor, [talk], some, facts, True):
            beside = together[contestant][place]
            assert (alone.tokens, alone.prompt, alone.decoded, alone.score) == (
                beside.tokens,
                pytest.approx(beside.prompt),
                pytest.approx(beside.decoded),
                beside.score,
            )
            assert (alone.divergence, alone.surprise) == pytest.approx((beside.divergence, beside.surprise), rel=1e-2, abs=1e-4)


def test_an_answer_that_is_not_the_true_one_is_what_generate_says(experts, processor, facts):
    contestant = Retained(INT4_SKIP, 0.5, "random", "equal")
    talks = questions("text", range(6), 7)
    ((_, rows),) = judged(experts, processor, talks, [contestant], facts, True)
    with experts.ruled(lambda call: contestant.serve(call, facts)):
        said = precision_judge.decoded(experts.model, processor, precision_judge.prompts(processor, talks))
    wrong = [row.answer != talk.turns[-1].answer for row, talk in zip(rows, talks)]
    assert any(wrong) and all(answer.startswith(row.answer) for row, answer in zip(rows, said))
    assert all(row.score == 1 for row, is_wrong in zip(rows, wrong) if not is_wrong)


@pytest.mark.parametrize("ranking", ["importance", "random"])
@pytest.mark.parametrize("schedule", ["cosine", "equal"])
def test_every_ranking_keeps_as_many_experts_of_a_prompt_and_of_a_token(experts, processor, talks, facts, ranking, schedule):
    _, seen = calls_of(experts, processor, talks, Retained(INT4_SKIP, 0.6, ranking, schedule), facts)
    for call, formats in seen:
        ratio = ratios_of(8, 0.6, schedule)[call.layer]
        units = np.arange(len(formats)) if call.decoding else call.sequence
        for unit in np.unique(units):
            own, its = call.routing[units == unit], formats[units == unit]
            demanded, kept = set(own.ravel().tolist()), set(own[its != SKIP].tolist())
            assert len(kept) == critical_count(ratio, len(demanded))
            assert not kept & set(own[its == SKIP].tolist())  # critical for the whole prompt, or not at all


def test_the_weights_of_a_token_keep_their_sum_unless_they_are_left_as_they_are(experts, processor, talks, facts):
    _, seen = calls_of(experts, processor, talks, Everywhere(Format.INT4), facts)
    for call, _ in seen:
        for renormalise in (True, False):
            served = Retained(INT4_SKIP, 0.5, renormalise=renormalise).serve(call, facts)
            kept = (served.formats != SKIP).any(axis=1)
            if renormalise:
                np.testing.assert_allclose(served.weights[kept].sum(axis=1), call.weights[kept].sum(axis=1), rtol=1e-5)
            else:
                left = served.formats != SKIP
                assert np.array_equal(served.weights[left], call.weights[left]) and not served.weights[~left].any()


def test_demoted_experts_are_the_coldest_of_their_layer(experts, processor, talks, facts):
    low = coldest(facts.orders[HOTNESS, 0], 0.375)
    assert (low.sum(axis=1) == 12).all()
    _, seen = calls_of(experts, processor, talks, Demoted(RAW_INT2, 0.375, HOTNESS), facts)
    for call, formats in seen:
        order = facts.orders[HOTNESS, 0][call.layer].argsort()[:12]
        assert np.array_equal(formats == FORMATS.index(Format.INT2), np.isin(call.routing, order))
        assert set(np.unique(formats)) <= {FORMATS.index(Format.INT2), FORMATS.index(Format.RAW)}


def test_one_layer_is_an_eighth_of_the_computations(experts, processor, talks, facts):
    ((_, rows),) = judged(experts, processor, talks, [InOneLayer(5, FormatPair(Format.RAW, None))], facts, False)
    assert all(row.prompt == row.decoded == {"raw": 7 / 8, "skip": 1 / 8} for row in rows)
    assert all(row.divergence > 0 and row.answer is None for row in rows)


def test_attention_received_is_a_mean_over_heads_and_over_the_last_queries_that_could_see_the_token():
    rows, heads, tokens = 2, 3, 80
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(rows, heads, tokens, tokens, generator=generator).tril()
    prompt = torch.zeros(rows, tokens, dtype=torch.bool)
    prompt[0, 2:78], prompt[1, 30:70] = True, True
    found = attention_received(attention, prompt)
    for row, (first, end) in enumerate(((2, 78), (30, 70))):
        for key in range(tokens):
            listening = range(max(first, end - LISTENERS, key), end) if first <= key < end else ()
            weights = [attention[row, :, query, key].mean().item() for query in listening]
            assert found[row, key].item() == pytest.approx(sum(weights) / len(weights) if weights else 0.0, abs=1e-6)


def test_attention_received_is_what_the_engine_hears(experts, processor, talks, facts):
    heard = []
    model = plain_model()
    layers = inventory_of(model, None).layers
    hitters = HeavyHitters.of(model.float(), layers)

    def rule(call):
        if not call.decoding:
            heard.append(call.received())
        return Everywhere(Format.RAW).serve(call, facts)

    prompts = precision_judge.prompts(processor, talks)
    real, its = prompts["attention_mask"].flatten().bool().numpy(), []
    for layer in layers:
        experts_of = model.get_submodule(layer.path)
        experts_of.register_forward_pre_hook(lambda *_, layer=layer: its.append(hitters.received(layer.index)[real]))
    hitters.begin(real)
    with torch.no_grad(), experts.ruled(rule):
        model(**prompts)
        hitters.end()
        experts.model(**prompts)
    assert len(heard) == len(its) == 8
    for mine, engines in zip(heard, its):
        np.testing.assert_allclose(mine, engines, atol=1e-5)


def test_experts_are_ordered_by_other_questions_seen_token_by_token(experts, processor, monkeypatch):
    asked = []
    monkeypatch.setattr(precision_judge, "questions", lambda *each: asked.append(each) or questions(*each))
    steps = [step for question in calibration(experts, processor, 4, "demo", 1) for step in question]
    assert [(list(numbers), seed, world) for _, numbers, seed, world in asked] == [([0], 5, "demo")] * 9
    tokens = [len(step[0][0]) for step in steps]
    assert set(tokens[1:]) >= {1} and sum(tokens) > 9 * 80
    orders = orders_of(experts, processor, 4, "demo", 1, (1, 2))
    assert orders.keys() == {(HOTNESS, 0), (COUNTS, 0), (RANDOM, 1), (RANDOM, 2)}
    assert (orders[COUNTS, 0].sum(axis=1) == 4 * sum(tokens)).all()
    scores = np.zeros(32)
    for step in steps:  # equation 2 with plain loops
        routing, weights = step[3]
        share = precision_judge.Settings().hotness_decay ** min(len(routing), precision_judge.Settings().hotness_period)
        mean = np.zeros(32)
        for chosen, heavy in zip(routing, weights):
            mean[chosen] += heavy / len(routing)
        scores = share * scores + (1 - share) * mean
    np.testing.assert_allclose(orders[HOTNESS, 0][3], scores, rtol=1e-5)


def outcomes(divergence, surprise, scores, raw=0.25) -> list[JudgedAnswer]:
    return [
        JudgedAnswer(2, *each, {"raw": raw, "int2": 1 - raw}, {"int2": 1.0}, "", score)
        for *each, score in zip(divergence, surprise, scores)
    ]


def test_figures_of_a_line_worked_out_by_hand():
    raw, one, two = Everywhere(Format.RAW), Demoted(RAW_INT2, 0.5, RANDOM, 1), Demoted(RAW_INT2, 0.5, RANDOM, 2)
    table = {
        raw: outcomes([0, 0], [0.2, 0.2], [1.0, 1.0], raw=1.0),
        one: outcomes([0.1, 0.3], [0.4, 0.6], [1.0, 0.0]),
        two: outcomes([0.3, 0.5], [0.4, 0.2], [1.0, 1.0]),
    }
    found = Summary(table, ["what", "count"])
    (point,) = found.line(TableLine("16/2", "random", {0.5: [one, two]}), raw)["points"]
    assert (point["x"], point["prompt_low"], point["decoded_low"]) == (0.5, 0.75, 1.0)
    assert point["all"]["divergence"]["value"] == pytest.approx((0.2 + 0.4) / 4)
    assert point["all"]["perplexity"]["value"] == pytest.approx(math.exp((0.4 + 0.4) / 4))
    assert [draw["divergence"] for draw in point["draws"]] == pytest.approx([0.1, 0.2])
    assert point["count"]["accuracy"]["mean"] == 0.5 and point["count"]["accuracy"]["difference"]["value"] == -0.5
    lines = [TableLine("16/2", name, {0.0: [raw], 0.5: [each]}) for name, each in (("one", one), ("two", two))]
    compared = found.compared(*lines, raw)
    assert [at["x"] for at in compared["points"]] == [0.5]  # at 0 both are 16 bit
    (matched,) = compared["matched"]  # at 0.5, both compute 75% of prompts and all of answers in int2
    assert (matched["x"], matched["rival_x"], matched["low"], matched["rival_low"]) == (0.5, 0.5, [0.75, 1.0], [0.75, 1.0])
    assert matched["all"] == compared["points"][0]["all"]
    assert compared["all"]["divergence_ratio"]["value"] == pytest.approx(0.5)
    assert compared["all"]["surprise_difference"]["value"] == pytest.approx(0.1)
    assert compared["what"]["accuracy_difference"]["value"] == 0 and compared["count"]["accuracy_difference"]["value"] == -1
    assert Column.of([table[one], table[two]]).score.tolist() == [1.0, 0.5]


def test_a_rank_correlation_is_one_where_losses_grow_and_its_interval_shows_doubt():
    losses = np.arange(1, 9)[:, None] * np.ones((8, 20))
    assert vars(rank_correlation(losses)) == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert rank_correlation(losses[::-1]).value == -1.0
    swapped = losses[[1, 0, 2, 3, 4, 5, 6, 7]]
    assert rank_correlation(swapped).value == pytest.approx(1 - 6 * 2 / (8 * 63))  # Spearman's formula
    doubtful = rank_correlation(np.random.default_rng(0).random((8, 20)))
    assert doubtful.high - doubtful.low > 0.5


def run(capsys, *arguments) -> tuple[list[str], dict]:
    assert main(list(arguments)) == 0
    *printed, last = capsys.readouterr().out.splitlines()
    return printed, json.loads(last)


def test_the_command_compares_orders_draws_and_goes_on_where_it_was(encoded_once, tmp_path, capsys, monkeypatch):
    for name, value in (("SHARES", (0.5,)), ("DRAWS", (1, 2)), ("CALIBRATION", 1)):
        monkeypatch.setattr(precision_quality, name, value)
    command = ["--study", "ppl", "--formats", "16/2", "--questions", "9", "--work", str(tmp_path), "--figures", str(tmp_path)]
    printed, result = run(capsys, *command)
    assert result["questions"] == 9 and [line["name"] for line in result["lines"]] == [HOTNESS, COUNTS, RANDOM, ALIKE]
    assert all([point["x"] for point in line["points"]] == [0, 0.5, 1] for line in result["lines"])
    assert [len(point["draws"]) for point in result["lines"][2]["points"]] == [1, 2, 1]
    assert "accuracy" not in result["lines"][0]["points"][0]["all"] and any("perplexity" in line for line in printed)
    assert (tmp_path / "precision-ppl.png").read_bytes().startswith(b"\x89PNG")
    before = {file: file.read_text() for file in (tmp_path / "ppl").iterdir()}
    monkeypatch.setattr(precision_quality, "judged", lambda *_: pytest.fail("all was answered"))
    assert run(capsys, *command, "--json")[1] == result
    assert before == {file: file.read_text() for file in (tmp_path / "ppl").iterdir()}


@pytest.mark.parametrize("study", ["retention", "layers", "hitters"])
def test_studies_with_answers_have_accuracies_per_kind(encoded_once, study, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(precision_quality, "RETENTIONS", (0.5,))
    monkeypatch.setattr(precision_quality, "HITTERS", (0.2,))
    monkeypatch.setattr(precision_quality, "judged", lambda *each: [(one, fake(one, len(each[2]))) for one in each[3]])
    formats = {"retention": "4/2,4/0", "layers": "16/2", "hitters": "4/0"}[study]
    command = ["--study", study, "--formats", formats, "--questions", "18", "--work", str(tmp_path), "--figures", str(tmp_path)]
    printed, result = run(capsys, *command)
    assert len(result["lines"]) == {"retention": 9, "layers": 1, "hitters": 2}[study]
    assert len(result["comparisons"]) == {"retention": 7, "layers": 0, "hitters": 1}[study]
    assert len(result["trends"]) == (study == "layers")
    assert result["lines"][0]["points"][0]["turns"]["accuracy"]["questions"] == 2
    assert any("describe" in line for line in printed) and (tmp_path / f"precision-{study}.png").exists()


def fake(contestant, count: int) -> list[JudgedAnswer]:
    loss = 0.1 * len(str(contestant))
    return [JudgedAnswer(3, loss, loss, {"raw": 1.0}, {"raw": 1.0}, "", float(number % 2)) for number in range(count)]


def test_wrong_arguments_say_what_is_wrong(capsys, tmp_path):
    assert main(["--formats", "2/4", "--work", str(tmp_path)]) == 1
    assert "more bits" in capsys.readouterr().err
    assert main(["--study", "ppl", "--formats", "16/0", "--work", str(tmp_path)]) == 1
    assert "16/0: study ppl computes demoted experts in the low format" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--questions", "0"])
