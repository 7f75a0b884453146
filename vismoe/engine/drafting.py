"""Drafts: tokens that are guessed first and verified together, in one pass over as many rows (speculative decoding).

A round of one request (MoE-SpeQ, section 3): something drafts k tokens; what drafting left in the cache is given up; the latest
token and the drafted ones are rows of one pass (`SharedPasses.run`), each over the keys and values before it; the request accepts
tokens for as long as the model itself says what was drafted, and one more that the model says then. Tokens are drawn row by row
as if each had had a pass of its own, by the same random numbers, so an answer does not depend on drafts (common random numbers in
the place of rejection sampling): bit for bit where a trial finds that rows of a pass have the bits of single passes.

Three things draft: `ngram` looks up what followed the latest words before (speculate/ngram.py); `self` is the model over a copy
of all its experts in few bits (models/load/draft_pool.py), whose routing also says which experts verification will demand; `mtp`
is the layer that some publishers train for it (models/moe/mtp.py).
"""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vismoe.config import MOST_DRAFTED, DraftName, Settings
from vismoe.engine.generate import TokenLoop
from vismoe.engine.shared_pass import SharedPasses
from vismoe.engine.stats import DraftFigures
from vismoe.errors import ConfigError
from vismoe.metrics import Snapshot
from vismoe.models.load.runtime import Runtime
from vismoe.models.moe.mtp import MtpDrafts, MtpSequence
from vismoe.models.moe.rows import RowsCache, giving_up, why_not_given_up
from vismoe.speculate.governor import Governor, MeasuredRound
from vismoe.speculate.ngram import propose
from vismoe.types import Phase

logger = logging.getLogger(__name__)
OFFERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "ngram": ("ngram",),
    "self": ("self",),
    "mtp": ("mtp",),
    "auto": ("ngram", "self"),
}  # what drafts, by the setting


@dataclass(frozen=True)
class Drafted:
    """What a round verifies. `kind`: what has drafted; none: nothing, and the round is an ordinary pass."""

    kind: str = "none"
    tokens: tuple[int, ...] = ()
    seconds: float = 0.0  # that drafting took
    inputs: Sequence[dict[str, Any]] = ()  # of the rows: of the latest token, and of each drafted one
    of_images: frozenset[str] = frozenset()  # names of inputs that no text token needs


class Drafts:
    """What drafts for the requests of one engine, and what trials have found. On the model's thread.

    settings: those that the engine was loaded with; a request may ask for less. barred: tokens that stand for something else,
    such as a piece of an image; they are never drafted.
    """

    def __init__(self, model: Any, runtime: Runtime, settings: Settings, barred: Collection[int]):
        self.model, self.runtime, self.barred = model, runtime, frozenset(barred)
        self._kind, fixed = settings.draft, None if settings.draft_tokens == "auto" else settings.draft_tokens
        self.passes = SharedPasses(model, settings.checked_rows, settings.deterministic)
        self.governor = Governor(MOST_DRAFTED, fixed, settings.latency)
        self.mtp = MtpDrafts.of(model, runtime.context)

    @property
    def about(self) -> str:
        """What is known, as a sentence."""
        if self._kind == "none" or self.passes.refused:
            return "none" if self._kind == "none" else f"none: {self.passes.refused}"
        pool = f" ({self.runtime.drafts.about})" if self.runtime.drafts is not None else ""
        return f"{self._kind}{pool}, up to {self.most} tokens a round{self.passes.found}"

    @property
    def kinds(self) -> tuple[DraftName, ...]:
        """What a request may ask for, as the engine was loaded."""
        return tuple(dict.fromkeys(("none", self._kind) if self._kind in ("none", "ngram") else ("none", "ngram", self._kind)))

    def refuse_unloaded(self, kind: str | None) -> None:
        """Raises ConfigError for what a request cannot have, as the engine was loaded."""
        if kind is not None and kind not in self.kinds:
            raise ConfigError(
                f"draft={kind!r}, but the engine was loaded with draft={self._kind!r}, and memory was planned for that. "
                f"Fix: load with draft={kind!r} (--draft {kind})"
            )

    @property
    def most(self) -> int:
        """Tokens of a round."""
        return self.passes.most_rows - 1

    def take_hidden(self) -> torch.Tensor | None:
        """With what the model has ended its latest pass, `[B, S, H]`, once; None where nothing drafts by that."""
        return self.mtp.take() if self.mtp is not None else None

    def takes(self, loop: TokenLoop) -> bool:
        """Whether this sequence can be drafted for now."""
        if self.runtime.context.recorder is not None or not self.passes.takes(loop):  # a trace is of tokens that were said
            return False
        self.passes.refused = why_not_given_up(loop.cache) or ""
        return not self.passes.refused

    def try_out(self, loop: TokenLoop, inputs: Sequence[dict[str, Any]], of_images: frozenset[str]) -> None:
        """Compare the rows of one pass with single passes, before so many are taken for the first time. The sequence stays."""
        tried = self.passes.tried([loop] * len(inputs), inputs, of_images)
        if tried is not None:
            with giving_up(loop.cache):
                alone = [self.model(**one, return_dict=True).logits[:, -1].float() for one in inputs]
            self.passes.judge(tried, torch.cat(alone))


