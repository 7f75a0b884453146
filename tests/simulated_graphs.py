"""CUDA graphs on a machine without a GPU: what torch's operations and interpreted Triton programs did is done again, with the
same tensors. What the host decided or computed between them stays as it was, as in a graph."""

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SimulatedGraph(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls: list[Any] = []
        self.fresh: list[torch.Tensor] = []

    def begin(self) -> None:
        self.__enter__()
        RUNNING.append(self)

    def end(self) -> None:
        assert RUNNING.pop() is self
        self.__exit__(None, None, None)
        for tensor in self.fresh:  # a capture computes nothing: what it seems to have computed is not there before it is replayed
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)

    def replay(self) -> None:
        assert not RUNNING, "a graph is replayed while another one is captured"
        for call in self.calls:
            call()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in REFUSED:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = function(*args, **kwargs)
        outs = [tensor for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor)]
        given = {
            tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)
        }
        writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in function._schema.arguments)
        fresh = [tensor.untyped_storage().data_ptr() not in given for tensor in outs]
        if writes:
            self.calls.append(lambda: function(*args, **kwargs))
        elif any(fresh) and "empty" not in function.__name__:

            def again():
                for old, new in zip(outs, (one for one in tree_leaves(function(*args, **kwargs)) if torch.is_tensor(one))):
                    old.copy_(new)

            self.calls.append(again)
            self.fresh.extend(outs)
        else:
            self.calls.append(lambda: outs)  # a view, or memory: it stays
        return out


RUNNING: list[SimulatedGraph] = []
REFUSED = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default}  # the host would read a number


class SimulatedGraphs:
    """In place of `CudaGraphs`; made for a test that patches Triton's interpreter by `install`."""

    def __init__(self, device=None):
        self.made: list[SimulatedGraph] = []

    @contextlib.contextmanager
    def capturing(self):
        yield

    def failed(self, graph: SimulatedGraph) -> None:
        graph.end()

    def new(self) -> SimulatedGraph:
        self.made.append(SimulatedGraph())
        return self.made[-1]


def install(patch: Any) -> None:
    """Launches of interpreted programs become calls of the graph that is captured."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def recorded(executor, *args, **kwargs):
        if not RUNNING:
            return launch(executor, *args, **kwargs)
        RUNNING[-1].calls.append(lambda: launch(executor, *args, **kwargs))  # later: a capture computes nothing

    patch.setattr(GridExecutor, "__call__", recorded)
