"""Where the learner computes."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from bray.errors import ConfigError
from bray.spec import EnvSpec

logger = logging.getLogger("bray")

_SMALLEST = sys.float_info.min  # of the normal ones
_PICTURE = 32  # pixels of a side, at least
_BLOCKING_SYNC = 4  # CU_CTX_SCHED_BLOCKING_SYNC of cuda.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"run.device: expected cpu, cuda, cuda:N or auto, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"run.device is {name!r}, but PyTorch finds no CUDA GPU here. Use --device cpu, or auto.")
    return device


def acting_device(name: str) -> torch.device:
    """Where a trained Model acts: as it was trained, but without a GPU where none is here."""
    return resolve_device(name if torch.cuda.is_available() or not name.startswith("cuda") else "cpu")


def device_of(has_gpu: bool, who: str) -> torch.device:
    """Of a process that a cluster has given a GPU, or none."""
    if has_gpu and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if has_gpu:
        logger.warning("%s was given a GPU, and torch sees none: it runs on the CPU", who)
    return torch.device("cpu")


def is_picture(spec: EnvSpec) -> bool:
    """Whether a part of its observation is one."""

    def leaves(space: Any) -> list[Any]:
        return [leaf for part in space.parts for leaf in leaves(part)] if space.parts else [space]

    return any(len(s.shape) >= 2 and max(s.shape) >= _PICTURE for s in leaves(spec.observation))


@contextmanager
def tiny_as_zero() -> Iterator[None]:
    """Take numbers too small to be normal ones as zero, in this thread. The moments of Adam for weights without a
    gradient become such and stay so, and on x86 Adam takes 10 times as long for them: a quarter of an update of TD3."""
    if _SMALLEST / 2.0 == 0.0:  # the user has switched this on for the whole process
        yield
        return
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def use_threads(count: int) -> None:
    """For the operations of PyTorch in this process. Threads keep what holds in the one that starts them, so they start
    here, where tiny numbers are zero; those that were there before go on computing with them."""
    torch.set_num_threads(count)
    if count > 1:
        with tiny_as_zero():
            torch.zeros(1 << 20).add_(1.0)


def keep_freed_memory() -> None:
    """For the next step, up to 256 MB: glibc gives blocks of many pages back to the system, or not, by where they
    happen to lie, and the next step takes a page fault for each page (`python -m benchmarks.offline --speed` counts
    them)."""
    with suppress(OSError, AttributeError, TypeError):  # other systems and C libraries have no such settings
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 1 << 25)  # no more is accepted
        libc.mallopt(_TRIM_THRESHOLD, 1 << 28)


def tune(device: torch.device, wait_asleep: bool = False) -> None:
    """How a GPU computes, for the whole process: products of float32 in TF32 (convolutions are by default; 10 bits of
    mantissa, as bfloat16 has 7), and the fastest of cuDNN's algorithms for each shape, tried at the first call: shapes
    of updates and of batches for acting are few and fixed.
    wait_asleep: threads that wait for it leave their cores to others, and wake a little later than those that keep
    looking."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        if wait_asleep:
            _wait_asleep(device.index or 0)


def _wait_asleep(number: int) -> None:
    """PyTorch has no name for it."""
    error: Any
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        error = driver.cuInit(0) or driver.cuDevicePrimaryCtxSetFlags_v2(number, _BLOCKING_SYNC)
    except (OSError, AttributeError) as e:
        error = e
    if error:
        logger.warning("waiting for the GPU keeps a core busy: CUDA's driver answered %s", error)
