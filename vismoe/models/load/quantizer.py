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
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from vismoe.config import Settings
from vismoe.errors import ConfigError, VisMoEError
from vismoe.lookahead.calibration import Calibration
from vismoe.machine.hardware import probe, torch_device
from vismoe.models.family.checkpoint_files import refuse_routing
from vismoe.models.family.families import refuse_unsupported, unmark_quantized
from vismoe.models.load.embeddings import leave_on_disk, table_bytes, table_of
from vismoe.models.load.footprint import footprint, with_calibration
from vismoe.models.load.opening import open_experts
from vismoe.models.load.origin import Opened, Origin, with_experts_of
from vismoe.models.load.serving import serve
from vismoe.models.load.stripping import own_memory, strip_experts
from vismoe.models.moe.adapters import adapt
from vismoe.models.moe.attention import group_queries
from vismoe.models.moe.experts import IMPLEMENTATION, ExpertRuntime
from vismoe.models.moe.linears import MOST_ROWS, serve_linears
from vismoe.models.moe.lookahead_inputs import LookaheadInputs, choose_lookahead
from vismoe.models.visual.settings import attach_pruner, fewer_experts
from vismoe.pools.kernel_cache import bound_kernel_caches
from vismoe.pools.malloc import return_large_blocks
from vismoe.store.safetensors_header import refuse_changed
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
        bound_kernel_caches(settings.kernels)
        return_large_blocks()
        adapt(model)
        refuse_unsupported(model)
        refuse_routing(model)
        device = _one_device(device_map)
        with torch.device("cpu"):  # the loader's own context would put what is measured here on meta
            source, stores, experts = open_experts(model, checkpoint_files, settings, device)
        weakref.finalize(model, source.close)  # also when loading fails later
        try:
            self._calibration = Calibration.find(source.paths[0].parent, settings)
            with torch.device("cpu"):
                needs = with_experts_of(footprint(model, experts.inventory, settings, device=device.type), stores, experts)
                needs = with_calibration(needs, self._calibration, settings, device)
            table = table_of(model, source.headers)
            origin = Origin(source, needs, probe(device), device, table_bytes(model) if table else 0)
            self._opened, self._origin = origin.arrange(stores, experts, settings)
            if table and self._origin.embeddings_on_disk:
                weakref.finalize(model, leave_on_disk(model, table).close)
        except BaseException:
            stores.close()
            raise
        weakref.finalize(model, stores.close)
        strip_experts(model)
        model.set_experts_implementation(IMPLEMENTATION)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        unmark_quantized(model)
        own_memory(model)
        refuse_changed(self._origin.source.headers, "loaded", "load the model again, when nobody writes to its files")
        attach(model, self._origin, self._opened, self._calibration)
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


def attach(model: Any, origin: Origin, opened: Opened, calibration: Calibration | None) -> ExpertRuntime:
    """Build what serves a loaded model's experts, and the lookahead, and bind them to its experts modules."""
    device, settings, inventory = origin.device, opened.settings, opened.experts.inventory
    backends: dict[str, str] = {}
    if opened.experts.kernels is not None:
        backends["linears"] = f"fast: {serve_linears(model)} linear layers of the decoder, up to {MOST_ROWS} rows"
        why_not = group_queries(model)
        backends["attention"] = f"transformers' own ({why_not})" if why_not else "torch, the queries of a group as rows"
    try:
        lookahead, gate, backends["lookahead"] = choose_lookahead(model, inventory, settings, calibration)
    except VisMoEError:
        opened.stores.close()
        raise
    if device.type == "cpu":
        backends["workers"] = waiting().why
        if not waiting().settled:
            logger.warning("torch's worker threads will fight the copying ones for the cores: %s", waiting().why)
    serving, about = serve(model, opened, device)
    backends |= about
    lookahead_inputs = LookaheadInputs(
        serving.pager, lookahead, gate, inline=settings.deterministic, cores_shared=device.type == "cpu"
    )
    runtime = ExpertRuntime(serving, device, lookahead_inputs, backends)
    runtime.serve(serving)
    runtime.pruner, backends["visual tokens"] = attach_pruner(model, settings, calibration)
    runtime.visual_top_k = fewer_experts(settings, inventory)
    runtime.bind(model)
    logger.info("backends: %s", backends)
    model._vismoe_runtime, model._vismoe_origin, model._vismoe_opened = runtime, origin, opened
    weakref.finalize(model, runtime.close)  # runs before the stores', which was made earlier
    weakref.finalize(model, lookahead_inputs.close)
    return runtime


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
