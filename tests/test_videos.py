"""Videos: frames against all frames decoded in order, prompts against qwen-vl-utils and transformers' processor called as Qwen
documents it, logits against the model's own path for videos, and through the engine and every door."""

import base64
import io
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import av
import numpy as np
import pytest
import tiny_models
import torch
from clips import CODECS, clip, joined_in_the_middle, of_times, sound, with_matrix
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from served import served
from test_qwen_images import BUILDERS, message

import vismoe
from vismoe.app.costs import video_cost
from vismoe.app.decoding import Decoder
from vismoe.app.page import Page, PageTurn, shown
from vismoe.cli import main as cli
from vismoe.cli.conversation import ChatSession, video_parts
from vismoe.engine.engine import demo_model
from vismoe.errors import ContextError, InputError
from vismoe.models.inputs.images import open_image
from vismoe.models.inputs.processor import load_processor, torchvision_works
from vismoe.models.inputs.qwen_images import vision_process
from vismoe.models.inputs.qwen_videos import Moment, QwenVideos, Video, VideoPlan
from vismoe.models.inputs.videos import SIGNATURE_BYTES, VideoHeader, fetch_video_file, opened_video, video_format
from vismoe.options import RequestOptions

QUESTION = "What is in the picture?"
SMALL = {"min_pixels": 1024, "max_pixels": 16 * 1024}  # few visual tokens
CONTEXT = 4096
MOST = 10**8  # pixels
HERE = Path(__file__).parent


def all_frames(data: bytes) -> list[np.ndarray]:
    """By FFmpeg's libraries alone."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def frames_of(data: bytes, indices) -> list[Image.Image]:
    with opened_video(io.BytesIO(data), "clip", MOST) as video:
        return list(video.frames(indices))


def header_of(data: bytes):
    with opened_video(io.BytesIO(data), "clip", MOST) as video:
        return video.header


def films(*given, text: str = QUESTION):
    return message(*({"type": "video", "video": source, **options} for source, options in given), text=text)


# -- reading
@pytest.mark.parametrize("codec", CODECS)
def test_any_frames_are_those_of_the_whole_in_order(codec):
    if codec not in av.codecs_available:
        pytest.skip(f"PyAV's FFmpeg has no {codec}")
    data = clip(codec)
    whole, header = all_frames(data), header_of(data)
    assert (header.width, header.height, header.frames) == (96, 64, len(whole)) and len(whole) == 30
    assert header.fps == pytest.approx(25 if CODECS[codec][0] == "mpeg" else 10)
    for indices in ([0], [29], [0, 1, 2], [11, 12, 13, 25], [3, 29], range(30)):
        for index, frame in zip(indices, frames_of(data, indices), strict=True):
            assert np.array_equal(np.asarray(frame), whole[index]), index


def test_only_what_is_needed_is_decoded(monkeypatch):
    """A key frame stands at every 12th: the last frame costs at most 12 of 30."""
    decoded, data = [], clip()
    with opened_video(io.BytesIO(data), "clip", MOST) as video:
        container, decode = video._container, video._container.decode

        class Counting:
            def __getattr__(self, name):
                return getattr(container, name)

            def decode(self, stream):
                return (decoded.append(frame) or frame for frame in decode(stream))

        video._container = Counting()
        list(video.frames([29]))
    assert 1 <= len(decoded) <= 12


def test_a_turned_video_is_shown_upright():
    """A phone held upright: the pixels lie, and the track says by which quarter they are turned."""
    lying, upright = frames_of(clip(), [3])[0], frames_of(clip(turned=True), [3])[0]
    assert upright.size == (64, 96) and header_of(clip(turned=True)).width == 64
    assert np.array_equal(np.asarray(upright), np.rot90(np.asarray(lying), -1)), "to the right"


@pytest.mark.parametrize("first", [(1, 0), (-1, 0), (0, 1), (0, -1)])
@pytest.mark.parametrize("mirrored", [False, True])
def test_each_turn_and_mirror_of_a_track_puts_every_pixel_where_its_matrix_says(first, mirrored):
    a, b = first
    c, d = (b, -a) if mirrored else (-b, a)
    data, lying = with_matrix(clip(), (a, b, c, d)), np.asarray(frames_of(clip(), [3])[0])
    high, wide = lying.shape[:2]
    y, x = np.mgrid[:high, :wide]
    across, down = a * x + c * y, b * x + d * y
    shown = np.empty((high, wide, 3) if a else (wide, high, 3), np.uint8)
    shown[down - down.min(), across - across.min()] = lying
    assert np.array_equal(np.asarray(frames_of(data, [3])[0]), shown)
    assert (header_of(data).width, header_of(data).height) == (shown.shape[1], shown.shape[0])


def test_the_rate_is_that_of_the_frames_where_the_header_says_another():
    """A browser's recording says 1,000 frames per second; the model is told the times at which frames are shown."""
    times = [0, 33, 70, 100, 170, 300, 400, 600, 800, 1000]
    assert header_of(of_times(times)).fps == pytest.approx(9)
    assert header_of(clip()).fps == 10


