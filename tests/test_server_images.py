"""What the server takes as images, and how it decodes them: hostile files, names and pictures; and who may ask at all."""

import asyncio
import os
import struct
import time

import numpy as np
import pytest
from hostile_images import claiming, data_uri, jpeg_of_many_scans, picture, png_of, png_of_long_text
from picture_server import picture_server, with_body

from vismoe.app.decoding import Decoder
from vismoe.app.guard import KeyCheck
from vismoe.app.images import AskedImage, ImageIntake, ImageLimits
from vismoe.app.local_images import LocalImages
from vismoe.app.request_memory import RequestMemory
from vismoe.errors import ConfigError, InputError
from vismoe.models.inputs.images import open_image

LIMIT = 10**6


def opening(intake: ImageIntake, urls):
    """Opens images with memory for anything, and as large as they are."""
    return intake.open_all([AskedImage(url, lambda *sides: None) for url in urls], RequestMemory(2**40, 60).enter())


# -- files
@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images" / "deep").mkdir(parents=True)
    (tmp_path / "images" / "a b.png").write_bytes(picture())
    (tmp_path / "images" / "deep" / "b.png").write_bytes(picture())
    (tmp_path / "secret.png").write_bytes(picture())
    return tmp_path / "images"


def test_files_below_the_folder_are_read_by_any_of_their_names(folder):
    local = LocalImages(folder)
    for name in (
        "a b.png",
        "./a b.png",
        f"{folder}/a b.png",
        f"file://{folder}/a%20b.png",
        f"FILE://localhost{folder}/a%20b.png",
        "deep/b.png",
    ):
        assert local.read(name, LIMIT) == picture()


def test_an_image_folder_behind_a_link_works_by_both_names(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    local = LocalImages(tmp_path / "link")
    assert local.read(f"{tmp_path}/link/deep/b.png", LIMIT) == local.read(f"{folder}/deep/b.png", LIMIT) == picture()


def test_what_lies_elsewhere_or_is_no_file_reads_like_what_is_not_there(folder, tmp_path):
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "inner.png").symlink_to(folder / "a b.png")
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "fifo.png")
    (folder / "closed.png").write_bytes(b"")
    names = [
        "missing.png", "../secret.png", "deep/../../secret.png", "deep/../a b.png", f"{tmp_path}/secret.png", "/etc/passwd",
        "//etc/passwd", f"{folder}/../secret.png", f"file://{tmp_path}/secret.png", "file:///etc/passwd", "/dev/zero",
        f"file://{folder}/%2e%2e/secret.png", f"file://{folder}/..%2fsecret.png", f"file://other.host{folder}/a%20b.png",
        f"file://{folder}/%ff.png", f"{folder}x/a b.png", "link.png", "inner.png", "up/secret.png", "fifo.png", "deep", ".", "",
        "/", str(folder), "a b.png/x", "a\x00b.png", "x" * 300, "\ud800.png", "x/" * 3000, "~root/x.png", "file:a b.png",
        "..\\secret.png", "/proc/self/environ",
    ]  # fmt: skip
    said = set()
    for name in names:
        with pytest.raises(InputError) as refused:
            LocalImages(folder).read(name, LIMIT)
        said.add(str(refused.value))
    assert len(said) == 1
    assert str(tmp_path) not in said.pop()


def test_a_folder_swapped_for_a_link_meanwhile_is_not_followed(folder, tmp_path):
    local = LocalImages(folder)
    (folder / "deep" / "b.png").unlink()
    (folder / "deep").rmdir()
    (folder / "deep").symlink_to(tmp_path)
    with pytest.raises(InputError):
        local.read("deep/secret.png", LIMIT)


def test_a_large_file_is_refused_unread_and_descriptors_are_given_back(folder):
    with (folder / "large.png").open("wb") as file:
        file.truncate(2**40)
    before = len(os.listdir("/proc/self/fd"))
    for name in ("large.png", "missing/x.png", "deep/missing.png", "deep", "a b.png/x"):
        with pytest.raises(InputError):
            LocalImages(folder).read(name, LIMIT)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_image_folder_that_is_none_is_refused_at_start(tmp_path):
    with pytest.raises(ConfigError, match="not a folder"):
        LocalImages(tmp_path / "missing")


# -- decoding
@pytest.fixture
def decoder():
    decoder = Decoder()
    yield decoder
    decoder.close()


def test_a_picture_decodes_in_the_other_process_as_it_does_here(decoder):
    for source in (picture(), picture("JPEG"), data_uri(picture("WEBP"))):
        assert np.array_equal(np.asarray(decoder.decode(source, LIMIT, 30)), np.asarray(open_image(source)))


def test_a_slow_picture_is_stopped_and_the_next_one_is_answered(decoder):
    decoder.decode(picture(), LIMIT, 30)
    slow = jpeg_of_many_scans(20_000)
    assert len(slow) < 10**6
    began_s = time.monotonic()
    with pytest.raises(InputError, match=r"longer than 0\.5 s"):
        decoder.decode(slow, 32 * 10**6, 0.5)
    assert time.monotonic() - began_s < 20  # alone it would take minutes
    assert decoder.decode(picture(), LIMIT, 30).size == (24, 24)


def test_a_decoder_that_crashes_costs_one_picture(decoder):
    decoder.decode(picture(), LIMIT, 30)
    decoder._process.kill()
    sizes = []
    for _ in range(2):
        try:
            sizes.append(decoder.decode(picture(), LIMIT, 30).size)
        except InputError as error:
            assert "could not be decoded" in str(error)
    assert sizes[-1:] == [(24, 24)]


