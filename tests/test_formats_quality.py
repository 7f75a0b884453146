"""The measurement of what formats cost: paired intervals against Newcombe's formula written down apart,
sums against plain passes, runs that go on.
"""

import json
import math
from statistics import NormalDist

import pytest
import torch
from transformers import AutoModelForImageTextToText

from vismoe.errors import InputError
from vismoe.eval.accuracy import answers
from vismoe.eval.answer_file import AnswerFile, program_digest, questions
from vismoe.eval.paired import paired_difference, ratio_of_sums
from vismoe.eval.questions import KINDS
from vismoe.eval.scoring import score
from vismoe.eval.studies.format_quality import SIXTEEN_BIT, ExpertWeights, FormatContestant, Judged, expert_output_errors, judge
from vismoe.eval.studies.formats import PROGRAM, main, summary
from vismoe.eval.world import assets_folder
from vismoe.models.family.families import expert_modules
from vismoe.models.inputs.processor import load_processor
from vismoe.types import Format

DEMO = assets_folder() / "demo-model"
INT2, INT2_NEAREST = FormatContestant(Format.INT2), FormatContestant(Format.INT2, nearest=True)


def pairs(both: int, lost: int, won: int, neither: int) -> tuple[list[float], list[float]]:
    first = [1.0] * (both + lost) + [0.0] * (won + neither)
    return first, [1.0] * both + [0.0] * lost + [1.0] * won + [0.0] * neither


@pytest.mark.parametrize(
    "table",
    [(36, 12, 2, 0), (12, 0, 2, 36), (54, 0, 0, 0), (0, 0, 0, 7), (0, 9, 0, 0), (20, 9, 11, 3), (3, 30, 5, 2), (90, 1, 2, 7)],
)
def test_paired_proportions_have_the_intervals_of_newcombes_method_10(table):
    second, first = pairs(*table)
    found = paired_difference(first, second)
    assert (found.low, found.high) == pytest.approx(method_10(*table), abs=1e-6)


def method_10(a: int, b: int, c: int, d: int) -> tuple[float, float]:
    """Of (a + b) / n - (a + c) / n, the published formula: Wilson's score intervals, joined by a corrected phi."""
    n, z = a + b + c + d, NormalDist().inv_cdf(0.975)

    def wilson(successes: int) -> tuple[float, float]:
        p = successes / n
        root = z * math.sqrt(z * z + 4 * n * p * (1 - p))
        return (2 * n * p + z * z - root) / (2 * (n + z * z)), (2 * n * p + z * z + root) / (2 * (n + z * z))

    (low_1, high_1), (low_2, high_2) = wilson(a + b), wilson(a + c)
    p_1, p_2 = (a + b) / n, (a + c) / n
    product = a * d - b * c
    corrected = max(product - n / 2, 0) if product > 0 else product
    margins = (a + b) * (c + d) * (a + c) * (b + d)
    phi = corrected / math.sqrt(margins) if margins else 0
    delta = math.sqrt((p_1 - low_1) ** 2 - 2 * phi * (p_1 - low_1) * (high_2 - p_2) + (high_2 - p_2) ** 2)
    epsilon = math.sqrt((high_1 - p_1) ** 2 - 2 * phi * (high_1 - p_1) * (p_2 - low_2) + (p_2 - low_2) ** 2)
    return p_1 - p_2 - delta, p_1 - p_2 + epsilon


def test_an_interval_turns_round_with_its_difference_and_agreement_narrows_it():
    first, second = pairs(60, 10, 4, 26)
    there, back = paired_difference(first, second), paired_difference(second, first)
    assert (there.value, there.low, there.high) == pytest.approx((-back.value, -back.high, -back.low))
    apart = paired_difference(*pairs(40, 30, 24, 6))  # the same margins, but the questions that went wrong are others
    assert apart.high - apart.low > 1.3 * (there.high - there.low)