@pytest.mark.parametrize(
    ("codec", "kind", "options"),
    [
        ("mpeg2video", "mpegts", {"bf": "2"}),
        ("mpeg2video", "matroska", {"bf": "2"}),
        ("libx264", "matroska", {"x264-params": "open-gop=1:bframes=3:b-adapt=0"}),
    ],
)
def test_a_recording_that_begins_between_its_key_frames_begins_with_the_first_whole_frame(codec, kind, options):
    data = joined_in_the_middle(codec, kind, options)
    whole = all_frames(data)
    with av.open(io.BytesIO(data)) as container:
        assert sum(packet.size > 0 for packet in container.demux(video=0)) > len(whole) == header_of(data).frames
    for indices in (range(len(whole)), [0, len(whole) - 1]):
        for index, frame in zip(indices, frames_of(data, indices), strict=True):
            assert np.array_equal(np.asarray(frame), whole[index]), index


def test_a_frame_with_a_lost_packet_is_refused_and_others_are_read():
    data = clip("mpeg2video")
    middle = len(data) // 188 // 2 * 188
    cut = data[:middle] + data[middle + 188 :]
    with av.open(io.BytesIO(cut)) as container:
        (broken,) = (number for number, frame in enumerate(container.decode(video=0)) if frame.is_corrupt)
    assert len(frames_of(cut, [0, broken - 1])) == 2
    with pytest.raises(InputError, match=rf"clip: frame {broken + 1} of 30 is damaged\. Fix: "):
        frames_of(cut, [0, broken])


def test_transport_streams_of_cameras_are_known_by_their_longer_packets():
    data = clip("mpeg2video")
    longer = b"".join(bytes(4) + data[begin : begin + 188] for begin in range(0, len(data), 188))
    assert [video_format(one[:SIGNATURE_BYTES]) for one in (data, longer)] == ["mpegts", "mpegts"]
    for mine, wanted in zip(frames_of(longer, range(30)), all_frames(data), strict=True):
        assert np.array_equal(np.asarray(mine), wanted)


def test_what_the_reader_of_frames_raises_stays_as_it_is():
    with pytest.raises(ValueError, match=r"^mine$"), opened_video(io.BytesIO(clip()), "clip", MOST) as video:
        for _ in video.frames([0, 1]):
            raise ValueError("mine")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "not a video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "not a video"),
        (b"<?xml version='1.0'?><MPD></MPD>" * 9, "not a video"),
        (clip()[:400], "damaged"),
        (b"\x00\x00\x00\x20ftypisom" + bytes(200), "damaged"),
        (b"RIFF\x00\x00\x00\x00AVI " + bytes(200), "damaged"),
        (sound(), "no moving picture"),
    ],
)
def test_what_is_no_video_is_refused_with_the_reason(data, words):
    with pytest.raises(InputError, match=rf"clip: .*{words}.*Fix: "):
        header_of(data)


