"""What agents are given at the end of an episode; a session over a socket."""

import asyncio
import contextlib
import gc
import json
import logging
import weakref

import numpy as np
import pytest

from bray.serving import agent as agent_module
from bray.serving.agent import Agent, AgentActor
from tests.agent_for_tests import agent, generated_messages, play, run, tick  # noqa: F401  (fixtures)

# --- episodes ---------------------------------------------------------------------------------------------------------


class Recorder(Agent):
    """Notes the episodes of all sessions in `config`."""

    def __init__(self, name, config, state):
        self.seen = config

    async def on_tick(self, state):
        state.note = f"note {state.tick}"

    async def on_episode(self, episode, done):
        self.seen.append(([s.note for s in episode], done))


@pytest.mark.parametrize(
    ("length", "ticks", "expected"),
    [
        (3, 7, [([0, 1, 2], False), ([3, 4, 5], False), ([6], True)]),
        (3, 6, [([0, 1, 2], False), ([3, 4, 5], False), ([], True)]),
        (1, 2, [([0], False), ([1], False), ([], True)]),
        (128, 2, [([0, 1], True)]),
        (None, 200, [(list(range(200)), True)]),
        (3, 0, []),  # a session without a tick has no episode
    ],
)
def test_episodes_are_cut_by_length_and_end_with_done(length, ticks, expected):
    seen = []
    run(play({"a": Recorder}, ticks, config=seen, episode_length=length))
    assert seen == [([f"note {t}" for t in notes], done) for notes, done in expected]


def test_a_lost_session_is_over_for_its_agents():
    seen = []

    async def main():
        actor = AgentActor({"a": Recorder}, seen, serialize="json")
        await actor.start("s", b"")
        await tick(actor)
        await actor.lost()

    run(main())
    assert seen == [(["note 0"], True)]


def test_an_actor_is_used_again():
    seen = []

    async def main():
        actor = AgentActor({"a": Recorder}, seen, episode_length=2, serialize="json")
        for _ in range(2):
            await actor.start("s", b"")
            for _ in range(3):
                await tick(actor)
            await actor.end(b"")

    run(main())
    assert seen == [(["note 0", "note 1"], False), (["note 2"], True)] * 2


def test_ticks_that_failed_are_in_no_episode():
    seen = []

    async def fails_once(state):
        if state.tick == 1:
            raise KeyError

    async def main():
        actor = AgentActor({"a": Recorder, "b": agent(fails_once)}, seen, serialize="json")
        await actor.start("s", b"")
        for _ in range(3):
            with contextlib.suppress(KeyError):
                await tick(actor)
        await actor.end(b"")

    run(main())
    assert seen == [(["note 0", "note 2"], True)]


def test_episodes_are_handled_in_order_behind_the_replies_and_before_the_end_returns():
    events, gate = [], None

    class Slow(Agent):
        async def on_tick(self, state):
            pass

        async def on_episode(self, episode, done):
            events.append(f"begin {episode[0].tick}")
            await gate.wait()
            await asyncio.sleep(0.01)
            events.append(f"finish {episode[0].tick}")

    async def main():
        nonlocal gate
        gate = asyncio.Event()
        actor = AgentActor({"a": Slow}, episode_length=2, serialize="json")
        await actor.start("s", b"")
        for i in range(5):
            await tick(actor)
            await asyncio.sleep(0)
            events.append(f"reply {i}")
        gate.set()
        await actor.end(b"")
        events.append("end")

    run(main())
    assert events[:4] == ["reply 0", "begin 0", "reply 1", "reply 2"]
    assert events[4:6] == ["reply 3", "reply 4"]
    assert events[6:] == ["finish 0", "begin 2", "finish 2", "begin 4", "finish 4", "end"]


def test_a_backlog_of_episodes_holds_the_ticks_back():
    release, running = [], []

    class Slow(Agent):
        async def on_tick(self, state):
            pass

        async def on_episode(self, episode, done):
            running.append(episode[0].tick if episode else None)
            future = asyncio.get_running_loop().create_future()
            release.append(future)
            await future

    async def main():
        actor = AgentActor({"a": Slow}, episode_length=1, serialize="json")
        await actor.start("s", b"")
        for _ in range(agent_module.MAX_BACKLOG):
            await tick(actor)
        held = asyncio.ensure_future(tick(actor))
        done, _ = await asyncio.wait({held}, timeout=0.05)
        assert not done
        assert running == [0]
        release[0].set_result(None)
        assert await held == b"{}"
        ending = asyncio.ensure_future(actor.end(b""))
        while not ending.done():
            if not release[-1].done():
                release[-1].set_result(None)
            await asyncio.sleep(0)
        assert running == [0, 1, 2, None]

    run(main())


def test_an_end_that_is_cancelled_leaves_nothing_running():
    cancelled = []

    class Hangs(Agent):
        async def on_tick(self, state):
            pass

        async def on_episode(self, episode, done):
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                cancelled.append(len(episode))
                raise

    async def main():
        actor = AgentActor({"a": Hangs, "b": Hangs}, episode_length=2, serialize="json")
        await actor.start("s", b"")
        before = asyncio.all_tasks()
        for _ in range(3):
            await tick(actor)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(actor.end(b""), 0.05)
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == before

    run(main())
    assert cancelled == [2, 2]


