"""What the chat page can load: models on disk with what this machine can hold of them, and a choice of model and settings.

Plans are made one after another in a thread, from configuration files and headers alone. Nothing here downloads weights or runs
code of a checkpoint. Needs no optional package.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from vismoe.app.on_disk import models_on_disk, vision_tower_beside
from vismoe.app.options import served_name
from vismoe.config import ENGINE_DEFAULTS, NO_STORE, SERVING_DEFAULTS, Settings, format_bytes, parse_formats
from vismoe.engine.engine import demo_model
from vismoe.errors import BudgetError, ConfigError, UnsupportedModelError, VisMoEError
from vismoe.machine.facts import facts
from vismoe.machine.profile import load_profile
from vismoe.models.family.checkpoint_files import config_file
from vismoe.models.load.preview import checkpoint_files, preview
from vismoe.pair import Format
from vismoe.planning.needs import Hardware
from vismoe.planning.plan import Plan
from vismoe.store.gguf_header import GGUF
from vismoe.store.packed import formats_in, store_beside

log = logging.getLogger("vismoe")

OF_ONE_MODEL = ("gguf", "mmproj", "store", "calibration", "hotness_state")  # settings that no other model can use
CHOSEN = ("memory", "context", "policy", "format", "formats")  # settings that the page changes
FLAG = re.compile(r"--([\w-]+) (\S+)")
DEMO = "The demo model"
VISION = "vision tower"  # its part in a plan


@dataclass(frozen=True)
class ModelChoice:
    """A model with the settings to load it with."""

    name: str  # as the page shows it
    model: str  # a folder, a file or a hub name
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # device, dtype, revision

    def plan(self, hardware: Hardware | None = None) -> Plan:
        """The plan that loading would follow. Raises what loading would raise."""
        settings = Settings.of(**{**ENGINE_DEFAULTS, **self.settings})
        return preview(self.model, settings, hardware=hardware, **self.options)

    def with_settings(self, **change: Any) -> "ModelChoice":
        """The same with these settings in place of the page's; None leaves one at its default."""
        kept = {name: value for name, value in self.settings.items() if name not in CHOSEN}
        return ModelChoice(self.name, self.model, {**kept, **{k: v for k, v in change.items() if v is not None}}, self.options)

    def packed(self) -> tuple[Format, ...]:
        """The formats in which experts are packed for this model, on this machine. Raises CheckpointError or ConfigError."""
        files, store = self.files(), self.settings.get("store")
        if not files or store == NO_STORE:
            return ()
        return formats_in(Path(store).expanduser() if store else store_beside(files[0]))

    def files(self) -> list[Path]:
        """The files of its weights; empty where they are not on this machine. Raises CheckpointError or ConfigError."""
        revision = self.options.get("revision")
        file = self.settings.get("gguf") or (self.model if self.model.endswith(GGUF) else None)
        if file:
            return [Path(file).expanduser()]
        config_file(self.model, revision)  # says what is wrong with a name
        return checkpoint_files(self.model, revision=revision)

    def download_bytes(self) -> int | None:
        """What loading would download of weights; None where the hub does not say it."""
        from huggingface_hub import HfApi

        try:
            files = HfApi().model_info(self.model, revision=self.options.get("revision"), files_metadata=True).siblings or []
        except Exception as error:  # the boundary to the network
            log.info("the size of %s is not known: %s", self.model, error)
            return None
        return sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors")) or None


def offered_formats(packed: tuple[Format, ...], pairs: tuple[str, ...]) -> dict[str, list[str]]:
    """The policies that can serve experts packed in these formats, each with the formats or those of `pairs` that it can use."""
    alone = ["auto", *(str(one) for one in packed if not one.exact)]
    here = {Format.RAW, *packed}
    parsed = [(pair, parse_formats(pair)) for pair in pairs]
    usable = [(pair, both) for pair, both in parsed if both.high in here and (both.low is None or both.low in here)]
    hot = [pair for pair, both in usable if both.low is not None]  # experts that are not hot need a format, too
    some = [pair for pair, _ in usable] if packed else []
    policies = {"exact": alone, "hotness": hot, "importance": some, "hotness+importance": hot}
    return {policy: formats for policy, formats in policies.items() if formats}


def fix_of(error: Exception) -> dict[str, str]:
    """The settings of the page that mend a refused plan; empty where its fix is something else."""
    fix = error.fix if isinstance(error, BudgetError) else ""
    flags = dict(FLAG.findall(fix))
    whole = " ".join(f"--{name} {value}" for name, value in flags.items()) == fix
    return flags if whole and flags.keys() <= set(CHOSEN) else {}


@dataclass(frozen=True)
class Proposal:
    """What this machine can do with a model that was found; `plan` is None while it is not known, and where it is refused."""

    choice: ModelChoice
    size_bytes: int
    plan: Plan | None = None
    refusal: str = ""

    def words(self) -> str:
        """For a list: what it sees, its size, and how much of it fits."""
        if self.plan is None:
            return f"{format_bytes(self.size_bytes)} on disk. {self.refusal or 'Looking at what fits ...'}"
        quick = " Small: it answers at once." if self.choice.name == DEMO else ""
        seen = "Sees pictures" if self.plan.bytes_of(VISION) else "Text only"
        return f"{seen}, {format_bytes(self.size_bytes)} on disk.{quick} {self.fit()}"

    def fit(self) -> str:
        """How many experts memory holds, and the expected speed."""
        assert self.plan is not None
        share = self.plan.resident_experts / self.plan.total_experts
        fits = "Fits whole" if share == 1 else f"{share:.0%} of its experts fit in memory, the others are read as needed"
        if not self.plan.passes:
            return f"{fits}."
        rate = self.plan.passes[0].tokens_per_s
        return f"{fits}; about {rate:.0f} tokens/s expected." if rate >= 10 else f"{fits}; about {rate:.1g} tokens/s expected."


