"""Where a loaded model's experts come from, what it needs beside them and on which machine: what a new plan begins with.

Loading makes an `Origin` once, while the model is on the meta device. `Origin.reopen` plans anew with other settings, within the
same memory, while the model runs; nothing is allocated by that.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from vismoe.config import Settings
from vismoe.models.load.opening import Experts, reopen_experts, with_experts
from vismoe.models.load.reading import settle_reading, start_reading
from vismoe.planning.needs import Footprint, Hardware
from vismoe.planning.plan import Plan
from vismoe.store.checkpoint import CheckpointStore
from vismoe.store.several import Stores

__all__ = ["Opened", "Origin", "with_experts_of"]


@dataclass(frozen=True)
class Opened:
    """Stores that are open, and the plan by which their experts are to be served."""

    settings: Settings
    stores: Stores
    experts: Experts
    plan: Plan


@dataclass(frozen=True)
class Origin:
    """The checkpoint (open, whether or not experts are read from it), what the model needs, and the machine before loading."""

    source: CheckpointStore
    needs: Footprint
    hardware: Hardware
    device: torch.device
    table_bytes: int  # of token embeddings that could stay on disk
    embeddings_on_disk: bool = False  # as was settled when the model was loaded
    past_cache: bool = False  # experts are read past the page cache; likewise

    def arrange(self, stores: Stores, experts: Experts, settings: Settings) -> tuple[Opened, "Origin"]:
        """(how experts of these stores are served, this with what was settled about reading). Raises BudgetError."""
        reading = settle_reading(
            with_experts_of(self.needs, stores, experts),
            settings,
            self.hardware,
            bounce_bytes=stores.bounce_bytes,
            table_bytes=self.table_bytes,
            files=stores.paths,
            stored_bytes=stores.stored_bytes,
        )
        plan, past_cache = start_reading(stores, reading, settings)
        settled = dataclasses.replace(self, embeddings_on_disk=reading.embeddings_on_disk, past_cache=past_cache)
        return Opened(settings, stores, experts, with_experts(plan, experts)), settled

    def reopen(self, model: Any, settings: Settings) -> Opened:
        """Stores and plan for other settings. Raises ConfigError, CheckpointError or BudgetError; nothing is left open then."""
        settled = dataclasses.replace(
            settings,
            embeddings="disk" if self.embeddings_on_disk else "memory",
            reads="direct" if self.past_cache else "cached",
        )
        with torch.device("cpu"):
            stores, experts = reopen_experts(model, self.source, settled, self.device)
        try:
            opened, _ = self.arrange(stores, experts, settled)
        except BaseException:
            self.close(stores)
            raise
        return dataclasses.replace(opened, settings=settings)

    def close(self, stores: Stores) -> None:
        """Close stores of this checkpoint, but for the checkpoint itself, which others may be read from."""
        for store in stores.by_precision:
            if store is not self.source:
                store.close()


def with_experts_of(needs: Footprint, stores: Stores, experts: Experts) -> Footprint:
    """The needs of a model whose experts are served like this."""
    return dataclasses.replace(
        needs,
        inventory=experts.inventory,
        transposed=experts.transposed,
        scratch_bytes=stores.scratch_bytes,
        by_kernels=experts.kernels is not None,
        workspace_bytes=experts.workspace_bytes,
        host_workspace_bytes=experts.host_workspace_bytes,
    )
