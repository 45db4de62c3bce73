"""Stand-ins for the remote components: they remember what they were made with."""

import contextlib
import inspect
import textwrap
from concurrent.futures import Future

from bray.cluster.session import session
from bray.errors import ConfigError

made = []
"""(what, args, kwargs) in the order in which it happened."""
numbers = {}
shared = {}
ends = {}
"""trainer -> its end, as `train` returned it."""

PROJECT = {
    "__init__.py": "",
    "code.py": """
        def build_model(name, config):
            return f"torch of {name}", (config["network"]["width"],)

        def build_source(name, config):
            return [range(3), range(4)]

        class Agent:
            def __init__(self, name, config, state): ...
            def on_tick(self, state): ...

        class Trainer:
            def loss(self, replay): ...

        class Actor:
            def __init__(self, name, config): ...
            def tick(self, data): ...
    """,
    "x.yaml": """
        project: RUNS
        trial: t
        dump_state: true
        network: {kind: config, width: 7}
        model1: {kind: model, module: NAME.code}
        source1: {kind: source, module: NAME.code, epoch: 2}
        buffer1: {kind: buffer, sources: [source1]}
        agent1: {kind: agent, module: NAME.code, class: Agent}
        metrics: {kind: agent, enable: train, module: NAME.code, class: Agent}
        actor1: {kind: actor, port: 0, agents: [agent1, metrics], episode_save_interval: 5}
        trainer1: {kind: trainer, module: NAME.code, class: Trainer, model: model1, buffers: [buffer1]}
    """,
}


def write_project(folder, name, runs):
    """A small project; returns its launch file."""
    (folder / name).mkdir()
    for file, text in PROJECT.items():
        (folder / name / file).write_text(textwrap.dedent(text).replace("NAME", name).replace("RUNS", str(runs)))
    return folder / name / "x.yaml"


class Model:
    def __init__(self, *args, **kwargs):
        made.append(("model", args, kwargs))
        self.name, self.step = args[0], 0


class Buffer:
    def __init__(self, *args, **kwargs):
        made.append(("buffer", args, kwargs))
        self.name = args[0]

    def add_source(self, *args, **kwargs):
        made.append(("add_source", args, kwargs))


class Actor:
    port = 4321

    def __init__(self, **kwargs):
        made.append(("actor", (), kwargs))

    def serve(self, **kwargs):
        made.append(("serve", (), kwargs))


class Trainer:
    def __init__(self, **kwargs):
        made.append(("trainer", (), kwargs))
        self.name = kwargs["name"]

    def train(self, **kwargs):
        made.append(("train", (), kwargs))
        end = ends[self.name] = Future()
        with contextlib.suppress(ConfigError):  # built without a session
            session().watch(f"trainer {self.name}", end)
        return end


def part(name):
    from bray.serving.policy_actor import PolicyActor

    return {
        "RemoteModel": Model,
        "RemoteBuffer": Buffer,
        "RemoteActor": Actor,
        "RemoteTrainer": Trainer,
        "PolicyActor": PolicyActor,
        "numbers": lambda: numbers,
        "set": shared.__setitem__,
        "leave_out": lambda names: shared.__setitem__("left out", names),
    }[name]


def use():
    """Launch with the stand-ins, in this process. They take what the real ones take."""
    from bray.launch import build

    if build.find_part is not part:
        for name, stand_in in {
            "RemoteModel": Model,
            "RemoteBuffer": Buffer,
            "RemoteActor": Actor,
            "RemoteTrainer": Trainer,
        }.items():
            stand_in.__signature__ = inspect.signature(build.find_part(name))

    for kept in (made, numbers, shared, ends):
        kept.clear()
    build.find_part = part
