"""State, Agent and AgentActor: in one process, without a server; the last test is over a socket."""

import asyncio
import contextlib
import copy
import gc
import importlib
import json
import logging
import pickle
import shlex
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from bray.errors import ConfigError, Overloaded, WaitError
from bray.serving import agent as agent_module
from bray.serving.agent import Agent, AgentActor, State
from bray.serving.messages import BadMessage, make_codec
from bray.serving.state import parse_session

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


@pytest.fixture(scope="session")
def messages(tmp_path_factory):
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


# --- State ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("session", "game", "name"),
    [
        ("g1-agent-red", "g1", "red"),
        ("7f3b-22-agent-red-2", "7f3b-22", "red-2"),
        ("a-agent-b-agent-c", "a", "b-agent-c"),
        ("-agent-red", "", "red"),
        ("just a game", "just a game", ""),
        ("agent-red", "agent-red", ""),
        ("", "", ""),
    ],
)
def test_sessions_name_a_game_and_an_agent(session, game, name):
    assert parse_session(session) == (game, name)
    state = State(session)
    assert (state.session, state.game, state.agent) == (session, game, name)


def test_a_missing_field_says_how_to_wait_for_it():
    state = State("s", actor=3, tick=5, input={"x": 1})
    assert (state.actor, state.tick, state.input) == (3, 5, {"x": 1})
    with pytest.raises(AttributeError, match=r"no field 'reward', only session, .*await state.wait\('reward'\)"):
        _ = state.reward
    state.reward = 1.0
    assert state.reward == 1.0
    assert list(vars(state)) == ["session", "game", "agent", "actor", "tick", "input", "reward"]


def test_waiting_for_what_is_there_does_not_even_pass_the_loop():
    state = State()
    state.x = None
    waiting = state.wait("x")
    with pytest.raises(StopIteration) as stopped:
        waiting.send(None)
    assert stopped.value.value is None
    assert type(state) is State


def test_setting_a_field_wakes_all_who_wait_and_the_last_value_counts():
    async def main():
        state = State()
        waits = [asyncio.create_task(state.wait(f)) for f in ("x", "x", "y")]
        await asyncio.sleep(0)
        state.x = 1
        state.x = 2
        assert await waits[0] == await waits[1] == 2
        assert not waits[2].done()
        state.y = 3
        assert await waits[2] == 3
        assert type(state) is State  # the watching is over
        assert vars(copy.copy(state)) == vars(pickle.loads(pickle.dumps(state))) == vars(state)

    run(main())


def test_a_field_that_never_comes_is_named():
    async def main():
        state = State("s", tick=4)
        state.transition = 1
        with pytest.raises(WaitError) as e:
            await state.wait("transitoin", timeout=0.01)
        assert "an agent waited for state.transitoin in tick 4 of session 's' for 0.01 s" in str(e.value)
        assert "Fields that are there: session, game, agent, actor, tick, input, transition." in str(e.value)
        assert "Did you mean 'transition'?" in str(e.value)
        state.transitoin = 2  # too late for that wait, not for the next one
        assert await state.wait("transitoin", timeout=0.01) == 2

    run(main())


