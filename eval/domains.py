"""The visual domains of the demo world: the same icons and signs as in a photograph, on a printed page, on a map, at night...

A domain is a backdrop with natural-looking noise and a way to draw an icon on it. `icons` is the plain world that the small demo
model knows; the others are for the larger one, whose experts can specialise. Everything is a pure function of the scene's key, on
every machine: the noise comes from `random.Random`, and Pillow does the rest.
"""

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, get_args

from PIL import Image, ImageChops, ImageDraw, ImageEnhance, ImageFilter, ImageOps

Domain = Literal["icons", "photographs", "pages", "charts", "maps", "textures", "nights", "drawings"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)

Size = tuple[int, int]  # pixels
Colour = tuple[int, int, int]

SKIES = ((120, 165, 215), (180, 200, 220), (215, 180, 160), (150, 160, 175))
GROUNDS = ((90, 120, 60), (140, 115, 80), (190, 170, 125), (110, 110, 105), (70, 100, 70))
WOODS = ((125, 85, 50), (160, 120, 75), (95, 65, 45), (175, 150, 120), (120, 125, 130))
PASTELS = ((214, 120, 110), (110, 150, 200), (130, 180, 120), (220, 180, 100), (160, 130, 190))
SEA, SHORE, LAND, FOREST = (140, 185, 220), (225, 215, 175), (205, 220, 175), (150, 190, 140)


