"""Runs lmms-eval's own harness in this process on a loaded engine, for `vismoe eval --lmms`.

All output of harness and tasks goes to stderr.
"""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from vismoe.engine.engine import Engine
from vismoe.errors import InputError
from vismoe.eval.lmms import TASKS

LIKELIHOODS = ("multiple_choice", "loglikelihood")  # lmms-eval supports these in its simple form only


def run_tasks(
    engine: Engine,
    names: Sequence[str],
    limit: int | None = None,
    offset: int = 0,
    batch_size: int = 1,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Runs the first `limit` documents of each task, from `offset` on; max_tokens: limit of answers if a task sets none.

    -> {"limit", "offset", "tasks": {task: {metric: value}}, "answers": [{"task", "document", "target", "answer", "score"}]}; a
    score is None if a task scores its answers together; an answer to a scenes task also has "kind", "number" and "question".
    Raises InputError for an unknown task.
    """
    with contextlib.redirect_stdout(sys.stderr):
        from lmms_eval.evaluator import simple_evaluate
        from lmms_eval.tasks import TaskManager
        from loguru import logger

        from vismoe.eval.lmms_model import VisMoE, VisMoEChat

        logger.remove()
        logger.add(sys.stderr, level="WARNING")
        ours = TaskManager("WARNING", include_path=str(TASKS), include_defaults=False, model_name="vismoe")
        known = ours if set(names) <= set(ours.all_tasks) else TaskManager("WARNING", str(TASKS), model_name="vismoe")
        if missing := set(names) - set(known.all_tasks):
            raise InputError(
                f"no such task: {', '.join(sorted(missing))}. VisMoE's tasks are {', '.join(ours.all_subtasks)}; "
                f"`lmms-eval --tasks list` names the others"
            )
        form = VisMoE if any(_output_type(known, name) in LIKELIHOODS for name in names) else VisMoEChat
        found = simple_evaluate(
            model=form(engine, batch_size=batch_size, max_new_tokens=max_tokens),
            tasks=list(names),
            limit=limit,
            offset=offset,
            batch_size=batch_size,
            task_manager=known,
            verbosity="WARNING",
        )
    scores = {  # the numbers without the names of filters, as in "pope_accuracy,none"
        task: {name.removesuffix(",none"): float(value) for name, value in values.items() if isinstance(value, int | float)}
        for task, values in found["results"].items()
    }
    answers = [
        _answer(task, sample, [row["metric"] for row in found["configs"][task].get("metric_list", ())])
        for task, samples in found["samples"].items()
        for sample in samples
    ]
    return {"limit": limit, "offset": offset, "tasks": scores, "answers": answers}


def _output_type(manager: Any, name: str) -> str | None:
    from lmms_eval.utils import load_yaml_config

    path = manager.task_index[name]["yaml_path"]
    return load_yaml_config(path, mode="simple").get("output_type") if path != -1 else None


def _answer(task: str, sample: dict[str, Any], metrics: Sequence[str]) -> dict[str, Any]:
    document = {name: sample["doc"][name] for name in ("kind", "number", "question") if name in sample["doc"]}
    (answer,) = sample["filtered_resps"] if len(sample["filtered_resps"]) == 1 else (sample["filtered_resps"],)
    said = {"target": sample["target"], "answer": answer, "score": _score(sample, metrics)}
    return {"task": task, "document": sample["doc_id"], **document, **said}


def _score(sample: dict[str, Any], metrics: Sequence[str]) -> float | None:
    """The score by the first metric that scores single answers."""
    found = [sample[metric] for metric in metrics if metric in sample]
    scores = [value.get("score") if isinstance(value, dict) else value for value in found]
    return next((float(score) for score in scores if isinstance(score, int | float)), None)
