"""Turns lmms-eval's requests into batches of model inputs: generation options, grouping of prompts, left padding.

B rows, S tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from vismoe.config import MOST_TOKENS, Kept
from vismoe.errors import InputError
from vismoe.options import COLDEST, AnswerTokens
from vismoe.ranges import Range, check_fields, shown, unencodable

ADDED_BY_LMMS_EVAL = "\n\n"  # its default stop string for tasks without one; its own models ignore this
HOTTEST = 100  # highest temperature of a task; tasks are not bound by the engine's limit
UNDERSTOOD = {
    "until", "stop_sequences", "max_new_tokens", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "num_beams",
    "repetition_penalty",
}  # fmt: skip
FOR_OTHERS = {"image_aspect_ratio", "seed"}  # options for other models' image cropping; lmms-eval seeds torch itself


@dataclass(frozen=True)
class Generation:
    """The parts of a task's `generation_kwargs` that affect an answer."""

    max_tokens: AnswerTokens | None  # None: to the end of the planned context
    stop: tuple[str, ...] = ()
    sample: bool = False
    temperature: Annotated[float, Range(0, HOTTEST)] | None = None
    top_p: Kept | None = None
    top_k: Annotated[int, Range(0, MOST_TOKENS)] | None = None
    num_beams: Annotated[int, Range(1, 2**12)] = 1
    repetition_penalty: Annotated[float, Range(0, 100, above=True)] = 1.0

    def __post_init__(self) -> None:
        check_fields(self, InputError)

    @classmethod
    def of(cls, asked: dict[str, Any], usual_tokens: int | None) -> "Generation":
        """Greedy unless the task requests sampling, by `do_sample` or a temperature above 0; temperature 0 is always greedy."""
        temperature, until = asked.get("temperature"), asked.get("until") or asked.get("stop_sequences") or ()
        if temperature is not None and (type(temperature) not in (int, float) or not 0 <= temperature <= HOTTEST):
            raise InputError(
                f"generation_kwargs: temperature={shown(temperature)}: must be a number from 0 to {HOTTEST}. Fix: temperature=0"
            )
        if asked.get("do_sample") not in (None, True, False):
            raise InputError(f"generation_kwargs: do_sample={shown(asked['do_sample'])}: not true or false. Fix: do_sample=false")
        sample = bool(asked.get("do_sample", temperature)) and (temperature is None or temperature >= COLDEST)
        if unknown := {name for name, value in asked.items() if value is not None} - UNDERSTOOD - FOR_OTHERS:
            raise InputError(
                f"generation_kwargs: {', '.join(sorted(unknown))} are not supported. Fix: only {', '.join(sorted(UNDERSTOOD))}"
            )
        chosen = {name: asked.get(name) if sample else None for name in ("temperature", "top_p", "top_k")}
        return cls(
            max_tokens=asked.get("max_new_tokens") or asked.get("max_gen_toks") or usual_tokens,
            stop=tuple(string for string in _texts(until) if string != ADDED_BY_LMMS_EVAL),
            sample=sample,
            num_beams=asked.get("num_beams") or 1,
            repetition_penalty=asked.get("repetition_penalty") or 1.0,
            **chosen,
        )

    def options(self, max_new_tokens: int) -> dict[str, Any]:
        """Keyword arguments of `generate()`."""
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        if self.sample:  # values that the task does not set are the model's own
            chosen = {name: value for name, value in chosen.items() if value is not None}
        options = {"max_new_tokens": max_new_tokens, "do_sample": self.sample, "num_beams": self.num_beams, **chosen}
        return {**options, "repetition_penalty": float(self.repetition_penalty)}


def _texts(until: Any) -> list[str]:
    """Stop strings, one or several. Raises InputError."""
    texts = [until] if isinstance(until, str) else list(until) if isinstance(until, list | tuple) else [until]
    for text in texts:
        if not isinstance(text, str) or not text or unencodable(text):
            raise InputError(f"generation_kwargs: until={shown(text)}: must be a text, or several. Fix: until=['\\n']")
    return texts


@dataclass(frozen=True)
class BatchRow:
    """One prompt from the family's processor, and the index of its request. Tensors of the tokens are `[1, S]`."""

    number: int
    inputs: dict[str, Tensor]
    continuation: tuple[int, ...] = ()  # token ids after the prompt, whose likelihood is requested

    @property
    def tokens(self) -> int:
        return self.inputs["input_ids"].shape[1] + len(self.continuation)


Fits = Callable[[int, int], bool]


def batches(rows: Iterator[BatchRow], most_rows: int, new_tokens: int, context: int, fits: Fits) -> Iterator[list[BatchRow]]:
    """Rows in their order, as many together as `most_rows` and the context allow: B * (longest prompt + new) <= context.

    `fits(B, longest prompt)`: whether there is memory for the mask of such a padded batch.

    A row that does not fit alone forms its own batch.
    """
    batch: list[BatchRow] = []
    for row in rows:
        longest, together = max(other.tokens for other in (*batch, row)), len(batch) + 1
        full = together > most_rows or together * (longest + new_tokens) > context or not fits(together, longest)
        if batch and full:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def left_padded(rows: Sequence[BatchRow], pad_token_id: int) -> dict[str, Tensor]:
    """One batch of inputs: inputs with a value per token are padded on the left to `[B, S]`, inputs of images are concatenated.

    A prompt without images has no image inputs.
    """
    longest = max(row.tokens for row in rows)
    batch = {}
    for name in dict.fromkeys(name for row in rows for name in row.inputs):
        having = [row for row in rows if name in row.inputs]
        if all(row.inputs[name].shape == row.inputs["input_ids"].shape for row in having):
            batch[name] = torch.cat([_padded(row, name, longest, pad_token_id) for row in rows])
        else:
            batch[name] = torch.cat([row.inputs[name] for row in having])
    return batch


def _padded(row: BatchRow, name: str, longest: int, pad_token_id: int) -> Tensor:
    """`[1, longest]`: padding, prompt and continuation; the continuation is attended to and counts as text: kind 0."""
    ids = row.inputs["input_ids"]
    prompt = row.inputs.get(name, torch.zeros_like(ids))
    continuation = torch.full((1, len(row.continuation)), int(name == "attention_mask"), dtype=prompt.dtype)
    if name == "input_ids":
        continuation = torch.tensor([row.continuation], dtype=ids.dtype)
    padding = pad_token_id if name == "input_ids" else 0
    return pad(torch.cat([prompt, continuation], dim=1), (longest - row.tokens, 0), value=padding)
