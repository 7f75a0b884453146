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

from vismoe.config import NO_STORE, Settings
from vismoe.errors import ConfigError
from vismoe.formats.codec import Codec, codec_of
from vismoe.kernels import cpu
from vismoe.memory.hardware import cores
from vismoe.memory.plan import Plan
from vismoe.models.below import ways_for
from vismoe.models.compute import PAIRS_PER_CALL
from vismoe.models.forms import forms_of, transposed_sections
from vismoe.models.locate import locate_experts
from vismoe.paging.miss import Ways
from vismoe.store.checkpoint import CheckpointStore
from vismoe.store.expert_store import StoreOnDisk
from vismoe.store.index import command
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
    ways: Ways | None  # to serve a miss there; None: it waits
    arithmetic: str  # for people: whose, and why
    dtype: torch.dtype  # of the hidden states

    @property
    def workspace_bytes(self) -> int:
        """What computing keeps on the device: the kernels' own buffers, or the experts that torch computes with."""
        if self.kernels is not None:
            return self._kernel_bytes(self.kernels)
        return 0 if self.format.exact else sum(codec.raw.record_bytes for codec in self.codecs)

    @property
    def host_workspace_bytes(self) -> int:
        """What computing keeps in host memory below a device."""
        return 0 if self.host_kernels is None else self._kernel_bytes(self.host_kernels)

    def _kernel_bytes(self, kernels: Sequence[cpu.ExpertKernel]) -> int:
        backend = cpu.backend()
        return max(cpu.workspace_bytes(k, PAIRS_PER_CALL, self.dtype, backend.threads, backend.isa) for k in kernels)


def open_experts(
    model: Any, files: Sequence[str | Path] | None, settings: Settings, device: torch.device
) -> tuple[CheckpointStore, StoreOnDisk, Experts]:
    """(the checkpoint, the store that serves, how): for a model on the meta device with its experts' parameters still there.

    Raises CheckpointError for a store that does not fit, ConfigError for a format or kernels that are not there.
    """
    source = locate_experts(model, files, model.dtype)
    try:
        transposed = transposed_sections(model, source.inventory)
        store, where = _open_store(source, settings, transposed)
        in_place = _codecs(Format.RAW, source.inventory, transposed)
        codecs = store.contents.codecs if isinstance(store, PackedStore) else in_place
        return source, store, _arrange(model, store.inventory, codecs, where, settings, device)
    except BaseException:
        source.close()
        raise


def arrange_experts(model: Any, inventory: ExpertInventory, settings: Settings, device: torch.device) -> Experts:
    """The same for a model whose files are not here, or not packed yet: what would be."""
    format = Format.RAW if settings.format == "auto" else Format(settings.format)
    codecs = _codecs(format, inventory, transposed_sections(model, inventory))
    if format is not Format.RAW:
        layouts = tuple(codec.slab for codec in codecs)
        inventory = dataclasses.replace(inventory, layouts=layouts, model_layouts=inventory.raw_layouts)
    return _arrange(model, inventory, codecs, f"{format}, not packed yet", settings, device)


def _codecs(format: Format, inventory: ExpertInventory, transposed: tuple[frozenset[str], ...]) -> tuple[Codec, ...]:
    return tuple(codec_of(format, raw, names) for raw, names in zip(inventory.raw_layouts, transposed, strict=True))


def with_experts(plan: Plan, experts: Experts) -> Plan:
    """The plan, which also says where the experts come from and who computes them."""
    return dataclasses.replace(plan, experts=experts.where, kernels=experts.arithmetic)


def _open_store(source: CheckpointStore, settings: Settings, transposed: tuple[frozenset[str], ...]) -> tuple[StoreOnDisk, str]:
    """(the store that serves, what to say about it)."""
    asked = None if settings.format == "auto" else Format(settings.format)
    folder = find_store(source.paths[0].parent) if settings.store is None else None
    if settings.store not in (None, NO_STORE):
        folder = Path(settings.store).expanduser()
        if not formats_in(folder):
            raise ConfigError(
                f"store={settings.store!r}: no packed format is there. Fix: vismoe pack MODEL --out {settings.store}, "
                f"another folder, or --store {NO_STORE} to read in place"
            )
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
        return source, f"raw, in place from the checkpoint: {folder} holds {', '.join(there)}"
    if chosen not in there:
        raise ConfigError(f"format='{chosen}': {folder} holds {', '.join(there)}. Fix: {command(folder, chosen)}")
    return PackedStore.open(folder, source, chosen, transposed), f"{chosen}, packed in {folder}"


def _arrange(
    model: Any, inventory: ExpertInventory, codecs: tuple[Codec, ...], where: str, settings: Settings, device: torch.device
) -> Experts:
    if settings.emulated_link_bytes_per_s is not None and device.type != "cpu":
        raise ConfigError("emulated_link_bytes_per_s stands in for a device on the CPU. Fix: leave it out, or device='cpu'")
    format = codecs[0].format
    found: tuple[cpu.ExpertKernel, ...] | str = "torch was asked for"
    if settings.kernels != "torch":
        found = _kernels(forms_of(model, inventory), inventory, format)
    why_not = found if isinstance(found, str) else "the fast kernels are for the CPU" if device.type != "cpu" else None
    if why_not and settings.kernels == "fast":
        raise ConfigError(f"kernels='fast': {why_not}. Fix: kernels='auto' (--kernels auto)")
    if not isinstance(found, str):
        backend = cpu.start(min(torch.get_num_threads(), cores()))
        fast = f"fast ({backend.isa}, {backend.threads} threads: {backend.why})"
    ways = ways_for(settings, device, inventory.raw_layouts, found if isinstance(found, str) else None)
    if isinstance(found, str):
        exact = "bit-identical to eager experts" if format.exact else "integer formats are restored first"
        arithmetic = f"torch ({exact}; {found})" if settings.kernels != "torch" else f"torch ({exact})"
        return Experts(inventory, format, where, codecs, None, None, None, arithmetic, model.dtype)
    if device.type == "cpu":
        return Experts(inventory, format, where, codecs, found, None, ways, fast, model.dtype)
    arithmetic = f"torch ({why_not})" + (f"; in host memory {fast}" if ways else "")
    return Experts(inventory, format, where, codecs, None, found if ways else None, ways, arithmetic, model.dtype)


def _kernels(forms: Sequence[ExpertForm | str], inventory: ExpertInventory, format: Format) -> tuple[cpu.ExpertKernel, ...] | str:
    """The CPU kernels of every geometry, or why there are none."""
    found: list[cpu.ExpertKernel] = []
    for form, raw, slab in zip(forms, inventory.raw_layouts, inventory.layouts, strict=True):
        kernel = form if isinstance(form, str) else cpu.ExpertKernel.of(format, raw, slab, form)
        if isinstance(kernel, str):
            return kernel
        found.append(kernel)
    return tuple(found)
