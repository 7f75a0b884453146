"""Training batches: scenes with many questions each, as arrays of fixed shape. A batch is a pure function of (stage, number).

A row is a prefix, which ends with its pictures, and bins of questions about them: each question sees the prefix and itself.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vismoe.eval.questions import (
    ALSO_DESCRIBE,
    ASK,
    ASK_COUNT,
    ASK_EXISTS,
    ASK_WHERE,
    ASKED_ALONE,
    THANKS,
    QuestionTurn,
    ask_choice_where,
    ask_compare,
    ask_which_of_three,
    count_turn,
    exists_turn,
    no_image_turn,
    several_turns,
    share_a_noun,
    unrelated_turns,
    where_turn,
)
from vismoe.eval.scenes import BASE_PX, OTHER_SIZES, WORLD, Difficulty, Item, Scene, compose, random_scene, scene_random
from vismoe.eval.small_talk import beyond, greeting, system_prompt
from vismoe.eval.world import DIGITS, LETTERS, NOUNS, POSITIONS

SYMBOLS = LETTERS + DIGITS
TOKEN_PX = 32
STRANGERS = tuple(
    "lion zebra person man woman table chair phone horse bird mouse tiger bear monkey snake shoe hat cup book door window river "
    "mountain road truck plane computer bottle knife spoon pen robot child baby duck sheep goat wolf shark whale spider potato "
    "tomato onion orange pear grape cherry sandwich cookie bench bridge tower castle lamp bed sofa bag box ring".split()
)
USUAL_KINDS = {"exists": 2, "what": 3, "where": 2.5, "count": 1.5, "choice": 2, "text": 2, "describe": 1, "turns": 1}
ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"
NEXT_USER = "\n<|im_start|>user\n"


@dataclass(frozen=True)
class Mixture:
    """What a stage trains on: the scenes, weights of the kinds of question, bins of them per picture, shares of rare batches.

    A conversation of more than `bin_tokens` is never used: half of those with two or three questions of any kind have more than
    64, and nearly all fit 128.
    """

    difficulty: Difficulty = WORLD
    kinds: dict[str, float] = field(default_factory=lambda: dict(USUAL_KINDS))
    bins: int = 4
    bin_tokens: int = 64
    pair_share: float = 0.0
    other_size_share: float = 0.0
    triple_share: float = 0.0
    side_px: int = BASE_PX  # of most pictures
    preamble_share: float = 0.0  # of the batches: a system prompt, or a greeting and its answer, before everything


@dataclass
class Batch:
    """Arrays of one step; network.py explains the shape letters."""

    pixels: Tensor  # [B*N, height, width, 3] uint8
    prefix: Tensor  # [P]
    blind: Tensor  # [B, G, L] whether a token sees the prefix only up to the first picture, and has the position after that
    bins: Tensor  # [B, G, L] token ids
    segment: Tensor  # [B, G, L], 0 = padding
    offset: Tensor  # [B, G, L] position inside the question
    target: Tensor  # [B, G, L] the next token if it belongs to an answer, else -100
    kind: Tensor  # [B, G, L] index into the kinds, for reports
    seen: Tensor  # [B*N, V, 3]: noun, left glyph, right glyph of each visual token; 0 = none
    cells: Tensor  # [B*N, 9]: the noun in each place of the grid; 0 = none

    def to(self, device: str) -> "Batch":
        return Batch(*(getattr(self, name.name).to(device) for name in fields(self)))


@dataclass(frozen=True)
class Segment:
    """One conversation in a bin: token ids, and the next token inside answers, -100 elsewhere."""

    kind: int
    ids: list[int]
    target: list[int]
    blind: bool = False


class Writer:
    """Token ids of turns; repeated sentences are encoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.encode = lru_cache(maxsize=100_000)(partial(tokenizer.encode, add_special_tokens=False))

    def prefix(self, images: int, visual_tokens: int, preamble: str = "") -> list[int]:
        picture = "<|vision_start|>" + "<|image_pad|>" * visual_tokens + "<|vision_end|>"
        return self.encode(preamble + "<|im_start|>user\n" + picture * images)

    def segment(self, turns: Sequence[QuestionTurn]) -> tuple[list[int], list[int]]:
        """Token ids of one conversation after its pictures, and the targets: the next token inside answers, -100 elsewhere."""
        ids: list[int] = []
        target: list[int] = []
        for turn in turns:
            question = self.encode((NEXT_USER if ids else "") + turn.question + ASSISTANT)
            answer = self.encode(turn.answer + "<|im_end|>")
            ids += question + answer
            target += [-100] * (len(question) - 1) + answer + [-100]
        return ids, target


def rough(rng: random.Random, question: str) -> str:
    """The question as people type it: sometimes in lower case, shortened, or without the question mark."""
    draw = rng.random()
    if draw > 0.9:
        return question.replace("What is", "What's", 1).replace("Where is", "Where's", 1)
    if draw < 0.1:
        return question[0].lower() + question[1:]
    return question.rstrip("?.") if draw < 0.2 and "\n" not in question else question