def test_a_cancelled_wait_is_named_in_the_log(caplog):
    async def main():
        state = State("s")
        task = asyncio.create_task(state.wait("x"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert type(state) is State

    run(main())
    assert "waited for state.x in tick 0 of session 's' when it was cancelled" in caplog.text


# --- agents that depend on each other -----------------------------------------------------------------------------------


async def _gives(state):
    state.x = 1
    state.output["got"] = await state.wait("y", timeout=None)


async def _takes(state):
    state.y = 10 + await state.wait("x", timeout=None)


@pytest.mark.parametrize("order", [("gives", "takes"), ("takes", "gives")])
def test_agents_that_need_each_other_work_in_both_orders(order):
    classes = {"gives": agent(_gives), "takes": agent(_takes)}
    assert run(play({name: classes[name] for name in order}, ticks=3)) == [b'{"got":11}'] * 3


def test_three_agents_in_a_chain_in_any_order():
    async def first(state):
        await asyncio.sleep(0)
        state.a = 1

    async def second(state):
        state.b = await state.wait("a") + 1

    async def third(state):
        state.output["c"] = await state.wait("b") + 1

    for order in ("abc", "acb", "bac", "bca", "cab", "cba"):
        classes = {"a": agent(first), "b": agent(second), "c": agent(third)}
        assert run(play({name: classes[name] for name in order})) == [b'{"c":3}']


def test_a_cycle_ends_in_an_error_that_names_the_field_and_the_agent():
    async def red(state):
        state.x = await state.wait("y", timeout=0.05)

    async def blue(state):
        state.y = await state.wait("x", timeout=0.05)

    with pytest.raises(WaitError, match=r"agent '(red|blue)' waited for state\.(x|y) .*no agent set it"):
        run(play({"red": agent(red), "blue": agent(blue)}))


def test_an_agent_that_waits_alone_is_named():
    async def lonely(state):
        await state.wait("x", timeout=0.01)

    with pytest.raises(WaitError, match=r"agent 'solo' waited for state\.x"):
        run(play({"solo": agent(lonely)}))


@pytest.mark.parametrize("names", [("bad", "waits"), ("waits", "bad")])
def test_who_waits_for_an_agent_that_fails_fails_at_once_with_its_cause(names):
    seen = []

    async def bad(state):
        await asyncio.sleep(0)
        raise ValueError("out of luck")

    async def waits(state):
        for _ in range(2):  # the one that is under way, and one that comes later
            try:
                await state.wait("x", timeout=None)
            except WaitError as e:
                seen.append(e)
        raise seen[0]

    classes = {"bad": agent(bad), "waits": agent(waits)}
    with pytest.raises(ValueError, match="out of luck") as e:
        run(play({name: classes[name] for name in names}))
    assert e.value.__notes__ == ["raised by agent 'bad'"]
    assert [w.__cause__ for w in seen] == [e.value, e.value]
    assert "agent 'waits' waited for state.x" in str(seen[0])
    assert "agent 'bad' failed: ValueError('out of luck')" in str(seen[0])


# --- a tick -----------------------------------------------------------------------------------------------------------


def test_agents_are_made_at_the_start_of_each_session():
    made = []

    class Mine(Agent):
        def __init__(self, name, config, state):
            made.append((name, config, state.session, state.game, state.agent, state.actor, state.input))

        async def on_tick(self, state):
            made.append((state.session, state.agent, state.tick, state.actor, state.input))

    async def main():
        actor = AgentActor({"a": Mine, "b": Mine}, {"a": {"lr": 1}}, serialize="json", actor=7)
        for session in ("g1-agent-red", "g2"):
            await actor.start(session, b"hello")
            await tick(actor, b"[1]")
            await tick(actor, b'"x"')
            await actor.end(b"")

    run(main())
    config = {"a": {"lr": 1}}
    assert made[:2] == [(name, config, "g1-agent-red", "g1", "red", 7, b"hello") for name in "ab"]
    assert made[2:6] == [("g1-agent-red", "red", 0, 7, [1])] * 2 + [("g1-agent-red", "red", 1, 7, "x")] * 2
    assert made[6:8] == [(name, config, "g2", "g2", "", 7, b"hello") for name in "ab"]
    assert made[8] == ("g2", "", 0, 7, [1])


def test_an_agent_that_cannot_be_made_is_named():
    class Old(Agent):
        def __init__(self, name, config):
            pass

    with pytest.raises(TypeError) as e:
        run(play({"a": Old}))
    assert "agent 'a' could not be made" in e.value.__notes__[0]
    assert "(name, config, state)" in e.value.__notes__[0]


def test_plain_methods_work_alone_and_beside_async_ones():
    episodes = []

    class Plain(Agent):
        def on_tick(self, state):
            state.output["plain"] = state.tick

        def on_episode(self, episode, done):
            episodes.append(([s.tick for s in episode], done))

    async def other(state):
        state.output["other"] = 1

    assert run(play({"a": Plain}, 2)) == [b'{"plain":0}', b'{"plain":1}']
    assert run(play({"b": agent(other), "a": Plain})) == [b'{"other":1,"plain":0}']
    assert episodes == [([0, 1], True), ([0], True)]


def test_a_plain_agent_alone_is_answered_without_a_task():
    class Plain(Agent):
        def on_tick(self, state):
            state.output["x"] = state.input["x"]

    async def main():
        actor = AgentActor({"a": Plain}, serialize="json")
        await actor.start("s", b"")
        assert actor.tick(b'{"x":1}') == b'{"x":1}'

    run(main())


def test_an_agent_without_on_tick_says_so():
    with pytest.raises(NotImplementedError, match="Agent has no method on_tick"):
        run(play({"a": Agent}))


@pytest.mark.parametrize(
    "error", [KeyError("x"), Overloaded("full"), BadMessage("no obs")], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("plain", [False, True])
def test_an_error_keeps_its_type_names_its_agent_and_the_session_goes_on(error, count, plain):
    finished = []

    async def slow(state):
        await asyncio.sleep(0.01)
        finished.append(state.tick)

    def raises(state):
        state.output["ok"] = state.tick
        if state.tick == 0:
            raise error

    async def raises_later(state):
        await asyncio.sleep(0)
        raises(state)

    async def main():
        agents = {"bad": agent(raises if plain else raises_later), "slow": agent(slow)}
        actor = AgentActor({name: agents[name] for name in list(agents)[:count]}, serialize="json")
        await actor.start("s", b"")
        with pytest.raises(type(error)) as e:
            await tick(actor)
        assert e.value is error
        assert e.value.__notes__[-1] == "raised by agent 'bad'"
        assert finished == [0][: count - 1]  # the tick is not over while an agent works on it
        assert await tick(actor) == b'{"ok":1}'

    run(main())


def test_a_second_error_of_a_tick_is_logged(caplog):
    async def one(state):
        raise KeyError("one")

    async def two(state):
        raise OSError("two")

    with pytest.raises(KeyError):
        run(play({"a": agent(one), "b": agent(two)}))
    assert "another agent failed too" in caplog.text
    assert "OSError: two" in caplog.text


# --- agents that only watch


def watcher(on_tick, init=None):
    body = {"watches": True, "on_tick": lambda self, state: on_tick(state)}
    if init is not None:
        body["__init__"] = init
    return type("Watcher", (Agent,), body)


def _answers(state):
    state.output["ok"] = state.tick


async def _breaks(state):
    raise KeyError("value")


@pytest.mark.parametrize("names", ["wa", "aw", "w"])
def test_an_agent_that_only_watches_may_fail(names, caplog):
    """Each tick is answered and joins the episode; the log has the error once per session."""
    seen = []
    classes = {
        "w": watcher(_breaks),
        "a": agent(_answers, lambda episode, done: seen.extend(s.tick for s in episode)),
    }
    replies = run(play({name: classes[name] for name in names}, ticks=3))
    if "a" in names:
        assert replies == [b'{"ok":0}', b'{"ok":1}', b'{"ok":2}']
        assert seen == [0, 1, 2]
    assert caplog.text.count("session 's': agent 'w', which only watches, failed; the game goes on") == 1
    assert caplog.text.count("KeyError: 'value'") == 1
    run(play({name: classes[name] for name in names}))
    assert caplog.text.count("KeyError: 'value'") == 2  # another session


def test_an_agent_that_only_watches_may_not_even_be_made(caplog):
    def init(self, name, config, state):
        raise OSError("no camera")

    assert run(play({"w": watcher(_breaks, init), "a": agent(_answers)}, ticks=2)) == [b'{"ok":0}', b'{"ok":1}']
    assert caplog.text.count("OSError: no camera") == 1
    assert "agent 'w' could not be made" in caplog.text
    with pytest.raises(OSError, match="no camera"):  # nobody is left to answer
        run(play({"w": watcher(_breaks, init)}))


@pytest.mark.parametrize("names", ["wa", "aw"])
@pytest.mark.parametrize("made", [True, False])
def test_who_waits_for_a_field_of_a_watcher_that_failed_gets_its_error(names, made):
    def init(self, name, config, state):
        if not made:
            raise KeyError("value")

    async def waits(state):
        state.output["seen"] = await state.wait("seen")

    classes = {"w": watcher(_breaks, init), "a": agent(waits)}
    start = time.monotonic()
    with pytest.raises(WaitError, match=r"waited for state.seen .* but agent 'w' failed: KeyError\('value'\)"):
        run(play({name: classes[name] for name in names}))
    assert time.monotonic() - start < 5  # at once, not when the wait runs out


@pytest.mark.parametrize("names", ["wgt", "tgw", "gwt"])
def test_a_watcher_that_failed_does_not_disturb_those_who_wait_for_others(names):
    async def gives(state):
        await asyncio.sleep(0.01)  # the watcher has failed by then
        state.given = 7

    async def takes(state):
        state.output["got"] = await state.wait("given")

    classes = {"w": watcher(_breaks), "g": agent(gives), "t": agent(takes)}
    assert run(play({name: classes[name] for name in names}, ticks=2)) == [b'{"got":7}'] * 2


def test_a_watcher_that_waited_for_an_agent_that_failed_adds_nothing_to_the_log(caplog):
    async def waits(state):
        await state.wait("outputs")

    with pytest.raises(KeyError):
        run(play({"a": agent(_breaks), "w": watcher(waits)}))
    assert "only watches" not in caplog.text


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_cancelled_tick_stops_all_its_agents_before_the_next_one(count):
    working, stopped = [], []

    async def endless(state):
        if state.tick:
            return
        working.append(1)
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.01)
            stopped.append(1)

    async def main():
        actor = AgentActor({str(i): agent(endless) for i in range(count)}, serialize="json")
        await actor.start("s", b"")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tick(actor), 0.05)
        assert len(working) == len(stopped) == count
        assert await tick(actor) == b"{}"

    run(main())


@pytest.mark.parametrize("count", [1, 2])
def test_an_agent_may_return_a_future(count):
    futures, seen = [], []

    def later(state):
        futures.append(asyncio.get_running_loop().create_future())
        return futures[-1]

    async def main():
        agents = {"a": agent(later, lambda episode, done: seen.append(len(episode))), "b": agent(lambda state: None)}
        actor = AgentActor(
            {name: agents[name] for name in list(agents)[:count]},
            serialize="json",
            episode_length=agent_module.MAX_BACKLOG,
        )
        await actor.start("s", b"")

        async def answer(settle):
            waiting = asyncio.ensure_future(actor.tick(b"{}"))
            await asyncio.sleep(0)
            settle(futures[-1])
            return await waiting

        assert await answer(lambda f: f.set_result("whatever it is")) == b"{}"
        with pytest.raises(KeyError) as e:
            await answer(lambda f: f.set_exception(KeyError("x")))
        assert e.value.__notes__ == ["raised by agent 'a'"]
        with pytest.raises(RuntimeError, match="agent 'a' awaited something that was cancelled"):
            await answer(lambda f: f.cancel())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tick(actor), 0.01)
        assert futures[-1].cancelled()
        assert await answer(lambda f: f.set_result(None)) == b"{}"
        await actor.end(b"")

    run(main())
    assert seen == [2, 0]  # the three ticks that failed are in no episode


