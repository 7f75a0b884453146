"""The view of the chat page where its model is chosen: what this machine has, the models, their plan before loading, and Load.

`model_tab` makes the widgets; `connect_models` connects them, and lets every open page follow what is loaded. gradio is imported
inside functions.
"""

import functools
from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from vismoe.app.choosing import VISION, Catalog, ModelChoice, Proposal, fix_of, machine_words, offered_formats
from vismoe.app.loaded import Loader, LoadState
from vismoe.app.memory_view import memory_plan
from vismoe.app.widgets import NOT_YET, PAIRS, POLICIES, PRECISIONS, at_start, choices_of, fitting
from vismoe.config import Settings, format_bytes
from vismoe.errors import BusyError, VisMoEError
from vismoe.pair import Format

if TYPE_CHECKING:
    import gradio as gr

OTHER = ""  # the value of the list's last entry
AUTO, SIZE = "auto", "size"
FOLLOW_S = 1.0  # between two looks of a page at what is loaded
WHOLE = {"auto": "unchanged"} | {str(one): f"{PRECISIONS[one]}, all of them" for one in Format if not one.exact}
CHOOSE = '<p class="vm-note">Choose a model; its plan appears here before anything is loaded.</p>'
CONTROLS = ("model", "other", "kind", "size", "policy", "formats", "context")


def model_tab(catalog: Catalog) -> dict[str, Any]:
    """The widgets, by name."""
    import gradio as gr

    memory, context = catalog.usual.get("memory", AUTO), catalog.usual.get("context", Settings.context)
    given = catalog.given.name if catalog.given is not None else None
    gr.HTML(lambda: f'<p class="vm-note">This machine: {escape(machine_words())}</p>', elem_id="here")
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            models = gr.Radio(_entries(catalog), value=given, label="Models on this machine", elem_id="models")
            other = gr.Textbox(
                label="Another model",
                info="A folder, a .gguf file or a name on the hub, e.g. Qwen/Qwen3-VL-30B-A3B-Instruct. Enter shows its plan.",
                elem_id="other",
            )
        with gr.Column(scale=3, min_width=320):
            status = gr.HTML("", elem_id="status")
            with gr.Group():
                kinds = [("As much as is free and needed", AUTO), ("At most a size", SIZE)]
                kind = gr.Radio(kinds, value=AUTO if memory == AUTO else SIZE, label="Memory", elem_id="memory")
                size = gr.Textbox(
                    "" if memory == AUTO else str(memory),
                    label="Size",
                    info="Such as 8GiB, or a share of the experts such as 25%. Enter shows the plan.",
                    elem_id="size",
                )
            with gr.Accordion("More", open=False):
                policies, kinds_of = precision_of(catalog.usual)
                policy = gr.Dropdown(
                    **policies,
                    label="Precision of experts",
                    info="Experts are the parts of the model that are loaded as needed. Others than the first need vismoe pack.",
                    elem_id="load-policy",
                )
                formats = gr.Dropdown(**kinds_of, label="Their bits", elem_id="load-formats")
                context = gr.Number(
                    context,
                    precision=0,
                    minimum=1,
                    label="Longest conversation",
                    info="In tokens, question and answer together. A longer one takes more memory.",
                    elem_id="context",
                )
            with gr.Row():
                load = gr.Button("Load", variant="primary", interactive=False, elem_id="load")
                mend = gr.Button("Use what fits", visible=False, elem_id="mend")
                earlier = gr.Button("Load the earlier model again", visible=False, elem_id="earlier")
            plan = gr.HTML(CHOOSE, elem_id="load-plan")
    return {
        "model": models, "other": other, "status": status, "kind": kind, "size": size, "policy": policy,
        "formats": formats, "context": context, "load": load, "mend": mend, "earlier": earlier, "plan": plan,
        "planned": gr.State(None), "asked": gr.State(None), "fix": gr.State(None),
    }  # fmt: skip


def _entries(catalog: Catalog) -> list[tuple[str, str]]:
    listed = [(f"{name}\n{proposal.words()}", name) for name, proposal in catalog.found.items()]
    return [*listed, ("Another model\nby its folder, or its name on the hub", OTHER)]


