"""Several worker processes on one port: who owns a session, and what happens when one dies."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from bray.serving import table as table_module
from bray.serving.table import Table
from tests.serving_for_tests import Wire, http_request

SERVICE = """
import logging, os, sys
from bray.errors import ConfigError
from bray.serving.config import ServiceConfig
from bray.serving.workers import serve

class Who:
    async def start(self, session, data):
        self.ticks = 0
        return b"%d" % os.getpid()
    async def tick(self, data):
        if data == b"forever":
            import time
            time.sleep(3600)
        if data == b"slow":
            import asyncio
            await asyncio.sleep(0.5)
        self.ticks += 1
        return b"%d %d" % (os.getpid(), self.ticks)
    async def end(self, data):
        return b"bye"

def make():
    if os.environ.get("FAILS"):
        raise SystemExit(3)
    return Who()

def prepare(server):
    if os.environ.get("FAILS") == "mistake":
        raise ConfigError("told wrongly")
    if os.environ.get("FAILS") or os.path.exists(os.environ.get("FAILS_WHEN", "/nowhere")):
        raise RuntimeError("cannot be prepared")

logging.basicConfig(level="INFO", stream=sys.stderr)
config = ServiceConfig(**({"port": 0, "admin_port": 0, "use_tcp": True} | eval(sys.argv[1])))
sys.exit(serve(make, config, on_ready=lambda port, admin: print(port, admin, flush=True), prepare=prepare))
"""


@contextlib.contextmanager
def service(**config):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, repr({"workers": 2, "actors_per_worker": 10, "drain_timeout_s": 0.2} | config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        line = process.stdout.readline().split()
        if line:
            process.port, process.admin = map(int, line)
        yield process
    finally:
        process.kill()
        process.communicate()


def connections(port, n=16):
    return [Wire(port) for _ in range(n)]


def start_all(wires, n):
    """Sessions s0..: their owners' process ids."""
    owners = {}
    for i in range(n):
        status, reply = wires[i % len(wires)].step("start", f"s{i}")
        assert status == 200, reply
        owners[f"s{i}"] = int(reply)
    return owners


def ask_again(port, kind, session):
    """On a connection of its own, again where a dying worker's socket had it."""
    for _ in range(100):
        with contextlib.suppress(EOFError, ConnectionError), Wire(port) as wire:
            return wire.step(kind, session)
        time.sleep(0.02)
    raise AssertionError("nobody answers")


def metrics(admin):
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=5) as reply:
        return dict(x.rsplit(" ", 1) for x in reply.read().decode().splitlines() if not x.startswith("#"))


def test_a_closed_connection_frees_its_sessions_in_all_workers():
    with service(disconnect_timeout_s=0.2) as s:
        with Wire(s.port) as wire:
            assert len(set(start_all([wire], 16).values())) == 2  # both workers own some
        until = time.monotonic() + 20
        while metrics(s.admin)["bray_sessions"] != "0" and time.monotonic() < until:
            time.sleep(0.05)
        numbers = metrics(s.admin)
        assert (numbers["bray_sessions"], numbers["bray_sessions_expired_total"]) == ("0", "16")


def test_every_slot_is_used_and_every_request_reaches_its_owner():
    with service() as s:
        wires = connections(s.port)
        owners = start_all(wires, 20)
        assert sorted(list(owners.values()).count(p) for p in set(owners.values())) == [10, 10]
        assert wires[0].step("start", "one too many")[0] == 429
        assert wires[1].step("start", "s3")[0] == 409
        for k in range(8):
            for i, (name, owner) in enumerate(owners.items()):
                assert wires[(i + k) % 16].step("tick", name) == (200, b"%d %d" % (owner, k + 1))
        with Wire(s.port) as tcp:
            for name, owner in owners.items():
                assert tcp.ask(b"tick", name.encode())[1] == b"%d 9" % owner
        numbers = metrics(s.admin)
        assert numbers["bray_workers"] == "2"
        assert numbers["bray_sessions"] == "20"
        assert numbers['bray_requests_total{kind="tick",status="200"}'] == "180"
        assert int(numbers["bray_requests_forwarded_total"]) > 0
        for i, name in enumerate(owners):
            assert wires[i % 16].step("end", name) == (200, b"bye")
            assert wires[(i + 1) % 16].step("tick", name)[0] == 404
        again = start_all(wires, 20)
        assert len(again) == 20
        for i, (name, owner) in enumerate(again.items()):  # also where a session's owner was another one before
            assert wires[(i + 3) % 16].step("tick", name) == (200, b"%d 1" % owner)


def test_stateless_requests_find_a_free_slot():
    with service(actors_per_worker=1) as s:
        wires = connections(s.port, 8)
        assert wires[0].step("start", "a")[0] == 200
        assert [w.step("auto", None)[0] for w in wires] == [200] * 8
        assert wires[0].step("start", "b")[0] == 200
        assert [w.step("auto", None)[0] for w in wires] == [429] * 8


