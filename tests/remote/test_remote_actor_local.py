"""RemoteActor in this process (cluster="local"): what does not need other processes."""

import asyncio
import logging
import time

import pytest

from bray.client import Client, ClientError
from bray.cluster import io, session as sessions
from bray.errors import ConfigError, UnknownName
from bray.remote.actor.handle import RemoteActor
from bray.serving.agent import AgentActor
from tests.ray_for_tests import local_session  # noqa: F401
from tests.remote_actor_for_tests import (
    AtariActor,
    Broken,
    Bytes,
    FakeBuffer,
    FakeModel,
    Handles,
    Odd,
    Planner,
    Scout,
    Who,
    free_port,
    metrics,
)

pytestmark = pytest.mark.usefixtures("local_session")


@pytest.fixture
def atari():
    """The model and the buffer that the Atari actor names."""
    here = sessions.session().cluster
    return here.start("model/atari_model", FakeModel), here.start("buffer/atari_buffer/0", FakeBuffer)


def test_the_atari_actor_plays_with_its_model_and_buffer(atari):
    remote_actor = RemoteActor(port=0)
    remote_actor.serve(Actor=AtariActor, model="atari_model", buffer="atari_buffer")
    with Client("127.0.0.1", remote_actor.port) as client:
        client.start("g")
        assert [client.tick(b"%d" % i) for i in range(3)] == [b"0", b"2", b"4"]
        client.end()
    assert atari[1].call("pop").result() == ("g", 6)


def test_handles_are_arguments_in_any_place(atari, caplog):
    with caplog.at_level(logging.INFO, "bray.remote"):
        for port, serve in (
            (0, lambda a: a.serve(Handles, atari[0], 5)),
            (free_port(), lambda a: a.serve(Actor=Handles, *(atari[0],), factor=5)),  # noqa: B026
        ):
            actor = RemoteActor("h", port=port, admin_port=0, use_tcp=True, num_workers=4)
            serve(actor)
            assert port in (0, actor.port)
            for tcp in (False, True):
                with Client("127.0.0.1", actor.port, tcp=tcp) as client:
                    client.start()
                    assert client.tick(b"3") == b"30"
                    assert client.end() == b"stopped"
            actor.stop()
    assert "cluster='local' has one worker, not 4" in caplog.text


def test_agents_play_as_in_training(local_session):  # noqa: F811
    actor = RemoteActor("game", port=0, admin_port=0, actors_per_worker=3)
    agents = {"scout": Scout, "planner": Planner}
    actor.serve(
        Actor=AgentActor,
        agents=agents,
        config={"planner": {"offset": 100}},
        episode_length=2,
        episode_save_interval=1,
        serialize="json",
    )
    with Client("127.0.0.1", actor.port) as client:
        client.start("arena", "red")
        assert [client.tick({"n": n})["plan"] for n in range(3)] == [100, 101, 102]
        client.end()
    saved = sorted(p.name for p in (local_session.path / "episodes").iterdir())
    assert len(saved) == 2
    assert {p.name.rsplit("-", 1)[0] for p in (local_session.path / "pieces").iterdir()} == {
        "arena-2-False",
        "arena-1-True",
    }
    numbers = metrics(actor.admin_port)
    assert numbers['bray_requests_total{kind="tick",status="200"}'] == "3"
    assert numbers["bray_slots"] == "3"


def test_agents_of_bytes():
    actor = RemoteActor(port=0, admin_port=0)
    actor.serve(Actor=AgentActor, agents={"a": Bytes}, serialize=None, episode_length=None)
    with Client("127.0.0.1", actor.port) as client:
        client.start()
        assert client.tick(b"abc") == b"cba"
        client.end()