def icon_of(data: bytes) -> bytes:
    """An icon that says it has 16 x 16 pixels, whatever the PNG in it says."""
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(data), 22) + data


def test_a_picture_that_takes_more_than_its_header_says_fails(decoder):
    small, large = (icon_of(png_of(side, side, bytes((side + 1) * side))) for side in (1000, 12_000))
    assert decoder.look(small, LIMIT, 30).width <= 1000
    with pytest.raises(InputError):  # its decoder has 100 MiB for that where nothing else bounds it
        decoder.look(large, 10**9, 60)
    assert decoder.decode(icon_of(picture()), LIMIT, 30).size == (24, 24)


def test_comments_that_unpack_to_much_more_are_refused(decoder):
    with pytest.raises(InputError):
        decoder.decode(png_of_long_text(megabytes=100), LIMIT, 60)


# -- all together
def opened(limits: ImageLimits, *urls: str):
    async def run():
        intake = ImageIntake(limits)
        try:
            return await opening(intake, urls)
        finally:
            intake.close()

    return asyncio.run(run())


def test_all_kinds_of_sources_give_the_same_picture(folder):
    text = with_body(
        picture(), "Content-Type: text/html", f"Content-Length: {len(picture())}"
    )  # what it is called does not count
    urls = ["http://pictures.example/a", data_uri(picture()), "a b.png", f"file://{folder}/deep/b.png"]

    async def run():
        async with picture_server({"/a": text}) as (remote, *_):
            intake = ImageIntake(ImageLimits(allow_remote_images=True, image_folder=folder), remote)
            images = await opening(intake, urls)
            intake.close()
            return images

    images = asyncio.run(run())
    assert len(images) == 4
    assert all(np.array_equal(np.asarray(image), np.asarray(open_image(picture()))) for image in images)


@pytest.mark.parametrize(
    ("limits", "urls", "words"),
    [
        ({}, ["http://pictures.example/a.png"], "does not download"),
        ({}, ["/etc/passwd"], "reads no image files"),
        ({}, ["file:///etc/passwd"], "reads no image files"),
        ({}, [""], "address of the image is empty"),
        ({}, ["iVBORw0KGgo" + "A" * 300], "base64 without a type"),
        ({}, ["https:/a.example/b.png"], "not a complete URL"),
        ({}, ["a.example/b.png"], "'a.example/b.png' is neither a data: URI nor an http"),
        ({}, ["ftp://x/y.png"], "an image must be a data: URI"),
        ({}, ["javascript:alert(1)"], "an image must be a data: URI"),
        ({"max_images": 1}, [data_uri(picture())] * 2, "2 images, but the limit is 1"),
        ({"max_image_bytes": 100}, [data_uri(bytes(400))], "limit of 100 bytes"),
        ({"max_image_bytes": len(data_uri(picture()))}, [data_uri(picture())] * 5, "image 5 of 5: .* together"),
        ({"max_pixels": 100}, [data_uri(picture())], "24 x 24 = 576 pixels"),
        ({"max_pixels": 600}, [data_uri(picture())] * 5, "image 5 of 5: .* limit is 96"),
        ({}, [data_uri(claiming("PNG"))], "pixels"),
        ({}, ["data:image/png;base64,!!!"], "base64"),
        ({}, ["data:image/png,abc"], "form"),
        ({"image_timeout_s": 0.3}, [data_uri(jpeg_of_many_scans(20_000))], "longer than 0.3 s"),
    ],
)
def test_limits_of_a_request(limits, urls, words):
    with pytest.raises(InputError, match=words):
        opened(ImageLimits(**limits), *urls)


def test_hostile_pictures_do_not_keep_the_decoders_from_an_honest_one():
    async def run():
        intake = ImageIntake(ImageLimits(image_timeout_s=1.5))
        hostile = [data_uri(jpeg_of_many_scans(20_000))]  # minutes of work for two decoders
        slow = [opening(intake, hostile) for _ in range(3)]
        outcomes = await asyncio.gather(*slow, opening(intake, [data_uri(picture())]), return_exceptions=True)
        if isinstance(outcomes[-1], InputError):  # the machine is so busy that even this one was late
            outcomes[-1] = await opening(intake, [data_uri(picture())])
        intake.close()
        return outcomes

    *hostile, honest = asyncio.run(run())
    assert [image.size for image in honest] == [(24, 24)]
    assert all("longer than 1.5 s" in str(outcome) for outcome in hostile)


# -- keys
def test_a_key_is_taken_from_either_header_and_has_to_be_one_of_ours():
    check = KeyCheck(["first", "second"])
    assert check
    for headers in ({"authorization": "Bearer second"}, {"authorization": "bearer first"}, {"x-api-key": "first"}):
        assert check.allows(headers)
    for headers in (
        {}, {"authorization": "Bearer"}, {"authorization": "Bearer "}, {"authorization": "first"},
        {"authorization": "Basic first"}, {"authorization": "Bearer firs"}, {"authorization": "Bearer first2"},
        {"x-api-key": ""}, {"x-api-key": "FIRST"}, {"authorization": "Bearer third", "x-api-key": "first"},
        {"authorization": "Bearer fir\xe9st"},
    ):  # fmt: skip
        assert not check.allows(headers)


def test_without_keys_everyone_may():
    assert not KeyCheck([])
    assert KeyCheck([]).allows({})
