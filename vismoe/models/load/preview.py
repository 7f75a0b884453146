"""A model without its weights: what `vismoe plan` needs, and what the engine reads before loading.

Only config.json and, where the checkpoint is on this machine, the headers of its safetensors files are read.
"""

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from vismoe.config import ENGINE_DEFAULTS, DraftName, Settings
from vismoe.errors import CheckpointError, ConfigError, UnsupportedModelError, VisMoEError
from vismoe.lookahead.calibration import Calibration
from vismoe.machine.ceilings import ModelSize
from vismoe.machine.hardware import probe
from vismoe.models.family.checkpoint_files import (
    check_json_files,
    config_file,
    demo_model,
    first_line,
    read_json,
    reading_checkpoint,
    refuse_routing,
    weight_files,
)
from vismoe.models.family.components import backbone_bytes
from vismoe.models.family.families import refuse_unsupported
from vismoe.models.family.forms import transposed_sections
from vismoe.models.family.mtp import add_mtp
from vismoe.models.load.backbone import Backbone, linears_of, settle_backbone
from vismoe.models.load.configured import Stated, as_stated
from vismoe.models.load.embeddings import table_bytes, table_of
from vismoe.models.load.gguf import with_gguf
from vismoe.models.load.locate import locate, locate_experts
from vismoe.models.load.opening import Experts, arrange_experts, needs_of, open_experts, settle, with_experts
from vismoe.models.load.reading import settle_reading
from vismoe.models.moe.adapters import adapt
from vismoe.planning.needs import Footprint, Hardware, decode_read_bytes
from vismoe.planning.plan import Plan
from vismoe.ranges import shown
from vismoe.store.checkpoint import CheckpointStore
from vismoe.store.expert_store import Reads
from vismoe.store.files import bounce_bytes
from vismoe.store.tensors import TensorPart
from vismoe.types import Format

logger = logging.getLogger(__name__)
COMPUTED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def preview(
    model: str | Path | None,
    settings: Settings,
    *,
    device: str | None = None,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    hardware: Hardware | None = None,
) -> Plan:
    """The plan that loading `model` (None: the bundled demo model) with these settings would follow, on `hardware` in place of
    what this machine has free now.

    Raises BudgetError, UnsupportedModelError or CheckpointError, as loading would.
    """
    model, settings = with_gguf(model, settings)
    model = model if model is not None else demo_model()
    with reading_checkpoint(model):
        described, files = describe(model, revision=revision, dtype=dtype, gguf=settings.gguf, draft=settings.draft)
        return _preview(described, files, settings, hardware or probe(device))


def _preview(described: PreTrainedModel, files: list[Path], settings: Settings, hardware: Hardware) -> Plan:
    place = torch.device(hardware.device)
    calibration = Calibration.find(files[0].parent, settings) if files else None
    backbone = None
    if files:
        source, stores, experts, backbone = open_experts(described, files, settings, place)
        table = table_bytes(described) if table_of(described, source.headers) else 0
        stores.close()
        source.close()
        needs = needs_of(described, experts, stores.reads, calibration, settings, place)
        reading, _, experts = settle(described, needs, stores, experts, settings, hardware, table)
    else:
        needs, reads, experts, backbone = stated_needs(described, settings, place, calibration)
        reading = settle_reading(needs, settings, hardware, reads, table_bytes(described))
    return with_experts(reading.plan, experts, backbone)


def stated_needs(
    described: PreTrainedModel, settings: Settings, place: torch.device, calibration: Calibration | None = None
) -> tuple[Footprint, Reads, Experts, Backbone]:
    """(what it needs, how it is read, how experts are served, what else is encoded), by its configuration alone."""
    stated = as_stated(described)
    backbone = settle_backbone(described, stated.others, settings, place)
    experts = arrange_experts(described, stated.inventory, settings, place)
    reads = _reads_of(experts, stated)
    return needs_of(described, experts, reads, calibration, settings, place), reads, experts, backbone


def _reads_of(experts: Experts, stated: Stated) -> Reads:
    """Of a model that is not downloaded. Unless its encoding says more, an expert's largest tensor may have to be rearranged on
    its way."""
    layouts = (*experts.inventory.layouts, *experts.inventory.low_layouts)
    scratch_bytes = max(section.nbytes for layout in layouts for section in layout.sections)
    if stated.stored_bytes and experts.formats[0] is Format.RAW:
        low_bytes = max((layout.record_bytes for layout in experts.inventory.low_layouts), default=0)
        bounce = bounce_bytes(max(stated.stretch_bytes, low_bytes))
        return Reads(stated.scratch_bytes, bounce, stated.stored_bytes, [])
    bounce = bounce_bytes(max(layout.record_bytes for layout in layouts))
    return Reads(scratch_bytes, bounce, experts.inventory.slab_bytes, [])


def describe(
    model: str | Path,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    gguf: str | Path | None = None,
    draft: DraftName = "none",
) -> tuple[PreTrainedModel, list[Path]]:
    """(the model on the meta device, its safetensors files, or `gguf`); no files where a hub model is not on this machine.
    draft: what shall guess tokens, for which a model may have a layer more."""
    config = read_config(model, revision=revision)
    with reading_checkpoint(model):
        cls = model_class(config)
        with torch.device("meta"):
            described = cls._from_config(config, dtype=torch_dtype(config, dtype))
            if draft == "mtp":
                add_mtp(described, gguf)
        adapt(described)
    refuse_unsupported(described)
    refuse_routing(described)
    return described.eval(), checkpoint_files(model, revision=revision) if gguf is None else [Path(gguf)]


