"""`vismoe.load`, which reads from the disk while it imports torch and transformers. Imports neither before it is called."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vismoe.config import ENGINE_DEFAULTS, READ_AHEAD_BY, Settings

if TYPE_CHECKING:
    import torch

    from vismoe.engine.engine import Engine


def load(
    model: str | Path | None = None,
    *,
    device: str | None = None,
    dtype: "str | torch.dtype" = "auto",
    revision: str | None = None,
    **settings: Any,
) -> "Engine":
    """An engine for a hub name or folder (None: the bundled demo model).

    `settings` are those of `vismoe.config.Settings`, e.g. `memory="20GiB"` or `memory="25%"`; kernels default to `auto` here.
    `gguf="FILE"` takes the weights from a GGUF file, and the rest from `model`, which then needs no weights.
    `device` None takes a GPU where there is one. Raises UnsupportedModelError, CheckpointError, BudgetError or ConfigError.
    """
    chosen = Settings.of(**{**ENGINE_DEFAULTS, **settings})
    import torch

    from vismoe.machine.hardware import torch_device
    from vismoe.store.read_ahead import WeightFiles, reading_ahead

    name = str(model) if isinstance(model, str | Path) else None  # the engine refuses what is no name, and no type
    held = {name: getattr(chosen, name) for name in READ_AHEAD_BY}
    if isinstance(dtype, str | torch.dtype) and dtype != "auto":
        held["dtype"] = str(dtype).removeprefix("torch.")
    with reading_ahead(WeightFiles.of(name, revision=revision, device=torch_device(device).type, **held)):
        from vismoe.engine import engine

        return engine.load(model, device=device, dtype=dtype, revision=revision, **settings)