def test_what_is_wrong_with_an_actor_is_told_by_serve():
    actor = RemoteActor(port=0, admin_port=0)
    with pytest.raises(FileNotFoundError, match="no map at here"):
        actor.serve(Actor=Broken, map_file="here")
    with pytest.raises(ConfigError, match=r"expected an Actor with start.* Odd has no tick, end"):
        actor.serve(Actor=Odd)
    with pytest.raises(ConfigError, match="got no Actor"):
        actor.serve()
    with pytest.raises(ConfigError, match="with a class, got 'Who'"):
        actor.serve(Actor="Who")
    assert sessions.session().cluster.names("actor/") == []
    actor.serve(Actor=Who)  # after all that
    with pytest.raises(ConfigError, match="serves already"):
        actor.serve(Actor=Who)
    with pytest.raises(ConfigError, match="there is an actor 'default' already"):
        RemoteActor(port=0, admin_port=0).serve(Actor=Who)
    with Client("127.0.0.1", actor.port) as client:  # which does not end the first one
        client.start()
        assert client.tick(b"x")


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"port .*: expected .*65535, got 99999"):
        RemoteActor(port=99999)
    with pytest.raises(ConfigError, match=r"use_gateway .*: expected .*node.*got 'all'"):
        RemoteActor(use_gateway="all")
    with pytest.raises(UnknownName, match="tick_timeout_s"):
        RemoteActor(tick_timeout=3)
    with pytest.raises(ConfigError, match="a name without '/'"):
        RemoteActor("a/b")
    with pytest.raises(ConfigError, match="num_workers: expected a whole number from 1, got 0"):
        RemoteActor(num_workers=0)


def test_settings_of_the_service_reach_it():
    actor = RemoteActor(port=0, admin_port=0, actors_per_worker=1, tick_timeout_s=0.2, tokens=("secret",), max_body=10)
    actor.serve(Actor=Who, greeting=" hi")
    with Client("127.0.0.1", actor.port, token="secret", retries=0) as client:
        client.start()
        assert client.tick(b"x").endswith(b" 1 hi")
        with pytest.raises(ClientError, match="504"):
            client.tick(b"sleep 5")
        with pytest.raises(ClientError, match="413"):
            client.tick(b"x" * 11)
        with Client("127.0.0.1", actor.port, retries=0) as stranger, pytest.raises(ClientError, match="401"):
            stranger.start()
        with Client("127.0.0.1", actor.port, token="secret", retries=0) as second:
            with pytest.raises(ClientError, match="429"):
                second.start()


def test_a_failing_actor_harms_nobody(caplog):
    actor = RemoteActor(port=0, admin_port=0)
    actor.serve(Actor=Who)
    with Client("127.0.0.1", actor.port) as client, Client("127.0.0.1", actor.port) as other:
        client.start()
        other.start()
        with pytest.raises(ClientError, match="500") as caught:
            client.tick(b"raise")
        assert "book" not in str(caught.value)
        assert "this move is not in the book" in caplog.text
        client.tick(b"exit")  # a task of the Actor ends the process, if it could
        assert client.tick(b"x")
        assert other.tick(b"x")

        async def ping():
            return 1

        assert io.run(ping(), timeout=5) == 1


def test_the_end_of_a_session_drains(local_session):  # noqa: F811
    actor = RemoteActor(port=0, admin_port=0, drain_timeout_s=5)
    actor.serve(Actor=Who)
    client, other = Client("127.0.0.1", actor.port, retries=0), Client("127.0.0.1", actor.port, retries=0)
    client.start()
    other.start()
    other.end()

    async def shut_down():
        loop = asyncio.get_running_loop()
        ending = loop.run_in_executor(None, sessions.shutdown)
        await asyncio.sleep(0.3)
        assert not ending.done()
        with pytest.raises(ClientError, match="503"):
            await loop.run_in_executor(None, other.start)
        assert await loop.run_in_executor(None, client.tick, b"x")
        assert await loop.run_in_executor(None, client.end) == b"1 ticks"
        await asyncio.wait_for(ending, 5)

    asyncio.run(shut_down())
    with pytest.raises(ClientError):
        other.start()
    with pytest.raises(ConfigError, match="no session"):
        sessions.session()


def test_stop_does_not_wait_forever():
    actor = RemoteActor(port=0, admin_port=0, drain_timeout_s=0.2)
    actor.serve(Actor=Who)
    client = Client("127.0.0.1", actor.port, retries=0)
    client.start()
    began = time.monotonic()
    actor.stop()
    assert time.monotonic() - began < 5
    actor.stop()  # nothing more to do
    assert not sessions.session().cluster.names("actor/")
    with pytest.raises(ClientError):
        client.tick(b"x")
