"""Actors, Agents and helpers for the tests of RemoteActor. Workers import this module."""

import asyncio
import os
import socket
import sys
import time
import urllib.request

import bray
from bray.cluster import session as sessions


class Who(bray.Actor):
    """Says which process it is, and does what a tick's body says."""

    def __init__(self, greeting=""):
        self.greeting = greeting

    def start(self, session, data):
        self.ticks = 0
        return b"%d" % os.getpid()

    async def tick(self, data):
        self.ticks += 1
        if data.startswith(b"sleep "):
            await asyncio.sleep(float(data[6:]))
        if data == b"raise":
            raise ValueError("this move is not in the book")
        if data == b"exit":
            asyncio.get_running_loop().create_task(_exit())
        return b"%d %d%b" % (os.getpid(), self.ticks, self.greeting.encode())

    def end(self, data):
        return b"%d ticks" % self.ticks


async def _exit():
    sys.exit(3)


class Broken(bray.Actor):
    def __init__(self, map_file):
        raise FileNotFoundError(f"no map at {map_file}")


class Picky(Who):
    """Cannot be made while a file is there."""

    def __init__(self, flag):
        super().__init__()
        if os.path.exists(flag):
            raise RuntimeError("the model is not back yet")


class Odd:
    def start(self, session, data):
        pass


class FakeModel:
    """In the place of a model: a member that answers."""

    def forward(self, x):
        return 2 * x


class FakeBuffer:
    def __init__(self):
        self.samples = []

    def push(self, *samples):
        self.samples += samples

    def size(self):
        return len(self.samples)

    def pop(self):
        return self.samples.pop(0)


class AtariActor(bray.Actor):
    """The Actor of the seed: it gets the names of its model and its buffer."""

    def __init__(self, model, buffer):
        assert isinstance(model, str)
        self.model = sessions.session().cluster.find(f"model/{model}")
        self.buffer = sessions.session().cluster.find(f"buffer/{buffer}/0")

    async def start(self, session, data):
        self.session, self.sum = session, 0

    async def tick(self, data):
        out = await self.model.call("forward", int(data))
        self.sum += out
        return b"%d" % out

    async def end(self, data):
        self.buffer.tell("push", (self.session, self.sum))
        return b""


class Handles(bray.Actor):
    """An Actor that gets the handle itself."""

    def __init__(self, model, factor):
        self.model, self.factor = model, factor

    def start(self, session, data):
        pass

    async def tick(self, data):
        return b"%d" % (self.factor * await self.model.call("forward", int(data)))

    def stop(self, data):
        return b"stopped"


class Scout(bray.Agent):
    """Reads what the other agent has decided."""

    async def on_tick(self, state):
        state.seen = await state.wait("plan")
        state.output["actor"] = state.actor


class Planner(bray.Agent):
    async def on_tick(self, state):
        if state.input.get("fail"):
            raise KeyError("no plan for this")
        state.plan = self.config["planner"]["offset"] + state.input["n"]
        state.output["plan"] = state.plan
        state.output["tick"] = state.tick

    async def on_episode(self, episode, done):
        where = sessions.session().path / "pieces"
        where.mkdir(exist_ok=True)
        name = f"{episode[0].game if episode else 'none'}-{len(episode)}-{done}-{time.time_ns()}"
        (where / name).write_text("")


class Bytes(bray.Agent):
    def on_tick(self, state):
        state.output = state.input[::-1]


class Messages(bray.Agent):
    def on_tick(self, state):
        state.output.action = int(sum(state.input.position))


def metrics(admin_port):
    """The numbers of a service, asked again where a worker died that was about to answer."""
    for attempt in range(20):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/metrics", timeout=10) as reply:
                return dict(x.rsplit(" ", 1) for x in reply.read().decode().splitlines() if not x.startswith("#"))
        except OSError:
            if attempt == 19:
                raise
            time.sleep(0.2)
    raise AssertionError


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def eventually(true, seconds=20.0):
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return value


class Numbered(bray.Agent):
    """Says which slot of which process it is in."""

    def on_tick(self, state):
        state.output["pid"], state.output["actor"] = os.getpid(), state.actor
