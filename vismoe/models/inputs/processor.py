"""Processors for questions about images, with or without torchvision.

transformers builds a Qwen3-VL processor together with its video processor, which needs torchvision, and CPU installations rarely
have it. If torchvision is missing, or does not match torch, `load_processor` omits the video processor: images work as always,
videos are refused.
"""

from functools import cache
from os import PathLike
from typing import Any

from transformers import AutoConfig, AutoProcessor, ProcessorMixin
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

# Families whose images use Qwen3VLProcessor.
QWEN3_VL_FAMILIES = (
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
)


class ImageOnlyProcessor(Qwen3VLProcessor):
    """Qwen3-VL's processor without its video processor, which the constructor does not name, so it is not loaded."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)


@cache
def torchvision_works() -> bool:
    """Whether torchvision can be imported; a wheel built for another torch raises RuntimeError on import, not ImportError."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        return False
    return True


def load_processor(path: str | PathLike[str], **kwargs: Any) -> ProcessorMixin:
    """The processor of a checkpoint: AutoProcessor's if it can be built, otherwise one for images only.

    Keyword arguments go to `from_pretrained`. Raises ImportError for a family that requires torchvision.
    """
    if torchvision_works():
        return AutoProcessor.from_pretrained(path, **kwargs)
    family = AutoConfig.from_pretrained(path, **_hub_arguments(kwargs)).model_type
    if family in QWEN3_VL_FAMILIES:
        return ImageOnlyProcessor.from_pretrained(path, **kwargs)
    try:
        return AutoProcessor.from_pretrained(path, **kwargs)
    except ImportError as error:
        raise ImportError(
            f"the processor of {path} (model type {family}) needs torchvision, which is missing or does not match this torch; "
            f"install the build that matches, e.g. `pip install torchvision --index-url https://download.pytorch.org/whl/cpu`"
        ) from error


def _hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that say where files come from, not how images are processed."""
    names = ("cache_dir", "revision", "token", "local_files_only", "trust_remote_code", "subfolder")
    return {name: kwargs[name] for name in names if name in kwargs}
