"""The cluster seam: the same members in this process and in processes of Ray."""

import asyncio
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from bray.cluster import io, ray_start, session as sessions
from bray.errors import ConfigError, DataError, MissingComponent, RemoteError, ResourceError, Unreachable
from tests.ray_for_tests import opened


class Counter:
    """A worker: plain and async methods, a start that runs again after a crash."""

    def __init__(self, first=0):
        self.n = first
        self.started = False

    async def start(self):
        self.started = True

    def reset(self, n):
        self.n = n

    def add(self, k=1):
        self.n += k
        return self.n

    async def slow(self, seconds):
        await asyncio.sleep(seconds)
        return "done"

    def about(self):
        return {"pid": os.getpid(), "started": self.started, "n": self.n, "session": sessions.session().info.trial}

    def total(self, ref):
        return float(sessions.session().cluster.get(ref[0]).sum())

    def bad(self, kind):
        if kind == "bray":
            raise DataError("these bytes are no replay")
        if kind == "odd":

            class Odd(Exception):
                def __init__(self, a, b):
                    super().__init__(a)

            raise Odd("one", "two")
        return 1 / 0

    def ask(self, other):
        return other.call("add", 10).result()

    def end_programs(self):
        """How a program and a process that are asked to end do so."""
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        program.terminate()
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        process.start()
        process.terminate()
        process.join(30)
        return program.wait(30), process.exitcode

    async def end_programs_on_the_loop(self):
        return self.end_programs()

    def signal_itself(self):
        os.kill(os.getpid(), signal.SIGTERM)


class Closing:
    """Has something to do at its end."""

    def __init__(self, path):
        self.path = path

    async def close(self):
        await asyncio.sleep(0.3)
        self.path.touch()


class Broken:
    def __init__(self):
        raise ValueError("no weights here")


@pytest.fixture(scope="module", params=["local", "ray"])
def session(request, tmp_path_factory):
    with opened(tmp_path_factory.mktemp(request.param), request.param) as made:
        yield made


on_ray = pytest.mark.parametrize("session", ["ray"], indirect=True)


@pytest.fixture(scope="module")
def shared_counter(session):
    return session.cluster.start("counter/shared", Counter, 5)


@pytest.fixture
def counter(shared_counter):
    """A counter at 5."""
    shared_counter.call("reset", 5).result()
    return shared_counter


def test_calls(counter):
    assert counter.call("add").result() == 6
    assert counter.call("add", k=4).result() == 10
    assert counter.call("slow", 0.01).result() == "done"
    about = counter.call("about").result()
    assert about["started"]
    assert about["n"] == 10
    assert about["session"] == "trial"


def test_calls_are_awaited_in_any_loop(counter):
    async def main():
        return await asyncio.gather(counter.call("slow", 0.05), counter.call("add"))

    assert asyncio.run(main()) == ["done", 6]


def test_code_on_the_io_loop_may_wait_for_a_plain_method(counter):
    async def main():
        return counter.call("add").result(30)

    assert io.run(main(), timeout=60) == 6


def test_members_are_found_by_name(session, counter):
    assert session.cluster.find(counter.name).call("add").result() == 6
    assert counter.name in session.cluster.names("counter/")
    assert pickle.loads(pickle.dumps(counter)).call("add").result() == 7


def test_a_missing_member_is_answered_with_those_that_exist(session, counter):
    with pytest.raises(MissingComponent, match=r"there is no counter 'other'.*there are: 'shared'"):
        session.cluster.find("counter/other")
    with pytest.raises(MissingComponent, match=r"there is no model 'm'.*none yet"):
        session.cluster.find("model/m")


def test_a_name_is_taken_once(session, counter):
    with pytest.raises(ConfigError, match="is there already"):
        session.cluster.start(counter.name, Counter)


def test_errors_arrive_with_their_class_and_where_they_ran(session, counter):
    with pytest.raises(DataError, match="these bytes are no replay"):
        counter.call("bad", "bray").result()
    with pytest.raises(ZeroDivisionError) as caught:
        counter.call("bad", "plain").result()
    if session.cluster.kind == "ray":
        (note,) = caught.value.__notes__
        assert "return 1 / 0" in note
        assert counter.name in note
        with pytest.raises(RemoteError, match="Odd: one"):
            counter.call("bad", "odd").result()


def test_a_member_closes_before_it_ends(session, tmp_path):
    session.cluster.start("closing", Closing, tmp_path / "closed")  # nobody keeps what this returns
    session.cluster.stop("closing")
    assert (tmp_path / "closed").exists()


def test_a_worker_that_cannot_start_tells_why(session):
    with pytest.raises(ValueError, match="no weights here"):
        session.cluster.start("broken", Broken)
    assert "broken" not in session.cluster.names()


def test_a_call_that_takes_too_long(counter):
    with pytest.raises(Unreachable, match=r"did not answer slow in 0\.2 s"):
        counter.call("slow", 30, timeout=0.2).result()


def test_large_values_travel_by_reference(session, counter):
    ref = session.cluster.put(np.ones(1_000_000, np.float32))
    assert counter.call("total", [ref]).result() == 1_000_000


