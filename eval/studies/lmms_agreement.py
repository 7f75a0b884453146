"""`vismoe eval agreement`: compares the four scenes tasks in lmms-eval with `vismoe eval --scenes`, on the same questions.

Both use one loaded model. The last line is one JSON object.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from vismoe.engine.engine import Engine, load
from vismoe.eval.accuracy import evaluate
from vismoe.eval.lmms_run import run_tasks
from vismoe.eval.suite_rows import EVAL_BATCH
from vismoe.flags import SuggestingParser

KINDS = {"scenes_pope": ["exists"], "scenes_mmbench": ["choice"], "scenes_ocr": ["text"], "scenes_mme": ["exists", "compare"]}
SCORES = {"scenes_pope": ("pope_accuracy", 1), "scenes_mmbench": ("mmbench_accuracy", 100), "scenes_ocr": ("ocr_characters", 1)}


def agreement(engine: Engine, n: int) -> list[dict[str, Any]]:
    """A row per task: `lmms` and `scenes`, the scores between 0 and 1, the number of questions, and of `same` answers.

    Of scenes_mme the first questions of the pairs are compared, with MME's scoring; the second questions exist only there.
    """
    found = {task: run_tasks(engine, [task], (1 + (task == "scenes_mme")) * n, batch_size=EVAL_BATCH) for task in KINDS}
    kinds = sorted({kind for kinds in KINDS.values() for kind in kinds})
    asked = evaluate(engine, 0, n, kinds, EVAL_BATCH)["answers"]
    numbered = {(row["kind"], number % n): row for number, row in enumerate(asked)}
    return [_row(task, result, numbered) for task, result in found.items()]


def _row(task: str, result: dict[str, Any], asked: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    pairs = [(said, asked[said["kind"], said["number"]]) for said in result["answers"]]
    pairs = [(said, row) for said, row in pairs if said["question"] == row["question"]]
    if task in SCORES:
        metric, whole = SCORES[task]
        score = result["tasks"][task][metric] / whole
    else:
        score = sum(_right_for_mme(said) for said, _ in pairs) / len(pairs)
    return {
        "task": task,
        "kinds": KINDS[task],
        "questions": len(pairs),
        "same": sum(said["answer"] == row["answer"].strip() for said, row in pairs),
        "lmms": score,
        "scenes": sum(row["score"] for _, row in pairs) / len(pairs),
    }


def _right_for_mme(said: dict[str, Any]) -> bool:
    from lmms_eval.tasks.mme.utils import parse_pred_ans

    return parse_pred_ans(said["answer"]) == said["target"].lower()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| keep | task | questions | lmms-eval | `vismoe eval --scenes` | same answers |", "|---|---|---|---|---|---|"]
    for row in rows:
        scores = f"{row['lmms']:.2%} | {row['scenes']:.2%} ({', '.join(row['kinds'])})"
        lines.append(f"| {row['keep']:.0%} | {row['task']} | {row['questions']} | {scores} | {row['same']} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = SuggestingParser(prog="vismoe eval agreement", description=__doc__)
    parser.add_argument("--n", type=int, default=100, metavar="N", help="questions of each kind (default: 100)")
    parser.add_argument("--keep", type=float, nargs="+", default=[1.0, 0.5], metavar="SHARE", help="(default: 1 0.5)")
    given = parser.parse_args(arguments)
    rows = []
    for keep in given.keep:
        with load(memory="100%", keep=keep) as engine:
            rows += [{"keep": keep, **row} for row in agreement(engine, given.n)]
    print(table(rows))
    print(json.dumps({"n": given.n, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
