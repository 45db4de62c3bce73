"""State, Agent and AgentActor: in one process, without a server."""

import asyncio
import copy
import gc
import json
import pickle
import time

import pytest

from bray.errors import ConfigError, Overloaded, WaitError
from bray.serving import agent as agent_module
from bray.serving.agent import Agent, AgentActor, State
from bray.serving.messages import BadMessage
from bray.serving.protocol import Refusal
from bray.serving.state import parse_session
from tests.agent_for_tests import agent, play, run, tick

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


# --- agents that depend on each other ---------------------------------------------------------------------------------


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


def test_agents_of_some_seats_answer_the_sessions_of_these_alone():
    class Named(Agent):
        def __init__(self, name, config, state):
            self.name = name

        def on_tick(self, state):
            state.output = {**(state.output if hasattr(state, "output") else {}), self.name: state.agent}

    async def main():
        seats = {"a": ["red"], "b": ["blue", "green"]}
        actor = AgentActor({"a": Named, "b": Named}, serialize="json", seats=seats)
        for seat, answers in (("red", "a"), ("green", "b"), ("blue", "b")):
            await actor.start(f"g1-agent-{seat}", b"")
            assert json.loads(await tick(actor, b"[1]")) == {answers: seat}
            await actor.end(b"")
        for session in ("g1", "g1-agent-black"):
            with pytest.raises(Refusal, match="of red, blue, green, got the agent"):
                await actor.start(session, b"")

    run(main())


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


def test_what_agents_share_is_loaded_before_the_first_session():
    loaded = []

    class Slow(Agent):
        @classmethod
        def before_sessions(cls, name, config):
            loaded.append((name, config[name]["map"]))

    class Watches(Slow):
        watches = True

        @classmethod
        def before_sessions(cls, name, config):
            raise OSError("no disk")

    config = {"a": {"map": "desert"}, "w": {}}
    AgentActor({"a": Slow, "w": Watches}, config)
    assert loaded == [("a", "desert")]
    with pytest.raises(KeyError) as raised:
        AgentActor({"a": Slow}, {"a": {}})
    assert raised.value.__notes__ == ["agent 'a': " + Slow.__qualname__ + ".before_sessions(name, config) raised"]

    class Waits(Agent):
        @classmethod
        async def before_sessions(cls, name, config):
            pass

    with pytest.raises(ConfigError, match="class method that is not async"):
        AgentActor({"a": Waits}, {})
