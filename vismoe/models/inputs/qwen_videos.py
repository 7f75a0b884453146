"""Videos for Qwen3-VL and the families that use its processor: which frames are read, at what size, and how the model sees them.

The model sees two frames at a time, a moment, as one picture behind its time in words: "<1.5 seconds>". Its vision tower and its
positions treat the moments of a video exactly as images (each grid has a temporal length of 1: `get_rope_index` of qwen3_vl_moe),
so this module turns a video into pictures that each hold two frames. Everything that knows images then works for videos: dropping
visual tokens (of each moment apart), caching what was encoded, reading a prompt in pieces.

A message part says, in the words of Qwen's documentation: `fps` (2) or `nframes`, `min_frames` (4) and `max_frames` (768),
`video_start` and `video_end` in seconds, sizes of a frame as for images, and `total_pixels` of all moments; `sample_fps` and
`raw_fps` for a list of frames. Promises: frames, sizes and pixels equal those of qwen-vl-utils' `fetch_video`, where
`MODEL_SEQ_LEN` is the planned context, and the tokens are those of transformers' processor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional
from transformers import BatchFeature

from vismoe.errors import ContextError, InputError
from vismoe.models.inputs.image_sizes import Look, Sight
from vismoe.models.inputs.images import MAX_PIXELS
from vismoe.models.inputs.qwen_images import SIZE_KEYS, TOKENS_KEY, asked_size, vision_process
from vismoe.models.inputs.videos import VideoHeader
from vismoe.ranges import shown

SAMPLING = ("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end")  # of a file
OF_FRAMES = ("sample_fps", "raw_fps")  # of a list of frames
SIZES = ("total_pixels", TOKENS_KEY, *SIZE_KEYS)
VIDEO_OPTIONS = (*SAMPLING, *OF_FRAMES, *SIZES)
COUNTS = ("nframes", "min_frames", "max_frames", "total_pixels")
NUMBERS = {  # the least one, and an example
    "fps": (0.001, 2), "sample_fps": (0.001, 2), "raw_fps": (0.001, 30), "nframes": (2, 16), "min_frames": (1, 4),
    "max_frames": (2, 64), "video_start": (0, 10), "video_end": (0, 20), "total_pixels": (1, 8_000_000),
}  # fmt: skip
TOGETHER = 2  # frames of a moment
MOST_FRAMES = 768  # of one video; the package's own limit
MOST_NUMBER = 10.0**9


@dataclass(frozen=True)
class Moment:
    """Two frames, of the size that the model sees, as one picture."""

    first: Image.Image
    second: Image.Image

    @property
    def size(self) -> tuple[int, int]:
        return self.first.size

    def tobytes(self) -> bytes:
        return self.first.tobytes() + b"then" + self.second.tobytes()


@dataclass(frozen=True)
class Video:
    """A video as the model sees it. times: seconds of each moment."""

    moments: tuple[Moment, ...]
    times: tuple[float, ...]


@dataclass(frozen=True)
class VideoPlan:
    """The frames to read, by ascending numbers, the frames per second of the whole, and the size that each gets."""

    indices: tuple[int, ...]
    fps: float
    width: int
    height: int

    def video(self, frames: Iterable[Image.Image]) -> Video:
        """From the frames of these numbers."""
        sized = [resized(frame, self.width, self.height) for frame in frames]
        pairs = [slice(number, number + TOGETHER) for number in range(0, len(sized), TOGETHER)]
        times = [sum(index / self.fps for index in self.indices[pair]) / TOGETHER for pair in pairs]
        return Video(tuple(Moment(*sized[pair]) for pair in pairs), tuple(times))


def video_source(part: Mapping[str, Any]) -> Any:
    """The source of the video in a message part; None if the part is not a video."""
    kind = part.get("type") or next((name for name in ("video", "video_url") if part.get(name) is not None), None)
    if kind == "video_url":
        url = part.get("video_url")
        return url.get("url") if isinstance(url, Mapping) else url
    return part.get("video") if kind == "video" else None


def asked_video(part: Mapping[str, Any], of_frames: bool) -> dict[str, Any]:
    """The options of a video's message part. of_frames: it is a list of frames. Raises InputError."""
    given = {name: value for name, value in part.items() if value is not None and name not in ("type", "video", "video_url")}
    known = OF_FRAMES if of_frames else SAMPLING
    if unknown := sorted(map(str, given.keys() - {*known, *SIZES})):
        what = "a list of frames" if of_frames else "a video"
        raise InputError(f"{what} has no option {', '.join(unknown)[:200]}. Fix: leave it out; there are {', '.join(known)}")
    if "fps" in given and "nframes" in given:
        raise InputError("fps and nframes both say how many frames are read. Fix: leave one out")
    size = asked_size({name: value for name, value in given.items() if name in (TOKENS_KEY, *SIZE_KEYS)})
    for name, value in size.items():
        if name != TOKENS_KEY and value > MAX_PIXELS:
            raise InputError(f"{name}={value:,}: the limit is {MAX_PIXELS:,} pixels. Fix: a smaller one")
    return size | {name: _number(name, given[name]) for name in (*known, "total_pixels") if name in given}


