"""Every error this package raises on purpose, as one tree.

    VisMoEError
    ├── ConfigError            a setting that cannot be: the value, what is allowed
    ├── BudgetError            memory that cannot work: the numbers and a budget that does
    ├── UnsupportedModelError  a family, checkpoint or request kind we do not run: its name, what to use instead
    ├── CheckpointError        files missing, truncated, corrupt or not belonging together
    ├── TransferError          an expert could not be brought in while serving; the request fails, the engine lives
    ├── InputError             a request that cannot be answered: a bad image, video, nothing to answer
    │   └── ContextError       more tokens than the planned context
    ├── TraceError             a routing trace that is truncated, foreign, or from a newer version
    ├── BusyError              two threads run one model at the same time
    └── ClosedError            the engine was closed

Messages say what happened, give the numbers, and name the fix. `assert` is kept for our own invariants.
"""

__all__ = [
    "BudgetError",
    "BusyError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "ContextError",
    "InputError",
    "TraceError",
    "TransferError",
    "UnsupportedModelError",
    "VisMoEError",
]


class VisMoEError(Exception):
    """Base of all errors of this package."""


class ConfigError(VisMoEError, ValueError):
    """A setting has a value that cannot work."""


class BudgetError(VisMoEError):
    """The memory budget cannot hold what the model needs at least. `fix` is an argument that works, e.g. `--memory 3.2GiB`."""

    def __init__(self, message: str, fix: str):
        super().__init__(f"{message}\nFix: {fix}")
        self.fix = fix


class UnsupportedModelError(VisMoEError):
    """A model family, checkpoint format or kind of input that is not supported; never run silently without us."""


class CheckpointError(VisMoEError):
    """Checkpoint files are missing, truncated, corrupt, or do not belong together."""


class TransferError(VisMoEError):
    """An expert could not be read or copied while serving. The request fails with the cause; the engine stays usable."""


class InputError(VisMoEError):
    """A request that cannot be answered as given."""


class ContextError(InputError):
    """More tokens than the context that memory was planned for."""


class TraceError(VisMoEError):
    """A routing trace that cannot be read or continued: truncated, foreign, of another model, or from a newer version."""


class BusyError(VisMoEError):
    """Another thread is in the middle of a forward pass of the same model."""


class ClosedError(VisMoEError):
    """The engine was closed."""
