"""Scenes of the demo world: a deterministic generator, and the function that draws a scene as a picture.

A scene has a few icons in a 3 x 3 grid, sometimes a line of printed text in a row of the grid, on a background with clutter.
`random_scene(split, seed)` is a pure function of its arguments on every machine; the split is part of the random key, so training
and held-out scenes are different draws, whatever the seeds. Lengths are pixels, boxes are (left, top, right, bottom). Needs
Pillow, never torch.
"""

import random
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

from vismoe.eval.domains import DOMAINS, Domain, backdrop, in_style
from vismoe.eval.world import DIGITS, LETTERS, NOUNS, POSITIONS, PRINTED_WORDS, assets_folder

Split = Literal["train", "held-out"]
BASE_PX = 256
OTHER_SIZES = ((320, 320), (384, 256), (256, 384), (320, 256))
GLYPH_ADVANCE = 0.74  # share of the font size; wide enough for W, so that letters never overlap

PALE = ((250, 248, 240), (232, 240, 250), (238, 250, 236), (252, 236, 232), (244, 236, 252), (255, 255, 255), (226, 226, 226))
MIDDLE = ((150, 190, 220), (170, 205, 160), (222, 190, 150), (190, 170, 210), (205, 205, 205), (160, 200, 200))
DARK = ((40, 44, 60), (50, 70, 60), (70, 46, 50))
INKS = ((20, 20, 20), (120, 20, 30), (20, 40, 130), (10, 90, 50))


Style = Literal["plain", "gradient", "stripes", "checks"]
STYLES: tuple[Style, ...] = ("plain", "plain", "gradient", "stripes", "checks")


@dataclass(frozen=True)
class Item:
    """One icon: its noun, the index of its place in POSITIONS, its centre and its side in pixels."""

    noun: str
    position: int
    x: int
    y: int
    side: int

    @property
    def box(self) -> tuple[int, int, int, int]:
        left, top = self.x - self.side // 2, self.y - self.side // 2
        return left, top, left + self.side, top + self.side


@dataclass(frozen=True)
class Label:
    """One line of printed capitals and digits: its row (0 top, 1 middle, 2 bottom), its centre, font size and colours."""

    text: str
    row: int
    x: int
    y: int
    font_px: int
    ink: tuple[int, int, int]
    plate: tuple[int, int, int]

    @property
    def advance_px(self) -> float:
        return self.font_px * GLYPH_ADVANCE

    def glyph_centre(self, index: int) -> tuple[float, float]:
        return self.x + (index + 0.5 - len(self.text) / 2) * self.advance_px, self.y

    @property
    def box(self) -> tuple[int, int, int, int]:
        half_width, half_height = len(self.text) * self.advance_px / 2 + 4, self.font_px * 0.6
        return round(self.x - half_width), round(self.y - half_height), round(self.x + half_width), round(self.y + half_height)


@dataclass(frozen=True)
class Mark:
    """Clutter: a small shape that no question asks about."""

    shape: Literal["disc", "box", "line"]
    box: tuple[int, int, int, int]
    colour: tuple[int, int, int]


@dataclass(frozen=True)
class Background:
    """Two colours and how they share the picture."""

    style: Style
    first: tuple[int, int, int]
    second: tuple[int, int, int]
    period_px: int


@dataclass(frozen=True)
class Scene:
    """Everything in one picture; items in reading order."""

    width: int
    height: int
    background: Background
    marks: tuple[Mark, ...]
    items: tuple[Item, ...]
    label: Label | None
    domain: Domain = "icons"
    key: str = ""  # of the backdrop, where its domain draws one

    def count(self, noun: str) -> int:
        return sum(item.noun == noun for item in self.items)

    def at(self, position: int) -> Item | None:
        return next((item for item in self.items if item.position == position), None)

    @property
    def nouns(self) -> tuple[str, ...]:
        """The distinct nouns, in reading order."""
        return tuple(dict.fromkeys(item.noun for item in self.items))


