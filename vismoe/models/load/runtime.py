"""What serves a loaded model's experts: one `Runtime` per model, made by `build`, changed by `reconfigure`, ended by `close`.

Everything that is allocated here is in the plan: pools, mover, pager and, where a policy chooses formats, what it holds.
"""

import contextlib
import gc
import logging
import traceback
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from vismoe.errors import ConfigError, VisMoEError
from vismoe.kernels.gpu.lossless import DecodingRing, GpuDecoder, ring_slots
from vismoe.kernels.read import start_readers
from vismoe.lookahead.lookahead import Lookahead
from vismoe.metrics import Metrics
from vismoe.models.family.components import is_vision
from vismoe.models.family.mtp import decoder_layers
from vismoe.models.load.draft_pool import filled_pools
from vismoe.models.load.host_rates import upgrade_rates, ways_here
from vismoe.models.load.opening import Configuration, Experts
from vismoe.models.load.tower_heap import watch_tower
from vismoe.models.moe.attention import attends_prompts, group_queries
from vismoe.models.moe.compute import FastExperts, TorchExperts
from vismoe.models.moe.decode_graph import WARM_PASSES, serve_decode_graphs
from vismoe.models.moe.decoder_layers import serve_decoder_layers
from vismoe.models.moe.draft_pool import DraftPool
from vismoe.models.moe.experts import bind
from vismoe.models.moe.format_choice import FormatChooser
from vismoe.models.moe.gpu_experts import GpuExperts
from vismoe.models.moe.heavy_hitters import HeavyHitters
from vismoe.models.moe.linears import MOST_ROWS, serve_linears, served
from vismoe.models.moe.lookahead_inputs import LookaheadInputs, choose_lookahead
from vismoe.models.moe.norms import serve_norms
from vismoe.models.moe.rotary import serve_rotations
from vismoe.models.moe.routers import serve_routers
from vismoe.models.moe.step_context import ExpertService, StepContext
from vismoe.models.moe.token_passes import serve_token_passes
from vismoe.models.visual.prune import VisualPruner
from vismoe.models.visual.settings import attach_pruner, fewer_experts
from vismoe.paging.miss import Upgrades
from vismoe.paging.page_table import DEVICE_RING_MOST, RING_MOST
from vismoe.paging.pager import Pager
from vismoe.paging.transfer import Decoding, DeviceMover, DiskMover, EmulatedLinkMover, Mover
from vismoe.planning.parts import COPY_STREAMS
from vismoe.planning.plan import Plan
from vismoe.pools.host_tier import HostTier
from vismoe.pools.pool import SlabPool
from vismoe.precision.controller import Precision
from vismoe.precision.hotness import Hotness
from vismoe.precision.policy import Policy
from vismoe.store.expert_store import ExpertStore, StoreOnDisk
from vismoe.store.read_ahead import take_memory
from vismoe.threads import waiting
from vismoe.types import HIGH, ExpertId

logger = logging.getLogger(__name__)
FILLED_BYTES = 64 * 2**20  # of experts: fewer arrive in a moment

Tiers = list[tuple[StoreOnDisk, HostTier]]  # host tiers, each with the store that its records are from
Pools = list[list[SlabPool]]  # per geometry one for each format


