"""Loading through transformers' own doors: `from_pretrained(path, quantization_config=VisMoEConfig(memory="20GiB"))`.

The quantizer's first hook runs while the model is on the meta device: it refuses what cannot work, plans the memory, and takes
the experts out, so that the loader never touches them. Its second hook runs when the other weights are there: it moves them into
anonymous memory and starts the pager. `generate()` and everything else stay transformers' own.
"""

import dataclasses
import logging
import weakref
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from vismoe.config import Settings
from vismoe.errors import ConfigError, VisMoEError
from vismoe.lookahead.calibration import Calibration
from vismoe.memory.hardware import probe, torch_device
from vismoe.memory.host import HostTier
from vismoe.memory.kernel_cache import bound_kernel_caches
from vismoe.memory.plan import Plan
from vismoe.memory.pool import SlabPool
from vismoe.models.adapters import adapt
from vismoe.models.attention import group_queries
from vismoe.models.compute import Arithmetic, FastExperts, TorchExperts
from vismoe.models.embeddings import leave_on_disk, table_bytes, table_of
from vismoe.models.experts import IMPLEMENTATION, ExpertRuntime
from vismoe.models.families import refuse_unsupported, unmark_quantized
from vismoe.models.footprint import footprint, with_calibration
from vismoe.models.foresight import Foresight, choose_lookahead
from vismoe.models.linears import MOST_ROWS, serve_linears
from vismoe.models.opening import Experts, open_experts, with_experts
from vismoe.models.reading import settle_reading, start_reading
from vismoe.models.stripping import own_memory, strip_experts
from vismoe.models.visual import attach_pruner, fewer_experts
from vismoe.paging.pager import Pager
from vismoe.paging.transfer import DeviceMover, DiskMover, EmulatedLinkMover, Mover
from vismoe.store.expert_store import StoreOnDisk
from vismoe.threads import waiting

__all__ = ["VisMoEConfig", "runtime_of"]

logger = logging.getLogger(__name__)
METHOD = "vismoe"
AUTO_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@register_quantization_config(METHOD)
class VisMoEConfig(QuantizationConfigMixin):
    """Settings of an engine as a transformers quantization config; the names are those of `vismoe.config.Settings`.

    Not stored in checkpoints: it says how a machine runs a model, and every weight keeps all its bits.
    """

    def __init__(self, **settings: Any):
        settings.pop("quant_method", None)
        self.quant_method = METHOD
        for name, value in dataclasses.asdict(Settings.of(**settings)).items():
            setattr(self, name, value)

    @property
    def settings(self) -> Settings:
        return Settings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)})


