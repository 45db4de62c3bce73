"""Sessions: opened once, ended by a signal or an error, continued the next time."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

import bray
from bray.cluster import io, session as sessions
from bray.cluster.protocol import missing
from bray.errors import ConfigError, DataError, UnknownName
from bray.rundir import RunDir
from tests.ray_for_tests import local_session, opened  # noqa: F401


class Bad:
    def bad(self):
        raise DataError("these bytes are no replay")


def test_a_session_is_opened_once(local_session, tmp_path):  # noqa: F811
    assert bray.init(local_session.info.project, "trial", cluster="local") is local_session
    with pytest.raises(ConfigError, match=r"bray\.shutdown"):
        bray.init(str(tmp_path / "other"), "trial", cluster="local")


def test_bad_arguments(tmp_path):
    with pytest.raises(UnknownName, match="Did you mean 'ray'"):
        bray.init(str(tmp_path), "t", cluster="rai")
    with pytest.raises(ConfigError, match="num_cpus"):
        bray.init(str(tmp_path), "t", cluster="local", num_cpus=3)
    with pytest.raises(ConfigError, match=r"bray\.init"):
        sessions.session()


def test_a_trial_that_is_there_goes_on(tmp_path):
    with opened(tmp_path, "local") as first:
        (first.path / "mark").write_text("here")
    with opened(tmp_path, "local") as second:
        assert (second.path / "mark").read_text() == "here"


def test_run_until_asked_to_stop_raises_what_a_component_raised(tmp_path):
    with opened(tmp_path, "local") as session:
        member = session.cluster.start("bad", Bad)
        session.watch("trainer t", member.call("bad"))
        with pytest.raises(DataError) as caught:
            sessions.run_until_asked_to_stop()
        assert any("trainer t has failed" in note for note in caught.value.__notes__)
    with pytest.raises(ConfigError):
        sessions.session()


def test_ctrl_c_while_a_session_ends_by_itself_interrupts_nothing(tmp_path):
    with opened(tmp_path, "local") as session:
        ended = []
        session.stop_hooks.append(lambda: ended.append("stopped"))
        session.stop_hooks.append(lambda: os.kill(os.getpid(), signal.SIGINT))  # called first
        sessions.run_until_asked_to_stop(lambda: True)
        assert ended == ["stopped"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_interrupts_the_end_of_a_session(tmp_path):
    with opened(tmp_path, "local") as session:
        left = [signal.SIGINT, signal.SIGINT]
        session.stop_hooks.append(lambda: [os.kill(os.getpid(), left.pop()) for _ in left[:]])
        with pytest.raises(KeyboardInterrupt):
            sessions.run_until_asked_to_stop(lambda: True)


def test_run_until_asked_to_stop_ends_at_a_signal(tmp_path):
    with opened(tmp_path, "local"):

        async def stop():
            await asyncio.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)

        io.spawn(stop())
        sessions.run_until_asked_to_stop()


SCRIPT = """
import asyncio, sys, threading, time
import numpy as np
import torch
import bray

bray.init(sys.argv[1], "t", cluster="local")
net = torch.nn.Linear(3, 2)
model = bray.RemoteModel("m", net, (np.zeros(3, np.float32),))
clone = model.clone()
asyncio.run(clone.forward(np.ones(3, np.float32)))
buffer = bray.RemoteBuffer("b", size=4, num_workers=2)
buffer.push({"x": np.ones(3)})
actor = bray.RemoteActor(port=0, num_workers=1)
actor.serve(Actor=bray.Actor)
bray.cluster.io.spawn(asyncio.sleep(1000))
model.publish_weights(net.state_dict())

def later():
    time.sleep(0.5)
    bray.merge("late", 1.0)
    print(bray.query("late", "sum"))

threading.Thread(target=later).start()
"""
"""Its components are still there when it ends, and so is a thread of its own that uses them."""


def test_a_script_that_ends_without_shutdown_ends_its_session_and_says_nothing(tmp_path):
    made = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, timeout=120)
    assert (made.returncode, made.stdout, made.stderr) == (0, "1.0\n", "")
    assert max(RunDir(tmp_path / "t").versions("m")) == 1


def test_a_component_that_comes_or_goes_is_not_said_to_be_missing():
    """Its name is in the list of those that are there."""
    for names in (["model/main/0", "model/other"], ["model/main", "model/other"]):
        error = missing("model/main", names)
        assert str(error).startswith("model 'main' is starting, or ending, and cannot be asked now")
        assert str(error).endswith("others are: 'other'.")
    assert "there is no model 'man' in this session; there are: 'main'." in str(missing("model/man", ["model/main"]))
