"""Image intake, checked against Pillow's own decoding of clean pictures, and against damaged and hostile bytes."""

import base64
import io
import logging
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from vismoe.errors import InputError
from vismoe.models.inputs import rgb
from vismoe.models.inputs.images import FORMATS, look_at, open_image

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)  # [height, width, 3]
PICTURE = Image.fromarray(PIXELS)


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\x00" * 64)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("as_source", [lambda path: path, str, lambda path: path.read_bytes(), Image.open])
def test_every_kind_of_source_gives_the_same_pixels(tmp_path, as_source):
    path = tmp_path / "picture.png"
    PICTURE.save(path)
    image = open_image(as_source(path))
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), PIXELS)


def test_a_data_uri_gives_the_same_pixels():
    payload = base64.b64encode(encoded(PICTURE)).decode()
    assert np.array_equal(np.asarray(open_image(f"data:image/png;base64,{payload}")), PIXELS)


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM", "WEBP", "JPEG", "GIF", "JPEG2000"])
def test_common_formats_open_as_pillow_decodes_them(format):
    data = encoded(PICTURE, format, **({"lossless": True} if format == "WEBP" else {}))
    assert np.array_equal(np.asarray(open_image(data)), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_a_pillow_image_is_left_as_it_was():
    image = PICTURE.convert("RGBA")
    opened = open_image(image)
    opened.putpixel((0, 0), (1, 2, 3))
    assert image.mode == "RGBA"
    assert image.getpixel((0, 0))[:3] == tuple(PIXELS[0, 0])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    corner = Image.new("RGB", (32, 16), "white")
    corner.paste((255, 0, 0), (0, 0, 16, 8))  # red in the upper left as stored
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = open_image(encoded(corner, "PNG", exif=exif))
    assert upright.size == ((32, 16) if orientation <= 4 else (16, 32))
    right, down = {1: (0, 0), 2: (1, 0), 3: (1, 1), 4: (0, 1), 5: (0, 0), 6: (1, 0), 7: (1, 1), 8: (0, 1)}[orientation]
    place = (upright.width * (1 + 2 * right) // 4, upright.height * (1 + 2 * down) // 4)
    assert upright.getpixel(place) == (255, 0, 0)


def test_a_damaged_exif_block_does_not_cost_the_picture():
    data = encoded(PICTURE, "PNG", exif=b"Exif\x00\x00not a TIFF header at all")
    assert np.array_equal(np.asarray(open_image(data)), PIXELS)


def transparent_palette() -> Image.Image:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    image.info["transparency"] = 0
    return image


@pytest.mark.parametrize(
    ("image", "pixel", "expected"),
    [
        (Image.new("RGBA", (4, 4), (255, 0, 0, 0)), (0, 0), (255, 255, 255)),
        (Image.new("RGBA", (4, 4), (0, 0, 0, 128)), (0, 0), (127, 127, 127)),
        (Image.new("LA", (4, 4), (0, 0)), (0, 0), (255, 255, 255)),
        (transparent_palette(), (0, 0), (255, 255, 255)),
        (transparent_palette(), (1, 0), (0, 0, 255)),
        (Image.new("RGBa", (4, 4), (10, 20, 30, 255)), (0, 0), (10, 20, 30)),
    ],
)
def test_transparency_is_laid_on_white(image, pixel, expected):
    assert open_image(image).getpixel(pixel) == expected


@pytest.mark.parametrize(
    ("image", "grey"),
    [
        (Image.fromarray(np.full((4, 4), 0x8000, np.uint16)), 128),
        (Image.fromarray(np.full((4, 4), 0x00FF, np.uint16)), 1),  # dark in 16 bits, not white
        (Image.fromarray(np.full((4, 4), 200, np.int32)), 200),
        (Image.fromarray(np.full((4, 4), 32768, np.int32)), 128),
        (Image.fromarray(np.full((4, 4), 0.5, np.float32)), 128),
        (Image.fromarray(np.full((4, 4), 100.0, np.float32)), 100),
        (Image.fromarray(np.array([[-1e6, 1e6], [0, np.nan]], np.float32)), 0),
        (Image.new("1", (4, 4), 1), 255),
        (Image.new("L", (4, 4), 77), 77),
    ],
)
def test_grey_pictures_of_any_width_keep_their_brightness(image, grey):
    assert open_image(image).getpixel((0, 0)) == (grey, grey, grey)


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "P", "RGBX"])
def test_colour_spaces_become_rgb(mode):
    red = Image.new("RGB", (4, 4), (250, 10, 10)).convert(mode)
    red, green, blue = open_image(red).getpixel((0, 0))
    assert red > 200 > 60 > max(green, blue)


def test_of_an_animation_the_first_frame_is_used_and_said(caplog):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    animation = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with caplog.at_level(logging.WARNING, logger="vismoe"):
        assert open_image(animation).getpixel((0, 0)) == (255, 0, 0)
    assert "3 frames" in caplog.text
    image = Image.open(io.BytesIO(animation))
    image.seek(2)
    assert open_image(image).getpixel((0, 0)) == (0, 0, 255), "a Pillow image is taken as it stands"
    assert image.tell() == 2, "and not changed"


@pytest.mark.parametrize("name", ["clip.mp4", "clip.MOV", "clip.webm"])
def test_videos_are_refused_by_name(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"\x00" * 100)
    with pytest.raises(InputError, match="a video, not an image"):
        open_image(path)