def test_scores_between_right_and_wrong_are_resampled_question_by_question():
    first = [0.5, 1.0, 0.25, 0.75] * 100
    found = paired_difference(first, [value - 0.1 for value in first])
    assert (found.value, found.low, found.high) == pytest.approx((-0.1, -0.1 - 3 / 400, -0.1 + 3 / 400))  # all lost the same
    spread = paired_difference(first, [value - 0.5 * (index % 2) for index, value in enumerate(first)])
    assert spread.high - spread.low == pytest.approx(2 * 1.96 * 0.25 / math.sqrt(400), rel=0.1)


@pytest.mark.parametrize("changed", [0.0, 0.1, -0.1])
def test_few_questions_that_differ_leave_room_for_the_rule_of_three(changed):
    first = [0.5, 1.0, 0.25, 0.75] * 100
    found = paired_difference(first, [first[0] + changed, *first[1:]])
    assert found.value == pytest.approx(changed / 400)
    assert found.low <= found.value - 3 / 400 < 0 < found.value + 3 / 400 <= found.high


def test_a_ratio_weighs_questions_by_their_tokens():
    found = ratio_of_sums([1.0, 9.0], [1, 3])
    assert (found.value, found.low, found.high) == (2.5, 1.0, 3.0)


@pytest.fixture(scope="module")
def processor():
    return load_processor(DEMO)


@pytest.fixture(scope="module")
def model_and_weights():
    model = AutoModelForImageTextToText.from_pretrained(DEMO, dtype="auto", experts_implementation="eager").eval()
    return model, ExpertWeights(model, [SIXTEEN_BIT, INT2, INT2_NEAREST])


def test_putting_16_bit_back_is_the_model_as_it_was(model_and_weights):
    model, weights = model_and_weights
    original = AutoModelForImageTextToText.from_pretrained(DEMO, dtype=torch.float32)
    weights.put(INT2)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters()))
    experts = {f"{path}.{name}" for path, module in expert_modules(model) for name, _ in module.named_parameters()}
    for (name, mine), its in zip(model.named_parameters(), original.parameters()):
        assert name in experts or torch.equal(mine, its), name
    weights.put(SIXTEEN_BIT)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters()))


def test_answers_belong_to_all_weights_and_the_configuration_and_the_program(model_and_weights):
    def digest(change=lambda model: None) -> str:
        model = AutoModelForImageTextToText.from_pretrained(DEMO, dtype="auto", experts_implementation="eager")
        change(model)
        return ExpertWeights(model, [SIXTEEN_BIT]).digest(SIXTEEN_BIT)

    def other_embedding(model) -> None:
        model.get_input_embeddings().weight.data[5, 7] += 1

    def other_configuration(model) -> None:
        model.config.get_text_config().num_experts_per_tok += 1

    _, weights = model_and_weights
    assert digest() == weights.digest(SIXTEEN_BIT) != weights.digest(INT2)
    assert weights.digest(SIXTEEN_BIT) not in (digest(other_embedding), digest(other_configuration))
    assert program_digest(PROGRAM) == program_digest(list(PROGRAM)) != program_digest(PROGRAM[1:])


def test_answers_that_were_not_generated_are_those_that_generation_gives(model_and_weights, processor):
    model, weights = model_and_weights
    for kind in ("count", "turns"):
        talks = questions(kind, range(6), 7)
        judged = judge(model, processor, weights, talks, [SIXTEEN_BIT, INT2_NEAREST])
        for contestant, rows in judged.items():
            weights.put(contestant)
            said = answers(model, processor, talks)
            assert [row.answer for row in rows] == said
            assert [row.score for row in rows] == [score(talk.turns[-1], answer) for talk, answer in zip(talks, said)]
        assert all(row.divergence == 0 for row in judged[SIXTEEN_BIT])
        assert all(row.divergence > 0 for row in judged[INT2_NEAREST])


def test_a_question_is_judged_alike_alone_and_beside_longer_ones(model_and_weights, processor):
    model, weights = model_and_weights
    talks = questions("describe", range(3), 3)
    together = judge(model, processor, weights, talks, [INT2])[INT2]
    alone = [judge(model, processor, weights, [talk], [INT2])[INT2][0] for talk in talks]
    for one, other in zip(together, alone):
        assert (one.tokens, one.answer) == (other.tokens, other.answer)
        assert (one.divergence, one.surprise) == pytest.approx((other.divergence, other.surprise), rel=1e-2, abs=1e-5)


