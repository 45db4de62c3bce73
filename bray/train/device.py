"""Where the learner computes."""

from __future__ import annotations

import torch

from bray.errors import ConfigError


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