@pytest.mark.parametrize("end", ["released", "cancelled"])
def test_an_agent_that_returns_futures_is_held_by_its_backlog_too(end):
    release = []

    class Slow(Agent):
        def on_tick(self, state):
            future = asyncio.get_running_loop().create_future()
            future.set_result(None)
            return future

        async def on_episode(self, episode, done):
            if not done:
                release.append(asyncio.get_running_loop().create_future())
                await release[-1]

    async def main():
        before = asyncio.all_tasks()
        actor = AgentActor({"a": Slow}, episode_length=1, serialize="json")
        await actor.start("s", b"")
        for _ in range(agent_module.MAX_BACKLOG):
            assert await tick(actor) == b"{}"
        held = actor.tick(b"{}")
        done, _ = await asyncio.wait({held}, timeout=0.05)
        assert not done
        if end == "released":
            release[0].set_result(None)
            assert await held == b"{}"
        else:
            held.cancel()
        while asyncio.all_tasks() != before:
            for future in release:
                future.done() or future.set_result(None)
            await asyncio.sleep(0)
        assert held.cancelled() == (end == "cancelled")

    run(main())


@pytest.mark.parametrize("count", [1, 2])
def test_something_cancelled_that_an_agent_awaits_is_an_error_and_no_cancellation(count):
    async def awaits(state):
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async def fine(state):
        pass

    agents = {"a": agent(awaits), "b": agent(fine)}
    with pytest.raises(RuntimeError, match="agent 'a' awaited something that was cancelled"):
        run(play({name: agents[name] for name in list(agents)[:count]}))


