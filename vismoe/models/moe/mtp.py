"""Drafts by the layer that publishers train for that (family/mtp.py): one decoder layer instead of all of them for each guess.

For the hidden state of token i, as the model ends with it, and token i + 1 the layer says token i + 2. Its keys and values go
with the sequence, as the model's do: before it guesses, it catches up with the tokens that were said since. For a further guess
it gets its own output and what it has guessed last; what it adds to its keys and values for that is given up again.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from vismoe.models.family.mtp import Mtp, mtp_of, new_cache
from vismoe.models.moe.rows import giving_up
from vismoe.models.moe.step_context import StepContext
from vismoe.models.visual.growing_cache import grow_in_place

BLOCK_TOKENS = 256  # of a prompt, that the layer reads in one pass
LAST_TOKENS = 8  # that a guess reads at most, beside what was read before: as many as a round says


class MtpDrafts:
    """The layer of one model. `hidden` `[B, S, H]`: of the model's latest pass, which it ended with; None once it was taken."""

    def __init__(self, model: Any, mtp: Mtp, context: StepContext):
        self.mtp, self._context = mtp, context
        self.hidden: torch.Tensor | None = None
        mtp.model.tie_with_main_model(model)  # the embeddings and the head that loading has put there
        mtp.model.config._attn_implementation = model.config.get_text_config()._attn_implementation
        model.get_decoder().register_forward_hook(self._note)

    @classmethod
    def of(cls, model: Any, context: StepContext) -> "MtpDrafts | None":
        """None for a model without such a layer."""
        mtp = mtp_of(model)
        return cls(model, mtp, context) if mtp is not None else None

    def _note(self, decoder: Any, args: Any, output: Any) -> None:
        self.hidden = output.last_hidden_state

    def take(self) -> torch.Tensor | None:
        """The hidden states of the latest pass, once."""
        hidden, self.hidden = self.hidden, None
        return hidden

    def run(self, hidden: torch.Tensor, ids: torch.Tensor, first: int, cache: Any) -> torch.Tensor:
        """The layer's output `[1, R, H]` for hidden `[1, R, H]` and the tokens behind them, ids `[1, R]`, of which the first one
        is token number `first` of its sequence."""
        tokens = ids.shape[1]
        self._context.begin_beside(tokens)
        positions = torch.arange(first, first + tokens, device=ids.device)[None]
        out: torch.Tensor = self.mtp.model.forward_layer(0, hidden, positions, cache, input_ids=ids)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[1, 1, V]` of the last row."""
        said: torch.Tensor = self.mtp.model._project_to_logits(hidden[:, -1:])
        return said


class MtpSequence:
    """One sequence as the layer knows it: its keys and values, and hidden states of tokens that it has not read yet."""

    def __init__(self, drafts: MtpDrafts):
        self._drafts = drafts
        self._cache = new_cache(drafts.mtp)
        self._waiting: list[tuple[int, torch.Tensor]] = []  # (number of the first token, hidden states [1, R, H]), ascending

    def note(self, first: int, tokens: int, hidden: torch.Tensor | None) -> None:
        """The model has passed tokens `first` to `first + tokens - 1`, and ended with `hidden`, as many states `[..., H]`. What
        was noted before of token `first` and later ones is forgotten: they were drafted, and not said."""
        self._forget_from(first)
        if hidden is not None and hidden.shape[:-1].numel() == tokens:  # fewer where visual tokens were dropped
            self._waiting.append((first, hidden.reshape(1, tokens, -1)))

    def _forget_from(self, number: int) -> None:
        """Of the hidden states that wait, those from token `number` on are of tokens that were not said."""
        kept = [(first, hidden[:, : number - first]) for first, hidden in self._waiting if first < number]
        self._waiting = kept

    def knows(self, ids: torch.Tensor) -> bool:
        """Whether the hidden state before the latest token of ids `[1, S]` is there: not so behind a prompt whose visual tokens
        were dropped."""
        return any(first <= ids.shape[1] - 2 < first + hidden.shape[1] for first, hidden in self._waiting)

    def read(self, ids: torch.Tensor) -> None:
        """Read what waits of ids `[1, S]`, but for the last tokens, which the next guess needs: a prompt takes a while."""
        self._forget_from(ids.shape[1] - 1)
        if stretches := list(self._stretches()):
            *earlier, (first, hidden) = stretches
            for begin, rows in earlier:
                self._run_blocks(ids, begin, rows)
            if (more := hidden.shape[1] - LAST_TOKENS) > 0:
                self._run_blocks(ids, first, hidden[:, :more])
                first, hidden = first + more, hidden[:, more:]
            self._waiting = [(first, hidden)]

    def _stretches(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What waits, with tokens that follow each other together."""
        together: list[torch.Tensor] = []
        begin = end = 0
        for first, hidden in self._waiting:
            if together and first != end:
                yield begin, _joined(together)
                together = []
            begin = begin if together else first
            together.append(hidden)
            end = first + hidden.shape[1]
        if together:
            yield begin, _joined(together)

    def guess(self, ids: torch.Tensor, count: int, room: int, choose: Callable[[torch.Tensor], int | None]) -> None:
        """Guess up to `count` tokens behind ids `[1, S]`, of a sequence that may have `room` tokens. choose: says which token is
        meant by logits `[1, 1, V]`, and None where no further one is wanted."""
        out = self._catch_up(ids)
        grow_in_place(self._cache, room)
        token = choose(self._drafts.logits(out))
        with giving_up(self._cache):
            for behind in range(1, count):
                if token is None:
                    break
                out = self._drafts.run(out[:, -1:], ids.new_tensor([[token]]), ids.shape[1] - 1 + behind, self._cache)
                token = choose(self._drafts.logits(out))

    def _catch_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Read all that waits -> the output for the last token, whose hidden state is there (`knows`)."""
        self.read(ids)
        ((first, hidden),) = self._waiting
        self._waiting = []
        return self._run_blocks(ids, first, hidden)

    def _run_blocks(self, ids: torch.Tensor, first: int, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output for the last of these tokens, `[1, 1, H]`."""
        for begin in range(0, hidden.shape[1], BLOCK_TOKENS):
            rows = hidden[:, begin : begin + BLOCK_TOKENS]
            behind = first + begin + 1
            out = self._drafts.run(rows, ids[:, behind : behind + rows.shape[1]], behind, self._cache)
        return out[:, -1:]


def _joined(stretches: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[1, R, H]`; a prompt's hidden states are not copied."""
    return stretches[0] if len(stretches) == 1 else torch.cat([*stretches], dim=1)