def ask_stranger(rng: random.Random, scene: Scene) -> QuestionTurn:
    """A question about something outside this world: the answer is no, whatever the word."""
    letters = "".join(rng.choice("aabcdeeefghiiklmnooprstuy") for _ in range(rng.randint(3, 7)))
    noun = rng.choice(STRANGERS) if rng.random() < 0.6 else letters
    draw = rng.random()
    if draw < 0.6:
        return exists_turn(rng.choice(ASK_EXISTS), noun, False)
    return count_turn(rng.choice(ASK_COUNT), noun, 0) if draw < 0.8 else where_turn(rng.choice(ASK_WHERE), noun, None)


def ask_describe(rng: random.Random, scene: Scene) -> QuestionTurn | None:
    turn = ASK["describe"](rng, scene)
    return replace(turn, question=rng.choice(ALSO_DESCRIBE)) if turn and rng.random() < 0.3 else turn


TRAINING_ONLY = {
    "choice where": ask_choice_where,
    "stranger": ask_stranger,
    "chat": lambda rng, scene: QuestionTurn("chat", *greeting(rng, "train", seen=True)),
    "beyond": lambda rng, scene: QuestionTurn("beyond", *beyond(rng, "train", seen=True)),
    "describe": ask_describe,
}
BLIND = {
    "blind chat": lambda rng, scene: QuestionTurn("chat", *greeting(rng, "train", seen=False)),
    "blind beyond": lambda rng, scene: QuestionTurn("beyond", *beyond(rng, "train", seen=False)),
    "no image": no_image_turn,
}
HARD_AFTER_OTHERS = ("choice", "count")  # used twice as often
ANY_PICTURES = ("chat", "beyond", *BLIND)  # also used with several pictures


def ask(rng: random.Random, kind: str, scenes: tuple[Scene, ...]) -> tuple[QuestionTurn, ...]:
    if rng.random() < 0.003:
        return (QuestionTurn("chat", *rng.choice(THANKS)),)
    if len(scenes) > 1 and (kind not in ANY_PICTURES or rng.random() < 0.5):
        turn = ask_compare(rng, *scenes) if len(scenes) == 2 else ask_which_of_three(rng, scenes)
        return (turn,) if turn else ()
    if kind == "turns":
        asked = several_turns(rng, scenes[0]) if rng.random() < 0.4 else ()
        return asked or unrelated_turns(rng, scenes[0], rng.choice((*ASKED_ALONE, *HARD_AFTER_OTHERS)))
    turn = (ASK | TRAINING_ONLY | BLIND)[kind](rng, scenes[0])
    return (turn,) if turn else ()


def preamble(rng: random.Random, mixture: Mixture) -> str:
    """The text before the first question of a batch: nothing, a system prompt, a greeting and its answer, or both."""
    if rng.random() >= mixture.preamble_share:
        return ""
    said, answer = greeting(rng, "train", seen=False)
    talk = f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    system = f"<|im_start|>system\n{system_prompt(rng, 'train')}<|im_end|>\n"
    draw = rng.random()
    return system if draw < 0.75 else talk if draw < 0.9 else system + talk


def noun_number(item: Item | None) -> int:
    return 1 + NOUNS.index(item.noun) if item else 0


