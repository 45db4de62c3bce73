"""Bray: train a game agent and serve it with the same code."""

from typing import TYPE_CHECKING, Any

from bray._version import __version__

if TYPE_CHECKING:
    from bray.algos import register_algo
    from bray.data.files import EpisodeReader
    from bray.envs.registry import register_env
    from bray.experiment import Experiment
    from bray.tree import NestedArray

__all__ = ["EpisodeReader", "Experiment", "NestedArray", "__version__", "register_algo", "register_env"]

_HOMES = {
    "EpisodeReader": "bray.data.files",
    "Experiment": "bray.experiment",
    "NestedArray": "bray.tree",
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