class Runtime:
    """Owns what serves the experts of one model. `configuration`: by which plan, out of which files.

    `context`: the forward pass under way, and the pager and backend that serve it; `backends`: what was chosen, and why;
    `metrics`: one for all configurations; `refused`: why the latest `reconfigure` failed, empty where it did not.
    """

    def __init__(
        self, model: Any, configuration: Configuration, context: StepContext, backends: dict[str, str], pools: Pools | None
    ):
        self.configuration, self.context, self.backends = configuration, context, backends
        self._learned: Hotness | None = None  # by an earlier configuration
        self._serve(configuration, *_service(model, configuration, pools=pools))

    def __deepcopy__(self, memo: Any) -> Any:
        return self.context.__deepcopy__(memo)

    __reduce_ex__ = __deepcopy__

    @property
    def pager(self) -> Pager:
        return self.context.serving.pager

    @property
    def plan(self) -> Plan:
        return self.configuration.plan

    @property
    def store(self) -> ExpertStore:
        """Of the more precise format, where there are two."""
        return self.configuration.stores.by_precision[HIGH]

    @property
    def format_names(self) -> tuple[str, ...]:
        """The formats that slabs hold, by precision."""
        return self.configuration.experts.names

    @property
    def pruner(self) -> VisualPruner | None:
        """Drops visual tokens; None: `backends["visual tokens"]` says why they cannot be dropped."""
        return self.context.pruner

    @property
    def lookahead(self) -> Lookahead | None:
        return self.context.lookahead_inputs.lookahead

    @property
    def drafts(self) -> DraftPool | None:
        """The copy of the experts that draft passes compute with; None: no such pool was asked for."""
        serving = self.context.now_serving
        return serving.drafts if serving is not None else None

    @property
    def hotness(self) -> Hotness | None:
        """What was learned about hot experts so far, also while another policy serves."""
        serving = self.context.now_serving
        chooser = serving.chooser if serving is not None else None
        return (chooser.precision.hotness if chooser is not None else None) or self._learned

    def reconfigure(self, model: Any, configuration: Configuration) -> None:
        """Serve experts by another configuration (`Configuration.with_settings`), by the one before where that fails.

        Between two requests, on the thread that runs the model. Raises what failed; the new configuration is closed then.
        """
        before, timeline = self.configuration, self.pager.timeline
        tiers: Tiers = list(zip(before.stores.by_precision, self.pager.hosts))
        drafts = self.drafts if _same_drafts(before, configuration) else None
        self._learned = self.hotness
        self.save_hotness()
        self.context.stop_serving()
        _give_back_memory(before.device)  # before any other is taken
        try:
            served = _service(model, configuration, self.metrics, self._learned, tiers, drafts)
        except BaseException as error:
            configuration.close_stores()
            _clear_frames(error)
            _give_back_memory(before.device)
            self._serve(before, *_service(model, before, self.metrics, self._learned, tiers, drafts))
            self.pager.timeline = timeline
            self.refused = str(error)
            raise
        before.close_stores()
        self._serve(configuration, *served)
        self.pager.timeline = timeline

    def _serve(self, configuration: Configuration, service: ExpertService, about: dict[str, str]) -> None:
        self.configuration, self.metrics, self.refused = configuration, service.pager.metrics, ""
        self.metrics.name_formats(self.format_names)
        self.backends |= about
        self.context.serve(service)

    def save_hotness(self) -> None:
        """Leave what was learned about hot experts in the file that the settings name; where it cannot be written, log why."""
        file, hotness = self.configuration.settings.hotness_state, self.hotness
        if hotness is None or not file:
            return
        try:
            hotness.save(Path(file).expanduser(), self.configuration.stores.fingerprint)
        except ConfigError as error:
            logger.error("%s", error)

    def stop(self) -> None:
        """Stop copies; requests fail from now on."""
        if self.context.now_serving is not None:
            self.context.now_serving.close()

    def close(self) -> None:
        """Stop copies and the lookahead, and close the files; may be called twice."""
        self.stop()
        self.context.lookahead_inputs.close()
        self.context.freed.end()  # of a pass that failed
        self.configuration.close()


def build(model: Any, configuration: Configuration, pools: Pools | None = None) -> Runtime:
    """The runtime of a model whose other weights are loaded, bound to its experts modules; it ends with the model. `pools`: what
    `pools_of` made for this configuration before.

    Every expert that has a place of its own is read before this returns. Raises ConfigError.
    """
    device, settings, inventory = configuration.device, configuration.settings, configuration.experts.inventory
    calibration, backends = configuration.calibration, dict[str, str]()
    if configuration.backbone.about:
        backends["rest"] = configuration.backbone.about
    if configuration.experts.kernels is not None:
        (linears, of_vision), routers = serve_linears(model), serve_routers(model)
        up_to = "any number of rows" if served(MOST_ROWS + 1) else f"up to {MOST_ROWS} rows"
        vision = f", {of_vision} of the vision tower" if of_vision else ""
        backends["linears"] = f"fast: {linears} linear layers of the decoder{vision} and {routers} routers, {up_to}"
        backends["norms"] = _serve_rows(model)
        backends["attention"] = _serve_attention(model)
        layers, with_experts = serve_decoder_layers(model)
        backends["layers"] = (
            f"one call for all of a single token in {layers} decoder layers, in {with_experts} of them with their experts"
        )
    elif configuration.experts.gpu_kernels is not None:
        backends["linears"] = f"torch's, and the choices of {serve_routers(model)} routers fast"
        backends["norms"] = _serve_rows(model)
        backends["attention"] = _serve_attention(model)
    try:
        lookahead, gate, backends["lookahead"] = choose_lookahead(model, decoder_layers(inventory), settings, calibration, device)
    except VisMoEError:
        configuration.stores.close()
        raise
    if device.type == "cpu":
        backends["workers"] = waiting().why
        if not waiting().settled:
            logger.warning("torch's worker threads will fight the copying ones for the cores: %s", waiting().why)
    inputs = LookaheadInputs(decoder_layers(inventory), settings.window, lookahead, gate, settings.deterministic, device)
    pruner, backends["visual tokens"] = attach_pruner(model, settings, calibration)
    context = StepContext(device, inputs, pruner, fewer_experts(settings, inventory))
    runtime = Runtime(model, configuration, context, backends, pools)
    bind(model, context)
    if device.type == "cpu":
        watch_tower(model, context)
    if configuration.experts.kernels is not None and serve_token_passes(model):
        backends["layers"] += ", and none of transformers' code between them"
    if configuration.experts.gpu_kernels is not None:
        serve_decode_graphs(model, context, partial(backends.__setitem__, "layers"))
        backends["layers"] = f"CUDA graphs for single tokens, after {WARM_PASSES} of them"
    logger.info("backends: %s", backends)
    model._vismoe_runtime = runtime
    weakref.finalize(model, runtime.close)
    return runtime