def test_frames_above_the_limit_are_refused_before_they_are_decoded():
    with (
        pytest.raises(InputError, match=r"96 x 64 = 6,144 pixels, the limit is 6,000"),
        opened_video(io.BytesIO(clip()), "clip", 6000),
    ):
        pass


@pytest.mark.parametrize("codec", ["libx264", "libvpx-vp9", "mpeg4"])
@given(data=st.data())
@settings(max_examples=40)
def test_damage_anywhere_is_an_error_or_a_frame_and_never_another_exception(codec, data):
    whole = bytearray(clip(codec))
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=30)):
        whole[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    try:
        with opened_video(io.BytesIO(bytes(whole[:cut])), "clip", 10**6) as video:
            for frame in video.frames([0, video.header.frames // 2]):
                assert frame.mode == "RGB"
    except InputError as error:
        assert "clip: " in str(error) and "Fix: " in str(error)


def test_pictures_are_not_taken_for_videos():
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "AVIF"):
        file = io.BytesIO()
        Image.new("RGB", (20, 20)).save(file, kind)
        assert video_format(file.getvalue()[:192]) is None
    assert video_format(b"") is None


def test_a_file_is_found_by_path_and_url_and_elsewhere_refused(tmp_path):
    (tmp_path / "a b.mp4").write_bytes(clip())
    text = base64.b64encode(clip()).decode()
    for source in (tmp_path / "a b.mp4", f"file://{tmp_path}/a%20b.mp4", f"data:video/mp4;base64,{text}", clip()):
        with fetch_video_file(source) as file:
            assert file.read() == clip()
    for source, words in (
        (tmp_path / "none.mp4", "no such file"),
        (tmp_path, "folder, not the file of a video"),
        ("ftp://a.example/b.mp4", "not downloaded"),
        ("data:image/png;base64,AAAA", "holds a picture"),
        ("data:video/mp4;base64,!", "base64"),
        (7, "not int"),
        ("http://127.0.0.1/a.mp4", "not allowed"),
    ):
        with pytest.raises(InputError, match=rf"{words}.*Fix: "), fetch_video_file(source):
            pass


# -- prompts, against the package and transformers
def package_reader(asked):
    """A reader for qwen-vl-utils, which has none for PyAV: which frames by its own functions, and all of them decoded."""
    package, data = vision_process(), Path(asked["video"]).read_bytes()
    whole, fps = all_frames(data), header_of(data).fps
    first, last, frames = package.calculate_video_frame_range(asked, len(whole), fps)
    number = package.smart_nframes(asked, frames, fps)
    indices = torch.linspace(first, last, number).round().long().tolist()
    pixels = torch.stack([torch.from_numpy(whole[index]).permute(2, 0, 1) for index in indices])
    return pixels, dict(fps=fps, frames_indices=indices, total_num_frames=frames, video_backend="av"), number / frames * fps


@pytest.fixture
def documented(monkeypatch):
    """What Qwen's documentation does with messages, with the processor of the demo model."""
    if not torchvision_works():
        pytest.skip("transformers' own processor of videos needs torchvision")
    package, processor = vision_process(), load_processor(str(demo_model()))
    monkeypatch.setitem(package.VIDEO_READER_BACKENDS, "torchvision", package_reader)
    monkeypatch.setattr(package, "get_video_reader_backend", lambda: "torchvision")
    monkeypatch.setattr(package, "MODEL_SEQ_LEN", CONTEXT)

    def inputs(messages):
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        how = dict(return_video_kwargs=True, return_video_metadata=True, image_patch_size=16)
        pictures, seen, options = package.process_vision_info(messages, **how)
        pixels, about = zip(*seen)
        options |= dict(video_metadata=list(about), do_resize=False, return_tensors="pt")
        return processor(text=[text], images=pictures, videos=list(pixels), **options)

    return inputs


def assert_same(prompt, wanted):
    """The same tokens, places and pixels, with moments as images: a video's numbers stand where an image's do."""
    image, video = 2455, 2456
    assert torch.equal(prompt.inputs["input_ids"], wanted["input_ids"].where(wanted["input_ids"] != video, image))
    assert torch.equal(prompt.inputs["mm_token_type_ids"], wanted["mm_token_type_ids"].clamp(max=1))
    assert torch.equal(prompt.inputs["pixel_values"], wanted["pixel_values_videos"])
    grids = wanted["video_grid_thw"].repeat_interleave(wanted["video_grid_thw"][:, 0], dim=0)
    assert (
        torch.equal(prompt.inputs["image_grid_thw"][:, 1:], grids[:, 1:]) and (prompt.inputs["image_grid_thw"][:, 0] == 1).all()
    )
    assert prompt.images == len(grids) == len(prompt.places)


def agree(builder, documented, messages):
    """The same prompt, or an error both times."""
    try:
        wanted = documented(messages)
    except (ValueError, AssertionError, ZeroDivisionError):
        with pytest.raises(InputError, match="Fix: "):
            builder.build(messages, open_image, context=CONTEXT)
        return
    assert_same(builder.build(messages, open_image, context=CONTEXT), wanted)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "fps": st.floats(0.5, 8),
        "min_frames": st.integers(2, 12),
        "max_frames": st.integers(4, 20),
        "video_start": st.floats(0, 1.5),
        "video_end": st.floats(1.6, 9),
        "min_pixels": st.integers(1024, 8 * 1024),
        "max_pixels": st.integers(8 * 1024, 64 * 1024),
        "total_pixels": st.integers(64 * 1024, 512 * 1024),
    },
)


