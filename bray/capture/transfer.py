"""Arrays of the host to a device and back, without waiting where that can be helped."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger("bray")

STAGED = 1 << 20
"""Bytes from which an array goes through pinned memory: below, the driver's own copy is as fast."""
PARTS = 4
"""So many copies, each to pinned memory by all threads and from there by the device itself: the device copies one part
while the next is staged."""


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device. It may be changed as soon as this returns, unless it is pinned."""
    if device.type != "cuda" or x.is_cuda or x.nbytes < STAGED or x.is_pinned():
        return x.to(device, non_blocking=True)
    out = torch.empty(x.shape, dtype=x.dtype, device=device)
    for part, to in zip(x.chunk(PARTS), out.chunk(PARTS), strict=True):
        to.copy_(part.pin_memory(), non_blocking=True)
    return out


def to_host(values: Sequence[Tensor]) -> list[np.ndarray]:
    """Tensors as arrays, with one wait for all of them."""
    if not any(x.is_cuda for x in values):
        return [x.numpy(force=True) for x in values]
    host = [x.detach().to("cpu", non_blocking=True) for x in values]
    torch.cuda.current_stream(values[0].device).synchronize()
    return [x.numpy() for x in host]


def pin(memory: Any) -> bool:
    """Let devices read and write this memory of the host directly, until `unpin`; False where the driver refuses."""
    error = int(torch.cuda.cudart().cudaHostRegister(ctypes.addressof(memory), ctypes.sizeof(memory), 0))
    if error:
        logger.warning("memory could not be pinned (CUDA error %d): copies to the GPU take longer", error)
    return not error


def unpin(memory: Any) -> None:
    """Before it is freed: what is mapped to its place later would be taken for it."""
    torch.cuda.cudart().cudaHostUnregister(ctypes.addressof(memory))