def test_numbers_of_actors_are_small_unique_and_used_again():
    class Quiet(Agent):
        def on_tick(self, state):
            state.output = b""

    gc.collect()
    actors = [AgentActor({"a": Quiet}) for _ in range(5)]
    numbers = [a.actor for a in actors]
    assert len(set(numbers)) == 5
    freed = actors.pop(2).actor
    gc.collect()
    assert AgentActor({"a": Quiet}).actor <= freed
    assert AgentActor({"a": Quiet}, actor=42).actor == 42


# --- messages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "sent"),
    [
        ({}, {}),
        ({"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True)}, {"a": 3, "b": 0.5, "c": True}),
        ({"a": np.arange(3), "b": np.zeros((2, 1))}, {"a": [0, 1, 2], "b": [[0.0], [0.0]]}),
        ({"a": np.array(7), "b": (1, [np.uint8(2)])}, {"a": 7, "b": [1, [2]]}),
        ({"a": np.float64("nan"), "b": float("inf")}, {"a": None, "b": None}),
        ({"a": {"b": None, "ü": "ß"}}, {"a": {"b": None, "ü": "ß"}}),
        ([1, 2], [1, 2]),
    ],
)
def test_what_json_sends(output, sent):
    def sets(state):
        state.output = output

    assert json.loads(run(play({"a": agent(sets)}))[0]) == sent


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{]", b"\xff\xfe", b'"\xff"', b"{} x", b"NaN", b"1e999", b"[" * 10_000, b"\x80\x04K\x01."]
)
def test_bad_json_is_a_400_and_reaches_no_agent(data):
    ticks = []

    async def main():
        actor = AgentActor({"a": agent(lambda state: ticks.append(state.tick))}, serialize="json")
        await actor.start("s", b"")
        with pytest.raises(BadMessage, match=f"expected JSON, got {len(data)} bytes") as e:
            await tick(actor, data)
        assert e.value.status == 400
        assert json.loads(e.value.body)["error"] == "malformed"
        await tick(actor)

    run(main())
    assert ticks == [0]


def test_what_json_cannot_hold_is_named():
    def sets(state):
        state.output["x"] = object()

    with pytest.raises(TypeError, match=r"state\.output holds a object; JSON holds numbers"):
        run(play({"a": agent(sets)}))


def test_bytes_in_bytes_out():
    def sets(state):
        state.output = state.input[::-1] if state.input != b"view" else memoryview(b"ok")

    assert run(play({"a": agent(sets)}, data=b"abc", serialize=None)) == [b"cba"]
    assert run(play({"a": agent(sets)}, data=b"view", serialize=None)) == [b"ok"]


@pytest.mark.parametrize(("output", "match"), [("text", "to be bytes .* got str"), (None, "none of a did")])
def test_bytes_that_are_none(output, match):
    def sets(state):
        if output is not None:
            state.output = output

    with pytest.raises(TypeError, match=match):
        run(play({"a": agent(sets)}, serialize=None))


def test_with_bytes_an_agent_can_wait_for_the_output():
    seen = []

    async def watches(state):
        seen.append(await state.wait("output"))

    async def acts(state):
        state.output = b"go"

    assert run(play({"w": agent(watches), "a": agent(acts)}, serialize=None)) == [b"go"]
    assert seen == [b"go"]


@pytest.mark.parametrize("form", ["class", "text", "mapping"])
def test_messages_in_messages_out(messages, form):
    def name(message):
        return {
            "class": getattr(messages, message),
            "text": f"made.tick_pb2:{message}",
            "mapping": {"module": "made.tick_pb2", "message": message},
        }[form]

    async def acts(state):
        state.output.action = int(sum(state.input.position)) + state.input.items["sword"]
        state.output.values.extend(state.input.position)

    data = messages.TickInput(position=[1, 2], items={"sword": 4}).SerializeToString()
    protos = {"tick_input_proto": name("TickInput"), "tick_output_proto": name("TickOutput")}
    replies = run(play({"a": agent(acts)}, 2, data, serialize="proto", **protos))
    assert [messages.TickOutput.FromString(r) for r in replies] == [messages.TickOutput(action=7, values=[1, 2])] * 2


def test_bytes_that_are_no_message_are_a_400(messages):
    codec = make_codec("proto", messages.TickInput, messages.TickOutput)
    with pytest.raises(BadMessage, match=r"expected a bray_test.TickInput message, got 2 bytes"):
        codec.decode(b"\x0a\xff")
    with pytest.raises(TypeError, match=r"expected state.output to be a bray_test.TickOutput"):
        codec.encode(messages.TickInput())


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (None, "tick_input_proto .*expected 'module:Message'.* got None"),
        ("made.tick_pb2", "expected 'module:Message'"),
        ("made.tick_pb2:", "expected 'module:Message'"),
        (int, "expected 'module:Message'.*got <class 'int'>"),
        ({"module": "made.tick_pb2"}, "expected 'module:Message'"),
        ("made.tick_pb2:TickInptu", "unknown message 'TickInptu' .*in module made.tick_pb2.*Did you mean 'TickInput'"),
        ("made.tick_pb2:DESCRIPTOR", "made.tick_pb2.DESCRIPTOR is not a protobuf message"),
        ("made.tock_pb2:TickInput", "there is no module made.tock_pb2"),
        ("nowhere.tick_pb2:TickInput", "there is no module nowhere.tick_pb2"),
    ],
)
def test_a_message_class_that_is_not_there(messages, spec, match):
    with pytest.raises(ConfigError, match=match):
        make_codec("proto", spec, messages.TickOutput)