def visible(scene: Scene) -> np.ndarray:
    """[V, 3]: the noun whose box covers a visual token's centre, and the glyphs in its left and right half; 0 = none."""
    rows, columns = scene.height // TOKEN_PX, scene.width // TOKEN_PX
    seen = np.zeros((rows, columns, 3), np.int64)
    for item in scene.items:
        left, top, right, bottom = item.box
        across = slice(max(0, round(left / TOKEN_PX)), max(1, round(right / TOKEN_PX)))
        down = slice(max(0, round(top / TOKEN_PX)), max(1, round(bottom / TOKEN_PX)))
        seen[down, across, 0] = noun_number(item)
    if scene.label:
        for index, symbol in enumerate(scene.label.text):
            x, y = scene.label.glyph_centre(index)
            seen[int(y) // TOKEN_PX, int(x) // TOKEN_PX, 1 + int(x) // (TOKEN_PX // 2) % 2] = 1 + SYMBOLS.index(symbol)
    return seen.reshape(-1, 3)


def make_batch(writer: Writer, mixture: Mixture, number: int, rows: int) -> Batch:
    """Batch `number` about `rows` pictures, or fewer pairs or triples of them; deterministic."""
    rng = scene_random("train", number, "batch")
    draw = rng.random()
    images = 2 if draw < mixture.pair_share else 1
    other = mixture.pair_share <= draw < mixture.pair_share + mixture.other_size_share
    if draw > 1 - mixture.triple_share:
        images, rows = 3, rows // 2
    if images > 1 and mixture.side_px > BASE_PX:
        rows //= 2
    size = rng.choice(OTHER_SIZES) if other else (mixture.side_px, mixture.side_px)
    before = preamble(rng, mixture)
    pictures = [_scenes(rng, mixture.difficulty, number * 1024 + row * max(2, images), images, size) for row in range(rows)]
    filled = [_fill(rng, writer, mixture, scenes) for scenes in pictures]
    flat = [scene for scenes in pictures for scene in scenes]
    bins, segment, offset, target, kind, blind = (torch.tensor(np.stack(arrays)) for arrays in zip(*filled, strict=True))
    return Batch(
        torch.from_numpy(np.stack([np.asarray(compose(scene)) for scene in flat])),
        torch.tensor(writer.prefix(images, size[0] * size[1] // TOKEN_PX**2, before)),
        blind > 0,
        bins,
        segment,
        offset,
        target,
        kind,
        torch.from_numpy(np.stack([visible(scene) for scene in flat])),
        torch.tensor([[noun_number(scene.at(index)) for index in range(len(POSITIONS))] for scene in flat]),
    )


def _scenes(rng: random.Random, difficulty: Difficulty, number: int, images: int, size: tuple[int, int]) -> tuple[Scene, ...]:
    first = random_scene("train", number, size, difficulty)
    if images == 1:
        return (first,)
    second = random_scene("train", number + 1, size, difficulty)
    if images == 3:
        return first, second, random_scene("train", number + 2, size, difficulty)
    return first, share_a_noun(rng, first, second) if rng.random() < 0.5 else second


def _fill(rng: random.Random, writer: Writer, mixture: Mixture, scenes: tuple[Scene, ...]) -> np.ndarray:
    """Questions until the bins are full: [6, G, L] of ids, segments, offsets, targets, kinds, blind."""
    names = list(mixture.kinds)
    bins: list[list[Segment]] = [[] for _ in range(mixture.bins)]
    space = [mixture.bin_tokens] * mixture.bins
    misses = 0 if bins else 4
    while misses < 4:
        kind, turns = _turns(rng, mixture, scenes)
        ids, target = writer.segment(turns)
        index = next((index for index, room in enumerate(space) if len(ids) <= room), None)
        if not ids or index is None:
            misses += 1
            continue
        bins[index].append(Segment(names.index(kind), ids, target, kind in BLIND))
        space[index] -= len(ids)
    rows = [_lay_out(segments, mixture.bin_tokens) for segments in bins]
    return np.stack(rows, axis=1) if rows else np.zeros((6, 0, mixture.bin_tokens), np.int64)


def _turns(rng: random.Random, mixture: Mixture, scenes: tuple[Scene, ...]) -> tuple[str, tuple[QuestionTurn, ...]]:
    kind = rng.choices(list(mixture.kinds), list(mixture.kinds.values()))[0]
    return kind, tuple(replace(turn, question=rough(rng, turn.question)) for turn in ask(rng, kind, scenes))


def _lay_out(segments: list[Segment], tokens: int) -> np.ndarray:
    out = np.zeros((6, tokens), np.int64)
    out[3] = -100
    start = 0
    for number, segment in enumerate(segments, start=1):
        length = len(segment.ids)
        each = [number] * length, range(length), segment.target, [segment.kind] * length, [segment.blind] * length
        out[:, start : start + length] = segment.ids, *each
        start += length
    return out


def positions(batch: Batch, grid: tuple[int, int], image_token: int) -> Tensor:
    """M-RoPE positions [3, B, S]: a picture's tokens share a time; all questions start where the prefix ends."""
    prefix, start, token, before = [], 0, 0, 0
    ids = batch.prefix.tolist()
    while token < len(ids):
        if ids[token] == image_token:
            before = before or start - 1  # of <|vision_start|>
            prefix += [(start, start + row, start + column) for row in range(grid[0]) for column in range(grid[1])]
            start, token = start + max(grid), token + grid[0] * grid[1]
        else:
            prefix.append((start, start, start))
            start, token = start + 1, token + 1
    rows = len(batch.bins)
    first = torch.tensor(prefix, device=batch.offset.device).T[:, None].expand(-1, rows, -1)
    later = (torch.where(batch.blind, before, start) + batch.offset).view(1, rows, -1).expand(3, -1, -1)
    return torch.cat((first, later), dim=2)


def attention_mask(batch: Batch, vision_start: int) -> Tensor:
    """Additive mask [B*G, 1, L, P+L]: the visible part of the prefix, and the same question up to the token."""
    segment, blind = batch.segment.flatten(0, 1), batch.blind.flatten(0, 1)
    length = segment.shape[1]
    same = (segment[:, :, None] == segment[:, None]) & torch.ones(length, length, dtype=torch.bool, device=segment.device).tril()
    before = (batch.prefix == vision_start).cumsum(0) == 0  # [P]
    allowed = torch.cat((before | ~blind[..., None], same), dim=2)
    return torch.zeros(allowed.shape, device=segment.device).masked_fill(~allowed, float("-inf"))[:, None]
