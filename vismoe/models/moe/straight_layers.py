"""A decoder's layers in passes of one token between which nothing runs (token_passes.py).

One call computes as many layers as have all their experts resident, and what is said of them stays from token to token. Where an
expert is missing the layer demands it, and the next call goes on behind that layer. Layers in front of one without paged experts
are computed one by one.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from vismoe.kernels.decoder_layer import Cached, Ending
from vismoe.models.family.caches import CACHE
from vismoe.models.moe.decoder_layers import ANGLES, LayersAhead, ServedLayer
from vismoe.models.moe.experts import PagedLayer
from vismoe.models.moe.resident import Chain, ResidentLayers
from vismoe.models.visual.growing_cache import GrowingLayer

MOST_CHAINS = 4  # of several sequences by turns, each with outputs of all layers: 0.8 MB for 48 of 2,048 numbers


class StraightLayers:
    """All layers of one decoder."""

    def __init__(self, layers: Sequence[ServedLayer], ahead: LayersAhead):
        self.layers, self.ahead = layers, ahead
        # from where on all have paged experts
        self._first = 1 + max((place for place, layer in enumerate(layers) if layer.paged is None), default=-1)
        chained = layers[self._first :]
        self._paged = [cast(PagedLayer, layer.paged) for layer in chained]
        experts = [cast(nn.Module, layer.experts) for layer in chained]
        self._listeners = [hooks for one in experts for hooks in (one._forward_pre_hooks, one._forward_hooks)]
        self._kept = [layer.index for layer in chained]  # where their keys and values are in a cache

    def takes(self, hidden: torch.Tensor, given: Mapping[str, Any]) -> bool:
        """Whether layers compute hidden `[1, 1, H]` with what `LayerWatch.fit` has looked at, and all have room for a token."""
        (cos, sin), cache = given[ANGLES], given[CACHE]
        return cos.shape[0] == sin.shape[0] == 1 and self.layers[0].native.takes(hidden) and self._have_room(cache)

    def _have_room(self, cache: Any) -> bool:
        short = self._paged[0].context.step.short if self._paged else None
        chain, tokens = None if short is None else short.chains.get(cache), cache.layers[0].tokens
        mark = chain.mark if chain is not None and tokens < chain.calls.room else None
        kept = [cache.layers[layer.index] for layer in self.layers if layer.index < len(cache.layers)]
        return len(kept) == len(self.layers) and all(
            (mark is not None and one.noted is mark) or layer.make_room(one) for layer, one in zip(self.layers, kept)
        )

    def through(
        self, hidden: torch.Tensor, given: Mapping[str, Any], ending: Ending | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(the output `[1, 1, H]` of the last layer, in memory that the next pass writes anew; the logits of the ending, where
        one call has computed all layers that have paged experts). `takes` has said yes."""
        place, logits = 0, None
        try:
            while place < len(self.layers):
                short = self._short(place)
                self.ahead.alone = short is not None
                if short is not None:
                    # A later call means that an expert was missing: computing the head, it would hold the pager's lock while
                    # others are copied.
                    ends = ending if place == self._first else None
                    made, hidden, logits = self._chained(short, place, hidden, given, ends)
                    place += made
                if place < len(self.layers):
                    layer = self.layers[place]
                    out, module = layer.run(hidden, given, self.ahead), layer.module()
                    assert module is not None, "the model's parts are as they were watched"
                    hidden = type(module).forward(module, hidden, **given) if out is None else out
                    place += 1
        finally:
            self.ahead.alone = False
        return hidden, logits

    def _short(self, place: int) -> ResidentLayers | None:
        """What computes the layers from this place on by one call; None: each is computed as it would be in any pass."""
        if place < self._first:
            return None
        paged = self._paged[place - self._first]
        short, phase = paged.short(), paged.context.step.phase
        return short if short is not None and short.may_chain(phase) and not any(map(len, self._listeners)) else None

    def _chained(
        self, short: ResidentLayers, place: int, hidden: torch.Tensor, given: Mapping[str, Any], ending: Ending | None
    ) -> tuple[int, torch.Tensor, torch.Tensor | None]:
        """(how many layers from this place on one call has computed, the output of the last one, or else what was given; the
        logits of the ending, if that was the last layer of all)."""
        at, angles, cache = place - self._first, given[ANGLES], given[CACHE]
        kept = [cache.layers[index] for index in self._kept]
        context, chain = self._paged[at].context, short.chains.get(cache)
        if chain is None or not all(layer.noted is chain.mark for layer in kept[at:]):
            chain = self._noted(short, cache, kept)
        made, begun, logits = short.run_chain(context.step.phase, chain, at, hidden, angles, kept[at].tokens + 1, ending)
        if begun:
            chain.calls.leave(at + made)
            self.ahead.begun(self.layers[place + made], angles, kept[at + made].next_at())
        for layer in kept[at : at + made]:
            layer.one_more()
        if context.lookahead_inputs.remembers:
            for n, paged in enumerate(self._paged[at : at + made], at):
                paged.computed_short(partial(chain.calls.chosen, n))
        return made, chain.calls.output(at + made - 1) if made else hidden, logits

    def _noted(self, short: ResidentLayers, cache: Any, kept: Sequence[GrowingLayer]) -> Chain:
        """A chain of all layers, which their keys and values note; the oldest of others gives up its memory."""
        chained = self.layers[self._first :]
        short.chains.pop(cache, None)
        while len(short.chains) >= MOST_CHAINS:
            del short.chains[next(iter(short.chains))]
        calls = [(paged.layer, layer.native) for paged, layer in zip(self._paged, chained)]
        chain = short.chain(calls, [Cached(*layer.place()) for layer in kept])
        short.chains[cache] = chain
        for layer in kept:
            layer.noted = chain.mark
        return chain