def test_the_protos_do_not_matter_to_json():
    proto = {"module": "template.tick_pb2", "message": "TickInput"}
    make_codec("json", proto, proto)
    make_codec(None, proto, proto)


OLD_STYLE = """# -*- coding: utf-8 -*-
# Generated by the protocol buffer compiler.  DO NOT EDIT!
# source: tick.proto
from google.protobuf import descriptor as _descriptor
DESCRIPTOR = _descriptor.FileDescriptor(name='tick.proto', package='old', syntax='proto3', serialized_pb=b'')
_TICKINPUT = _descriptor.Descriptor(
    name='TickInput', full_name='old.TickInput', filename=None, file=DESCRIPTOR, containing_type=None,
    fields=[_descriptor.FieldDescriptor(
        name='x', full_name='old.TickInput.x', index=0, number=1, type=5, cpp_type=1, label=1, has_default_value=False,
        default_value=0, message_type=None, enum_type=None, containing_type=None, is_extension=False,
        extension_scope=None, file=DESCRIPTOR)])
"""


@pytest.mark.filterwarnings("ignore:Call to deprecated create function:DeprecationWarning")
@pytest.mark.parametrize("style", ["newer", "old", "removed"])
@pytest.mark.parametrize("package", ["", "pack"])
def test_a_generated_module_of_another_protobuf_is_refused_with_the_command_that_makes_it_again(
    tmp_path, monkeypatch, style, package
):
    proto = f"{style}{package}.proto"  # the pool of protobuf knows each file name once
    source = f"{package}/{proto}" if package else proto
    (tmp_path / source).parent.mkdir(exist_ok=True)
    text = (PROTOS / "tick.proto").read_text().replace("bray_test", f"refused_{style}{package}")
    (tmp_path / source).write_text(text)
    protoc(tmp_path, source)
    file = tmp_path / source.replace(".proto", "_pb2.py")
    generated = file.read_text()
    foreign = {
        "newer": generated.replace("Domain.PUBLIC,\n", "Domain.PUBLIC,\n    9") if style == "newer" else "",
        "old": OLD_STYLE.replace("tick.proto", source),
        "removed": generated.replace("descriptor as _descriptor", "descriptor_of_old as _descriptor", 1),
    }[style]
    assert foreign != generated
    file.write_text(foreign)
    monkeypatch.syspath_prepend(tmp_path)
    module = source.replace(".proto", "_pb2").replace("/", ".")
    with pytest.raises(ConfigError, match="generated for another protobuf") as e:
        make_codec("proto", f"{module}:TickInput", f"{module}:TickOutput")
    assert e.value.__cause__ is not None
    command = shlex.split(str(e.value).partition("Generate it again: ")[2])
    assert command[:3] == ["python", "-m", "grpc_tools.protoc"]
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=60, cwd=tmp_path.parent)
    assert file.read_text() == generated
    importlib.invalidate_caches()
    sys.modules.pop(module, None)
    codec = make_codec("proto", f"{module}:TickInput", f"{module}:TickOutput")
    assert codec.decode(b"").DESCRIPTOR.full_name == f"refused_{style}{package}.TickInput"


