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


class Readback:
    """Values that the host reads later: they are sent behind what is queued, and what is queued after them need not be over."""

    def __init__(self, like: torch.Tensor):
        """`like` has the shape, type and device of what is sent."""
        self._here = torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)
        self._sent = torch.cuda.Event() if like.is_cuda else None

    def send(self, tensor: torch.Tensor) -> None:
        self._here.copy_(tensor, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> np.ndarray:
        """What was sent last; the next one overwrites it."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._here.numpy()
