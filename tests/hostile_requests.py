"""Requests that nobody should answer: bodies, fields, messages, images and bytes, by name. Each of them has to get a 4xx."""

import json

from hostile_images import claiming, data_uri, encoded, jpeg_of_many_scans, picture, png_chunk, png_of, png_of_long_text
from picture_server import endless, redirect, silence, slow_drip, with_body
from PIL import Image


def request(*urls: str, **changes) -> dict:
    """A chat request about images; `changes` replace its fields."""
    content = [{"type": "text", "text": "What is there?"}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **changes}


# -- bodies
VALID = json.dumps(request(temperature=0.5, seed=1, stop=["x"], stream=False, vismoe={"keep": 0.5})).encode()
BROKEN = {
    **{f"cut at {end}": VALID[:end] for end in range(0, len(VALID) - 1, 9)},
    **{
        f"{value}": value
        for value in (b"null", b"true", b"0", b'"text"', b"[]", b"[{}]", b"{}", b"{}{}", b"\x00", b"\xff\xfe{}", b"'{}'")
    },
    "a comma too many": b'{"messages": [],}',
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "UTF-16": json.dumps(request()).encode("utf-16"),
    "half a surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}',
    "a bare line break": b'{"messages": [{"role": "user", "content": "\n"}]}',
    "deep lists": b'{"messages": ' + b"[" * 100_000,
    "deep lists that end": b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep objects": b'{"messages": ' * 50_000,
    "deep content": b'{"messages": [{"role": "user", "content": ' + b"[" * 5000 + b"]" * 5000 + b"}]}",
    "NaN": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "Infinity": b'{"messages": [{"role": "user", "content": "a"}], "temperature": Infinity}',
    "-Infinity": b'{"messages": [{"role": "user", "content": "a"}], "top_p": -Infinity}',
    "a number without end": b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 100_000 + b"}",
    "an exponent without end": b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e' + b"9" * 10_000 + b"}",
    "many unknown fields": json.dumps({f"x{number}": number for number in range(20_000)} | request()).encode(),
    "a field of a megabyte": json.dumps({"x" * 10**6: 1} | request()).encode(),
    "a form": b"messages=hello&max_tokens=1",
    "XML": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>',
}

