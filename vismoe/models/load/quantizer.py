"""Loading through transformers' own doors: `from_pretrained(path, quantization_config=VisMoEConfig(memory="20GiB"))`.

The quantizer's first hook runs while the model is on the meta device: it refuses what cannot work, plans the memory, and takes
the experts out, so that the loader never touches them. Its second hook runs when the other weights are there: it moves them into
anonymous memory and builds the runtime. `generate()` and everything else stay transformers' own.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from transformers.quantizers.auto import AutoHfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from vismoe.config import Settings
from vismoe.errors import ConfigError
from vismoe.machine.hardware import torch_device
from vismoe.models.family.checkpoint_files import refuse_routing
from vismoe.models.family.families import refuse_unsupported, unmark_quantized
from vismoe.models.family.mtp import add_mtp, mtp_of
from vismoe.models.load.embeddings import leave_on_disk, table_of
from vismoe.models.load.gguf import loaded_weights
from vismoe.models.load.opening import open_model
from vismoe.models.load.runtime import Pools, build, pools_of
from vismoe.models.load.stripping import own_memory, strip_experts
from vismoe.models.moe.adapters import adapt
from vismoe.models.moe.experts import IMPLEMENTATION
from vismoe.pools.kernel_cache import bound_kernel_caches
from vismoe.pools.malloc import return_large_blocks, share_one_heap
from vismoe.store.read_ahead import forget
from vismoe.store.safetensors_header import refuse_changed

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


def _keep_ours(merge: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """transformers refuses a checkpoint that another method quantised; here its tensors say what they are."""

    @functools.wraps(merge)
    def merged(of_checkpoint: Any, asked: Any) -> Any:
        return asked if isinstance(asked, VisMoEConfig) else merge(of_checkpoint, asked)

    return merged


AutoHfQuantizer.merge_quantization_configs = staticmethod(_keep_ours(AutoHfQuantizer.merge_quantization_configs))


@register_quantizer(METHOD)
class VisMoEQuantizer(HfQuantizer):
    """Overrides hooks whose signatures transformers 5.17 to 5.24 share, and nothing else."""

    requires_calibration = False
    _loading_now: ClassVar[weakref.WeakSet["VisMoEQuantizer"]] = weakref.WeakSet()  # or failed, and held by a traceback
    _pools: Pools | None = None

    def update_device_map(self, device_map: Any) -> Any:
        """`auto` and its kin spread whole layers; here the model goes to one device with an index, and experts are paged."""
        if device_map is None:
            return None
        return {"": torch_device(None) if device_map in AUTO_MAPS else _one_device(device_map)}

    def _process_model_before_weight_loading(
        self, model: Any, device_map: Any = None, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        for other in list(self._loading_now):
            other._pools = None  # of a load that failed; one that runs makes others
            forget()  # what is read into them still
        settings = self.quantization_config.settings
        bound_kernel_caches(settings.kernels)
        return_large_blocks()
        share_one_heap()
        if settings.draft == "mtp":
            add_mtp(model, settings.gguf)
        adapt(model)
        refuse_unsupported(model)
        refuse_routing(model)
        device = _one_device(device_map)
        weights = loaded_weights()
        if settings.gguf is not None:
            if weights is None:
                raise ConfigError(
                    f"gguf={settings.gguf!r}: from_pretrained reads no GGUF file. Fix: vismoe.load(MODEL, gguf=FILE)"
                )
            model.config.name_or_path = weights.name
            checkpoint_files = [settings.gguf]
        self._configuration = configuration = open_model(model, checkpoint_files, settings, device)
        weakref.finalize(model, configuration.close)  # also when loading fails later
        if device.type == "cpu":  # they get their pages while the other weights load (pools/backing.py)
            self._pools = pools_of(configuration)
            self._loading_now.add(self)
        if configuration.reading.embeddings_on_disk and (table := table_of(model, configuration.source.headers)):
            weakref.finalize(model, leave_on_disk(model, table).close)
        strip_experts(model)
        configuration.backbone.strip(model)
        if weights is not None:
            weights.fill(model, *self._loading)
        model.set_experts_implementation(IMPLEMENTATION)
        if (mtp := mtp_of(model)) is not None:  # whose configuration is its own
            mtp.model.set_experts_implementation(IMPLEMENTATION)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        unmark_quantized(model)
        files = self._configuration.source.for_loading(*self._loading)
        if self._configuration.settings.gguf is None:  # of a GGUF file every tensor was read into memory of its own
            own_memory(model, files)
        self._configuration.backbone.fill(model, files, self._configuration.device)
        forget()
        refuse_changed(self._configuration.source.headers, "loaded", "load the model again, when no program writes to its files")
        self._loading_now.discard(self)
        pools, self._pools = self._pools, None
        build(model, self._configuration, pools)
        return model

    @property
    def _loading(self) -> tuple[bool, int]:
        """Whether what is loaded is read past the page cache, and by how many threads."""
        reading = self._configuration.reading
        return reading.cold_past_cache, reading.plan.io_threads

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


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
