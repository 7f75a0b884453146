"""What a request may ask for: one frozen definition for Python, the command line, the page, the server and lmms-eval."""

import inspect
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from vismoe.config import SETTINGS, DraftName, Kept, Pair, PolicyName, Retention, Selection, Tokens
from vismoe.errors import InputError
from vismoe.ranges import Range, option, rules_of

Method = TypeVar("Method", bound=Callable[..., Any])

INT64 = 2**63
MOST_STOPS = 4
COLDEST, HOTTEST = 1e-9, 2  # of a temperature: logits divided by less than that may be infinite
OF_IMAGES = ("image_tokens", "keep", "selection")
OF_CHAT = (*OF_IMAGES, "reasoning", "reasoning_tokens")  # options that a text alone has not
AS_LOADED = "; None: as the engine was loaded"

AnswerTokens = Annotated[int, Range(1, INT64 - 1, "tokens")]
Seed = Annotated[int, Range(-INT64, INT64 - 1)]
StopText = Annotated[str, Range(1, 1000, "characters")]
ReasoningEffort = Literal["none", "low", "medium", "high"]
GrammarText = Annotated[str, Range(1, 100_000, "characters")]


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What one request asks for beside its conversation or text. Raises InputError for what cannot be, ConfigError where that is
    the policy, its formats or its retention."""

    max_tokens: AnswerTokens | None = option(
        None, "length of an answer, where nothing else says it (default: to the end of the planned context)", "N"
    )
    sample: bool = option(False, "sample as the model's generation config says (default: greedy)")
    temperature: Annotated[float, Range(COLDEST, HOTTEST)] | None = option(None, "of sampling, in place of the model's own")
    top_p: Kept | None = option(None, "of sampling, in place of the model's own")
    seed: Seed | None = option(None, "makes sampling repeatable", "S")
    stop: StopText | Annotated[Sequence[StopText], Range(0, MOST_STOPS)] = option((), "the answer ends before any of these texts")
    json_schema: GrammarText | None = option(None, "the answer is JSON that follows this schema (a flag: or @FILE)", "SCHEMA")
    grammar: GrammarText | None = option(None, "the answer follows this grammar, in llguidance's Lark", "GRAMMAR")
    reasoning: ReasoningEffort | None = option(None, "how much the model thinks before its answer (default: its template's)")
    reasoning_tokens: Tokens | None = option(None, "it thinks so long at most", "N")
    image_tokens: tuple[Tokens, Tokens] | None = option(None, "visual tokens for each image", "MIN..MAX")
    keep: Kept | None = option(None, SETTINGS["keep"].meaning + AS_LOADED)
    selection: Selection | None = option(None, "which visual tokens are kept" + AS_LOADED)
    reuse: bool = option(False, "take over keys and values of an earlier request that began the same way, and leave this one's")
    policy: PolicyName | None = option(None, SETTINGS["policy"].meaning + AS_LOADED)
    formats: Pair | None = option(None, SETTINGS["formats"].meaning + AS_LOADED)
    retention: Retention | None = option(None, SETTINGS["retention"].meaning + AS_LOADED)
    draft: DraftName | None = option(None, "what guesses the next tokens, none among it, of what was loaded" + AS_LOADED)

    def __post_init__(self) -> None:
        own: Any = type(self)
        for name, rule in rules_of(own).items():
            value = getattr(self, name)
            if name not in ("policy", "formats", "retention", "draft"):
                rule.check(value, InputError)
            elif value is not None:
                SETTINGS[name].check(value)
        if not self.sample and (self.temperature is not None or self.top_p is not None):
            raise InputError(
                f"temperature={self.temperature}, top_p={self.top_p} with sample=False, which is greedy. Fix: sample=True"
            )
        if self.json_schema is not None and self.grammar is not None:
            raise InputError("json_schema and grammar: an answer follows one of them. Fix: leave one out")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))

    def for_generate(self, max_new_tokens: int) -> dict[str, Any]:
        """How tokens are chosen, as keyword arguments of transformers' generate."""
        if not self.sample:
            return {"max_new_tokens": max_new_tokens, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        given = {"temperature": self.temperature, "top_p": self.top_p}
        chosen = {name: float(value) for name, value in given.items() if value is not None}
        return {"max_new_tokens": max_new_tokens, "do_sample": True, **chosen}


OPTIONS = rules_of(RequestOptions)  # what each can be


def by_name(names: Collection[str]) -> Callable[[Method], Method]:
    """For methods that take options by name, after all others: lets signature and docstring show them."""
    fields = inspect.signature(RequestOptions).parameters.values()
    hints = typing.get_type_hints(RequestOptions)
    shown = [field.replace(annotation=hints[field.name]) for field in fields if field.name in names]
    meanings = "".join(f"\n        {field.name}: {OPTIONS[field.name].meaning}" for field in shown)

    def show(ask: Method) -> Method:
        own = inspect.signature(ask)
        *first, _ = own.parameters.values()
        ask.__signature__ = own.replace(parameters=[*first, *shown])  # type: ignore[attr-defined]
        ask.__doc__ = f"{ask.__doc__}\n\n        options: a RequestOptions, and fields of it by name.{meanings}"
        return ask

    return show
