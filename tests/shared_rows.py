"""Sequences of any model that decode in one pass, and the same sequences alone."""

import copy
from typing import Any

import torch

from vismoe.engine.generate import TokenLoop
from vismoe.engine.shared_pass import SharedPasses
from vismoe.models.family.caches import CACHE
from vismoe.models.inputs.prompts import TEXT_INPUTS


class Sequences:
    """Prompts that a model has read, each of its own length; `passes` decodes them together."""

    def __init__(self, model: Any, prompts: list[dict[str, Any]], steps: int = 64):
        self.model, self.passes = model, SharedPasses(model, len(prompts), exactly=False)
        self.of_images = frozenset(name for prompt in prompts for name in prompt) - set(TEXT_INPUTS)
        self._rotating = [module for module in model.modules() if hasattr(module, "rope_deltas")]
        self.loops, self._deltas = [], []
        exactly = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}
        for prompt in prompts:
            loop = TokenLoop(model, prompt, exactly)
            with model._vismoe_runtime.context.reading_prompt():
                loop.step()
            self.loops.append(loop)
            self._deltas.append([module.rope_deltas for module in self._rotating])

    def _turned(self, number: int) -> TokenLoop:
        """The sequence, with its offsets of positions on the model."""
        for module, deltas in zip(self._rotating, self._deltas[number], strict=True):
            module.rope_deltas = deltas
        return self.loops[number]

    def inputs(self) -> list[dict[str, Any]]:
        return [self._turned(number).inputs() for number in range(len(self.loops))]

    def tried(self) -> torch.Tensor | None:
        """The logits `[B, V]` of a trial."""
        return self.passes.tried(self.loops, self.inputs(), self.of_images)

    def together(self) -> torch.Tensor:
        """The logits `[B, V]` of the next token of each, in one pass."""
        outputs, _ = self.passes.run(self.loops, self.inputs(), self.of_images)
        for loop, output in zip(self.loops, outputs, strict=True):
            loop.take(output)
        return torch.cat([output.logits[:, -1].float() for output in outputs])

    def alone(self) -> torch.Tensor:
        """What `together` would return if each had a pass of its own; nothing changes."""
        found = []
        for number in range(len(self.loops)):
            loop = copy.copy(self._turned(number))
            loop._prepared = copy.copy(loop._prepared)
            loop._prepared.kwargs = {**loop._prepared.kwargs, CACHE: copy.deepcopy(loop.cache)}
            loop.watched = []
            loop.step()
            found += loop.watched
        return torch.cat(found)

    def one_by_one(self, drafted: list[int]) -> torch.Tensor:
        """The logits `[n + 1, V]` of passes for the first sequence's latest token and each of these; nothing changes."""
        loop = self._turned(0).ahead()
        loop._prepared.kwargs[CACHE] = copy.deepcopy(loop.cache)
        loop.watched = []
        for token in (*drafted, 0):
            loop.step(said=token)
        return torch.cat(loop.watched)

    def verified(self, drafted: list[int], keep: int) -> torch.Tensor:
        """The same in one pass, after which the sequence goes on with the first `keep` of these tokens."""
        loop = self._turned(0)
        inputs, passes = loop.inputs_of(drafted), SharedPasses(self.model, 1 + len(drafted), exactly=False)
        tried = passes.tried([loop] * len(inputs), inputs, self.of_images)
        outputs, rows = passes.run([loop] * len(inputs), inputs, self.of_images)
        rows.back_to(keep - 1)  # the latest token is not in the cache
        for token in drafted[:keep]:
            loop.add(token)
        logits = torch.cat([output.logits[:, -1].float() for output in outputs])
        assert tried is not None and torch.equal(tried, logits), passes.refused
        return logits
