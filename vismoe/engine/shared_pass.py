"""Which requests decode in one pass, and whether what they compute there is what they would compute alone.

Nothing is taken for granted about a family: before so many rows share a pass for the first time, one is tried on caches that
stay as they are, each request computes its token alone, and the logits are compared. Where attention by row does not do (a family
that changes keys behind its cache), mixers are called row by row as a whole.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from vismoe.engine.generate import TokenLoop
from vismoe.errors import UnsupportedModelError
from vismoe.models.family.caches import CACHE
from vismoe.models.family.components import OUR_ATTENTION
from vismoe.models.moe.rows import RowsCache, joined_inputs, rows_that_differ, shared_pass, why_not_rows
from vismoe.models.visual.pruned_cache import PrunedLayer

logger = logging.getLogger(__name__)

FAILURES = (  # of a family's code, where it meets several caches as one
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    LookupError,
    AssertionError,
    UnsupportedModelError,
)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}  # of the logits' standard deviation: rounding


class SharedPasses:
    """`most_rows` of one pass. exactly: requests share passes only where the trial finds the bits of being alone."""

    def __init__(self, model: Any, most_rows: int, exactly: bool):
        self.most_rows, self._model, self._exactly = most_rows, model, exactly
        # Mixers by row as a whole, and not only what they call attention.
        self.by_mixer = model.config.get_text_config()._attn_implementation != OUR_ATTENTION
        self._judged: dict[int, str] = {}  # trials by their rows, rounded up to a power of two: what was found
        self.refused = "one row per pass was asked for" if most_rows < 2 else ""

    @property
    def about(self) -> str:
        """What is known, as a sentence."""
        if self.refused:
            return f"one request per pass: {self.refused}"
        return f"up to {self.most_rows} requests per decode pass, each with its own cache{self.found}"

    @property
    def found(self) -> str:
        """What trials have found, behind a sentence; empty before the first."""
        return f"; in trials {', '.join(dict.fromkeys(self._judged.values()))}" if self._judged else ""

    def takes(self, loop: TokenLoop) -> bool:
        """Whether this sequence can share a pass; for a reason of the family none can from now on."""
        if not self.refused:
            self.refused = why_not_rows(self._model, loop.cache) or ""
        pruned = self.by_mixer and any(type(layer) is PrunedLayer for layer in getattr(loop.cache, "layers", ()))
        return not self.refused and not loop.padded and not pruned  # whole mixers do not see which tokens a row has dropped

    def wants_trial(self, rows: int) -> bool:
        return _bucket(rows) not in self._judged

    def run(
        self, loops: Sequence[TokenLoop], inputs: Sequence[dict[str, Any]], of_images: frozenset[str]
    ) -> tuple[list[Any], RowsCache]:
        """(the outputs of one shared pass, as each row would have them of a pass of its own; its rows). A row is the next token
        of a sequence, or follows the row before it in the same one."""
        caches = [loop.cache for loop in loops]
        rows = RowsCache(caches, whole=self.by_mixer)
        outputs = self._pass(rows, inputs, of_images)
        return [type(outputs)(logits=outputs.logits[b : b + 1], **{CACHE: cache}) for b, cache in enumerate(caches)], rows

    def tried(
        self, loops: Sequence[TokenLoop], inputs: Sequence[dict[str, Any]], of_images: frozenset[str]
    ) -> torch.Tensor | None:
        """The logits `[B, V]` of a trial, which leaves the sequences as they are; None where it fails."""
        if self._exactly and (why := rows_that_differ(self._model, _bucket(len(loops)))):
            if not self._keep_to_fewer(_bucket(len(loops)), why):
                self.refused = why
            return None
        rows = RowsCache([loop.cache for loop in loops], kept=False, whole=self.by_mixer)
        try:
            return self._pass(rows, inputs, of_images).logits[:, -1].float()
        except FAILURES as error:
            self._refuse(f"a shared pass fails ({type(error).__name__}: {error})")
            return None if self.refused else self.tried(loops, inputs, of_images)
        except Exception as error:  # of a disk, perhaps: each request meets it alone, or it has passed
            logger.warning("a trial of a shared pass came to no end: %s", error)
            return None

    def judge(self, tried: torch.Tensor, alone: torch.Tensor) -> None:
        """Compare a trial's logits `[B, V]` with those of each row alone."""
        apart = ((tried - alone).abs().amax(dim=1) / alone.std(dim=1)).max().item()
        bucket, least = _bucket(len(tried)), TOLERANCE.get(self._model.dtype, 0.0)
        if torch.equal(tried, alone):
            self._judged[bucket] = "the bits of being alone"
        elif apart <= least and not self._exactly:
            self._judged[bucket] = f"logits within {apart:.1e} of their standard deviation of those alone"
        else:
            why = "more than rounding explains" if not apart <= least else "and bits are to be those of being alone"
            why = f"{len(tried)} rows change the logits by {apart:.1e} of their standard deviation, {why}"
            if not self._keep_to_fewer(bucket, why):
                self._refuse(why)
        logger.info("shared passes: %s", self.about)

    def _keep_to_fewer(self, bucket: int, why: str) -> bool:
        """Whether passes of fewer rows were tried before and did; then none has more from now on."""
        fewer = max((judged for judged in self._judged if judged < bucket), default=1)
        if fewer > 1:
            self.most_rows = fewer
            logger.info("shared passes: %s; no more, since %s", self.about, why)
        return fewer > 1

    def _refuse(self, why: str) -> None:
        """Run mixers row by row from now on, as wholes; where that is done already, share no passes."""
        if self.by_mixer:
            self.refused = why
        self.by_mixer, self._judged = True, {}
        logger.info("shared passes: %s", self.about)

    def _pass(self, rows: RowsCache, inputs: Sequence[dict[str, Any]], of_images: frozenset[str]) -> Any:
        joined = joined_inputs(inputs, rows, of_images)
        with shared_pass(self._model, rows):
            return self._model(**joined, return_dict=True)


def _bucket(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
