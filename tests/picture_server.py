"""A server of pictures on this machine that answers as a test says, and a network on which it has public addresses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import httpcore

from vismoe.models.inputs.remote_images import RemoteImages

PUBLIC = "93.184.215.14"
Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def with_body(body: bytes, *headers: str, status: str = "200 OK") -> Answer:
    """Answers with a body and its length, once."""

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", *(headers or (f"Content-Length: {len(body)}",)), "Connection: close", "", ""]
        writer.write("\r\n".join(lines).encode("latin-1") + body)

    return answer


def redirect(location: str, status: int = 302) -> Answer:
    return with_body(b"", f"Location: {location}", "Content-Length: 0", status=f"{status} Found")


async def endless(request: bytes, writer: asyncio.StreamWriter) -> None:
    """Never stops."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n")
    while True:
        writer.write(bytes(65536))
        await writer.drain()


async def slow_drip(request: bytes, writer: asyncio.StreamWriter) -> None:
    """A byte now and then: no single read takes long."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def silence(request: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


class Network(httpcore.AsyncNetworkBackend):
    """Connects every address to the server on this machine, and remembers which addresses were asked for."""

    def __init__(self, port: int):
        self.port = port
        self.dialled: list[tuple[str, int]] = []
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.dialled.append((host, port))
        return await self._network.connect_tcp("127.0.0.1", self.port, timeout)


class Names:
    """A resolver: names to addresses; several lists are given out one after another. Numbers are what the real one says."""

    def __init__(self, **names: list[str]):
        self.names = {name.replace("_", "."): addresses for name, addresses in names.items()}
        self.asked: list[str] = []

    async def __call__(self, name: str, port: int) -> list[str]:
        self.asked.append(name)
        if name in self.names:
            return self.names[name]
        found = await asyncio.get_running_loop().getaddrinfo(name, port)
        return [str(place[0]) for *_, place in found]


@contextlib.asynccontextmanager
async def picture_server(
    paths: dict[str, Answer], names: Names | None = None
) -> AsyncIterator[tuple[RemoteImages, Network, list]]:
    """(what downloads from it, the addresses that were dialled, the requests it saw). pictures.example is its public name."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await reader.readuntil(b"\r\n\r\n")
            seen.append(request)
            await paths[request.split()[1].decode()](request, writer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    network = Network(server.sockets[0].getsockname()[1])
    names = names or Names()
    names.names.setdefault("pictures.example", [PUBLIC])
    remote = RemoteImages(resolve=names, network=network)
    try:
        yield remote, network, seen
    finally:
        remote.close()
        server.close()
