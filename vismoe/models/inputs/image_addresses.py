"""What is wrong with a text that should say where an image is, where that can be told without looking for it."""

import re
from urllib.parse import urlsplit

__all__ = ["address_error", "beginning"]

DATA_URI = "data:image/png;base64,..."
ENCODED = {"iVBORw0KGgo": "png", "/9j/": "jpeg", "R0lGOD": "gif", "UklGR": "webp"}  # how base64 of such files begins
BASE64 = re.compile(r"[A-Za-z0-9+/_=\s-]+")
LEAST_BASE64 = 200  # characters without a dot that are no name of a file
WEB = re.compile(r"https?(?=[:/])", re.IGNORECASE)
SHOWN_CHARACTERS = 40


def beginning(address: str) -> str:
    """The first characters, quoted; an image can be in there."""
    return repr(address[:SHOWN_CHARACTERS] + "..." * (len(address) > SHOWN_CHARACTERS))


def address_error(address: str) -> str | None:
    """One sentence about a text that is empty, base64 of an unnamed kind, or half of a URL; None for what may be an address."""
    if not address.strip():
        return f"the address of the image is empty. Fix: a data URI ({DATA_URI}), or where the image is"
    if (kind := _kind_of_base64(address)) is not None:
        return f"{beginning(address)} is base64 that does not say of what. Fix: data:image/{kind};base64, before it"
    if ";base64," in address[:LEAST_BASE64] and not address.lower().startswith("data:"):
        return f"{beginning(address)} is not a whole data URI. Fix: one that begins as {DATA_URI} does"
    if WEB.match(address) and not _names_a_host(address):
        return f"{beginning(address)} is not a whole URL. Fix: https://HOST/PATH"
    return None


def _kind_of_base64(text: str) -> str | None:
    """What a text of nothing but base64 is an image of, png where its beginning does not tell; None for any other text."""
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
