"""API keys: who may talk to the server.

Keys are kept as SHA-256 digests, and a candidate's digest is compared with every one of them in constant time, so that neither
the length of a key, nor how much of it was right, nor which of several it was can be told from how long an answer takes.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

__all__ = ["KeyCheck"]


class KeyCheck:
    """Whether a request may pass; without keys everyone may."""

    def __init__(self, keys: Sequence[str]):
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        """Whether a key is asked for at all."""
        return bool(self._digests)

    def allows(self, headers: Mapping[str, str]) -> bool:
        """headers: by lower-case name, as starlette's are. `Authorization: Bearer KEY` or `x-api-key: KEY`."""
        if not self._digests:
            return True
        candidate = _digest(_key_in(headers))
        return sum(hmac.compare_digest(candidate, digest) for digest in self._digests) > 0  # a sum: all are compared


def _key_in(headers: Mapping[str, str]) -> str:
    """The key that a request carries, empty where there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
