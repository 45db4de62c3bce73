"""Bray: train a game agent and serve it with the same code."""

from typing import TYPE_CHECKING, Any

from bray._version import __version__

if TYPE_CHECKING:
    from bray.algos import register_algo
    from bray.client import AsyncClient, Client
    from bray.data.files import EpisodeReader
    from bray.data.store import PrioritizedBuffer, ReplayBuffer
    from bray.envs.registry import register_env
    from bray.experiment import Experiment
    from bray.serving.actor import Actor
    from bray.serving.agent import Agent, AgentActor
    from bray.serving.state import State
    from bray.tree import NestedArray

__all__ = [
    "Actor",
    "Agent",
    "AgentActor",
    "AsyncClient",
    "Client",
    "EpisodeReader",
    "Experiment",
    "NestedArray",
    "PrioritizedBuffer",
    "ReplayBuffer",
    "State",
    "__version__",
    "register_algo",
    "register_env",
]

_HOMES = {
    "Actor": "bray.serving.actor",
    "Agent": "bray.serving.agent",
    "AgentActor": "bray.serving.agent",
    "AsyncClient": "bray.client",
    "Client": "bray.client",
    "EpisodeReader": "bray.data.files",
    "Experiment": "bray.experiment",
    "NestedArray": "bray.tree",
    "PrioritizedBuffer": "bray.data.store",
    "ReplayBuffer": "bray.data.store",
    "State": "bray.serving.state",
    "register_algo": "bray.algos",
    "register_env": "bray.envs.registry",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: `import bray` alone loads neither torch nor an environment."""
    if name not in _HOMES:
        raise AttributeError(f"module 'bray' has no attribute {name!r}; public names: {', '.join(__all__)}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
