"""The prompts for training and evaluating a predictor: a user's own folder, or generated scenes of a bundled model's world.

Every prompt has a name (`group/kind/number`), the same on every run, so that an interrupted collection continues. Groups:
`train`; `held-out`, of the same kinds; `unseen`, of a kind that is not used in training. In a user's folder the number is
`side-digest`: prompts of one image have one side, and the side decides which are held out and which validate (`is_validation`),
so that no image is on two sides of these splits. (The unseen kind may use images of training prompts.)
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vismoe.errors import InputError
from vismoe.eval.questions import KINDS, THANKS, Conversation, conversation
from vismoe.eval.scenes import WORLDS, compose
from vismoe.models.inputs.message_files import placed
from vismoe.models.inputs.qwen_images import image_source
from vismoe.models.inputs.sources import file_of_url

GROUPS = ("train", "held-out", "unseen")
UNSEEN_KIND = "text"  # reading text; the paper leaves out TextVQA
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
TEXTS = (".txt", ".md")
DEFAULT_QUESTION = "Describe this image."
HELD_OUT_SHARE = 0.2  # share of a user's images, and of the prompts without one
VALIDATION = 10  # one prompt in this many validates
SIDE = 6  # digits
ELSEWHERE = ("http://", "https://", "data:")

Found = tuple[str, str, tuple[Path | str, ...], tuple[dict[str, Any], ...]]  # kind, text, images, a whole conversation


@dataclass(frozen=True)
class CalibrationPrompt:
    """One conversation to answer; pictures are opened only when it is used."""

    name: str
    content: str
    images: tuple[Path | str, ...] = ()  # files; a URL or data: URI as it is
    talk: Conversation | None = None  # a generated conversation
    said: tuple[dict[str, Any], ...] = ()  # a whole conversation from a user

    @property
    def group(self) -> str:
        return self.name.split("/", 1)[0]

    @property
    def kind(self) -> str:
        return self.name.split("/")[1]

    @property
    def has_images(self) -> bool:
        return bool(self.images or (self.talk and self.talk.scenes))  # `images` has those of `said`, too

    def messages(self) -> list[dict[str, Any]]:
        """The messages for `Engine.chat`."""
        if self.said:
            return list(self.said)
        if self.talk is None:
            parts = [{"type": "image", "image": str(path)} for path in self.images]
            return [{"role": "user", "content": [*parts, {"type": "text", "text": self.content}]}]
        return self.talk.messages(compose)


def is_validation(request: str) -> bool:
    """Whether a request validates: by image, or by prompt without one, so the same prompt at another keep is on the same side."""
    prompt = request.split("@")[0]
    side, dash, _ = prompt.rpartition("/")[2].partition("-")
    return hashlib.sha256(f"validation {side if dash else prompt}".encode()).digest()[0] % VALIDATION == 0


def scene_prompts(train: int, held_out: int, unseen: str = UNSEEN_KIND, world: str = "demo") -> list[CalibrationPrompt]:
    """About `train` training prompts of all kinds except `unseen`, including greetings without an image, and `held_out` prompts
    of held-out scenes of one of the WORLDS: nine tenths in equal parts of the kinds, one tenth of the unseen kind. Raises
    InputError for an unknown kind or world.
    """
    if world not in WORLDS:
        raise InputError(f"--world {world}: no such world. Fix: one of {', '.join(WORLDS)}")
    if unseen not in KINDS:
        raise InputError(f"--unseen {unseen}: generated scenes have no such kind. Fix: one of {', '.join(KINDS)}")
    kinds = [kind for kind in KINDS if kind != unseen]
    greetings = [CalibrationPrompt(f"train/greeting/{number}", hello) for number, (hello, _) in enumerate(THANKS)]
    scene = partial(_scene, world)
    asked = [scene(f"train/{kind}/{number}", "train", number) for number in range(-(-train // len(kinds))) for kind in kinds]
    for number in range(-(-held_out // len(kinds))):
        asked += [scene(f"held-out/{kind}/{number}", "held-out", number) for kind in kinds]
    asked += [scene(f"unseen/{unseen}/{number}", "held-out", number) for number in range(-(-held_out // 4))]
    return greetings + asked


def _scene(world: str, name: str, split: Any, number: int) -> CalibrationPrompt:
    side, difficulty = WORLDS[world]  # the number lets the scenes differ from those of vismoe eval
    talk = conversation(name.split("/")[1], split, 7_000_000 + number, (side, side), difficulty)
    return CalibrationPrompt(name, talk.turns[-1].question, talk=talk)


def folder_prompts(folder: str | Path, unseen: str | None = None) -> list[CalibrationPrompt]:
    """The prompts of a folder, in a fixed order: lines `{"image": path or list, "prompt": text, "kind": name}` or
    `{"messages": conversation, "kind": name}` of `*.jsonl` files (image and kind optional, paths are relative to the file),
    pictures with a default question, text files as they are.

    The content of a prompt's first image, or its text if it has none, decides whether it is held out, so adding files moves no
    other prompt. Raises InputError for unreadable files.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise InputError(
            f"--data {folder}: no such folder. Fix: name a folder with images, texts or *.jsonl prompts, or use --scenes"
        )
    found = [item for path in sorted(root.rglob("*")) if path.is_file() for item in _prompts_of(path)]
    if not found:
        wanted = ", ".join((*IMAGES, *TEXTS, ".jsonl"))
        raise InputError(
            f"--data {folder}: the folder has no prompts. Fix: put files that end in {wanted} there, or use --scenes"
        )
    if unseen is not None and unseen not in {kind for kind, *_ in found}:
        raise InputError(
            f"--unseen {unseen}: no prompt has that kind. Fix: use one of {', '.join(sorted({k for k, *_ in found}))}"
        )
    prompts: dict[str, CalibrationPrompt] = {}
    contents: dict[Path, str] = {}
    for kind, content, images, said in found:
        places = [str(Path(path).relative_to(root) if Path(path).is_relative_to(root) else path) for path in images]
        digest = hashlib.sha256("\0".join([kind, content, *places]).encode()).hexdigest()
        side = (_content(images[0], contents) if images else digest)[:SIDE]
        group = "held-out" if int(side[:2], 16) < HELD_OUT_SHARE * 256 else "train"
        name = f"{'unseen' if kind == unseen else group}/{kind}/{side}-{digest[:12]}"
        prompts[name] = CalibrationPrompt(name, content, images, said=said)
    return list(prompts.values())


