"""What NVIDIA's management library tells of the GPUs here, without PyTorch and without taking memory on them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from bray.errors import BrayError
from bray.train.fit import Gpu

_LIBRARY = "libnvidia-ml.so.1"
_MOST_SHOWN, _PROCESSES = 3, 64
_LOST = ("CUDA error", "CUDA driver", "cuDNN error", "CUBLAS_STATUS", "device-side")
"""How PyTorch begins to say that a GPU does not compute any more."""


class GpuFull(BrayError):
    """There was no memory left on it; what was learnt is there."""


class GpuLost(BrayError):
    """It does not compute any more, and what was on it is lost."""


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


@contextmanager
def _library() -> Iterator[Any]:
    """None where there is none, or no driver behind it."""
    nvml: Any = None
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL(_LIBRARY)
        nvml = None if nvml.nvmlInit_v2() else nvml
    if nvml is None:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def visible_gpus() -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order, by number."""
    with _library() as nvml:
        if nvml is None:
            return []
        asked = os.environ.get("CUDA_VISIBLE_DEVICES")
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        named = [str(i) for i in range(count.value)] if asked is None else [x.strip() for x in asked.split(",")]
        found: list[Gpu] = []
        for name in named:
            handle = ctypes.c_void_p()
            by_number = name.isdecimal()
            failed = (
                nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
                if by_number
                else nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
            )
            if failed:  # as CUDA does: those behind a wrong name are not seen either
                break
            found.append(_gpu(nvml, handle, len(found)))
        return found


def _gpu(nvml: Any, handle: Any, index: int) -> Gpu:
    name, memory = ctypes.create_string_buffer(96), _Memory()
    nvml.nvmlDeviceGetName(handle, name, 96)
    failed = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    gpu = Gpu(name.value.decode(errors="replace") or "a GPU", index, None if failed else memory.free / 2**30)
    return Gpu(gpu.name, index, gpu.free_gib, _users(nvml, handle)) if gpu.full else gpu


def _users(nvml: Any, handle: Any) -> tuple[str, ...]:
    """Who holds its memory, those with most first. In a container only its own processes are known."""
    count, found = ctypes.c_uint(_PROCESSES), (_Process * _PROCESSES)()
    with suppress(AttributeError):
        if nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found) == 0:
            first = sorted(found[: count.value], key=lambda p: -p.memory)[:_MOST_SHOWN]
            return tuple(f"{_name(p.pid)} (process {p.pid}, {p.memory / 2**30:.1f} GiB)" for p in first)
    return ()


def _name(pid: int) -> str:
    with suppress(OSError):
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    return "another program"


@contextmanager
def told_clearly(device: torch.device | None) -> Iterator[None]:
    """Around what computes there: errors of a GPU that is full, or gone, in one line."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        if device is None:
            raise
        here = visible_gpus()
        gpu = here[device.index or 0] if (device.index or 0) < len(here) else None
        held = f": {gpu}" if gpu is not None else ""
        raise GpuFull(
            f"{device} has no memory left{held}. Use another GPU (--device cuda:1), --device cpu, or less: fewer "
            f"environments, more minibatches, a smaller batch_size. PyTorch said: {str(e).partition('. ')[0]}"
        ) from e
    except RuntimeError as e:
        if device is None or device.type != "cuda" or not any(word in str(e) for word in _LOST):
            raise
        raise GpuLost(
            f"the GPU ({device}) does not answer any more: {str(e).strip().splitlines()[0]}. What was learnt since the "
            "last checkpoint is lost; go on from there with bray train --resume RUN_DIR, with --device cpu where the "
            "GPU is gone"
        ) from e
