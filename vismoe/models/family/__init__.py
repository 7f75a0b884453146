"""What VisMoE knows about families of models. Those that transformers lacks have a folder here and a line below."""

from typing import Any

from vismoe.models.family import deepseek_vl2

OWN = (deepseek_vl2,)

for family in OWN:
    family.register()


def register_processors() -> None:
    """Tells transformers' AutoProcessor, once that is imported, about the processors of the families here."""
    for family in OWN:
        family.register_processor()


def class_named(name: str) -> Any:
    """The class of transformers or of a family here with this name; AttributeError if there is none."""
    import transformers

    return next((found for family in OWN if (found := family.class_named(name))), None) or getattr(transformers, name)