def _content(image: Path | str, known: dict[Path, str]) -> str:
    """SHA-256 of an image file, or of a URL."""
    if isinstance(image, str):
        return hashlib.sha256(image.encode()).hexdigest()
    if image not in known:
        try:
            with image.open("rb") as file:
                known[image] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InputError(
                f"{image} cannot be read: {error.strerror or error}. Fix: make it readable, or leave it out"
            ) from error
    return known[image]


def _prompts_of(path: Path) -> Iterator[Found]:
    """The prompts of one file."""
    suffix = path.suffix.lower()
    if suffix in IMAGES:
        yield "image", DEFAULT_QUESTION, (path,), ()
    elif suffix in TEXTS:
        yield "text", path.read_text("utf-8", errors="replace").strip(), (), ()
    elif suffix == ".jsonl":
        try:
            lines = path.read_text("utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 ({error}). Fix: save it as UTF-8") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _line(path, number, line)


def _line(path: Path, number: int, line: str) -> Found:
    said: tuple[dict[str, Any], ...] = ()
    try:
        item = json.loads(line)
        kind = str(item.get("kind", path.stem))
        if "messages" in item:
            said = tuple(placed(item["messages"], path.parent, f"{path}, line {number}"))
            prompt, images = json.dumps(item["messages"], sort_keys=True), _images_of(said)
        else:
            named: Sequence[str] = item.get("image") or ()
            images = tuple(path.parent / name for name in ([named] if isinstance(named, str) else named))
            prompt = item["prompt"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        wanted = '{"image": "photo.jpg", "prompt": "What is this?"}, the image optional'
        raise InputError(f"{path}, line {number} is not a prompt ({error}). Fix: {wanted}") from error
    if missing := [str(image) for image in images if isinstance(image, Path) and not image.is_file()]:
        raise InputError(f"{path}, line {number}: no such image: {', '.join(missing)}")
    return kind.replace("/", "-").replace("@", "-"), str(prompt), images, said


def _images_of(messages: Sequence[dict[str, Any]]) -> tuple[Path | str, ...]:
    """The files of a conversation's images; URLs and data: URIs unchanged."""
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    sources = [image_source(part) for part in parts if isinstance(part, dict)]
    return tuple(_place(str(source)) for source in sources if source is not None)


def _place(image: str) -> Path | str:
    if image.lower().startswith(ELSEWHERE):
        return image
    return file_of_url(image) if image.lower().startswith("file://") else Path(image)
