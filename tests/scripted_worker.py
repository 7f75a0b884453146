"""Stands in for the process in which a suite runs a model: no torch, answers follow from the settings, every job is written down.

A job's settings decide what becomes of it: `random` answers every second question wrong, `int2` the first of each kind, 1% of
memory is refused, and `uniform` ends the process; MEND in the environment takes the last two away. INTERRUPT names the file of a
row: once it holds the answers of a batch, Ctrl-C is sent to the suite. A task has two documents, whatever is asked for.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

JOURNAL = Path(os.environ["JOURNAL"])


def said(settings, number, truth):
    wrong = (settings.get("selection") == "random" and number % 2) or (settings["format"] == "int2" and number == 0)
    return "umm" if wrong else truth


def answer(job):
    from vismoe.eval.answer_file import questions  # takes longer than all the rest
    from vismoe.eval.scoring import score

    settings = job["settings"]
    if "MEND" not in os.environ:
        if settings["memory"] == "1%":
            return {"error": "memory=1%: too little\nFix: --memory 5%"}
        if settings.get("selection") == "uniform":
            print("about to die", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    for place, keys in enumerate(job["batches"]):
        if place and settings.get("selection") == "visionzip" and "INTERRUPT" in os.environ:
            while Path(os.environ["INTERRUPT"]).read_text().count("\n") < 1 + len(keys):
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)
        part = []
        if job["data"]["data"] == "tasks":
            fields = {"question": "", "truth": "yes", "answer": "no", "score": float(settings["keep"] == 1), "computed": {}}
            tell({"part": [[*key, fields] for key in keys[:2]]})
            continue
        talks = questions(keys[0][0], [number for _, number in keys], job["data"]["seed"])
        for (kind, number), talk in zip(keys, talks, strict=True):
            turn = talk.turns[-1]
            words = said(settings, number, turn.answer)
            fields = {"question": turn.question, "truth": turn.answer, "answer": words, "score": score(turn, words)}
            fields["computed"] = {"raw": 6, "int4": 2} if "policy" in settings else {settings["format"]: 8}
            part.append([kind, number, fields])
        tell({"part": part})
    return {"result": {}}


def speed(job):
    made = JOURNAL.read_text().count('"do": "speed"')
    names = "load_s first_token_s prefill_s prefill_bytes decode_bytes_per_token prefill_hit_rate decode_hit_rate expert_bytes"
    turn = dict.fromkeys([*names.split(), "planned_bytes"], 1.0)
    return {"result": turn | {"decode_tokens_per_s": 100.0 + made, "grown_bytes": None}}


def describe(job):
    machine = {"cpu": "a scripted one", "cores": 2, "gpus": []}
    about = {"model": "scripted", "fingerprint": "f", "program": "p", "experts_bytes": 2**20, "versions": {}, "machine": machine}
    return {"result": about | {"store": None, "packed": ["int8"]}}


def pack(job):
    Path(job["folder"]).mkdir(parents=True, exist_ok=True)
    tell({"part": 0.5})
    return {"error": "no room"} if job["format"] == "lossless" else {"result": {}}


def tell(message):
    print(json.dumps(message), flush=True)


for line in sys.stdin:
    with JOURNAL.open("a") as journal:
        journal.write(line)
    job = json.loads(line)
    tell({"answer": answer, "speed": speed, "describe": describe, "pack": pack}[job["do"]](job))
