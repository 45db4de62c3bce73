"""RemoteActor on a Ray of two nodes, both on this machine: a node that dies, a node that joins."""

import os
import shutil
import tempfile
import time

import pytest

import bray
from bray.client import Client, ClientError
from bray.remote.actor import handle
from bray.remote.actor.handle import RemoteActor
from bray.serving.agent import AgentActor
from tests.ray_for_tests import stop_shared_ray
from tests.remote_actor_for_tests import Numbered, eventually, metrics

NODE = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """(cluster, its second node, session); nobody else's Ray is touched, and nobody finds ours by accident."""
    from ray.cluster_utils import Cluster

    stop_shared_ray()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets are in it
    made = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        second = made.add_node(**NODE)
        path = tmp_path_factory.mktemp("nodes")
        session = bray.init(str(path / "project"), "trial", address=made.address)
        yield made, second, session
    finally:
        bray.shutdown()
        import ray

        ray.shutdown()
        made.shutdown()
        shutil.rmtree(os.environ.pop("RAY_TMPDIR"), ignore_errors=True)


def play(port, n):
    """n sessions: {client: (owner's process, number of its slot)}"""
    out = {}
    for _ in range(n):
        client = Client("127.0.0.1", port, retries=40)
        client.start()
        answer = client.tick({})
        out[client] = (answer["pid"], answer["actor"])
    return out


@pytest.mark.slow
def test_a_node_dies_and_another_one_joins(two_nodes, monkeypatch):
    monkeypatch.setattr(handle, "CHECK_S", 1.0)
    ray, second, session = two_nodes
    settings = {"port": 0, "admin_port": 0, "host": "127.0.0.1", "num_workers": 2, "actors_per_worker": 3}
    settings |= {"cpus_per_worker": 0.25, "memory_per_worker": 50, "drain_timeout_s": 0.2, "use_tcp": True}
    services = {kind: RemoteActor(f"by-{kind}", use_gateway=kind, **settings) for kind in ("node", "head")}
    ids = {n.head: n.id[:12] for n in session.cluster.nodes()}
    assert set(ids) == {True, False}
    playing, dead = {}, {}
    for kind, actor in services.items():
        actor.serve(Actor=AgentActor, agents={"a": Numbered}, serialize="json")
        members = [f"actor/by-{kind}/{node}/{i}" for node in ids.values() for i in range(2)]
        assert set(members) <= set(session.cluster.names("actor/"))
        pids = {m: session.cluster.pid(m) for m in members}
        dead[kind] = {p for m, p in pids.items() if ids[False] in m}
        # all slots of both nodes are one service, at one port
        games = playing[kind] = play(actor.port, 12)
        assert {pid for pid, _ in games.values()} == set(pids.values())
        assert sorted(number for _, number in games.values()) == list(range(12))
        with pytest.raises(ClientError, match=r"429 .*all 12 slots"):
            Client("127.0.0.1", actor.port, retries=0).start()
        for client, (pid, _) in games.items():  # over any connection, whichever node it ends at
            for tcp in (False, True):
                with Client("127.0.0.1", actor.port, session=client.session, tcp=tcp) as other:
                    assert other.tick({})["pid"] == pid
        assert metrics(actor.admin_port)["bray_workers"] == "4"

    ray.remove_node(second, allow_graceful=False)
    for kind, actor in services.items():
        eventually(lambda actor=actor: metrics(actor.admin_port)["bray_workers"] == "2", 30)
        for client, (pid, number) in playing[kind].items():
            if pid in dead[kind]:
                with pytest.raises(ClientError, match="404"):
                    client.tick({}, idempotent=True)
            else:
                answer = client.tick({}, idempotent=True)
                assert (answer["pid"], answer["actor"]) == (pid, number)
        # the slots of the node that lives are taken, and there are no others
        with pytest.raises(ClientError, match=r"429 .*all 6 slots"):
            Client("127.0.0.1", actor.port, retries=0).start()

    ray.add_node(**NODE)
    ray.add_node(**NODE | {"num_cpus": 0})  # has no room, which harms nobody
    for kind, actor in services.items():
        eventually(lambda actor=actor: metrics(actor.admin_port)["bray_workers"] == "4", 60)
        games = play(actor.port, 6)
        numbers = [number for pid, number in playing[kind].values() if pid not in dead[kind]]
        numbers += [number for _, number in games.values()]
        assert len(set(numbers)) == 12  # no slot has the number of another
        with pytest.raises(ClientError, match=r"429 .*all 12 slots"):
            Client("127.0.0.1", actor.port, retries=0).start()
    log = (session.path / "bray.log").read_text()
    assert "is gone" in log
    assert "has joined and has its workers" in log
    began = time.monotonic()
    for actor in services.values():
        actor.stop()
    assert time.monotonic() - began < 30
    assert session.cluster.names("actor/") == []
