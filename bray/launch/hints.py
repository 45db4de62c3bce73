"""What to type to play against an actor of a launch file: the project's own game where it has one, else games without a
game."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from bray.errors import ConfigError
from bray.launch.graph import Component, Graph

_FAKE_SESSIONS = 8  # what `bray fake gamecore` starts when nothing is said


def game_command(graph: Graph, actor: Component, port: int) -> str:
    """A command that plays against this actor; it is typed in the directory from which `bray launch` was started."""
    folder, slots = graph.path.resolve().parent, actor.settings.actors_per_worker * actor.settings.num_workers
    own = folder / "gamecore.py"
    if own.is_file():
        words = ["python", "-m", f"{folder.name}.gamecore", "--port", str(port)]
        text = own.read_text(encoding="utf-8", errors="replace")
        game = _game(graph, actor, folder)
        words += ["--game", game] if game is not None and '"--game"' in text else []
        words += ["--games", str(min(32, slots))] if '"--games"' in text else []
        command = shlex.join(words)
        return command if folder.parent == Path.cwd() else f"(cd {shlex.quote(str(folder.parent))} && {command})"
    words = ["bray", "fake", "gamecore", "--port", str(port)]
    words += ["--config", str(graph.path)] if _algorithm(graph, actor) is not None else ["--body", "FILE_WITH_A_TICK"]
    words += ["--sessions", str(slots)] if slots < _FAKE_SESSIONS else []
    words += ["--token-file", actor.settings.token_file] if actor.settings.token_file is not None else []
    words += ["--tls", actor.settings.tls_cert] if actor.settings.tls_cert is not None else []
    return shlex.join(words)


def spec_of_games(graph: Graph, port: int) -> Any:
    """The EnvSpec of the games that call a port of this file (or its only actor), for games without a game."""
    from bray.launch.modules import Modules

    actors = list(graph.of_kind("actor").values())
    named = [a for a in actors if a.settings.port == port] or (actors if len(actors) == 1 else [])
    if not named:
        raise ConfigError(f"--config {graph.path}: no actor has port {port}; give --port the port of one of them")
    algo = _algorithm(graph, named[0])
    if algo is None:
        raise ConfigError(
            f"--config {graph.path}: {named[0].name} has no agent with an `algo` that reads JSON, so what its ticks "
            "look like is not known: give --body FILE with a tick"
        )
    return Modules(graph).algorithm(algo).spec


def _algorithm(graph: Graph, actor: Component) -> str | None:
    """The algorithm section whose env says what the ticks of an actor look like."""
    if actor.settings.serialize != "json":
        return None
    agents = [graph.components[name] for name in actor.settings.agents if name in graph.components]
    return next((a.settings.algo for a in agents if a.settings.algo is not None), None)


def _game(graph: Graph, actor: Component, folder: Path) -> str | None:
    """`grid` where the env is that of `games/grid.py` beside the file."""
    algo = _algorithm(graph, actor)
    env = graph.config[algo].get("env") if algo is not None else None
    package, _, module = str(env).partition(":")[0].rpartition(".")
    return module if package == f"{folder.name}.games" and (folder / "games" / f"{module}.py").is_file() else None