@pytest.mark.parametrize(
    "header",
    [
        b"\x00\x00\x00\x20ftypisom",
        b"\x00\x00\x00\x14ftypqt  ",
        b"\x1a\x45\xdf\xa3",
        b"RIFF\x00\x00\x00\x00AVI ",
        b"FLV\x01",
        b"\x00\x00\x01\xba",
        b"OggS",
    ],
)
def test_videos_are_refused_by_content(header):
    with pytest.raises(InputError, match="a video, not an image"):
        open_image(header + b"\x00" * 100)


def test_a_video_data_uri_is_refused():
    with pytest.raises(InputError, match="video/mp4"):
        open_image("data:video/mp4;base64,AAAA")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("width", "height"), [(100_000, 100_000), (10_000, 10_000), (2**31 - 1, 2**31 - 1), (6401, 10_000)])
def test_a_decompression_bomb_is_refused_from_its_header(width, height, monkeypatch):
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("pixels were decoded"))
    with pytest.raises(InputError, match="pixels"):
        open_image(png_header(width, height))


def test_the_limit_is_in_the_message_and_can_be_chosen():
    with pytest.raises(InputError, match=r"40 x 24 = 960 pixels, the limit is 959. Fix: scale it down"):
        open_image(encoded(PICTURE), max_pixels=959)
    assert open_image(encoded(PICTURE), max_pixels=960).size == (40, 24)


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"])
def test_a_file_cut_short_is_an_error_and_not_half_a_picture(format, lenient, monkeypatch):
    """Also where another library has told Pillow that half a picture will do, and it stays told."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)
    large = Image.fromarray(np.random.default_rng(1).integers(0, 256, (128, 128, 3), dtype=np.uint8))
    data = encoded(large, format)
    with pytest.raises(InputError, match=r"damaged or cut short|not an image"):
        open_image(data[: len(data) // 2])
    assert ImageFile.LOAD_TRUNCATED_IMAGES is lenient


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/picture.png", "no such file"),
        ("~/no/such/picture.png", "no such file"),
        ("/tmp", "a folder, not the file of a picture"),
        ("/dev/zero", "a special file"),
        ("x." * 2500, "cannot be read"),
        ("x" * 5000, "base64 without a type"),
        ("nul\x00byte.png", "null byte|no such file"),
        ("https://example.com/cat.png", "not downloaded"),
        ("data:image/png;base64,@@@", "not valid base64"),
        ("data:image/png,abc", "unsupported form"),
        ("data:", "unsupported form"),
        (b"", "0 bytes"),
        (b"hello, I am text", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image"),  # would start ghostscript
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (b"\x00\x00\x00\x18ftypheic" + b"\x00" * 40, "HEIC"),
        (Image.new("RGB", (0, 5)), "empty (.*0 x 5 pixels)"),
        (Image.fromarray(np.full((2, 2), np.nan, np.float32)), "no finite pixel"),
        (12, "not int"),
        (None, "not NoneType"),
    ],
)
def test_what_is_not_an_image_gives_one_clear_error(source, message):
    with pytest.raises(InputError, match=message):
        open_image(source)


def test_an_unreadable_file_is_an_error_with_its_name(tmp_path, monkeypatch):
    path = tmp_path / "locked.png"
    PICTURE.save(path)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(InputError, match=r"locked\.png: cannot be read: Permission denied"):
        open_image(path)


Image.init()
SAMPLES = {
    format: encoded(PICTURE, format)
    for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF")
    if format in FORMATS and format in Image.SAVE
}


def open_or_refuse(data: bytes) -> None:
    """Whatever the bytes, the outcome is a picture or an InputError."""
    try:
        image = open_image(data, max_pixels=10**6)
    except InputError:
        return
    assert image.mode == "RGB"
    assert image.width * image.height > 0


@pytest.mark.filterwarnings("ignore:Truncated File Read")
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_damaged_bytes_give_a_picture_or_an_input_error(format, data):
    sample = bytearray(SAMPLES[format])
    for _ in range(data.draw(st.integers(1, 6))):
        sample[data.draw(st.integers(0, min(len(sample), 400) - 1))] = data.draw(st.integers(0, 255))
    open_or_refuse(bytes(sample[: data.draw(st.integers(1, len(sample)))]))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_a_picture_or_an_input_error(data):
    open_or_refuse(data)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "P", "1", "CMYK", "YCbCr", "I", "I;16", "F"])
@pytest.mark.parametrize("factor", [1, 3])
def test_a_picture_in_bands_is_the_picture_as_a_whole(mode, factor, monkeypatch):
    numbers = np.random.default_rng(0).integers(0, 2**16, (37, 41))
    if mode in ("I", "I;16", "F"):
        image = Image.fromarray(numbers.astype({"I": np.int32, "I;16": np.uint16, "F": np.float32}[mode]))
    else:
        image = Image.fromarray(np.stack([numbers % 256] * 4, -1).astype(np.uint8), "RGBA").convert(mode)
    whole = rgb.rgb_of(image, factor)
    assert whole.mode == "RGB" and whole.size == (-(-41 // factor), -(-37 // factor))
    monkeypatch.setattr(rgb, "BAND_PIXELS", 100)
    assert np.array_equal(np.asarray(rgb.rgb_of(image, factor)), np.asarray(whole))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 9])
def test_a_picture_is_made_as_small_as_was_announced(kind, most):
    file = io.BytesIO()
    Image.radial_gradient("L").resize((641, 403)).convert("RGB").save(file, kind)
    header = look_at(file.getvalue(), 10**6)
    reduction = rgb.Reduction.of(kind, most)
    small = open_image(file.getvalue(), reduce=most)
    assert (header.width, header.height) == (641, 403) and reduction.total <= most
    assert small.size == reduction.size(641, 403)
    mean = np.asarray(open_image(file.getvalue())).astype(float).mean()
    assert abs(np.asarray(small).astype(float).mean() - mean) < 2