class Verified:
    """Rows of a pass over the latest token and those drafted: what each leads to, while the model says what was drafted."""

    def __init__(self, loop: TokenLoop, drafted: Sequence[int], outputs: Sequence[Any], rows: RowsCache | None):
        self._loop, self._drafted, self._outputs, self._rows = loop, drafted, outputs, rows
        self._taken, self.goes_on, self.accepted = 0, True, 0
        self.first: int | None = None  # the token that the latest one leads to

    def take(self, said: int | None = None) -> tuple[int, bool]:
        """The next token of the sequence, and whether it is the last one. said: the token, if known."""
        row, self._taken = self._taken, self._taken + 1
        token, last = self._loop.take(self._outputs[row], said)
        self.first = token if row == 0 else self.first
        self.goes_on = row < len(self._drafted) and token == self._drafted[row]
        self.accepted += self.goes_on
        return token, last

    def give_up_rest(self) -> None:
        """The cache forgets the rows that were not taken."""
        if self._rows is not None:
            self._rows.back_to(self._taken - 1)


class Drafter:
    """Drafts for one request. kind: what may draft, a key of OFFERS."""

    def __init__(self, drafts: Drafts, kind: str):
        self._drafts, self._offers = drafts, OFFERS[kind]
        self._governed = drafts.governor.begin_request()
        self.begin_anew()
        self._round = Drafted()  # that is under way
        self._verified: Verified | None = None
        self._began: tuple[float, Snapshot] | None = None
        self._offered: dict[str, int] = {}  # the first token of drafts that are not verified
        self._draft_s = self._verify_s = 0.0

    def begin_anew(self) -> None:
        """The request has given up its keys and values, or has none yet."""
        mtp = self._drafts.mtp
        self._mtp: MtpSequence | None = MtpSequence(mtp) if mtp is not None and "mtp" in self._offers else None

    @property
    def offers(self) -> bool:
        """Whether anything may draft."""
        return bool(self._offers)

    def draft(self, loop: TokenLoop, most: int, of_images: frozenset[str]) -> Drafted:
        """Tokens for the next round, at most `most`; none where that is better, or nothing drafts now. of_images: names of inputs
        that no text token needs."""
        drafts, began_s, self._offered = self._drafts, time.perf_counter(), {}
        if not self._offers or most < 1 or not drafts.takes(loop):
            return Drafted()
        most = min(most, drafts.most)
        found = self._looked_up(loop, most) if "ngram" in self._offers else []
        offers = {"ngram": len(found)} if found else {}
        if "self" in self._offers and drafts.runtime.drafts is not None:
            offers["self"] = most
        if self._mtp is not None and self._mtp.knows(loop.ids):
            offers["mtp"] = most
        kind, count = self._governed.choose(offers)
        self._offered = {"ngram": found[0]} if found and kind != "ngram" else {}
        if not count:
            return Drafted()
        if kind == "mtp" and self._mtp is not None:
            self._mtp.read(loop.ids)
            began_s = time.perf_counter()  # a prompt is read once, and no round has to pay for it
            tokens = self._by_mtp(self._mtp, loop, count)
        else:
            tokens = found[:count] if kind == "ngram" else self._by_itself(loop, count)
        seconds = time.perf_counter() - began_s
        inputs = loop.inputs_of(tokens)
        if drafts.passes.wants_trial(len(inputs)):
            drafts.try_out(loop, inputs, of_images)
            if drafts.passes.refused or drafts.passes.most_rows < len(inputs):
                return Drafted()
        return Drafted(kind, tuple(tokens), seconds, inputs, of_images)

    def _looked_up(self, loop: TokenLoop, most: int) -> list[int]:
        """What followed the latest tokens where they came before."""
        return propose(loop.ids[0].cpu().numpy(), most, self._drafts.barred)

    def _by_itself(self, loop: TokenLoop, count: int) -> list[int]:
        """What the model says with its experts in few bits. The pager hears which of them that takes."""
        tokens: list[int] = []
        ahead, context = loop.ahead(), self._drafts.runtime.context
        pager = self._drafts.runtime.pager
        pager.begin_drafting()
        with giving_up(loop.cache), loop.drawing_again(), context.drafting():
            while len(tokens) < count:
                token, last = ahead.step()
                tokens.append(token)
                if last or loop.ends_with(token):
                    break
        pager.begin_verifying()
        return tokens

    @staticmethod
    def _by_mtp(mtp: MtpSequence, loop: TokenLoop, count: int) -> list[int]:
        """What the layer says that was trained for it, with the numbers that the model draws by."""
        tokens: list[int] = []
        ahead = loop.ahead()

        def choose(logits: torch.Tensor) -> int | None:
            token, last = ahead.take_logits(logits)
            tokens.append(token)
            return None if last or loop.ends_with(token) else token

        with loop.drawing_again():
            mtp.guess(loop.ids, count, loop.room, choose)
        return tokens

    def passed(self, first: int, tokens: int, hidden: torch.Tensor | None) -> None:
        """A pass over so many tokens of the sequence is over, from token `first` on. hidden: of these (`Drafts.take_hidden`)."""
        if self._mtp is not None:
            self._mtp.note(first, tokens, hidden)

    def verify(self, loop: TokenLoop, drafted: Drafted) -> Verified:
        """One pass over the latest token and those drafted; `ended` follows, once its tokens were taken."""
        drafts, self._round = self._drafts, drafted
        if self._offers:
            self._began = time.perf_counter(), drafts.runtime.metrics.snapshot()
        if not drafted.tokens:
            self._verified = Verified(loop, (), [drafts.model(**loop.inputs(), return_dict=True)], None)
        else:
            rows = drafts.passes.run([loop] * len(drafted.inputs), drafted.inputs, drafted.of_images)
            self._verified = Verified(loop, drafted.tokens, *rows)
        self.passed(loop.ids.shape[1] - 1, 1 + len(drafted.tokens), drafts.take_hidden())
        return self._verified

    def ended(self) -> None:
        """The round is over, or has failed: what was not taken of it is given up, and what it took is noted."""
        drafts, verified, drafted = self._drafts, self._verified, self._round
        self._verified = None
        if "self" in self._offers:
            drafts.runtime.pager.end_drafting()
        if verified is None or self._began is None:
            return
        verified.give_up_rest()
        began_s, before = self._began
        seconds, happened = time.perf_counter() - began_s, drafts.runtime.metrics.snapshot() - before
        total = partial(happened.total, phase=Phase.DECODE)
        k, expert_bytes = len(drafted.tokens), drafts.runtime.pager.core.ledger.unit_bytes
        agreed = {kind: token == verified.first for kind, token in self._offered.items()}
        self._governed.ended(
            MeasuredRound.of(total, expert_bytes, drafted.kind, k, verified.accepted, drafted.seconds, seconds, agreed)
        )
        if k:
            self._draft_s += drafted.seconds
            self._verify_s += seconds

    def figures(self, counters: Snapshot) -> DraftFigures | None:
        """Of the whole answer; None where nothing was to draft."""
        if not self._offers:
            return None
        lengths, accepted = self._governed.lengths, self._governed.accepted
        return DraftFigures(
            rounds=sum(map(sum, lengths.values())),
            drafted=sum(k * rounds for of in lengths.values() for k, rounds in enumerate(of, 1)),
            accepted=accepted,
            promised=int(counters.total("promised")),
            foreseen=int(counters.total("foreseen")),
            draft_seconds=self._draft_s,
            verify_seconds=self._verify_s,
            lengths=lengths,
        )