HUGE = 10**30
FIELDS = {
    "messages": [None, [], {}, "hello", 1, [1], ["hello"], [None], [[]], [{}], {"role": "user"}],
    "max_tokens": ["1", 1.5, 0, -1, -HUGE, True, [], {}, [1]],
    "max_completion_tokens": ["1", 1.5, 0, -1, 2, True, [], {}],
    "temperature": ["1", -0.1, 2.1, HUGE, True, [], {}],
    "top_p": ["1", 0, -0.1, 1.1, HUGE, False, [], {}],
    "seed": ["1", 1.5, HUGE, -HUGE, 2**63, True, []],
    "n": [0, 9, -1, HUGE, True, "1", 1.5, [], {}],
    "stop": [1, [1], [None], [""], "", ["a"] * 5, {}, [["a"]], ["x" * 10_000], True],
    "stream": ["true", 1, 0, [], {}],
    "stream_options": [1, "x", [], {"include_usage": True}, {"other": 1}],
    "model": [1, [], {}, "another-model", "../../etc/passwd", "x" * 100_000],
    "user": [1, [], {}],
    "vismoe": [1, "x", [], {"keep": 0}, {"keep": -1}, {"keep": 1.5}, {"keep": "0.5"}, {"keep": HUGE}, {"selection": 1},
               {"selection": "nonsense", "keep": 0.5}, {"image_tokens": [1]}, {"image_tokens": [2, 1]}, {"image_tokens": [0, 1]},
               {"image_tokens": [1, HUGE]}, {"image_tokens": "64"}, {"image_tokens": [1, 2, 3]}, {"other": 1}],
    "logprobs": [5, "true", []],
    "top_logprobs": [1, -1, 21, "1", True],
    "logit_bias": [{"1": 101}, {"1": None}, {"x": 1}, {"-1": 1}, {"1.0": 1}, {"\u0663": 1}, {str(10**9): 1}, [], "x"],
    "top_k": [-1, 1.5, "1", True, HUGE, []],
    "min_p": [-0.1, 1.1, "0", True, HUGE, {}],
    "repetition_penalty": [0, -1, "1", True, HUGE, []],
    "repeat_penalty": [0, 1e-300, "1", False],
    "tools": [[{"type": "function", "function": {"name": "f"}}], 1],
    "tool_choice": ["required", {"type": "function"}],
    "response_format": [{"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, "json"],
    "presence_penalty": [2.5, "1", True, HUGE, []],
    "frequency_penalty": [-2.5, "1", {}],
    "modalities": [["audio"], ["text", "audio"]],
    "unknown": [1, None, "x"],
    "__proto__": [{}],
}  # fmt: skip


def turn(role: object = "user", content: object = "hello", **more) -> dict:
    return {"role": role, "content": content, **more}


def image(value: object) -> dict:
    return turn(content=[{"type": "image_url", "image_url": value}])


MESSAGES = [
    *([turn(role)] for role in ("", "User", "robot", "tool", "function", None, 1, [], {})),
    *([turn(content=content)] for content in (None, 1, {}, [], [1], [None], ["text"], [[]], [{}], True)),
    *([turn(content=[part])] for part in (
        {"type": "text"}, {"text": "a"}, {"type": "text", "text": 1}, {"type": "text", "text": None}, {"type": 1}, {"type": None},
        {"type": "text", "text": []}, {"type": "text", "text": "a", "more": 1}, {"type": "image"}, {"type": "image_url"},
        {"type": "image", "image": "ok.png"}, {"type": "file", "file": {}}, {"type": "video", "video": "ok.mp4"},
        {"type": "video_url"}, {"type": "video_url", "video_url": 1}, {"type": "video_url", "video_url": {}},
        {"type": "video_url", "video_url": {"url": "ok.mp4", "detail": "low"}}, {"type": "video_url", "text": "a"},
        {"type": "video_url", "video_url": {"url": "ok.mp4"}, "fps": "2"},
        {"type": "video_url", "video_url": {"url": "ok.mp4"}, "fps": 1e308},
        {"type": "video_url", "video_url": {"url": "ok.mp4"}, "fps": 1, "nframes": 2},
        {"type": "video_url", "video_url": {"url": "ok.mp4"}, "nframes": HUGE},
        {"type": "video_url", "video_url": {"url": "ok.mp4"}, "video_start": -1},
        {"type": "video_url", "video_url": {"url": "ok.mp4"}, "min_pixels": 10**9},
        {"type": "input_audio", "input_audio": {}}, {"type": "image_url", "text": "a"},
        {"type": "text", "text": "a", "image_url": {"url": "ok.png"}},
    )),
    *([image(value)] for value in (
        None, 1, [], {}, "ok.png", {"url": 1}, {"url": None}, {"url": []}, {"url": ""}, {"uri": "ok.png"},
        {"url": "ok.png", "detail": "best"}, {"url": "ok.png", "more": 1}, {"url": ["ok.png"]},
    )),
    [turn("system", None)],
    [turn("assistant", [{"type": "text"}])],
    [turn("system", [{"type": "image_url", "image_url": {"url": "ok.png"}}]), turn()],
    [turn("assistant", [{"type": "image_url", "image_url": {"url": "ok.png"}}]), turn()],
    [turn(content="word " * 5000)],
    [turn(content="word " * 400_000)],  # cutting it into tokens would take a second and half a gigabyte
    [turn()] * 2000,
    [turn(more=1)],
    [turn(name=5)],
    [turn("assistant", None, tool_calls=[{"id": "1", "type": "function", "function": {"name": "f"}}]), turn()],
    [turn(content="a <|image_pad|> b")],
    [turn(content="<|vision_start|><|image_pad|><|vision_end|>")],
    [turn(content="a <|video_pad|> b")],
]  # fmt: skip


def block(**given) -> list:
    return [turn(content=[given])]


DEEP = json.loads("[" * 200 + "]" * 200)
TURNS = [
    *([turn(role)] for role in ("", "robot", "tool", "developer", None, 1, [])),
    *([turn(content=content)] for content in (1, {}, [1], [None], [[]], [{}], True)),
    block(type="text"), block(type="text", text=1), block(type="text", text="a", more=1), block(type="x"), block(text="a"),
    block(type="image"), block(type="image", source={}), block(type="image", source={"type": "base64"}),
    block(type="image", source={"type": "base64", "media_type": "image/png", "data": "AAAA"}),
    block(type="image", source={"type": "file", "file_id": "x"}), block(type="image", source={"type": "url"}),
    block(type="document"), block(type="document", source={"type": "file", "file_id": "x"}), block(type="document", source={}),
    block(type="document", source={"type": "base64", "media_type": "application/pdf", "data": "AAAA"}),
    block(type="document", source={"type": "base64", "media_type": "application/msword", "data": "AAAA"}),
    block(type="document", source={"type": "text", "data": "x"}, citations={"enabled": True}),
    block(type="tool_use", id="x", name="f", input={}),
    block(type="tool_result"), block(type="tool_result", tool_use_id=1), block(type="tool_result", tool_use_id="x", content=1),
    block(type="tool_result", tool_use_id="x", content=[{"type": "tool_use", "id": "x", "name": "f", "input": {}}]),
    block(type="thinking", thinking="hm"), block(type="search_result", content=[]),
    [turn("assistant", [{"type": "image", "source": {"type": "url", "url": "ok.png"}}]), turn()],
    [turn("assistant", [{"type": "tool_use", "id": "x", "name": "f", "input": []}]), turn()],
    [turn("assistant", [{"type": "tool_use", "id": "x", "name": "f", "input": {"a": "<|image_pad|>"}}]), turn()],
    [turn(content="word " * 400_000)],
    [turn(content="a <|image_pad|> b")],
]  # fmt: skip


def item(**given) -> list:
    return [given]


ITEMS = [
    None, 1, {}, [], [1], [None], [[]], [{}], "word " * 400_000, "a <|image_pad|> b", [turn("tool")], [turn("robot")],
    [turn(1)],
    *([turn(content=content)] for content in (None, 1, {}, [], [1], [None], [[]], [{}], True)),
    block(type="text", text="a"), block(type="input_text"), block(type="input_text", text=1),
    block(type="input_file", file_id="x"),
    block(type="input_image"), block(type="input_image", file_id="x"), block(type="input_image", image_url=1),
    block(type="input_image", image_url={"url": "ok.png"}), block(type="input_image", image_url="ok.png", detail="best"),
    block(type="input_audio", input_audio={}), block(type="input_text", text="a", more=1),
    [turn("assistant", [{"type": "input_image", "image_url": "ok.png"}]), turn()],
    item(type="x"), item(type="item_reference", id="x"), item(type="message"), item(type="message", role="user"),
    item(type="function_call"), item(type="function_call", call_id="x", name="f", arguments={}),
    item(type="function_call", call_id="x", name="f", arguments="{"), item(type="function_call_output", call_id="x"),
    item(type="function_call_output", output="x"), item(type="function_call_output", call_id="x", output=1),
    item(type="function_call_output", call_id=1, output="x"), item(type="reasoning", summary=1),
    item(type="reasoning", content=[1]),
    item(type="web_search_call", id="x"), item(type="computer_call", id="x"),
]  # fmt: skip


def tool(**given) -> list:
    return [{"type": "function", "function": {"name": "f", **given}}]


TOOLS = [
    1, {}, "x", [1], [None], [[]], [{}], [{"type": "function"}], [{"type": "retrieval"}], [{"type": "function", "function": {}}],
    tool(name=""), tool(name=1), tool(name="a b"), tool(name="x" * 65), tool(more=1), tool(parameters=1), tool(parameters=[]),
    tool(parameters={"properties": []}), tool(parameters={"required": 5}), tool(parameters={"properties": {"a": 1}}),
    tool(parameters={"properties": {"a": {"enum": DEEP}}}), tool(parameters={"properties": {"a": {"const": "x" * 300_000}}}),
    tool(description="word " * 400_000), tool(description="<|image_pad|>"), tool() * 2, tool() * 2000, tool(),
]  # fmt: skip
PROMPTS = [
    None, "", [], [""], ["a", ""], ["a"] * 9, ["a"] * 1000, [1, "a"], [[]], [[1], []], [1.5], [True], [-1], [HUGE], [[10**7]],
    [[[1]]], [None], 1, {}, True, "word " * 5000, [5] * 5000, "a <|image_pad|> b", ["a", "a <|image_pad|> b"], ["word " * 5000],
]  # fmt: skip


# -- images
WHOLE = {kind: picture(kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "ICO")}
PICTURES = {
    **{f"{kind} cut at 10%": data[: len(data) // 10] for kind, data in WHOLE.items()},
    **{f"{kind} cut at half": WHOLE[kind][: len(WHOLE[kind]) // 2] for kind in ("PNG", "JPEG", "WEBP", "BMP", "PPM", "JPEG2000")},
    **{f"{kind} that claims to be enormous": claiming(kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")},
    "a bomb": png_of(1414, 1414, bytes(64)),
    "a picture just above the limit": png_of(2001, 1000, bytes(2002 * 1000)),
    "no pixels": png_of(0, 0, b""),
    "no height": png_of(10, 0, b""),
    "a row of pixels": encoded(Image.new("L", (20_000, 1)), "PNG"),
    "a column of pixels": encoded(Image.new("L", (1, 20_000)), "PNG"),
    "a long comment": png_of_long_text(8),
    "a slow JPEG": jpeg_of_many_scans(20_000, 1400),
    "PNG without end": picture()[:33] + png_chunk(b"IDAT", b"not deflated") + png_chunk(b"IEND", b""),
    "PNG with a wrong checksum": picture()[:29] + b"\0\0\0\0" + picture()[33:],
    "PNG of another PNG": picture()[:16] + picture(),
    "empty": b"",
    "a byte": b"\x89",
    "zeros": bytes(1000),
    "text": b"hello",
    "HTML": b"<html><img src='http://169.254.169.254/'></html>",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
    "PDF": b"%PDF-1.7\n1 0 obj<<>>endobj\n",
    "ZIP": b"PK\x03\x04" + bytes(100),
    "gzip": b"\x1f\x8b\x08" + bytes(100),
    "ELF": b"\x7fELF" + bytes(100),
    "pickle": b"\x80\x04\x95" + bytes(20),
    "MP4": b"\x00\x00\x00\x18ftypisom" + bytes(100),
    "WebM": b"\x1a\x45\xdf\xa3" + bytes(100),
    "AVI": b"RIFF\x00\x00\x00\x00AVI " + bytes(100),
    "HEIC": b"\x00\x00\x00\x18ftypheic" + bytes(100),
    "PSD": b"8BPS\x00\x01" + bytes(100),
    "ICNS": b"icns" + bytes(100),
    "a play list": b"#EXTM3U\nhttp://169.254.169.254/\n",
    "MVG": b"push graphic-context\nviewbox 0 0 9 9\nfill 'url(https://x/\"|id\")'\npop graphic-context\n",
}  # fmt: skip
SPELLINGS = """
http://127.0.0.1/ http://127.1/ http://2130706433/ http://0x7f000001/ http://0x7f.1/ http://0/ http://localhost/
http://LOCALHOST./ http://[::1]/ http://[::]/ http://[::ffff:127.0.0.1]/ http://[0:0:0:0:0:ffff:7f00:1]/ http://[fd00::1]/
http://169.254.169.254/latest/meta-data/ http://[fd00:ec2::254]/ http://100.100.100.200/ http://10.0.0.1:80/
https://192.168.0.1/ https://172.16.0.1:443/ http://0xa9fea9fe/ http://2852039166/ http://224.0.0.1/ http://255.255.255.255/
http://[64:ff9b::a9fe:a9fe]/ http://[2002:7f00:1::]/ http://inside.example/ http://both.example/
""".split()
PAGES = {
    "/ok.png": with_body(picture()),
    "/page.html": with_body(b"<html><body>not a picture</body></html>"),
    "/inside": redirect("http://169.254.169.254/latest/meta-data/"),
    "/local": redirect("http://localhost/"),
    "/file": redirect("file:///etc/passwd"),
    "/loop": redirect("/loop"),
    "/endless": endless,
    "/drip": slow_drip,
    "/silence": silence,
    "/large": with_body(bytes(2**21)),
    "/liar": with_body(b"x", "Content-Length: 99999"),
    "/gzip": with_body(b"x", "Content-Encoding: gzip", "Content-Length: 1"),
    "/gone": with_body(b"", status="404 Not Found"),
    "/bomb": with_body(claiming("PNG")),
}
PAYLOAD = data_uri(picture())
URIS = {
    "no payload": "data:image/png;base64,",
    "no comma": "data:image/png;base64",
    "no base64": "data:image/png,abc",
    "percent-encoded": "data:image/png;base64," + PAYLOAD.partition(",")[2].replace("/", "%2F").replace("A", "%41"),
    "bad letters": "data:image/png;base64,####",
    "bad length": PAYLOAD[:-3],
    "url-safe letters": "data:image/png;base64," + "-_" * 40,
    "letters of another alphabet": "data:image/png;base64,ｉＶＢＯ",
    "nothing": "data:",
    "a video": "data:video/mp4;base64,AAAA",
    "a data URI in a data URI": data_uri(PAYLOAD.encode()),
    "too large": data_uri(bytes(2**20 + 3)),
    "blanks for ever": "data:image/png;base64," + " " * 1_300_000,
    "null": "\x00",
    "half a surrogate": "data:image/png;base64,\ud800",
    "other schemes": "javascript:alert(1)",
    "ftp": "ftp://pictures.example/ok.png",
    "gopher": "gopher://127.0.0.1:6379/_FLUSHALL",
    "dict": "dict://127.0.0.1:11211/stat",
    "jar": "jar:http://pictures.example/ok.png!/",
    "a blob": "blob:http://localhost/1",
    "about": "about:blank",
}
PATHS = [
    "/etc/passwd", "../secret.png", "..//secret.png", "./../secret.png", "up/secret.png", "link.png", "fifo.png", "large.png",
    "text.png", "empty.png", ".", "..", "/", "missing.png", "ok.png/x", "ok.png\x00.jpg", "file:///etc/passwd", "file://../secret.png",
    "file:///proc/self/environ", "file://localhost/etc/passwd", "file://pictures.example/ok.png", "FILE:///etc/passwd", "~/x.png",
    "~root/x.png", "%2e%2e/secret.png", "..%2fsecret.png", "..\\secret.png", "/dev/zero", "/dev/stdin", "/proc/self/fd/0",
    "x" * 5000, "x/" * 3000, "ok.png?x", "*.png", "$HOME/x.png", "`id`", "|id", "file:///%00", "file://%2fetc%2fpasswd",
    "\\\\host\\share\\x.png", "C:\\x.png",
]  # fmt: skip
REMOTE = [
    *SPELLINGS,
    *(f"http://pictures.example{path}" for path in PAGES if path != "/ok.png"),
    "http://pictures.example:8080/ok.png", "http://user:pass@pictures.example/ok.png", "http://nothing.invalid/", "http://",
    "http://pictures.example@localhost/", "http://localhost#@pictures.example/", "http://pictures.example\\@localhost/",
    "http://[::1", "http://0000000000000000000000000177.1/", "http://①②⑦.⓪.⓪.①/", "http://127。0。0。1/", "http:/localhost/",
    "http://pictures.example:-1/", "http://" + "a" * 10_000, "HTTP://LOCALHOST/", "http://pictures.example/\r\nX: y",
    "http:// localhost/", "\thttp://localhost/", "https://",
]  # fmt: skip


# -- addresses, headers, bytes
CHAT = "/v1/chat/completions"
ELSEWHERE = [
    *((method, CHAT) for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW")),
    *(("POST", path) for path in ("/v1/chat", "/v1/embeddings", "/v1/models", "/metrics", "/health")),
    *(("GET", path) for path in ("/", "/v1/models/other", "/v1/models/..%2f..%2fetc%2fpasswd", "/docs", "/openapi.json", "/%00")),
    *(("GET", path) for path in ("/../../etc/passwd", "/" + "x" * 20_000, "/static/../app/api.py", "/.env")),
]
HEADERS = {
    "no type": {"Content-Type": ""},
    "a form": {"Content-Type": "application/x-www-form-urlencoded"},
    "what a web page may send": {"Content-Type": "text/plain"},
    "several": {"Content-Type": "multipart/form-data; boundary=x"},
    "another host": {"Host": "evil.example"},
    "a host that looks like ours": {"Host": "localhost.evil.example"},
    "an odd host": {"Host": "[::1"},
    "no host": {"Host": ""},
}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
RAW = {
    "a length and chunks": HEAD
    + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n",
    "a length that is none": HEAD + b"Content-Length: abc\r\n\r\n",
    "a length with a plus": HEAD + b"Content-Length: +2\r\n\r\n{}",
    "a length of a thousand digits": HEAD + b"Content-Length: " + b"9" * 1000 + b"\r\n\r\n",
    "a length above the limit": HEAD + b"Content-Length: 99999999\r\n\r\n",
    "another coding": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "a coding in disguise": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n",
    "a chunk whose size is none": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a chunk whose size is enormous": HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
    "a blank in a header's name": b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
    "no colon": b"GET /health HTTP/1.1\r\nHost localhost\r\n\r\n",
    "a null in a header": b"GET /health HTTP/1.1\r\nHost: local\x00host\r\n\r\n",
    "two hosts": HEAD + b"Host: evil.example\r\nContent-Length: 2\r\n\r\n{}",
    "a header of 200 KB": HEAD + b"X: " + b"x" * 200_000 + b"\r\n\r\n",
    "20,000 headers": HEAD + b"".join(b"X%d: y\r\n" % number for number in range(20_000)) + b"\r\n",
    "a first line without end": b"G" * 200_000,
    "no HTTP": b"hello\r\n\r\n",
    "nothing but lines": b"\r\n" * 1000 + b"x\r\n\r\n",
    "an old version": b"GET /health HTTP/0.9\r\n\r\n",
    "a new version": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n",
    "a tunnel": b"CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a proxy's request": b"GET http://169.254.169.254/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
}
