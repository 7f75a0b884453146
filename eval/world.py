"""The vocabulary of the demo world: its nouns, its nine positions, the letters that it prints, and the folder of its pictures.

Pure tables, without drawing and randomness: `scenes` composes pictures from them, `questions` makes sentences from them.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

NOUNS = (
    "apple", "ball", "banana", "bee", "bicycle", "boat", "bread", "burger", "bus", "butterfly", "cactus", "cake",
    "car", "carrot", "cat", "cheese", "chicken", "clock", "cow", "dog", "egg", "fish", "flower", "fox",
    "frog", "guitar", "heart", "house", "key", "lemon", "moon", "mushroom", "octopus", "panda", "penguin", "pig",
    "pizza", "rabbit", "rocket", "snail", "star", "strawberry", "sun", "train", "tree", "turtle", "umbrella", "watermelon",
)  # fmt: skip
ANIMALS = (
    "bee", "butterfly", "cat", "chicken", "cow", "dog", "fish", "fox", "frog", "octopus", "panda", "penguin", "pig", "rabbit",
    "snail", "turtle",
)  # fmt: skip
IRREGULAR_PLURALS = {
    "bread": "breads", "bus": "buses", "butterfly": "butterflies", "cactus": "cactuses", "fish": "fish", "fox": "foxes",
    "octopus": "octopuses", "strawberry": "strawberries",
}  # fmt: skip
NUMBERS = ("none", "one", "two", "three", "four", "five")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "23456789"  # 0 and 1 look like O and I in the font
PRINTED_WORDS = tuple(
    "STOP OPEN EXIT SALE CAFE TAXI HOTEL PARK ZOO SHOP FREE HELP HOME MENU MUSIC NEWS NORTH SOUTH EAST WEST PIZZA POST "
    "QUIET READY ROAD SCHOOL SLOW START TEA TICKET TODAY TOWN TRAIN WATER WELCOME WIFI YES ZONE BANK BAR BEACH BIKE BOOK "
    "BUS CITY CLUB COFFEE COLD DANGER DOOR DRINK ENTER FILM FIRE FISH FOOD FRESH GAME GATE GIFT GREEN HAPPY HOT ICE JAZZ "
    "JOY JUICE KEEP KIDS KING LEFT LIFE LOVE LUCK MILK MOON NEW OFF PARTY PLAY POOL PUSH PULL QUEEN RED RIGHT SKY SPACE "
    "SPORT STAR SUN TOUR VOTE WAIT WALK WORK".split()
)


@dataclass(frozen=True)
class Position:
    """One of nine places: its row and column in the 3 x 3 grid, its name in answers, and how people name it."""

    row: int
    column: int
    answer: str
    spoken: tuple[str, ...]


def _position(row: int, column: int, answer: str, *also: str) -> Position:
    return Position(row, column, answer, (answer, *also))


POSITIONS = (
    _position(0, 0, "in the top left", "in the top left corner", "at the top left", "in the upper left corner"),
    _position(0, 1, "at the top", "in the top middle", "at the top in the middle", "at the top centre"),
    _position(0, 2, "in the top right", "in the top right corner", "at the top right", "in the upper right corner"),
    _position(1, 0, "on the left", "in the middle left", "on the left side", "at the left"),
    _position(1, 1, "in the centre", "in the middle", "in the center", "in the middle of the image"),
    _position(1, 2, "on the right", "in the middle right", "on the right side", "at the right"),
    _position(2, 0, "in the bottom left", "in the bottom left corner", "at the bottom left", "in the lower left corner"),
    _position(2, 1, "at the bottom", "in the bottom middle", "at the bottom in the middle", "at the bottom centre"),
    _position(2, 2, "in the bottom right", "in the bottom right corner", "at the bottom right", "in the lower right corner"),
)
ROW_ANSWERS = ("at the top", "in the middle", "at the bottom")  # for the row of a line of text


def plural(noun: str) -> str:
    return IRREGULAR_PLURALS.get(noun, f"{noun}s")


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


@cache
def assets_folder() -> Path:
    """The folder with sprites, bundled pictures and the demo model: beside this package, both in a checkout and in a wheel.

    In a checkout this file is eval/world.py and the folder is assets/; installed, it is vismoe/eval/world.py and vismoe/assets/.
    """
    folder = Path(__file__).resolve().parent.parent / "assets"
    if not (folder / "sprites").is_dir():
        raise FileNotFoundError(
            f"the demo world's pictures are missing: expected {folder / 'sprites'}. Fix: reinstall vismoe, or use its checkout"
        )
    return folder