def test_fitted_experts_are_nearer_to_16_bit_than_rounded_ones(model_and_weights, processor):
    model, weights = model_and_weights
    talks = [talk for kind in ("where", "text") for talk in questions(kind, range(2), 5)]
    errors = expert_output_errors(model, processor, weights, talks, [SIXTEEN_BIT, INT2, INT2_NEAREST])
    assert errors[SIXTEEN_BIT] == 0
    assert errors[INT2] < 0.85 * errors[INT2_NEAREST]


def test_answers_are_kept_and_a_half_written_line_is_asked_again(tmp_path):
    kept = AnswerFile(tmp_path, "int2", {"seed": 0}, Judged)
    rows = {("what", 0): Judged(3, 0.25, 0.5, 'A "cat".', 1.0), ("what", 1): Judged(4, 0.0, 0.1, "A dog.", 0.0)}
    kept.add(rows)
    assert AnswerFile(tmp_path, "int2", {"seed": 0}, Judged).rows == rows
    file = tmp_path / "int2.jsonl"
    file.write_text(file.read_text()[:-5])
    again = AnswerFile(tmp_path, "int2", {"seed": 0}, Judged)
    assert again.rows == {("what", 0): rows["what", 0]}
    again.add({("what", 1): rows["what", 1]})
    assert AnswerFile(tmp_path, "int2", {"seed": 0}, Judged).rows == rows


def test_answers_of_anything_else_are_refused(tmp_path):
    AnswerFile(tmp_path, "int2", {"weights": "these", "seed": 0}, Judged)
    with pytest.raises(InputError, match=r"holds answers of another model, other questions, .* --work"):
        AnswerFile(tmp_path, "int2", {"weights": "others", "seed": 0}, Judged)


def test_a_summary_pairs_each_format_with_16_bit_and_with_rounding():
    kinds = [kind for kind in KINDS for _ in range(4)]
    exact = [Judged(2, 0.0, 0.2, "yes", 1.0) for _ in kinds]
    fitted = [Judged(2, 0.1, 0.4, "yes", float(index % 4 > 0)) for index in range(len(kinds))]
    nearest = [Judged(2, 0.4, 0.8, "no", float(index % 2)) for index in range(len(kinds))]
    table = {SIXTEEN_BIT: exact, INT2: fitted, INT2_NEAREST: nearest}
    found = summary(table, kinds, {SIXTEEN_BIT: 0.0, INT2: 0.3, INT2_NEAREST: 0.5})
    row = found["contestants"]["int2"]
    assert row["divergence"]["value"] == pytest.approx(0.05) and row["perplexity"] == pytest.approx(1.2214, abs=1e-4)
    assert row["accuracy"]["what"]["mean"] == 0.75 and row["accuracy"]["what"]["difference"]["value"] == -0.25
    assert row["accuracy"]["all"]["difference"]["low"] < -0.25 < row["accuracy"]["all"]["difference"]["high"] < 0
    against = found["against_nearest"]["int2"]
    assert against["divergence_ratio"]["value"] == pytest.approx(0.25)
    assert against["accuracy_difference"]["value"] == pytest.approx(0.25)


def test_the_command_prints_tables_and_a_json_line_and_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vismoe.eval.studies.formats.OUTPUT_ERROR_QUESTIONS", 1)
    command = ["--formats", "int2", "--questions", "9", "--work", str(tmp_path)]
    assert main(command) == 0
    *tables, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["questions"] == 9 and set(result["contestants"]) == {"16 bit", "int2", "int2, nearest"}
    assert any("KL" in line for line in tables)
    before = (tmp_path / "int2.jsonl").read_text()
    assert json.loads(before.splitlines()[0]).keys() == {"weights", "program", "seed", "world"}
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result and (tmp_path / "int2.jsonl").read_text() == before
