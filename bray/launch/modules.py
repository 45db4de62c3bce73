"""The user's modules that a Graph names: found, imported, and looked at before anything starts; so are the networks
that they build.

A module is looked for as Python does, with the current directory and the directory above the launch file on the path:
the file `template/rl.yaml` may name `template.models.model1`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from bray import tree
from bray.errors import BrayError, ConfigError, DataError, did_you_mean
from bray.launch.graph import Component, Edge, Graph


def search_path(graph: Graph) -> list[str]:
    """Directories in which the user's modules are looked for first."""
    return list(dict.fromkeys([str(Path.cwd()), str(graph.path.resolve().parent.parent)]))


def use_search_path(graph: Graph) -> None:
    """Put them on this process's path."""
    for directory in reversed(search_path(graph)):
        if directory not in sys.path and not (directory == str(Path.cwd()) and "" in sys.path):
            sys.path.insert(0, directory)


_METHODS = {
    "agent": ("a method on_tick(state)", "on_tick"),
    "actor": ("a method tick(data)", "tick"),
    "trainer": ("a method loss (a bray.Trainer) or update (a Learner)", "loss", "update"),
}
"""Of the class of a component one must be there."""


class Modules:
    """What the components of a Graph name: `modules.object("trainer1", "module", "class_")` is a class."""

    def __init__(self, graph: Graph):
        self.graph = graph
        use_search_path(graph)

    def load(self, name: str, key: str = "module") -> ModuleType:
        """The module of a component."""
        module = getattr(self.graph.components[name].settings, key)
        place = f"{name}.{key} ({self.graph.where(name, key)})"
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as e:
            if e.name is None or not (module == e.name or module.startswith(e.name + ".")):
                raise self._raised(place, module, e) from e
            raise ConfigError(f"{place}: there is no module {module!r}.{self._nearest(e.name)}") from None
        except Exception as e:
            raise self._raised(place, module, e) from e

    def _raised(self, place: str, module: str, error: Exception) -> ConfigError:
        """The user's own traceback, without the frames of the import machinery before it."""
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None and _is_machinery(frame.tb_frame.f_code.co_filename):
            frame = frame.tb_next
        trace = "".join(traceback.format_exception(error.with_traceback(frame))).rstrip()
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return ConfigError(f"{trace}\n{place}: module {module!r} cannot be imported: {said}")

    def _nearest(self, missing: str) -> str:
        """Modules beside the one that is missing."""
        parent, _, leaf = missing.rpartition(".")
        if parent:
            beside = [m.name for m in pkgutil.iter_modules(importlib.import_module(parent).__path__)]
            return did_you_mean(leaf, beside) if beside else f" {parent} is empty."
        where = " or ".join(search_path(self.graph))
        beside = [m.name for m in pkgutil.iter_modules(search_path(self.graph))]
        hint = did_you_mean(leaf, beside)
        return f" It was looked for in {where}.{hint if 'Did you mean' in hint else ''}"

    def member(self, name: str, attribute: str, key: str, what: str, fits: Callable[[Any], bool]) -> Any:
        """A function or class of a component's module; `key` is where the file names it."""
        module = self.load(name)
        found = getattr(module, attribute, None)
        place = f"{name}.{key} ({self.graph.where(name, key)})"
        if found is None:
            file = getattr(module, "__file__", None) or module.__name__
            names = [k for k, v in vars(module).items() if fits(v) and getattr(v, "__module__", "") == module.__name__]
            raise ConfigError(f"{place}: expected {what} in {file}, there is none.{did_you_mean(attribute, names)}")
        if not fits(found):
            raise ConfigError(f"{place}: expected {what}, {module.__name__}.{attribute} is {found!r}")
        return found

    def needed(self, c: Component) -> Any:
        """The function or class that a component is made with; None where Bray has it."""
        s = c.settings
        if getattr(s, "module", None) is None:
            return None
        if c.kind in _METHODS:
            what, *methods = _METHODS[c.kind]
            return self.member(c.name, s.class_, "class", f"a class {s.class_} with {what}", _class_with(*methods))
        name, key = ("build_model", "module") if c.kind == "model" else (s.func, "func")
        args = "episode, tick" if c.kind == "render" else "name, config"
        return self.member(c.name, name, key, f"a function {name}({args})", callable)

    def message(self, c: Component, key: str) -> Any:
        """`tick_input_proto` or `tick_output_proto` of an actor, as AgentActor takes it: checked, a .proto file
        compiled."""
        from bray.serving.messages import compile_message, message_class

        try:
            spec = compile_message(getattr(c.settings, key).spec(), f"{c.name}.{key}", self.graph.path.parent)
            message_class(spec, f"{c.name}.{key}")
            return spec
        except ConfigError as e:
            raise ConfigError(f"{self.graph.where(c.name, key)}: {e}") from e

    def algorithm(self, name: str) -> Any:
        """What a `kind: config` component says about an algorithm, checked."""
        from bray.remote.algo import algo_setup

        try:
            return algo_setup(self.graph.config[name], name)
        except BrayError as e:
            raise ConfigError(f"{self.graph.where(name)}: {e}") from e


