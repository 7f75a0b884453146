"""Train the demo model from scratch: `python assets/train_demo_model.py`.

With no options this is the recipe of the committed assets/demo-model, except for the differences described above STAGES; the
result is in ~/.cache/vismoe/train/model (`--work`), to be copied by hand. It has not been run on a GPU yet. First the vision
tower learns to see, with temporary heads that name the content of each visual token; then the whole model learns to answer, from
plain scenes to the full world. Batches are functions of (stage, step), the state is saved regularly, and a restart continues from
it.
"""

import argparse
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from demo_recipe.batches import Batch, Mixture, Writer, attention_mask, make_batch, positions
from demo_recipe.files import build_config, build_tokenizer, write_files
from demo_recipe.growth import grow, grown_config
from demo_recipe.network import Inside, TrainingNetwork, linear
from demo_recipe.optimizer import optimizers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3VLMoeForConditionalGeneration

from vismoe.eval.scenes import GALLERY, GALLERY_PX, WORLD, Difficulty
from vismoe.eval.world import DIGITS, LETTERS, NOUNS, POSITIONS, plural

SEED = 2026
WORKERS = 2  # batches per step; on a CPU one single-threaded process each, which is faster than two threads on a shared machine
WARM_UP_STEPS = 50
LOG_STEPS = 50
SAVE_STEPS = 250
HEAD_SIZES = (1 + len(NOUNS), 1 + len(LETTERS + DIGITS), 1 + len(LETTERS + DIGITS))
LARGE_TEXT = Difficulty(label_share=0.5, font_px=(32, 48), text_length=(1, 4), word_share=0.3)


CALM_MALLOC = {  # makes glibc keep freed blocks, because fresh pages cost more than the arithmetic on them
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "MALLOC_ARENA_MAX": "1",
}


@dataclass(frozen=True)
class Stage:
    """A stretch of training: steps of `rows` pictures, the first and last learning rate, the mixture of batches."""

    name: str
    steps: int
    rows: int
    lr: tuple[float, float]
    mixture: Mixture = field(default_factory=Mixture)
    seeing_only: bool = False
    frozen_eyes: bool = False  # the vision tower does not change; the temporary heads learn only in a stage of seeing
    seeing_weight: float = 0.3
    naming_weight: float = 0.0
    placing_weight: float = 0.0
    balance_weight: float = 0.003
    special_weight: float = 0.0
    adam_share: float = 0.3  # AdamW's learning rate as a share of Muon's: routers and embeddings need less

    def rate(self, step: int) -> float:
        """The learning rate: a short warm-up, then a straight line."""
        first, last = self.lr
        return (first + (last - first) * step / self.steps) * min(1.0, (step + 1) / WARM_UP_STEPS)