@register_quantizer(METHOD)
class VisMoEQuantizer(HfQuantizer):
    """Overrides hooks whose signatures transformers 5.17 to 5.23 share, and nothing else."""

    requires_calibration = False

    def update_device_map(self, device_map: Any) -> Any:
        """`auto` and its kin spread whole layers; here the model goes to one device and the experts are paged."""
        return {"": torch_device(None)} if device_map in AUTO_MAPS else device_map

    def _process_model_before_weight_loading(
        self, model: Any, device_map: Any = None, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        settings = self.quantization_config.settings
        bound_kernel_caches()
        adapt(model)
        refuse_unsupported(model)
        device = _one_device(device_map)
        with torch.device("cpu"):  # the loader's own context would put what is measured here on meta
            source, store, experts = open_experts(model, checkpoint_files, settings, device)
        try:
            calibration = Calibration.find(source.paths[0].parent, settings)
            with torch.device("cpu"):
                needs = footprint(
                    model,
                    store.inventory,
                    settings,
                    scratch_bytes=store.scratch_bytes,
                    workspace_bytes=experts.workspace_bytes,
                    host_workspace_bytes=experts.host_workspace_bytes,
                )
                needs = with_calibration(needs, calibration, settings, device)
            table = table_of(model, source.headers)
            reading = settle_reading(
                needs,
                settings,
                probe(device),
                bounce_bytes=store.bounce_bytes,
                table_bytes=table_bytes(model) if table else 0,
                files=store.paths,
                stored_bytes=store.stored_bytes,
            )
            self.plan = with_experts(start_reading(store, reading, settings), experts)
            if table and reading.embeddings_on_disk:
                weakref.finalize(model, leave_on_disk(model, table).close)
        except BaseException:
            store.close()
            raise
        finally:
            if source is not store:
                source.close()
        weakref.finalize(model, store.close)  # also when loading fails later
        self._store, self._experts, self._settings, self._calibration = store, experts, settings, calibration
        strip_experts(model)
        model.set_experts_implementation(IMPLEMENTATION)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        unmark_quantized(model)
        own_memory(model)
        attach(model, self._store, self._experts, self.plan, self._settings, self._calibration)
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def runtime_of(model: Any) -> ExpertRuntime:
    """The runtime that serves a loaded model's experts: its pager, metrics and plan."""
    runtime = model.__dict__.get("_vismoe_runtime")
    if runtime is None:
        raise ConfigError("this model was not loaded with quantization_config=VisMoEConfig(...)")
    return runtime


def attach(
    model: Any, store: StoreOnDisk, experts: Experts, memory: Plan, settings: Settings, calibration: Calibration | None
) -> ExpertRuntime:
    """Build the tiers, the pager, the arithmetic and the lookahead for a loaded model, and bind them to its experts modules."""
    device = next(model.parameters()).device
    inventory = store.inventory
    pinned = [0] * len(inventory.layouts)
    for layer in inventory.layers[: memory.pinned_layers]:
        pinned[layer.geometry] += layer.num_experts
    emulated = settings.emulated_link_bytes_per_s
    pools = tuple(
        SlabPool(layout, dynamic + fixed, device, aliased=emulated is not None)
        for layout, dynamic, fixed in zip(inventory.layouts, memory.slabs, pinned, strict=True)
    )
    mover: Mover
    if emulated is not None:
        mover = EmulatedLinkMover(HostTier(store, memory.host_slabs, page_locked=False), emulated)
    elif device.type == "cuda":
        mover = DeviceMover(HostTier(store, memory.host_slabs, page_locked=True), device)
    else:
        mover = DiskMover(store)
    backends = {"kernels": experts.arithmetic, "mover": type(mover).__name__, "reads": "; ".join(memory.reading)}
    ways = experts.ways
    if ways is not None and ways.deterministic and sum(memory.host_slabs) < memory.total_experts:
        ways = None  # what lies in host memory depends on when it was read
    backends["misses"] = f"{settings.misses}: {ways.rates[0]}" if ways is not None else "wait"
    arithmetic = _arithmetic(experts, device)
    if experts.kernels is not None:
        backends["linears"] = f"fast: {serve_linears(model)} linear layers of the decoder, up to {MOST_ROWS} rows"
        why_not = group_queries(model)
        backends["attention"] = f"transformers' own ({why_not})" if why_not else "torch, the queries of a group as rows"
    try:
        lookahead, gate, backends["lookahead"] = choose_lookahead(model, inventory, settings, calibration)
    except VisMoEError:
        store.close()
        raise
    if device.type == "cpu":
        backends["workers"] = waiting().why
        if not waiting().settled:
            logger.warning("torch's worker threads will fight the copying ones for the cores: %s", waiting().why)
    logger.info("backends: %s", backends)
    pager = Pager(
        inventory,
        pools,
        mover,
        order=settings.eviction,
        window=settings.window,
        pinned_layers=memory.pinned_layers,
        threads=1 if settings.deterministic else memory.io_threads,  # one reads in the order of the demands
        ways=ways,
    )
    foresight = Foresight(pager, lookahead, gate, inline=settings.deterministic, cores_shared=device.type == "cpu")
    runtime = ExpertRuntime(pager, arithmetic, memory, device, foresight, store, backends)
    runtime.pruner, backends["visual tokens"] = attach_pruner(model, settings, calibration)
    runtime.visual_top_k = fewer_experts(settings, inventory)
    runtime.bind(model)
    model._vismoe_runtime = runtime
    weakref.finalize(model, pager.close)  # runs before the store's, which was made earlier
    weakref.finalize(model, foresight.close)
    for _ in tqdm(pager.pin_prefix(), "Pinning experts", sum(pinned), unit="expert", delay=1, disable=None):
        pass
    return runtime


def _arithmetic(experts: Experts, device: torch.device) -> Arithmetic:
    """Who computes the experts of a layer."""
    if experts.kernels is not None:
        return FastExperts(experts.inventory, experts.kernels)
    on_host = FastExperts(experts.inventory, experts.host_kernels) if experts.host_kernels is not None else None
    return TorchExperts(experts.inventory, experts.codecs, device, on_host)


def _one_device(device_map: Any) -> torch.device:
    """The device of a `device_map`; experts are served on one."""
    if device_map is None:
        return torch.device("cpu")
    places = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
    devices = {torch_device(f"cuda:{place}" if isinstance(place, int) else place) for place in places if place != "disk"}
    if len(devices) != 1 or "disk" in places:
        raise ConfigError(
            f"device_map spreads the model over {sorted(map(str, places))}; VisMoE pages experts to one device. "
            "Fix: device_map='cuda'"
        )
    return devices.pop()
