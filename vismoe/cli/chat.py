"""`vismoe chat`, one question or a conversation, and `vismoe ui`, the same in a browser.

stdout carries only answers, in `--json` mode exactly one JSON object; everything else goes to stderr.
"""

import contextlib
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from vismoe import flags
from vismoe.cli.conversation import ChatSession, introduce, open_images, open_messages, read_out, save_kept_maps, say, video_parts
from vismoe.config import SERVING_DEFAULTS
from vismoe.errors import InputError
from vismoe.models.inputs.message_files import user_message
from vismoe.options import OF_SAMPLING, PENALTIES, RequestOptions

if TYPE_CHECKING:
    from vismoe.engine.engine import Engine


def chat_arguments(parser: ArgumentParser) -> None:
    """The flags of `vismoe chat`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] [QUESTION]",
        help="a single word is the model if it is a folder, a path or a hub name, otherwise the question; "
        "without a question a conversation begins",
    )
    pictures = "an image to ask about, or a PDF (#page=2-5 behind its name chooses pages); repeat for more"
    flags.add(parser, "--image PATH|URL", pictures, default=[], action="append")
    flags.add(parser, "--video PATH|URL", "a video to ask about, for Qwen3-VL's families; repeat", default=[], action="append")
    flags.add(parser, "--video-fps FPS", "frames that are read per second of a video (default: 2)", float)
    flags.add(parser, "--video-frames N", "most frames that are read of a video (default: 768)", int)
    flags.add(
        parser,
        "--messages FILE",
        "answer the conversation in a JSON file: messages in the form of Qwen's documentation; paths relative to it",
    )
    flags.add_request_options(parser, "max_tokens", "image_tokens", "sample", *OF_SAMPLING, *PENALTIES, "seed")
    flags.add_request_options(parser, "json_schema", "grammar", "reasoning", "reasoning_tokens")
    flags.add(parser, "--trace FOLDER", "record the routing, for vismoe replay")
    flags.add(parser, "--kept-map FOLDER", "save the images, with the visual tokens that --keep dropped in grey")
    flags.add(parser, "--json", "one JSON object with the answer and all statistics")
    flags.add(parser, "--verbose", "also show the memory plan, the chosen backends with reasons, and all statistics")
    flags.add_model_flags(parser)
    flags.add_settings(parser)


def ui_arguments(parser: ArgumentParser) -> None:
    """The flags of `vismoe ui`."""
    flags.add_one_model(parser, "hub name or folder (default: choose on the page)")
    parser.add_argument("--port", type=int, default=7860, help="on 127.0.0.1 (default: 7860)")
    flags.add_request_options(parser, "max_tokens", "image_tokens")
    flags.add_model_flags(parser)
    flags.add_settings(parser, SERVING_DEFAULTS)


def run_ui(arguments: Namespace) -> int:
    """Serves the chat page until Ctrl-C; without a model, it is chosen on the page."""
    model = flags.one_model(arguments)
    with flags.reading_ahead(arguments, model, SERVING_DEFAULTS):
        with flags.quick_imports():
            from vismoe.app.ui import require_gradio

            require_gradio()  # checked before minutes of loading
            import gradio  # noqa: F401  # which `serve` needs

            from vismoe.app.choosing import Catalog
            from vismoe.app.page import Page
            from vismoe.app.ui_serving import free_port, serve

        port = free_port(arguments.port)
        settings, options = {**SERVING_DEFAULTS, **flags.given_settings(arguments)}, flags.model_options(arguments)
        catalog = Catalog.of(model, settings, options)
        page = Page(options=RequestOptions(reuse=True, **flags.given_options(arguments)))
        if catalog.given is not None:
            page.engine = flags.load_engine(arguments, model, SERVING_DEFAULTS)
    return serve(page, port, catalog)


def run_chat(arguments: Namespace) -> int:
    """Runs one question or a conversation; returns the exit code."""
    model, question = flags.model_and_question(arguments.words, arguments.model)
    asked = question is not None or arguments.messages
    if arguments.messages and (question is not None or arguments.image or arguments.video):
        raise InputError("--messages gives a whole conversation. Fix: put the question, its images and videos into the file")
    if arguments.video_fps is not None or arguments.video_frames is not None:
        from vismoe.models.inputs.qwen_videos import asked_video

        asked_video({"fps": arguments.video_fps, "max_frames": arguments.video_frames}, of_frames=False)  # checks them
        if asked and not arguments.video:
            raise InputError("--video-fps and --video-frames belong to a --video. Fix: leave them out, or name the video")
    if arguments.json and not asked:
        raise InputError(
            '--json answers one question, not a conversation. Fix: vismoe chat --json "What is in the picture?" --image PICTURE'
        )
    settings = flags.given_settings(arguments)  # refused before anything is loaded
    if asked and "formats" in settings and settings.get("policy", "exact") == "exact":
        say(f"--formats {settings['formats']} changes nothing: policy exact has one format. Fix: --policy hotness or importance")
    options = RequestOptions(reuse=True, **flags.given_options(arguments))
    if arguments.kept_map and not asked:
        raise InputError("--kept-map goes with one question; in a conversation, /map FOLDER saves the map of the last answer")
    # before the model is loaded, so that a wrong path is reported at once
    seen: list[Any] = [*open_images(arguments.image), *video_parts(arguments.video, arguments)]
    messages = open_messages(arguments.messages) if arguments.messages else [user_message(question or "", seen)]
    with flags.load_engine(arguments, model, quiet=not arguments.verbose) as engine, _recording(engine, arguments.trace):
        if asked:
            return _answer_once(engine, arguments, messages, options)
        return ChatSession(engine, arguments, seen, options).run()


def _recording(engine: "Engine", path: str | None) -> contextlib.AbstractContextManager[Any]:
    return engine.record(path) if path else contextlib.nullcontext()


def _answer_once(engine: "Engine", arguments: Namespace, messages: list[dict[str, Any]], options: RequestOptions) -> int:
    from rich.console import Console

    from vismoe.cli.print import print_figures

    console = Console(stderr=True)
    if not arguments.json:
        introduce(console, engine, arguments.verbose)
    reply = engine.chat(messages, options)
    stopped = read_out(reply, quiet=arguments.json)
    maps = save_kept_maps(reply.figures, arguments.kept_map) if arguments.kept_map else []
    if arguments.json:
        flags.print_json(arguments, reply.figures.to_json())
    else:
        print(flush=True)
        if arguments.verbose:
            print_figures(console, reply.figures.to_json())
        for file in maps:
            say(f"saved {file}")
    return flags.INTERRUPTED if stopped else 0


CHAT = flags.Command(
    "ask a model about images, once or in a conversation",
    chat_arguments,
    run_chat,
    """\
  vismoe chat                                                    a conversation with the bundled demo model
  vismoe chat --image a.png --image b.png "Which image shows a dog?"
  vismoe chat MODEL --video clip.mp4 --video-frames 32 "What happens?"   a video, for Qwen3-VL's families
  vismoe chat ./my-model "Tell me a story." --max-tokens 500     a text-only question to a local model
  vismoe chat MODEL --gguf model-Q4_K_M.gguf --mmproj mmproj.gguf   the weights of llama.cpp's files
  vismoe chat --messages talk.json                               a conversation in the form of Qwen's documentation
  vismoe chat --image photo.jpg --keep 0.5 "What is this?"       half of the visual tokens; --kept-map FOLDER saves which
  vismoe chat --memory 25% --json "Hello?" | jq .cache.hits      a quarter of the experts in memory, statistics as JSON
  vismoe chat --verbose "Hello?"                                 with the memory plan, the backends and statistics
In a conversation, /help lists the commands; Ctrl-C stops an answer; a pasted text of several lines is one question.
The answer goes to stdout, everything else to stderr.""",
)
UI = flags.Command(
    "chat in a browser, on this machine only",
    ui_arguments,
    run_ui,
    """\
  vismoe ui                                                      http://127.0.0.1:7860, where a model is chosen
  vismoe ui Qwen/Qwen3-VL-30B-A3B-Instruct --memory 20GiB --port 8000
Needs gradio: pip install "vismoe[serve]", in a checkout: .venv/bin/pip install -e ".[serve]".""",
)