@dataclass(frozen=True)
class Difficulty:
    """The generator's choices; the default is the world of held-out scenes."""

    items: tuple[int, int] = (1, 5)
    side_px: tuple[int, int] = (48, 80)
    label_share: float = 0.45
    font_px: tuple[int, int] = (24, 40)
    text_length: tuple[int, int] = (3, 6)
    word_share: float = 0.6
    marks: tuple[int, int] = (0, 6)
    domains: tuple[Domain, ...] = ("icons",)


WORLD = Difficulty()
GALLERY = Difficulty(side_px=(56, 128), marks=(0, 12), domains=DOMAINS)  # for pictures of GALLERY_PX
GALLERY_PX = 512
WORLDS: dict[str, tuple[int, Difficulty]] = {  # side of the pictures in pixels, and what is in them
    "demo": (BASE_PX, WORLD),
    "gallery": (GALLERY_PX, GALLERY),
    **{domain: (GALLERY_PX, replace(GALLERY, domains=(domain,))) for domain in DOMAINS},
}


def scene_random(split: Split, seed: int, purpose: str = "scene") -> random.Random:
    """The generator of one scene (or of its questions); the split is part of the key."""
    return random.Random(f"vismoe demo world/{split}/{purpose}/{seed}")


def random_scene(split: Split, seed: int, size: tuple[int, int] = (BASE_PX, BASE_PX), difficulty: Difficulty = WORLD) -> Scene:
    rng = scene_random(split, seed, f"scene {size[0]}x{size[1]}")
    label = _random_label(rng, size, difficulty) if rng.random() < difficulty.label_share else None
    free = [index for index, position in enumerate(POSITIONS) if label is None or position.row != label.row]
    nouns = _random_nouns(rng, difficulty)[: len(free)]
    places = sorted(rng.sample(free, len(nouns)))
    items = tuple(_random_item(rng, noun, place, size, difficulty) for noun, place in zip(nouns, places, strict=True))
    marks = tuple(_random_mark(rng, size) for _ in range(rng.randint(*difficulty.marks)))
    background = _random_background(rng)
    return Scene(*size, background, marks, items, label, rng.choice(difficulty.domains), f"{split} {seed}")


def _random_nouns(rng: random.Random, difficulty: Difficulty) -> list[str]:
    """Distinct nouns, except that in half of the scenes one of them has up to four places."""
    count = rng.randint(*difficulty.items)
    nouns = rng.sample(NOUNS, count)
    if count > 1 and rng.random() < 0.5:
        copies = rng.randint(2, min(4, count))
        nouns[:copies] = [nouns[0]] * copies
    rng.shuffle(nouns)
    return nouns


def _random_item(rng: random.Random, noun: str, place: int, size: tuple[int, int], difficulty: Difficulty) -> Item:
    """An icon that stays inside its cell of the grid, so that its position is unambiguous."""
    position = POSITIONS[place]
    cell_width, cell_height = size[0] / 3, size[1] / 3
    side = rng.randint(*difficulty.side_px)
    slack_x, slack_y = (cell_width - side) / 2, (cell_height - side) / 2
    x = (position.column + 0.5) * cell_width + rng.uniform(-slack_x, slack_x)
    y = (position.row + 0.5) * cell_height + rng.uniform(-slack_y, slack_y)
    return Item(noun, place, round(x), round(y), side)


def random_text(rng: random.Random, difficulty: Difficulty = WORLD) -> str:
    """A word, or a string of random capitals and digits; the difficulty sets the lengths."""
    shortest, longest = difficulty.text_length
    if rng.random() < difficulty.word_share:
        words = [word for word in PRINTED_WORDS if shortest <= len(word) <= longest]
        if words:
            return rng.choice(words)
    return "".join(rng.choice(LETTERS + DIGITS) for _ in range(rng.randint(shortest, longest)))


