"""Workers that stand still: stopped by a signal, or busy in an Actor's code. The others answer, and the parent replaces
them."""

import contextlib
import json
import os
import random
import signal
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from tests.serving.test_serving_workers import ask_again, metrics, service
from tests.serving_for_tests import Wire, http_request


def healthy(admin):
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/healthz", timeout=5) as reply:
        return reply.status == 200


@contextlib.contextmanager
def games(port, n=16):
    """(connection, its session, the process that has both) of each: with enough room a session begins where its
    connection is. The kernel deals out connections by chance: more are opened until both processes have four."""
    with contextlib.ExitStack() as stack:
        rows, count = [], Counter()
        while len(rows) < n or len(count) < 2 or min(count.values()) < 4:
            wire, name = stack.enter_context(Wire(port, timeout=20)), f"g{len(rows)}"
            rows.append((wire, name, int(wire.step("start", name)[1])))
            count[rows[-1][2]] += 1
            assert len(rows) < 90
        yield rows


def until(condition, seconds=30.0):
    """Wait for something that must come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def split(rows):
    """The process of the first game; its games; those of the other process."""
    pid = rows[0][2]
    return pid, [r for r in rows if r[2] == pid], [r for r in rows if r[2] != pid]


def test_a_stopped_worker_is_replaced_and_its_sessions_are_gone():
    with service(actors_per_worker=100, stopped_after_s=0.5) as s, games(s.port) as rows:
        pid, lost, kept = split(rows)
        wire = kept[0][0]
        os.kill(pid, signal.SIGSTOP)
        started = []
        for k in range(20):  # the health check is answered by whoever is awake, and games go on
            assert healthy(s.admin)
            assert [w.step("tick", name)[0] for w, name, _ in kept] == [200] * len(kept)
            status, reply = wire.step("start", f"new {k}")
            assert status == 200 or json.loads(reply)["error"] == "overloaded"  # being replaced by now: come again
            started.append(status)
        assert 200 in started
        wire.send(http_request("tick", lost[0][1]))  # waits for the stopped one until that is killed
        assert wire.response()[0] == 404
        with pytest.raises((EOFError, ConnectionResetError)):
            lost[0][0].step("tick", lost[0][1])
        assert [wire.step("tick", name)[0] for _, name, _ in lost] == [404] * len(lost)
        assert [w.step("tick", name)[0] for w, name, _ in kept] == [200] * len(kept)
        deadline, pids = time.monotonic() + 20, set()
        while len(pids) < 2 and time.monotonic() < deadline:  # the new one answers
            status, reply = ask_again(s.port, "start", f"again {time.monotonic()}")
            pids |= {int(reply)} if status == 200 else set()
        assert len(pids) == 2
        assert pid not in pids
        s.send_signal(signal.SIGTERM)
        assert "has been stopped (SIGSTOP)" in s.communicate()[1]


def test_a_forwarded_tick_has_the_deadline_of_a_tick():
    with service(actors_per_worker=100, stopped_after_s=600, tick_timeout_s=1.0) as s, games(s.port) as rows:
        pid, lost, kept = split(rows)
        wire, other = kept[0][0], kept[1][0]
        os.kill(pid, signal.SIGSTOP)
        wire.send(http_request("tick", lost[0][1]))
        other.send(http_request("start", lost[1][1]))  # only its owner knows whether that session is about to end
        status, _, reply = wire.response()
        assert (status, json.loads(reply)["error"]) == (504, "tick_timeout")
        assert other.response()[0] == 504
        assert wire.step("tick", kept[0][1])[0] == 200
        os.kill(pid, signal.SIGCONT)
        assert wire.step("tick", lost[2][1]) == (200, b"%d 1" % pid)
        assert lost[3][0].step("tick", lost[3][1]) == (200, b"%d 1" % pid)


def test_requests_for_a_stopped_worker_do_not_pile_up():
    """64 MiB of large bodies, or `max_pending` requests, wait for one worker; more are refused at once."""
    config = {"actors_per_worker": 100, "stopped_after_s": 600, "tick_timeout_s": 600, "max_pending": 40}
    with service(**config) as s, games(s.port, 32) as rows:
        pid, lost, kept = split(rows)
        os.kill(pid, signal.SIGSTOP)
        wires = [wire for wire, *_ in kept]
        large = 12 << 20
        for wire in wires[:6]:
            wire.send(http_request("tick", lost[0][1], b"x" * large))
        until(lambda: metrics(s.admin)["bray_requests_forwarded_total"] == "6")
        status, reply = wires[6].step("tick", lost[0][1], b"x" * large)
        assert (status, json.loads(reply)["error"]) == (503, "overloaded")
        os.kill(pid, signal.SIGCONT)
        assert [wire.response()[0] for wire in wires[:6]] == [200] * 6
        os.kill(pid, signal.SIGSTOP)
        wires[0].send(http_request("tick", lost[0][1]) * 60)
        until(lambda: metrics(s.admin)['bray_requests_total{kind="tick",status="503"}'] == "21")
        assert wires[1].step("tick", kept[1][1])[0] == 200
        os.kill(pid, signal.SIGCONT)
        assert [wires[0].response()[0] for _ in range(60)] == [200] * 40 + [503] * 20


def test_a_worker_that_does_not_come_back_from_an_actor_is_replaced():
    with service(actors_per_worker=100, busy_after_s=1.5) as s, games(s.port) as rows:
        pid, lost, kept = split(rows)
        lost[0][0].send(http_request("tick", lost[0][1], b"forever"))
        assert kept[0][0].step("tick", lost[1][1])[0] == 404
        assert kept[0][0].step("tick", kept[0][1])[0] == 200
        assert healthy(s.admin)
        s.send_signal(signal.SIGTERM)
        log = s.communicate()[1]
        assert f"(pid {pid}) has not come back from an Actor's code" in log


def test_workers_that_were_stopped_together_with_their_parent_live_on():
    """As when a container is paused: nobody was silent while the parent could not look."""
    with service(actors_per_worker=100, stopped_after_s=0.5, busy_after_s=1.5) as s, games(s.port) as rows:
        pids = {pid for *_, pid in rows}
        for pid in (s.pid, *pids):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.7)
        for pid in (*pids, s.pid):
            os.kill(pid, signal.SIGCONT)
        assert [wire.step("tick", name)[0] for wire, name, _ in rows] == [200] * len(rows)


@pytest.mark.slow
def test_sixty_stops_at_random_moments():
    """While games begin and end all the time; each second stop lasts until the worker is replaced. Nobody else stands
    still."""
    rng = random.Random(0)
    hung = unhealthy = stops = replaced = began = watched = 0
    with service(actors_per_worker=500, stopped_after_s=0.5, tick_timeout_s=1.0) as s:
        while stops < 60:
            with contextlib.suppress(AssertionError, ValueError, EOFError, ConnectionError), games(s.port, 12) as rows:
                pid, _, kept = split(rows)
                for wire, *_ in rows:  # the workers are at the table when the signal comes
                    wire.send(b"".join(http_request(k, f"x{began} {i}") for i in range(40) for k in ("start", "end")))
                    began += 1
                time.sleep(rng.random() * 0.02)
                os.kill(pid, signal.SIGSTOP)
                stops += 1
                until = time.monotonic() + (2.0 if stops % 2 else 0.3)
                while time.monotonic() < until:
                    unhealthy += not healthy(s.admin)
                    wire, name, _ = kept[0]
                    try:
                        wire.sock.settimeout(5.0)
                        wire.send(http_request("tick", name))
                        while wire.response()[2].split()[:1] != [b"%d" % kept[0][2]]:
                            pass
                    except TimeoutError:
                        hung += 1
                    time.sleep(0.05)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                watched += 1  # to its end: nothing in here was cut short
                replaced += not Path(f"/proc/{pid}").exists()
            for i in range(12):
                ask_again(s.port, "end", f"g{i}")
        print(
            f"{stops} stops, {watched} watched, {replaced} replaced, {began * 40} sessions begun, {hung} hung, "
            f"{unhealthy} unhealthy"
        )
    assert (hung, unhealthy) == (0, 0)
    assert watched == stops
    assert replaced >= 25
