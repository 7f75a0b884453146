"""Log probabilities of an answer's tokens: log softmax of the model's own logits, before temperature, penalties and masks."""

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that a byte-level vocabulary writes as these characters
BYTES = {chr(byte): byte for byte in PLAIN} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(PLAIN)))
}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token. top: the most likely ones in its place, as many as were asked for. offset: where its text begins."""

    token: int
    bytes: bytes
    logprob: float
    top: "tuple[TokenLogprob, ...]" = ()
    offset: int = 0

    @property
    def text(self) -> str:
        """Bytes that are no whole characters as `\\xe2`."""
        return self.bytes.decode(errors="backslashreplace")


class ScoredText(str):
    """Text of an answer, with the tokens that it came from where their log probabilities were asked for."""

    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def of(cls, text: str, tokens: tuple[TokenLogprob, ...]) -> "ScoredText":
        scored = cls(text)
        scored.logprobs = tokens
        return scored


Entries = tuple[TokenLogprob, ...]


def split_at(entries: Entries, text: str) -> tuple[Entries, Entries]:
    """(those of the tokens that `text` is made of, those behind it): what comes before it, such as a mark, is in neither."""
    begin = b"".join(entry.bytes for entry in entries).find(text.encode())
    if begin < 0:
        return entries, ()
    end, made_of = begin + len(text.encode()), list[TokenLogprob]()
    for number, (entry, place) in enumerate(zip(entries, accumulate((len(entry.bytes) for entry in entries), initial=0))):
        if place >= end:
            return tuple(made_of), entries[number:]
        if place + len(entry.bytes) > begin:
            made_of.append(entry)
    return tuple(made_of), ()


@dataclass(frozen=True)
class Chances:
    """What a pass says of the token that it leads to, and of the most likely ones: pairs of id and log probability."""

    said: tuple[int, float]
    top: list[tuple[int, float]]

    @classmethod
    def of(cls, logprobs: torch.Tensor, token: int, most: int) -> "Chances":
        """logprobs: float32 `[V]`."""
        values, ids = logprobs.topk(min(most, len(logprobs)))
        return cls((token, float(logprobs[token])), list(zip(ids.tolist(), values.tolist())))


class TokenBytes:
    """The bytes of a tokenizer's tokens, as they are in the middle of a text."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._known = tokenizer, dict[int, bytes]()
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skipped = len(self._decoded([]))

    def of(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def entry(self, chances: Chances, offset: int) -> TokenLogprob:
        top = tuple(TokenLogprob(token, self.of(token), logprob) for token, logprob in chances.top)
        token, logprob = chances.said
        return TokenLogprob(token, self.of(token), logprob, top, offset)

    def _read(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # a place of the vocabulary without a token
            return b""
        text = self._decoded([token])[self._skipped :]
        if "\ufffd" not in text:
            return text.encode()
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(byte[1])
        return bytes(BYTES[letter] for letter in piece) if set(piece) <= BYTES.keys() else text.encode()

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode([*self._before, *tokens], clean_up_tokenization_spaces=False)
        return text
