"""Worker processes are forked from one that has their modules loaded: nothing of that shows."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from bray.envs.process import Child, Lost, LostAtStart, unpack
from tests.envs.test_envs_vector import gone

ROOT = Path(__file__).parents[2]
LOADED = "bray.envs.process"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")


def tell(conn):
    """In a worker: say what it was given, then wait."""
    drawn = np.random.random(), random.random()
    news = os.environ.get("BRAY_TEST_NEWS"), os.environ.get("BRAY_TEST_OLD"), str(Path.cwd())
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    conn.send(("ok", (drawn, news, os.getppid(), blocked), []))
    conn.recv_bytes()


def told(child):
    return unpack(child.receive(60.0))[0]


def test_each_gets_the_environment_and_the_place_of_its_start_and_random_numbers_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("BRAY_TEST_OLD", "yes")
    first = Child(tell, (), "first", LOADED)
    monkeypatch.setenv("BRAY_TEST_NEWS", "now")
    monkeypatch.delenv("BRAY_TEST_OLD")
    monkeypatch.chdir(tmp_path)
    second = Child(tell, (), "second", LOADED)
    (drawn, news, parent, blocked), (other, later, same, _) = told(first), told(second)
    assert news[:2] == (None, "yes")
    assert later == ("now", None, str(tmp_path))
    assert parent == same != os.getpid()  # one process has loaded what both need
    assert not set(drawn) & set(other)
    assert not blocked
    for child in (first, second):
        pid = child.process.pid
        child.close()
        assert gone(pid)


def test_without_the_process_that_they_were_forked_from_they_end_and_the_next_has_a_new_one():
    child = Child(tell, (), "child", LOADED)
    *_, server, _ = told(child)
    os.kill(server, signal.SIGKILL)
    with pytest.raises(Lost, match="died"):
        child.receive(60.0)
    child.kill()
    child = Child(tell, (), "child", LOADED)
    assert told(child)[2] != server
    child.close()


def test_a_module_that_cannot_be_loaded_is_told(capfd):
    with pytest.raises(LostAtStart, match=r"no_such_module was not loaded, see above"):
        Child(tell, (), "child", "no_such_module")
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def hold(conn):
    """In a worker: never give Python's lock away again."""
    conn.send(("ok", os.getppid(), []))
    ctypes.PyDLL(None).sleep(600)


def test_with_a_killed_parent_ends_one_that_hangs_with_pythons_lock(tmp_path):
    code = """
        import os, threading
        from bray.envs.process import Child
        from tests.envs.test_fork_server import LOADED, hold, told
        def start():
            child = Child(hold, (), "child", LOADED)
            print(child.process.pid, told(child), flush=True)
            child.receive(None)
        if __name__ == "__main__":
            threading.Thread(target=start).start()  # in whichever thread
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    temporary = tmp_path / ("x" * 100)  # longer than the address of a socket may be
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
        assert parent.stdout.read() == ""  # ends when nobody has it any more
    assert all(gone(pid) for pid in pids)