@given(asked=OPTIONS, number=st.none() | st.integers(2, 30))
@settings(max_examples=40)
def prompts_agree(builder, documented, path, asked, number):
    if number is not None:
        asked = {name: value for name, value in asked.items() if "frames" not in name and name != "fps"} | {"nframes": number}
    agree(builder, documented, films((path, {**SMALL, **asked})))


def test_frames_sizes_pixels_times_and_tokens_are_those_of_qwens_own_way(documented, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(clip(width=160, height=96))
    prompts_agree(BUILDERS["demo"], documented, str(tmp_path / "clip.mp4"))


def test_two_videos_and_the_size_that_nothing_says(documented, tmp_path):
    (tmp_path / "a.mp4").write_bytes(clip(frames=12))
    (tmp_path / "b.mp4").write_bytes(clip("mpeg4", width=64, height=128))
    messages = films((str(tmp_path / "a.mp4"), {}), (str(tmp_path / "b.mp4"), {"resized_height": 60, "resized_width": 100}))
    assert_same(BUILDERS["demo"].build(messages, open_image, context=CONTEXT), documented(messages))


@given(
    sides=st.tuples(st.integers(20, 200), st.integers(20, 200)),
    frames=st.integers(1, 7),
    options=st.fixed_dictionaries(
        {}, optional={"sample_fps": st.floats(0.5, 4), "raw_fps": st.floats(1, 30), "max_pixels": st.integers(5000, 60_000)}
    ),
)
@settings(max_examples=25)
def lists_agree(documented, sides, frames, options):
    noise = np.random.default_rng(sum(sides))
    pictures = [Image.fromarray(noise.integers(0, 256, (*sides, 3), dtype=np.uint8)) for _ in range(frames)]
    agree(BUILDERS["demo"], documented, films((pictures, {"min_pixels": 1024, **options})))


def test_a_list_of_frames_is_what_the_package_makes_of_it(documented):
    lists_agree(documented)


def test_pictures_and_videos_keep_their_order(tmp_path):
    picture = Image.new("RGB", (64, 64), "red")
    builder, part = BUILDERS["demo"], {"type": "video", "video": clip(), "nframes": 4, **SMALL}
    prompt = builder.build(message({"image": picture}, part, {"image": picture}), open_image)
    assert [shown.getextrema()[1] != (0, 0) for shown in prompt.pictures] == [False, True, True, False]
    text = builder.tokenizer.decode(prompt.inputs["input_ids"][0])
    assert text.index("<0.5 seconds>") < text.index("<2.4 seconds>") and text.count("seconds>") == 2
    alone = prompt.image_inputs([2])  # the second moment of the video
    begin = int(prompt.inputs["image_grid_thw"][:2].prod(-1).sum())
    wanted = prompt.inputs["pixel_values"][begin : begin + len(alone["pixel_values"])]
    assert torch.equal(alone["pixel_values"], wanted)
    assert torch.equal(prompt.light().whole()["pixel_values"], prompt.inputs["pixel_values"])
    assert len(set(prompt.image_names)) == 3, "two pictures are equal, the moments are not"


def test_a_moment_is_named_by_both_of_its_frames():
    red, blue = Image.new("RGB", (64, 32), "red"), Image.new("RGB", (64, 32), "blue")
    assert len({Moment(*frames).tobytes() for frames in ((red, blue), (blue, red), (red, red), (blue, blue))}) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fps": 2, "nframes": 4}, "fps and nframes"),
        ({"fps": 0}, "fps: a number"),
        ({"fps": "2"}, "fps: a number"),
        ({"nframes": 31}, r"30 frames in 3.00 s"),
        ({"nframes": 1}, "nframes"),
        ({"max_frames": 1}, r"max_frames: a whole number from 2 "),
        ({"max_frames": 1.5}, "max_frames: a whole number"),
        ({"video_start": 2, "video_end": 1}, "impossible"),
        ({"min_pixels": 10**9}, "the limit is"),
        ({"min_pixels": 9000, "max_pixels": 2000}, "is more than"),
        ({"speed": 2}, "no option speed"),
        ({"sample_fps": 2}, "no option sample_fps"),
        ({"image_tokens": [4, 8], "max_pixels": 9000}, "say the size of one"),
    ],
)
def test_impossible_options_are_refused_with_the_reason(options, words):
    with pytest.raises(InputError, match=rf"{words}[\s\S]*Fix: "):
        BUILDERS["demo"].build(films((clip(), options)), open_image, context=CONTEXT)


