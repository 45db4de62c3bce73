"""Rollout workers on a real Ray: the same runs as with processes of this machine."""

import os
import shutil
import signal
import tempfile
import threading
from collections import Counter

import numpy as np
import pytest

import bray
from benchmarks.scale_ray import Inputs, enough, reach
from bray.cluster import ray_workers
from bray.cluster.machine import Machine
from bray.config import ConfigSource
from bray.envs.agent_games import Nim
from bray.errors import ConfigError, EnvError, ResourceError
from tests.envs_for_tests import Phased
from tests.ray_for_tests import start_shared_ray, stop_shared_ray
from tests.train.test_workers import experiment, rows_of

KEYS = ("env_steps_total", "episodes_total", "episode_length_mean", "loss/policy_loss", "loss/value_loss")


@pytest.fixture
def shared_ray():
    start_shared_ray()


def on_ray(path=None, **config):
    return experiment(path, cluster="ray", **config)


def test_the_run_of_one_process_and_a_worker_that_is_killed(shared_ray, caplog):
    alone = rows_of(experiment(num_workers=0, num_envs=4))
    exp = on_ray(max_worker_restarts=1)
    rows = [exp.training.iterate() for _ in range(3)]
    for key in KEYS:
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in alone], rel=1e-6, abs=1e-8)
    assert rows[-1]["workers/policy_lag"] == rows[-1]["workers/restarts"] == 0
    assert exp.training.describe() == "2 workers on ray with 2 envs each"
    with pytest.raises(EnvError, match="cannot pickle"):
        exp.foreach_worker(lambda worker: threading.Lock())
    assert exp.foreach_worker(lambda worker: worker.index) == [1, 2]
    source = exp.training.sources[0]
    victim = source.process_ids[1]
    os.kill(victim, signal.SIGKILL)
    row = exp.training.iterate()
    assert row["workers/restarts"] == 1
    assert f"rollout worker 2 (process {victim} on" in caplog.text
    assert row["env_steps_total"] > rows[-1]["env_steps_total"] + 100  # the round is whole
    os.kill(source.process_ids[0], signal.SIGKILL)
    with pytest.raises(EnvError, match=r"(?s)rollout worker 1 .*max_worker_restarts=1 are used up"):
        exp.training.iterate()
    exp.close()


@pytest.mark.slow
@pytest.mark.parametrize("league", [{}, {"self_play": {"snapshot_every": 60}}])
def test_games_of_several_agents_are_those_of_processes(shared_ray, tmp_path, league):
    small = {"rollout_length": 16, "epochs": 2, "minibatches": 2}
    made = {"policies": {"first": {"config": small}, "second": {"config": small}}, "num_envs": 2, "num_workers": 2}
    made |= league
    found = []
    for cluster in (None, "ray"):
        told = {**made, "cluster": cluster, "path": tmp_path / str(cluster), "iteration_steps": 100}
        with bray.Experiment("PPO", Nim, **told) as exp:
            exp.fit({"env_steps_total": 300}, progress=False)
            found.append(exp.training.weights())
            where = exp.training.describe()
    assert where == "2 workers on ray with 2 games of 2 agents each"
    for side in found[0]:
        assert all(np.array_equal(x, found[1][side][name]) for name, x in found[0][side].items())


class OnlyHere(Phased):
    def __init__(self, config):
        super().__init__()
        if config.worker_index:
            raise RuntimeError("no licence on this machine")


def test_an_environment_that_cannot_be_made_in_a_worker_is_told(shared_ray):
    with pytest.raises(EnvError, match=r"(?s)no licence on this machine"):
        _ = on_ray(env=OnlyHere, num_workers=1).training


def test_what_does_not_fit_is_refused_at_once(shared_ray):
    with pytest.raises(ResourceError, match=r"rollout asks for 40 x 1 CPUs, and there is room for 16: .*16 CPUs"):
        _ = on_ray(num_workers=40).training
    with pytest.raises(ResourceError, match=r"asks for 2 x 1 CPUs, 1\.5 GPUs, and there is room for 0"):
        _ = on_ray(num_gpus_per_worker=1.5).training


def test_more_workers_than_cores_of_this_machine_are_warned_of(shared_ray, monkeypatch, caplog):
    monkeypatch.setattr(Machine, "look", classmethod(lambda cls: cls(1, 2048.0, ())))
    settings = {"name": "rollout", "count": 3, "cpus": 1.0, "gpus": 0.0, "moves_before": "play", "ray_kwargs": {}}
    ray_workers.RayWorkers(**settings).close()
    assert "are asked for" not in caplog.text  # a Ray that is joined says itself how much it has
    monkeypatch.setattr(ray_workers, "start_ray", lambda *_: (False, True))  # as if we had started it
    ray_workers.RayWorkers(**settings).close()
    assert "rollout: 3 CPUs are asked for and 1 are here: the processes share them" in caplog.text


def test_a_cluster_without_workers_is_refused():
    with pytest.raises(ConfigError, match=r"run.cluster=ray .* num_workers=0 .*--num-workers 8"):
        on_ray(num_workers=0)
    with pytest.raises(ConfigError, match=r"run.address=10.0.0.1:6379 .* num_workers=0"):
        experiment(num_workers=0, address="10.0.0.1:6379")
    assert experiment(num_workers=0, address="10.0.0.1:6379", cluster="local").training.env is not None


