"""What answers with dropped visual tokens depend on: the code that computes them, and the seed of a question."""

import vismoe.models.family.token_kinds
import vismoe.models.moe.experts
import vismoe.models.moe.step_context
import vismoe.models.visual.encoded
import vismoe.models.visual.kept_rows
import vismoe.models.visual.prune
import vismoe.models.visual.pruned_cache
import vismoe.models.visual.saliency
import vismoe.vision.saliency
import vismoe.vision.selection
from vismoe.eval import accuracy, scenes, scoring, world
from vismoe.eval import questions as asking
from vismoe.eval.answer_file import Key
from vismoe.eval.questions import KINDS

PROGRAM = (
    accuracy, asking, scenes, scoring, world,
    vismoe.vision.selection, vismoe.vision.saliency, vismoe.models.visual.saliency, vismoe.models.visual.encoded,
    vismoe.models.family.token_kinds, vismoe.models.visual.prune, vismoe.models.visual.kept_rows,
    vismoe.models.visual.pruned_cache,
)  # fmt: skip
FEWER_EXPERTS = (vismoe.models.moe.experts, vismoe.models.moe.step_context)  # the code of visual_top_k


def draw_of(question: Key) -> int:
    """The seed of `random` for this question, or for a batch that begins with it."""
    return KINDS.index(question[0]) * 1_000_000 + question[1]
