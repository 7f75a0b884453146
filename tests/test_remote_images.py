"""What the server downloads as images and from where, checked with servers and names that do not play by the rules."""

import asyncio
import ipaddress
import ssl
import time

import httpcore
import pytest
from hostile_images import picture
from hostile_requests import SPELLINGS
from hypothesis import given
from hypothesis import strategies as st
from picture_server import PUBLIC, Names, endless, picture_server, redirect, silence, slow_drip, with_body

from vismoe.errors import InputError
from vismoe.models.inputs.remote_images import UNREACHABLE, RemoteImages, is_public

LIMIT = 10**6
TIMEOUT_S = 5.0


async def free(nbytes: int) -> None:
    """Memory for any download."""


def fetch(url: str, paths: dict, names: Names | None = None, max_bytes: int = LIMIT, timeout_s: float = TIMEOUT_S):
    """(body or the error's sentence, addresses dialled, requests seen)."""

    async def run():
        async with picture_server(paths, names) as (remote, network, seen):
            try:
                answer = await remote.fetch(url, max_bytes, timeout_s, free)
            except InputError as error:
                answer = str(error)
            return answer, network.dialled, seen

    return asyncio.run(run())


# -- addresses
PRIVATE = """
0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254 168.63.129.16 169.254.0.1 169.254.169.254
169.254.170.2 172.16.0.1 172.31.255.255 192.0.0.1 192.0.0.192 192.0.2.1 192.88.99.1 192.168.1.1 198.18.0.1 198.51.100.1
203.0.113.1 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255
:: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1 100::1 2001::1
2001:0:4136:e378:8000:63bf:3fff:fdd2 2001:10::1 2001:db8::1 2002:7f00:1::1 2002:808:808::1 3fff::1 5f00::1 fc00::1
fd00:ec2::254 fd20:ce::254 fe80::1 fe80::1%eth0 fec0::1 ff02::1 ff0e::1 localhost 2130706433
""".split()


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_refused(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "2606:4700::1111", "2a00:1450::1", "64:ff9b::808:808"])
def test_public_addresses_pass(address):
    assert is_public(address)


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_inside_an_ipv6_one_passes_only_through_nat64_and_only_when_public(address):
    number = int(address)
    assert not is_public(str(ipaddress.IPv6Address(0xFFFF << 32 | number)))
    assert not is_public(str(ipaddress.IPv6Address(0x2002 << 112 | number << 80)))
    assert is_public(str(ipaddress.IPv6Address((0x64FF9B << 96) | number))) == is_public(str(address))
    if address.is_private or address.is_loopback or address.is_link_local or address.is_multicast or address.is_reserved:
        assert not is_public(str(address))


# -- downloads
def test_a_picture_of_a_public_server_arrives_and_the_request_says_little():
    body, dialled, seen = fetch("http://pictures.example/a.png?size=1#x", {"/a.png?size=1": with_body(picture())})
    assert body == picture()
    assert dialled == [(PUBLIC, 80)]
    assert seen[0].split(b"\r\n")[:2] == [b"GET /a.png?size=1 HTTP/1.1", b"Host: pictures.example"]
    assert not any(word in seen[0].lower() for word in (b"cookie", b"authorization", b"gzip"))


@pytest.mark.parametrize("url", SPELLINGS)
def test_no_spelling_of_a_private_address_is_dialled_and_all_refusals_read_the_same(url):
    names = Names(inside_example=["10.1.2.3"], both_example=[PUBLIC, "10.1.2.3"])
    answer, dialled, _ = fetch(url, {}, names)
    assert answer == UNREACHABLE
    assert dialled == []


def test_a_name_that_does_not_exist_reads_as_one_that_is_refused():
    answer, dialled, _ = fetch("http://nothing.example/", {}, Names(nothing_example=[]))
    assert (answer, dialled) == (UNREACHABLE, [])


def test_the_address_that_was_checked_is_the_one_that_is_dialled():
    class Rebinding(Names):
        async def __call__(self, name, port):
            await super().__call__(name, port)
            return [PUBLIC] if len(self.asked) == 1 else ["127.0.0.1"]

    names = Rebinding(pictures_example=[])
    body, dialled, _ = fetch("http://pictures.example/", {"/": with_body(picture())}, names)
    assert (body, dialled, names.asked) == (picture(), [(PUBLIC, 80)], ["pictures.example"])
    names = Rebinding(pictures_example=[])  # a redirect to itself asks again, and is refused then
    answer, dialled, _ = fetch("http://pictures.example/", {"/": redirect("/again"), "/again": with_body(picture())}, names)
    assert (answer, dialled) == (UNREACHABLE, [(PUBLIC, 80)])


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_between_public_servers_are_followed(status):
    paths = {"/": redirect("//other.example/next", status), "/next": redirect("end.png"), "/end.png": with_body(picture())}
    body, dialled, seen = fetch("http://pictures.example/", paths, Names(other_example=["8.8.8.8"]))
    assert body == picture()
    assert dialled == [(PUBLIC, 80), ("8.8.8.8", 80), ("8.8.8.8", 80)]
    assert b"Host: other.example" in seen[2]


