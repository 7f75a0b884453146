"""`vismoe ui`: a chat page on this machine only, with images, streamed answers, and a page that shows the machine at work.

What the widgets (`widgets`) call, and the server; what comes of it is in `page`. A visitor's conversation lives in their own
session and nowhere else. Nothing is loaded from another machine: fonts are the system's, pictures and styles are ours.
gradio is imported inside functions only: without it everything but this page works.
"""

import html
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vismoe.app.memory_view import head
from vismoe.app.page import Finished, History, Page, Turn, Update, Wishes, shown, tiles, turn_at
from vismoe.app.pictures import NO_IMAGE
from vismoe.app.widgets import NOT_YET, chat_tab, examples, machine_tab, pictures_folder
from vismoe.engine import Engine
from vismoe.errors import BusyError, ConfigError, VisMoEError

if TYPE_CHECKING:
    import gradio as gr

__all__ = ["build", "require_gradio", "serve"]

Values = dict[Any, Any]  # of widgets, by widget
ADDRESS = "127.0.0.1"
CONVERSATIONS = 16  # that are answered at once; gradio has 40 threads, and Stop needs one
STYLE = Path(__file__).with_name("ui.css")
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "DejaVu Sans", "sans-serif"]
FIXED_FONTS = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]
SAME_ORIGIN = (  # whatever an answer links to, the browser asks nobody but us
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:\">"
)


def require_gradio() -> None:
    """Raises ConfigError where gradio is missing."""
    if importlib.util.find_spec("gradio") is None:
        raise ConfigError(
            'the chat page needs gradio, which is not installed. Fix: pip install "vismoe[serve]", '
            'in a checkout: .venv/bin/pip install -e ".[serve]"'
        )


def build(page: Page) -> "gr.Blocks":
    """The widgets, and which of them calls what."""
    import gradio as gr

    with gr.Blocks(title="VisMoE", fill_width=True, analytics_enabled=False) as blocks:
        top = gr.HTML(head(page.engine.name, page.engine.plan))
        with gr.Tabs():
            with gr.Tab("Chat", id="chat"):
                chat = chat_tab(page)
            with gr.Tab("The machine at work", id="machine", render_children=True):
                machine = machine_tab(page)
        _connect(page, chat, {**machine, "head": top})
    return blocks


def _connect(page: Page, chat: dict[str, Any], machine: dict[str, Any]) -> None:
    """Which widget calls what. A question is answered by the same steps whether it is new, an example, repeated or edited."""
    import gradio as gr

    box, chatbot, history = chat["box"], chat["chatbot"], chat["history"]
    drawn = [chat["tiles"], *(machine[name] for name in ("live", "heat", "pictures", "time_line", "tiers", "plan", "head"))]
    outputs = [box, chatbot, history, *drawn]
    inputs = {history, *chat["wishes"].values()}  # a set: handlers get the values by widget
    still = [gr.skip()] * len(outputs)

    def run(turn: Callable[[], Turn], before: History, values: Values, request: gr.Request) -> Iterator[list[Any]]:
        """Answers `turn()` after the turns `before`; after an error the conversation is what it was."""
        asked, past, session = None, values[history], str(request.session_hash)
        asking = wishes({name: values[widget] for name, widget in chat["wishes"].items()})
        try:
            asked = turn()
            box_now = gr.MultimodalTextbox(value=None, submit_btn=False, stop_btn=True)
            for update in page.answer(asked, before, session, asking):
                if update.finished:
                    past = update.history
                    box_now = _ready(asked if len(past) == len(before) else None)  # stopped before the first word
                yield [box_now, shown(update.history), past, *_drawn(update)]
                box_now = gr.skip()
        except BusyError as error:
            gr.Info(html.escape(str(error)), title="One at a time")
            yield still
        except VisMoEError as error:
            restored = _ready(asked) if asked is not None else gr.skip()
            yield [restored, shown(past), past, *still[3:]]
            raise gr.Error(html.escape(str(error)), duration=None, print_exception=False) from error

    def ask(values: Values, request: gr.Request) -> Iterator[list[Any]]:
        text, files = values[box].get("text") or "", list(values[box].get("files") or [])
        yield from run(lambda: Turn.of(text, files), values[history], values, request)

    def example(values: Values, event: gr.SelectData, request: gr.Request) -> Iterator[list[Any]]:
        chosen = examples()[event.index]  # never a path that the browser names
        yield from run(lambda: Turn.of(chosen["text"], chosen["files"]), values[history], values, request)

    def again(values: Values, request: gr.Request) -> Iterator[list[Any]]:
        past: History = values[history]
        if not past:
            gr.Info("There is no answer yet; ask something first.", title="Nothing to repeat")
            yield still
            return
        yield from run(lambda: past[-1], past[:-1], values, request)

    def edited(values: Values, event: gr.EditData, request: gr.Request) -> Iterator[list[Any]]:
        past: History = values[history]
        number = turn_at(past, event.index[0] if isinstance(event.index, list | tuple) else event.index)
        if number == len(past):
            gr.Info("Its answer is still being written: stop it first.", title="One at a time")
            yield still
            return
        yield from run(lambda: past[number].asked_as(event.value), past[:number], values, request)

    def stop(request: gr.Request) -> None:
        page.stop(str(request.session_hash))

    def forget(request: gr.Request) -> list[Any]:
        page.leave(str(request.session_hash))
        return [_ready(), [], (), tiles(), tiles(), page.heat(), NO_IMAGE, NOT_YET, NOT_YET, gr.skip(), gr.skip()]

    answering: dict[str, Any] = {
        "outputs": outputs,
        "concurrency_limit": CONVERSATIONS,
        "concurrency_id": "answers",
        "trigger_mode": "multiple",  # a second question is refused in words, not dropped
        "show_progress": "hidden",
    }
    box.submit(ask, {box, *inputs}, api_name="ask", **answering)
    chatbot.example_select(example, inputs, api_name="example", **answering)
    gr.on([chat["again"].click, chatbot.retry], again, inputs, api_name="again", **answering)
    chatbot.edit(edited, inputs, api_name="edit", **answering)
    box.stop(stop, queue=False, api_name="stop")
    leaving = [chat["forget"].click, chatbot.clear]
    gr.on(leaving, forget, None, outputs, concurrency_limit=None, show_progress="hidden", api_name="forget")