def read_config(model: str | Path, *, revision: str | None = None) -> PreTrainedConfig:
    """The configuration of a folder or hub name.

    Raises CheckpointError when there is none, UnsupportedModelError for a type that transformers does not know.
    """
    path = config_file(model, revision)
    values = read_json(path)
    check_json_files(path.parent)
    try:
        return AutoConfig.from_pretrained(str(model), revision=revision or "main")
    except VisMoEError:
        raise
    except Exception as error:  # the boundary to a file of others: values of any type and number
        if values.get("model_type") in CONFIG_MAPPING:
            raise CheckpointError(
                f"{path} has values that no {values['model_type']} can have: {type(error).__name__}: {first_line(error)}. "
                "Fix: download or copy this file again"
            ) from error
        raise UnsupportedModelError(
            f"{model}: transformers {transformers.__version__} does not know this model "
            f"(model_type={shown(values.get('model_type'))}): {first_line(error)}. "
            "Instead: a newer transformers, or another model"
        ) from error


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that generates: the checkpoint's own architecture, else image-text-to-text before causal language model."""
    for name in config.architectures or ():
        found = getattr(transformers, name, None)  # of own families: by the Auto classes, below
        if found is not None and getattr(found, "can_generate", lambda: False)():
            return found
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise UnsupportedModelError(
        f"{config.model_type}: transformers {transformers.__version__} has no class of it that generates text "
        f"(architectures: {', '.join(config.architectures or ()) or 'none named'}). Instead: an instruction-tuned MoE checkpoint"
    )


def checkpoint_files(model: str | Path, *, revision: str | None = None, partly: bool = False) -> list[Path]:
    """The safetensors files of a folder, or of a hub model when all are on this machine; only an index is ever downloaded.

    `partly`: those that are here, however many.
    """
    where: dict[str, Any] = {"revision": revision or "main", "_raise_exceptions_for_missing_entries": False}
    local = Path(model).is_dir()
    index = cached_file(str(model), SAFE_WEIGHTS_INDEX_NAME, **where, _raise_exceptions_for_connection_errors=False)
    names = [SAFE_WEIGHTS_NAME]
    if index is not None:
        names = weight_files(Path(index))
    found = [cached_file(str(model), name, **where, local_files_only=True) for name in names]
    if all(found) or partly:
        return [Path(file) for file in found if file]
    if local and (index is not None or any(found)):
        missing = [name for name, file in zip(names, found, strict=True) if not file]
        first = f"{model} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}"
        raise CheckpointError(f"{first}. Fix: download or copy the model again")
    return []


def torch_dtype(config: PreTrainedConfig, dtype: str | torch.dtype) -> torch.dtype:
    """`auto` is the checkpoint's own type."""
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    found: Any = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in COMPUTED:
        raise ConfigError(f"dtype={shown(dtype)}: choose auto, bfloat16, float16 or float32. Fix: dtype='auto'")
    return found


def experts_in_place(
    model: str | Path | None, revision: str | None = None, gguf: str | None = None, with_mtp: bool = False
) -> tuple[CheckpointStore, tuple[frozenset[str], ...]]:
    """The experts of a checkpoint (None: of the demo model) or of a GGUF file in place, and which of their matrices the model
    keeps as [in, out]. with_mtp: also those of the layer that drafts, where it is there and whole. Raises CheckpointError."""
    if with_mtp:
        try:
            described, files = _here(model, revision, gguf, "mtp")
            source = locate_experts(described, files, described.dtype)
            return source, transposed_sections(described, source.inventory)
        except (CheckpointError, UnsupportedModelError) as error:
            logger.info("the layer that drafts is left out: %s", error)
    described, files = _here(model, revision, gguf)
    source = locate_experts(described, files, described.dtype)
    return source, transposed_sections(described, source.inventory)


def linears_in_place(model: str | Path | None, revision: str | None = None) -> tuple[CheckpointStore, dict[str, TensorPart]]:
    """A checkpoint, and the weights of its linear layers that a store can hold. Raises CheckpointError."""
    described, files = _here(model, revision)
    source, others = locate(described, files, described.dtype)
    return source, linears_of(described, others)


def _here(
    model: str | Path | None, revision: str | None, gguf: str | None = None, draft: DraftName = "none"
) -> tuple[PreTrainedModel, list[Path]]:
    """As `describe`, for a model whose weights must be on this machine; None: the demo model."""
    model, settings = with_gguf(model, Settings(gguf=gguf))
    model = model if model is not None else demo_model()
    described, files = describe(model, revision=revision, gguf=settings.gguf, draft=draft)
    if not files:
        raise CheckpointError(f"the weights of {model} are not on this machine. Fix: hf download {model}")
    return described, files


def decode_size(name: str, model: Any) -> ModelSize:
    """What one decoded token reads of a model that is known by its configuration only.

    `model` is on the meta device with its experts' parameters still there (`describe`).
    """
    stated = as_stated(model)
    settle_backbone(model, stated.others, Settings.of(**ENGINE_DEFAULTS), torch.device("cpu"))
    inventory = stated.inventory
    return ModelSize(
        name=name,
        expert_bytes=max(layout.record_bytes for layout in inventory.layouts),
        experts_bytes=inventory.total_bytes,
        token_experts_bytes=sum(layer.top_k * inventory.layout(layer.index).record_bytes for layer in inventory.layers),
        dense_bytes=decode_read_bytes(backbone_bytes(model)),
    )
