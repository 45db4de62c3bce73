"""`bray render`: saved episodes as pictures, in a web page."""

from __future__ import annotations

import math
import os
import sys
import time
import webbrowser
from pathlib import Path
from typing import Any

from bray.cli.options import Render as Options
from bray.cli.show import facts, log_shown, say
from bray.errors import BrayError, ConfigError
from bray.launch.graph import Graph, load
from bray.launch.modules import Modules
from bray.serving.messages import message_class
from bray.web.render import Render
from bray.web.runs import Project
from bray.web.server import RenderServer


@log_shown()
def render(options: Options) -> int:
    """Serve the page until Ctrl-C, or for some seconds; returns the exit code."""
    config, project, trial, host = options.config, options.project, options.trial, options.host
    import imageio  # noqa: F401  said now if it is missing, and not at the first export

    graph = None if config is None else load(config)
    if graph is not None:
        project = project or Path(graph.settings.project)
        trial = trial or graph.settings.trial
    if project is None:
        raise ConfigError("say what to show: --config LAUNCH_FILE, or --project DIR")
    if not project.is_dir():
        made = f"`bray launch --config {config}` makes it" if config is not None else "a training makes it"
        raise ConfigError(f"there is no project directory {project} here; {made}")
    messages, notes = ([], []) if graph is None else message_classes(graph)
    components = {} if graph is None else graph.of_kind("render")
    renders = {name: Render(name, c.settings.module, c.settings.func) for name, c in components.items()}
    server = RenderServer(Project(project, trial, messages), renders, host, options.port)
    try:
        say(f"episodes of {project} at {server.url}", "bold")
        facts([("trial", trial or "any"), ("renderers", ", ".join(renders) or "none: the State is shown")])
        for note in notes:
            say(note, "yellow")
        if host not in ("127.0.0.1", "localhost"):
            say(f"anyone who can connect to {host} can see the episodes and run the render code", "yellow")
        say("Ctrl-C ends it", "dim")
        sys.stdout.flush()
        if options.open_page and _has_screen():
            webbrowser.open(server.url)
        end = math.inf if options.seconds is None else time.monotonic() + options.seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(0.2, left))
    except KeyboardInterrupt:
        say("ended")
    finally:
        server.close()
    return 0


def message_classes(graph: Graph) -> tuple[list[Any], list[str]]:
    """The protobuf classes of the actors, to read their States with; and why one is missing. The page works without."""
    modules, classes, notes = Modules(graph), [], []
    for name, actor in graph.of_kind("actor").items():
        for key in ("tick_input_proto", "tick_output_proto") if actor.settings.serialize == "proto" else ():
            try:
                classes.append(message_class(modules.message(actor, key), f"{name}.{key}"))
            except BrayError as e:
                notes.append(f"its messages are shown as bytes: {e}")
    return classes, notes


def _has_screen() -> bool:
    """Without one a browser of the terminal would take it over."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