@pytest.mark.parametrize("location", [*SPELLINGS[:6], "http://169.254.169.254/", "//[::1]/", "http://inside.example/"])
def test_a_redirect_into_the_network_is_refused_like_an_address(location):
    answer, dialled, _ = fetch("http://pictures.example/", {"/": redirect(location)}, Names(inside_example=["10.1.2.3"]))
    assert (answer, dialled) == (UNREACHABLE, [(PUBLIC, 80)])


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://x/", "http://pictures.example:22/", "http://u:p@pictures.example/", "http://["],
)
def test_a_redirect_to_what_is_no_url_of_an_image_is_refused(location):
    answer, dialled, _ = fetch("http://pictures.example/", {"/": redirect(location)})
    assert isinstance(answer, str)
    assert dialled == [(PUBLIC, 80)]


def test_redirects_come_to_an_end():
    answer, dialled, _ = fetch("http://pictures.example/", {"/": redirect("/")})
    assert "redirects" in answer
    assert len(dialled) == 4


@pytest.mark.parametrize(
    "url",
    [
        "http://pictures.example:8080/", "http://user@pictures.example/", "http://user:word@pictures.example/", "http:///x",
        "ftp://pictures.example/", "gopher://pictures.example/", "http://", "https:pictures.example", "//pictures.example/",
        "http://pictures.example:0/", "http://pictures.example:99999/", "http://[::1/", "http://a\nb.example/",
        "http://a\x00b.example/", "http://0177.0.0.1/", "http://" + "a" * 5000 + "/",
    ],
)  # fmt: skip
def test_urls_with_other_schemes_ports_or_users_are_refused_before_anything_is_resolved(url):
    names = Names()
    answer, dialled, _ = fetch(url, {}, names)
    assert isinstance(answer, str)
    assert (dialled, names.asked) == ([], [])


@pytest.mark.parametrize("name", ["a" * 64 + ".example", "xn--a.example", "..", "a..b", "%6c%6f%63alhost", "exam ple", "\u2025"])
def test_odd_names_are_refused_and_nothing_else_happens(name):
    answer, dialled, _ = fetch(f"http://{name}/", {})
    assert isinstance(answer, str)
    assert dialled == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (with_body(bytes(LIMIT + 1)), "more bytes"),
        (with_body(b"", "Content-Length: 99999999999999999999"), "more bytes"),
        (with_body(bytes(LIMIT + 1), "Content-Type: image/png"), "more bytes"),  # ends when the connection does
        (with_body(b"100000\r\n" + bytes(2**20) + b"\r\n", "Transfer-Encoding: chunked"), "more bytes"),
        (endless, "more bytes"),
        (with_body(b"x" * 10, "Content-Length: 1000"), UNREACHABLE),  # cut short
        (with_body(b"", "Content-Length: many"), UNREACHABLE),
        (with_body(b"x", "Content-Length: 1", "Content-Encoding: gzip"), "compressed"),
        (with_body(b"", "X: " + "x" * 200_000, "Content-Length: 0"), UNREACHABLE),
        (with_body(b"no", status="404 Not Found"), "answered 404"),
        (with_body(b"", "Content-Length: 0", status="302 Found"), "answered 302"),  # to nowhere
        (with_body(b"", status="101 Switching Protocols"), UNREACHABLE),
    ],
)  # fmt: skip
def test_a_body_that_is_too_large_cut_short_or_encoded_is_refused(answer, words):
    said, _, _ = fetch("http://pictures.example/", {"/": answer})
    assert words in said


@pytest.mark.parametrize("answer", [slow_drip, silence])
def test_the_whole_download_has_one_time_limit(answer):
    began_s = time.monotonic()
    said, _, _ = fetch("http://pictures.example/", {"/": answer}, timeout_s=0.3)
    assert "within 0.3 s" in said
    assert time.monotonic() - began_s < 20


def test_a_resolver_that_hangs_costs_one_time_limit():
    async def never(name, port):
        await asyncio.sleep(60)

    with pytest.raises(InputError, match=r"within 0\.2 s"):
        asyncio.run(RemoteImages(resolve=never).fetch("http://pictures.example/", LIMIT, 0.2, free))


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    body, dialled, _ = fetch("http://pictures.example/", {"/": with_body(picture())})
    assert (body, dialled) == (picture(), [(PUBLIC, 80)])


def test_the_next_address_is_tried_when_one_does_not_answer():
    class Deaf(httpcore.AsyncNetworkBackend):
        def __init__(self):
            self.dialled = []

        async def connect_tcp(self, host, port, *arguments):
            self.dialled.append(host)
            raise httpcore.ConnectError("no route")

    async def several(name, port):
        return [f"8.8.8.{number}" for number in range(1, 9)]

    network = Deaf()
    with pytest.raises(InputError, match="cannot be reached"):
        asyncio.run(RemoteImages(resolve=several, network=network).fetch("http://pictures.example/", LIMIT, TIMEOUT_S, free))
    assert network.dialled == ["8.8.8.1", "8.8.8.2", "8.8.8.3", "8.8.8.4"]


def test_tls_asks_for_the_name_and_not_for_the_address():
    async def run():
        names_seen = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sni_callback = lambda _, name, __: names_seen.append(name)
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
        async with picture_server({}) as (remote, network, _):
            network.port = server.sockets[0].getsockname()[1]
            with pytest.raises(InputError, match="cannot be reached"):  # it has no certificate
                await remote.fetch("https://pictures.example/", LIMIT, TIMEOUT_S, free)
        server.close()
        return names_seen, network.dialled

    assert asyncio.run(run()) == (["pictures.example"], [(PUBLIC, 443)])