def test_other_families_and_larger_videos_than_the_context_are_refused():
    with pytest.raises(InputError, match=r"cannot see videos here.*Fix: send frames as images"):
        BUILDERS["qwen2_5_vl"].build(films((clip(), {})), open_image)
    with pytest.raises(ContextError, match=r"2,100 visual tokens \(30 frames, 140 for two\), the planned context is 256") as told:
        BUILDERS["demo"].build(films((clip(), {"nframes": 30})), open_image, context=256)
    (most,) = re.findall(r"Fix: max_frames=(\d+), ", str(told.value))
    assert BUILDERS["demo"].build(films((clip(), {"max_frames": int(most)})), open_image, context=256).visual_tokens <= 256
    with pytest.raises(InputError, match="options of a video, not of an image"):
        BUILDERS["demo"].build(message({"image": Image.new("RGB", (64, 64)), "fps": 2}), open_image)
    with pytest.raises(InputError, match="different shapes"):
        frames = [Image.new("RGB", (64, 64)), Image.new("RGB", (640, 64))]
        BUILDERS["demo"].build(films((frames, {})), open_image)


# -- the model
@pytest.fixture(scope="module")
def engine():
    with vismoe.load(memory="35%", context=1024, image_cache="8MiB") as engine:
        yield engine


def answer(engine, *given, **options):
    reply = engine.chat(films(*given), **({"max_tokens": 8} | options))
    list(reply)
    return reply.figures


def test_logits_and_answers_are_those_of_the_models_own_way_with_videos(documented, engine, tmp_path):
    from transformers import AutoModelForImageTextToText

    (tmp_path / "clip.mp4").write_bytes(clip())
    messages = films((str(tmp_path / "clip.mp4"), {**SMALL, "fps": 3}))
    wanted, prompt = documented(messages), BUILDERS["demo"].build(messages, open_image, context=CONTEXT)
    model = AutoModelForImageTextToText.from_pretrained(demo_model())
    with torch.inference_mode():
        assert torch.equal(model(**wanted).logits, model(**prompt.inputs).logits)
        said = model.generate(**wanted, max_new_tokens=8, do_sample=False)[0, wanted["input_ids"].shape[1] :]
    text = BUILDERS["demo"].tokenizer.decode(said, skip_special_tokens=True)
    assert answer(engine, (str(tmp_path / "clip.mp4"), {**SMALL, "fps": 3})).answer == text


