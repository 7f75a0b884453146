"""A conversation on the command line: history, several images, commands, and what Ctrl-C does.

Ctrl-C stops the answer that is being written, never the conversation; Ctrl-D or /quit ends it.
"""

import contextlib
import io
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vismoe.cli.lines import next_input, with_line_editing
from vismoe.errors import ClosedError, InputError, VisMoEError
from vismoe.flags import did_you_mean, signals_call
from vismoe.models.inputs.message_files import read_messages, user_message, with_sources
from vismoe.options import RequestOptions

if TYPE_CHECKING:
    from PIL import Image
    from rich.console import Console

    from vismoe.engine.engine import Engine
    from vismoe.engine.generate import Figures, Reply

HELP = """\
/image PATH   attach an image to the next question (repeat for several images)
/video PATH   attach a video
/keep SHARE   of the visual tokens to keep, from now on, e.g. /keep 0.5
/policy NAME  the policy that chooses the formats of experts, from now on: exact, hotness, importance, hotness+importance
/formats PAIR the two formats that a policy chooses from, e.g. /formats 4/2
/retention R  mean share of the demanded experts in the better format (importance), 0.5 to 1
/map FOLDER   save the images of the last answer, with dropped tokens in grey
/reset        forget the conversation and its images
/figures      all statistics of the last answer, layer by layer
/help         show this list
/quit         end the conversation (as does Ctrl-D); Ctrl-C stops an answer"""


def say(text: str) -> None:
    """Prints to stderr, since stdout holds answers only."""
    print(text, file=sys.stderr, flush=True)


def open_images(paths: list[str]) -> list["Image.Image"]:
    """Opens pictures from paths and URLs, turned upright, and the pages of PDF documents."""
    from vismoe.models.inputs.documents import open_pages
    from vismoe.models.inputs.images import MAX_PIXELS, fetch_image

    return [image for path in paths for image in open_pages(path, MAX_PIXELS) or [fetch_image(path)]]


def open_messages(file: str) -> list[dict[str, Any]]:
    """The conversation in a file, with its images opened."""
    from vismoe.models.inputs.images import fetch_image

    return with_sources(read_messages(file), fetch_image, lambda video: video)


def video_parts(paths: list[str], arguments: Namespace) -> list[dict[str, Any]]:
    """The message parts of videos, which only the model's family can open; here it is checked that they can be read."""
    from vismoe.models.inputs.images import MAX_PIXELS
    from vismoe.models.inputs.videos import fetch_video_file, opened_video

    parts = []
    for path in paths:
        with fetch_video_file(path) as file, opened_video(file, path, MAX_PIXELS) as video:
            held = video.header
            say(f"{path}: {held.width} x {held.height} pixels, {held.frames:,} frames in {held.seconds:.1f} s")
            source = file.getvalue() if isinstance(file, io.BytesIO) else path  # what was downloaded is not downloaded again
        parts.append({"type": "video", "video": source, "fps": arguments.video_fps, "max_frames": arguments.video_frames})
    return parts


def save_kept_maps(figures: "Figures", folder: str) -> list[Path]:
    """Writes `kept-1.png`, `kept-2.png`, ... into the folder: each image with its kept tokens. Raises InputError."""
    maps = figures.kept_maps()
    if not maps:
        raise InputError(
            "there is no map, because no visual token was dropped. Fix: ask about an image, for example with --keep 0.5"
        )
    files = [Path(folder).expanduser() / f"kept-{number}.png" for number in range(1, len(maps) + 1)]
    try:
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for file, picture in zip(files, maps, strict=True):
            picture.save(file)
    except OSError as error:
        raise InputError(f"{folder}: the map of kept tokens cannot be written: {error.strerror or error}") from error
    return files


