"""Whether the network that a project builds fits the spaces of the game: asked before anything starts.

A `PolicyAgent` reads ticks by the observation space of its algorithm's `env` and hands them to the model of its
section. A network of another size would fail at the first tick of a game, in another process.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from bray import tree
from bray.errors import BrayError, ConfigError
from bray.launch.graph import Component, Graph
from bray.launch.modules import Modules


def check_networks(graph: Graph, deployed: Collection[str] = ()) -> None:
    """Build every network that a module of the project defines for an algorithm's game, and compare. One ConfigError
    for all mistakes."""
    modules, problems = Modules(graph), []
    for c in graph.of_kind("model").values():
        if c.settings.module is None or c.name in deployed or not _algorithms(graph, c):
            continue
        try:
            check_network(graph, modules, c, modules.needed(c)(c.name, graph.config))
        except BrayError as e:
            problems.append(str(e))
        except Exception as e:
            place = f"{c.name}.module ({graph.where(c.name, 'module')})"
            problems.append(f"{place}: build_model raised {type(e).__name__}: {e}")
    if problems:
        raise ConfigError("\n".join(problems))


def check_network(graph: Graph, modules: Modules, c: Component, made: Any) -> None:
    """ConfigError where what `build_model` returned does not fit the env of an algorithm that asks it."""
    if not (isinstance(made, tuple) and len(made) == 2):
        raise ConfigError(f"expected build_model to return (model, forward_args), got {made!r:.80}")
    model, args = made[0], made[1] if isinstance(made[1], tuple) else (made[1],)
    for name in _algorithms(graph, c):
        setup = modules.algorithm(name)
        problem = _observations(setup, args) or _outputs(setup, model, args)
        if problem is not None:
            env = graph.config[name]["env"]
            raise ConfigError(
                f"{c.name} ({graph.where(c.name, 'module')}): the network of {c.settings.module} does not fit the env "
                f"{env} of {name}: {problem}"
            )


def _algorithms(graph: Graph, c: Component) -> list[str]:
    """The algorithm sections of those who ask a model, or train it."""
    users = [*graph.of_kind("agent").values(), *graph.of_kind("trainer").values(), c]
    named = [u.settings.algo for u in users if u is c or u.settings.model == c.name]
    return list(dict.fromkeys(name for name in named if name is not None))


def _observations(setup: Any, args: tuple[Any, ...]) -> str | None:
    """How the example that `build_model` gave differs from an observation of the game."""
    expected, got = _shapes(setup.forward_args()[0]), _shapes(args[0] if args else None)
    if expected == got:
        return None
    return (
        f"an observation of the game has the shape {_show(expected)}, the example that build_model returns {_show(got)}"
    )


def _outputs(setup: Any, model: Any, args: tuple[Any, ...]) -> str | None:
    """How its outputs differ from those of the network that the algorithm makes itself, where it can make one for this
    game."""
    import torch

    def forward(network: Any, inputs: tuple[Any, ...]) -> dict[str, Any]:
        with torch.no_grad():
            out = network.eval()(*tree.map(torch.as_tensor, inputs))
        return {name: tuple(x.shape) for name, x in out.items() if hasattr(x, "shape")}

    was_training, inputs = getattr(model, "training", False), setup.forward_args()
    try:
        got = forward(model, (inputs[0], *args[1:]))
    except Exception as e:
        return f"it cannot be asked about an observation of the game ({type(e).__name__}: {e})"
    finally:
        model.train(was_training)
    try:
        expected = forward(setup.make_model(), inputs)
    except Exception:
        return None  # a game for which only the project's own network is made
    policy = setup.make_policy()
    for name in dict.fromkeys((*policy.reads, *policy.keeps)):
        if name not in got:
            return f"{setup.resolved['run'].algorithm} reads the output {name!r}, it has {', '.join(got) or 'none'}"
        if name in expected and got[name] != expected[name]:
            return (
                f"the actions of the game need an output {name!r} of shape {_row(expected[name])}, it has "
                f"{_row(got[name])}"
            )
    return None


def _shapes(x: Any) -> dict[str, tuple[int, ...]]:
    return {path: tuple(getattr(leaf, "shape", ())) for path, leaf in tree.paths(x)}


def _row(shape: tuple[int, ...]) -> str:
    """A shape without the batch dimension."""
    return str(list(shape[1:]))


def _show(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{path} {_row(shape)}".strip() for path, shape in shapes.items())
