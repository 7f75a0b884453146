"""Trains the networks of a learned lookahead on collected traces: one per phase, in minutes on two cores for the demo model.

`python -m vismoe.predictor_training.train TRACE... --out predictor.safetensors`

Loss: soft binary cross-entropy on targets that decay with the distance (VisMMoE, eq. 9, `gamma` 0.8), without rows past the last
layer. Every layer has its own weights, and a batch holds all layers of its forward passes. Every tenth image validates: training
ends when the validation loss has not fallen for some epochs, and the best epoch is kept. Seeded; CPU or GPU.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from vismoe.errors import ConfigError, InputError, VisMoEError
from vismoe.flags import SuggestingParser
from vismoe.lookahead.features import LARGEST
from vismoe.lookahead.network import FLOOR, PARTS, Folded, Predictor, Shape, save_folded
from vismoe.predictor_training.collect import progress_bar
from vismoe.predictor_training.prompts import is_validation
from vismoe.predictor_training.samples import Samples, read_samples
from vismoe.trace.files import Trace
from vismoe.types import Phase

GAMMA = 0.8  # VisMMoE, 3.3.3
FEWEST = 2  # prompts to train on
LEAST_STEPS = 11  # of the schedule; its warm-up is a tenth, which would be empty with 10

Report = Callable[[int, float, float], None]  # (epoch, training loss, validation loss)


@dataclass(frozen=True)
class TrainingRecipe:
    """How a network is trained; the defaults are those of the bundled predictor."""

    parts: tuple[str, ...] = PARTS
    merged: bool = False  # the paper's form, for comparison
    bottleneck: int = 64
    dropout: float = 0.1
    gamma: float = GAMMA
    rate: float = 2e-3
    decay: float = 1e-2  # of weights
    batch: int = 128  # forward passes
    epochs: int = 12
    patience: int = 4
    seed: int = 0


def refuse_device(name: str) -> None:
    """Raises ConfigError for a device that this machine cannot train on."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--train-device {name}: {reason}. Fix: --train-device cpu") from error


def refuse_too_few(names: Sequence[str]) -> None:
    """Raises InputError if prompts with these names are too few to train on, or leave none for validation."""
    validate = [is_validation(name) for name in names if name.startswith("train/")]
    if len(validate) - sum(validate) < FEWEST or not any(validate):
        raise InputError(
            f"{len(names)} prompts are too few: {len(validate) - sum(validate)} to train on, {sum(validate)} to validate with "
            "(one in ten images or texts, drawn by content). Fix: give more prompts (some dozens)"
        )