@pytest.mark.parametrize("plain", [False, True])
def test_an_error_in_on_episode_is_logged_with_its_agent_and_stops_nothing(caplog, plain):
    seen = []

    def raises(episode, done):
        raise ValueError(f"no trajectory ({plain})")

    async def raises_later(episode, done):
        await asyncio.sleep(0)
        raises(episode, done)

    agents = {"bad": agent(lambda state: None, raises if plain else raises_later), "good": Recorder}
    replies = run(play(agents, 4, config=seen, episode_length=2))
    assert replies == [b"{}"] * 4
    assert seen == [(["note 0", "note 1"], False), (["note 2", "note 3"], False), ([], True)]
    assert caplog.text.count("session 's': on_episode of agent 'bad' failed") == 1  # the same a minute later
    assert "ValueError: no trajectory" in caplog.text


def test_something_cancelled_in_on_episode_is_logged(caplog):
    async def awaits(episode, done):
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    run(play({"a": agent(lambda state: None, awaits)}))
    assert "agent 'a' awaited something that was cancelled" in caplog.text


def test_each_agent_has_the_episode_for_itself():
    lengths = []

    def takes(episode, done):
        lengths.append(len(episode))
        episode.clear()

    idle = lambda state: None  # noqa: E731
    run(play({"a": agent(idle, takes), "b": agent(idle, takes)}, 3))
    assert lengths == [3, 3]


def test_states_that_nobody_will_see_are_not_kept():
    states = []

    async def main():
        actor = AgentActor({"a": agent(lambda s: states.append(weakref.ref(s)))}, episode_length=None, serialize="json")
        await actor.start("s", b"")
        for _ in range(3):
            await tick(actor)
        gc.collect()
        assert [s() for s in states] == [None] * 3

    run(main())


# --- over a socket ----------------------------------------------------------------------------------------------------


async def post(reader, writer, kind, body, session="g-agent-red"):
    head = (
        f"POST /step HTTP/1.1\r\nHost: x\r\nsession: {session}\r\nstep_kind: {kind}\r\nContent-Length: "
        f"{len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    length = next(int(x.split(":")[1]) for x in lines if x.lower().startswith("content-length"))
    return int(lines[0].split()[1]), await reader.readexactly(length)


@pytest.mark.parametrize("serialize", [None, "proto"])
def test_bytes_and_messages_over_http(messages, serialize):
    from bray.serving.config import ServiceConfig
    from bray.serving.server import Server

    class Counts(Agent):
        def on_tick(self, state):
            if serialize is None:
                state.output = b"%d bytes" % len(state.input)
            else:
                state.output.action = len(state.input.position)

    async def main():
        protos = {"tick_input_proto": "made.tick_pb2:TickInput", "tick_output_proto": messages.TickOutput}
        make_actor = lambda: AgentActor({"a": Counts}, serialize=serialize, **protos)  # noqa: E731
        server = Server(make_actor, ServiceConfig(port=0, admin_port=0))
        await server.start()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            sent = messages.TickInput(position=[1, 2, 3]).SerializeToString()
            reply = b"14 bytes" if serialize is None else messages.TickOutput(action=3).SerializeToString()
            assert await post(reader, writer, "auto", sent) == (200, reply)  # no session: start, tick and end in one
            assert (await post(reader, writer, "start", b""))[0] == 200
            for _ in range(2):
                assert await post(reader, writer, "tick", sent) == (200, reply)
            status, body = await post(reader, writer, "tick", b"\x0a\xff")
            if serialize is None:
                assert (status, body) == (200, b"2 bytes")
            else:
                assert (status, json.loads(body)["error"]) == (400, "malformed")
            assert (await post(reader, writer, "end", b""))[0] == 200
            writer.close()
        finally:
            await server.close()

    run(main())


def test_agents_answer_games_over_http(tmp_path, caplog):
    from bray.serving.config import ServiceConfig
    from bray.serving.episodes import read_episode
    from bray.serving.server import Server

    seen = []

    class Acts(Agent):
        async def on_tick(self, state):
            await asyncio.sleep(0)
            if state.input.get("boom"):
                raise KeyError("secret of the service")
            state.choice = np.float32(state.input["x"]) * 2
            state.output.update(action=state.choice, agent=state.agent)

    class Watches(Recorder):
        async def on_tick(self, state):
            state.note = await state.wait("choice")

    async def main():
        options = {"serialize": "json", "episode_length": 2, "episode_save_interval": 1, "save_dir": tmp_path}
        config = ServiceConfig(port=0, admin_port=0)
        server = Server(lambda: AgentActor({"watches": Watches, "acts": Acts}, seen, **options), config)
        await server.start()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            assert await post(reader, writer, "start", b"") == (200, b"Game Started")
            for x in (1, 2):
                status, body = await post(reader, writer, "tick", b'{"x": %d}' % x)
                assert (status, json.loads(body)) == (200, {"action": 2.0 * x, "agent": "red"})
            status, body = await post(reader, writer, "tick", b'{"x": ')
            assert (status, json.loads(body)["error"]) == (400, "malformed")
            status, body = await post(reader, writer, "tick", b'{"boom": 1}')
            assert (status, json.loads(body)["error"]) == (500, "actor_error")
            assert b"secret" not in body
            status, body = await post(reader, writer, "tick", b'{"x": 3}')
            assert (status, json.loads(body)["action"]) == (200, 6.0)
            assert await post(reader, writer, "stop", b"") == (200, b"Game Stopped")
            assert (await post(reader, writer, "tick", b"{}"))[0] == 404
            writer.close()
        finally:
            await server.close()

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "raised by agent 'acts'" in caplog.text
    assert seen == [([2.0, 4.0], False), ([6.0], True)]
    files = sorted((tmp_path / "episodes").iterdir())
    assert len(files) == 2
    episode = read_episode(files[0])
    assert [(s.session, s.tick, s.input, s.choice) for s in episode] == [
        ("g-agent-red", 0, {"x": 1}, 2.0),
        ("g-agent-red", 1, {"x": 2}, 4.0),
    ]