MUCH_TEXT = Difficulty(items=(1, 4), label_share=0.9, font_px=(24, 44), text_length=(3, 6), word_share=0.2)
PLAIN = Difficulty(items=(1, 4), label_share=0.4, font_px=(28, 44), text_length=(1, 4), word_share=0.4, marks=(0, 3))
FIRST_KINDS = {"exists": 2, "what": 4, "where": 2, "count": 1, "choice": 0.5, "text": 3, "describe": 1.5}
SEARCH_KINDS = {"exists": 3, "what": 2, "where": 3, "count": 2, "choice": 1.5, "text": 2, "describe": 0.7, "turns": 1}
FULL = Mixture(pair_share=0.1, other_size_share=0.05)
SEARCH = Mixture(WORLD, SEARCH_KINDS, pair_share=0.1, other_size_share=0.05)
CHOOSE_KINDS = {"exists": 1, "what": 1, "where": 2, "count": 2, "choice": 4, "text": 2.5, "describe": 1, "turns": 1.5}
CHOOSE = Mixture(WORLD, CHOOSE_KINDS, pair_share=0.15, other_size_share=0.05)
SPELL_KINDS = {"exists": 1, "what": 1, "where": 1, "count": 2.5, "choice": 3, "text": 4, "describe": 1.5, "turns": 1}
SPELL = Mixture(replace(WORLD, label_share=0.75), SPELL_KINDS, pair_share=0.2, other_size_share=0.05)
FINAL_KINDS = {"exists": 1.3, "what": 1.3, "where": 1.3, "count": 3, "choice": 3, "text": 3.5, "describe": 1.5, "turns": 1.2}
FINAL = Mixture(replace(WORLD, label_share=0.6), FINAL_KINDS, pair_share=0.15, other_size_share=0.08)
POLISH = replace(FINAL, kinds=FINAL_KINDS | {"choice": 2.2, "choice where": 2, "text": 3})
FINISH = replace(POLISH, kinds=POLISH.kinds | {"choice where": 1.5, "stranger": 0.7})
# How the committed file was made: these stages in this order, 98 minutes and 3,950 steps (138,000 pictures), with restarts
# between stages, on two CPU cores that other work used too.
# Three things differed from one continuous run: until the end of "mix" there were fewer paraphrases of "describe the image" and
# "is there", no questions about all objects or animals, and no shortened questions; "name" and "match" were one idea in two
# attempts, the second with the placing loss; and the optimizers were reset at "match".
# What made it work, in the order of discovery: seeing first (nothing else reads small letters), many questions per picture that
# cannot see each other, then the naming and placing losses (without them "is there a ..." stayed at chance for 750 steps).
STAGES = (
    Stage("see", 700, 32, (3e-3, 2e-3), Mixture(LARGE_TEXT, bins=0), seeing_only=True, adam_share=1.0),
    Stage("read", 400, 32, (2.5e-3, 1.5e-3), Mixture(MUCH_TEXT, bins=0), seeing_only=True, adam_share=1.0),
    Stage("speak", 250, 12, (3e-3, 2.58e-3), Mixture(PLAIN, FIRST_KINDS), balance_weight=0.02),
    Stage("mix", 250, 12, (2.4e-3, 2.17e-3), FULL, seeing_weight=0.5),
    Stage("name", 250, 12, (2.2e-3, 1.95e-3), SEARCH, naming_weight=0.3),
    Stage("match", 500, 12, (1.95e-3, 1.45e-3), SEARCH, naming_weight=0.1, placing_weight=0.3),
    Stage("choose", 250, 12, (1.6e-3, 1.35e-3), CHOOSE, naming_weight=0.1, placing_weight=0.3),
    Stage("spell", 450, 12, (1.4e-3, 1e-3), SPELL, naming_weight=0.1, placing_weight=0.2),
    Stage("settle", 250, 12, (1.1e-3, 8.3e-4), FINAL, naming_weight=0.03, placing_weight=0.1),
    Stage("polish", 250, 12, (8.3e-4, 5.8e-4), POLISH, naming_weight=0.03, placing_weight=0.1),
    Stage("finish", 400, 12, (5.8e-4, 2e-5), FINISH, naming_weight=0.03, placing_weight=0.1),
)


TALK_KINDS = FINISH.kinds | {"chat": 0.7, "beyond": 1.5, "blind chat": 1, "blind beyond": 1.5, "no image": 1, "turns": 1.6}
TALK = replace(FINISH, kinds=TALK_KINDS, pair_share=0.14, other_size_share=0.08, triple_share=0.16, preamble_share=0.5)
# Afterwards, from the file of the stages above (`--talk`): several pictures, no pictures, and small talk. The vision tower does
# not change. When the committed file was made, the question came before its picture in 45% of the first 500 steps' batches; that
# was learned so slowly (a choice of four stayed at chance) that the chat template puts pictures first instead.
# The committed file was made with one run per stage. The second was the first with the present wordings of small talk; the third
# the first with questions of any kind after others; the fourth the first with bins that hold every such conversation (before it,
# a choice after two other questions was right in 72%).
GREET = replace(TALK, kinds=TALK_KINDS | {"chat": 1.2, "blind chat": 2})
FOLLOW = replace(GREET, kinds=GREET.kinds | {"turns": 6})
GO_ON = replace(FOLLOW, kinds=FOLLOW.kinds | {"turns": 8}, bins=3, bin_tokens=128)
TALK_STAGES = (
    Stage("talk", 1000, 12, (7e-4, 2e-5), TALK, frozen_eyes=True),
    Stage("greet", 400, 12, (3e-4, 2e-5), GREET, frozen_eyes=True),
    Stage("follow", 400, 12, (4e-4, 2e-5), FOLLOW, frozen_eyes=True),
    Stage("go on", 500, 12, (4e-4, 2e-5), GO_ON, frozen_eyes=True),
)


