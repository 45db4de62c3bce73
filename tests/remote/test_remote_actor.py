"""RemoteActor on a real Ray: every key against a real client, failures, and a worker that is killed while games are
played."""

import contextlib
import os
import signal
import threading
import time

import pytest

from bray.client import Client, ClientError
from bray.errors import ConfigError, MissingComponent, ResourceError, Unreachable
from bray.remote.actor import handle
from bray.remote.actor.handle import RemoteActor
from bray.serving.agent import AgentActor
from bray.serving.messages import message_class
from tests.ray_for_tests import ray_session  # noqa: F401
from tests.remote_actor_for_tests import (
    AtariActor,
    Broken,
    FakeBuffer,
    FakeModel,
    Handles,
    Messages,
    Picky,
    Planner,
    Scout,
    Who,
    eventually,
    free_port,
    metrics,
)


@pytest.fixture(scope="module")
def session(ray_session):  # noqa: F811
    return ray_session


@contextlib.contextmanager
def serving(*args, Actor=Who, name="games", num_workers=2, drain_timeout_s=0.2, **kwargs):
    """A service on free ports; keys of RemoteActor by name, what is left goes to the Actor."""
    settings = {"port": 0, "admin_port": 0, "cpus_per_worker": 0.5, "memory_per_worker": 100}
    keys = ("port", "admin_port", "actors_per_worker", "use_tcp", "use_gateway", "tick_timeout_s", "cpus_per_worker")
    settings |= {k: kwargs.pop(k) for k in keys if k in kwargs}
    actor = RemoteActor(name, num_workers=num_workers, drain_timeout_s=drain_timeout_s, **settings)
    actor.serve(*args, Actor=Actor, **kwargs)
    try:
        yield actor
    finally:
        actor.stop()


def clients(actor, n, **kwargs):
    return [Client("127.0.0.1", actor.port, retries=0, **kwargs) for _ in range(n)]


# --- the keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_gateway", ["node", "head", None])
def test_port_workers_slots_protocols_and_gateway(session, use_gateway):
    workers, slots, port = (3, 4, free_port()) if use_gateway != "head" else (2, 5, 0)
    with serving(
        use_gateway=use_gateway, num_workers=workers, actors_per_worker=slots, port=port, use_tcp=True
    ) as actor:
        assert port in (0, actor.port)
        assert len(session.cluster.names("actor/games/")) == workers + (use_gateway == "head")
        total = workers * slots
        playing, owners, refused = [], {}, 0
        while len(playing) < total and refused < 200:
            client = Client("127.0.0.1", actor.port, tcp=len(playing) % 2 == 0, retries=0)
            try:
                owners[client] = int(client.start())
                playing.append(client)
            except ClientError as e:  # without a gateway a connection belongs to a worker, which may be full
                if use_gateway is not None or e.status != 429:
                    raise
                refused += 1
        assert sorted(list(owners.values()).count(p) for p in set(owners.values())) == [slots] * workers
        for client in clients(actor, 2 * workers):
            with pytest.raises(ClientError, match=f"429 .*all {total} slots"):
                client.start()
        for k in range(3):
            for client in playing:
                assert client.tick(b"x") == b"%d %d" % (owners[client], k + 1)
        numbers = metrics(actor.admin_port)
        assert numbers["bray_workers"] == str(workers)
        assert numbers["bray_sessions"] == str(total)
        assert numbers['bray_requests_total{kind="tick",status="200"}'] == str(3 * total)
        # a session on another connection than its own
        found = []
        for i in range(12):
            with Client("127.0.0.1", actor.port, session=playing[i % total].session, retries=0) as other:
                try:
                    found.append(other.tick(b"x").startswith(b"%d " % owners[playing[i % total]]))
                except ClientError as e:
                    if e.status != 404:
                        raise
                    found.append(False)
        assert all(found) or use_gateway is None
        assert not all(found) or use_gateway is not None
        for client in playing:
            client.end()
    with pytest.raises(ClientError):
        Client("127.0.0.1", actor.port, retries=0).start()


def test_a_game_plays_a_remote_actor(session):
    session.cluster.start("model/atari_model", FakeModel)
    buffer = session.cluster.start("buffer/atari_buffer/0", FakeBuffer)
    remote_actor = RemoteActor(port=0, cpus_per_worker=0.5, memory_per_worker=100)
    remote_actor.serve(Actor=AtariActor, model="atari_model", buffer="atari_buffer")
    assert len(session.cluster.names("actor/default/")) == 2
    for client in clients(remote_actor, 4):
        client.start("g")
        assert [client.tick(b"%d" % i) for i in range(3)] == [b"0", b"2", b"4"]
        client.end()
    with pytest.raises(ClientError):  # use_tcp is false
        clients(remote_actor, 1, tcp=True, timeout=2)[0].start()
    eventually(lambda: buffer.call("size").result() == 4)
    assert buffer.call("pop").result() == ("g", 6)
    remote_actor.stop()


