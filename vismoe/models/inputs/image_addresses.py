"""Finds errors in a text that should say where an image is, as far as the text alone shows them."""

import re
from urllib.parse import urlsplit

DATA_URI = "data:image/png;base64,..."
ENCODED = {"iVBORw0KGgo": "png", "/9j/": "jpeg", "R0lGOD": "gif", "UklGR": "webp"}  # the first characters of such files in base64
BASE64 = re.compile(r"[A-Za-z0-9+/_=\s-]+")
LEAST_BASE64 = 200  # so many characters without a dot are not a file name
WEB = re.compile(r"https?(?=[:/])", re.IGNORECASE)
SHOWN_CHARACTERS = 40


def beginning(address: str) -> str:
    """The first characters, quoted; the whole text may contain an image."""
    return repr(address[:SHOWN_CHARACTERS] + "..." * (len(address) > SHOWN_CHARACTERS))


def address_error(address: str) -> str | None:
    """A sentence about a text that is empty, base64 of unknown type, or half a URL; None if it can be an address."""
    if not address.strip():
        return f"the address of the image is empty. Fix: a data URI ({DATA_URI}), or the path or URL of an image"
    if (kind := _kind_of_base64(address)) is not None:
        return f"{beginning(address)} is base64 without a type. Fix: put data:image/{kind};base64, before it"
    if ";base64," in address[:LEAST_BASE64] and not address.lower().startswith("data:"):
        return f"{beginning(address)} is not a complete data URI. Fix: begin it with {DATA_URI}"
    if WEB.match(address) and not _names_a_host(address):
        return f"{beginning(address)} is not a complete URL. Fix: https://HOST/PATH"
    return None


def _kind_of_base64(text: str) -> str | None:
    """The image type of a text that is only base64, png if its beginning is unknown; None for any other text."""
    kind = next((kind for start, kind in ENCODED.items() if text.startswith(start)), None)
    if not BASE64.fullmatch(text) or (kind is None and len(text) < LEAST_BASE64):
        return None
    return kind or "png"


def _names_a_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0) and not re.search(r"[\s\\]", parts.netloc)
    except ValueError:
        return False
