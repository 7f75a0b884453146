"""How a model's routed experts are stored, planned, held and computed: settled before anything is loaded.

`open_model` makes a `Configuration` while the model is on the meta device. `Configuration.with_settings` plans anew with other
settings, within the same memory, while the model runs; nothing is allocated by that.

A packed store is used when one is there and belongs to the checkpoint; otherwise experts are read in place. Formats that lose
bits are only taken when they were asked for. A policy that chooses between two formats has a store for each. Kernels are ours
where they exist for every geometry, and torch's otherwise; the choice and its reason are printed with the plan.
"""

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from vismoe.config import NO_STORE, Settings, format_bytes
from vismoe.errors import BudgetError, ConfigError
from vismoe.formats.codec import Codec
from vismoe.formats.encoded import encodings_of
from vismoe.kernels import cpu
from vismoe.kernels.codecs import codecs_of
from vismoe.kernels.gpu import experts as gpu
from vismoe.kernels.gpu.lossless import ring_bytes, ring_slots
from vismoe.lookahead.calibration import Calibration
from vismoe.machine.hardware import cores, probe
from vismoe.models.family.families import expert_modules
from vismoe.models.family.forms import forms_of, transposed_sections
from vismoe.models.load.backbone import Backbone, settle_backbone
from vismoe.models.load.embeddings import table_bytes, table_of
from vismoe.models.load.footprint import footprint, with_calibration
from vismoe.models.load.host_rates import packed_rates, ways_for
from vismoe.models.load.locate import locate
from vismoe.models.load.reading import Reading, settle_reading, start_reading
from vismoe.models.moe.compute import PAIRS_PER_CALL
from vismoe.models.moe.draft_pool import drafted_layers
from vismoe.models.moe.gpu_experts import PAIRS_PER_CALL as GPU_PAIRS
from vismoe.models.moe.heavy_hitters import hitters_bytes
from vismoe.paging.miss import Ways
from vismoe.planning.hierarchy import Packing, packed_from
from vismoe.planning.needs import Footprint, Hardware
from vismoe.planning.pair_split import paired
from vismoe.planning.plan import Plan
from vismoe.pools.gpu_limit import lift, limit
from vismoe.precision.hotness import profile_bytes, refuse_unwritable
from vismoe.speculate.worth import DraftCurves, RoundRates, worth
from vismoe.store.checkpoint import CheckpointStore
from vismoe.store.expert_store import LEAST_ROOMY_BYTES, Reads, StoreOnDisk, Stores
from vismoe.store.index import command
from vismoe.store.packed import PackedStore, find_store, formats_in, store_beside
from vismoe.store.packed_linears import PackedLinears
from vismoe.store.read_ahead import backed_bytes, held_bytes
from vismoe.types import ExpertForm, ExpertInventory, Format, FormatPair, RecordLayout

K = TypeVar("K")
BEST_FIRST = (Format.LOSSLESS, Format.RAW)  # of a store's exact formats: fewer bytes to read


