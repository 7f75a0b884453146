"""VisMoE: vision-language mixture-of-experts models on machines too small for them.

    engine = vismoe.load("Qwen/Qwen3-VL-30B-A3B-Instruct", memory="20GiB")
    for piece in engine.chat([{"role": "user", "content": "What is in the picture?"}]): ...

or with plain transformers: `AutoModelForImageTextToText.from_pretrained(name, quantization_config=VisMoEConfig(memory="20GiB"))`.
Names are imported at their first use: importing torch and transformers takes seconds, and `vismoe --help` needs neither.
"""

import importlib
from typing import TYPE_CHECKING, Any

from vismoe import after_import as _imports
from vismoe import threads as _threads
from vismoe import torchvision_operators as _torchvision

if TYPE_CHECKING:
    from vismoe.config import Settings
    from vismoe.engine.engine import Engine
    from vismoe.engine.generate import Figures, Reply
    from vismoe.engine.loading import load
    from vismoe.errors import VisMoEError
    from vismoe.models.inputs.tools import Tools
    from vismoe.models.load.quantizer import VisMoEConfig
    from vismoe.models.load.runtime import runtime_of
    from vismoe.options import RequestOptions
    from vismoe.planning.plan import Plan

__all__ = [
    "Engine",
    "Figures",
    "Plan",
    "Reply",
    "RequestOptions",
    "Settings",
    "Tools",
    "VisMoEConfig",
    "VisMoEError",
    "load",
    "runtime_of",
]

_HOMES = {
    "Engine": "vismoe.engine.engine",
    "Figures": "vismoe.engine.generate",
    "Plan": "vismoe.planning.plan",
    "Reply": "vismoe.engine.generate",
    "RequestOptions": "vismoe.options",
    "Settings": "vismoe.config",
    "Tools": "vismoe.models.inputs.tools",
    "VisMoEConfig": "vismoe.models.load.quantizer",
    "VisMoEError": "vismoe.errors",
    "load": "vismoe.engine.loading",
    "runtime_of": "vismoe.models.load.runtime",
}


_threads.let_workers_sleep()  # before torch is imported
_torchvision.mend_on_import()
# AutoProcessor learns the processors of families that transformers lacks, whatever else of vismoe is imported.
_imports.after_import(
    "transformers.models.auto.processing_auto", lambda: importlib.import_module("vismoe.models.family").register_processors()
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vismoe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
