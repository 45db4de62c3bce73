"""What the processes of `tests.forked` begin with."""

import functools

from torch.onnx._internal.exporter._registration import ONNXRegistry

import tests.forked  # noqa: F401

ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
ONNXRegistry.from_torchlib()  # half of an export
