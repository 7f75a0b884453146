"""`vismoe ui`: a chat page on this machine only, with images, streamed answers, and a tab that shows the machine at work.

This module connects the widgets (`widgets`) with the logic (`page`); `ui_serving` is the server. On the server a visitor's
conversation exists only in their own session; the browser keeps it. Nothing is loaded from another machine: fonts are the
system's, pictures and styles come from this package. gradio is imported inside functions only: without it everything but this
page works.
"""

import dataclasses
import html
import importlib.util
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vismoe.app.choosing import Catalog
from vismoe.app.conversations import read_record, record
from vismoe.app.loaded import Loader
from vismoe.app.page import Finished, History, Page, PageTurn, PageUpdate, chosen, shown, tiles, turn_at
from vismoe.app.pictures import NO_IMAGE
from vismoe.app.ui_models import connect_models, model_tab
from vismoe.app.uploads import Uploads
from vismoe.app.widgets import FORMATS_OF, NOT_YET, chat_tab, examples, machine_tab, theme_switch
from vismoe.errors import BusyError, ConfigError, VisMoEError

if TYPE_CHECKING:
    import gradio as gr

log = logging.getLogger("vismoe")

Values = dict[Any, Any]  # values of widgets, by widget
KEEP_S = 2.0  # between two records of an answer that is being written, for a page that is reloaded
CONVERSATIONS = 16  # answered at the same time; gradio has 40 threads, and Stop needs one


def require_gradio() -> None:
    """Raises ConfigError if gradio is missing; it brings what refuses requests of other sites."""
    if importlib.util.find_spec("gradio") is None:
        raise ConfigError(
            'the chat page needs gradio, which is not installed. Fix: pip install "vismoe[serve]", '
            'in a checkout: .venv/bin/pip install -e ".[serve]"'
        )


def build(page: Page, uploads: Uploads, catalog: Catalog) -> "gr.Blocks":
    """The widgets and their connections."""
    import gradio as gr

    loader = Loader(page, catalog.given)
    with gr.Blocks(title="VisMoE", fill_width=True, analytics_enabled=False) as blocks:
        with gr.Row(elem_id="top"):
            top = gr.HTML(page.head(), min_width=260)
            change = gr.Button(
                "Change model or settings", size="sm", scale=0, min_width=200, elem_id="change", visible=page.engine is not None
            )
            theme_switch()
        ready = page.engine is not None
        with gr.Tabs(selected="chat" if ready else "models", overflow_behavior="wrap") as tabs:
            with gr.Tab("Chat", id="chat", render_children=True, visible=ready) as chat_view:
                chat = chat_tab(page)
            with gr.Tab("The machine at work", id="machine", render_children=True, visible=ready) as machine_view:
                machine = machine_tab(page)
            with gr.Tab("Model and settings", id="models") as models_view:
                view = model_tab(catalog)
        _connect(page, uploads, chat, {**machine, "head": top})
        parts = {
            "tabs": tabs,
            "chat": chat_view,
            "machine": machine_view,
            "models": models_view,
            "change": change,
            "head": top,
            "pairs": chat["offers"],
        }
        parts |= {name: machine[name] for name in ("heat", "plan", "backends")} | {"options": chat["options"]}
        connect_models(loader, catalog, view, parts, told, blocks)
        _visits(page, uploads, blocks)
    return blocks