@dataclass(frozen=True)
class Experts:
    """What is settled about the routed experts of one model."""

    inventory: ExpertInventory  # layouts of what slabs hold
    transposed: tuple[frozenset[str], ...]  # per geometry, the matrices that the model keeps as [in, out]
    where: str  # for people: the formats and where they are read
    codecs: tuple[tuple[Codec, ...], ...]  # by precision, per geometry
    kernels: tuple[cpu.ExpertKernel, ...] | None  # per geometry, for experts of all formats; without any, torch computes
    gpu_kernels: tuple[tuple[gpu.GpuKernel, ...], ...] | None  # per geometry, by precision
    host_kernels: tuple[cpu.ExpertKernel, ...] | None  # for experts that are computed in host memory below a device
    ways: Ways | None  # to serve a miss there, by rates that were not measured here; None: it waits
    backend: str  # for people: whose, and why
    dtype: torch.dtype  # of the hidden states
    encoded: tuple[RecordLayout, ...] = ()  # per geometry, of the records of the first format that cross the link encoded
    policy_bytes: int = 0  # what choosing formats holds: attention that is listened to, the scores of hot experts
    draft: "Experts | None" = None  # the copy of the same experts that draft passes compute with

    @property
    def formats(self) -> tuple[Format, ...]:
        """What slabs hold, the more precise format first."""
        return tuple(codecs[0].format for codecs in self.codecs)

    @property
    def names(self) -> tuple[str, ...]:
        """The same for people: of a quantised checkpoint, its own encodings."""
        return tuple("+".join(dict.fromkeys(name for codec in codecs for name in codec.names)) for codecs in self.codecs)

    @property
    def workspace_bytes(self) -> int:
        """What computing and choosing formats keep: the kernels' own buffers, or the experts that torch computes with, and what a
        policy holds (that of hotness in host memory, and counted here all the same)."""
        if self.gpu_kernels is not None:
            return self.policy_bytes + max(
                kernel.workspace_bytes(GPU_PAIRS) for kernels in self.gpu_kernels for kernel in kernels
            )
        computed = (self,) if self.draft is None else (self, self.draft)
        kernels = [kernel for experts in computed for kernel in experts.kernels or ()]  # which share a workspace
        return self.policy_bytes + self._kernel_bytes(kernels) + sum(experts._restored_bytes for experts in computed)

    @property
    def host_workspace_bytes(self) -> int:
        """What computing keeps in host memory below a device."""
        return 0 if self.host_kernels is None else self._kernel_bytes(self.host_kernels)

    @property
    def draft_bytes(self) -> int:
        """Of the pool that drafts."""
        if self.draft is None:
            return 0
        inventory = self.draft.inventory
        return sum(layer.num_experts * inventory.layout(layer.index).record_bytes for layer in drafted_layers(inventory))

    @property
    def _restored_bytes(self) -> int:
        """Of the experts that torch computes with, where slabs hold them in another type."""
        restored = self.kernels is None and any(codec.restores for codecs in self.codecs for codec in codecs)
        return sum(codec.raw.record_bytes for codec in self.codecs[0]) if restored else 0

    def _kernel_bytes(self, kernels: Sequence[cpu.ExpertKernel]) -> int:
        if not kernels:
            return 0
        setup = cpu.setup()
        return max(cpu.workspace_bytes(k, PAIRS_PER_CALL, self.dtype, setup.threads, setup.isa) for k in kernels)


@dataclass(frozen=True)
class Configuration:
    """How a model is served: the settings, and what follows from them. The first fields are settled when the model is loaded."""

    source: CheckpointStore  # open, whether or not experts are read from it
    needs: Footprint
    hardware: Hardware  # before loading
    device: torch.device
    calibration: Calibration | None
    table_bytes: int  # of token embeddings that could stay on disk
    settings: Settings
    stores: Stores  # that serve the experts, open
    experts: Experts
    backbone: Backbone
    reading: Reading

    @property
    def plan(self) -> Plan:
        return self.reading.plan

    def with_settings(self, model: Any, settings: Settings) -> "Configuration":
        """The same with other settings. Raises ConfigError, CheckpointError or BudgetError; nothing more is open then."""
        settled = dataclasses.replace(
            settings,
            embeddings="disk" if self.reading.embeddings_on_disk else "memory",
            reads=self.reading.chosen,
            parallel=self.plan.rows,  # the passes under way were made for so many
            draft="self" if self.experts.draft is not None and settings.draft == "auto" else settings.draft,
        )
        with torch.device("cpu"):
            stores, experts = _open_stores(model, self.source, settled, self.device)
        other = dataclasses.replace(self, settings=settings, stores=stores, experts=experts)
        try:
            reading, stores, experts = _read(
                model, self.needs, stores, experts, self.backbone, settled, self.hardware, self.table_bytes
            )
        except BaseException:
            other.close_stores()
            raise
        return dataclasses.replace(other, reading=reading, stores=stores, experts=experts)

    def close_stores(self) -> None:
        """Close the stores, but for the checkpoint itself, which other configurations may read from."""
        for store in self.stores.all:
            if store is not self.source:
                store.close()

    def limit_gpu(self) -> None:
        """Hold torch to the budget, where the device is a GPU and a budget was given, until `close`."""
        if self.device.type == "cuda" and self.settings.memory != "auto":
            limit(self.source, self.device, self.hardware.held_bytes, self.plan.budget_bytes)

    def close(self) -> None:
        """Close the stores and the checkpoint."""
        lift(self.source)
        self.stores.close()
        self.source.close()