def _serve_rows(model: Any) -> str:
    """Let the kernels compute norms and rotary embeddings; says of how many modules."""
    return f"fast: {serve_norms(model)} of the decoder, and rotary embeddings of {serve_rotations(model)} attentions"


def _serve_attention(model: Any) -> str:
    why_not = group_queries(model)
    if why_not:
        return f"transformers' own ({why_not})"
    return "fast" if attends_prompts(model.device, model.dtype) else "fast for single tokens, else torch"


def runtime_of(model: Any) -> Runtime:
    """The runtime that serves a loaded model's experts: its pager, metrics and plan."""
    runtime = model.__dict__.get("_vismoe_runtime")
    if runtime is None:
        raise ConfigError("this model was not loaded with quantization_config=VisMoEConfig(...)")
    return runtime


@torch.inference_mode(False)  # what threads write into is allocated here, and they do not run in the mode of the one that loads
def _service(
    model: Any,
    configuration: Configuration,
    metrics: Metrics | None = None,
    hotness: Hotness | None = None,
    tiers: Tiers | None = None,
    drafts: DraftPool | None = None,
    pools: Pools | None = None,
) -> tuple[ExpertService, dict[str, str]]:
    """(what serves, what was chosen and why). `metrics` go on counting; `hotness` is what an earlier configuration has learned,
    and `tiers` what it has left: those that fit serve again with all that they hold, the others are dropped. `drafts`: the pool
    of an earlier one with the same copies. `pools`: of this configuration, and empty.

    Under hotness every expert is brought in before this returns, otherwise the pinned prefix.
    """
    settings, experts, plan, device = configuration.settings, configuration.experts, configuration.plan, configuration.device
    configuration.limit_gpu()
    mover, inventory = _mover(configuration, tiers if tiers is not None else []), experts.inventory
    records = (plan.host_slabs, plan.low_host_slabs)[: len(configuration.stores.by_precision)]
    if experts.ways is not None and settings.pair is None and plan.resident_experts == plan.total_experts:
        ways, misses = None, "wait (every expert has a place on the device)"
    elif experts.ways is not None and experts.ways.deterministic and min(map(sum, records)) < plan.total_experts:
        ways, misses = None, "wait (what lies in host memory depends on when it was read)"
    else:
        ways, misses = ways_here(experts.ways, inventory, experts.host_kernels, device, experts.dtype)
    about = {"kernels": experts.backend, "mover": type(mover).__name__, "reads": "; ".join(plan.reading), "misses": misses}
    policy = Policy.of(settings) if settings.pair is not None else None
    upgrades = None
    if policy is not None:
        upgrades = Upgrades(policy, (upgrade_rates(settings, device),) * len(inventory.layouts), settings.deterministic)
    pager = Pager(
        inventory,
        pools if pools is not None else pools_of(configuration),
        mover,
        order=settings.eviction,
        window=settings.window,
        pinned_layers=plan.pinned_layers,
        threads=1 if settings.deterministic else plan.io_threads,  # one reads in the order of the demands
        ways=ways,
        upgrades=upgrades,
        deterministic=settings.deterministic and policy is not None,
        may_stream=not settings.deterministic,
        ring_most=DEVICE_RING_MOST if device.type == "cuda" else RING_MOST,
        metrics=metrics,
    )
    try:
        chooser = _chooser(model, configuration, policy, hotness) if policy is not None else None
        about["policy"] = "exact" if policy is None else f"{settings.policy}, {settings.pair}{chooser.about if chooser else ''}"
        if ready := _read_ahead(pager, configuration.stores.by_precision[0]):
            pager.start_with(ready)
            about["reads"] += f"; {len(ready):,} experts were read while libraries were imported"
        bringing, total = _bring_in(pager, chooser, plan)
        for _ in tqdm(bringing, "Bringing in experts", total, unit="expert", delay=1, disable=None):
            pass
        if _fill(pager, configuration):
            about["reads"] += "; experts are read before a token asks for them"
        drafts = _draft_pool(configuration, drafts)
        if settings.draft == "none":
            about["drafts"] = "none"
        else:
            pool = f", {drafts.about}" if drafts is not None else ""
            about["drafts"] = f"none in model.generate(); vismoe.load() drafts ({settings.draft}{pool})"
    except BaseException:
        pager.close()
        raise
    return ExpertService(pager, _backend(experts, device), plan, chooser, drafts), about


