"""Workers that others start, which exchange files with a training in a shared directory."""

import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import yaml

import bray
from bray.errors import ConfigError
from bray.train.exchange_folder import Folder, names_in
from bray.train.exchange_worker import ExchangeWorker
from tests.forked import Popen

LIMIT_S = 120.0


def experiment(folder, path=None, run="DQN", env="CartPole-v1", **config):
    config = {
        "vector": "inprocess",
        "num_envs": 2,
        "num_workers": 3,
        **({} if run == "PPO" else {"learning_starts": 64}),
        "fcnet_hiddens": [16],
        "device": "cpu",
        "threads": 1,
        "exchange": str(folder),
        **config,
    }
    return bray.Experiment(run=run, env=env, use_preset=False, path=path, config=config)


def start_worker(folder):
    return Popen([sys.executable, "-m", "bray", "work", str(folder), "--wait-s", "60"], text=True)


@pytest.fixture
def workers():
    started = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def rows_until(exp, holds):
    end, rows = time.monotonic() + LIMIT_S, []
    while not rows or not holds(rows[-1]):
        assert time.monotonic() < end, rows[-1] if rows else "no row"
        rows.append(exp.training.iterate())
    return rows


def test_workers_join_and_leave_while_it_runs(tmp_path, workers):
    """One is there before the training, one comes later, one is killed, one leaves: it learns on, and says who is
    there."""
    folder = tmp_path / "shared"
    workers.append(start_worker(folder))  # nothing is there yet: it waits
    exp = experiment(folder, run="DQN", iteration_steps=200, worker_timeout_s=300.0)
    first = rows_until(exp, lambda row: row["learner_steps_total"] > 0)
    assert first[-1]["workers/here"] == first[-1]["workers/joined"] == 1
    workers.append(start_worker(folder))
    both = rows_until(exp, lambda row: row["workers/here"] == 2)
    workers[0].send_signal(signal.SIGTERM)
    assert workers[0].wait(LIMIT_S) == 143
    left = rows_until(exp, lambda row: row["workers/left"] == 1 and row["workers/here"] == 1)
    workers.append(start_worker(folder))  # takes the seat that is free
    again = rows_until(exp, lambda row: row["workers/here"] == 2)
    rows = [*first, *both, *left, *again]
    assert all(b["env_steps_total"] > a["env_steps_total"] for a, b in itertools.pairwise(rows))
    assert again[-1]["workers/refused"] == 0
    assert again[-1]["workers/joined"] == 3
    assert again[-1]["workers/policy_lag_max"] > 0
    assert again[-1]["episodes_total"] > 0
    exp.close()
    assert [worker.wait(LIMIT_S) for worker in workers[1:]] == [0, 0]  # the training has said that it is over


@pytest.mark.slow
def test_a_training_that_is_killed_and_resumed_gets_its_workers_back(tmp_path, workers):
    folder, path = tmp_path / "shared", tmp_path / "run"
    workers.append(start_worker(folder))
    flags = ["--run", "APPO", "--env", "CartPole-v1", "--no-preset", "--num-workers", "2", "--exchange", str(folder)]
    keys = ["num_envs=2", "vector=inprocess", "rollout_length=16", "batch_envs=2", "device=cpu", "threads=1"]
    words = ["train", *flags, *keys, "checkpoint_every_s=0", "checkpoint_freq=1", "--quiet"]
    learner = Popen([sys.executable, "-m", "bray", *words, "--project", str(tmp_path), "--trial", "run"])
    workers.append(learner)
    end = time.monotonic() + LIMIT_S
    while not (path / "checkpoints" / "latest").exists():
        assert time.monotonic() < end
        assert learner.poll() is None
        time.sleep(0.05)
    learner.kill()
    learner.wait()
    exp = bray.Experiment.resume(path)
    before = exp.training.totals.env_steps
    rows = rows_until(exp, lambda row: row["env_steps_total"] > before + 2000)
    assert rows[-1]["workers/joined"] == 1  # the same process, which has come again
    exp.close()
    assert workers[0].wait(LIMIT_S) == 0


ROLES = """
run: APPO
env: CartPole-v1
stop: {{episodes_total: 60}}
config:
  exchange: {folder}
  num_workers: 3
  exchange_workers: {own}
  num_envs: 2
  vector: inprocess
  rollout_length: 16
  batch_envs: 2
  device: cpu
  threads: 1
  checkpoint_freq: 1
"""


def test_the_roles_are_single_commands_in_any_order(tmp_path, workers):
    """nerveX's evaluator, actors, coordinator with learner, in this order; one actor is ended and the rest goes on."""
    run, folder = tmp_path / "p" / "t", tmp_path / "shared"
    (tmp_path / "roles.yaml").write_text(ROLES.format(folder=folder, own=0))
    words = ["train", "-f", str(tmp_path / "roles.yaml"), "--no-preset", "--project", str(tmp_path / "p"), "--quiet"]
    commands = [["eval", str(run), "--follow", "20", "--episodes", "2"], *[["work", str(folder)]] * 2]
    for command in [*commands, [*words, "--trial", "t"]]:
        workers.append(Popen([sys.executable, "-m", "bray", *command], stdout=subprocess.PIPE, text=True))
    evaluator, leaves, stays, learner = workers
    end = time.monotonic() + LIMIT_S
    while len(names_in(folder / "seats")) < 2:
        assert time.monotonic() < end
        assert learner.poll() is None
        time.sleep(0.01)
    leaves.send_signal(signal.SIGINT)
    assert leaves.wait(LIMIT_S) == 130
    assert learner.wait(LIMIT_S) == stays.wait(LIMIT_S) == 0
    assert "pieces were played" in stays.communicate()[0]
    said = evaluator.communicate(timeout=LIMIT_S)[0]
    assert evaluator.returncode == 0
    assert "over 2 episodes" in said


