"""API keys: which clients may use the server.

Keys are stored as SHA-256 digests, and a candidate's digest is compared with every one of them in constant time, so that the time
of an answer reveals neither the length of a key, nor how much of it was correct, nor which key it was.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

__all__ = ["KeyCheck"]


class KeyCheck:
    """Whether a request is allowed; without keys every request is."""

    def __init__(self, keys: Sequence[str]):
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        """Whether the server requires a key."""
        return bool(self._digests)

    def allows(self, headers: Mapping[str, str]) -> bool:
        """headers: by lower-case name, as starlette's are. Accepts `Authorization: Bearer KEY` or `x-api-key: KEY`."""
        if not self._digests:
            return True
        candidate = _digest(_key_in(headers))
        return sum(hmac.compare_digest(candidate, digest) for digest in self._digests) > 0  # sum compares all, unlike any


def _key_in(headers: Mapping[str, str]) -> str:
    """The key in a request's headers; empty if there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
