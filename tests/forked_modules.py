"""What the processes of `tests.forked` begin with."""

import functools
import io
import logging
import warnings

import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry

import tests.forked  # noqa: F401

ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
with warnings.catch_warnings(action="ignore"):  # an export imports 700 modules, which takes longer than a small graph
    logging.disable()
    torch.onnx.export(torch.nn.Linear(1, 1).eval(), (torch.zeros(1, 1),), io.BytesIO(), dynamo=True, verbose=False)
    logging.disable(logging.NOTSET)
