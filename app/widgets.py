"""The widgets of the chat page with their initial content; `ui` connects them. gradio is imported inside functions."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vismoe.app.memory_view import backends_table, memory_plan
from vismoe.app.page import NO_MODEL, Page, tiles
from vismoe.app.pictures import NO_IMAGE
from vismoe.config import SETTINGS, Settings, parse_formats
from vismoe.engine.engine import Engine, demo_model
from vismoe.options import HOTTEST, OPTIONS
from vismoe.pair import Format

if TYPE_CHECKING:
    import gradio as gr

EXAMPLES = 4
LEAST_KEEP = 0.1
MOST_SYSTEM = 20000  # characters of a system prompt
MOST_TOKENS = 2048  # limit of the slider, unless the planned context is smaller
PAIRS = ("lossless/int8", "16/4", "16/2", "8/4", "8/2", "4/2", "4/0")  # offered on the page, beside the pair of the start
WORDS = {  # label and explanation of each setting
    "max_tokens": ("Longest answer", "In tokens, which are words or parts of words. 0: as long as the planned context allows."),
    "temperature": ("Temperature", "0 always takes the likeliest word, so answers repeat; larger values add randomness."),
    "system": ("System prompt", "Instructions for the whole conversation, such as: Answer in one sentence."),
    "top_p": (
        "Top-p",
        "With a temperature above 0: draw from the likeliest words that have this share together. 0: the model's own value.",
    ),
    "seed": ("Seed", "With a temperature above 0: the same number repeats an answer. 0: another answer each time."),
    "keep": ("Picture detail", "The share of each picture that the model goes on looking at. Less is faster; 1 keeps all of it."),
    "selection": ("Parts of a picture to keep", "Used with a picture detail below 1. Compare them on the same picture."),
    "policy": ("Precision of experts", "Experts are the parts of the model that are loaded as needed. Fewer bits load faster."),
    "formats": ("The two precisions", "More bits give better answers, fewer bits are faster. Listed is what is packed and fits."),
    "retention": ("Share in the better precision", "Of the experts that a question needs. More is better and slower."),
    "draft": (
        "Guess ahead",
        "Guesses the next words and checks several at once. The answer stays the same; texts that repeat get faster.",
    ),
}
POLICIES = {
    "exact": "the same for all",
    "hotness": "better where often used",
    "importance": "better where the question needs it",
    "hotness+importance": "better where often used or needed",
}
SELECTIONS = {
    "affinity": "that need few further experts (affinity)",
    "saliency": "that draw attention (saliency)",
    "distinct": "that differ from the rest (distinct)",
    "visionzip": "that draw attention, and a summary (visionzip)",
    "uniform": "an even grid (uniform)",
    "random": "by chance (random)",
}
DRAFTS = {
    "none": "no", "ngram": "from the text so far", "self": "with a smaller copy of the model",
    "mtp": "by the layer trained for it", "auto": "what pays",
}  # fmt: skip
PRECISIONS = {
    Format.LOSSLESS: "lossless", Format.RAW: "unchanged", Format.INT8: "8 bit", Format.INT4: "4 bit", Format.INT2: "2 bit",
    None: "left out",
}  # fmt: skip
ACTIONS = {"rename": "Rename", "delete": "Delete", "markdown": "Save as Markdown", "json": "Save as JSON"}
SHELF = (  # ui_conversations.js fills it
    '<details><summary>Conversations</summary><nav aria-label="Conversations"><ul></ul></nav><div class="vm-actions">'
    + "".join(f'<button data-action="{action}" disabled>{name}</button>' for action, name in ACTIONS.items())
    + '</div><p class="vm-error" role="alert"></p></details>'
)
NOT_YET = '<p class="vm-note">Ask something; this appears with the answer.</p>'


def pictures_folder() -> Path:
    return demo_model().parent / "images"


def examples() -> list[dict[str, Any]]:
    """Bundled pictures with a question each."""
    folder = pictures_folder()
    pictures = json.loads((folder / "pictures.json").read_text())
    return [{"text": about["question"], "files": [str(folder / name)]} for name, about in list(pictures.items())[:EXAMPLES]]


def chat_tab(page: Page) -> dict[str, Any]:
    import gradio as gr

    widgets: dict[str, Any] = {"history": gr.State(()), "number": gr.State("")}
    with gr.Row():
        with gr.Column(scale=1, min_width=200):
            made = "vismoe.conversations(element, props, record => trigger('restore', record), watch)"
            widgets["shelf"] = gr.HTML("", html_template=SHELF, js_on_load=made, padding=False, elem_id="shelf")
        with gr.Column(scale=4, min_width=320):
            widgets["chatbot"] = gr.Chatbot(
                label="Conversation",
                show_label=False,
                height="62vh",
                min_height=320,
                feedback_options=None,
                buttons=["copy"],
                editable="user",
                group_consecutive_messages=False,  # a picture and its question in one bubble could not be edited
                latex_delimiters=[],
                allow_tags=False,
                allow_file_downloads=False,
                placeholder="### Drop an image and ask\nor begin with one of these",
                examples=examples(),
                elem_id="conversation",
            )
            widgets["notice"] = gr.HTML("", elem_id="notice")
            refused = '<div id="refused" class="vm-error" role="alert"></div>'  # ui.js writes there
            gr.HTML("", html_template=refused, padding=False)
            widgets["box"] = gr.MultimodalTextbox(
                label="Your question",
                show_label=False,
                file_count="multiple",
                placeholder="Drop an image here, and ask",
                autofocus=True,
                max_plain_text_length=20000,
                elem_id="question",
            )
            with gr.Row():
                widgets["again"] = gr.Button("Answer again", size="sm", min_width=120, interactive=False, elem_id="again")
                widgets["forget"] = gr.Button("New conversation", size="sm", min_width=120, elem_id="forget")
        with gr.Column(scale=1, min_width=280):
            widgets["offers"], widgets["options"] = _settings(page)
            widgets["tiles"] = gr.HTML(tiles())
    return widgets


def theme_switch() -> None:
    import gradio as gr

    names = {"system": "Theme: as the system", "light": "Theme: light", "dark": "Theme: dark"}
    options = "".join(f'<option value="{value}">{name}</option>' for value, name in names.items())
    gr.HTML(
        f'<select id="theme" aria-label="Theme">{options}</select>', js_on_load="vismoe.paint()", min_width=190, elem_id="switch"
    )


def _settings(page: Page) -> tuple["gr.Textbox", dict[str, Any]]:
    """(what the policies can choose from, for `FORMATS_OF`; settings from the next question on, by the names of `RequestOptions`,
    and the system prompt)."""
    import gradio as gr

    words = {name: {"label": label, "info": info, "elem_id": name.replace("_", "-")} for name, (label, info) in WORDS.items()}
    pairs, fits = fitting(page)
    kinds = {"keep": gr.Slider, "retention": gr.Slider}
    widgets: dict[str, Any] = {
        "max_tokens": gr.Slider(step=1, **fits["max_tokens"], **words["max_tokens"]),
        "temperature": gr.Slider(0, HOTTEST, 0, step=0.1, **words["temperature"]),
    }
    with gr.Accordion("More", open=False):
        widgets["system"] = gr.Textbox(lines=3, max_length=MOST_SYSTEM, **words["system"])
        widgets["top_p"] = gr.Slider(0, 1, page.options.top_p or 0, step=0.05, **words["top_p"])
        widgets["seed"] = gr.Number(page.options.seed or 0, precision=0, **words["seed"])
    with gr.Accordion("Quality and speed", open=False, **fits["fold"]) as widgets["fold"]:
        for name in ("keep", "selection", "policy", "formats", "retention", "draft"):
            further = {"step": 0.05} if name in kinds else {}
            widgets[name] = kinds.get(name, gr.Dropdown)(**further, **fits[name], **words[name])
    return gr.Textbox(pairs, visible="hidden", label="Formats of the policies"), widgets


def fitting(page: Page) -> tuple[str, dict[str, dict[str, Any]]]:
    """(the formats of each policy as JSON, what the widgets of settings show for the loaded model, by name). What cannot work is
    hidden."""
    engine, usual = page.engine, page.options
    settings, longest = engine.settings if engine is not None else Settings(), usual.max_tokens or 0
    can_prune, drafted = (engine.can_prune, engine.drafts) if engine is not None else (False, (settings.draft,))
    offered, context = (offers(engine), engine.plan.context) if engine is not None else ({"exact": []}, settings.context)
    drafts = [(DRAFTS[name], name) for name in drafted]
    retention = SETTINGS["retention"].range
    first = "automatic" if settings.selection == "auto" else SELECTIONS[settings.selection]
    selections = [(first, ""), *((SELECTIONS[name], name) for name in OPTIONS["selection"].choices)]
    pairs = choices_of(list(dict.fromkeys([settings.formats, *(pair for pairs in offered.values() for pair in pairs)])))
    policy, pruned = settings.policy, {"visible": can_prune}
    return json.dumps({name: choices_of(pairs) for name, pairs in offered.items()}), {
        "max_tokens": {"minimum": 0, "maximum": max(longest, min(MOST_TOKENS, context)), "value": longest},
        "fold": {"visible": can_prune or len(offered) > 1 or len(drafts) > 1},
        "keep": {"minimum": min(LEAST_KEEP, settings.keep), "maximum": 1.0, "value": settings.keep, **pruned},
        "selection": {"choices": selections, "value": "", **pruned},
        "policy": {"choices": [(POLICIES[one], one) for one in offered], "value": policy, "visible": len(offered) > 1},
        "formats": {"choices": pairs, "value": settings.formats, "visible": bool(offered[policy])},
        "retention": {
            "minimum": retention.low, "maximum": retention.high, "value": settings.retention, "visible": "importance" in policy
        },
        "draft": {"choices": drafts, "value": settings.draft, "visible": len(drafts) > 1},
    }  # fmt: skip


def choices_of(pairs: list[str]) -> list[tuple[str, str]]:
    """Pairs of formats with words for them."""
    parsed = [(pair, parse_formats(pair)) for pair in pairs]
    return [(f"{PRECISIONS[both.high]}, the rest {PRECISIONS[both.low]}", pair) for pair, both in parsed]


def offers(engine: Engine) -> dict[str, list[str]]:
    """The policies that can serve here, each with the pairs of formats that are packed and fit in memory."""
    pairs = list(dict.fromkeys((*PAIRS, engine.settings.formats)))
    policies = [policy for policy in SETTINGS["policy"].choices if policy != "exact"]
    served = {policy: [pair for pair in pairs if engine.why_not(policy, pair) is None] for policy in policies}
    return {"exact": [], **{policy: pairs for policy, pairs in served.items() if pairs}}


# A function for the browser: the policy, the formats chosen so far and the first of what `fitting` returns -> the choices of
# formats under this policy, and which of formats and retention are shown. It runs in the browser because gradio refuses a value
# that the server's list of choices no longer has: had the server changed its list, each request sent before its answer arrived
# would fail.
FORMATS_OF = (
    "(policy, chosen, offered) => {"
    "const pairs = JSON.parse(offered)[policy], known = pairs.some(([_, pair]) => pair === chosen);"
    "const formats = pairs.length ? {choices: pairs, value: known ? chosen : pairs[0][1]} : {};"
    "return [{__type__: 'update', ...formats, visible: pairs.length > 0},"
    " {__type__: 'update', visible: policy.includes('importance')}];"
    "}"
)


def machine_tab(page: Page) -> dict[str, Any]:
    """The widgets that `PageUpdate` fills, and the settings of the start."""
    import gradio as gr

    widgets = {"live": _panel("Now", "For the current answer, or the last one.", tiles())}
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            widgets["pictures"] = _panel("Images", "Bright patches were kept, dim ones dropped.", NO_IMAGE)
        with gr.Column(scale=3, min_width=300):
            what = "From the question to the last word. Point at a bar to see its numbers."
            widgets["time_line"] = _panel("Time line of the answer", what, NOT_YET)
            what = "A hit is an expert that was in memory when it was needed; a miss had to be fetched first."
            widgets["tiers"] = _panel("Where the experts came from", what, NOT_YET)
    what = "Each row is a layer, each cell one of its experts. Colours show hits and misses since the question."
    widgets["heat"] = _panel("Experts, layer by layer", what, page.heat())
    plan, backends = at_start(page)
    with gr.Accordion("Memory plan", open=False):
        widgets["plan"] = gr.HTML(plan)
    with gr.Accordion("Choices at start, with reasons", open=False):
        widgets["backends"] = gr.HTML(backends)
    return widgets


def at_start(page: Page) -> tuple[str, str]:
    """HTML of the loaded model's plan, and of the choices that were made when it was loaded."""
    engine = page.engine
    return (memory_plan(engine.plan), backends_table(engine.backends)) if engine is not None else (NO_MODEL, NO_MODEL)


def _panel(title: str, what: str, value: str) -> "gr.HTML":
    import gradio as gr

    above = f'<h3>{title}</h3><p class="vm-note">{what}</p>'
    return gr.HTML(value, html_template=above + "${value}", elem_classes="vm-panel")