def open_model(model: Any, files: Sequence[str | Path] | None, settings: Settings, device: torch.device) -> Configuration:
    """For a model on the meta device with its experts' parameters still there.

    Raises CheckpointError, ConfigError, BudgetError or UnsupportedModelError; nothing is open then.
    """
    with torch.device("cpu"):  # the loader's own context would put what is measured here on meta
        source, stores, experts, backbone = open_experts(model, files, settings, device)
        try:
            calibration = Calibration.find(source.paths[0].parent, settings)
            curves, why_not = calibration.drafts if calibration is not None else None, ""
            table = table_bytes(model) if table_of(model, source.headers) else 0
            ahead, hardware = (held_bytes(), backed_bytes()), probe(device)  # in this order: both end with it
            if settings.draft == "auto":
                stores, experts, why_not = _with_weighed_draft(model, source, stores, experts, curves, settings, device)
            unpacked = experts
            try:
                needs = needs_of(model, experts, stores.reads, calibration, settings, device)
                hardware = _with_read_ahead(hardware, needs, *ahead)
                reading, stores, experts = _read(model, needs, stores, experts, backbone, settings, hardware, table)
                unpaid = _not_worth(reading.plan, experts, curves, settings)
            except (BudgetError, ConfigError) as error:
                if settings.draft != "auto" or stores.draft is None:
                    raise
                unpaid = str(error)
            if unpaid and settings.draft == "self":
                fix = "draft='ngram' (--draft ngram), which takes no memory, or draft='none'"
                raise ConfigError(f"draft='self': {unpaid}. Fix: {fix}")
            if unpaid:
                stores, experts, why_not = stores.without_draft(), dataclasses.replace(unpacked, draft=None), unpaid
                needs = needs_of(model, experts, stores.reads, calibration, settings, device)
                reading, stores, experts = _read(model, needs, stores, experts, backbone, settings, hardware, table)
            if why_not:
                reading = _saying(reading, f"no copy of the experts drafts: {why_not}")
        except BaseException:
            stores.close()
            source.close()
            raise
    return Configuration(source, needs, hardware, device, calibration, table, settings, stores, experts, backbone, reading)


def _with_read_ahead(hardware: Hardware, needs: Footprint, tensor_bytes: int, slab_bytes: int) -> Hardware:
    """The same, of which what was read ahead takes nothing, as far as it can be part of what is needed beside the experts, and
    neither does memory for slabs that has its pages."""
    if hardware.device != "cpu":
        return hardware
    free_bytes = hardware.free_bytes + min(tensor_bytes, sum(nbytes for _, nbytes in needs.backbone)) + slab_bytes
    return dataclasses.replace(hardware, free_bytes=free_bytes, free_host_bytes=free_bytes)


def _read(
    model: Any,
    needs: Footprint,
    stores: Stores,
    experts: Experts,
    backbone: Backbone,
    settings: Settings,
    hardware: Hardware,
    table_bytes: int,
) -> tuple[Reading, Stores, Experts]:
    """(the plan, by which the stores read from now on; these stores; how slabs hold experts)."""
    reading, stores, experts = settle(model, needs, stores, experts, settings, hardware, table_bytes)
    reading = start_reading(stores, reading, settings)
    return dataclasses.replace(reading, plan=with_experts(reading.plan, experts, backbone)), stores, experts


def _saying(reading: Reading, sentence: str) -> Reading:
    return dataclasses.replace(reading, plan=dataclasses.replace(reading.plan, reading=(*reading.plan.reading, sentence)))


def settle(
    model: Any,
    needs: Footprint,
    stores: Stores,
    experts: Experts,
    settings: Settings,
    hardware: Hardware,
    table_bytes: int,
) -> tuple[Reading, Stores, Experts]:
    """(the plan, the stores to read from, how slabs hold experts): packed where they are lossless and not all fit otherwise, as
    far as passes are expected to take less time so (planning/hierarchy.py)."""
    own, packing = with_experts_of(needs, stores.reads, experts), _packing(model, stores, experts, settings)
    if not isinstance(packing, Packing):
        reading = settle_reading(own, settings, hardware, stores.reads, table_bytes)
        return (_saying(reading, packing) if packing else reading), stores, experts
    own = dataclasses.replace(own, packing=packing)
    reading = settle_reading(own, settings, hardware, stores.reads, table_bytes)
    first = reading.plan.packed_from
    reading = _saying(reading, packing.rates.says(reading.plan.shares(experts.inventory)))
    if first is None:
        return reading, stores, experts
    high = stores.by_precision[0]
    assert isinstance(high, PackedStore)
    packed = _with_packed(model, experts, high.encoded_layouts, first)
    assert isinstance(packed, Experts), packed
    return reading, Stores([high.encoded(0 if experts.encoded else first, packed.inventory)], stores.draft), packed


