"""One entry before workers on many machines, and workers that watch each other: no cluster, real sockets."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import uvloop

from bray.client import Client
from bray.errors import ConfigError
from bray.serving import gateway as gateway_module, link as link_module
from bray.serving.config import ServiceConfig
from bray.serving.gateway import BehindHead, HeadGateway
from bray.serving.link import Listener, connect
from bray.serving.request import Gateway
from bray.serving.server import Server
from bray.serving.table import Table
from bray.serving.workers import serve
from tests.remote_actor_for_tests import eventually
from tests.serving_for_tests import Orders, Wire, http_request

SECRET = b"0123456789abcdef"


class Who(Orders):
    """Orders whose start says which worker it is."""

    worker = ""

    async def start(self, session, data):
        await super().start(session, data)
        return self.worker.encode()


class Cluster:
    """An entry and workers on one loop in a thread of its own, joined by real connections."""

    def __init__(self, workers=2, tcp=False, **config):
        self.config = {
            "port": 0,
            "admin_port": 0,
            "use_tcp": True,
            "drain_timeout_s": 0.2,
            "actors_per_worker": 10,
        } | config
        self.tcp = tcp
        self.loop = uvloop.new_event_loop() if tcp else asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.workers, self.gateways = {}, {}
        self.call(self.open_entry())
        for i in range(workers):
            self.call(self.open_worker(f"w{i}"))
        assert self.call(self.entry.wait_for({f"w{i}" for i in range(workers)}, 5.0))

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.call(self.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    async def open_entry(self, port=0):
        self.server = Server(lambda: None, ServiceConfig(**self.config | {"actors_per_worker": 0, "port": port}))
        self.server.open()
        self.entry = HeadGateway(self.server)
        self.listener = Listener(self.entry.handle, SECRET, self.entry.lost)
        await self.listener.start("test")
        await self.server.listen()
        self.port = self.server.port

    async def open_worker(self, name, **config):
        made = type("Who", (Who,), {"worker": name})
        server = self.workers[name] = Server(made, ServiceConfig(**self.config | config))
        server.open()
        self.gateways[name] = BehindHead(server, name)
        await self.link(name)

    async def link(self, name):
        gateway = self.gateways[name]
        address = self.listener.address
        gateway.connected(await connect(address, SECRET, gateway.handle, gateway.lost, unix=not self.tcp))

    async def kill_worker(self, name):
        """Its connections end without a word; its sessions are gone."""
        server, gateway = self.workers.pop(name), self.gateways.pop(name)
        gateway.link.abort()
        await asyncio.sleep(0)
        server.sessions.gateway = Gateway()
        await server.close()

    async def kill_entry(self):
        for link in self.listener.links:
            link.abort()
        await self.listener.close()
        await self.entry.close()
        await self.server.close()

    async def close(self):
        await self.kill_entry()
        for server in self.workers.values():
            await server.close()
        for gateway in self.gateways.values():
            await gateway.close()
        await asyncio.sleep(0)

    async def owners(self):
        return {name.decode(): worker.name for name, worker in self.entry.owners.items()}

    async def truth(self):
        """Which worker really has which session."""
        return {s.decode(): name for name, server in self.workers.items() for s in server.sessions.sessions}


def test_secrets_hold_behind_an_entry():
    with Cluster(2, session_secrets=True, use_tcp=False) as c, Wire(c.port) as stranger:
        clients = [Client("127.0.0.1", c.port, retries=0) for _ in range(6)]
        assert {client.start() for client in clients} == {b"w0", b"w1"}
        for client in clients:
            assert stranger.step("tick", client.session, b"x")[0] == 403
            assert stranger.step("end", client.session, session_secret="0" * 32)[0] == 403
            assert client.tick(b"x") == b"1:x"
            assert client.end() == b"bye"


def test_an_entry_counts_the_sessions_of_an_address_at_all_workers():
    with Cluster(3, max_sessions_per_address=4) as c, Wire(c.port) as wire:
        statuses = [wire.step("start", f"s{i}")[0] for i in range(9)]
        assert statuses == [200] * 4 + [429] * 5
        assert wire.step("end", "s1")[0] == 200
        eventually(lambda: wire.step("start", "again")[0] == 200)
        owner = c.call(c.owners())["s0"]
        lost = [session for session, worker in c.call(c.owners()).items() if worker == owner]
        c.call(c.kill_worker(owner))
        eventually(lambda: wire.step("tick", "s0")[0] == 404)
        statuses = [wire.step("start", f"t{i}")[0] for i in range(9)]
        assert statuses.count(200) == len(lost)


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_games_play_through_the_entry(tcp):
    with Cluster(3, tcp) as c:
        clients = [Client("127.0.0.1", c.port, tcp=i % 2 == 0, retries=0) for i in range(30)]
        owners = [client.start() for client in clients]
        assert sorted(owners.count(w) for w in (b"w0", b"w1", b"w2")) == [10, 10, 10]
        for k in range(5):
            for client in clients:
                assert client.tick(b"hello") == b"%d:hello" % (k + 1)
        with Wire(c.port) as wire:  # any connection reaches any session
            for client in clients:
                assert wire.step("tick", client.session, b"x") == (200, b"6:x")
            assert wire.step("start", clients[0].session)[0] == 409
            assert wire.step("start", "one too many")[0] == 429
            assert wire.step("auto", None, b"x")[0] == 429
            assert wire.step("tick", "nobody")[0] == 404
            assert wire.step("tick", clients[0].session, b"raise")[0] == 500
            assert wire.step("tick", clients[0].session, b"key", key="k1") == (200, b"k1")
        for client in clients:
            assert client.end() == b"bye"
        assert c.call(c.owners()) == {}
        with Wire(c.port) as wire:
            assert wire.step("auto", None, b"x") == (200, b"1:x")
            assert wire.step("tick", clients[0].session)[0] == 404
            big = os.urandom(3 << 20)
            assert wire.step("auto", None, big) == (200, b"1:" + big)


def test_a_start_behind_an_end_keeps_its_place():
    with Cluster(2) as c, Wire(c.port) as wire:
        for _ in range(20):
            first = wire.step("start", "g")[1]
            wire.send(http_request("tick", "g", b"sleep 0.01") + http_request("end", "g") + http_request("start", "g"))
            assert [wire.response()[0] for _ in range(3)] == [200, 200, 200]
            assert c.call(c.owners()) == {"g": first.decode()} == c.call(c.truth())
            assert wire.step("tick", "g", b"x") == (200, b"1:x")
            assert wire.step("end", "g")[0] == 200


def test_a_worker_with_less_room_than_it_seemed_does_not_refuse_for_all():
    """A stateless request that ran out of time still has its slot: the entry hears so from the worker and asks another
    one."""
    with Cluster(2, actors_per_worker=1, tick_timeout_s=0.3) as c, Wire(c.port) as wire:
        assert wire.step("auto", None, b"stubborn 2")[0] == 504
        assert wire.step("start", "a")[0] == 200
        with Wire(c.port) as other:
            assert other.step("start", "b")[0] == 429
        assert wire.step("tick", "a", b"x") == (200, b"1:x")


def test_a_lost_worker_takes_only_its_own_sessions_with_it():
    with Cluster(2) as c:
        wires = [Wire(c.port) for _ in range(6)]
        owners = {f"s{i}": wire.step("start", f"s{i}")[1].decode() for i, wire in enumerate(wires)}
        assert sorted(owners.values()) == ["w0"] * 3 + ["w1"] * 3
        for i, wire in enumerate(wires):
            wire.send(http_request("tick", f"s{i}", b"sleep 0.4"))
        time.sleep(0.1)
        c.call(c.kill_worker("w0"))
        for i, wire in enumerate(wires):
            assert wire.response()[0] == (404 if owners[f"s{i}"] == "w0" else 200)
            assert wire.step("tick", f"s{i}")[0] == (404 if owners[f"s{i}"] == "w0" else 200)
        statuses = [wires[0].step("start", f"n{i}")[0] for i in range(8)]
        assert statuses == [200] * 7 + [429]  # those of the other one
        c.call(c.open_worker("w0"))
        c.call(c.entry.wait_for({"w0"}, 5.0))
        assert wires[0].step("start", "n7") == (200, b"w0")
        c.call(c.kill_worker("w0"))
        c.call(c.kill_worker("w1"))
        status, _, _ = wires[0].send(http_request("start", "later")).response()
        assert status == 503


def test_sessions_survive_their_entry():
    with Cluster(2) as c:
        with Wire(c.port) as wire:
            owners = {f"s{i}": wire.step("start", f"s{i}")[1] for i in range(6)}
        port = c.port
        c.call(c.kill_entry())
        with Wire_or_none(port) as nobody:
            assert nobody is None
        for gateway in c.gateways.values():  # they hear of it a moment later
            c.call(asyncio.wait_for(gateway.gone.wait(), 5.0))
        c.call(c.open_entry(port))
        for name in c.gateways:
            c.call(c.link(name))
        assert c.call(c.entry.wait_for({"w0", "w1"}, 5.0))
        with Wire(port) as wire:
            for name in owners:
                assert wire.step("tick", name, b"x") == (200, b"1:x")
            assert wire.step("start", "s0")[0] == 409
            assert [wire.step("start", f"n{i}")[0] for i in range(15)] == [200] * 14 + [429]


@contextlib.contextmanager
def Wire_or_none(port):
    try:
        with Wire(port) as wire:
            yield wire
    except ConnectionRefusedError:
        yield None


def test_the_same_worker_comes_back_before_its_old_connection_is_known_to_be_gone():
    with Cluster(1) as c, Wire(c.port) as wire:
        assert wire.step("start", "g")[0] == 200
        old = c.gateways["w0"].link
        c.call(c.link("w0"))
        for _ in range(100):
            if old.closed:
                break
            time.sleep(0.02)
        assert old.closed
        assert wire.step("tick", "g", b"x") == (200, b"1:x")
        assert not c.gateways["w0"].gone.is_set()
        assert wire.step("end", "g")[0] == 200
        assert c.call(c.owners()) == {}


def test_sessions_that_end_by_themselves_give_their_slots_back():
    with Cluster(2, actors_per_worker=1, idle_timeout_s=0.2) as c, Wire(c.port) as wire:
        assert [wire.step("start", f"s{i}")[0] for i in range(3)] == [200, 200, 429]
        deadline = time.monotonic() + 5
        while c.call(c.owners()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [wire.step("start", f"t{i}")[0] for i in range(3)] == [200, 200, 429]
        assert wire.step("tick", "s0")[0] == 404
        assert wire.step("end", "t0", b"raise")[0] == 500
        assert wire.step("start", "u", b"raise")[0] == 500
        assert wire.step("start", "u")[0] == 200


def hello(address, secret=SECRET, name="odd", slots=5):
    """A connection that says it is a worker, and never answers."""
    sock = socket.create_connection(("127.0.0.1", address.port), timeout=5)
    body = b'{"name": "%b", "slots": %d, "sessions": []}' % (name.encode(), slots)
    for kind, data in ((253, secret), (17, body)):
        sock.sendall(struct.pack("<QIB3x", 0, len(data), kind) + data)
    return sock


def test_a_worker_that_stands_still_does_not_hold_its_games_forever(monkeypatch):
    monkeypatch.setattr(gateway_module, "GRACE_S", 0.2)
    with Cluster(0, tcp=True, tick_timeout_s=0.3) as c:
        with hello(c.listener.address), Wire(c.port) as wire:
            assert c.call(c.entry.wait_for({"odd"}, 5.0))
            began = time.monotonic()
            assert wire.step("start", "g")[0] == 504
            assert wire.step("auto", None)[0] == 504
            assert time.monotonic() - began < 8
            assert c.call(asyncio.wait_for(c.entry.gather(0.1), 5))  # its own numbers
        for _ in range(100):
            if not c.entry.workers:
                break
            time.sleep(0.02)
        assert not c.entry.workers


def test_only_who_knows_the_secret_is_a_worker(monkeypatch):
    monkeypatch.setattr(link_module, "GREETING_S", 0.2)
    with Cluster(1, tcp=True) as c:
        with hello(c.listener.address, b"x" * 16) as sock, contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
        with socket.create_connection(("127.0.0.1", c.listener.address.port), timeout=5) as silent:
            silent.sendall(b"short")
            with contextlib.suppress(ConnectionResetError):
                assert silent.recv(1) == b""
        assert list(c.entry.workers) == ["w0"]
        with Wire(c.port) as wire:
            assert wire.step("start", "g")[0] == 200


def test_the_numbers_of_all_workers_are_added_up():
    with Cluster(2) as c, Wire(c.port) as wire:
        for i in range(4):
            wire.step("start", f"s{i}")
            wire.step("tick", f"s{i}", b"x")
        with urllib.request.urlopen(f"http://127.0.0.1:{c.server.admin_port}/metrics", timeout=5) as reply:
            numbers = dict(x.rsplit(" ", 1) for x in reply.read().decode().splitlines() if not x.startswith("#"))
        assert numbers["bray_workers"] == "2"
        assert numbers["bray_slots"] == "20"
        assert numbers["bray_sessions"] == "4"
        assert numbers['bray_requests_total{kind="tick",status="200"}'] == "4"
        assert numbers["bray_connections"] == "1"


def test_an_entry_drains():
    with Cluster(2, drain_timeout_s=5) as c, Wire(c.port) as wire, Wire(c.port) as other:
        assert wire.step("start", "g")[0] == 200
        wire.send(http_request("tick", "g", b"sleep 0.3"))
        time.sleep(0.1)
        draining = asyncio.run_coroutine_threadsafe(c.server.drain(), c.loop)
        time.sleep(0.1)
        assert other.step("start", "new")[0] == 503
        assert wire.response()[0] == 200
        assert not draining.done()
        assert wire.step("end", "g")[0] == 200
        draining.result(5)


def test_whatever_happens_entry_and_workers_agree():
    """Games on many connections while workers come and go: every request gets one answer, and in the end all know the
    same sessions."""
    rng = random.Random(0)
    with Cluster(3, actors_per_worker=4) as c:
        wires = [Wire(c.port) for _ in range(12)]
        seen = set()
        for step in range(160):
            asked = []
            for wire in rng.sample(wires, 6):
                kinds = [rng.choice(["start", "tick", "tick", "end", "auto"]) for _ in range(rng.randrange(1, 4))]
                name = f"s{rng.randrange(16)}"
                wire.send(b"".join(http_request(k, None if k == "auto" else name, b"x") for k in kinds))
                asked.append((wire, kinds))
            if step % 20 == 10:
                c.call(c.kill_worker(rng.choice(sorted(c.workers))))
            if step % 20 == 15:
                name = next(w for w in ("w0", "w1", "w2") if w not in c.workers)
                c.call(c.open_worker(name))
            for wire, kinds in asked:
                for kind in kinds:
                    seen.add((kind, wire.response()[0]))
        assert {s for _, s in seen} <= {200, 404, 409, 429, 503, 504}
        assert {("start", 200), ("start", 409), ("start", 429), ("tick", 200), ("tick", 404), ("auto", 200)} <= seen
        time.sleep(0.1)
        assert c.call(c.owners()) == c.call(c.truth())
        for worker in c.entry.workers.values():
            assert not worker.waiting
            assert worker.lent == 0
            assert worker.free == c.workers[worker.name].sessions.free


# --- workers that watch each other ------------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from bray.serving.table import Table
table = Table(Path(sys.argv[1]), workers=4, slots=10, create=True)
row = table.join(sys.argv[2])
table.open(True)
print(row, flush=True)
for line in sys.stdin:
    word, _, name = line.strip().partition(" ")
    print(table.claim(name.encode()) if word == "claim" else table.leave(), flush=True)
"""