def test_the_formulas_of_many_machines():
    """1,000 samples/s per core and 1,250 bytes each, over a link of 1.25e9 bytes/s: a million per second is what the
    link carries."""
    inputs = Inputs(1250, 1000, 2e6, 2.5e9, weight_bytes=5e6, broadcast_s=0.01)
    ten, hundred = (reach(inputs, nodes, cores=16, link=1.25e9) for nodes in (10, 100))
    assert ten == (160_000, 1e6, 2e6, 2e6, pytest.approx(0.05))
    assert (ten.bound, ten.samples_s) == ("rollout", 160_000)
    assert (hundred.bound, hundred.samples_s) == ("network", 1e6)
    assert enough(inputs, 16, 1.25e9) == 63  # 62.5 nodes of 16,000 samples/s


@pytest.mark.slow
def test_learners_on_ray_learn_what_processes_learn(shared_ray, caplog):
    """One of two learners is a process that Ray has placed; it is killed, and the run goes on."""
    found = []
    for cluster in (None, "ray"):
        told = {"num_learners": 2, "num_workers": 0, "cluster": cluster, "max_worker_restarts": 1, "device": "cpu"}
        exp = experiment(**told)
        rows = [exp.training.iterate() for _ in range(2)]
        assert exp.training.agree
        found.append((exp.training.weights(), rows[-1]["env_steps_total"], rows[-1]["episodes_total"]))
        if cluster:
            assert exp.training.describe().startswith("2 learners on ray, each with 2 envs")
            before = exp.training.learner.steps
            os.kill(exp.training.process_ids[0], signal.SIGKILL)
            exp.training.iterate()
            assert exp.training.learner.steps == before * 3 // 2
            assert exp.training.agree
            assert "begin this iteration again" in caplog.text
        exp.close()
    assert found[0][1:] == found[1][1:]
    for name, x in found[0][0].items():
        np.testing.assert_array_equal(found[1][0][name], x)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["DQN", "IMPALA"])
def test_workers_play_while_the_learner_learns(shared_ray, run):
    more = {"learning_starts": 200} if run == "DQN" else {}
    exp = on_ray(run=run, num_envs=1, **more)
    exp.training.iterate()
    os.kill(exp.training.sources[0].process_ids[0], signal.SIGKILL)
    row = exp.training.iterate()
    while row["workers/restarts"] == 0 or row["learner_steps_total"] == 0:
        row = exp.training.iterate()
    assert row["workers/restarts"] == 1
    assert all(np.isfinite(value) for key, value in row.items() if key.startswith("loss/"))
    exp.close()


@pytest.mark.slow
def test_a_run_on_ray_resumes_exactly_on_ray_and_without_it(shared_ray, tmp_path):
    whole = list(experiment(tmp_path / "whole").train({"training_iteration": 4}))
    exp = on_ray(tmp_path / "half")
    list(exp.train({"training_iteration": 2}))
    exp.close()
    for iteration, run in ((3, {}), (4, {"cluster": "local"})):
        exp = bray.Experiment.resume(tmp_path / "half", [ConfigSource("test", {"run": run})])
        (row,) = exp.train({"training_iteration": iteration})
        exp.close()
        assert exp.exact
        assert row["loss/policy_loss"] == pytest.approx(whole[iteration - 1]["loss/policy_loss"], rel=1e-6, abs=1e-8)


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(shared_ray):
    exp = on_ray(worker_timeout_s=30)
    exp.training.iterate()
    hung = exp.training.sources[0].process_ids[0]
    os.kill(hung, signal.SIGSTOP)
    assert exp.training.iterate()["workers/restarts"] == 1
    exp.close()
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)


# --- two nodes --------------------------------------------------------------------------------------------------------

NODE = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}


@pytest.fixture
def two_nodes(monkeypatch):
    """(cluster, its second node), with logical GPUs; nobody else's Ray is touched, and nobody finds ours by
    accident."""
    import ray
    from ray.cluster_utils import Cluster

    stop_shared_ray()
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets are in it
    monkeypatch.setenv("RAY_TMPDIR", folder)
    made = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        yield made, made.add_node(**NODE)
    finally:
        ray.shutdown()
        made.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def where(env):
    """In a worker: its node and the GPU it may use."""
    import ray

    return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.slow
def test_a_node_is_lost_and_another_one_joins(two_nodes, monkeypatch):
    monkeypatch.setattr(ray_workers, "LOOK_S", 1.0)
    cluster, second = two_nodes
    with pytest.raises(ConfigError, match=r"address=127.0.0.1:1: nothing answers there"):
        _ = experiment(address="127.0.0.1:1").training
    exp = experiment(address=cluster.address, num_workers=4, num_envs=1, num_gpus_per_worker=0.5)

    def places():
        return [place for place, _ in exp.foreach_env(where)]

    assert sorted(Counter(places()).values()) == [2, 2]
    assert [gpu for _, gpu in exp.foreach_env(where)] == ["0"] * 4  # two share the GPU of their node
    exp.training.iterate()
    exp.close()
    exp = experiment(address=cluster.address, num_workers=4, num_envs=1)
    exp.training.iterate()
    cluster.remove_node(second, allow_graceful=False)
    row = exp.training.iterate()
    assert row["workers/restarts"] == 2
    assert len(set(places())) == 1  # all four, on two CPUs
    cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    while row["workers/restarts"] < 4:
        row = exp.training.iterate()
    assert sorted(Counter(places()).values()) == [2, 2]
    exp.close()
    import ray

    assert not ray.is_initialized()
