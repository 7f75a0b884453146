"""Images by http(s) URL, downloaded so that no client can make this machine access its own network.

The check is part of the connection: `PublicNetwork` resolves the name once, refuses unless every address is public, and connects
to one of those addresses. So a name that resolves differently the second time, a number in another base, and a redirect all pass
the same check; certificates, SNI and the Host header still use the name. httpcore is used as it is: it follows no redirects,
reads no proxies from the environment, sends no cookies, and decodes no content. All refusals before a public server answers have
the same text, so that requests cannot map the inner network. Addresses cannot show whether an inner network uses public
addresses; such installations must not enable remote images. Sizes are bytes, times seconds.
"""

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpcore
import httpx

from vismoe.errors import InputError

Resolve = Callable[[str, int], Awaitable[list[str]]]
Hold = Callable[[int], Awaitable[None]]

PORTS = {"http": 80, "https": 443}
HEADERS = (("User-Agent", "vismoe"), ("Accept", "image/*, video/*"), ("Accept-Encoding", "identity"))
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 3
MAX_URL_CHARACTERS = 4096
MAX_BYTES = 20 * 2**20  # the largest image of `download`
TIMEOUT_S = 10.0  # of `download`
MAX_ADDRESSES = 4  # tried one after another
DOWNLOADS = 16  # at a time
STEP_BYTES = 2**20  # buffer growth for a body of unknown length; chunks are smaller
RESOLVERS = DOWNLOADS  # threads; a name server that never answers blocks only one of these
UNREACHABLE = "the image could not be downloaded: its address cannot be reached or is not allowed"

# Python's is_global, plus ranges that some supported Python version lacks or cannot know. The rest follows from "every routed
# IPv6 address is in 2000::/3", which excludes loopback, private, link-local, mapped IPv4, ...
ROUTED_V6 = ipaddress.IPv6Network("2000::/3")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # IPv4 in IPv6-only networks: the last four bytes are the address
REFUSED = tuple(
    map(
        ipaddress.ip_network,
        (
            "100.64.0.0/10",  # shared by carriers; the metadata service of one cloud
            "168.63.129.16/32",  # the platform service of another cloud, at a public address
            "192.0.0.0/24",  # protocol assignments; the metadata service of a third cloud
            "192.88.99.0/24",  # 6to4 relays
            "2001::/23",  # protocol assignments, Teredo among them
            "2002::/16",  # 6to4: an IPv4 address inside
            "3fff::/20",  # documentation
        ),
    )
)