def test_a_killed_worker_takes_only_its_own_sessions_with_it():
    with service() as s:
        wires = connections(s.port)
        owners = start_all(wires, 20)
        dead = owners["s0"]
        waiting = next(n for n, o in owners.items() if o == dead and n != "s0")
        for wire in wires:  # some of these are at the other worker, which has to answer for the dead one
            wire.send(http_request("tick", waiting, b"slow"))
        time.sleep(0.2)
        os.kill(dead, signal.SIGKILL)
        answers = []
        for wire in wires:
            with contextlib.suppress(EOFError, ConnectionResetError):
                answers.append(wire.response()[0])
        assert 404 in answers
        assert set(answers) <= {200, 404}
        for name, owner in owners.items():
            assert ask_again(s.port, "tick", name)[0] == (404 if owner == dead else 200)
        deadline = time.monotonic() + 20
        lost = [name for name, owner in owners.items() if owner == dead]
        while lost and time.monotonic() < deadline:  # until the new worker is there its slots are not
            status, reply = ask_again(s.port, "start", lost[0])
            assert status in (200, 429, 503), reply
            if status == 200:
                assert int(reply) != dead
                lost.pop(0)
            else:
                time.sleep(0.05)
        assert not lost
        assert metrics(s.admin)["bray_sessions"] == "20"


def test_sigterm_drains_and_a_second_ends_at_once():
    with service(drain_timeout_s=5) as s:
        wires = connections(s.port, 4)
        owners = start_all(wires, 4)
        wires[0].send(http_request("tick", "s0", b"slow"))
        time.sleep(0.1)
        s.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert wires[1].step("start", "new")[0] == 503
        assert wires[0].response()[2] == b"%d 1" % owners["s0"]
        for i, name in enumerate(owners):
            assert wires[i % 4].step("end", name)[0] == 200
        assert s.wait(20) == 0
    with service(drain_timeout_s=30) as s:
        with Wire(s.port) as wire:
            wire.step("start", "never ends")
            s.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            s.send_signal(signal.SIGTERM)
            assert s.wait(4) == 0


def test_workers_end_with_their_parent():
    with service() as s:
        with Wire(s.port) as wire:
            pid = int(wire.step("start", "g")[1])
            wire.step("end", "g")
        s.kill()
        s.wait()
        for _ in range(100):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return
            time.sleep(0.1)
        pytest.fail("the worker lives on")