def _connect(page: Page, uploads: Uploads, chat: dict[str, Any], machine: dict[str, Any]) -> None:
    """Connects widgets with handlers. New, example, repeated and edited questions are answered by the same steps."""
    import gradio as gr

    box, chatbot, history = chat["box"], chat["chatbot"], chat["history"]
    drawn = [chat["tiles"], *(machine[name] for name in ("live", "heat", "pictures", "time_line", "tiers", "plan", "head"))]
    outputs = [box, chatbot, history, chat["again"], chat["notice"], *drawn, chat["number"], chat["shelf"]]
    options_of = {name: widget for name, widget in chat["options"].items() if name != "fold"}
    inputs = {history, chat["number"], *options_of.values()}  # a set, so that handlers get the values by widget
    still = [gr.skip()] * len(outputs)

    def run(turn: Callable[[], PageTurn], before: History, values: Values, request: gr.Request) -> Iterator[list[Any]]:
        """Answers `turn()` after the turns `before`; an error is shown below the conversation, which is then unchanged.

        The last update changes nothing: gradio sends it once more when the handler has ended, and by then the visitor may have
        begun another conversation.
        """
        asked, past, session = None, values[history], str(request.session_hash)
        number, system = values[chat["number"]] or uuid.uuid4().hex, values[options_of["system"]] or ""
        began_s = kept_s = time.monotonic()
        try:
            options = chosen(page.options, {name: values[widget] for name, widget in options_of.items()})
            asked = turn()
            uploads.use(session, asked.files)
            box_now, again_now, notice_now = gr.MultimodalTextbox(value=None, submit_btn=False, stop_btn=True), gr.skip(), ""
            for update in page.answer(asked, before, session, options, system):
                if update.finished:
                    past = update.history
                    box_now = _ready(asked if len(past) == len(before) else None)  # restored if stopped before the first word
                    again_now = _again(past)
                now_s, begun = time.monotonic(), len(update.history) > len(before) and update.history[-1].answer
                if (update.finished and past) or (begun and now_s - kept_s >= KEEP_S):
                    kept, kept_s = record(number, system, update.history), now_s
                else:
                    kept = gr.skip()
                yield [box_now, shown(update.history), past, again_now, notice_now, *_drawn(update), number, kept]
                box_now = notice_now = gr.skip()
        except BusyError as error:
            gr.Info(html.escape(str(error)), title="One at a time")
        except Exception as error:  # the boundary of every question
            restored = _ready(asked) if asked is not None else gr.skip()
            kept = record(number, system, past) if past and kept_s > began_s else gr.skip()  # without the answer's beginning
            yield [restored, shown(past), past, _again(past), told(error), *still[5:-1], kept]
        yield still

    def ask(values: Values, request: gr.Request) -> Iterator[list[Any]]:
        text, files = values[box].get("text") or "", list(values[box].get("files") or [])
        yield from run(lambda: PageTurn.of(text, files), values[history], values, request)

    def example(values: Values, event: gr.SelectData, request: gr.Request) -> Iterator[list[Any]]:
        chosen = examples()[event.index]  # never a path from the browser
        yield from run(lambda: PageTurn.of(chosen["text"], chosen["files"]), values[history], values, request)

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

    def begin(number: str = "", past: History = ()) -> list[Any]:
        """The page with another conversation, whose answers were written before."""
        empty = [tiles(), tiles(), page.heat(), NO_IMAGE, NOT_YET, NOT_YET, gr.skip(), gr.skip()]
        return [_ready(), shown(past), past, _again(past), "", *empty, number, json.dumps({"opened": number})]

    def leave(session: str) -> None:
        page.leave(session)
        uploads.forget(session)

    def forget(request: gr.Request) -> list[Any]:
        leave(str(request.session_hash))
        return begin()

    def restore(event: gr.EventData, request: gr.Request) -> list[Any]:
        session = str(request.session_hash)
        try:
            number, system, read = read_record(event._data)
        except Exception as error:  # whatever the browser sends, the conversation stays
            return [*still[:4], told(error), *still[5:], gr.skip()]
        leave(session)
        stored = [tuple(uploads.add(session, *picture) for picture in pictures) for _, pictures in read]
        past = tuple(dataclasses.replace(turn, files=files) for (turn, _), files in zip(read, stored, strict=True))
        return [*begin(number, past), system]

    answering: dict[str, Any] = {
        "outputs": outputs,
        "concurrency_limit": CONVERSATIONS,
        "concurrency_id": "answers",
        "trigger_mode": "multiple",  # a second question is refused with a message, not dropped
        "show_progress": "hidden",
    }
    box.submit(ask, {box, *inputs}, api_name="ask", **answering)
    chatbot.example_select(example, inputs, api_name="example", **answering)
    gr.on([chat["again"].click, chatbot.retry], again, inputs, api_name="again", **answering)
    chatbot.edit(edited, inputs, api_name="edit", **answering)
    box.stop(stop, queue=False, api_name="stop")
    leaving = [chat["forget"].click, chatbot.clear]
    gr.on(leaving, forget, None, outputs, concurrency_limit=None, show_progress="hidden", api_name="forget")

    shelf_outputs = [*outputs, chat["options"]["system"]]
    chat["shelf"].restore(restore, None, shelf_outputs, concurrency_limit=None, show_progress="hidden", api_name="restore")

    policy, *shown_with_it = (chat["options"][name] for name in ("policy", "formats", "retention"))
    policy.input(None, [policy, shown_with_it[0], chat["offers"]], shown_with_it, js=FORMATS_OF)


def _visits(page: Page, uploads: Uploads, blocks: "gr.Blocks") -> None:
    """Handlers for opening and closing a page; closing removes its conversation."""
    import gradio as gr

    def enter(request: gr.Request) -> None:
        uploads.enter(str(request.session_hash))

    def leave(request: gr.Request) -> None:
        session = str(request.session_hash)
        page.leave(session)
        uploads.leave(session)
        blocks.state_holder.delete_state(session)  # gradio would keep it for an hour

    blocks.load(enter, None, None, queue=False, show_progress="hidden", api_name=False)
    blocks.unload(leave)


def told(error: Exception) -> str:
    """An error as HTML, to be shown below the conversation. Internal errors are logged."""
    message = str(error)
    if not isinstance(error, VisMoEError):
        log.error("an error inside the chat page", exc_info=error)
        message = f"internal error of the chat page ({type(error).__name__}); the log of vismoe ui has details"
    return f'<p class="vm-error" role="alert">{html.escape(message)}</p>'


def _again(history: History) -> "gr.Button":
    """Active if there is an answer to repeat."""
    import gradio as gr

    return gr.Button(interactive=bool(history))


def _ready(turn: PageTurn | None = None) -> "gr.MultimodalTextbox":
    """The box ready for a question; contains that of `turn` if it was not answered."""
    import gradio as gr

    value = {"value": {"text": turn.question, "files": list(turn.files)}} if turn is not None else {}
    return gr.MultimodalTextbox(submit_btn=True, stop_btn=False, **value)


def _drawn(update: PageUpdate) -> list[Any]:
    """The drawings; those without news are unchanged."""
    import gradio as gr

    done = update.finished
    news = [update.heat, *(vars(done).values() if done else [None] * len(Finished.__dataclass_fields__))]
    return [update.tiles, update.tiles, *(gr.skip() if one is None else one for one in news)]