def _packing(model: Any, stores: Stores, experts: Experts, settings: Settings) -> Packing | str:
    """How slabs could hold records as they are stored, or why not; empty: nothing to say. Raises ConfigError."""
    high, on_gpu = stores.by_precision[0], experts.gpu_kernels is not None
    lossless = experts.formats == (Format.LOSSLESS,) and isinstance(high, PackedStore)
    if not lossless or settings.packed_slabs == "never" or settings.emulated_link_bytes_per_s is not None:
        return ""
    assert isinstance(high, PackedStore)
    why_not = "torch computes" if experts.kernels is None and not on_gpu else ""
    if on_gpu and not experts.encoded:
        why_not = "host memory holds them decoded"
    packed = why_not or _with_packed(model, experts, high.encoded_layouts, 0)
    if isinstance(packed, str):
        if settings.packed_slabs == "always":
            raise ConfigError(f"packed_slabs='always': {packed}. Fix: packed_slabs='auto' (--packed-slabs auto)")
        return f"experts lie decoded in slabs: {packed}"
    return Packing(
        high.encoded_layouts,
        packed_rates(settings, torch.device("cuda" if on_gpu else "cpu")),
        must=settings.packed_slabs == "always",
        workspace_bytes=max(experts.workspace_bytes, packed.workspace_bytes),
        scratch_bytes=stores.reads.scratch_bytes,
        ring_bytes=ring_bytes(packed.inventory.raw_layouts, ring_slots(packed.inventory.layers)) if on_gpu else 0,
    )


def _with_packed(model: Any, experts: Experts, layouts: tuple[RecordLayout, ...], first: int) -> Experts | str:
    """The same with packed slabs from MoE layer `first` on, or why our kernels cannot compute them. layouts: per geometry, of
    those slabs."""
    inventory, origin = packed_from(experts.inventory, layouts, first)
    forms, formats = forms_of(model, inventory), experts.formats
    if experts.gpu_kernels is not None:
        on_gpu = _gpu_kernels(forms, inventory, formats, experts.dtype)
        if isinstance(on_gpu, str):
            return on_gpu
        served, when = dataclasses.replace(experts, gpu_kernels=on_gpu), "just before they are computed"
    else:
        kernels = _kernels(forms, inventory, formats)
        if isinstance(kernels, str):
            return kernels
        served, when = dataclasses.replace(experts, kernels=kernels), "while they are computed"
    return dataclasses.replace(
        served,
        inventory=inventory,
        transposed=tuple(experts.transposed[geometry] for geometry in origin),
        codecs=tuple(tuple(codecs[geometry] for geometry in origin) for codecs in experts.codecs),
        backend=f"{experts.backend}; lossless records are decoded {when}",
        encoded=tuple(experts.encoded[geometry] for geometry in origin if experts.encoded),
    )


def needs_of(
    model: Any, experts: Experts, reads: Reads, calibration: Calibration | None, settings: Settings, device: torch.device
) -> Footprint:
    """What a model on the meta device needs, whose experts are served and read like this."""
    needs = with_experts_of(footprint(model, experts.inventory, settings, device=device.type), reads, experts)
    return with_calibration(needs, calibration, settings, device)


def with_experts_of(needs: Footprint, reads: Reads, experts: Experts) -> Footprint:
    """The needs of a model whose experts are served like this."""
    return dataclasses.replace(
        needs,
        inventory=experts.inventory,
        transposed=experts.transposed,
        scratch_bytes=reads.scratch_bytes,
        by_kernels=experts.kernels is not None or experts.gpu_kernels is not None,
        workspace_bytes=experts.workspace_bytes,
        host_workspace_bytes=experts.host_workspace_bytes,
        encoded=experts.encoded,
        draft_bytes=experts.draft_bytes,
        draft_format=str(experts.draft.formats[0]) if experts.draft is not None else "",
    )