def _number(name: str, value: Any) -> float:
    least, example = NUMBERS[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= MOST_NUMBER or (name in COUNTS and value != int(value)):
        kind = "whole number" if name in COUNTS else "number"
        raise InputError(f"{name}: a {kind} from {least:g} to {MOST_NUMBER:,.0f}, not {shown(value)}. Fix: e.g. {name}={example}")
    return int(value) if name in COUNTS else float(value)


@dataclass(frozen=True)
class QwenVideos:
    """Videos for one processor. side: pixels of a visual token's side; context: tokens of the planned one, None for the
    package's own number."""

    side: int
    context: int | None
    image_tokens: tuple[int, int] | None  # the request's least and most visual tokens of one picture

    @classmethod
    def of(cls, processor: Any, context: int | None, image_tokens: tuple[int, int] | None) -> "QwenVideos | None":
        """None for the processor of another family."""
        if all(kind.__name__ != "Qwen3VLProcessor" for kind in type(processor).__mro__):
            return None
        images = processor.image_processor
        return cls(images.patch_size * images.merge_size, context, image_tokens)

    def plan(self, header: VideoHeader, asked: Mapping[str, Any]) -> VideoPlan:
        """What is read of a video. asked: by `asked_video`. Raises InputError and ContextError."""
        package = vision_process()
        try:
            first, last, frames = package.calculate_video_frame_range(asked, header.frames, header.fps)
            number = package.smart_nframes(asked, frames, header.fps)
        except (ValueError, AssertionError) as error:
            raise InputError(
                f"the video has {header.frames} frames in {header.seconds:.2f} s, and what is asked for is impossible: "
                f"{str(error).rstrip('.')}. Fix: other numbers of frames or seconds, or one frame as an image"
            ) from error
        if number > MOST_FRAMES:
            raise InputError(f"nframes={number}: at most {MOST_FRAMES} frames of a video are read. Fix: fewer")
        indices = torch.linspace(first, last, number).round().long().tolist()
        plan = VideoPlan(tuple(indices), header.fps, *self._fitted((header.width, header.height), number, asked))
        if self.context is not None and (tokens := self.tokens(plan)) >= self.context:
            moments = number // TOGETHER
            fitting = TOGETHER * (9 * self.context // (10 * (tokens // moments)))
            fewer = f"max_frames={fitting}, " if fitting >= TOGETHER else ""
            raise ContextError(
                f"the video has {tokens:,} visual tokens ({number} frames, {tokens // moments:,} for two), the planned context "
                f"is {self.context:,}. Fix: {fewer}smaller frames (max_pixels, image_tokens), or load with context={2 * tokens}"
            )
        return plan

    def tokens(self, plan: VideoPlan) -> int:
        """Visual tokens of a video."""
        return len(plan.indices) // TOGETHER * plan.width * plan.height // self.side**2

    def of_frames(self, frames: Sequence[Image.Image], asked: Mapping[str, Any]) -> Video:
        """A video that is given as its frames. Raises InputError."""
        package, info = vision_process(), self._sizes(asked)
        if not 1 <= len(frames) <= MOST_FRAMES:
            raise InputError(f"a video of {len(frames)} frames: from 1 to {MOST_FRAMES} can be read. Fix: other frames")
        for frame in frames:
            self.look(len(frames), asked)(*frame.size)  # that it can be sized
        sized = [package.fetch_image({"image": frame, **info}, self.side) for frame in frames]
        if len({frame.size for frame in sized}) > 1:
            raise InputError("the frames of a video have different shapes. Fix: send them as images, or crop them to one shape")
        sized += sized[-1:] * (len(sized) % TOGETHER)
        fps = asked.get("raw_fps", asked.get("sample_fps", package.FPS))
        return VideoPlan(tuple(range(len(sized))), fps, *self._fitted(sized[0].size, len(sized), asked)).video(sized)

    def look(self, frames: int, asked: Mapping[str, Any]) -> Look:
        """How the model sees one of the frames that are given as a list; the package resizes them twice, first as images of
        patches twice as large. Raises InputError for impossible sizes."""
        sizes = self._sizes(asked)
        frames += frames % TOGETHER

        def look(width: int, height: int) -> Sight:
            package = vision_process()
            exact = "resized_height" in sizes
            first = (sizes["resized_height"], sizes["resized_width"]) if exact else (height, width)
            limits = () if exact else (sizes.get("min_pixels"), sizes.get("max_pixels"))
            try:
                first_high, first_wide = package.smart_resize(*first, package.SPATIAL_MERGE_SIZE * self.side, *limits)
            except (ValueError, AssertionError) as error:
                raise InputError(f"a frame of {width} x {height} pixels: {str(error).rstrip('.')}. Fix: other sizes") from error
            if not 0 < first_high * first_wide <= MAX_PIXELS:
                raise InputError(f"a frame of {width} x {height} pixels cannot get that size. Fix: other sizes")
            wide, high = self._fitted((first_wide, first_high), frames, asked)
            return Sight(wide, high, wide * high, wide * high // self.side**2 // TOGETHER)

        return look

    def _sizes(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes asked for, in the package's names."""
        sizes = {name: asked[name] for name in (*SIZE_KEYS, "total_pixels") if name in asked}
        tokens = asked.get(TOKENS_KEY, None if sizes else self.image_tokens)
        return sizes | ({"min_pixels": tokens[0] * self.side**2, "max_pixels": tokens[1] * self.side**2} if tokens else {})

    def _fitted(self, sides: tuple[int, int], frames: int, asked: Mapping[str, Any]) -> tuple[int, int]:
        """(width, height) of each frame, from those that it has. Raises InputError."""
        package, sizes, (width, height) = vision_process(), self._sizes(asked), sides
        token = self.side**2
        most_context = min(package.MODEL_SEQ_LEN, self.context or package.MODEL_SEQ_LEN)
        if "resized_height" in sizes:
            height, width, least, most = sizes["resized_height"], sizes["resized_width"], None, None
        else:
            least = sizes.get("min_pixels", package.VIDEO_MIN_TOKEN_NUM * token)
            total = sizes.get("total_pixels", most_context * token * 0.9)
            most = max(min(package.VIDEO_MAX_TOKEN_NUM * token, total / frames * TOGETHER), int(least * 1.05))
            most = min(sizes.get("max_pixels", most), most)
        try:
            high, wide = package.smart_resize(height, width, self.side, least, most)
        except (ValueError, AssertionError) as error:
            raise InputError(
                f"frames of {width} x {height} pixels: {str(error).rstrip('.')}. Fix: other sizes, or crop the video"
            ) from error
        if not 0 < high * wide <= MAX_PIXELS:
            raise InputError(
                f"frames of {width} x {height} pixels would become {wide:,} x {high:,}, the limit is {MAX_PIXELS:,} pixels. "
                "Fix: another max_pixels, or crop the video"
            )
        return wide, high


def resized(frame: Image.Image, width: int, height: int) -> Image.Image:
    """By the bicubic filter of torchvision's `resize` of tensors, with antialiasing, bit for bit."""
    pixels = torch.from_numpy(np.array(frame.convert("RGB"))).permute(2, 0, 1)[None]
    if frame.size != (width, height):
        wide = functional.interpolate(pixels.float(), (height, width), mode="bicubic", align_corners=False, antialias=True)
        pixels = wide.clamp(0, 255).round().to(torch.uint8)
    return Image.fromarray(pixels[0].permute(1, 2, 0).contiguous().numpy())


def with_moments(text: str, videos: Sequence[Video], processor: Any) -> str:
    """A prompt's text, each video's token replaced by its times and the tokens of its pictures. Raises InputError."""
    before, *rest = text.split(processor.video_token)
    if len(rest) != len(videos):
        raise InputError("this model's chat template knows no videos. Fix: send frames as images")

    def written(video: Video) -> str:
        picture = f"{processor.vision_start_token}{processor.image_token}{processor.vision_end_token}"
        return "".join(f"<{time:.1f} seconds>{picture}" for time in video.times)

    return before + "".join(written(video) + after for video, after in zip(videos, rest))


def with_second_frames(
    inputs: BatchFeature, pictures: Sequence[Image.Image | Moment], processed: Callable[[Image.Image], BatchFeature]
) -> BatchFeature:
    """The inputs of pictures, of moments so far only the first frame (twice): puts the second frames in. processed: the inputs of
    one picture."""
    if not any(isinstance(picture, Moment) for picture in pictures):
        return inputs
    begin = 0
    for picture, patches in zip(pictures, inputs["image_grid_thw"].prod(-1).tolist(), strict=True):
        if isinstance(picture, Moment):
            both, second = (
                values.view(patches, 3, TOGETHER, -1)  # [patches, colours, frames, pixels]
                for values in (inputs["pixel_values"][begin : begin + patches], processed(picture.second)["pixel_values"])
            )
            both[:, :, 1] = second[:, :, 1]
        begin += patches
    return inputs


def first_frames(pictures: Iterable[Image.Image | Moment]) -> Iterator[Image.Image]:
    """What is shown of each picture, and processed as an image."""
    return (picture.first if isinstance(picture, Moment) else picture for picture in pictures)