def test_a_module_that_fails_by_itself_gets_no_such_advice(tmp_path, monkeypatch):
    (tmp_path / "broken_messages.py").write_text("1 / 0\n")
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, match in (("broken_messages", "ZeroDivisionError"), ("needs_more", "not_installed_anywhere")):
        with pytest.raises(ConfigError, match=match) as e:
            make_codec("proto", f"{module}:TickInput", None)
        assert "protoc" not in str(e.value)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"serialize": "jsn"}, "unknown serialize 'jsn'.*json"),
        ({"serialize": "proto"}, "tick_input_proto"),
        ({"episode_length": 0}, "episode_length: expected a whole number from 1, got 0"),
        ({"episode_length": True}, "episode_length"),
        ({"episode_save_interval": 0}, "episode_save_interval"),
        ({"episode_save_interval": 10}, "save_dir"),
        ({"keep": 0}, "keep"),
        ({"agents": {}}, "needs agents"),
        ({"agents": {"a": object}}, r"agent 'a': expected a class with a method on_tick\(state\)"),
    ],
)
def test_configurations_that_cannot_work(options, match):
    with pytest.raises(ConfigError, match=match):
        AgentActor(**{"agents": {"a": Agent}, **options})


# --- episodes -----------------------------------------------------------------------------------------------------------


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


# --- over a socket --------------------------------------------------------------------------------------------------------


async def post(reader, writer, kind, body, session="g-agent-red"):
    head = f"POST /step HTTP/1.1\r\nHost: x\r\nsession: {session}\r\nstep_kind: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
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