def open_experts(
    model: Any, files: Sequence[str | Path] | None, settings: Settings, device: torch.device
) -> tuple[CheckpointStore, Stores, Experts, Backbone]:
    """(the checkpoint, the stores that serve, how, what else is encoded): for a model on the meta device with its experts'
    parameters still there, whose encoded linear layers are replaced.

    Raises CheckpointError for a store that does not fit, ConfigError for a format or kernels that are not there.
    """
    source, others = locate(model, files, model.dtype)
    try:
        backbone = settle_backbone(model, others, settings, device, _packed_linears(source, settings, device))
        return source, *_open_stores(model, source, settings, device), backbone
    except BaseException:
        source.close()
        raise


def _packed_linears(source: CheckpointStore, settings: Settings, device: torch.device) -> PackedLinears | None:
    """The linear layers in int8, where they were asked for."""
    if settings.backbone == "own":
        return None
    if settings.kernels == "torch" or device.type != "cpu":
        raise ConfigError(
            "backbone='int8' is computed by the CPU kernels alone. Fix: kernels='auto' (--kernels auto) on the CPU, or "
            "backbone='own' (--backbone own)"
        )
    beside = settings.store in (None, NO_STORE)
    return PackedLinears.open(store_beside(source.paths[0]) if beside else Path(str(settings.store)).expanduser(), source)


def _open_stores(model: Any, source: CheckpointStore, settings: Settings, device: torch.device) -> tuple[Stores, Experts]:
    """The same for a checkpoint that is known; the model's experts' parameters may be gone."""
    if settings.hotness_state is not None:
        refuse_unwritable(Path(settings.hotness_state).expanduser())
    transposed = transposed_sections(model, source.inventory)
    if settings.pair is not None:
        paired(source.inventory, settings.pair, transposed)  # refuses formats in which the experts cannot be
    opened: list[StoreOnDisk] = []
    sayings: list[str] = []
    try:
        for format in _asked(settings):
            store, where = _open_store(source, settings, format, transposed)
            opened.append(store)
            sayings.append(where)
        in_place = codecs_of(Format.RAW, source.inventory, transposed)
        codecs = tuple(store.contents.codecs if isinstance(store, PackedStore) else in_place for store in opened)
        high, *low = opened
        inventory = dataclasses.replace(high.inventory, own_layouts=source.inventory.own_layouts)
        if low:
            inventory = dataclasses.replace(inventory, low_layouts=low[0].inventory.layouts)
        experts = _arrange(model, inventory, transposed, codecs, " and ".join(sayings), settings, device)
        if opened == [source]:
            experts = _with_room(experts, source, settings)
        if experts.encoded:
            assert isinstance(high, PackedStore), "only packed experts are lossless"
            experts = dataclasses.replace(experts, encoded=high.encoded_layouts)
            opened[0] = high.encoded()
        if settings.draft != "self":
            return Stores(opened), experts
        return _open_with_draft(model, source, opened, experts, settings, device)
    except BaseException:
        for store in opened:
            if store is not source:
                store.close()
        raise


def _with_room(experts: Experts, source: CheckpointStore, settings: Settings) -> Experts:
    """The same with slabs into which a disk can write records of the checkpoint's files, where our kernels compute from there."""
    inventory, room_bytes = experts.inventory, 0
    if experts.kernels is not None and settings.reads != "cached" and settings.emulated_link_bytes_per_s is None:
        room_bytes = source.room_bytes()
    if not room_bytes or any(layout.record_bytes < LEAST_ROOMY_BYTES for layout in inventory.layouts):
        return experts
    layouts = tuple(layout.with_room(room_bytes) for layout in inventory.layouts)
    return dataclasses.replace(experts, inventory=dataclasses.replace(inventory, layouts=layouts))