def _random_label(rng: random.Random, size: tuple[int, int], difficulty: Difficulty) -> Label:
    text = random_text(rng, difficulty)
    widest = int((size[0] - 16) / (len(text) * GLYPH_ADVANCE))
    font_px = min(rng.randint(*difficulty.font_px), widest)
    row = rng.randrange(3)
    slack_x = (size[0] - len(text) * font_px * GLYPH_ADVANCE) / 2 - 6
    slack_y = max(0.0, size[1] / 6 - font_px * 0.6 - 2)
    x = size[0] / 2 + rng.uniform(-slack_x, slack_x)
    y = (row + 0.5) * size[1] / 3 + rng.uniform(-slack_y, slack_y)
    ink, plate = rng.choice(INKS), rng.choice(PALE)
    if rng.random() < 0.3:
        ink, plate = plate, ink
    return Label(text, row, round(x), round(y), font_px, ink, plate)


def _random_background(rng: random.Random) -> Background:
    style = rng.choice(STYLES)
    family = rng.choice((PALE, PALE, MIDDLE, MIDDLE, DARK))
    return Background(style, rng.choice(family), rng.choice(family), rng.choice((24, 40, 64)))


def _random_mark(rng: random.Random, size: tuple[int, int]) -> Mark:
    width, height = rng.randint(4, 22), rng.randint(4, 22)
    left, top = rng.randint(0, size[0] - width), rng.randint(0, size[1] - height)
    return Mark(rng.choice(("disc", "box", "line")), (left, top, left + width, top + height), rng.choice(MIDDLE))


@lru_cache(maxsize=4096)
def _sprite(noun: str, side: int, domain: Domain) -> Image.Image:
    path = assets_folder() / "sprites" / f"{noun}.png"
    with Image.open(path) as picture:
        return in_style(domain, picture.convert("RGBA").resize((side, side), Image.Resampling.BILINEAR, reducing_gap=None))


@lru_cache(maxsize=64)
def _font(size_px: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own scalable font, so that scenes do not depend on system fonts."""
    return ImageFont.load_default(size_px)


@lru_cache(maxsize=256)
def _backdrop(background: Background, size: tuple[int, int]) -> Image.Image:
    picture = Image.new("RGB", size, background.first)
    draw = ImageDraw.Draw(picture)
    step = background.period_px
    if background.style == "gradient":
        ramp = Image.linear_gradient("L").resize(size)
        picture.paste(Image.new("RGB", size, background.second), mask=ramp)
    elif background.style == "stripes":
        for left in range(0, size[0], 2 * step):
            draw.rectangle((left, 0, left + step - 1, size[1]), fill=background.second)
    elif background.style == "checks":
        for top in range(0, size[1], step):
            for left in range((top // step % 2) * step, size[0], 2 * step):
                draw.rectangle((left, top, left + step - 1, top + step - 1), fill=background.second)
    return picture


def compose(scene: Scene) -> Image.Image:
    """Paint a scene: background, clutter, icons, then the text on its plate. RGB, scene.width x scene.height."""
    size = (scene.width, scene.height)
    plain = scene.domain == "icons"
    picture = (_backdrop(scene.background, size) if plain else backdrop(scene.domain, scene.key, size)).copy()
    draw = ImageDraw.Draw(picture)
    for mark in scene.marks:
        _paint_mark(draw, mark)
    for item in scene.items:
        sprite = _sprite(item.noun, item.side, scene.domain)
        picture.paste(sprite, item.box[:2], sprite)
    if scene.label is not None:
        _paint_label(draw, scene.label)
    return picture


def _paint_mark(draw: ImageDraw.ImageDraw, mark: Mark) -> None:
    if mark.shape == "disc":
        draw.ellipse(mark.box, fill=mark.colour)
    elif mark.shape == "box":
        draw.rectangle(mark.box, fill=mark.colour)
    else:
        draw.line(mark.box, fill=mark.colour, width=3)


def _paint_label(draw: ImageDraw.ImageDraw, label: Label) -> None:
    draw.rounded_rectangle(label.box, radius=5, fill=label.plate)
    for index, character in enumerate(label.text):
        draw.text(
            label.glyph_centre(index),
            character,
            font=_font(label.font_px),
            fill=label.ink,
            anchor="mm",
            stroke_width=0.4,
            stroke_fill=label.ink,
        )
