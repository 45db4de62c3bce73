"""What this machine has, for those who give advice about it or share it out."""

from __future__ import annotations

import importlib.util
import os

from bray.diagnosis.bottleneck import Machine


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def this_machine() -> Machine:
    if importlib.util.find_spec("torch") is None:
        return Machine(cores())
    import torch

    return Machine(cores(), torch.cuda.device_count() if torch.cuda.is_available() else 0)