def _open_with_draft(
    model: Any,
    source: CheckpointStore,
    opened: Sequence[StoreOnDisk],
    experts: Experts,
    settings: Settings,
    device: torch.device,
) -> tuple[Stores, Experts]:
    """The same with a copy of the experts that drafts: it is served as if it were the only one, with all of it resident."""
    try:
        stores, draft = _open_stores(model, source, _settings_of_drafts(settings, device), device)
    except ConfigError as error:
        raise ConfigError(f"draft='self' with draft_format='{settings.draft_format}': {error}") from error
    try:
        return Stores(opened, stores.by_precision[0]), _with_draft(experts, draft)
    except BaseException:
        stores.close()
        raise


def _with_weighed_draft(
    model: Any,
    source: CheckpointStore,
    stores: Stores,
    experts: Experts,
    curves: DraftCurves | None,
    settings: Settings,
    device: torch.device,
) -> tuple[Stores, Experts, str]:
    """(the stores, the experts, why no copy drafts): with a copy where it is packed, and was calibrated to be weighed."""
    if curves is None or settings.draft_format not in curves.formats:
        return stores, experts, f"its worth was not calibrated in {settings.draft_format} (vismoe pack, then vismoe calibrate)"
    try:
        return *_open_with_draft(model, source, stores.by_precision, experts, settings, device), ""
    except ConfigError as error:
        return stores, experts, str(error)


def _not_worth(plan: Plan, experts: Experts, curves: DraftCurves | None, settings: Settings) -> str:
    """Why the copy that drafts does not pay under this plan; empty where it does, where there is none, or where nothing says.

    A draft pass is taken to last as long as one of the model with all of its experts there: where the processor has AVX2 alone,
    decoding few bits takes as long as reading many (docs/benchmark.md).
    """
    draft = experts.draft
    if draft is None or curves is None or str(draft.formats[0]) not in curves.formats:
        return ""
    compute_s, pool = [one.compute_seconds for one in plan.checks], experts.draft_bytes / experts.inventory.slab_bytes
    rates = RoundRates(
        draft_s=compute_s[0],
        compute_s=lambda rows: compute_s[rows - 1],
        expert_bytes=experts.inventory.slab_bytes / plan.total_experts,
        link_bytes_per_s=plan.rates.missing_bytes_per_s,
    )
    lengths = range(1, len(compute_s)) if settings.draft_tokens == "auto" else (settings.draft_tokens,)
    without = plan.resident_experts / plan.total_experts + pool
    return worth(curves, str(draft.formats[0]), rates, without, pool, lengths).refusal or ""


def _settings_of_drafts(settings: Settings, device: torch.device) -> Settings:
    if device.type != "cpu":
        raise ConfigError(
            "draft='self' computes its guesses on the CPU alone so far. Fix: draft='ngram' (--draft ngram), or device='cpu'"
        )
    return dataclasses.replace(settings, draft="none", format=settings.draft_format, emulated_link_bytes_per_s=None)


def _with_draft(experts: Experts, draft: Experts) -> Experts:
    """The same with a copy that drafts. Raises ConfigError where it takes no fewer bytes: its passes would not be shorter."""
    for served, copy in zip(experts.inventory.layouts, draft.inventory.layouts, strict=True):
        if copy.payload_bytes >= served.payload_bytes:
            smaller = "a smaller copy (--draft-format int2), or " if draft.formats[0] is not Format.INT2 else ""
            raise ConfigError(
                f"draft='self' with draft_format='{draft.formats[0]}': a copy of an expert takes "
                f"{format_bytes(copy.payload_bytes)}, and the expert itself {format_bytes(served.payload_bytes)}, so that "
                f"guessing takes as long as computing. Fix: {smaller}draft='ngram' (--draft ngram)"
            )
    return dataclasses.replace(experts, draft=draft)


def _asked(settings: Settings) -> tuple[Format | None, ...]:
    """The formats that slabs shall hold; None: whatever keeps every bit."""
    if settings.pair is None:
        return (None if settings.format == "auto" else Format(settings.format),)
    return tuple(None if format is Format.RAW else format for format in settings.pair.resident)