def noise(rng: random.Random, size: Size, coarsest: int = 3, octaves: int = 6, stretch: int = 1) -> Image.Image:
    """Grey noise whose detail halves in strength from octave to octave, as in photographs; `stretch`: grain along one axis."""
    picture = Image.new("L", size, 128)
    for octave in reversed(range(octaves)):
        cells = coarsest * 2**octave
        grid = (max(2, cells // stretch), cells)
        layer = Image.frombytes("L", grid, rng.randbytes(grid[0] * grid[1])).resize(size, Image.Resampling.BICUBIC)
        picture = Image.blend(picture, layer, 0.4)
    return ImageOps.autocontrast(picture)


def shade(colour: Colour, by: float) -> Colour:
    red, green, blue = (min(255, round(channel * by)) for channel in colour)
    return red, green, blue


def tinted(grey: Image.Image, colour: Colour, contrast: float) -> Image.Image:
    """Grey noise as lighter and darker shades of one colour."""
    return ImageOps.colorize(grey, shade(colour, 1 - contrast), shade(colour, 1 + contrast))


def photograph(rng: random.Random, size: Size) -> Image.Image:
    """Sky over uneven ground."""
    picture = tinted(noise(rng, size, octaves=4), rng.choice(SKIES), 0.2)
    ground = tinted(noise(rng, size, coarsest=5, octaves=7), rng.choice(GROUNDS), 0.45)
    horizon = Image.linear_gradient("L").resize(size)
    mask = Image.blend(horizon, noise(rng, size, octaves=4), 0.25).point(lambda value: 255 if value > 118 else 0)
    picture.paste(ground, mask=mask.filter(ImageFilter.GaussianBlur(2)))
    return picture


def page(rng: random.Random, size: Size) -> Image.Image:
    """Paper with columns of lines that stand for text."""
    picture = tinted(noise(rng, size), (238, 234, 222), 0.05)
    draw = ImageDraw.Draw(picture)
    columns, pitch = rng.choice((1, 2, 3)), rng.choice((9, 11, 14))
    width = size[0] // columns
    for column in range(columns):
        for top in range(rng.randint(4, 20), size[1] - 6, pitch):
            left, end = column * width + 10, (column + 1) * width - (10 if rng.random() > 0.2 else width // 2)
            while left < end:
                word = rng.randint(8, 34)
                draw.line((left, top, min(end, left + word), top), fill=(95, 92, 90), width=pitch // 4)
                left += word + 6
    return picture


def chart(rng: random.Random, size: Size) -> Image.Image:
    """Grid lines, bars and a curve."""
    picture = Image.new("RGB", size, (252, 252, 252))
    draw = ImageDraw.Draw(picture)
    pitch = rng.choice((24, 32, 48))
    for at in range(0, max(size), pitch):
        draw.line((at, 0, at, size[1]), fill=(226, 226, 232))
        draw.line((0, at, size[0], at), fill=(226, 226, 232))
    colours, step = rng.sample(PASTELS, 2), size[0] // rng.randint(7, 14)
    for left in range(step // 2, size[0], step):
        height = int(size[1] * rng.uniform(0.08, 0.7))
        draw.rectangle((left, size[1] - height, left + step // 2, size[1]), fill=colours[0])
    curve = [(left, int(size[1] * rng.uniform(0.15, 0.85))) for left in range(0, size[0] + step, step)]
    draw.line(curve, fill=colours[1], width=3)
    draw.line((3, 0, 3, size[1] - 3, size[0], size[1] - 3), fill=(60, 60, 60), width=2)
    return picture


def atlas(rng: random.Random, size: Size) -> Image.Image:
    """Sea, shore, land and forest with roads."""
    height = noise(rng, size, octaves=5)
    bounds = sorted(rng.sample(range(70, 200), 3))
    palette = [band for value in range(256) for band in (SEA, SHORE, LAND, FOREST)[sum(value > bound for bound in bounds)]]
    picture = Image.merge("RGB", [height.point(palette[channel::3]) for channel in range(3)])
    draw = ImageDraw.Draw(picture)
    for _ in range(rng.randint(2, 5)):
        road = [(rng.randint(0, size[0]), rng.randint(0, size[1])) for _ in range(4)]
        draw.line(road, fill=(250, 250, 245), width=6, joint="curve")
        draw.line(road, fill=(200, 120, 70), width=2, joint="curve")
    return picture


def texture(rng: random.Random, size: Size) -> Image.Image:
    """Wood, cloth or brick."""
    grain = noise(rng, size, coarsest=6, octaves=6, stretch=rng.choice((1, 4, 8)))
    picture = tinted(grain, rng.choice(WOODS), 0.4)
    if rng.random() < 0.5:
        draw, height, width = ImageDraw.Draw(picture), rng.choice((24, 32, 40)), rng.choice((48, 64, 80))
        for row, top in enumerate(range(0, size[1], height)):
            draw.line((0, top, size[0], top), fill=(200, 195, 185), width=2)
            for left in range(row % 2 * width // 2, size[0], width):
                draw.line((left, top, left, top + height), fill=(200, 195, 185), width=2)
    return picture if rng.random() < 0.5 else picture.transpose(Image.Transpose.ROTATE_90).resize(size)


def night(rng: random.Random, size: Size) -> Image.Image:
    """Dark noise with lights."""
    picture = tinted(noise(rng, size, octaves=7), (28, 30, 46), 0.7)
    draw = ImageDraw.Draw(picture)
    for _ in range(rng.randint(20, 90)):
        x, y, radius = rng.randint(0, size[0]), rng.randint(0, size[1]), rng.choice((1, 1, 2, 3))
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=rng.choice(((240, 230, 170), (200, 210, 255))))
    return picture


def drawing(rng: random.Random, size: Size) -> Image.Image:
    """A blueprint: fine lines on blue."""
    picture = tinted(noise(rng, size, octaves=5), (38, 70, 130), 0.18)
    draw = ImageDraw.Draw(picture)
    for at in range(0, max(size), 16):
        fill = (70, 104, 165) if at % 64 else (105, 140, 195)
        draw.line((at, 0, at, size[1]), fill=fill)
        draw.line((0, at, size[0], at), fill=fill)
    for _ in range(rng.randint(2, 6)):
        left, top = rng.randint(0, size[0] - 40), rng.randint(0, size[1] - 40)
        right, bottom = left + rng.randint(30, size[0] // 2), top + rng.randint(30, size[1] // 2)
        rng.choice((draw.rectangle, draw.ellipse))((left, top, right, bottom), outline=(190, 210, 240))
    return picture


BACKDROPS: dict[Domain, Callable[[random.Random, Size], Image.Image]] = {
    "photographs": photograph, "pages": page, "charts": chart, "maps": atlas, "textures": texture, "nights": night,
    "drawings": drawing,
}  # fmt: skip


@lru_cache(maxsize=64)
def backdrop(domain: Domain, key: str, size: Size) -> Image.Image:
    """The domain's backdrop of this key. RGB; do not paint on it, it is kept."""
    return BACKDROPS[domain](random.Random(f"{domain} {key}"), size)


def in_style(domain: Domain, icon: Image.Image) -> Image.Image:
    """An RGBA icon as the domain draws it; the same size."""
    alpha, colours = icon.getchannel("A"), icon.convert("RGB")
    if domain == "photographs":
        colours = ImageEnhance.Color(colours).enhance(0.75).filter(ImageFilter.GaussianBlur(0.8))
    elif domain == "pages":
        colours = ImageOps.posterize(ImageOps.grayscale(colours), 3).convert("RGB")
    elif domain == "maps":
        disc = Image.new("L", icon.size, 0)
        ImageDraw.Draw(disc).ellipse((0, 0, icon.width - 1, icon.height - 1), fill=255)
        plate = Image.new("RGB", icon.size, (255, 255, 255))
        inner = icon.resize((icon.width * 3 // 4, icon.height * 3 // 4))
        plate.paste(inner, (icon.width // 8, icon.height // 8), inner)
        colours, alpha = plate, disc
    elif domain == "nights":
        colours = ImageChops.multiply(colours, Image.new("RGB", icon.size, (120, 130, 175)))
    elif domain == "drawings":
        lines = ImageOps.autocontrast(ImageOps.grayscale(colours).filter(ImageFilter.FIND_EDGES))
        rim = alpha.filter(ImageFilter.FIND_EDGES)
        colours, alpha = Image.new("RGB", icon.size, (225, 235, 250)), ImageChops.lighter(ImageChops.multiply(lines, alpha), rim)
    out = colours.convert("RGBA")
    out.putalpha(alpha)
    return out