@pytest.mark.slow
def test_the_roles_are_one_file(tmp_path):
    """A worker of the run's own that is killed is replaced, and none is left behind."""
    told = yaml.safe_load(ROLES.format(folder=tmp_path / "shared", own=2))
    exp = bray.Experiment(told["run"], told["env"], use_preset=False, config=told["config"])
    rows_until(exp, lambda row: row["workers/here"] == 2)
    first = exp.training.sources[0].process_ids
    os.kill(first[0], signal.SIGKILL)
    row = rows_until(exp, lambda row: row["workers/restarts"] == 1 and row["workers/joined"] == 3)[-1]
    assert row["episodes_total"] > 0
    left = exp.training.sources[0].process_ids
    exp.close()
    assert not [p for p in {*first, *left} if os.path.exists(f"/proc/{p}")]


def in_thread(folder, **told):
    """A worker in this process."""
    worker = ExchangeWorker(folder, **told)
    errors = []

    def run():
        try:
            worker.run()
        except Exception as e:
            errors.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return worker, thread, errors


def test_what_is_torn_damaged_or_foreign_is_left_out(tmp_path):
    """Half a file, a pickle, another's columns: each is said and counted, and learning goes on."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was-run"),)

    folder = Folder(tmp_path / "shared")
    exp = experiment(folder.path, iteration_steps=64)
    source = exp.training.sources[0]
    name = "0123456789abcdef"
    (folder.workers / name).write_text(folder.told().training)
    end = time.monotonic() + LIMIT_S
    while not (folder.seats / name).exists():
        source.gather()
        assert time.monotonic() < end
    said = {"env_steps": 0, "episodes": [], "metrics": [], "returns": (0.0, 0.0, 0.0), "seconds": {}}
    whole = folder.data / "whole"
    folder.put(whole, said, {"reward": np.zeros(3, np.float32)})
    bad = [b"", whole.read_bytes()[:40], pickle.dumps(Evil()), whole.read_bytes()]
    for about, arrays in ((said | {"env_steps": "many"}, {}), (said, {"stream": np.zeros(2)}), (said, {})):
        folder.put(whole, about, arrays)
        bad.append(whole.read_bytes())
    whole.unlink()
    for number, data in enumerate(bad):
        piece = folder.data / f"{name}-{number}"
        piece.write_bytes(data)
        source.gather()
        assert not piece.exists()
    stranger = folder.data / "ffffffffffffffff-0"
    stranger.write_bytes(bad[-1])
    (folder.workers / name).unlink()
    _, thread, errors = in_thread(folder.path)
    row = rows_until(exp, lambda row: row["learner_steps_total"] > 0)[-1]
    assert row["workers/refused"] == len(bad)
    assert not (tmp_path / "was-run").exists()
    assert not stranger.exists()
    exp.close()
    thread.join(LIMIT_S)
    assert not errors


def test_a_reader_never_sees_half_a_file(tmp_path):
    """One writes policies as fast as it can, another one reads: each is whole, and they do not go back."""
    folder, stop, seen = Folder(tmp_path), threading.Event(), []
    folder.policy.mkdir()

    def write():
        number = 0
        while not stop.is_set():
            number += 1
            folder.put(folder.policy / f"{number:012d}", number, {"w": np.full(200_000, number, np.float32)})
            (folder.policy / f"{number - 2:012d}").unlink(missing_ok=True)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        while len(seen) < 100:
            newest = folder.newest_policy()
            if newest is None:
                continue
            try:
                number, arrays = folder.take(newest, int)
            except FileNotFoundError:  # there is a newer one
                continue
            assert (arrays["w"] == number).all()
            seen.append(number)
    finally:
        stop.set()
        thread.join()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


def test_a_worker_that_says_nothing_loses_its_seat(tmp_path):
    folder = Folder(tmp_path / "shared")
    exp = experiment(folder.path, num_workers=1, worker_timeout_s=0.01)
    source = exp.training.sources[0]
    (folder.workers / "0123456789abcdef").write_text(folder.told().training)
    (folder.workers / "0123456789abcdee").write_text("of another training")
    end = time.monotonic() + LIMIT_S
    while not source.joined:
        source.gather()
        assert time.monotonic() < end
    assert source.numbers()["workers/here"] == 1
    assert "bray work" not in source.wait_reason()
    (folder.workers / "0123456789abcdef").unlink()
    while not source.left:
        source.gather()
        assert time.monotonic() < end
    assert source.numbers()["workers/here"] == 0
    assert f"bray work {folder.path}" in source.wait_reason()
    exp.close()
    assert folder.told().ended


def test_what_cannot_be_is_refused_in_one_line(tmp_path):
    folder = tmp_path / "shared"
    with pytest.raises(ConfigError, match="num_workers"):
        experiment(folder, num_workers=0)
    with pytest.raises(ConfigError, match="has rounds"):
        experiment(folder, run="PPO").training  # noqa: B018
    exp = experiment(folder)
    assert exp.training.sources[0].wait_reason()
    with pytest.raises(ConfigError, match="another training exchanges files there"):
        experiment(folder).training  # noqa: B018
    exp.close()
    with pytest.raises(ConfigError, match=r"0\.1 s without a training"):
        ExchangeWorker(folder, wait_s=0.1).run()  # that one has ended
    with pytest.raises(ConfigError, match=r"0\.1 s without a training"):
        ExchangeWorker(tmp_path / "nowhere", wait_s=0.1).run()