def _draft_pool(configuration: Configuration, kept: DraftPool | None) -> DraftPool | None:
    """What drafts, with the experts that `kept` holds, where it is given. Raises CheckpointError."""
    draft, store = configuration.experts.draft, configuration.stores.draft
    if draft is None or store is None:
        return None
    pools = kept.pools if kept is not None else filled_pools(store, draft.inventory, configuration.plan.io_threads)
    return DraftPool(draft.inventory, pools, _backend(draft, configuration.device), draft.formats[0], draft.backend)


def _same_drafts(one: Configuration, other: Configuration) -> bool:
    """Whether both draft with the same records."""
    before, now = one.stores.draft, other.stores.draft
    if before is None or now is None:
        return False
    return (before.states, before.inventory.layouts) == (now.states, now.inventory.layouts)


@torch.inference_mode(False)
def pools_of(configuration: Configuration) -> Pools:
    """Per geometry a pool for each format, pinned experts included."""
    inventory, plan, device = configuration.experts.inventory, configuration.plan, configuration.device
    pinned = [0] * len(inventory.layouts)
    for layer in inventory.layers[: plan.pinned_layers]:
        pinned[layer.geometry] += layer.num_experts
    aliased = configuration.settings.emulated_link_bytes_per_s is not None
    slabs = [dynamic + fixed for dynamic, fixed in zip(plan.slabs, pinned, strict=True)]
    sizes = [count * layout.record_bytes for count, layout in zip(slabs, inventory.layouts, strict=True)]
    pools = []
    for geometry, layout in enumerate(inventory.layouts):
        early = take_memory if device.type == "cpu" and geometry == sizes.index(max(sizes)) else None  # one pool can have it
        pools.append([SlabPool(layout, slabs[geometry], device, aliased=aliased, early=early)])
        if inventory.low_layouts:
            pools[-1].append(SlabPool(inventory.low_layouts[geometry], plan.low_slabs[geometry], device, aliased=aliased))
    return pools


def _mover(configuration: Configuration, tiers: Tiers) -> Mover:
    stores, plan, device = configuration.stores.by_precision, configuration.plan, configuration.device
    inventory, encoded = configuration.experts.inventory, configuration.experts.encoded
    emulated = configuration.settings.emulated_link_bytes_per_s
    if emulated is None and device.type != "cuda":
        start_readers(plan.io_threads + 1)  # as many as copy, with the thread that waits
        return DiskMover(*stores)
    records = (plan.host_slabs, plan.low_host_slabs)[: len(stores)]
    layouts = (encoded or inventory.layouts, inventory.low_layouts)[: len(stores)]
    wanted = list(zip(stores, records, layouts, strict=True))
    fitting = {(store.states, store.inventory.layers, tier.records, tier.layouts): tier for store, tier in tiers}
    keys = [(store.states, store.inventory.layers, *there) for store, *there in wanted]
    tiers[:] = [(store, fitting[key]) for (store, *_), key in zip(wanted, keys, strict=True) if key in fitting]
    fitting.clear()  # the others give their memory back before any is taken
    kept, hosts = dict(tiers), []
    with torch.cuda.device(device) if emulated is None else contextlib.nullcontext():  # page-locking makes a context there
        for store, slabs, records_as in wanted:
            if store in kept:
                kept[store].go_on_with(store)
            hosts.append(kept.get(store) or HostTier(store, slabs, emulated is None, records_as))
        if emulated is not None:
            return EmulatedLinkMover(*hosts, bytes_per_s=emulated)
        decoding = None
        if encoded:
            decoders = [
                GpuDecoder(raw, device) if slab.sections else None
                for raw, slab in zip(inventory.raw_layouts, inventory.layouts, strict=True)
            ]
            largest = max(encoded, key=lambda layout: layout.record_bytes)
            decoding = Decoding(SlabPool(largest, COPY_STREAMS if any(decoders) else 0, device), decoders)
        return DeviceMover(*hosts, device=device, decoding=decoding)


