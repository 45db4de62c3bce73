"""Bray: train a game agent and serve it with the same code."""

from typing import TYPE_CHECKING, Any

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

_HOMES = {
    "Actor": "bray.serving.actor",
    "Agent": "bray.serving.agent",
    "AgentActor": "bray.serving.agent",
    "AsyncClient": "bray.client",
    "BatchBuffer": "bray.remote.buffer.iterators",
    "CallbackBuffer": "bray.remote.buffer.iterators",
    "Client": "bray.client",
    "EpisodeReader": "bray.data.files",
    "Experiment": "bray.experiment",
    "Metric": "bray.remote.master",
    "NestedArray": "bray.tree",
    "PolicyAgent": "bray.remote.actor.policy_agent",
    "PrefetchBuffer": "bray.remote.buffer.iterators",
    "PrioritizedBuffer": "bray.data.store",
    "RemoteActor": "bray.remote.actor.handle",
    "RemoteBuffer": "bray.remote.buffer.handle",
    "RemoteModel": "bray.remote.model.handle",
    "RemoteTrainer": "bray.remote.trainer.handle",
    "ReplayBuffer": "bray.data.store",
    "ReuseBuffer": "bray.remote.buffer.iterators",
    "SampleBuffer": "bray.remote.buffer.iterators",
    "State": "bray.serving.state",
    "TorchTensorBuffer": "bray.remote.buffer.iterators",
    "Trainer": "bray.remote.trainer.base",
    "add_graph": "bray.remote.master",
    "add_histogram": "bray.remote.master",
    "add_image": "bray.remote.master",
    "add_scalar": "bray.remote.master",
    "add_video": "bray.remote.master",
    "forward": "bray.remote.model.handle",
    "get": "bray.remote.master",
    "get_torch_model_weights": "bray.remote.model.weights",
    "handle_nested_array": "bray.remote.buffer.iterators",
    "init": "bray.remote.init",
    "log": "bray.remote.master",
    "logger": "bray.remote.master",
    "make_batch": "bray.remote.buffer.iterators",
    "merge": "bray.remote.master",
    "pop": "bray.remote.buffer.handle",
    "push": "bray.remote.buffer.handle",
    "query": "bray.remote.master",
    "register": "bray.remote.master",
    "register_algo": "bray.algos",
    "register_env": "bray.envs.registry",
    "run_until_asked_to_stop": "bray.cluster.session",
    "set": "bray.remote.master",
    "set_tensorboard_step": "bray.remote.master",
    "set_torch_model_weights": "bray.remote.model.weights",
    "shutdown": "bray.cluster.session",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: `import bray` alone loads neither torch, Ray nor an environment."""
    from importlib import import_module

    if name == "fake":
        return import_module("bray.fake")
    if name not in _HOMES:
        raise AttributeError(f"module 'bray' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
