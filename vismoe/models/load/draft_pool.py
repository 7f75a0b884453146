"""Fills the pool that drafts: every expert of the decoder in the low format, read and checked once out of the packed store."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from tqdm.auto import tqdm

from vismoe.models.moe.draft_pool import drafted_layers, first_slabs
from vismoe.pools.pool import SlabPool
from vismoe.store.expert_store import StoreOnDisk
from vismoe.types import ExpertId, ExpertInventory


def filled_pools(store: StoreOnDisk, inventory: ExpertInventory, threads: int) -> Sequence[SlabPool]:
    """Per geometry a pool of exactly the slabs of `first_slabs`, read by so many threads. Raises CheckpointError."""
    first, counts = first_slabs(inventory)
    pools = [SlabPool(layout, slabs) for layout, slabs in zip(inventory.layouts, counts, strict=True)]
    places = [
        (ExpertId(layer.index, expert), pools[layer.geometry].record(first[layer.index] + expert))
        for layer in drafted_layers(inventory)
        for expert in range(layer.num_experts)
    ]

    def read(place: tuple[ExpertId, torch.Tensor]) -> int:
        return store.read(*place)

    readers = ThreadPoolExecutor(threads, "vismoe-drafts")
    try:
        for _ in tqdm(readers.map(read, places), "Bringing in drafts", len(places), unit="expert", delay=1, disable=None):
            pass
    finally:
        readers.shutdown(cancel_futures=True)
    return pools
