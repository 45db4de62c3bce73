"""What the processes of `tests.forked` begin with."""

import functools
import importlib
import io
import logging
import os
import pkgutil
import warnings

import gymnasium.envs.classic_control  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import numba
import torch
import torch.utils.tensorboard
from torch.onnx._internal.exporter._registration import ONNXRegistry

import bray.algos
import bray.cli
import bray.envs._kernels
import tests.forked  # noqa: F401

os.fsync = lambda fd: None  # as in `conftest.py`
for package in (bray.cli, bray.algos):  # each command imports what it needs when it runs
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
numba.njit(lambda x: x)(0)  # the first call of a compiled loop, kept on disk or not, imports a hundred modules
ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
with warnings.catch_warnings(action="ignore"):  # an export imports 700 modules, which takes longer than a small graph
    logging.disable()
    torch.onnx.export(torch.nn.Linear(1, 1).eval(), (torch.zeros(1, 1),), io.BytesIO(), dynamo=True, verbose=False)
    logging.disable(logging.NOTSET)
