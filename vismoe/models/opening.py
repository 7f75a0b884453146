"""How a model's routed experts are stored, held and computed: settled once, before anything is loaded.

A packed store is used when one is there and belongs to the checkpoint; otherwise experts are read in place. Formats that lose
bits are only taken when they were asked for. Kernels are ours where they exist for every geometry, and torch's otherwise; the
choice and its reason are printed with the plan.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vismoe.config import Settings
from vismoe.errors import ConfigError
from vismoe.formats.codec import Codec, codec_of
from vismoe.kernels import cpu
from vismoe.memory.plan import Plan
from vismoe.models.compute import PAIRS_PER_CALL
from vismoe.models.forms import forms_of, transposed_sections
from vismoe.models.locate import locate_experts
from vismoe.store.checkpoint import CheckpointStore
from vismoe.store.expert_store import StoreOnDisk
from vismoe.store.packed import PackedStore, find_store, formats_in
from vismoe.types import ExpertForm, ExpertInventory, Format

__all__ = ["Experts", "arrange_experts", "open_experts", "with_experts"]

BEST_FIRST = (Format.LOSSLESS, Format.RAW)  # of a store's exact formats: fewer bytes to read


@dataclass(frozen=True)
class Experts:
    """What is settled about the routed experts of one model."""

    inventory: ExpertInventory  # layouts of what slabs hold
    format: Format
    where: str  # for people: the format and where it is read
    codecs: tuple[Codec, ...]  # per geometry
    kernels: tuple[cpu.ExpertKernel, ...] | None  # per geometry; None: torch computes
    host_kernels: tuple[cpu.ExpertKernel, ...] | None  # for experts that are computed in host memory below a device
    arithmetic: str  # for people: whose, and why
    dtype: torch.dtype  # of the hidden states

    def workspace_bytes(self, context_tokens: int) -> int:
        """What computing keeps: the kernels' own buffers, or the expert that torch computes with."""
        kept = 0
        if self.host_kernels:
            pairs, backend = max(PAIRS_PER_CALL, context_tokens), cpu.backend()
            kept = max(cpu.workspace_bytes(k, pairs, self.dtype, backend.threads, backend.isa) for k in self.host_kernels)
        restored = 0 if self.kernels or self.format.exact else sum(codec.raw.record_bytes for codec in self.codecs)
        return kept + restored


def open_experts(
    model: Any, files: Sequence[str | Path] | None, settings: Settings, device: torch.device
) -> tuple[CheckpointStore, StoreOnDisk, Experts]:
    """(the checkpoint, the store that serves, how): for a model on the meta device with its experts' parameters still there.

    Raises CheckpointError for a store that does not fit, ConfigError for a format or kernels that are not there.
    """
    source = locate_experts(model, files, model.dtype)
    try:
        store, where = _open_store(source, settings, transposed_sections(model, source.inventory))
        packed = store.format if isinstance(store, PackedStore) else Format.RAW
        return source, store, _arrange(model, store.inventory, packed, where, settings, device)
    except BaseException:
        source.close()
        raise


def arrange_experts(model: Any, inventory: ExpertInventory, settings: Settings, device: torch.device) -> Experts:
    """The same for a model whose files are not here, or not packed yet: what would be."""
    format = Format.RAW if settings.format == "auto" else Format(settings.format)
    transposed = transposed_sections(model, inventory)
    codecs = [codec_of(format, raw, names) for raw, names in zip(inventory.raw_layouts, transposed, strict=True)]
    if format is not Format.RAW:
        layouts = tuple(codec.slab for codec in codecs)
        inventory = dataclasses.replace(inventory, layouts=layouts, model_layouts=inventory.raw_layouts)
    return _arrange(model, inventory, format, f"{format}, not packed yet", settings, device)


def with_experts(plan: Plan, experts: Experts) -> Plan:
    """The plan, which also says where the experts come from and who computes them."""
    return dataclasses.replace(plan, experts=experts.where, kernels=experts.arithmetic)


def _open_store(source: CheckpointStore, settings: Settings, transposed: tuple[frozenset[str], ...]) -> tuple[StoreOnDisk, str]:
    """(the store that serves, what to say about it)."""
    asked = None if settings.format == "auto" else Format(settings.format)
    folder = Path(settings.store).expanduser() if settings.store else find_store(source.paths[0].parent)
    if folder is None:
        if asked in (None, Format.RAW):
            return source, "raw, in place from the checkpoint"
        raise ConfigError(
            f"format='{asked}' needs packed experts, and there is no store beside {source.paths[0].parent}. "
            f"Fix: vismoe pack MODEL --formats {asked}, or name the store (--store FOLDER)"
        )
    there = formats_in(folder)
    chosen = asked or next((format for format in BEST_FIRST if format in there), None)
    if chosen is None or (chosen is Format.RAW and chosen not in there):
        return source, f"raw, in place from the checkpoint: {folder} holds {', '.join(there) or 'nothing yet'}"
    if chosen not in there:
        raise ConfigError(
            f"format='{chosen}': {folder} holds {', '.join(there) or 'nothing yet'}. Fix: vismoe pack MODEL --formats {chosen}"
        )
    return PackedStore.open(folder, source, chosen, transposed), f"{chosen}, packed in {folder}"


def _arrange(
    model: Any, inventory: ExpertInventory, format: Format, where: str, settings: Settings, device: torch.device
) -> Experts:
    transposed = transposed_sections(model, inventory)
    codecs = tuple(codec_of(format, raw, names) for raw, names in zip(inventory.raw_layouts, transposed, strict=True))
    if settings.kernels == "torch":
        why = "bit-identical to eager experts" if format.exact else "integer formats are restored first"
        return Experts(inventory, format, where, codecs, None, None, f"torch ({why})", model.dtype)
    kernels = _kernels(forms_of(model, inventory), inventory, format)
    why_not = kernels if isinstance(kernels, str) else "the fast kernels are for the CPU" if device.type != "cpu" else None
    if why_not and settings.kernels == "fast":
        raise ConfigError(f"kernels='fast': {why_not}. Fix: kernels='auto' (--kernels auto)")
    if isinstance(kernels, str):
        return Experts(inventory, format, where, codecs, None, None, f"torch ({kernels})", model.dtype)
    backend = cpu.start()
    fast = f"fast ({backend.isa}, {backend.threads} threads: {backend.why})"
    if why_not:
        return Experts(inventory, format, where, codecs, None, kernels, f"torch; in host memory {fast}", model.dtype)
    return Experts(inventory, format, where, codecs, kernels, kernels, fast, model.dtype)


def _kernels(forms: Sequence[ExpertForm | str], inventory: ExpertInventory, format: Format) -> tuple[cpu.ExpertKernel, ...] | str:
    """The CPU kernels of every geometry, or why there are none."""
    found: list[cpu.ExpertKernel] = []
    for form, raw, slab in zip(forms, inventory.raw_layouts, inventory.layouts, strict=True):
        kernel = form if isinstance(form, str) else cpu.ExpertKernel.of(format, raw, slab, form)
        if isinstance(kernel, str):
            return kernel
        found.append(kernel)
    return tuple(found)
