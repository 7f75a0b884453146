"""What a request may ask for: one frozen definition for Python, the command line, the page, the server and lmms-eval."""

import inspect
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from vismoe.config import MOST_TOKENS, SETTINGS, DraftName, Kept, Pair, PolicyName, Retention, Selection, Tokens
from vismoe.errors import ConfigError, InputError
from vismoe.ranges import Range, Read, option, rules_of, shown

Method = TypeVar("Method", bound=Callable[..., Any])

INT64 = 2**63
MOST_STOPS = 4
COLDEST, HOTTEST = 1e-9, 2  # of a temperature: logits divided by less than that may be infinite
MOST_BIAS = 100  # of a token, up or down
MOST_TOP = 20  # tokens looked up beside each one of an answer
OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p")  # options that greedy decoding has not
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
OF_IMAGES = ("image_tokens", "keep", "selection")
OF_CHAT = (*OF_IMAGES, "reasoning", "reasoning_tokens")  # options that a text alone has not
AS_LOADED = "; None: as the engine was loaded"

AnswerTokens = Annotated[int, Range(1, INT64 - 1, "tokens")]
Seed = Annotated[int, Range(-INT64, INT64 - 1)]
StopText = Annotated[str, Range(1, 1000, "characters")]
ReasoningEffort = Literal["none", "low", "medium", "high"]
GrammarText = Annotated[str, Range(1, 100_000, "characters")]
TopK = Annotated[int, Range(0, MOST_TOKENS)]
MinP = Annotated[float, Range(0, 1)]
RepetitionPenalty = Annotated[float, Range(0.01, 100)]
Penalty = Annotated[float, Range(-2, 2)]
Bias = Annotated[float, Range(-MOST_BIAS, MOST_BIAS)]


def _refuse_other_biases(given: Mapping[int, float]) -> None:
    for token, bias in given.items():
        if type(token) is not int or token < 0 or type(bias) not in (int, float) or not -MOST_BIAS <= bias <= MOST_BIAS:
            raise ConfigError(f"logit_bias has {shown(token)}: {shown(bias)}; {BIASES}")


BIASES = f"numbers from -{MOST_BIAS} to {MOST_BIAS} by the ids of tokens"


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What one request asks for beside its conversation or text. Raises InputError for what cannot be, ConfigError where that is
    the policy, its formats or its retention."""

    max_tokens: AnswerTokens | None = option(
        None, "length of an answer, where nothing else says it (default: to the end of the planned context)", "N"
    )
    sample: bool = option(False, "sample as the model's generation config says (default: greedy)")
    temperature: Annotated[float, Range(COLDEST, HOTTEST)] | None = option(None, "of sampling, in place of the model's own", "T")
    top_p: Kept | None = option(None, "of sampling, in place of the model's own", "P")
    top_k: TopK | None = option(None, "sample from so many tokens, the most likely ones; 0: from all", "K")
    min_p: MinP | None = option(None, "sample from tokens at least so likely, as a share of the most likely one", "P")
    repetition_penalty: RepetitionPenalty | None = option(
        None, "divide the logits of tokens that prompt or answer have; above 1: fewer repetitions", "X"
    )
    presence_penalty: Penalty | None = option(None, "taken off the logits of tokens that the answer has", "X")
    frequency_penalty: Penalty | None = option(None, "the same, for each time that the answer has them", "X")
    logit_bias: Annotated[Mapping[int, float], Read(_refuse_other_biases, BIASES)] | None = option(
        None, "added to the logits of tokens, by their ids"
    )
    logprobs: Annotated[int, Range(0, MOST_TOP)] | None = option(
        None, "log probabilities of the answer's tokens, and of so many of the most likely ones at each place", "N"
    )
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
        given = [f"{name}={value}" for name in OF_SAMPLING if (value := getattr(self, name)) is not None]
        if given and not self.sample:
            raise InputError(f"{', '.join(given)} with sample=False, which is greedy. Fix: sample=True")
        if self.json_schema is not None and self.grammar is not None:
            raise InputError("json_schema and grammar: an answer follows one of them. Fix: leave one out")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))

    def for_generate(self, max_new_tokens: int) -> dict[str, Any]:
        """How tokens are chosen, as keyword arguments of transformers' generate."""
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": self.sample}
        values = {name: getattr(self, name) for name in (*OF_SAMPLING, "repetition_penalty")}
        how |= {name: value if name == "top_k" else float(value) for name, value in values.items() if value is not None}
        if not self.sample:
            how |= dict.fromkeys(OF_SAMPLING)
        if self.logit_bias:
            how["sequence_bias"] = [[[token], float(bias)] for token, bias in self.logit_bias.items()]
        return how


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
