"""Answers that follow a JSON schema or a grammar: other tokens get no chance (constrained decoding, by llguidance)."""

import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from vismoe.errors import ConfigError, InputError
from vismoe.models.inputs.responses import Spoken
from vismoe.models.inputs.tools import Tools
from vismoe.options import RequestOptions

SPACES = r"( |\n {0,8})?"  # between the parts of a JSON text: a model that is unsure may otherwise go on with spaces for good


class Grammars:
    """Of one engine: its vocabulary as grammars need it, made at the first request that has one."""

    def __init__(self, model: Any, tokenizer: Any):
        self._tokenizer, self._vocabulary = tokenizer, model.config.get_text_config().vocab_size
        ends = model.generation_config.eos_token_id
        self._ends: list[int] = ends if isinstance(ends, list) else [] if ends is None else [ends]
        self._lock = threading.Lock()
        self._known: Any = None  # llguidance's tokenizer

    def mask_of(self, options: RequestOptions) -> "GrammarMask | None":
        """Of one answer; None: it may be any text.

        Raises InputError for a schema or grammar that cannot be followed, ConfigError where none can.
        """
        if options.json_schema is options.grammar is None:
            return None
        matchers, name = self._matchers(), "json_schema" if options.grammar is None else "grammar"
        try:
            if options.grammar is None:
                grammar = matchers.grammar_from_json_schema(options.json_schema, overrides={"whitespace_pattern": SPACES})
            else:
                grammar = matchers.grammar_from_lark(options.grammar)
        except ValueError as error:
            raise InputError(f"{name}: {error}. Fix: a JSON object that is a schema, as text") from error
        return self._mask(matchers(self._known, grammar), name)

    def mask_of_calls(self, spoken: Spoken | None, tools: Tools) -> "GrammarMask":
        """Of an answer that must call one of these. Raises InputError, ConfigError."""
        if spoken is None:
            raise InputError(f"tool_choice={tools.choice!r}: how this model writes calls is not known. Fix: leave tools out")
        grammar = spoken.grammar(tools, self._tokenizer)
        matchers = self._matchers()
        return self._mask(matchers(self._known, matchers.grammar_from_lark(grammar)), "tools")

    def _mask(self, matcher: Any, name: str) -> "GrammarMask":
        if matcher.is_error():
            first = matcher.get_error().partition("<backtrace>")[0].partition("\n" if name == "tools" else "\0")[0]
            why = " ".join(first.split())[:500]
            raise InputError(f"{name}: {why}. Fix: write it without that (docs/serving.md)")
        return GrammarMask(matcher, self._ends)

    def _matchers(self) -> Any:
        """llguidance's class, once it knows the vocabulary."""
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ConfigError(
                "json_schema and grammar need llguidance, which is not installed. Fix: pip install 'vismoe[serve]'"
            ) from error
        with self._lock:
            if self._known is None:
                size, end = max(self._vocabulary, len(self._tokenizer)), self._ends[0] if self._ends else None
                try:
                    self._known = from_tokenizer(self._tokenizer, n_vocab=size, eos_token=end)
                except ValueError as error:  # it is not made of merged bytes or pieces
                    raise ConfigError(
                        f"json_schema and grammar: llguidance cannot read this model's tokenizer ({error}). Fix: leave them out, "
                        "and say in the prompt what form the answer shall have"
                    ) from error
        return LLMatcher