@pytest.fixture(scope="module")
def agents(session):
    """A service of two agents in two workers, as a launch file makes it."""
    with serving(
        Actor=AgentActor,
        name="agents",
        actors_per_worker=3,
        agents={"scout": Scout, "planner": Planner},
        config={"planner": {"offset": 100}},
        episode_length=2,
        episode_save_interval=2,
        serialize="json",
    ) as actor:
        yield actor


def test_agents_episodes_and_json(session, agents):
    playing = clients(agents, 6)
    for i, client in enumerate(playing):
        client.start(f"arena{i}", "red")
    numbers = set()
    for n in range(5):
        for client in playing:
            answer = client.tick({"n": n})
            assert (answer["plan"], answer["tick"]) == (100 + n, n)
            numbers.add((client, answer["actor"]))
    assert sorted(number for _, number in numbers) == [0, 1, 2, 3, 4, 5]  # of all slots of the service, once each
    with pytest.raises(ClientError, match="400"):
        playing[0].tick(b"not json")
    for client in playing:
        client.end()
    pieces = [p.name.rsplit("-", 1)[0] for p in (session.path / "pieces").iterdir()]
    for i in range(6):
        game = sorted(p for p in pieces if p.startswith(f"arena{i}-"))
        assert game == [f"arena{i}-1-True", f"arena{i}-2-False", f"arena{i}-2-False"]
    # the first and the third piece of each slot
    assert len(list((session.path / "episodes").glob("*.episode"))) == 12


def test_an_error_of_an_agent_is_in_the_log_with_where_it_ran(session, agents):
    (client,) = clients(agents, 1)
    client.start("lost")
    with pytest.raises(ClientError, match="500 actor_error") as caught:
        client.tick({"fail": True})
    assert "no plan" not in str(caught.value)
    assert client.tick({"n": 1})["plan"] == 101
    client.end()
    log = (session.path / "bray.log").read_text()
    line = next(x for x in log.splitlines() if "session 'lost': AgentActor.tick failed" in x)
    member = next(m for m in session.cluster.names("actor/agents/") if m in line)
    assert f"{member} (pid {session.cluster.pid(member)} on " in line
    after = log[log.index(line) :]
    assert (
        after.index("Traceback")
        < after.index("KeyError: 'no plan for this'")
        < after.index("raised by agent 'planner'")
    )


def test_a_proto_file(session, monkeypatch):
    monkeypatch.chdir(
        os.path.dirname(os.path.dirname(__file__))
    )  # a relative path means this directory, not that of a worker
    file = "protos/tick.proto"
    protos = {f"tick_{x}_proto": {"file": file, "message": f"Tick{x.title()}"} for x in ("input", "output")}
    with serving(Actor=AgentActor, agents={"a": Messages}, serialize="proto", num_workers=1, **protos) as actor:
        (client,) = clients(actor, 1)
        client.start()
        TickInput, TickOutput = (message_class(p, "p") for p in protos.values())
        reply = client.tick(TickInput(position=[1, 2]).SerializeToString())
        assert TickOutput.FromString(reply).action == 3
        client.end()


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_mistakes_are_errors_of_serve(session):
    began = time.monotonic()
    with pytest.raises(FileNotFoundError, match="no map at here") as caught, serving(Actor=Broken, map_file="here"):
        pass
    (note,) = caught.value.__notes__
    assert note.startswith("raised in actor/games/")
    assert 'raise FileNotFoundError(f"no map at {map_file}")' in note
    assert time.monotonic() - began < 30
    with pytest.raises(ResourceError, match="asks for 500 CPUs"), serving(cpus_per_worker=500):
        pass
    assert session.cluster.names("actor/games/") == []
    model = session.cluster.start("model/m", FakeModel)
    with serving(model, 5, Actor=Handles, num_workers=1) as actor:
        with (
            pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{actor.port}"),
            serving(name="other", port=actor.port),
        ):
            pass
        with pytest.raises(ConfigError, match="there is an actor 'games' already"), serving():
            pass
        (client,) = clients(actor, 1)  # the first one goes on; its Actor has a handle as argument
        client.start()
        assert client.tick(b"3") == b"30"
        assert client.end() == b"stopped"
    assert session.cluster.names("actor/games/") == []


# --- faults -----------------------------------------------------------------------------------------------------------