def precision_of(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the two controls of precision show for settings, before it is known what else can be chosen."""
    policy = settings.get("policy", "exact")
    formats = settings.get("format", AUTO) if policy == "exact" else settings.get("formats", Settings.formats)
    known = [(WHOLE.get(formats, formats), formats)] if policy == "exact" else choices_of([formats])
    return {"choices": [(POLICIES[policy], policy)], "value": policy}, {"choices": known, "value": formats}


def asked_choice(catalog: Catalog, asked: dict[str, Any]) -> ModelChoice:
    """What the controls ask for. Raises ConfigError."""
    policy, formats = asked["policy"], asked["formats"]
    chosen = catalog.choice_of(asked["other"] if asked["model"] == OTHER else asked["model"])
    return chosen.with_settings(
        memory=(asked["size"] or "").strip() if asked["kind"] == SIZE else None,
        context=int(asked["context"]) if asked["context"] else None,
        policy=policy if policy != "exact" else None,
        format=formats if policy == "exact" and formats != AUTO else None,
        formats=formats if policy != "exact" else None,
    )


def connect_models(
    loader: Loader, catalog: Catalog, view: dict[str, Any], pages: dict[str, Any], told: Any, blocks: "gr.Blocks"
) -> None:
    """Connects the view. `pages`: the widgets that show what is loaded: tabs, options and drawings; `told` draws an error."""
    import gradio as gr

    page, seen_at_first = loader.page, gr.State((loader.state.number, catalog.number))  # the page is built as it is now
    view, fits_of = {**view, "seen": seen_at_first}, functools.lru_cache(1)(lambda number: fitting(page))
    controls = {name: view[name] for name in CONTROLS}
    shown = [view[name] for name in ("asked", "policy", "formats", "load", "mend", "fix", "planned", "plan")]

    def replan(values: dict[Any, Any]) -> Iterator[list[Any]]:
        """The plan of what the controls ask for, or why there is none. The last update changes nothing: gradio sends it once more
        when the handler has ended, and by then another policy may have been chosen."""
        yield from planned(values)
        yield [gr.skip()] * len(shown)

    def planned(values: dict[Any, Any]) -> Iterator[list[Any]]:
        asked = {name: values[widget] for name, widget in controls.items()}
        named, sized = asked["model"] == OTHER, asked["kind"] == SIZE
        parts = [asked, gr.skip(), gr.skip()]
        nothing = [gr.Button("Load", interactive=False), gr.Button(visible=False), None, None]
        if asked["model"] is None or (named and not (asked["other"] or "").strip()):
            yield [*parts, *nothing, CHOOSE]
            return
        if sized and not (asked["size"] or "").strip():
            yield [*parts, *nothing, '<p class="vm-note">Write how much memory may be used, such as 8GiB.</p>']
            return
        busy = "Planning, once the answers under way have ended ..." if page.running else "Planning ..."
        yield [*parts, *nothing, f'<p class="vm-note" role="status">{busy}</p>']
        try:
            if loader.state.phase == "loading":
                raise BusyError("Another model is being loaded: plan when it is ready.")
            choice = asked_choice(catalog, asked)
            offered = offered_formats(choice.packed(), PAIRS)
            policy = asked["policy"] if asked["policy"] in offered else "exact"
            formats = asked["formats"] if asked["formats"] in offered[policy] else offered[policy][0]
            known = [(WHOLE[one], one) for one in offered["exact"]] if policy == "exact" else choices_of(offered[policy])
            parts[1:] = [
                gr.Dropdown([(POLICIES[name], name) for name in offered], value=policy, interactive=len(offered) > 1),
                gr.Dropdown(known, value=formats, interactive=len(known) > 1),
            ]
            parts[0] = asked = {**asked, "policy": policy, "formats": formats}
            choice = asked_choice(catalog, asked)
            plan = loader.plan(choice)
            button = "Load" if choice.files() else _download(choice)
        except Exception as error:  # the boundary of planning: other people's files, and the hub
            mending = fix_of(error)
            words = " and ".join(f"{name} {value}" for name, value in mending.items())
            yield [*parts, nothing[0], gr.Button(f"Use {words}", visible=bool(mending)), mending, None, told(error)]
            return
        about = Proposal(choice, 0, plan).fit()
        sees = "sees pictures" if plan.bytes_of(VISION) else "text only"
        title = f"<h3>{escape(choice.name)}</h3><p>{sees.capitalize()}. {escape(about)}</p>"
        yield [*parts, gr.Button(button, interactive=True), nothing[1], None, choice, title + memory_plan(plan, folded=True)]

    def revisit(values: dict[Any, Any]) -> Iterator[list[Any]]:
        """The same, unless it is shown already: leaving a text must not undo a click on Load."""
        if values[view["asked"]] == {name: values[widget] for name, widget in controls.items()}:
            yield [gr.skip()] * len(shown)
        else:
            yield from replan(values)

    def mend(values: dict[Any, Any]) -> list[Any]:
        fix = values[view["fix"]] or {}
        sized = [gr.Radio(value=SIZE), fix["memory"]] if "memory" in fix else [gr.skip(), gr.skip()]
        return [*sized, int(fix["context"]) if "context" in fix else gr.skip(), fix.get("formats", gr.skip())]

    def load(values: dict[Any, Any]) -> Any:
        """Loads what was planned, if that is what the controls still ask for."""
        planned = values[view["planned"]]
        if planned is None or planned != asked_choice(catalog, {name: values[widget] for name, widget in controls.items()}):
            gr.Info("The settings have changed: look at the plan, and press Load again.", title="Not loaded")
            return
        begin(planned)

    def begin(choice: ModelChoice) -> None:
        try:
            loader.begin(choice)
        except BusyError as error:
            gr.Info(escape(str(error)), title="One at a time")

    def again() -> None:
        if loader.state.earlier is not None:
            begin(loader.state.earlier)

    def look() -> None:
        catalog.look(loader.plan)

    def enter(seen: tuple[int, int]) -> list[Any]:
        if page.engine is None:  # otherwise planning would slow down answers that have nothing to do with it
            look()
        return follow(seen)

    def follow(seen: tuple[int, int]) -> list[Any]:
        """What has changed since the page has seen it."""
        state, news = loader.state, [gr.skip()] * len(following)
        now = (state.number, catalog.number)
        if seen[1] != now[1]:
            news[1] = gr.Radio(_entries(catalog))
        if state.phase == "loading":
            news[len(CONTROLS) + 1] = _loading(state, loader.progress())
        if seen[0] != now[0]:
            news[len(CONTROLS) + 1 :] = _of_state(loader, state, told, fits_of(state.number))
            if state.phase in ("ready", "failed") and state.choice is not None:
                news[1 : len(CONTROLS) + 1] = _controls(catalog, state.choice)
        if seen != now:
            news[0] = now
        return news

    following = [view[name] for name in ("seen", *CONTROLS, "status", "load", "earlier")]
    following += [pages[name] for name in ("tabs", "chat", "machine", "change", "head", "heat", "plan", "backends", "pairs")]
    following += [pages["options"][name] for name in fits_of(loader.state.number)[1]]
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_name": False}
    plans = [view["model"].input, view["kind"].input, view["policy"].input, view["formats"].input]
    plans += [view[name].submit for name in ("other", "size", "context")]
    planning = {
        "outputs": shown,
        "trigger_mode": "always_last",
        "concurrency_id": "plan",
        "inputs": {view["asked"], *controls.values()},
        **quiet,
    }
    gr.on(plans, replan, **planning)
    gr.on([view[name].blur for name in ("other", "size", "context")], revisit, **planning)
    mending = view["mend"].click(mend, {view["fix"]}, [view[name] for name in ("kind", "size", "context", "formats")], **quiet)
    mending.then(replan, **planning)
    view["load"].click(load, {view["planned"], *controls.values()}, None, **quiet)
    view["earlier"].click(again, None, None, **quiet)
    pages["change"].click(lambda: gr.Tabs(selected="models"), None, pages["tabs"], queue=False, **quiet)
    pages["models"].select(look, None, None, **quiet).then(revisit, **planning)  # also where the button has chosen the tab
    blocks.load(enter, view["seen"], following, queue=False, **quiet)
    gr.Timer(FOLLOW_S).tick(follow, view["seen"], following, queue=False, **quiet)


def _controls(catalog: Catalog, choice: ModelChoice) -> list[Any]:
    """The controls as they stand for a choice."""
    import gradio as gr

    memory, listed = choice.settings.get("memory", AUTO), choice.name in catalog.found
    return [
        gr.Radio(_entries(catalog), value=choice.name if listed else OTHER),
        "" if listed else choice.model,
        gr.Radio(value=AUTO if memory == AUTO else SIZE),
        "" if memory == AUTO else str(memory),
        *(gr.update(**control) for control in precision_of(choice.settings)),
        choice.settings.get("context", Settings.context),
    ]


def _download(choice: ModelChoice) -> str:
    nbytes = choice.download_bytes()
    return f"Download {format_bytes(nbytes) if nbytes else '(the hub does not say how much)'} and load"


def _loading(state: LoadState, progress: str) -> str:
    assert state.choice is not None
    return f'<p class="vm-loading" role="status">Loading {escape(state.choice.name)}: {escape(progress)}</p>'


def _of_state(loader: Loader, state: LoadState, told: Any, fits: tuple[str, dict[str, Any]]) -> list[Any]:
    """Values of the widgets that show what is loaded, from the status line on."""
    import gradio as gr

    page, ready, status = loader.page, state.phase == "ready", ""
    if state.phase == "loading":
        status = _loading(state, loader.progress())
    elif state.phase == "failed":
        status = told(VisMoEError(f"{state.choice.name if state.choice else 'The model'} was not loaded: {state.error}"))
    again = state.phase == "failed" and state.earlier is not None
    earlier = gr.Button(f"Load {state.earlier.name} again" if again and state.earlier else "", visible=again)
    load = gr.Button(interactive=False) if state.phase == "loading" else gr.skip()
    return [
        status, load, earlier, gr.Tabs(selected="chat" if ready else "models"), gr.Tab(visible=ready), gr.Tab(visible=ready),
        gr.Button(visible=ready), page.head(), page.heat() if ready else NOT_YET, *at_start(page), fits[0],
        *(gr.update(**change) for change in fits[1].values()),
    ]  # fmt: skip
