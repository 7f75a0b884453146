"""Settings of the server: one frozen definition of every default. The flags of `vismoe serve` come from it.

Checked on creation: a server for other machines without a key is refused. Needs no optional package.
"""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vismoe.config import MOST_BYTES, Tokens
from vismoe.errors import ConfigError
from vismoe.ranges import Range, check_fields, option

MOST_SECONDS = 7 * 86_400
Size = Annotated[int, Range(1024, MOST_BYTES, "bytes")]
Patience = Annotated[float, Range(0, MOST_SECONDS, "seconds", above=True)]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The server's behaviour towards its clients."""

    host: str = option("127.0.0.1", "address to listen on; other machines can only be served with an API key", "ADDRESS")
    port: Annotated[int, Range(0, 65535)] = option(8000, "port to listen on; 0 takes any free port", "PORT")
    api_keys: tuple[str, ...] = ()  # a client must send one of these
    no_api_key: bool = option(False, "serve other machines without an API key")
    served_model_name: str | None = option(None, "model name for clients (default: the name of its folder or repository)", "NAME")
    allow_hosts: tuple[str, ...] = option(
        (), "a further host name of this server, e.g. of a reverse proxy; repeat for more", "NAME"
    )
    allow_origins: tuple[str, ...] = option(
        (), "origin of a web page that may call the server, e.g. http://localhost:3000; repeat for more", "ORIGIN"
    )
    allow_remote_images: bool = option(False, "download images that requests name by http(s) URL, only from public addresses")
    image_folder: Path | None = option(None, "requests may name images in this folder by path", "FOLDER")
    max_body_bytes: Size = option(64 * 2**20, "largest request", "SIZE")
    max_images: Annotated[int, Range(0, 10**6)] = option(8, "most images in a request", "N")
    max_pixels: Annotated[int, Range(1, MOST_BYTES)] = option(32 * 10**6, "most pixels in an image", "N")
    max_image_bytes: Size = option(20 * 2**20, "largest encoded image", "SIZE")
    image_timeout_s: Patience = option(10.0, "longest time to download a request's images, and again to decode them", "SECONDS")
    video_timeout_s: Patience = option(60.0, "as --image-timeout, for a request with a video", "SECONDS")
    no_reuse: bool = option(
        False, "compute every prompt completely: bits do not depend on earlier requests, but the first word takes longer"
    )
    fixed_policy: bool = option(False, "refuse requests for another policy or other formats, which make all other requests wait")
    max_waiting: Annotated[int, Range(1, 10**6)] = option(64, "most waiting requests; further ones are refused (429)", "N")
    memory_timeout_s: Patience = option(
        30.0, "longest wait of a request for memory that other requests hold (--request-memory), then 429", "SECONDS"
    )
    body_timeout_s: Patience = option(60.0, "longest time for a request to arrive", "SECONDS")
    drain_s: Annotated[float, Range(0, MOST_SECONDS, "seconds")] = option(
        30.0, "time at shutdown to finish running answers", "SECONDS"
    )
    max_tokens: Tokens | None = None  # of an answer, if the request does not say; None: to the end of the planned context
    image_tokens: tuple[Tokens, Tokens] | None = None  # least and most per image, if the request does not say

    def __post_init__(self) -> None:
        check_fields(self)
        if not all(map(is_api_key, self.api_keys)):
            raise ConfigError("an API key is printable ASCII without blanks around it, and not empty")
        if self.image_folder is not None and not os.path.isdir(self.image_folder):  # False for a name too long, too
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
    address = address_of(host.strip("[]"))
    return address.is_loopback if address is not None else host.lower().rstrip(".") == "localhost"


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` is; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def served_name(name: str) -> str:
    """The public name of a model: a hub model's name, or the last part of a folder's or file's path; never the path."""
    return Path(name).name if Path(name).exists() else name