@contextlib.contextmanager
def holder(path, name):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        row = process.stdout.readline()
        assert row, process.stderr.read()
        process.row = int(row)
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(process, line):
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_a_table_knows_who_lives(tmp_path):
    path = tmp_path / "sessions"
    table = Table(path, workers=4, slots=10, create=True)
    me = table.join("me")
    table.open(True)
    with holder(path, "other") as other:
        assert {me, other.row} == {0, 1}
        names = [b"s%d" % i for i in range(10)]
        for name in names:
            assert tell(other, f"claim {name.decode()}") == "True"
        assert [table.find(name) for name in names] == [other.row] * 10
        assert table.running() == 10
        assert table.total() == 20
        assert not table.claim(names[0])
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert table.running() == 0
        assert table.choose(but=(me,)) is None  # it is not asked, although its row says that it has room
        assert table.claim(names[0])  # what it had may begin again, here
        assert [table.find(name) for name in names] == [None] * 10
        assert table.total() == 10
    with holder(path, "other") as again:
        assert again.row == other.row
        with holder(path, "third") as third, holder(path, "fourth") as fourth:
            assert {me, again.row, third.row, fourth.row} == {0, 1, 2, 3}
            with pytest.raises(AssertionError, match="one worker too many: 4"), holder(path, "fifth"):
                pass
            assert tell(fourth, "leave") == "False"
        with holder(path, "fifth") as fifth:  # in the place of one that is gone
            assert fifth.row in (third.row, fourth.row)
    assert table.leave()


def test_head_is_not_for_one_machine():
    with pytest.raises(ConfigError, match="use_gateway: head is for the machines of a cluster"):
        serve(Who, ServiceConfig(port=0, use_gateway="head"))
