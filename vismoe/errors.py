"""Every error this package raises on purpose, as one tree.

Messages say what happened, give the numbers, and name the fix. `assert` is only for invariants of this package.
"""


class VisMoEError(Exception):
    """Base of all errors of this package."""


class ConfigError(VisMoEError, ValueError):
    """A setting has an impossible value: the message has the value, and what is allowed."""


class BudgetError(VisMoEError):
    """The memory budget is less than the model needs. `fix` is an argument that works, e.g. `--memory 3.2GiB`."""

    def __init__(self, message: str, fix: str):
        super().__init__(f"{message}\nFix: {fix}")
        self.fix = fix


class UnsupportedModelError(VisMoEError):
    """A model family, checkpoint format or kind of input that is not supported; never run silently without this package."""


class CheckpointError(VisMoEError):
    """Checkpoint files are missing, truncated, corrupt, or do not belong together."""


class TransferError(VisMoEError):
    """An expert could not be read or copied while serving. The request fails with the cause; the engine remains usable."""


class InputError(VisMoEError):
    """A request that cannot be answered."""


class ContextError(InputError):
    """The request has more tokens than the context for which memory was planned."""


class TraceError(VisMoEError):
    """A routing trace that cannot be read or continued: truncated, foreign, of another model, or from a newer version."""


class BusyError(VisMoEError):
    """Another thread is running a forward pass of the same model."""


class ClosedError(VisMoEError):
    """The engine was closed."""