def arrange_experts(model: Any, inventory: ExpertInventory, settings: Settings, device: torch.device) -> Experts:
    """The same for a model whose files are not here, or not packed yet: what would be."""
    transposed = transposed_sections(model, inventory)
    formats = tuple(format or Format.RAW for format in _asked(settings))
    codecs = tuple(codecs_of(format, inventory, transposed) for format in formats)
    paired_inventory = inventory
    if formats != (Format.RAW,):
        paired_inventory = paired(inventory, settings.pair or FormatPair(formats[0], None), transposed)
    own = " and ".join(encodings_of(paired_inventory)) or "raw"
    sayings = [f"{own}, in place from the checkpoint" if f is Format.RAW else f"{f}, not packed yet" for f in formats]
    experts = _arrange(model, paired_inventory, transposed, codecs, " and ".join(sayings), settings, device)
    if settings.draft != "self":
        return experts
    return _with_draft(experts, arrange_experts(model, inventory, _settings_of_drafts(settings, device), device))


def with_experts(plan: Plan, experts: Experts, backbone: Backbone | None = None) -> Plan:
    """The plan, which also says where the experts come from, what computes them, and what else is encoded."""
    about = backbone.about if backbone is not None else ""
    return dataclasses.replace(plan, experts=experts.where, kernels=experts.backend, rest=about)


def _open_store(
    source: CheckpointStore, settings: Settings, asked: Format | None, transposed: tuple[frozenset[str], ...]
) -> tuple[StoreOnDisk, str]:
    """(the store that serves this format, None for one that keeps every bit; what to say about it)."""
    formats = (
        asked if settings.pair is None else ",".join(format for format in settings.pair.resident if format is not Format.RAW)
    )
    pack = "vismoe pack MODEL" + (f" --gguf {shlex.quote(str(settings.gguf))}" if settings.gguf is not None else "")
    in_place = f"{' and '.join(encodings_of(source.inventory)) or 'raw'}, in place from the checkpoint"
    folder = find_store(source.paths[0]) if settings.store is None else None
    if settings.store not in (None, NO_STORE):
        folder = Path(settings.store).expanduser()
        if not formats_in(folder):
            raise ConfigError(
                f"store={settings.store!r}: no packed format is there. Fix: {pack} --out {settings.store}, "
                f"another folder, or --store {NO_STORE} to read in place"
            )
    if folder is None:
        if asked in (None, Format.RAW):
            return source, in_place
        raise ConfigError(
            f"format='{asked}' needs packed experts, and there is no store beside "
            f"{source.paths[0].parent if settings.gguf is None else settings.gguf}. "
            f"Fix: {pack} --formats {formats}, or name the store (--store FOLDER)"
        )
    there = formats_in(folder)
    chosen = asked or next((format for format in BEST_FIRST if format in there), None)
    if chosen is None or (chosen is Format.RAW and chosen not in there):
        return source, f"{in_place}: {folder} holds {', '.join(there)}"
    if chosen not in there:
        raise ConfigError(f"format='{chosen}': {folder} holds {', '.join(there)}. Fix: {command(folder, chosen)}")
    return PackedStore.open(folder, source, chosen, transposed), f"{chosen}, packed in {folder}"


