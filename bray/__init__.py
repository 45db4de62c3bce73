"""Bray: train a game agent and serve it with the same code."""

from typing import TYPE_CHECKING, Any

from bray import compat
from bray._version import __version__

if TYPE_CHECKING:
    from bray.algos import register_algo
    from bray.client import AsyncClient, Client
    from bray.cluster.session import run_until_asked_to_stop, shutdown
    from bray.data.files import EpisodeReader
    from bray.data.store import PrioritizedBuffer, ReplayBuffer
    from bray.envs.registry import register_env
    from bray.experiment import Experiment
    from bray.remote.actor.handle import RemoteActor
    from bray.remote.actor.policy_agent import PolicyAgent
    from bray.remote.buffer.handle import RemoteBuffer, pop, push
    from bray.remote.buffer.iterators import (
        BatchBuffer,
        CallbackBuffer,
        PrefetchBuffer,
        ReuseBuffer,
        SampleBuffer,
        TorchTensorBuffer,
        handle_nested_array,
        make_batch,
    )
    from bray.remote.init import init
    from bray.remote.master import (
        Metric,
        add_graph,
        add_histogram,
        add_image,
        add_scalar,
        add_video,
        get,
        log,
        logger,
        merge,
        query,
        register,
        set,
        set_tensorboard_step,
    )
    from bray.remote.model.handle import RemoteModel, forward
    from bray.remote.model.weights import get_torch_model_weights, set_torch_model_weights
    from bray.remote.trainer.base import Trainer
    from bray.remote.trainer.handle import RemoteTrainer
    from bray.serving.actor import Actor
    from bray.serving.agent import Agent, AgentActor
    from bray.serving.state import State
    from bray.tree import NestedArray

__all__ = [
    "Actor",
    "Agent",
    "AgentActor",
    "AsyncClient",
    "BatchBuffer",
    "CallbackBuffer",
    "Client",
    "EpisodeReader",
    "Experiment",
    "Metric",
    "NestedArray",
    "PolicyAgent",
    "PrefetchBuffer",
    "PrioritizedBuffer",
    "RemoteActor",
    "RemoteBuffer",
    "RemoteModel",
    "RemoteTrainer",
    "ReplayBuffer",
    "ReuseBuffer",
    "SampleBuffer",
    "State",
    "TorchTensorBuffer",
    "Trainer",
    "__version__",
    "add_graph",
    "add_histogram",
    "add_image",
    "add_scalar",
    "add_video",
    "fake",
    "forward",
    "get",
    "get_torch_model_weights",
    "handle_nested_array",
    "init",
    "log",
    "logger",
    "make_batch",
    "merge",
    "pop",
    "push",
    "query",
    "register",
    "register_algo",
    "register_env",
    "run_until_asked_to_stop",
    "set",
    "set_tensorboard_step",
    "set_torch_model_weights",
    "shutdown",
]

_NAMES = {
    "bray.algos": "register_algo",
    "bray.client": "AsyncClient Client",
    "bray.cluster.session": "run_until_asked_to_stop shutdown",
    "bray.data.files": "EpisodeReader",
    "bray.data.store": "PrioritizedBuffer ReplayBuffer",
    "bray.envs.registry": "register_env",
    "bray.experiment": "Experiment",
    "bray.remote.actor.handle": "RemoteActor",
    "bray.remote.actor.policy_agent": "PolicyAgent",
    "bray.remote.buffer.handle": "RemoteBuffer pop push",
    "bray.remote.buffer.iterators": "BatchBuffer CallbackBuffer PrefetchBuffer ReuseBuffer SampleBuffer TorchTensorBuffer handle_nested_array make_batch",
    "bray.remote.init": "init",
    "bray.remote.master": "Metric add_graph add_histogram add_image add_scalar add_video get log logger merge query register set set_tensorboard_step",
    "bray.remote.model.handle": "RemoteModel forward",
    "bray.remote.model.weights": "get_torch_model_weights set_torch_model_weights",
    "bray.remote.trainer.base": "Trainer",
    "bray.remote.trainer.handle": "RemoteTrainer",
    "bray.serving.actor": "Actor",
    "bray.serving.agent": "Agent AgentActor",
    "bray.serving.state": "State",
    "bray.tree": "NestedArray",
}
compat.install()
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: `import bray` alone loads neither torch, Ray nor an environment."""
    from importlib import import_module

    if name == "fake":
        return import_module("bray.fake")
    if name not in _HOMES:
        return compat.old_name(name, __all__)
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
