"""`vismoe ui`: a chat page on this machine only, with images, streamed answers, a stop button and live figures.

Widgets and the server; what they do is in `page`. A visitor's conversation lives in their own session and nowhere else.
gradio is imported inside functions only: without it everything but this page works.
"""

import html
import importlib.util
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vismoe.app.page import History, Page, tiles
from vismoe.engine import Engine, demo_model
from vismoe.errors import ConfigError, VisMoEError

if TYPE_CHECKING:
    import gradio as gr

__all__ = ["build", "require_gradio", "serve"]

ADDRESS = "127.0.0.1"
EXAMPLES = 4
STYLE = """
.tiles { display: grid; grid-template-columns: 1fr 1fr; gap: 8px; }
.tiles div { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 8px 12px; }
.tiles b { display: block; font-size: 1.4em; font-variant-numeric: tabular-nums; }
.details { width: 100%; margin-top: 12px; font-size: 0.9em; }
.details, .details tr, .details td { border: 0 !important; }
.details td { padding: 2px 8px 2px 0; vertical-align: top; }
.details td:nth-child(2) { white-space: nowrap; }
.maps img { display: inline-block; max-width: 100%; margin: 4px 4px 0 0; }
.plan pre { white-space: pre; overflow-x: auto; font-size: 0.8em; }
"""


def require_gradio() -> None:
    """Raises ConfigError where gradio is missing."""
    if importlib.util.find_spec("gradio") is None:
        raise ConfigError(
            'the chat page needs gradio, which is not installed. Fix: pip install "vismoe[serve]", '
            'in a checkout: .venv/bin/pip install -e ".[serve]"'
        )


def pictures_folder() -> Path:
    return demo_model().parent / "images"


def examples() -> list[dict[str, Any]]:
    """Bundled pictures with a question each."""
    pictures = sorted(pictures_folder().glob("*.png"))[:EXAMPLES]
    return [{"text": "What is in the picture?", "files": [str(picture)]} for picture in pictures]


def model_title(name: str) -> str:
    """A folder by its last part, a hub model by its full name."""
    return Path(name).name if Path(name).is_dir() else name


def build(page: Page) -> "gr.Blocks":
    """The widgets, and which of them calls what."""
    import gradio as gr

    def ask(
        message: dict[str, Any], shown: History, history: History, keep: float, request: gr.Request
    ) -> Iterator[tuple[Any, ...]]:
        question, files = message.get("text") or "", list(message.get("files") or [])
        shown = [*shown, *({"role": "user", "content": {"path": file}} for file in files), {"role": "user", "content": question}]
        try:
            for text, after, figures in page.answer(question, files, history, str(request.session_hash), keep):
                yield None, [*shown, {"role": "assistant", "content": text}], after, figures
        except VisMoEError as error:
            raise gr.Error(html.escape(str(error)), duration=None, print_exception=False) from error

    def stop(request: gr.Request) -> None:
        page.stop(str(request.session_hash))

    def forget(request: gr.Request) -> tuple[Any, ...]:
        page.leave(str(request.session_hash))
        return [], [], tiles(None, None)

    with gr.Blocks(title="VisMoE", fill_height=True, analytics_enabled=False) as blocks:
        history = gr.State([])
        with gr.Row(scale=1):
            with gr.Column(scale=3):
                chatbot = gr.Chatbot(
                    show_label=False,
                    scale=1,
                    height="65vh",
                    feedback_options=None,
                    buttons=["copy"],
                    placeholder="Drop an image and ask.",
                )
                box = gr.MultimodalTextbox(
                    show_label=False,
                    file_types=["image"],
                    file_count="multiple",
                    placeholder="Ask about an image",
                    autofocus=True,
                )
                with gr.Row():
                    stop_button = gr.Button("Stop", size="sm")
                    reset_button = gr.Button("New conversation", size="sm")
                if found := examples():
                    gr.Examples([[example] for example in found], [box], label="Bundled pictures")
            with gr.Column(scale=1, min_width=320):
                gr.Markdown(f"**VisMoE** · {model_title(page.engine.name)}")
                keep = gr.Slider(
                    0.1,
                    1.0,
                    page.engine.settings.keep,
                    step=0.05,
                    label="Visual tokens kept",
                    info="Fewer need fewer experts; 1 is exact",
                    visible=page.engine.can_prune,
                )
                figures = gr.HTML(tiles(None, None))
        with gr.Accordion("Memory plan", open=False):
            backends = "\n".join(f"{name}: {choice}" for name, choice in page.engine.backends.items())
            plan = html.escape(page.engine.plan.table() + "\n\n" + backends)
            gr.HTML(f'<div class="plan"><pre>{plan}</pre></div>')
        box.submit(ask, [box, chatbot, history, keep], [box, chatbot, history, figures], concurrency_limit=1, api_name="ask")
        stop_button.click(stop, queue=False, api_name="stop")
        gr.on(
            [reset_button.click, chatbot.clear],
            forget,
            None,
            [chatbot, history, figures],
            concurrency_limit=None,
            api_name="reset",
        )
    return blocks


def serve(engine: Engine, port: int, *, max_tokens: int = 256, image_tokens: tuple[int, int] | None = None) -> int:
    """Serves the page on this machine until Ctrl-C; raises ConfigError when the port is taken."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # gradio asks itself whether it is up
    blocks = build(Page(engine, max_tokens, image_tokens))
    try:
        blocks.launch(
            server_name=ADDRESS,
            server_port=port,
            prevent_thread_lock=True,
            share=False,
            quiet=True,
            css=STYLE,
            footer_links=[],
            max_file_size="64mb",
            allowed_paths=[str(pictures_folder())],
        )
    except OSError as error:
        raise ConfigError(f"port {port} of {ADDRESS} cannot be used ({error}). Fix: --port {port + 1}") from error
    print(f"VisMoE is at http://{ADDRESS}:{port} (this machine only); Ctrl-C stops it")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print("\nstopped")
    finally:
        blocks.close()
    return 0
