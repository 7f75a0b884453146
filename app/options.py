"""Settings of the server: one frozen definition of every default. The flags of `vismoe serve` come from it.

Checked on creation: a server for other machines without a key is refused. Needs no optional package.
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
    """The server's behaviour towards its clients."""

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65535)] = 8000  # 0: any free port
    api_keys: tuple[str, ...] = ()  # a client must send one of these
    no_api_key: bool = False  # explicit permission to serve other machines without a key
    served_model_name: str | None = None  # None: the model's own
    allow_hosts: tuple[str, ...] = ()  # further accepted names in a Host header
    allow_origins: tuple[str, ...] = ()  # origins of web pages that may call the server
    allow_remote_images: bool = False
    image_folder: Path | None = None  # requests may name images in it by path
    max_body_bytes: Size = 64 * 2**20
    max_images: Annotated[int, Range(0, 10**6)] = 8  # per request
    max_pixels: Annotated[int, Range(1, MOST_BYTES)] = 32 * 10**6  # per image
    max_image_bytes: Size = 20 * 2**20  # per encoded image
    image_timeout_s: Patience = 10.0  # for the downloads of one request, and again for decoding
    no_reuse: bool = False  # do not reuse keys and values of earlier requests: bits then do not depend on them
    fixed_policy: bool = False  # requests may change neither policy nor formats
    max_waiting: Annotated[int, Range(1, 10**6)] = 64  # most waiting requests; further ones are refused
    memory_timeout_s: Patience = 30.0  # most time that a request waits for memory of other requests
    body_timeout_s: Patience = 60.0  # most time for a body to arrive
    drain_s: Annotated[float, Range(0, MOST_SECONDS, "seconds")] = 30.0  # time at shutdown for running answers
    max_tokens: Tokens | None = None  # of an answer, if the request does not say; None: to the end of the planned context
    image_tokens: tuple[Tokens, Tokens] | None = None  # least and most per image, if the request does not say

    def __post_init__(self) -> None:
        check_fields(self)
        if not all(map(is_api_key, self.api_keys)):
            raise ConfigError("an API key is printable ASCII without blanks around it, and not empty")
        if self.image_folder is not None and not self.image_folder.is_dir():
            raise ConfigError(f"image folder {self.image_folder}: not a folder. Fix: name one that exists")
        if self.api_keys and self.no_api_key:
            raise ConfigError("both API keys and --no-api-key were given. Fix: give only one of them")
        if not is_loopback(self.host) and not self.api_keys and not self.no_api_key:
            raise ConfigError(
                f"host={self.host} serves other machines, but there is no API key. Fix: --api-key-file FILE, or --no-api-key "
                "if everybody who can reach this machine may use the server"
            )


def is_api_key(text: str) -> bool:
    """Whether a header can contain it."""
    return bool(text) and text.isascii() and text.isprintable() and text == text.strip()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at `host`; names other than localhost count as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def served_name(name: str) -> str:
    """The public name of a model: a hub model's name, or the last part of a folder's; never a path of this machine."""
    return Path(name).name if Path(name).is_dir() else name