# The larger model, from the file of the stages above (`--grow`): its eyes learn the other domains, then the rest follows, with
# pictures of 256 visual tokens and experts that specialise (`special_weight`, network.specialising). The committed file took 56
# minutes on two cores with AMX (4.2 s for a step of "show"), with one restart between "show" and "show on".
LOOK = Mixture(GALLERY, bins=0, side_px=GALLERY_PX)
SHOW = replace(GREET, difficulty=GALLERY, side_px=GALLERY_PX, pair_share=0.1, other_size_share=0.1, triple_share=0.08)
SHOW_ON = replace(SHOW, kinds=GO_ON.kinds, bins=3, bin_tokens=128)
GROW_STAGES = (
    Stage("point", 60, 8, (3e-3, 3e-3), LOOK, seeing_only=True, frozen_eyes=True, adam_share=1.0),
    Stage("look", 240, 8, (8e-4, 3e-4), LOOK, seeing_only=True, adam_share=0.5),
    Stage("look on", 200, 8, (5e-4, 5e-5), LOOK, seeing_only=True, adam_share=0.5),
    Stage("show", 500, 10, (1.3e-3, 5e-4), SHOW, frozen_eyes=True, balance_weight=0.02, special_weight=0.4),
    Stage("show on", 150, 10, (6e-4, 2e-5), SHOW_ON, frozen_eyes=True, balance_weight=0.02, special_weight=0.4),
)


class Batches(Dataset):
    """The batches of one stage that one worker will train on."""

    def __init__(self, writer: Writer, stage: Stage, index: int, numbers: list[int]) -> None:
        self.writer, self.stage, self.index, self.numbers = writer, stage, index, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, item: int) -> Batch:
        return make_batch(self.writer, self.stage.mixture, self.index * 10_000_000 + self.numbers[item], self.stage.rows)