def test_workers_that_cannot_start(monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    with service() as s:
        assert s.wait(30) == 1
        assert "cannot be prepared" in s.stderr.read()


def test_without_a_gateway_a_session_belongs_to_its_connection():
    with service(use_gateway=None) as s:
        wires = connections(s.port)
        owners = {}
        for i, wire in enumerate(wires):
            status, reply = wire.step("start", f"s{i}")
            if status == 200:
                owners[i] = int(reply)
        assert len(set(owners.values())) == 2
        for i, owner in owners.items():
            assert wires[i].step("tick", f"s{i}") == (200, b"%d 1" % owner)
        others = [i for i, owner in owners.items() if owner != owners[0]]
        assert wires[0].step("tick", f"s{others[0]}")[0] == 404


# --- the table --------------------------------------------------------------------------------------------------------


TABLE = """
import sys
from pathlib import Path
from bray.serving.table import Table
table = Table(Path(sys.argv[1]), workers=3, slots=50)
assert table.take(int(sys.argv[2]))
table.open(True)
for line in sys.stdin:
    word, *names = line.split()
    table.beat()
    print(eval(word)(*[n.encode() for n in names]) if names else eval(word), flush=True)
"""


@contextlib.contextmanager
def table_of(path, row):
    """A worker's table in a process of its own: `ask("table.claim", "name")` gives what it returns there."""
    process = subprocess.Popen(
        [sys.executable, "-c", TABLE, str(path), str(row)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def ask(*words):
        process.stdin.write(" ".join(words) + "\n")
        process.stdin.flush()
        return eval(process.stdout.readline())

    try:
        assert ask("1") == 1
        yield process, ask
    finally:
        process.kill()
        process.communicate()


def test_the_table_against_a_dict(tmp_path):
    """A thousand random operations of three workers, compared with a dict after each."""
    import random

    rng = random.Random(0)
    table = Table(tmp_path / "t", workers=3, slots=50, create=True)
    owners: dict[str, int] = {}
    names = [f"session{i}" for i in range(100)]
    with table_of(tmp_path / "t", 0) as a, table_of(tmp_path / "t", 1) as b, table_of(tmp_path / "t", 2) as c:
        workers = [ask for _, ask in (a, b, c)]
        for _ in range(1000):
            name, me = rng.choice(names), rng.randrange(3)
            if owners.get(name) == me:
                workers[me]("table.release", name)
                del owners[name]
            else:
                assert workers[me]("table.claim", name) == (name not in owners)
                owners.setdefault(name, me)
            assert table.find(name.encode()) == owners.get(name)
            assert workers[me]("table.find", name) == (None if owners.get(name) == me else owners.get(name))
        assert table.running() == len(owners)
        assert all(table.find(name.encode()) == owners.get(name) for name in names)
        # one that is killed owns nothing any more, and nobody had to tidy up
        a[0].kill()
        a[0].wait()
        assert {table.find(n.encode()) for n in names if owners.get(n) == 0} == {None}
        assert all(table.find(n.encode()) == owner for n, owner in owners.items() if owner)
        assert table.clear(0) == list(owners.values()).count(0)


def test_the_roomiest_worker_that_is_awake_gets_a_session(tmp_path):
    table = Table(tmp_path / "t", workers=3, slots=50, create=True)
    assert table.take(2)
    assert table.choose() is None
    with table_of(tmp_path / "t", 0) as (zero, ask_zero), table_of(tmp_path / "t", 1) as (_, ask_one):
        assert table.choose() in (0, 1)
        for i in range(13):
            assert ask_zero("table.claim", f"s{i}")
        assert table.choose() == 1
        table.open(True)
        assert table.choose() == 2  # its own, although another has as much room
        for i in range(13):
            assert table.claim(b"t%d" % i)
        assert table.choose() == 1  # a quarter more
        assert table.choose({1: 20}) == 2
        assert table.choose(but=(1,)) == 2
        assert table.choose(but=(1, 2)) == 0
        assert table.total() == 150
        table.lend(37)
        assert table.choose(but=(1,)) == 0
        # one that stands still is asked when no other has room
        zero.send_signal(signal.SIGSTOP)
        time.sleep(table_module.SILENT_S + 0.1)
        ask_one("1")
        assert table.choose(but=(2,)) == 1
        assert table.choose(but=(1, 2)) == 0
        assert table.awake() == [1]
        zero.kill()
        zero.wait()
        assert table.choose(but=(1, 2)) is None
        assert table.total() == 100


def test_a_worker_stopped_at_any_moment_holds_up_nobody_at_the_table(tmp_path):
    """Another process claims and releases as fast as it can, and is stopped again and again; what this one does never
    waits for it."""
    loop = "[(table.claim(b'x%d'%i),table.release(b'x%d'%i))for(i)in(range(10**9))]"
    table = Table(tmp_path / "t", workers=3, slots=50, create=True)
    with table_of(tmp_path / "t", 0) as (other, _):
        assert table.take(1)
        table.open(True)
        other.stdin.write(loop + "\n")
        other.stdin.flush()
        for i in range(100):
            other.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, other.pid, os.WSTOPPED)
            name = b"mine %d" % i
            assert table.claim(name)
            assert table.choose() in (0, 1)
            assert table.find(b"x1") in (0, None)
            table.release(name)
            other.send_signal(signal.SIGCONT)
        assert table.running() in (0, 1)


def test_two_services_do_not_share_a_port():
    """Workers of one service share it; another service is refused, whatever its number of workers."""
    with service() as first:
        for workers in (1, 2):
            with service(workers=workers, port=first.port) as second:
                assert second.wait(20) in (1, 2)
                assert f"cannot listen on 127.0.0.1:{first.port}" in second.stderr.read()
        assert Wire(first.port).step("start", "g")[0] == 200


def test_a_mistake_in_the_workers_ends_the_service_at_once(monkeypatch):
    monkeypatch.setenv("FAILS", "mistake")
    with service() as s:
        assert s.wait(20) == 2
        assert "told wrongly" in s.stderr.read()


def test_one_worker_that_cannot_come_back_does_not_end_the_others(monkeypatch, tmp_path):
    flag = tmp_path / "flag"
    monkeypatch.setenv("FAILS_WHEN", str(flag))
    with service() as s:
        owners = {}
        while len(set(owners.values())) < 2:
            name = f"s{len(owners)}"
            owners[name] = int(ask_again(s.port, "start", name)[1])
        flag.write_text("")
        dead, *_ = owners.values()
        os.kill(dead, signal.SIGKILL)
        time.sleep(4.0)  # five deaths in a row take a second and a half
        alive = next(name for name, owner in owners.items() if owner != dead)
        assert ask_again(s.port, "tick", alive)[0] == 200
        assert s.poll() is None
        flag.unlink()
        deadline = time.monotonic() + 20
        while metrics(s.admin)["bray_workers"] != "2" and time.monotonic() < deadline:
            time.sleep(0.1)
        assert metrics(s.admin)["bray_workers"] == "2"