def _arrange(
    model: Any,
    inventory: ExpertInventory,
    transposed: tuple[frozenset[str], ...],
    codecs: tuple[tuple[Codec, ...], ...],
    where: str,
    settings: Settings,
    device: torch.device,
) -> Experts:
    if settings.emulated_link_bytes_per_s is not None and device.type != "cpu":
        raise ConfigError("emulated_link_bytes_per_s stands in for a device on the CPU. Fix: leave it out, or device='cpu'")
    formats = tuple(by_geometry[0].format for by_geometry in codecs)
    found: tuple[cpu.ExpertKernel, ...] | str = "torch was asked for"
    on_gpu: tuple[tuple[gpu.GpuKernel, ...], ...] | str = "torch was asked for"
    if settings.kernels != "torch":
        forms = forms_of(model, inventory)
        found = _kernels(forms, inventory, formats)
        if device.type != "cpu":
            on_gpu = gpu.missing(device, model.dtype) or _gpu_kernels(forms, inventory, formats, model.dtype)
    why_not = found if device.type == "cpu" else on_gpu
    if isinstance(why_not, str) and settings.kernels == "fast":
        raise ConfigError(f"kernels='fast': {why_not}. Fix: kernels='auto' (--kernels auto)")
    if not isinstance(found, str):
        setup = cpu.start(min(torch.get_num_threads(), cores()))
        fast = f"fast ({setup.isa}, {setup.threads} threads: {setup.why})"
    if "importance" in settings.policy and any(getattr(module, "row_groups", 1) > 1 for _, module in expert_modules(model)):
        raise ConfigError(
            f"policy={settings.policy!r} weighs experts by the router's weights, and this family's experts get tokens that are "
            "weighed already. Fix: policy='hotness' (--policy hotness)"
        )
    ways = ways_for(settings, device, inventory.raw_layouts, found if isinstance(found, str) else None)
    policy_bytes = hitters_bytes(model, settings.context) if "importance" in settings.policy else 0
    if "hotness" in settings.policy:
        policy_bytes += profile_bytes([layer.num_experts for layer in inventory.layers])
    kernels = found if device.type == "cpu" and not isinstance(found, str) else None
    host_kernels = found if device.type != "cpu" and ways and not isinstance(found, str) else None
    if isinstance(why_not, str):
        restores = any(codec.restores for by_geometry in codecs for codec in by_geometry)
        exact = "experts are restored first" if restores else "bit-identical to eager experts"
        backend = f"torch ({exact}; {why_not})" if settings.kernels != "torch" else f"torch ({exact})"
    else:
        backend = fast if kernels else f"fast (Triton, {torch.cuda.get_device_name(device)})"
    if host_kernels:
        backend += f"; in host memory {fast}"
    encoded: tuple[RecordLayout, ...] = ()
    if device.type != "cpu" and formats[0] is Format.LOSSLESS:
        why_decoded = gpu.missing(device, model.dtype)
        if why_decoded is None and settings.misses != "wait":  # they may be computed there, from decoded weights
            why_decoded = f"misses='{settings.misses}'; with misses='wait' (--misses wait) they stay encoded"
        if why_decoded is None:
            encoded = tuple(RecordLayout((), codec.most_bytes) for codec in codecs[0])
            backend += "; lossless records stay encoded in host memory, the GPU decodes them"
        else:
            backend += f"; lossless records lie decoded in host memory ({why_decoded})"
    gpu_kernels = None if isinstance(on_gpu, str) else on_gpu
    serving = kernels, gpu_kernels, host_kernels
    return Experts(inventory, transposed, where, codecs, *serving, ways, backend, model.dtype, encoded, policy_bytes)


def _kernels(
    forms: Sequence[ExpertForm | str], inventory: ExpertInventory, formats: Sequence[Format]
) -> tuple[cpu.ExpertKernel, ...] | str:
    """The CPU kernels of every geometry, or why there are none."""
    found = _per_geometry(cpu.ExpertKernel.of, forms, inventory, formats)
    if isinstance(found, str):
        return found
    return tuple(cpu.ExpertKernel.mixed(kernels) if len(kernels) > 1 else kernels[0] for kernels in found)


def _gpu_kernels(
    forms: Sequence[ExpertForm | str], inventory: ExpertInventory, formats: Sequence[Format], dtype: torch.dtype
) -> tuple[tuple[gpu.GpuKernel, ...], ...] | str:
    """The GPU kernels of every geometry, by precision, or why there are none."""

    def kernel_of(format: Format, raw: RecordLayout, slab: RecordLayout, form: ExpertForm) -> gpu.GpuKernel | str:
        return gpu.GpuKernel.of(format, raw, slab if slab.sections else raw, form, dtype)  # packed ones are decoded before

    return _per_geometry(kernel_of, forms, inventory, formats)


def _per_geometry(
    kernel_of: Callable[[Format, RecordLayout, RecordLayout, ExpertForm], K | str],
    forms: Sequence[ExpertForm | str],
    inventory: ExpertInventory,
    formats: Sequence[Format],
) -> tuple[tuple[K, ...], ...] | str:
    """For every geometry a kernel for each format, or why there is none."""
    found: list[tuple[K, ...]] = []
    layouts = [inventory.layouts, inventory.low_layouts][: len(formats)]
    for form, raw, *slabs in zip(forms, inventory.raw_layouts, *layouts, strict=True):
        kernels: list[K] = []
        for format, slab in zip(formats, slabs, strict=True):
            kernel = form if isinstance(form, str) else kernel_of(format, raw, slab, form)
            if isinstance(kernel, str):
                return kernel
            kernels.append(kernel)
        found.append(tuple(kernels))
    return tuple(found)