class SeeingHeads(nn.Module):
    """Temporary linear heads: which noun and which glyphs are at each visual token, and where the noun of a word is."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, sum(HEAD_SIZES)) for _ in range(features))
        self.place = nn.Linear(width, 2 * len(POSITIONS))  # for two pictures

    def loss(self, features: list[Tensor], seen: Tensor) -> tuple[Tensor, Tensor]:
        """features [M, V, H] each, seen [M, V, 3] -> the loss, and the accuracy of noun and glyphs where there are some."""
        total, target, right = features[0].new_zeros(()), seen.flatten(0, 1), []
        head: Any
        for head, feature in zip(self.heads, features, strict=True):
            scores = linear(F.rms_norm(feature, feature.shape[-1:]), head.weight, head.bias).flatten(0, 1)
            for score, label in zip(scores.split(HEAD_SIZES, dim=-1), target.T, strict=True):
                each, there = F.cross_entropy(score, label, reduction="none"), label > 0
                total = total + each.mean() + (each * there).sum() / there.sum().clamp(min=1)
                right.append((score.argmax(-1) == label)[there].float().mean())
        return total / len(self.heads), torch.stack(right[: len(HEAD_SIZES)])

    def place_loss(self, middle: Tensor, noun: Tensor, cells: Tensor) -> Tensor:
        """Loss that makes words naming an icon encode, half way up, in which places of the grid it is.

        middle [B, G, L, H], noun [B, G, L] with 0 for other words, cells [B, N, 9] -> binary cross-entropy per word.
        """
        there, outputs = noun > 0, cells.shape[1] * cells.shape[2]
        row = there.nonzero()[:, 0]
        wanted = (cells[row].flatten(1) == noun[there][:, None]).float()
        states = F.rms_norm(middle[there], middle.shape[-1:])
        scores = linear(states, self.place.weight, self.place.bias)[:, :outputs]
        return F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum") / max(1, len(wanted))


class Trainer:
    """One worker of the training; all workers share the parameters and the gradient buffers in memory.

    Each worker computes the gradients of its own batches, then updates its own share of the parameters from all gradients.
    A single worker (on a GPU) computes all WORKERS batches of a step one after another: the same recipe.
    """

    def __init__(self, shared: "Shared", rank: int, workers: int, work: Path, device: str, barrier: Barrier | None) -> None:
        self.work, self.device, self.rank, self.workers, self.barrier = work, device, rank, workers, barrier
        self.model, self.heads, self.gradients = shared.model, shared.heads, shared.gradients
        self.tokenizer, self.config = build_tokenizer(), shared.model.config
        self.network = TrainingNetwork(self.model)
        self.names = name_tokens(self.tokenizer).to(device)
        self.noun_of_token = torch.zeros(self.config.text_config.vocab_size, dtype=torch.long, device=device)
        self.noun_of_token[self.names] = 1 + torch.arange(len(NOUNS), device=device)
        self.parameters = shared.parameters()
        for (_, parameter), gradient in zip(self.parameters, self.gradients[rank], strict=True):
            parameter.grad = gradient
        self.mine = shares([parameter.numel() for _, parameter in self.parameters], workers)[rank]
        self.optimizers = optimizers([self.parameters[index] for index in self.mine])
        self.stages, self.first_batches = shared.stages, shared.first_batches
        self.stage, self.step = 0, 0

    def save(self) -> None:
        state = {"stage": self.stage, "step": self.step, "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}
        if self.rank == 0:
            state |= {"model": self.model.state_dict(), "heads": self.heads.state_dict()}
        torch.save(state, self.work / f"state{self.rank}.tmp")
        (self.work / f"state{self.rank}.tmp").replace(self.work / f"state{self.rank}.pt")

    def restore(self) -> None:
        state = torch.load(self.work / f"state{self.rank}.pt", map_location=self.device, weights_only=True)
        self.stage, self.step = state["stage"], state["step"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self.rank == 0:
            self.model.load_state_dict(state["model"])
            self.heads.load_state_dict(state["heads"])

    def run(self) -> None:
        log = Log(self.work / "log.txt")
        while self.stage < len(self.stages):
            stage = self.stages[self.stage]
            batches = self.batches(stage)
            with tqdm(desc=stage.name, initial=self.step, total=stage.steps, mininterval=5, disable=self.rank > 0) as bar:
                while self.step < stage.steps:
                    self.train_step(stage, batches, log)
                    bar.update()
            self.stage, self.step = self.stage + 1, 0
            self.save()
            if self.rank == 0:
                export(self.model, self.tokenizer, self.work / "model")

    def batches(self, stage: Stage) -> Iterator[Batch]:
        """This worker's batches from the current step to the end of the stage, prepared one ahead in another process."""
        mine = range(self.rank, WORKERS, self.workers)
        numbers = [step * WORKERS + worker for step in range(self.step, stage.steps) for worker in mine]
        data = Batches(Writer(self.tokenizer), stage, self.first_batches + self.stage, numbers)
        return iter(DataLoader(data, batch_size=None, num_workers=1, prefetch_factor=4, multiprocessing_context="fork"))

    def train_step(self, stage: Stage, batches: Iterator[Batch], log: "Log") -> None:
        for _ in range(self.rank, WORKERS, self.workers):
            self.loss(next(batches).to(self.device), stage, log).backward()
        self.update(stage)
        self.step += 1
        if self.step % LOG_STEPS == 0 and self.rank == 0:
            log.write(f"{stage.name} {self.step}/{stage.steps}")
        if self.step % SAVE_STEPS == 0:
            self.save()

    def loss(self, batch: Batch, stage: Stage, log: "Log") -> Tensor:
        with torch.set_grad_enabled(not stage.frozen_eyes):
            features = self.network.see(batch.pixels)
        if stage.frozen_eyes and not stage.seeing_only:
            answer_loss, inside = self.answer(batch, features, stage, log)
            log.add(loss=answer_loss.item(), balance=inside.balance_loss.item(), top=inside.top_share.item())
            return answer_loss + stage.balance_weight * inside.balance_loss + stage.special_weight * inside.special_loss
        seeing, right = self.heads.loss(features, batch.seen)
        log.add(seeing=seeing.item(), noun=right[0].item(), glyph=right[1:].mean().item())
        if stage.seeing_only:
            return seeing
        answer_loss, inside = self.answer(batch, features, stage, log)
        naming = self.naming(features[0], batch.seen[..., 0])
        cells = batch.cells.view(len(batch.bins), -1, batch.cells.shape[1])
        placing = self.heads.place_loss(inside.middle, self.noun_of_token[batch.bins] * (batch.segment > 0), cells)
        log.add(loss=answer_loss.item(), balance=inside.balance_loss.item(), naming=naming.item(), placing=placing.item())
        parts = (answer_loss, inside.balance_loss, seeing, naming, placing)
        weights = (1.0, stage.balance_weight, stage.seeing_weight, stage.naming_weight, stage.placing_weight)
        return sum((weight * part for weight, part in zip(weights, parts, strict=True)), start=seeing.new_zeros(()))

    def naming(self, feature: Tensor, noun: Tensor) -> Tensor:
        """Loss that makes visual tokens of an icon similar to the embeddings of its name, so that words find pictures by
        attention.

        feature [M, V, H], noun [M, V] with 0 for none -> cross-entropy of the scores, singular and plural names alike.
        """
        there, width = noun > 0, feature.shape[-1]
        pictured = F.rms_norm(feature[there], (width,))
        names = F.rms_norm(self.model.get_input_embeddings().weight[self.names], (width,))  # [2, nouns, H]
        losses = (F.cross_entropy(linear(pictured, form) / width**0.5, noun[there] - 1) for form in names)
        return sum(losses, start=feature.new_zeros(()))

    def update(self, stage: Stage) -> None:
        """Sum all workers' gradients of this worker's parameters, step, and clear them; workers wait for each other before and
        after."""
        self.wait()
        for index in self.mine:
            for other in range(self.workers):
                if other != self.rank:
                    self.gradients[self.rank][index] += self.gradients[other][index]
        for optimizer, share in zip(self.optimizers, (1.0, stage.adam_share), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = share * stage.rate(self.step)
            optimizer.step()
        for index in self.mine:
            for gradients in self.gradients:
                gradients[index].zero_()
        self.wait()

    def wait(self) -> None:
        if self.barrier is not None:
            self.barrier.wait(timeout=600)

    def answer(self, batch: Batch, features: list[Tensor], stage: Stage, log: "Log") -> tuple[Tensor, Inside]:
        """The loss of the answers' tokens, and intermediate results."""
        rows, (_, height, width, _) = len(batch.bins), batch.pixels.shape
        features = [feature.reshape(rows, -1, feature.shape[-1]) for feature in features]
        real = torch.cat((batch.segment.new_ones(rows, len(batch.prefix)), batch.segment.flatten(1)), dim=1) > 0
        places = positions(batch, (height // 32, width // 32), self.config.image_token_id)
        mask = attention_mask(batch, self.config.vision_start_token_id)
        hidden, inside = self.network.read(features, batch.prefix, batch.bins, places, mask, real)
        chosen = batch.target >= 0
        logits = linear(hidden[chosen], self.model.lm_head.weight)
        target = batch.target[chosen]
        log.answers(batch, chosen, logits.argmax(-1) == target, list(stage.mixture.kinds))
        log.experts_used = (inside.load > inside.load.sum(1, keepdim=True) / 320).sum(1).tolist()
        return F.cross_entropy(logits, target), inside


class Shared:
    """Data that the workers share: the model, the temporary heads, and one gradient buffer per worker and parameter."""

    def __init__(self, workers: int, device: str, begin_with: Path | None = None, larger: bool = False) -> None:
        torch.manual_seed(SEED)
        before = len(STAGES) if begin_with else 0
        self.stages: tuple[Stage, ...] = GROW_STAGES if larger else TALK_STAGES if begin_with else STAGES
        self.first_batches = before + len(TALK_STAGES) if larger else before
        tokenizer = build_tokenizer()
        config = grown_config(tokenizer) if larger else build_config(tokenizer)
        self.model = Qwen3VLMoeForConditionalGeneration(config).float().to(device)
        if larger and begin_with:
            grow(Qwen3VLMoeForConditionalGeneration.from_pretrained(begin_with, dtype=torch.float32), self.model, SEED)
        elif begin_with:
            take_over(self.model, tokenizer, begin_with)
        vision = self.model.config.vision_config
        self.heads = SeeingHeads(1 + len(vision.deepstack_visual_indexes), vision.out_hidden_size).to(device)
        self.gradients = [[torch.zeros_like(parameter) for _, parameter in self.parameters()] for _ in range(workers)]
        if workers > 1:
            self.model.share_memory()
            self.heads.share_memory()
            for gradient in (gradient for gradients in self.gradients for gradient in gradients):
                gradient.share_memory_()

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [
            *self.model.named_parameters(),
            *((f"heads.{name}", parameter) for name, parameter in self.heads.named_parameters()),
        ]


def take_over(model: Qwen3VLMoeForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Copies the weights of a trained model, whose tokenizer may lack words; a new word begins as the mean of its pieces."""
    trained = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoTokenizer.from_pretrained(folder)
    weights, old = trained.state_dict(), trained.get_input_embeddings().weight.detach()
    known, words = theirs.get_vocab(), old.new_zeros(model.get_input_embeddings().weight.shape)
    for word, index in tokenizer.get_vocab().items():
        pieces = theirs.encode(tokenizer.convert_tokens_to_string([word]), add_special_tokens=False)
        words[index] = old[[known[word]] if word in known else pieces].mean(0)
    weights |= {name: words for name in weights if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
    model.load_state_dict(weights)


def name_tokens(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """[2, nouns]: the tokens of the names inside a sentence, singular and plural."""
    return torch.tensor(
        [tokenizer.convert_tokens_to_ids([f"Ġ{name}" for name in names]) for names in (NOUNS, map(plural, NOUNS))]
    )


def shares(sizes: list[int], workers: int) -> list[list[int]]:
    """Indices for each worker, about equal in bytes: the largest first, always to the worker with the least."""
    out: list[list[int]] = [[] for _ in range(workers)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        min(out, key=lambda chosen: sum(sizes[other] for other in chosen)).append(index)
    return out


def export(model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the checkpoint in its committed form: bfloat16, ordinary Hugging Face layout."""
    low = Qwen3VLMoeForConditionalGeneration(model.config).to(torch.bfloat16)
    low.load_state_dict(model.state_dict())
    low.save_pretrained(folder)
    write_files(folder, tokenizer, model.config)


class Log:
    """Running means, and the share of completely right answers per kind, on batches that are never repeated."""

    def __init__(self, path: Path) -> None:
        self.path, self.started = path, time.time()
        self.experts_used: list[int] = []
        self.reset()

    def reset(self) -> None:
        self.values = defaultdict[str, float](float)
        self.counts = Counter[str]()

    def add(self, **means: float) -> None:
        for name, value in means.items():
            if not math.isnan(value):
                self.values[name] += value
                self.counts[name] += 1

    def answers(self, batch: Batch, chosen: Tensor, right: Tensor, kinds: list[str]) -> None:
        row = torch.arange(batch.segment[..., 0].numel()).view(*batch.segment.shape[:2], 1) * batch.segment.shape[2]
        question = (row.to(batch.segment.device) + batch.segment)[chosen]
        numbers, position = question.unique(return_inverse=True)
        wrong = torch.zeros(len(numbers), dtype=torch.long).index_add_(0, position.cpu(), (~right).long().cpu())
        kind = torch.zeros(len(numbers), dtype=torch.long).index_copy_(0, position.cpu(), batch.kind[chosen].cpu())
        images = len(batch.pixels) // len(batch.bins)
        form = ("", "pair", "triple")[images - 1]
        for index, name in enumerate(kinds):
            mine = wrong[kind == index] == 0
            self.values[form or name] += mine.sum().item()
            self.counts[form or name] += mine.numel()

    def write(self, where: str) -> None:
        means = "  ".join(f"{name} {self.values[name] / count:.3f}" for name, count in self.counts.items() if count)
        with self.path.open("a") as file:
            file.write(f"{time.time() - self.started:6.0f}s  {where}  {means}  experts {self.experts_used}\n")
        self.reset()


def work_on(rank: int, workers: int, shared: Shared, work: Path, device: str, barrier: Barrier | None) -> None:
    if workers > 1:
        torch.set_num_threads(1)
    trainer = Trainer(shared, rank, workers, work, device, barrier)
    if (work / f"state{rank}.pt").exists():
        trainer.restore()
    trainer.wait()
    trainer.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "vismoe" / "train", help="state, log and result")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--talk", type=Path, metavar="MODEL", help="continue from a trained model, with the stages of talk")
    parser.add_argument("--grow", type=Path, metavar="MODEL", help="make the larger model from the trained small one")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    workers = WORKERS if arguments.device == "cpu" else 1
    shared = Shared(workers, arguments.device, arguments.grow or arguments.talk, larger=arguments.grow is not None)
    if workers == 1:
        return work_on(0, 1, shared, arguments.work, arguments.device, None)
    os.environ.update(CALM_MALLOC)
    context = torch.multiprocessing.get_context("spawn")
    barrier = context.Barrier(workers)
    torch.multiprocessing.spawn(work_on, (workers, shared, arguments.work, arguments.device, barrier), nprocs=workers)


if __name__ == "__main__":
    main()
