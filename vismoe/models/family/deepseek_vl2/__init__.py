"""DeepSeek-VL2 (tiny, small and base), which transformers has no classes for: configuration, model, conversion and processor."""

import functools

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from vismoe.after_import import after_import
from vismoe.models.family.deepseek_vl2.configuration import MODEL_TYPE, ON_USE, DeepseekVLV2Config


def register() -> None:
    """Tells transformers about the family unless it knows one of this name.

    The model is imported when a checkpoint of it is opened, the processor when transformers' AutoProcessor is.
    """
    if MODEL_TYPE not in CONFIG_MAPPING:
        AutoConfig.register(MODEL_TYPE, DeepseekVLV2Config)
        ON_USE.append(_register_model)
        after_import("transformers.models.auto.processing_auto", _register_processor)


def class_named(name: str) -> type | None:
    """The configuration or model class of this name; None if there is none."""
    from vismoe.models.family.deepseek_vl2 import modeling

    return vars(modeling).get(name) if name.startswith("DeepseekVLV2") else None


@functools.cache
def _register_model() -> None:
    from vismoe.models.family.deepseek_vl2 import modeling

    modeling.register()


def _register_processor() -> None:
    from vismoe.models.family.deepseek_vl2 import processing

    processing.register()