@dataclass
class Catalog:
    """The models that the page lists, by name. `given`: what the command line asked for; its settings are the usual ones.

    `number` changes with the list.
    """

    given: ModelChoice | None = None
    usual: Mapping[str, Any] = field(default_factory=lambda: dict(SERVING_DEFAULTS))  # settings, of any model
    options: Mapping[str, Any] = field(default_factory=dict)  # device and dtype, of any model
    number: int = 0
    _found: dict[str, Proposal] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _looking: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._found = {proposal.choice.name: proposal for proposal in self._listed({})}

    @classmethod
    def of(cls, model: str | None, settings: Mapping[str, Any], options: Mapping[str, Any]) -> "Catalog":
        """For a command line with this model (None: there is none yet), and with settings and options of loading."""
        usual = {name: value for name, value in settings.items() if name not in OF_ONE_MODEL}
        named = model or settings.get("gguf")
        own = settings if model else {name: value for name, value in settings.items() if name != "gguf"}
        given = ModelChoice(served_name(str(named)), str(named), own, options) if named else None
        return cls(given, usual, {name: value for name, value in options.items() if name != "revision"})

    @property
    def found(self) -> dict[str, Proposal]:
        """The models, the demo model first."""
        with self._lock:
            return dict(self._found)

    def choice_of(self, name: str) -> ModelChoice:
        """The choice for a listed name, a folder or a hub name. Raises ConfigError where there is none."""
        if not name or not name.strip():
            raise ConfigError("no model is named. Fix: write a folder of this machine, or a name on the hub")
        if (listed := self.found.get(name)) is not None:
            return listed.choice
        model = str(Path(name.strip()).expanduser()) if name.startswith("~") else name.strip()
        return self._choice(served_name(model), model)

    def _choice(self, name: str, model: str) -> ModelChoice:
        tower = vision_tower_beside(Path(model)) if model.endswith(GGUF) else None
        return ModelChoice(name, model, {**self.usual, **({"mmproj": str(tower)} if tower else {})}, self.options)

    def look(self, plan: Callable[[ModelChoice], Plan]) -> None:
        """Looks at the disk, and plans what is new by `plan`, in a thread."""
        with self._lock:
            if self._looking is None or not self._looking.is_alive():
                self._looking = threading.Thread(target=self._look, args=(plan,), daemon=True, name="vismoe-catalog")
                self._looking.start()

    def _look(self, plan: Callable[[ModelChoice], Plan]) -> None:
        before, after = self.found, dict[str, Proposal]()
        on_disk = {name: Proposal(self._choice(name, model), nbytes) for name, model, nbytes in models_on_disk()}
        for proposal in self._listed(on_disk):
            name = proposal.choice.name
            known = before.get(name)
            after[name] = known if known and known.plan and known.size_bytes == proposal.size_bytes else proposal
        self._put(after)
        for name, proposal in after.items():
            if proposal.plan is None and not proposal.refusal:
                planned = self._planned(proposal, plan)
                after = {**self.found, name: planned} if planned else {k: v for k, v in self.found.items() if k != name}
                self._put(after)

    def _put(self, found: dict[str, Proposal]) -> None:
        with self._lock:
            self.number += found != self._found
            self._found = found

    def _listed(self, found: dict[str, Proposal]) -> Iterator[Proposal]:
        """The demo model, what the command line asked for, and what was found."""
        demo, given = str(demo_model()), self.given
        if given is None or given.model != demo:
            yield Proposal(self._choice(DEMO, demo), bytes_of_weights(demo))
        if given is not None:
            cached = found.pop(given.name, None)
            yield Proposal(given, cached.size_bytes if cached else bytes_of_weights(given.model))
        yield from (proposal for proposal in found.values() if given is None or proposal.choice.model != given.model)

    @staticmethod
    def _planned(proposal: Proposal, plan: Callable[[ModelChoice], Plan]) -> Proposal | None:
        """With its plan, or why there is none; None for a model that this package cannot serve."""
        choice, nbytes = proposal.choice, proposal.size_bytes
        try:
            return Proposal(choice, nbytes, plan(choice))
        except UnsupportedModelError as error:
            log.info("not listed: %s", error)
            return None
        except VisMoEError as error:
            return Proposal(choice, nbytes, refusal=f"Not with these settings: {str(error).splitlines()[0]}.")


def bytes_of_weights(model: str) -> int:
    """Of a folder's weights, or of a file; 0 for a hub name."""
    path = Path(model).expanduser()
    files = path.glob("*.safetensors") if path.is_dir() else [path] if path.is_file() else []
    return sum(file.stat().st_size for file in files)


def machine_words() -> str:
    """What this machine has, in one line; rates as `vismoe doctor` has stored them."""
    found, profile = facts(), load_profile()
    words = [f"{format_bytes(found.ram_free_bytes)} of {format_bytes(found.ram_total_bytes)} memory free"]
    words += [f"{gpu.name} with {format_bytes(gpu.memory_bytes)}" for gpu in found.gpus] or ["no GPU"]
    rate = profile.best_disk_bytes_per_s(constants.HF_HUB_CACHE) if profile else None
    words.append(f"disk {rate / 1e9:.1f} GB/s" if rate else "disk not measured (vismoe doctor)")
    return ", ".join(words)
