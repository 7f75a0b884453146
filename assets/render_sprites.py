"""Render the demo world's pictures: one colour icon per noun, 96 x 96 RGBA, from the Noto Color Emoji font.

Run once on a machine with the font (`apt-get install fonts-noto-color-emoji`); the PNG files are committed, so nothing else needs
the font. The font is under the SIL Open Font Licence 1.1, which is stored with the pictures (assets/sprites/LICENSE).
"""

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

FONT_PATH = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
FONT_PX = 109  # the only size of a bitmap font: 136 x 128 pictures
SPRITE_PX = 96

EMOJI = {
    "cat": "🐱", "dog": "🐶", "fox": "🦊", "pig": "🐷", "frog": "🐸", "cow": "🐮", "rabbit": "🐰", "panda": "🐼",
    "chicken": "🐔", "penguin": "🐧", "fish": "🐟", "turtle": "🐢", "snail": "🐌", "bee": "🐝", "butterfly": "🦋",
    "octopus": "🐙",
    "apple": "🍎", "banana": "🍌", "lemon": "🍋", "strawberry": "🍓", "watermelon": "🍉", "pizza": "🍕", "bread": "🍞",
    "cake": "🎂",
    "egg": "🥚", "cheese": "🧀", "burger": "🍔", "carrot": "🥕", "mushroom": "🍄", "car": "🚗", "bus": "🚌", "bicycle": "🚲",
    "train": "🚂", "rocket": "🚀", "boat": "⛵", "house": "🏠", "tree": "🌳", "cactus": "🌵", "flower": "🌻", "sun": "🌞",
    "moon": "🌙", "star": "⭐", "heart": "💜", "umbrella": "☂", "key": "🔑", "clock": "⏰", "guitar": "🎸", "ball": "⚽",
}  # fmt: skip


def render(character: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    """One icon, cropped to its drawn part, centred on a transparent square of SPRITE_PX."""
    canvas = Image.new("RGBA", (160, 160), (0, 0, 0, 0))
    ImageDraw.Draw(canvas).text((8, 8), character, font=font, embedded_color=True)
    drawn = canvas.crop(canvas.getbbox())
    side = max(drawn.size)
    square = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    square.paste(drawn, ((side - drawn.width) // 2, (side - drawn.height) // 2))
    return square.resize((SPRITE_PX, SPRITE_PX), Image.Resampling.LANCZOS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "sprites")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    font = ImageFont.truetype(str(FONT_PATH), FONT_PX)
    for name, character in EMOJI.items():
        render(character, font).save(out / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