def test_each_moment_keeps_its_share_and_is_encoded_once(engine):
    film = engine.opened_video({"video": clip(), "nframes": 8, "min_pixels": 8 * 1024, "max_pixels": 16 * 1024})
    first = engine.chat([{"role": "user", "content": [film, {"type": "text", "text": QUESTION}]}], max_tokens=4, keep=0.5)
    list(first)
    kept = first.figures.kept
    assert len(kept) == 4 and first.figures.encoded_images == 4
    assert all(len(one.selection.kept) == pytest.approx(one.tokens / 2, abs=1) for one in kept)
    again = engine.chat([{"role": "user", "content": [film, {"type": "text", "text": "Why?"}]}], max_tokens=4, keep=0.5)
    list(again)
    assert again.figures.encoded_images == 0


# -- the doors
def uri(data: bytes) -> str:
    return "data:video/mp4;base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    (folder / "clip.mp4").write_bytes(clip())
    with served(engine, image_folder=folder, max_image_bytes=2**17) as server:
        yield server


def ask(server, part, **more):
    return server.post({"messages": message(part), "max_tokens": 8, "temperature": 0, **more})


@pytest.mark.budget(4)
def test_the_server_answers_about_a_video_as_the_engine_does(server, engine):
    options = {**SMALL, "fps": 3}
    wanted = answer(engine, (clip(), options))
    for url in (uri(clip()), "clip.mp4"):
        got = ask(server, {"type": "video_url", "video_url": {"url": url}, **options}).json()
        assert got["choices"][0]["message"]["content"] == wanted.answer
        assert got["usage"]["prompt_tokens_details"]["image_tokens"] == wanted.visual_tokens
    ours = {"messages": films((uri(clip()), options)), "keep": 0.5}
    half = server.post({"vismoe": ours, "max_tokens": 8, "temperature": 0}).json()["vismoe"]
    assert half["kept_visual_tokens"] < half["visual_tokens"] == wanted.visual_tokens


def test_frames_can_be_sent_as_a_list_of_images(server, engine):
    frames = frames_of(clip(), range(0, 30, 4))
    texts = []
    for frame in frames:
        file = io.BytesIO()
        frame.save(file, "PNG")
        texts.append("data:image/png;base64," + base64.b64encode(file.getvalue()).decode())
    options = {"sample_fps": 2.5, "min_pixels": 1024, "max_pixels": 8 * 1024}
    wanted = answer(engine, (frames, options))
    body = {"vismoe": {"messages": films((texts, options))}, "max_tokens": 8, "temperature": 0}
    got = server.post(body).json()
    assert got["choices"][0]["message"]["content"] == wanted.answer
    assert got["usage"]["prompt_tokens_details"]["image_tokens"] == wanted.visual_tokens


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"video_url": {"url": uri(clip())}, "fps": 0}, "fps: a number"),
        ({"video_url": {"url": uri(clip())}, "speed": 2}, "speed"),
        ({"video_url": {"url": uri(clip())}, "sample_fps": 2}, "sample_fps"),
        ({"video_url": {"url": uri(clip())}, "text": "x"}, "no other"),
        ({"video_url": {"url": uri(clip()[:500])}}, "the video: damaged"),
        ({"video_url": {"url": uri(sound())}}, "no moving picture"),
        ({"video_url": {"url": uri(b"#EXTM3U\nfile:///etc/passwd" * 20)}}, "not a video"),
        ({"video_url": {"url": "missing.mp4"}}, "no image file of this name"),
        ({"video_url": {"url": "http://pictures.example/a.mp4"}}, "does not download"),
        (
            {"video_url": {"url": uri(clip())}, "nframes": 30, "min_pixels": 64 * 1024, "max_pixels": 96 * 1024},
            "the planned context",
        ),
        ({"type": "image_url", "image_url": {"url": uri(clip())}}, "holds a video"),
        ({"type": "image_url", "image_url": {"url": "clip.mp4"}}, "a video, not an image"),
        ({"type": "image_url", "image_url": {"url": "clip.mp4"}, "fps": 2}, "no other"),
    ],
)
def test_the_server_refuses_with_the_reason_and_goes_on(server, part, words):
    refused = ask(server, {"type": "video_url", **part})
    assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    assert "/etc" not in refused.text