def is_public(address: str) -> bool:
    """Whether an address (not a name) is on the public internet."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)))
        if parsed not in ROUTED_V6:
            return False
    return parsed.is_global and not parsed.is_multicast and not any(parsed in network for network in REFUSED)


class RemoteImages:
    """Downloads images from public servers.

    resolve: (name, port) -> addresses; network: opens connections to an address. The defaults are the real ones.
    """

    def __init__(self, resolve: Resolve | None = None, network: httpcore.AsyncNetworkBackend | None = None):
        self._resolvers = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="vismoe-resolver")
        self._network = PublicNetwork(resolve or self._addresses, network or httpcore.AnyIOBackend())
        self._slots = asyncio.Semaphore(DOWNLOADS)

    async def fetch(self, url: str, max_bytes: int, timeout_s: float, hold: Hold) -> bytes:
        """The body of a GET of `url`, after redirects. Raises InputError, whose text may be shown to the client.

        timeout_s bounds names, connections, redirects and the body together. hold: is called with numbers of bytes before they
        are read, and may raise.
        """
        async with self._slots:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._follow(_checked(url), max_bytes, timeout_s, hold)
            except TimeoutError as error:
                raise InputError(f"the image could not be downloaded within {timeout_s:.3g} s") from error
            except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
                raise InputError(UNREACHABLE) from error

    @functools.cached_property
    def _certificates(self) -> ssl.SSLContext:
        return httpcore.default_ssl_context()  # takes 20 ms

    def close(self) -> None:
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, url: httpx.URL, max_bytes: int, timeout_s: float, hold: Hold) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            answer = await self._get(url, max_bytes, timeout_s, hold)
            if isinstance(answer, bytes):
                return answer
            try:
                url = _checked(str(url.join(answer)))
            except httpx.InvalidURL as error:
                raise InputError(UNREACHABLE) from error
        raise InputError(f"the image could not be downloaded: more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: httpx.URL, max_bytes: int, timeout_s: float, hold: Hold) -> bytes | str:
        """The body, or the URL of a redirect."""
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        headers: list[tuple[bytes | str, bytes | str]] = [("Host", url.netloc), *HEADERS]
        certificates = self._certificates if url.scheme == "https" else None
        patience = {"timeout": {"connect": timeout_s / MAX_ADDRESSES}}
        async with (
            httpcore.AsyncConnectionPool(ssl_context=certificates, network_backend=self._network) as connections,
            connections.stream("GET", target, headers=headers, extensions=patience) as response,
        ):
            fields = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in REDIRECTS and "location" in fields:
                return fields["location"]
            if response.status != 200:
                raise InputError(f"the image could not be downloaded: the server answered {response.status}")
            if fields.get("content-encoding", "identity").lower() != "identity":
                raise InputError("the image could not be downloaded: the server sent it compressed, against the request")
            return await _body(response, fields.get("content-length"), max_bytes, hold)

    async def _addresses(self, name: str, port: int) -> list[str]:
        found = await asyncio.get_running_loop().run_in_executor(
            self._resolvers, lambda: socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(place[0]) for *_, place in found))


def download(url: str) -> bytes:
    """The body of a GET of `url`, after redirects; blocks the caller, even in an event loop. Raises InputError."""

    async def unbounded(nbytes: int) -> None:
        """MAX_BYTES bounds it."""

    async def fetched() -> bytes:
        remote = RemoteImages()
        try:
            return await remote.fetch(url, MAX_BYTES, TIMEOUT_S, unbounded)
        finally:
            remote.close()

    with ThreadPoolExecutor(1, thread_name_prefix="vismoe-download") as thread:
        return thread.submit(asyncio.run, fetched()).result()


class PublicNetwork(httpcore.AsyncNetworkBackend):
    """Connects to public addresses only."""

    def __init__(self, resolve: Resolve, network: httpcore.AsyncNetworkBackend):
        self._resolve, self._network = resolve, network

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that is too long
            raise httpcore.ConnectError("no such name") from error
        if not addresses or not all(map(is_public, addresses)):
            raise httpcore.ConnectError("not a public address")
        for address in addresses[:MAX_ADDRESSES]:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


def _checked(text: str) -> httpx.URL:
    """A URL that may be requested if its address is public. Raises InputError."""
    if len(text) > MAX_URL_CHARACTERS:
        raise InputError(f"the image's URL has {len(text):,} characters, the limit is {MAX_URL_CHARACTERS:,}")
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError) as error:
        raise InputError("the image's URL is not valid") from error
    if url.scheme not in PORTS or not url.raw_host or url.userinfo or url.port not in (None, *PORTS.values()):
        raise InputError("an image's URL must be http:// or https://, without a user, at port 80 or 443")
    return url


async def _body(response: httpcore.Response, announced: str | None, max_bytes: int, hold: Hold) -> bytes:
    """The body, read no further than the limit."""
    too_large = InputError(f"the image has more bytes than the limit of {max_bytes:,}; scale it down first")
    held = int(announced or 0)  # h11 has checked that it is a number
    if held > max_bytes:
        raise too_large
    await hold(held)
    body = bytearray()
    async for chunk in response.aiter_stream():
        if len(body) + len(chunk) > max_bytes:
            raise too_large
        if len(body) + len(chunk) > held:
            await hold(STEP_BYTES)
            held += STEP_BYTES
        body += chunk
    return bytes(body)