def wishes(values: dict[str, Any]) -> Wishes:
    """What the widgets say, by the names of `Wishes`."""
    return Wishes(**{**values, "selection": values["selection"] or None, "max_tokens": int(values["max_tokens"]) or None})


def _ready(turn: Turn | None = None) -> "gr.MultimodalTextbox":
    """The box as it waits for a question, with that of `turn` in it where it was not answered."""
    import gradio as gr

    value = {"value": {"text": turn.question, "files": list(turn.files)}} if turn is not None else {}
    return gr.MultimodalTextbox(submit_btn=True, stop_btn=False, **value)


def _drawn(update: Update) -> list[Any]:
    """What the drawings show; those without news stay as they are."""
    import gradio as gr

    done = update.finished
    news = [update.heat, *(vars(done).values() if done else [None] * len(Finished.__dataclass_fields__))]
    return [update.tiles, update.tiles, *(gr.skip() if one is None else one for one in news)]


def launch(blocks: "gr.Blocks", port: int | None = None) -> str:
    """Starts the page's server and returns its address; without a port, a free one. Raises ConfigError when the port is taken."""
    import gradio as gr

    logging.getLogger("httpx").setLevel(logging.WARNING)  # gradio asks itself whether it is up
    try:
        _, address, _ = blocks.launch(
            server_name=ADDRESS,
            server_port=port,
            prevent_thread_lock=True,
            share=False,
            quiet=True,
            ssr_mode=False,
            theme=gr.themes.Default(primary_hue="teal", neutral_hue="slate", font=FONTS, font_mono=FIXED_FONTS),
            css_paths=STYLE,
            head=SAME_ORIGIN,
            footer_links=[],
            max_file_size="64mb",
            allowed_paths=[str(pictures_folder())],
        )
    except OSError as error:
        raise ConfigError(f"port {port} of {ADDRESS} cannot be used ({error}). Fix: --port {(port or 0) + 1}") from error
    return str(address)


def serve(engine: Engine, port: int, *, max_tokens: int | None = None, image_tokens: tuple[int, int] | None = None) -> int:
    """Serves the page on this machine until Ctrl-C; raises ConfigError when the port is taken."""
    blocks = build(Page(engine, max_tokens, image_tokens))
    launch(blocks, port)
    print(f"VisMoE is at http://{ADDRESS}:{port} (this machine only); Ctrl-C stops it", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print("\nstopped")
    finally:
        blocks.close()
    return 0
