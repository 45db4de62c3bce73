"""`bray record`: a person's game becomes episodes."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from bray.cli.main import main
from bray.client import Client
from bray.data import EpisodeWriter, open_data
from bray.experiment.record import RecordActor
from bray.rundir import RunDir
from bray.serving.protocol import Refusal
from bray.spec import EnvSpec, parse_space
from tests import forked

SPEC = EnvSpec("files", parse_space("float32[2]"), parse_space("3"))


@pytest.fixture
def table(tmp_path):
    """An Actor, and a function that reads what it has written."""
    RunDir(tmp_path).write_spec(SPEC)
    actor = RecordActor(SPEC, EpisodeWriter(tmp_path / "episodes", 1))
    return actor, lambda: list(open_data(tmp_path))


def tick(actor, number, action=None, **more):
    sent = {"obs": [number, 0.5], **({} if action is None else {"action": action}), **more}
    return json.loads(actor.tick(json.dumps(sent).encode()))


def test_ticks_become_episodes(table):
    actor, written = table
    actor.start("g", b"")
    assert tick(actor, 0, 2) == {"action": 2}
    tick(actor, 1, 0, reward=1.0)
    assert tick(actor, 2, reward=5, terminated=True) == {}
    tick(actor, 3, 1, reward=99.0)  # of an episode that is over: the first tick of the next one
    tick(actor, 4, reward=-1.0, truncated=True)
    actor.end(b"")
    first, second = written()
    np.testing.assert_array_equal(first["obs"], [[0, 0.5], [1, 0.5], [2, 0.5]])
    assert first["action"].tolist() == [2, 0]
    assert first["reward"].tolist() == [1.0, 5.0]
    assert first["terminated"].tolist() == [False, True]
    assert (second["reward"].tolist(), second["truncated"].tolist()) == ([-1.0], [True])


@pytest.mark.parametrize("how", ["end", "lost"])
def test_a_game_that_stops_is_cut_before_its_last_action(how, table):
    actor, written = table
    actor.start("g", b"")
    for i in range(4):
        tick(actor, i, i % 3, reward=float(i))
    actor.end(b"") if how == "end" else actor.lost()
    (episode,) = written()
    assert episode["action"].tolist() == [0, 1, 2]
    assert episode["reward"].tolist() == [1.0, 2.0, 3.0]
    assert episode["obs"][:, 0].tolist() == [0, 1, 2, 3]
    assert episode["truncated"].tolist() == [False, False, True]
    actor.start("h", b"")  # the object is used again
    tick(actor, 9, 1)
    actor.end(b"")
    assert len(written()) == 1


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"obs": [1.0, 2.0]}, "expected the action that the player chose"),
        ({"obs": [1.0], "action": 1}, "obs: expected"),
        ({"obs": [1.0, 2.0], "action": 3}, "action"),
        ({"obs": [1.0, 2.0], "action": 1, "reward": 1e999}, "reward"),
        ({"obs": [1.0, 2.0], "action": 1, "rewards": 1}, "unknown field `rewards`"),
        ({"action": 1}, "missing required field `obs`"),
        ({"obs": [1.0, 2.0], "action": 1, "terminated": True}, "got an action on the tick that ends the episode"),
    ],
)
def test_ticks_that_do_not_fit_are_refused_and_leave_the_episode_as_it_is(sent, message, table):
    actor, written = table
    actor.start("g", b"")
    tick(actor, 0, 2)
    with pytest.raises(Refusal, match=message):
        actor.tick(json.dumps(sent).encode())
    tick(actor, 1, reward=2.0, terminated=True)
    assert written()[0]["reward"].tolist() == [2.0]


def test_an_end_before_the_first_action_is_refused(table):
    actor, _ = table
    actor.start("g", b"")
    with pytest.raises(Refusal, match="the end of an episode before its first action"):
        tick(actor, 0, truncated=True)


def test_a_game_plays_against_the_command(tmp_path, capsys):
    words = ["record", "--port", "0", "--obs", "float32[2]", "--actions", "3", "--out", str(tmp_path / "out")]
    process = forked.Popen([sys.executable, "-m", "bray", *words], stdout=subprocess.PIPE, text=True)
    try:
        said = process.stdout.readline()
        port = int(said.partition("127.0.0.1:")[2].partition(",")[0])
        with Client("127.0.0.1", port) as client:
            client.start()
            for i in range(3):
                assert client.tick({"obs": [i, 0], "action": i, "reward": 1}) == {"action": i}
            client.tick({"obs": [3, 0], "reward": 1, "terminated": True})
            for _ in range(100):  # it is on disk before the service ends
                if list((tmp_path / "out").glob("*.episodes")):
                    break
                time.sleep(0.1)
            assert open_data(tmp_path / "out")[0]["action"].tolist() == [0, 1, 2]
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert "1 episode recorded. Learn from it: bray train --run BC --data" in rest
    other = ["record", "--obs", "float32[2]", "--actions", "4", "--out", str(tmp_path / "out")]
    assert main(other) == 2
    assert "holds episodes of other spaces already" in capsys.readouterr().err
    assert open_data(tmp_path / "out")[0]["action"].tolist() == [0, 1, 2]
    (tmp_path / "file").write_text("")
    assert main([*other[:-1], str(tmp_path / "file")]) == 2
    assert "expected a directory that can be written to" in capsys.readouterr().err
