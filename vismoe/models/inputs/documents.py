"""Pages of a PDF file as pictures, drawn by PDFium (the package pypdfium2, an extra).

Promises: no page is drawn with more pixels than allowed, whatever size it says it has; scripts and forms of a document do not
run; a damaged or locked document is an error. Sizes are pixels.
"""

import math
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from vismoe.errors import ConfigError, InputError
from vismoe.models.inputs.sources import DOCUMENT, opened_file

SIGNATURE = b"%PDF-"
SIGNATURE_WITHIN = 1024  # bytes; other bytes may come before it
POINTS = 72  # of an inch
DPI = 144  # an A4 page becomes 1191 x 1684 pixels
SELECTED = "#page="  # behind a path: one page, or the first and the last with a hyphen between
MOST_PAGES = 64  # drawn of one document
ONE_AT_A_TIME = threading.Lock()  # PDFium is not made for threads


def is_document(begin: bytes) -> bool:
    """Whether a file that begins so, with SIGNATURE_WITHIN bytes or fewer, is a PDF."""
    return SIGNATURE in begin[:SIGNATURE_WITHIN]


class Document:
    """An opened document. pages: the sides that each page gets when it is drawn."""

    def __init__(self, pdf: Any, max_pixels: int):
        self._pdf, self._scales = pdf, list[float]()
        self.pages: list[tuple[int, int]] = []
        for page in pdf:
            sides, scale = page.get_size(), DPI / POINTS
            while math.prod(drawn := tuple(max(1, math.ceil(side * scale)) for side in sides)) > max_pixels:
                scale *= 0.95
            self._scales.append(scale)
            self.pages.append(drawn)

    def page(self, number: int, reduce: int = 1) -> Image.Image:
        """The page of this number, counted from 0, with sides divided by `reduce`."""
        drawn: Image.Image = self._pdf[number].render(scale=self._scales[number] / reduce).to_pil()
        return drawn.convert("RGB")

    def drawn(self, numbers: Sequence[int], fix: str) -> list[Image.Image]:
        """The pages of these numbers. Raises InputError with `fix` for more than MOST_PAGES."""
        if len(numbers) > MOST_PAGES:
            raise InputError(f"{len(numbers)} pages, at most {MOST_PAGES} are read at once. Fix: {fix}")
        return [self.page(number) for number in numbers]


@contextmanager
def opened_document(data: bytes, name: str, max_pixels: int) -> Iterator[Document]:
    """The document in these bytes. Raises InputError and ConfigError."""
    try:
        import pypdfium2
    except ImportError as error:
        raise ConfigError(f'PDF documents need the package pypdfium2 ({error}). Fix: pip install "vismoe[pdf]"') from error
    if not is_document(data):
        raise InputError(f"{name}: not a PDF document. Fix: {DOCUMENT.readable}")
    with ONE_AT_A_TIME:
        try:
            with pypdfium2.PdfDocument(data) as pdf:
                document = Document(pdf, max_pixels)
                if not document.pages:
                    raise InputError(f"it has no page. Fix: {DOCUMENT.readable}")
                yield document
        except InputError as error:
            raise type(error)(f"{name}: {error}") from error
        except (pypdfium2.PdfiumError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
            raise InputError(f"{name}: damaged, or locked by a password ({error}). Fix: {DOCUMENT.readable}") from error


def open_pages(source: str | Path, max_pixels: int) -> list[Image.Image] | None:
    """The pages of a PDF at a path or file:// URL, of which `#page=3` or `#page=2-5` may choose some; None for another file.
    Raises InputError and ConfigError."""
    path, _, chosen = str(source).partition(SELECTED)
    if not chosen and not path.lower().endswith(".pdf"):
        return None
    with opened_file(path, DOCUMENT) as (file, _), opened_document(file.read(), path, max_pixels) as document:
        numbers = _selected(chosen, len(document.pages))
        return document.drawn(numbers, f"{path}{SELECTED}1-{MOST_PAGES}")


def _selected(chosen: str, pages: int) -> Sequence[int]:
    named = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", chosen or f"1-{pages}")
    numbers = range(int(named[1]) - 1, int(named[2] or named[1])) if named else range(0)
    if not numbers or numbers[0] < 0 or numbers[-1] >= pages:
        raise InputError(f"{SELECTED}{chosen}: the document has the pages 1 to {pages}. Fix: e.g. {SELECTED}1 or {SELECTED}1-2")
    return numbers