def test_members_call_each_other(session, counter):
    other = session.cluster.start("counter/second", Counter)
    try:
        assert other.call("ask", counter).result() == 15
    finally:
        session.cluster.stop("counter/second")


@on_ray
def test_an_address_of_another_ray_is_refused(session):
    import ray

    here = ray.get_runtime_context().gcs_address
    assert ray_start.start_ray("n", {"address": here}) == (False, False)
    with pytest.raises(
        ConfigError, match=r"address=192\.0\.2\.7:6379: this process is connected to the Ray at .* already"
    ):
        ray_start.start_ray("n", {"address": "192.0.2.7:6379"})


@on_ray
def test_infeasible_requests_fail_at_once(session):
    start = time.monotonic()
    with pytest.raises(ResourceError, match=r"counter/big asks for 500 CPUs.*there are node .*: 16 CPUs"):
        session.cluster.start("counter/big", Counter, cpus=500)
    with pytest.raises(ResourceError, match="2 GPUs"):
        session.cluster.start("counter/gpu", Counter, gpus=2)
    with pytest.raises(ResourceError, match="which is not there"):
        session.cluster.start("counter/far", Counter, node="f" * 56)
    assert time.monotonic() - start < 5


@pytest.mark.slow
@on_ray
def test_a_request_that_others_leave_no_room_for_fails(session, monkeypatch):
    session.cluster.start("counter/large", Counter, cpus=15)
    monkeypatch.setattr("bray.cluster.ray.BUSY_TIMEOUT", 1.0)
    try:
        with pytest.raises(ResourceError, match=r"counter/more asks for 4 CPUs, and others hold.*free are 1 CPUs"):
            session.cluster.start("counter/more", Counter, cpus=4)
    finally:
        session.cluster.stop("counter/large")


@on_ray
def test_a_killed_member_comes_back_with_its_arguments(session):
    member = session.cluster.start("counter/killed", Counter, 5)
    member.call("add").result()
    pid = member.call("about").result()["pid"]
    os.kill(pid, signal.SIGKILL)
    about = member.call("about", retry=True, timeout=30).result()
    while about["pid"] == pid:  # answered just before the signal came
        about = member.call("about", retry=True, timeout=30).result()
    assert about["n"] == 5
    assert about["started"]
    session.cluster.stop("counter/killed")
    with pytest.raises(Unreachable):
        member.call("add", timeout=5).result()


@on_ray
def test_sigterm_spares_a_worker_of_our_ray_and_ends_the_programs_it_starts(session, counter):
    """Whoever signals every process (systemd) wants the run to end in order; a worker's own programs end when it asks
    them to."""
    for method in ("end_programs", "end_programs_on_the_loop"):
        assert counter.call(method).result() == (-signal.SIGTERM, -signal.SIGTERM)
    before = counter.call("about").result()["pid"]
    counter.call("signal_itself").result()
    assert counter.call("about").result()["pid"] == before


def test_nodes(session):
    (node,) = session.cluster.nodes()
    assert node.head
    assert node.cpus >= 1


# --- a Ray that is noted or named, and gone


@pytest.fixture
def closed_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets it, and it refuses
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def no_ray(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("ray.init waits for minutes at such an address"))
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)


def test_a_ray_address_where_nothing_answers_is_said_at_once(no_ray, closed_port, monkeypatch):
    with pytest.raises(ConfigError, match=f"address={closed_port}: nothing answers"):
        ray_start.start_ray("tests", {"address": closed_port})
    monkeypatch.setenv("RAY_ADDRESS", closed_port)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS={closed_port}: nothing answers.*unset RAY_ADDRESS"):
        ray_start.start_ray("tests", {})
    with pytest.raises(ConfigError, match="nothing answers"):
        ray_start.running_nodes()


def test_the_note_of_a_ray_that_ended_is_passed_over_with_a_warning(no_ray, closed_port, monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(closed_port)
    assert ray_start.running_nodes() == []
    assert "does not answer: a new one is started here" in caplog.text


def test_a_ray_that_a_busy_machine_starts_too_slowly_is_started_again(no_ray, monkeypatch, caplog):
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    starts, processes = [], []

    def init(**kwargs):
        starts.append(kwargs["address"])
        if len(starts) < fails:
            services = importlib.import_module("ray._private.services")
            processes.append(services.ConsolePopen(["sleep", "600"], preexec_fn=lambda: None))
            raise RuntimeError(why)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # as where it failed: it knows of no process
    why, fails = "The current node timed out during startup. This could happen because ...", 3
    assert ray_start.start_ray("tests", {}) == (True, True)
    assert starts == ["local"] * 3
    assert len(processes) == 2
    assert all(process.poll() is not None for process in processes)  # what had been started of it has ended
    assert "is this machine busy?" in caplog.text
    starts, fails = [], 4
    with pytest.raises(RuntimeError, match="timed out"):
        ray_start.start_ray("tests", {})
    assert len(starts) == 3
    starts, why = [], "no room in /dev/shm"
    with pytest.raises(RuntimeError, match="no room"):
        ray_start.start_ray("tests", {})
    assert len(starts) == 1
    assert all(process.poll() is not None for process in processes)
