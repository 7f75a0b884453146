"""DeepSeek-VL2 (tiny, small and base), which transformers has no classes for: configuration, model, conversion and processor."""

import functools

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from vismoe.models.family.deepseek_vl2.configuration import MODEL_TYPE, ON_USE, DeepseekVLV2Config


def register() -> None:
    """Tells transformers about the family unless it knows one of this name.

    The model is imported when a checkpoint of it is opened.
    """
    if MODEL_TYPE not in CONFIG_MAPPING:
        AutoConfig.register(MODEL_TYPE, DeepseekVLV2Config)
        ON_USE.append(_register_model)


def register_processor() -> None:
    """The same for the processor, which takes longer to import."""
    if CONFIG_MAPPING[MODEL_TYPE] is DeepseekVLV2Config:
        from vismoe.models.family.deepseek_vl2 import processing

        processing.register()


def class_named(name: str) -> type | None:
    """The configuration or model class of this name; None if there is none."""
    if not name.startswith("DeepseekVLV2"):
        return None
    from vismoe.models.family.deepseek_vl2 import modeling

    return vars(modeling).get(name)


@functools.cache
def _register_model() -> None:
    from vismoe.models.family.deepseek_vl2 import modeling

    modeling.register()
