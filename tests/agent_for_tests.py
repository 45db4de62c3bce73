"""What the tests of agents share."""

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from bray.serving.agent import Agent, AgentActor

PROTOS = Path(__file__).parent / "protos"


def run(coroutine):
    """Nothing here may take long; what never ends fails."""
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def tick(actor, data=b"{}"):
    reply = actor.tick(data)
    return reply if isinstance(reply, bytes) else await reply


async def play(agents, ticks=1, data=b"{}", **options):
    """Start a session, tick, end; the replies."""
    options.setdefault("serialize", "json")
    actor = AgentActor(agents, **options)
    await actor.start("s", b"")
    replies = [await tick(actor, data) for _ in range(ticks)]
    await actor.end(b"")
    return replies


def agent(on_tick, on_episode=None):
    """An agent class of one or two functions."""
    body = {"on_tick": lambda self, state: on_tick(state)}
    if on_episode is not None:
        body["on_episode"] = lambda self, episode, done: on_episode(episode, done)
    return type("Anonymous", (Agent,), body)


@pytest.fixture(name="messages", scope="session")
def generated_messages(tmp_path_factory):
    """The generated module of tick.proto, importable as `made.tick_pb2`."""
    root = tmp_path_factory.mktemp("protos")
    (root / "made").mkdir()
    (root / "made" / "__init__.py").touch()
    (root / "made" / "tick.proto").write_text((PROTOS / "tick.proto").read_text())
    protoc(root, "made/tick.proto")
    sys.path.insert(0, str(root))
    try:
        yield importlib.import_module("made.tick_pb2")
    finally:
        sys.path.remove(str(root))


def protoc(root, source):
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(root), f"--python_out={root}", source]
    subprocess.run(command, check=True, timeout=60)