class Games:
    """Games that go on in threads, and what happened to each."""

    def __init__(self, actor, n):
        self.actor, self.over = actor, threading.Event()
        self.rows = [{"ticks": 0, "errors": [], "owners": []} for _ in range(n)]
        self.threads = [threading.Thread(target=self.play, args=(row,)) for row in self.rows]
        for thread in self.threads:
            thread.start()
        eventually(lambda: all(row["owners"] for row in self.rows))

    def play(self, row):
        client = Client("127.0.0.1", self.actor.port, timeout=60, retries=100)
        while not self.over.is_set():
            row["owners"].append(int(client.start()))
            try:
                while not self.over.is_set():
                    # a connection may end at another worker than the session's: its end says nothing of the session
                    client.tick(b"x", idempotent=True)
                    row["ticks"] += 1
                    time.sleep(0.005)
                client.end()
            except ClientError as e:
                row["errors"].append(e.status)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.over.set()
        for thread in self.threads:
            thread.join(70)
        assert not any(thread.is_alive() for thread in self.threads)


@pytest.mark.parametrize("use_gateway", ["node", "head"])
def test_a_killed_worker_takes_only_its_own_sessions_with_it(session, use_gateway):
    with serving(use_gateway=use_gateway, drain_timeout_s=10) as actor:
        with Games(actor, 12) as games:
            time.sleep(0.5)
            dead = games.rows[0]["owners"][0]
            os.kill(dead, signal.SIGKILL)
            # it comes back, and gets sessions: the other one has no room for all of these
            eventually(lambda: len({row["owners"][-1] for row in games.rows} - {dead}) == 2)
            time.sleep(0.3)
        hit = [row for row in games.rows if row["owners"][0] == dead]
        spared = [row for row in games.rows if row["owners"][0] != dead]
        assert hit
        assert spared
        for row in hit:  # told, and playing again
            assert row["errors"] == [404]
            assert len(row["owners"]) == 2
        for row in spared:
            assert row["errors"] == []
            assert len(row["owners"]) == 1
        eventually(lambda: metrics(actor.admin_port)["bray_workers"] == "2")
        if use_gateway == "head":
            sessions_survive_a_killed_entry(session, actor)
        stop_drains(actor)
        assert session.cluster.names("actor/games/") == []


def test_workers_that_do_not_come_back_are_started_anew(session, monkeypatch, tmp_path):
    monkeypatch.setattr(handle, "CHECK_S", 0.3)
    flag = tmp_path / "flag"
    with serving(Actor=Picky, flag=str(flag)) as actor:
        first, second = session.cluster.names("actor/games/")
        flag.write_text("")
        dead, alive = session.cluster.pid(first), session.cluster.pid(second)
        os.kill(dead, signal.SIGKILL)
        log = session.path / "bray.log"
        eventually(lambda: f"{first} is started anew" in log.read_text(), 60)
        for _ in range(8):  # whoever listens answers
            with clients(actor, 1)[0] as client:
                assert int(client.start()) == alive
                client.end()
        flag.unlink()
        eventually(lambda: metrics(actor.admin_port)["bray_workers"] == "2", 60)
        session.cluster.stop(second)  # for good, as far as Ray is concerned
        eventually(lambda: pid_of(session, second) not in (None, alive), 60)
        eventually(lambda: metrics(actor.admin_port)["bray_workers"] == "2", 60)


def sessions_survive_a_killed_entry(session, actor):
    eventually(lambda: metrics(actor.admin_port)["bray_sessions"] == "0")
    with Games(actor, 8) as games:
        time.sleep(0.3)
        before = session.cluster.pid("actor/games/head")
        os.kill(before, signal.SIGKILL)
        eventually(lambda: pid_of(session, "actor/games/head") not in (None, before))
        ticks = [row["ticks"] for row in games.rows]
        eventually(lambda: all(row["ticks"] > n for row, n in zip(games.rows, ticks, strict=True)))
    assert [row["errors"] for row in games.rows] == [[]] * 8
    assert all(len(row["owners"]) == 1 for row in games.rows)


def pid_of(session, name):
    with contextlib.suppress(Unreachable, MissingComponent):
        return session.cluster.pid(name)
    return None


def stop_drains(actor):
    eventually(lambda: metrics(actor.admin_port)["bray_sessions"] == "0")
    playing = clients(actor, 4)
    for client in playing:
        client.start()
    stopping = threading.Thread(target=actor.stop)
    stopping.start()
    eventually(lambda: refused(actor))
    for client in playing:
        assert client.tick(b"sleep 0.2")
        assert client.end() == b"1 ticks"
    stopping.join(60)
    assert not stopping.is_alive()
    with pytest.raises(ClientError):
        clients(actor, 1)[0].start()


def refused(actor):
    """Whether a new session is refused because the service is about to end."""
    try:
        with clients(actor, 1)[0] as client:
            client.start()
            client.end()
    except ClientError as e:
        return e.code == "draining"
    return False
