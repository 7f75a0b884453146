"""Where every expert of one geometry is: the only truth about residency, as small arrays over experts and slabs.

States of an expert: absent (on disk or in the host tier) -> loading (a slab is taken, a copy is under way) -> resident.
An expert is resident in one format. A resident one may have a copy in the other format coming (`incoming`): the old copy serves
until the new one is registered, and is reclaimed then; while it is being computed, the new one is ready and waits for that. A
borrowed copy is never registered: it serves one demand and is given back.
No method blocks.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from vismoe.paging.eviction import Eviction, TableArrays, Taken
from vismoe.paging.streaming import fixed_residents
from vismoe.pools.pool import SlabPool
from vismoe.pools.slabs import Slabs
from vismoe.types import HIGH, LOW, ExpertId, MoELayer

FREE, LOADING, RESIDENT, READY = 0, 1, 2, 3  # ready: complete, beside a resident copy in the other format
UNBACKED = 4  # its memory was given back, for keys and values
ABSENT, ON_DEVICE, PINNED, NO_EXPERT = 0, 1, 2, 255  # what `residency` says of an expert
RING_SHARE, RING_MOST = 8, 16  # a prefill chunk may take at most slabs/8, between 2 and 16, from the cache
DEVICE_RING_MOST = 64  # on a device, where a call for a group takes the host as long as the link takes for several experts
ADMISSION_GAIN = 1.25  # how much more an admitted expert must have been used than the evicted one: fewest seconds in replays
LFU_HALF_LIFE_STEPS = 16  # forward steps after which a use counts half; the best of 4 ... infinity on the demo model


class Evicted(NamedTuple):
    expert: ExpertId
    unused_prefetch: bool


class Room(NamedTuple):
    """A slab to load into, whether it belongs to the ring, and which expert was evicted."""

    slab: int
    ring: bool = False
    evicted: Evicted | None = None


class PageTable:
    """Experts of one geometry and the slabs of their pool.

    Experts have a flat index: `base[layer] + expert` (F in all). Slab arrays are `[S]`. `order` is what a slab is worth inside
    an eviction class: `lru` the last use, `lfu` exponentially decayed uses (kept after eviction).
    """

    def __init__(
        self, layers: tuple[MoELayer, ...], pool: SlabPool | Sequence[SlabPool] | Slabs, order: str, ring_most: int = RING_MOST
    ):
        self.pool, self.order = pool, order = Slabs.of(pool), order
        self.ring_limits = tuple(min(ring_most, max(2, part.capacity // RING_SHARE)) for part in pool.pools)
        self.streamed_ring = 0  # slabs of the ring in a streamed pass; 0: this one is not
        self.may_evict = True  # False: every expert has a slab, in one format or the other
        self.base: dict[int, int] = {}
        experts = 0
        for layer in layers:
            self.base[layer.index] = experts
            experts += layer.num_experts
        self.id_of = [ExpertId(layer.index, e) for layer in layers for e in range(layer.num_experts)]
        self._experts = {layer.index: layer.num_experts for layer in layers}
        self.layer_of = np.array([i.layer for i in self.id_of], dtype=np.int32)
        self.slab_of = np.full(experts, -1, dtype=np.int32)
        self.incoming = np.full(experts, -1, dtype=np.int32)  # the slab of a copy that is to replace, or help out, slab_of's
        self.uses = np.zeros(experts)
        self.priorities = np.zeros(experts, dtype=np.float32)  # lookahead priority of each expert, this token
        slabs = pool.capacity
        self.expert_in = np.full(slabs, -1, dtype=np.int32)
        self.layer_in = np.full(slabs, -1, dtype=np.int32)
        self.state = np.zeros(slabs, dtype=np.uint8)
        self.pinned = np.zeros(slabs, dtype=bool)
        self.demanded = np.zeros(slabs, dtype=bool)  # by the running layer, not computed yet
        self.ring = np.zeros(slabs, dtype=bool)  # taken from the cache for one prefill chunk, or for streamed passes
        self.streamed = np.zeros(slabs, dtype=bool)  # in the ring and computed
        self.speculative = np.zeros(slabs, dtype=bool)
        self.borrowed = np.zeros(slabs, dtype=bool)  # a copy that is not to be registered
        self.left_for = np.full(slabs, -1, dtype=np.int32)  # flat expert that had to leave for the guess in this slab
        self.displaced = np.zeros(experts, dtype=bool)  # evicted for a guess, which was not used
        self.fixed = np.zeros(experts, dtype=bool)  # stays in streamed passes
        self.promised = np.zeros(experts, dtype=bool)  # kept for the running round (promises.py)
        self.worth = np.zeros(slabs)  # lru: tick of the last use; otherwise decayed uses
        self._use_weight = 1.0
        self._ring_in_use = self._any_ready = False

    # -- reading
    @property
    def has_room_for_all(self) -> bool:
        """There is a slab of the one format for every expert."""
        backed = int(np.count_nonzero(self.state != UNBACKED))
        return self.pool.precision is None and backed >= len(self.slab_of)

    @property
    def dynamic_slabs(self) -> int:
        """Slabs that are not pinned, and have memory."""
        return int(np.count_nonzero(~self.pinned & (self.state != UNBACKED)))

    @property
    def use_weight(self) -> float:
        """What a use in this step adds to `uses`."""
        return self._use_weight

    @property
    def ring_in_use(self) -> bool:
        """Slabs of the ring may hold experts: a demand changes more than `uses` and `worth` then."""
        return self._ring_in_use

    def flat(self, expert: ExpertId) -> int:
        return self.base[expert.layer] + expert.expert

    def residency(self, layer: int) -> np.ndarray:
        """uint8 `[E]` of a layer: ABSENT (or still on its way), ON_DEVICE or PINNED."""
        slabs, there = self._resident(layer)
        return np.where(there, np.where(self.pinned[slabs], PINNED, ON_DEVICE), ABSENT).astype(np.uint8)

    def precisions(self, layer: int) -> np.ndarray:
        """uint8 `[E]` of a layer: 0 absent (or still on its way), otherwise 1 + the precision of the resident copy."""
        slabs, there = self._resident(layer)
        precision = 0 if self.pool.precision is None else self.pool.precision[slabs]
        return np.where(there, 1 + precision, 0).astype(np.uint8)

    def _slabs_of(self, layer: int) -> np.ndarray:
        return self.slab_of[self.base[layer] : self.base[layer] + self._experts[layer]]

    def _resident(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """(slab of each expert of a layer, whether it is resident there)."""
        slabs = self._slabs_of(layer)
        return slabs, (slabs >= 0) & (self.state[slabs] == RESIDENT)

    def pins(self, layer: int) -> bool:
        """Whether the experts of a layer never leave."""
        slab = self.slab_of[self.base[layer]]
        return bool(slab >= 0 and self.pinned[slab])

    def lacking(self, layer: int) -> np.ndarray:
        """bool `[E]` of a layer: absent, or copied unasked and not demanded yet."""
        slabs = self._slabs_of(layer)
        return (slabs < 0) | self.speculative[slabs]

    def bound_for(self, layer: int) -> np.ndarray:
        """uint8 `[E]`: like `precisions`, once the copies that are to replace others have done so."""
        experts = slice(self.base[layer], self.base[layer] + self._experts[layer])
        new = self.incoming[experts]
        assert self.pool.precision is not None, "an expert that moves has another format to move to"
        slabs = np.where((new >= 0) & ~self.borrowed[new], new, self.slab_of[experts])
        return np.where(slabs >= 0, 1 + self.pool.precision[slabs], 0).astype(np.uint8)

    def coming(self, flat: int) -> int:
        """The slab that a copy of this expert is being brought to, or lies ready in."""
        return int(self.incoming[flat] if self.incoming[flat] >= 0 else self.slab_of[flat])

    def is_coming(self, flat: int) -> bool:
        """Whether a copy of this expert is on its way, or lies ready beside the resident one."""
        slab = self.coming(flat)
        return slab >= 0 and self.state[slab] != RESIDENT

    def there_in(self, flat: int, precision: int) -> bool:
        """Whether the resident copy of this expert is in this format."""
        slab = int(self.slab_of[flat])
        return slab >= 0 and self.state[slab] == RESIDENT and self.pool.precision_of(slab) == precision

    def is_ready(self, flat: int) -> bool:
        """Whether a copy lies complete beside the resident one."""
        slab = int(self.incoming[flat])
        return slab >= 0 and bool(self.state[slab] == READY)

    def evictable(self) -> np.ndarray:
        """bool `[S]`: resident in the more precise format, and not needed at this moment."""
        free_to_go = (self.state == RESIDENT) & ~(self.pinned | self.demanded)
        return free_to_go if self.pool.precision is None else free_to_go & (self.pool.precision == HIGH)

    @functools.cached_property
    def _eviction(self) -> Eviction:
        """Of these arrays, which are never replaced from now on."""
        arrays = TableArrays(**{field.name: getattr(self, field.name) for field in dataclasses.fields(TableArrays)})
        return Eviction(arrays, self.pool.precision, RESIDENT, LOADING, by_tick=self.order == "lru")

    def victim(
        self, running_layer: int, window: int, prefetch_priority: float | None = None, precision: int = HIGH
    ) -> int | None:
        """The slab of this format to take next, by the order of `eviction`, or None."""
        if not self.may_evict:
            return None
        free = 0 if prefetch_priority is None else self.pool.free_of(precision)
        return self._eviction.victim(running_layer, window, prefetch_priority, precision, free)

    # -- changing
    def begin_step(self, streamed_ring: int = 0) -> None:
        """A forward step begins: earlier uses count a little less, by making this one's count more."""
        self.streamed_ring = streamed_ring
        self._ring_in_use = bool(self.ring.any())
        self._use_weight *= 2 ** (1 / LFU_HALF_LIFE_STEPS)
        if self._use_weight > 1e100:  # keep the ratios, not the size
            self.uses /= self._use_weight
            if self.order != "lru":
                self.worth /= self._use_weight
            self._use_weight = 1.0

    def end_ring(self) -> None:
        """No prompt runs: what passed through the ring of one is worth nothing until it is used, and else like any resident."""
        if self._ring_in_use:
            used_up = np.flatnonzero(self.streamed & (self.state == RESIDENT))
            self.ring[used_up] = self.streamed[used_up] = False
            self.worth[used_up] = 0.0
            self._ring_in_use = bool(self.ring.any())

    def make_room(
        self, running_layer: int, window: int, streaming: bool, must: bool = False, precision: int = HIGH
    ) -> Room | None:
        """A slab of this format for a demand, evicting if need be; None when nothing can be taken now.

        `streaming`: the expert will not enter the cache, so it may take from it, and of free slabs, only what the ring allows,
        unless it `must`. Where no expert is evicted, one that lost its copy comes back in the format that has a slab for it.
        """
        limit = self.pool.capacity + 1 if must else self._ring_limit(precision)
        through = streaming and self.fills_by_shares
        if not through or self._ring_slabs(self.ring, precision) < limit:
            slab = self.pool.take(precision)
            if slab is None and not self.may_evict:
                slab = self.pool.take(LOW if precision == HIGH else HIGH)
            if slab is not None:
                return Room(slab, through)
        return self._evict_for(self.victim(running_layer, window, precision=precision), streaming, limit, precision)

    def take_slabs(self, layer: int, ids: np.ndarray, window: int) -> Taken | None:
        """Slabs for all experts that one token demands of the running layer, int64 `[n]` different ids, in one step; None, and
        nothing has changed, where that takes more than evictions. What was missing is loading, and all is demanded."""
        if self.pool.precision is not None or not self.may_evict or self._ring_in_use or self.pool.free:
            return None
        return self._eviction.take(ids, self.base[layer], self._experts[layer], layer, window)

    def loaded(self, taken: Taken, tick: int) -> None:
        """The copies that `take_slabs` asked for have ended for all that the host decides, and the layer was computed."""
        self.state[taken.slabs[taken.missing]] = RESIDENT
        self.used(taken.slabs, tick)
        self.demanded[taken.slabs] = False

    def room_for_guess(self, running_layer: int, window: int, priority: float, streaming: bool) -> Room | None:
        """A slab of the more precise format for a prefetch; it never takes the last one that a demand could have."""
        if (spare := self._spare()) is not None:
            return spare
        if streaming and self._ring_slabs(self.ring & self.speculative, HIGH) >= self.ring_limits[HIGH] // 2:
            return None  # the other half of the ring is for what is surely needed
        victim = self.victim(running_layer, window, prefetch_priority=priority)
        return self._evict_for(victim, streaming, self.ring_limits[HIGH], HIGH)

    def room_for_promise(self) -> Room | None:
        """A slab for a promised expert, from any that is not promised: what the round wants is known, so how far a layer is says
        nothing about the others. Never the last slab that a demand could have."""
        return self._spare() or self._evict_for(self.victim(-1, 0, prefetch_priority=math.inf), False, 0, HIGH)

    def _spare(self) -> Room | None:
        """A free slab of the more precise format that is not the last one."""
        slab = self.pool.take() if self.pool.free_of(HIGH) > 1 else None
        return None if slab is None else Room(slab)

    def hold_fixed(self) -> None:
        """Choose what stays in streamed passes; other residents are the first to leave."""
        pinned = np.zeros(len(self.fixed), dtype=bool)
        pinned[self.expert_in[self.pinned]] = True
        there = self.state == RESIDENT
        staying = np.zeros(len(self.fixed), dtype=bool)
        staying[self.expert_in[there & ~self.ring]] = True
        sizes = [count for layer, count in self._experts.items() if not self.pins(layer)]
        slabs = self.dynamic_slabs - self.streamed_ring
        self.fixed[:] = True
        self.fixed[~pinned] = fixed_residents(self.uses[~pinned], staying[~pinned], sizes, slabs)
        stays = self.fixed[self.expert_in]
        self._ring_in_use = True
        self.streamed[there & stays] = False
        self.ring[there & stays] = False
        leaves = there & ~stays & ~self.speculative
        self.ring[leaves] = True
        self.streamed[leaves] = True

    def fixed_of(self, layer: int) -> np.ndarray:
        """bool `[E]`: what stays of a layer in streamed passes."""
        return self.fixed[self.base[layer] : self.base[layer] + self._experts[layer]]

    def fix_instead(self, layer: int, experts: Collection[int]) -> None:
        """Let these of a layer stay in a streamed pass, each in place of another one of it: an absent one, else the one used
        least, which leaves once it was computed."""
        fixed, first = self.fixed_of(layer), self.base[layer]
        wanted = [expert for expert in experts if expert < len(fixed) and not fixed[expert]]
        if not wanted or self.pins(layer):
            return
        others = np.setdiff1d(np.flatnonzero(fixed), list(experts))
        there = self.slab_of[first + others] >= 0
        leave = others[np.lexsort((self.uses[first + others], there))][: len(wanted)]
        fixed[wanted[: len(leave)]], fixed[leave] = True, False
        slabs = self.slab_of[first + leave]
        slabs = slabs[slabs >= 0]
        self.ring[slabs] = True
        self.streamed[slabs] = self.state[slabs] == RESIDENT

    @property
    def fills_by_shares(self) -> bool:
        """What passes through the ring of a prompt is not left in free slabs: each layer has a share of these (`fill_share`)."""
        return self.pool.precision is None and not self.streamed_ring and not self.has_room_for_all

    def fill_share(self, layer: int) -> int:
        """How many more experts of a layer a prompt leaves in free slabs, if others shall have theirs."""
        evenly = sum(self._experts[other] for other in self.base if not self.pins(other))
        share = max(0, self.dynamic_slabs - self.ring_limits[HIGH]) * self._experts[layer] // max(1, evenly)
        slabs = self._slabs_of(layer)
        return min(self.pool.free, max(0, share - int(np.count_nonzero((slabs >= 0) & ~self.ring[slabs]))))

    def leave_instead(self, layer: int, coming: int, staying: Collection[int]) -> int:
        """So many experts that a prompt brings into the cache take the place of as many others of their layer, those used least:
        they leave once they were computed, or at once where this prompt does not want them. `staying`: experts that do not. So
        every layer keeps its share of the slabs. Returns how many leave."""
        first, slabs = self.base[layer], self._slabs_of(layer)
        there = (slabs >= 0) & (self.state[slabs] == RESIDENT) & ~(self.pinned | self.ring | self.speculative)[slabs]
        others = np.setdiff1d(np.flatnonzero(there), list(staying))
        leave = slabs[others[np.argsort(self.uses[first + others], kind="stable")][:coming]]
        self.ring[leave] = self.streamed[leave] = True  # until they are demanded, if they are
        self._ring_in_use |= len(leave) > 0
        return len(leave)

    def room_ahead(self, running_layer: int, window: int) -> Room | None:
        """A slab for an expert of the next layer, within the ring; never the last that a demand could take."""
        limit, through = self._ring_limit(HIGH), self.fills_by_shares
        if (not through or self._ring_slabs(self.ring, HIGH) < limit) and (spare := self._spare()) is not None:
            return spare._replace(ring=through)
        if self.pool.free + int(np.count_nonzero(self.evictable())) < 2:
            return None
        most = 0 if through and self.pool.free else limit  # no resident leaves while a demand may take the last free slab
        return self._evict_for(self.victim(running_layer, window), True, most, HIGH)

    def drop_ahead(self, layer: int) -> list[ExpertId]:
        """The router of `layer` has spoken: what comes through the ring for it in vain is used up. Returns these."""
        slabs = np.flatnonzero(self.ring & self.speculative & (self.layer_in == layer))
        self.speculative[slabs], self.left_for[slabs] = False, -1
        self.streamed[slabs] = self.state[slabs] == RESIDENT
        return [self.id_of[flat] for flat in self.expert_in[slabs]]

    def admission(self, running_layer: int, window: int) -> tuple[int, Room] | None:
        """The most used absent expert (flat index) and a slab for it, if it is worth more than the one evicted, or None.

        Misses that are computed below the device do not enter by themselves. Only what has expired makes room, and never the
        last slab that a demand could have.
        """
        uses = np.where((self.slab_of < 0) & (self.layer_of != running_layer), self.uses, 0.0)
        flat = int(uses.argmax())
        if uses[flat] <= 0:
            return None
        if (spare := self._spare()) is not None:
            return flat, spare
        victim = self.victim(running_layer, window, prefetch_priority=0.0)
        if victim is None or uses[flat] <= ADMISSION_GAIN * self.uses[self.expert_in[victim]]:
            return None
        return flat, Room(victim, False, self.evict(victim))

    def _evict_for(self, victim: int | None, streaming: bool, ring_limit: int, precision: int) -> Room | None:
        if victim is None:
            return None
        if streaming and not self.streamed[victim] and self._ring_slabs(self.ring, precision) >= ring_limit:
            return None
        return Room(victim, streaming, self.evict(victim))

    def _ring_limit(self, precision: int) -> int:
        """How many slabs of one format the ring of the running pass may have."""
        return self.streamed_ring or self.ring_limits[precision]

    def _ring_slabs(self, ring: np.ndarray, precision: int) -> int:
        """How many of these slabs of the prefill ring are of one format."""
        return int(np.count_nonzero(ring if self.pool.precision is None else ring & (self.pool.precision == precision)))

    def enter_layer(self, layer: int) -> None:
        """Guesses in the ring whose layer has passed are used up."""
        if self._ring_in_use:
            self.streamed |= self.ring & self.speculative & (self.layer_in < layer)

    def enter_demand(self, slabs: np.ndarray, stays: bool | np.ndarray) -> int:
        """The running layer wants what is (or soon will be) in `slabs` `[n]`; returns how many were guesses.

        `stays` (bool, or bool `[n]`): it is for the cache, and not only for this prefill chunk.
        """
        guesses = int(np.count_nonzero(self.speculative[slabs]))
        if guesses:
            left = self.left_for[slabs]
            self.displaced[left[left >= 0]] = False  # the demand itself would have sent them away
            self.speculative[slabs], self.left_for[slabs] = False, -1
        self.demanded[slabs] = True
        if self._ring_in_use:
            self.streamed[slabs] = False
            self.ring[slabs] &= np.logical_not(stays)
        return guesses

    def give_up_guesses(self) -> list[ExpertId]:
        """The request is over: what was prefetched and not demanded stays as an ordinary resident. Returns these."""
        slabs = np.flatnonzero(self.speculative & (self.state == RESIDENT))
        self.speculative[slabs], self.left_for[slabs] = False, -1
        self.streamed[slabs] = self.ring[slabs]
        return [self.id_of[flat] for flat in self.expert_in[slabs]]

    def leave_demand(self, slabs: np.ndarray) -> bool:
        """Computed, or given up: nothing protects them now, and copies that were ready replace them; whether that freed slabs."""
        self.demanded[slabs] = False
        if self._ring_in_use:
            self.streamed[slabs] = self.ring[slabs] & (self.state[slabs] == RESIDENT)
        return self._any_ready and self.register_ready()

    def register_ready(self) -> bool:
        """Copies that are ready become the resident ones, where no demand computes the old one; whether that freed slabs."""
        free = self.pool.free
        ready = np.flatnonzero((self.state == READY) & ~self.borrowed)
        for flat in self.expert_in[ready].tolist():
            if not self.demanded[self.slab_of[flat]]:
                self._register(flat)
        self._any_ready = bool(((self.state == READY) & ~self.borrowed).any())
        return self.pool.free > free

    def give_back_borrowed(self, flat: int) -> None:
        """A borrowed copy has served, or was not needed."""
        slab = int(self.incoming[flat])
        assert self.borrowed[slab] and self.state[slab] == READY
        self.incoming[flat] = -1
        self._empty(slab)
        self.pool.give_back(slab)

    def _register(self, flat: int) -> None:
        """The incoming copy is the resident one now; the old one is reclaimed at once."""
        new, old = int(self.incoming[flat]), int(self.slab_of[flat])
        self.state[new] = RESIDENT
        self.slab_of[flat], self.incoming[flat] = new, -1
        self.worth[new] = self.worth[old]
        self.streamed[new] = self.ring[new] and not (self.demanded[new] or self.speculative[new])
        self._empty(old)
        self.pool.give_back(old)

    def begin_guess(self, flat: int, room: Room) -> None:
        """A prefetch takes its slab."""
        self.begin_load(flat, room.slab, speculative=True, ring=room.ring)
        if room.evicted is not None:
            self.left_for[room.slab] = left = self.flat(room.evicted.expert)
            self.displaced[left] = True

    def begin_load(
        self,
        flat: int,
        slab: int,
        *,
        speculative: bool = False,
        ring: bool = False,
        demanded: bool = False,
        borrowed: bool = False,
    ) -> None:
        """A copy of an absent expert begins, or one in the other format of a resident one."""
        assert self.state[slab] == FREE and self.incoming[flat] == -1
        self.displaced[flat] = False
        if self.slab_of[flat] < 0:
            self.slab_of[flat] = slab
        else:
            assert self.state[self.slab_of[flat]] == RESIDENT
            self.incoming[flat] = slab
        self.expert_in[slab], self.layer_in[slab] = flat, self.layer_of[flat]
        self.state[slab], self.borrowed[slab] = LOADING, borrowed
        self.speculative[slab], self.ring[slab], self.demanded[slab] = speculative, ring, demanded
        self._ring_in_use |= ring
        self.worth[slab] = self.uses[flat] if self.order != "lru" else 0.0

    def end_load(self, flat: int, succeeded: bool) -> None:
        slab = self.coming(flat)
        assert self.state[slab] == LOADING
        if not succeeded:
            if self.incoming[flat] >= 0:
                self.incoming[flat] = -1
            else:
                self.slab_of[flat] = -1
            self._empty(slab)
            self.pool.give_back(slab)
        elif self.incoming[flat] < 0:
            self.state[slab] = RESIDENT
            self.streamed[slab] = self.ring[slab] and not (self.demanded[slab] or self.speculative[slab])
        else:
            self.state[slab] = READY
            if not self.borrowed[slab]:
                self._any_ready = True
                self.register_ready()

    def evict(self, slab: int) -> Evicted:
        """Empty a resident slab; the caller holds it now (state free, not in the pool's free list)."""
        assert self.state[slab] == RESIDENT and not self.demanded[slab] and not self.pinned[slab]
        flat = int(self.expert_in[slab])
        evicted = Evicted(self.id_of[flat], bool(self.speculative[slab]))
        self.slab_of[flat], self.incoming[flat] = self.incoming[flat], -1  # an upgrade that comes is all there is now
        self._empty(slab)
        return evicted

    def _empty(self, slab: int) -> None:
        """Nothing is in the slab; no index points to it any more."""
        self.expert_in[slab] = self.layer_in[slab] = self.left_for[slab] = -1
        self.state[slab] = FREE
        self.demanded[slab] = self.ring[slab] = self.streamed[slab] = self.speculative[slab] = self.borrowed[slab] = False

    def used(self, slabs: np.ndarray, tick: int) -> None:
        """The experts in `slabs` `[n]` were computed: worth more."""
        flat = self.expert_in[slabs]
        self.uses[flat] += self._use_weight
        self.worth[slabs] = float(tick) if self.order == "lru" else self.uses[flat]

    def used_on_host(self, flat: np.ndarray) -> None:
        """The experts `flat` `[n]` were computed in the tier below: worth more, should they come up."""
        self.uses[flat] += self._use_weight

    # -- memory that is lent to keys and values
    @property
    def unbacked_bytes(self) -> int:
        """Bytes of the pages that slabs have given back."""
        return sum(self.pool.pools[HIGH].page_bytes(slab) for slab in np.flatnonzero(self.state == UNBACKED).tolist())

    @property
    def _least_backed(self) -> int:
        """Slabs that stay: twice what a prefill chunk may take, so that half of them keep what decoding uses."""
        return 2 * self.ring_limits[HIGH]

    def unback(self, layer: int) -> Room | None:
        """Give the memory of a slab back to the system: of a free one, or of the one with the layer's expert that is worth least;
        None where there is none to give. Between passes."""
        if not self.pool.elastic or np.count_nonzero(self.state != UNBACKED) <= self._least_backed:
            return None
        slab, evicted = self.pool.take(), None
        if slab is None:
            mine = np.flatnonzero(self.evictable() & (self.layer_in == layer))
            if not mine.size:
                return None
            slab = int(mine[self.worth[mine].argmin()])
            evicted = self.evict(slab)
        if not self.pool.pools[HIGH].unback(slab):
            self.pool.give_back(slab)
        else:
            self.state[slab] = UNBACKED
        return Room(slab, evicted=evicted)

    def back(self) -> bool:
        """A slab that gave its memory back is free again, if there is one."""
        unbacked = np.flatnonzero(self.state == UNBACKED)
        if unbacked.size:
            self.state[unbacked[0]] = FREE
            self.pool.give_back(int(unbacked[0]))
        return bool(unbacked.size)

    def repair(self, loading: Collection[int]) -> None:
        """After an interrupt in the middle of a change: keep what is certainly true, free the rest.

        `loading`: slabs that a copy is being written to right now.
        """
        self.slab_of[:], self.incoming[:] = -1, -1
        for slab in np.flatnonzero(self.state != UNBACKED).tolist():
            resident, flat = self.state[slab] == RESIDENT, int(self.expert_in[slab])
            if flat < 0 or not (slab in loading or (resident and self.slab_of[flat] < 0)):
                self._empty(slab)
                self.pinned[slab] = False
            elif resident:
                self.slab_of[flat] = slab
        for slab in loading:
            flat = int(self.expert_in[slab])
            if flat >= 0:
                at = self.slab_of if self.slab_of[flat] < 0 else self.incoming
                at[flat], self.state[slab] = slab, LOADING
        self.demanded[:] = False
        held = np.flatnonzero((self.state != FREE) & (self.state != UNBACKED))
        self.layer_in[held] = self.layer_of[self.expert_in[held]]
        self.pool.free_only(np.flatnonzero(self.state == FREE).tolist())

    def check_integrity(self) -> None:
        """Free + loading + ready + resident + unbacked = capacity, an expert resident once, index and reality agree."""
        self.pool.check_integrity()
        empty = (self.state == FREE) | (self.state == UNBACKED)
        held, unbacked = np.flatnonzero(~empty), int((self.state == UNBACKED).sum())
        assert self.pool.free + held.size + unbacked == self.pool.capacity, "slabs were lost"
        flat = self.expert_in[held]
        assert (flat >= 0).all() and ((self.slab_of[flat] == held) | (self.incoming[flat] == held)).all()
        pointed = np.count_nonzero(self.slab_of >= 0) + np.count_nonzero(self.incoming >= 0)
        assert pointed == held.size, "an expert points to a slab that does not hold it"
        self._check_incoming()
        assert self._eviction.reads(self), "an array was replaced"
        assert (self.expert_in[empty] == -1).all() and not (self.demanded | self.pinned | self.borrowed)[empty].any()
        assert (self.layer_in[held] == self.layer_of[self.expert_in[held]]).all()
        assert (self.left_for[~self.speculative] == -1).all() and not self.displaced[self.expert_in[held]].any()
        assert not (self.streamed & ~self.ring).any() and (self._ring_in_use or not self.ring.any())

    def _check_incoming(self) -> None:
        """A copy that comes beside a resident one is in the other format, and each ready one is its expert's."""
        two = np.flatnonzero(self.incoming >= 0)
        new, old = self.incoming[two], self.slab_of[two]
        assert (self.state[old] == RESIDENT).all() and np.isin(self.state[new], (LOADING, READY)).all()
        assert np.count_nonzero(self.state == READY) == np.count_nonzero(self.state[new] == READY), "ready for no expert"
        if self.pool.precision is not None:
            assert (self.pool.precision[new] != self.pool.precision[old]).all(), "an expert twice in one format"
        else:
            assert two.size == 0