def test_a_slow_video_is_stopped_by_a_limit_of_its_own(engine):
    with served(engine, video_timeout_s=0.01) as server:
        part = {"type": "video_url", "video_url": {"url": uri(clip(frames=60, width=320, height=240))}, "max_pixels": 8 * 1024}
        refused = ask(server, part | {"min_pixels": 1024})
    assert refused.status_code == 400
    assert re.search(r"longer than 0\.01 s\. Fix: .*--video-timeout", refused.json()["error"]["message"])


def test_another_process_reads_a_video_as_this_one_does():
    decoder = Decoder()
    try:
        header = decoder.look_at_video(clip(), MOST, 30)
        assert header == header_of(clip())
        wanted = frames_of(clip(), [0, 5, 29])
        for source in (clip(), uri(clip())):
            seen = decoder.watch(source, MOST, 30, [0, 5, 29], list)
            assert [frame.tobytes() for frame in seen] == [frame.tobytes() for frame in wanted]
        with pytest.raises(InputError, match=r"frame 31 of 30 is missing: damaged or cut short"):
            decoder.watch(clip(), MOST, 30, [0, 30], list)
        with pytest.raises(InputError, match=r"longer than 0\.01 s"):
            decoder.watch(clip(frames=200, width=640, height=480), MOST, 0.01, range(200), list)
        assert decoder.look_at_video(clip(), MOST, 30) == header
    finally:
        decoder.close()


BUILDING = """
import sys
import numpy as np
from PIL import Image
from test_qwen_images import BUILDERS
from vismoe.models.inputs.qwen_videos import Moment, Video


def status(field):
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field + ":"))


def build(moments, width, height):
    random = np.random.default_rng(0)
    frames = [Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).copy() for _ in range(2 * moments)]
    video = Video(tuple(Moment(*pair) for pair in zip(frames[::2], frames[1::2])), tuple(range(moments)))
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    BUILDERS["demo"].build([{"role": "user", "content": [{"type": "video", "video": video}]}], None)
    return status("VmHWM") - before


build(1, 64, 64)
for sizes in sys.argv[1:]:
    print(build(*map(int, sizes.split())))
"""


def test_building_a_prompt_takes_no_more_memory_than_the_server_reserves():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process cannot be reset here")
    sizes = ((1, 1024, 768), (48, 320, 256))
    command = [sys.executable, "-c", BUILDING, *(" ".join(map(str, size)) for size in sizes)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(HERE)})
    for (moments, width, height), taken in zip(sizes, map(int, ran.stdout.split()), strict=True):
        plan = VideoPlan(tuple(range(2 * moments)), 2.0, width, height)
        cost = video_cost(VideoHeader(width, height, 2 * moments, 2.0), plan, 1)
        assert 0.1 * cost.building < taken <= cost.building, (moments, taken)