def _chooser(model: Any, configuration: Configuration, policy: Policy, hotness: Hotness | None) -> FormatChooser:
    inventory, settings = configuration.experts.inventory, configuration.settings
    experts = [layer.num_experts for layer in inventory.layers]
    quotas = np.array(configuration.plan.hot_quota) if policy.hotness else None
    if policy.hotness and hotness is None and settings.hotness_state and Path(settings.hotness_state).expanduser().exists():
        hotness = Hotness(experts, policy.decay, policy.period_tokens)
        hotness.load(Path(settings.hotness_state).expanduser(), configuration.stores.fingerprint)
    deep = [not is_vision(layer.stack) for layer in inventory.layers]
    precision = Precision(policy, experts, quotas, hotness, deep)
    hitters: HeavyHitters | str = "not asked for"
    if policy.importance:
        hitters = HeavyHitters.of(model, inventory.layers)
    return FormatChooser(precision, inventory, hitters, settings.deterministic)


def _read_ahead(pager: Pager, store: StoreOnDisk) -> dict[ExpertId, tuple[int, int]]:
    """Experts of this store that were read into their slabs while libraries were imported, as `Pager.start_with` takes them."""
    found = dict[ExpertId, tuple[int, int]]()
    for geometry, table in enumerate(pager.tables):
        for pool in table.pool.pools:
            filled, pool.filled = pool.filled(), dict
            for layer in pager.inventory.layers_of(geometry) if filled else ():
                for expert in (ExpertId(layer.index, number) for number in range(layer.num_experts)):
                    slab, begin = filled.pop(store.lies(expert), (pool.capacity, 0))
                    if slab < pool.capacity and begin < max(1, pool.layout.room_bytes):
                        found[expert] = slab, begin
    return found


def _fill(pager: Pager, configuration: Configuration) -> bool:
    """Bring in what no token has asked for yet, where every expert has a slab; whether that is so.

    On a GPU passes without the pager need all experts. On a CPU the first passes would wait for those that are still missing,
    and before that, as long as layers find all of theirs, the disk would have nothing to do."""
    if configuration.settings.deterministic:
        return False
    if configuration.experts.gpu_kernels is not None:
        pager.fill(1)  # a copy cannot be called back, and a demand should not wait for several
    elif not pager.hosts and configuration.stores.reads.stored_bytes >= FILLED_BYTES:
        pager.fill(configuration.plan.io_threads)  # a demand waits for those that have begun: milliseconds, until all are there
    return pager.core.filling_at_once > 0


def _bring_in(pager: Pager, chooser: FormatChooser | None, plan: Plan) -> tuple[Any, int]:
    """(experts as they arrive, how many there are)."""
    if chooser is None or not chooser.precision.policy.hotness:
        return pager.pin_prefix(), sum(layer.num_experts for layer in pager.inventory.layers[: plan.pinned_layers])
    high = chooser.precision.targets
    if not high.any():  # no expert is known to be hot yet
        high = np.arange(high.shape[1]) < np.array(plan.hot_quota)[:, None]
    return pager.bring_in_all(high), plan.total_experts


def _backend(experts: Experts, device: torch.device) -> TorchExperts | FastExperts | GpuExperts:
    """What computes the experts of a layer."""
    if experts.kernels is not None:
        return FastExperts(experts.inventory, experts.kernels)
    on_host = FastExperts(experts.inventory, experts.host_kernels) if experts.host_kernels is not None else None
    if experts.gpu_kernels is not None:
        inventory = experts.inventory
        packed = [None if slab.sections else raw for raw, slab in zip(inventory.raw_layouts, inventory.layouts, strict=True)]
        ring = DecodingRing(packed, ring_slots(inventory.layers), device) if any(packed) else None
        return GpuExperts(inventory, experts.gpu_kernels, on_host, ring)
    return TorchExperts(experts.inventory, experts.codecs, device, on_host)


def _give_back_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # pools of other sizes do not fit into what the allocator keeps


def _clear_frames(error: BaseException | None) -> None:
    """Let go of what the frames of a failure hold, pools among it; the error itself can still be raised."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