class Thought:
    """The reasoning at the beginning of an answer, between these texts. opened: the prompt has its beginning."""

    def __init__(self, tokenizer: Any, opening: str, closing: str, opened: bool):
        self._tokenizer, self._opening, self._closing, self._opened = tokenizer, opening, closing, opened
        self.closers: list[int] = tokenizer.encode(closing, add_special_tokens=False)
        self._end: int | None = None

    def begins(self, said: Sequence[int]) -> bool:
        """Whether these tokens begin with reasoning."""
        return self._opened or self._tokenizer.decode(said[: 2 * len(self._opening)]).lstrip().startswith(self._opening)

    def restart(self) -> None:
        """For an answer from its beginning."""
        self._end = None

    def end(self, said: Sequence[int]) -> int | None:
        """How many of these tokens it has, its closing text included; None: it goes on. Asked at every token."""
        if self._end is not None and (self._end > len(said) or not self._closes(said[: self._end])):
            self._end = None
        if self._end is None and self._closes(said):
            self._end = len(said)
        return self._end

    def _closes(self, said: Sequence[int]) -> bool:
        return self._closing in self._tokenizer.decode(said[-2 * len(self._closing) :])


class ReasoningLimit(LogitsProcessor):
    """Ends the reasoning of an answer behind so many tokens: then only its closing text has a chance."""

    def __init__(self, thought: Thought, most: int):
        self._thought, self._most, self._prompt_tokens = thought, most, -1

    def restart(self) -> "ReasoningLimit":
        """For an answer from its beginning."""
        self._prompt_tokens = -1
        self._thought.restart()
        return self

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids int64 `[1, S]`, scores float32 `[1, V]`."""
        if self._prompt_tokens < 0:
            self._prompt_tokens = input_ids.shape[1]
        said = input_ids[0, self._prompt_tokens :].tolist()
        place, ended = len(said) - self._most, self._thought.end(said) is not None
        if ended or not 0 <= place < len(self._thought.closers) or not self._thought.begins(said):
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._thought.closers[place]] = 0
        return forced


class GrammarMask(LogitsProcessor):
    """Leaves a chance to the tokens with which an answer can go on. The answer begins where it is asked for first, or restarted.

    A sequence may come back shorter than before, or with other tokens at its end: drafts that were not accepted. Behind a
    `thought` it begins where that ends, and the answer may not end before.
    """

    def __init__(self, matcher: Any, ends: Collection[int]):
        self._matcher, self._ends = matcher, list(ends)
        self.thought: Thought | None = None
        self._prompt_tokens, self._said = -1, list[int]()
        self.seconds = 0.0  # that it took, of all tokens

    def restart(self) -> "GrammarMask":
        """For an answer from its beginning."""
        self._matcher.reset()
        self._prompt_tokens, self._said = -1, []
        if self.thought is not None:
            self.thought.restart()
        return self

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids int64 `[1, S]`, scores float32 `[1, V]`. Raises InputError where the vocabulary cannot spell what follows."""
        began_s = time.perf_counter()
        if self._prompt_tokens < 0:
            self._prompt_tokens = input_ids.shape[1]
        said = input_ids[0, self._prompt_tokens :].tolist()
        if self.thought is not None:
            if (begin := self.thought.end(said)) is None:
                return scores.index_fill(1, torch.tensor(self._ends, dtype=torch.int64, device=scores.device), -torch.inf)
            said = said[begin:]
        self._follow(said)
        may = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)[: scores.shape[1]] != 0
        may = torch.nn.functional.pad(may, (0, scores.shape[1] - len(may)))
        ends = [end for end in self._ends if end < len(may)]
        if may[ends].any():
            may[ends] = True
        if self._matcher.is_error() or not may.any():
            why = self._matcher.get_error() or "no token of this model's vocabulary can follow"
            raise InputError(f"the answer cannot go on by its json_schema or grammar: {why}. Fix: another schema or grammar")
        self.seconds += time.perf_counter() - began_s
        return scores.masked_fill(~may.to(scores.device), -torch.inf)

    def _follow(self, said: list[int]) -> None:
        """The grammar goes back to where this text left the one before, and on to its end."""
        pairs = zip(said, self._said, strict=False)
        same = next((n for n, (now, before) in enumerate(pairs) if now != before), min(len(said), len(self._said)))
        if same < len(self._said):
            self._matcher.rollback(len(self._said) - same)
        self._matcher.consume_tokens(said[same:])
        self._said = said
