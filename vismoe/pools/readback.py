"""Reads from a device into host memory."""

import numpy as np
import torch


def on_host(*tensors: torch.Tensor) -> list[np.ndarray]:
    """The tensors' values, with one wait for all of them; those of the CPU are not copied.

    From a GPU they come through page-locked memory (torch takes it for a copy of this kind), in the order of the calling thread's
    stream. The thread waits for that stream alone.
    """
    read = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]
    if tensors[0].device.type == "cuda":
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return [tensor.numpy() for tensor in read]