def read_out(reply: "Reply", quiet: bool = False) -> bool:
    """Prints the answer as it arrives, and to stderr what the model thinks, unless `quiet`.

    The first Ctrl-C cancels the reply, which then ends normally; a second one interrupts as usual. Returns whether one came.
    """
    from vismoe.models.inputs.responses import Reasoning

    pressed = False

    def cancel(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        reply.cancel()

    with signals_call(cancel, signal.SIGINT):
        thinking = False
        for piece in reply.pieces():
            if isinstance(piece, Reasoning) and not quiet:
                thinking = True
                print(f"\x1b[2m{piece.text}\x1b[0m" if sys.stderr.isatty() else piece.text, end="", file=sys.stderr, flush=True)
            elif isinstance(piece, str) and not quiet:
                if thinking:
                    say("")
                thinking = False
                print(piece, end="", flush=True)
    return pressed


def introduce(console: "Console", engine: "Engine", verbose: bool, hint: str = "") -> None:
    """Prints one line about the engine before the first answer, or with `verbose` the plan and the backends."""
    from vismoe.cli.print import load_line, print_backends, print_plan

    if verbose:
        print_plan(console, engine.plan)
        print_backends(console, engine.backends)
    else:
        hint = hint or "--verbose shows the plan and statistics"
        console.print(f"{load_line(engine)}; {hint}", soft_wrap=True, highlight=False, markup=False)


@dataclass
class ChatSession:
    """The interactive chat: questions and answers so far, and the images and videos for the next question."""

    engine: "Engine"
    arguments: Namespace
    waiting: list["Image.Image | dict[str, Any]"]
    options: RequestOptions  # from here on
    messages: list[dict[str, Any]] = field(default_factory=list)
    last: "Figures | None" = None

    def run(self) -> int:
        from rich.console import Console

        self.console = Console(stderr=True)
        introduce(self.console, self.engine, self.arguments.verbose, "ask something; /help lists the commands")
        self.waiting = [self._opened(one) if isinstance(one, dict) else one for one in self.waiting]
        with_line_editing()
        while True:
            try:
                text = next_input("> ")
            except EOFError:
                say("")
                return 0
            except KeyboardInterrupt:
                say("\n/quit or Ctrl-D ends the conversation")
                continue
            for part in commands_and_question(text.strip()):
                if part == "/quit":
                    return 0
                self.take(part)

    def take(self, part: str) -> None:
        """Executes one command or question; prints its error if it fails, and the conversation goes on."""
        try:
            self.turn(part)
        except ClosedError:
            raise
        except VisMoEError as error:
            say(f"error: {error}")
        except KeyboardInterrupt:
            say("\n[stopped]")

    def turn(self, part: str) -> None:
        command, *rest = part.split(maxsplit=1)
        if command in COMMANDS:
            COMMANDS[command](self, "".join(rest))
        elif command.startswith("/") and "/" not in command[1:]:
            raise InputError(f"{command}: no such command{did_you_mean(command, (*COMMANDS, '/quit'))}\n{HELP}")
        else:
            self.ask(part)

    def reset(self, _: str) -> None:
        self.messages, self.waiting = [], []
        say("a new conversation")

    def attach_videos(self, text: str) -> None:
        parts = video_parts(_paths(text, "/video needs a path, e.g. /video clip.mp4"), self.arguments)
        self.waiting += [self._opened(part) for part in parts]
        say("attached; ask about it")

    def attach(self, text: str) -> None:
        for image in open_images(_paths(text, "/image needs a path, e.g. /image photo.jpg")):
            self.waiting.append(image)
            say(f"attached, {image.width} x {image.height} pixels; ask about it")

    def set_keep(self, text: str) -> None:
        share = self._share("keep", text, "not a share above 0 and up to 1, e.g. /keep 0.5")
        say("every visual token is kept" if share == 1 else f"{share:.0%} of the visual tokens are kept")

    def _share(self, name: str, text: str, words: str) -> float:
        """An option of all further questions."""
        try:
            given: dict[str, Any] = {name: float(text)}
            self.options = replace(self.options, **given)
        except (ValueError, InputError) as error:  # a ConfigError is one too
            raise InputError(f"/{name} {text}: {words}") from error
        return float(text)

    def _options_in_force(self) -> RequestOptions:
        """Without the retention while the policy does not use one, since the engine would refuse it."""
        running = self.engine.precision
        used = running is not None and "importance" in running.policy
        return self.options if used else replace(self.options, retention=None)

    def change(self, policy: str | None = None, formats: str | None = None) -> None:
        """Changes the policy or the formats, which divides memory anew. Without a value, prints the current ones."""
        from vismoe.words import precision_words

        if policy or formats:
            self.engine.change(policy=policy, formats=formats)
        say(precision_words(self.engine.precision))

    def set_retention(self, text: str) -> None:
        share = self._share("retention", text, "not a share from 0.5 to 1, e.g. /retention 0.8")
        waits = "; takes effect with /policy importance" if self._options_in_force().retention is None else ""
        say(f"{share:.0%} of the demanded experts get the better format{waits}")

    def save_map(self, folder: str) -> None:
        if self.last is None or not folder.strip():
            raise InputError("/map needs an answer about an image and a folder, e.g. /map kept")
        for file in save_kept_maps(self.last, folder.strip()):
            say(f"saved {file}")

    def show_figures(self, _: str) -> None:
        from vismoe.cli.print import print_figures, print_layers

        if self.last is None:
            raise InputError("there is no answer yet, so there are no statistics")
        figures = self.last.to_json()
        print_figures(self.console, figures)
        print_layers(self.console, figures)

    def _opened(self, part: dict[str, Any]) -> dict[str, Any]:
        """A video's part with the video opened: once, not for each question about it."""
        return self.engine.opened_video(part, self.options.image_tokens)

    def ask(self, question: str) -> None:
        """Streams the answer. An answer, even a partial one, enters the history with its question; a failed question does not."""
        from vismoe.cli.print import print_figures

        message = user_message(question, self.waiting)
        reply = self.engine.chat([*self.messages, message], self._options_in_force())
        stopped = read_out(reply)
        print(flush=True)
        if stopped:
            say("[stopped]")
        self.last = reply.figures
        if reply.answer or not stopped:
            self.messages += [message, {"role": "assistant", "content": reply.answer}]
            self.waiting = []
        if self.arguments.verbose:
            print_figures(self.console, reply.figures.to_json())


COMMANDS: dict[str, Callable[[ChatSession, str], None]] = {
    "/image": ChatSession.attach,
    "/video": ChatSession.attach_videos,
    "/keep": ChatSession.set_keep,
    "/policy": lambda chat, policy: chat.change(policy=policy or None),
    "/formats": lambda chat, formats: chat.change(formats=formats or None),
    "/retention": ChatSession.set_retention,
    "/map": ChatSession.save_map,
    "/reset": ChatSession.reset,
    "/figures": ChatSession.show_figures,
    "/help": lambda chat, _: say(HELP),
}


def _paths(text: str, missing: str) -> list[str]:
    paths = [text.strip()]
    if not Path(paths[0]).exists():  # quoted, or with escaped blanks, as terminals paste the path of a dropped file
        with contextlib.suppress(ValueError):
            paths = shlex.split(text) or paths
    if paths == [""]:
        raise InputError(missing)
    return paths


def commands_and_question(text: str) -> Iterator[str]:
    """Commands are lines of their own; all lines after them are one question."""
    while text.split(maxsplit=1)[:1] and text.split(maxsplit=1)[0] in (*COMMANDS, "/quit"):
        command, _, text = text.partition("\n")
        yield command.strip()
        text = text.strip()
    if text:
        yield text