# -- the page
def test_the_page_opens_a_video_once_for_all_questions_about_it(engine, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(clip(frames=12))
    page, first = Page(engine), PageTurn.of(QUESTION, [str(tmp_path / "clip.mp4")])
    options = RequestOptions(max_tokens=4, image_tokens=(4, 16), reuse=True)
    *_, last = page.answer(first, (), "me", options)
    assert last.history[0].answer == answer(engine, (clip(frames=12), {"image_tokens": [4, 16]}), max_tokens=4).answer
    assert len(shown(last.history)) == 3 and isinstance(last.history[0].images[0]["video"], Video)
    (tmp_path / "clip.mp4").unlink()
    *_, more = page.answer(PageTurn.of("Why?", []), last.history, "me", options)
    assert len(more.history) == 2 and more.history[1].answer
    (tmp_path / "bad.mp4").write_bytes(clip()[:300])
    with pytest.raises(InputError, match=r"^bad\.mp4: damaged"):
        PageTurn.of(QUESTION, [str(tmp_path / "bad.mp4")])


# -- the command line
def test_the_command_line_answers_about_a_video(capsys, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(clip())
    how = ["--video", str(tmp_path / "clip.mp4"), "--video-frames", "4", "--context", "1024", "--max-tokens", "4"]
    assert cli.main(["chat", *how, QUESTION]) == 0
    said = capsys.readouterr()
    assert said.out.strip() and "96 x 64 pixels, 30 frames in 3.0 s" in said.err


def test_a_conversation_goes_on_without_a_video_that_the_model_cannot_see(capsys, tmp_path, engine, monkeypatch):
    """It is refused where it is attached; a question after it is answered."""
    (tmp_path / "clip.mp4").write_bytes(clip())
    monkeypatch.setattr(QwenVideos, "of", lambda *given: None)  # as for another family
    session = ChatSession(engine, Namespace(video_fps=None, video_frames=None, verbose=False), [], RequestOptions(max_tokens=2))
    session.take(f"/video {tmp_path / 'clip.mp4'}")
    session.take("Hello?")
    said = capsys.readouterr()
    assert "cannot see videos here" in said.err and said.err.count("error:") == 1
    assert said.out.strip() and not session.waiting


def test_a_downloaded_video_is_downloaded_once(monkeypatch):
    asked = []
    monkeypatch.setattr("vismoe.models.inputs.remote_images.download", lambda url: asked.append(url) or clip())
    (part,) = video_parts(["https://a.example/clip.mp4"], Namespace(video_fps=None, video_frames=4))
    assert (part["video"], part["max_frames"]) == (clip(), 4) and asked == ["https://a.example/clip.mp4"]


def test_a_wrong_video_is_told_before_the_model_is_loaded(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("vismoe.flags.load_engine", None)
    (tmp_path / "clip.mp4").write_bytes(clip()[:300])
    for flags, words in (
        (["--video", "/no/such.mp4"], "no such file"),
        (["--video", str(tmp_path / "clip.mp4")], "damaged"),
        (["--video-fps", "0"], "fps: a number"),
        (["--video-frames", "0"], "max_frames: a whole number"),
        (["--video-frames", "8"], "belong to a --video"),
    ):
        assert cli.main(["chat", *flags, QUESTION]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe", "qwen4_exp"])
def test_these_families_see_moments_as_images(family, one_thread):
    """What the docs promise of families that Qwen3-VL's processor serves: random weights, two moments of a video either way."""
    if family not in tiny_models.ZOO:
        pytest.skip(f"this transformers has no {family}")
    model, generator = tiny_models.build(family), torch.Generator().manual_seed(3)
    image, moment = tiny_models.prompt(family), int(model.config.video_token_id)
    ids, kinds, pixels = image["input_ids"], image["mm_token_type_ids"], image["pixel_values"]
    ids, kinds = ids.repeat(1, 2), kinds.repeat(1, 2)  # two pictures with text between them
    pixels = torch.randn(2 * len(pixels), pixels.shape[1], generator=generator)
    grid = image["image_grid_thw"]
    assert grid[0, 0] == 1 and moment != tiny_models.IMAGE_TOKEN
    film = dict(
        input_ids=ids.where(ids != tiny_models.IMAGE_TOKEN, moment),
        mm_token_type_ids=2 * kinds,
        pixel_values_videos=pixels,
        video_grid_thw=grid * torch.tensor([2, 1, 1]),
    )
    still = dict(input_ids=ids, mm_token_type_ids=kinds, pixel_values=pixels, image_grid_thw=grid.repeat(2, 1))
    assert torch.equal(model(**film).logits, model(**still).logits)
