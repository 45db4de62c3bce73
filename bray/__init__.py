"""Bray: train a game agent and serve it with the same code.

The imports below are the public names. They are written once, for type checkers and editors (`as` tells them that a
name is public), and read as text: a name is imported when it is first used, so that `import bray` loads neither torch,
Ray nor an environment.
"""

import ast
import pkgutil
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bray import compat
from bray._version import __version__ as __version__

if TYPE_CHECKING:
    from bray import fake as fake
    from bray.algos import register_algo as register_algo
    from bray.client import AsyncClient as AsyncClient, Client as Client
    from bray.cluster.session import run_until_asked_to_stop as run_until_asked_to_stop, shutdown as shutdown
    from bray.data.files import EpisodeReader as EpisodeReader
    from bray.data.store import PrioritizedBuffer as PrioritizedBuffer, ReplayBuffer as ReplayBuffer
    from bray.envs.multi_agent import MultiAgentEnv as MultiAgentEnv
    from bray.envs.registry import register_env as register_env
    from bray.experiment import Experiment as Experiment
    from bray.remote.actor.handle import RemoteActor as RemoteActor
    from bray.remote.actor.policy_agent import PolicyAgent as PolicyAgent
    from bray.remote.buffer.handle import RemoteBuffer as RemoteBuffer, pop as pop, push as push
    from bray.remote.buffer.iterators import (
        BatchBuffer as BatchBuffer,
        CallbackBuffer as CallbackBuffer,
        PrefetchBuffer as PrefetchBuffer,
        ReuseBuffer as ReuseBuffer,
        SampleBuffer as SampleBuffer,
        TorchTensorBuffer as TorchTensorBuffer,
        handle_nested_array as handle_nested_array,
        make_batch as make_batch,
    )
    from bray.remote.init import init as init
    from bray.remote.master import (
        Metric as Metric,
        add_graph as add_graph,
        add_histogram as add_histogram,
        add_image as add_image,
        add_scalar as add_scalar,
        add_video as add_video,
        get as get,
        log as log,
        logger as logger,
        merge as merge,
        query as query,
        register as register,
        set as set,
        set_tensorboard_step as set_tensorboard_step,
    )
    from bray.remote.model.handle import RemoteModel as RemoteModel, forward as forward
    from bray.remote.model.weights import (
        get_torch_model_weights as get_torch_model_weights,
        set_torch_model_weights as set_torch_model_weights,
    )
    from bray.remote.trainer.base import Trainer as Trainer
    from bray.remote.trainer.handle import RemoteTrainer as RemoteTrainer
    from bray.search.tune import tune as tune
    from bray.serving.actor import Actor as Actor
    from bray.serving.agent import Agent as Agent, AgentActor as AgentActor
    from bray.serving.state import State as State
    from bray.train.callbacks import Callbacks as Callbacks, EarlyStopping as EarlyStopping
    from bray.tree import NestedArray as NestedArray


def _public_names() -> dict[str, str]:
    """name -> module, of the imports above."""
    source = ast.parse(pkgutil.get_data(__name__, "__init__.py") or b"")
    (block,) = (node for node in source.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {name.name: str(node.module) for node in imports for name in node.names}


_HOMES = _public_names()
__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        return compat.old_name(name, __all__)
    value = import_module("bray.fake") if name == "fake" else getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


compat.install(sys.modules[__name__], _HOMES)


def __dir__() -> list[str]:
    return __all__
