"""Settings of the server: one frozen definition of every default. The flags of `vismoe serve` come from it.

Checked when made: what would serve strangers without a key is refused. Needs no optional package.
"""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vismoe.config import MOST_BYTES, Tokens
from vismoe.errors import ConfigError
from vismoe.ranges import Range, check_fields

__all__ = ["ServeOptions", "is_api_key", "is_loopback", "served_name"]

MOST_SECONDS = 7 * 86_400
Size = Annotated[int, Range(1024, MOST_BYTES, "bytes")]
Patience = Annotated[float, Range(0, MOST_SECONDS, "seconds", above=True)]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How the server meets its clients."""

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65535)] = 8000  # 0: any free one
    api_keys: tuple[str, ...] = ()  # a client sends one of these
    no_api_key: bool = False  # said by whoever wants to serve other machines without a key
    served_model_name: str | None = None  # None: the model's own
    allow_hosts: tuple[str, ...] = ()  # further names that a Host header may have
    allow_origins: tuple[str, ...] = ()  # web pages that may call us from a browser
    allow_remote_images: bool = False
    image_folder: Path | None = None  # from which images may be named by path
    max_body_bytes: Size = 64 * 2**20
    max_images: Annotated[int, Range(0, 10**6)] = 8  # of one request
    max_pixels: Annotated[int, Range(1, MOST_BYTES)] = 32 * 10**6  # of one image
    max_image_bytes: Size = 20 * 2**20  # of one image as it was encoded
    image_timeout_s: Patience = 10.0  # for the downloads of one request, and as much for decoding
    no_reuse: bool = False  # of keys and values of earlier requests: same bits whatever was asked before
    fixed_policy: bool = False  # requests change neither policy nor formats
    max_waiting: Annotated[int, Range(1, 10**6)] = 64  # requests that do not run yet; further ones are sent away
    memory_timeout_s: Patience = 30.0  # for a request to wait for memory that others hold
    body_timeout_s: Patience = 60.0  # for a body to arrive
    drain_s: Annotated[float, Range(0, MOST_SECONDS, "seconds")] = 30.0  # at the end, for answers that are being written
    max_tokens: Tokens | None = None  # of an answer, where the request does not say; None: to the end of the planned context
    image_tokens: tuple[Tokens, Tokens] | None = None  # least and most for each image, where the request does not say

    def __post_init__(self) -> None:
        check_fields(self)
        if not all(map(is_api_key, self.api_keys)):
            raise ConfigError("an API key is printable ASCII without blanks around it, and not empty")
        if self.image_folder is not None and not self.image_folder.is_dir():
            raise ConfigError(f"image folder {self.image_folder}: not a folder. Fix: name one that exists")
        if self.api_keys and self.no_api_key:
            raise ConfigError("there are API keys, and --no-api-key. Fix: say one of the two")
        if not is_loopback(self.host) and not self.api_keys and not self.no_api_key:
            raise ConfigError(
                f"host={self.host} serves other machines, and there is no API key. Fix: --api-key-file FILE, or --no-api-key "
                "where everybody who can reach this machine may use it"
            )


def is_api_key(text: str) -> bool:
    """Whether a header can bring it."""
    return bool(text) and text.isascii() and text.isprintable() and text == text.strip()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at `host`; names other than localhost count as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def served_name(name: str) -> str:
    """What people call the model: a hub model's name, the last part of a folder's; never a path of this machine."""
    return Path(name).name if Path(name).is_dir() else name
