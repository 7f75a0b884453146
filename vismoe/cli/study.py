"""`vismoe eval STUDY ...`: the programs of the tables in docs/, each with its own flags; `python -m` runs them as well."""

import importlib.util
from collections.abc import Sequence

from vismoe.errors import ConfigError
from vismoe.flags import quick_imports

STUDIES = {  # name: (module of vismoe with a main(arguments), what it shows)
    "same-bits": ("eval.same_bits", "what changes bits of logits: batching, threads, cached prefixes, chunks"),
    "pruning": ("eval.studies.pruning", "accuracy by share and selection of kept visual tokens"),
    "claims": ("eval.studies.claims", "the papers' claims beside what both bundled models show, with their signs"),
    "properties": ("eval.studies.properties", "whether a model could show what the papers claim, before anything is dropped"),
    "demand": ("eval.studies.expert_demand", "which experts are demanded before and after pruning"),
    "compressor": ("eval.studies.compressor_cost", "time to capture a vision tower's attention and to select tokens"),
    "predictor": ("predictor_training.evaluate", "how well lookaheads predict experts"),
    "lookahead-cost": ("predictor_training.cost", "time of a lookahead, and what it delays"),
    "controllers": ("eval.studies.controller_cost", "time of the precision controllers per token"),
    "precision": ("eval.studies.precision_quality", "quality with dynamic precision: hotness, importance, retention, layers"),
    "precision-speed": ("eval.studies.precision_speed", "what a cache, prefetch and two formats save on an emulated link"),
    "precision-shift": ("eval.studies.precision_shift", "how soon hot experts follow a change of workload, and what that costs"),
    "precision-replay": ("eval.studies.precision_replay", "alpha, T, hysteresis, forecasts and pools of policies, by replay"),
    "orchestrator": ("eval.studies.orchestrator", "eviction orders and lookaheads at several cache sizes, the pinned prefix"),
    "drafts": (
        "eval.studies.drafts",
        "what drafts cost and save: over a link, at equal memory, wrong, on texts",
    ),
    "ladder": ("eval.studies.ladder", "what pruning, prediction and orchestration each save"),
    "agreement": (
        "eval.studies.lmms_agreement",
        "lmms-eval's scenes tasks compared with vismoe eval --scenes, on the same questions",
    ),
    "soak": ("eval.studies.soak", "memory of a server under clients that ask, hang up and send nonsense"),
    "draft-replay": ("eval.studies.draft_replay", "whether drafts are taken where they are faster, in virtual time"),
    "draft-coverage": ("eval.studies.draft_coverage", "layers that find all experts resident when drafted tokens are verified"),
    "simulated": ("eval.studies.simulated", "vismoe simulate against measured decode; the page of machines for models"),
    "formats": ("eval.studies.formats", "quality of the integer formats"),
}


def study_list() -> str:
    """One line per study, for --help."""
    return "\n".join(f"  vismoe eval {name:<16} {summary}" for name, (_, summary) in STUDIES.items())


def run_study(name: str, arguments: Sequence[str]) -> int:
    """Runs the study's own main; returns the exit code. Raises ConfigError if studies are not installed."""
    module = f"vismoe.{STUDIES[name][0]}"
    if importlib.util.find_spec(module.rpartition(".")[0]) is None:
        raise ConfigError(
            f"the study {name} is not installed: studies are part of the repository, not of the package. "
            "Fix: run vismoe eval in a clone of the repository after `make demo`"
        )
    with quick_imports():
        study = importlib.import_module(module)
    code: int = study.main(arguments)
    return code