class Batches:
    """Inputs and targets of the network on a device, made from samples one batch at a time."""

    def __init__(self, samples: Samples, shape: Shape, gamma: float, device: torch.device):
        self.samples, self.shape, self.gamma, self.device = samples, shape, gamma, device
        sizes = samples.sizes
        ahead = np.arange(sizes.layers - 1)[:, None] + 1 + np.arange(sizes.window)  # [D, W]
        self.exists = torch.from_numpy(ahead < sizes.layers).to(device)
        self.ahead = np.minimum(ahead, sizes.layers - 1)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device).float()

    def inputs(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x `[D, N, inputs]` and, if routers are used, gate `[D, N, 2, W, E]` (chosen, log p)."""
        s, deciding = self.samples, self.shape.deciding
        parts, gate = [], None
        if "history" in self.shape.parts:
            use = self._on_device(s.use[rows][:, self.ahead]) * self.exists[..., None]  # [N, D, W, E]
            parts += [self._on_device(s.present[rows, :deciding]), use.flatten(2)]
        if "hidden" in self.shape.parts:
            parts.append(self._on_device(s.hidden[rows, :deciding]))
        if "visual" in self.shape.parts:
            parts.append(self._on_device(s.visuals[s.visual_of[rows, :deciding]]))
        if "gate" in self.shape.parts:
            assert s.expected is not None
            said = self._on_device(s.expected[rows, :deciding])  # [N, D, 2, W, E]
            likely = said[:, :, 1].clamp(min=FLOOR).log()
            gate = torch.stack([said[:, :, 0], likely], dim=2).transpose(0, 1)
            parts.append(likely.flatten(2))
        return torch.cat(parts, dim=-1).clamp(-LARGEST, LARGEST).transpose(0, 1), gate

    def targets(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Soft targets `[D, N, W, E]` and a mask of valid rows `[D, N, W, 1]`; for the merged form `[D, N, 1, E]` with the
        largest."""
        shares = self._on_device(self.samples.present[rows][:, self.ahead])  # [N, D, W, E]
        counts = self._on_device(self.samples.seen[rows][:, self.ahead]) * self.exists  # [N, D, W]
        decay = self.gamma ** torch.arange(self.samples.sizes.window, device=self.device)
        wanted, mask = (shares * decay[:, None]).transpose(0, 1), counts.transpose(0, 1)[..., None]
        if self.shape.merged:
            return (wanted * mask).amax(2, keepdim=True), mask.amax(2, keepdim=True)
        return wanted, mask

    def standardise(self, model: Predictor, rows: np.ndarray) -> None:
        """Mean and spread of the inputs, from some of the rows."""
        x, _ = self.inputs(rows)
        model.mean.copy_(x.mean(1, keepdim=True))
        model.scale.copy_(1 / x.std(1, keepdim=True).clamp(min=1e-2))


def loss_of(model: Predictor, batches: Batches, rows: np.ndarray) -> torch.Tensor:
    """Soft binary cross-entropy, mean over valid rows."""
    wanted, mask = batches.targets(rows)
    logits = model(*batches.inputs(rows))
    each = binary_cross_entropy_with_logits(logits, wanted, reduction="none") * mask
    return each.sum() / (mask.sum() * each.shape[-1]).clamp(min=1)


def train(
    samples: Samples, recipe: TrainingRecipe, report: Report = lambda epoch, loss, validation: None, device: str = "cpu"
) -> Folded:
    """A trained network, ready to run, for the phase of `samples` (training and validation requests)."""
    parts = tuple(part for part in recipe.parts if part != "gate" or samples.expected is not None)
    shape = Shape(samples.sizes, parts, recipe.bottleneck, recipe.merged)
    validating = np.array([is_validation(name) for name in samples.requests], bool)[samples.request]
    learn, validate = np.flatnonzero(~validating), np.flatnonzero(validating)
    if len(learn) < 2 or not len(validate):
        raise InputError(
            f"{len(learn)} forward passes to train on and {len(validate)} to validate with are too few. "
            "Fix: collect more prompts (some dozens)"
        )
    torch.manual_seed(recipe.seed)
    random, place = np.random.default_rng(recipe.seed), torch.device(device)
    model = Predictor(shape, recipe.dropout).to(place)
    batches = Batches(samples, shape, recipe.gamma, place)
    with torch.no_grad():
        batches.standardise(model, random.permutation(learn)[:2048])
    optimizer = torch.optim.AdamW(model.parameters(), recipe.rate, weight_decay=recipe.decay)
    steps = max(1, len(learn) // recipe.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.rate, total_steps=max(LEAST_STEPS, recipe.epochs * steps + 1), pct_start=0.1
    )
    best, best_loss, since = {name: value.clone() for name, value in model.state_dict().items()}, float("inf"), 0
    for epoch in range(recipe.epochs):
        model.train()
        total = 0.0
        for rows in np.array_split(random.permutation(learn), steps):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, batches, np.sort(rows))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        held = _validation_loss(model, batches, validate)
        report(epoch + 1, total / steps, held)
        if held < best_loss:
            best, best_loss, since = {name: value.clone() for name, value in model.state_dict().items()}, held, 0
        else:
            since += 1
            if since >= recipe.patience:
                break
    model.load_state_dict(best)
    return model.eval().folded()


@torch.no_grad()
def _validation_loss(model: Predictor, batches: Batches, rows: np.ndarray) -> float:
    model.eval()
    chunks = np.array_split(rows, -(-len(rows) // 512))
    return sum(float(loss_of(model, batches, chunk)) * len(chunk) for chunk in chunks) / len(rows)


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    epochs, width = TrainingRecipe.epochs, TrainingRecipe.bottleneck
    parser.add_argument("--epochs", type=int, default=epochs, metavar="N", help=f"most epochs (default: {epochs})")
    parser.add_argument("--bottleneck", type=int, default=width, metavar="N", help=f"width of the network (default: {width})")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--train-device", default="cpu", metavar="DEVICE", help="device for training, cpu or cuda (default: cpu)")


def recipe_of(given: argparse.Namespace) -> TrainingRecipe:
    return TrainingRecipe(epochs=given.epochs, bottleneck=given.bottleneck, seed=given.seed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = SuggestingParser(prog="python -m vismoe.predictor_training.train", description=__doc__.split("\n\n")[0])
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="folders that collect recorded")
    parser.add_argument(
        "--out", default="predictor.safetensors", metavar="FILE", help="file for the predictor (default: predictor.safetensors)"
    )
    add_training_flags(parser)
    given = parser.parse_args(arguments)
    try:
        refuse_device(given.train_device)
        samples = read_samples([Trace.open(path) for path in given.traces])
        with progress_bar() as bar:
            tasks = {phase: bar.add_task(f"training, {phase}", total=given.epochs) for phase in samples}

            def report(phase: Phase, epoch: int, loss: float, validation: float) -> None:
                bar.update(tasks[phase], completed=epoch)
                bar.console.print(f"{phase} {epoch:3d}: loss {loss:.5f}, validation {validation:.5f}")

            learn = {phase: of.where(lambda name: name.startswith("train/")) for phase, of in samples.items()}
            networks = {
                str(phase): train(of, recipe_of(given), partial(report, phase), given.train_device) for phase, of in learn.items()
            }
        Path(given.out).write_bytes(save_folded(networks))
    except (VisMoEError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: {Path(given.out).stat().st_size / 2**20:.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