def check_modules(graph: Graph, deployed: Collection[str] = ()) -> None:
    """Import every module that the Graph names and look for what it must have. All mistakes are in one ConfigError; a
    module that raises shows its own traceback first. `deployed`: models that are deployed from files, so that neither
    their modules nor the algorithms of their agents are needed; renders are for afterwards then."""
    modules, problems = Modules(graph), []
    for c in graph.components.values():
        model = c.name if c.kind == "model" else getattr(c.settings, "model", None)
        from_files = model is not None and model in deployed
        if (c.kind == "model" and from_files) or (c.kind == "render" and deployed):
            continue
        try:
            modules.needed(c)
            if c.kind == "actor" and c.settings.serialize == "proto":
                modules.message(c, "tick_input_proto")
                modules.message(c, "tick_output_proto")
            if getattr(c.settings, "algo", None) is not None and not from_files:
                modules.algorithm(c.settings.algo)
        except BrayError as e:
            problems.append(str(e))
    if not problems:
        return
    problems = list(dict.fromkeys(problems))
    traces = [p.rpartition("\n")[0] for p in problems if p.startswith("Traceback")]
    lines = [p.rpartition("\n")[2] if p.startswith("Traceback") else p for p in problems]
    if len(lines) == 1:
        raise ConfigError("\n".join([*traces, *lines]))
    if traces:  # what is printed last is one line: see `bray.cli.main`
        listed = "\n".join(f"  {line}" for line in lines)
        raise ConfigError("\n".join([*traces, listed, f"{len(lines)} mistakes in {graph.path}, listed above"]))
    raise ConfigError(f"{len(lines)} mistakes in {graph.path}:\n  " + "\n  ".join(lines))


def _class_with(*methods: str) -> Callable[[Any], bool]:
    return lambda x: inspect.isclass(x) and any(callable(getattr(x, m, None)) for m in methods)


def _is_machinery(file: str) -> bool:
    return file.startswith("<frozen importlib") or file in (importlib.__file__, __file__)


# --- whether a network runs, and fits its game ------------------------------------------------------------------------
#
# A `PolicyAgent` reads ticks by the observation space of its algorithm's `env` and hands them to the model of its
# section. A network of another size would fail at the first tick of a game, in another process.


def check_networks(graph: Graph, deployed: Collection[str] = ()) -> list[str]:
    """Build every network that a module of the project defines, run it with its example, and compare it with the games
    of its algorithms. One ConfigError for all mistakes; what would only be logged is returned."""
    built = [c for c in graph.of_kind("model").values() if c.settings.module is not None and c.name not in deployed]
    if not built:  # a deployment may have no torch
        return []
    import torch

    from bray.remote.master.handle import draw_graph
    from bray.remote.model.definition import find_example

    modules, problems, notes = Modules(graph), list[str](), list[str]()
    for c in built:
        place = f"{c.name}.module ({graph.where(c.name, 'module')})"
        try:
            model, args = check_network(graph, modules, c, modules.needed(c)(c.name, graph.config))
            example = find_example(model, args, {})
            if c.settings.tensorboard_graph and example is not None:
                draw_graph(model, tree.map(torch.tensor, example[0]))
        except DataError as e:
            notes.append(f"{c.name}.tensorboard_graph ({graph.where(c.name, 'tensorboard_graph')}): {e}")
        except BrayError as e:
            problems.append(str(e) if c.name in str(e) else f"{place}: {e}")
        except Exception as e:
            problems.append(f"{place}: build_model raised {type(e).__name__}: {e}")
    if problems:
        raise ConfigError("\n".join(problems))
    return notes


def check_network(graph: Graph, modules: Modules, c: Component, made: Any) -> tuple[Any, tuple[Any, ...]]:
    """The model and the arguments that `build_model` returned; ConfigError where they do not fit the env of an
    algorithm that asks it."""
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
    return model, args


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


# --- what the code says -----------------------------------------------------------------------------------------------


def edges_in_code(graph: Graph) -> list[Edge]:
    """Models and buffers that an agent's or actor's module names in its text: `bray.RemoteModel("model1")`. Nothing is
    imported."""
    edges = []
    known = {(e.tail, e.head) for e in graph.edges} | {(e.head, e.tail) for e in graph.edges}
    for c in [*graph.of_kind("agent").values(), *graph.of_kind("actor").values()]:
        if c.settings.module is None:
            continue
        for text in sorted(_texts(c.settings.module, search_path(graph))):
            other = graph.components.get(text)
            if other is None or other.kind not in ("model", "buffer") or (c.name, text) in known:
                continue
            edges.append(Edge(text, c.name, "answers") if other.kind == "model" else Edge(c.name, text, "pushes"))
    return edges


def _texts(module: str, directories: list[str]) -> set[str]:
    """The string constants of a module's file."""
    for directory in directories:
        base = Path(directory, *module.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                try:
                    parsed = ast.parse(file.read_text(encoding="utf-8"))
                except (SyntaxError, ValueError, OSError):  # whoever imports it says so
                    return set()
                return {n.value for n in ast.walk(parsed) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return set()
