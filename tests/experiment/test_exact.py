"""Same seed, same run; interrupted and resumed, the same run still: rows, weights, optimizer, replay, random states,
environments."""

import json

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from bray import tree
from bray.experiment import VOLATILE, Experiment
from bray.rundir import RunDir
from bray.train.progress import open_sinks

ON = {"num_envs": 3, "rollout_length": 8}
PPO = {**ON, "epochs": 3, "minibatches": 3}
OFF = {"learning_starts": 300, "train_every": 20, "batch_size": 16, "replay_size": 700, "iteration_steps": 400}
LIMITS = {"train_every": 4, "max_use": 2, "max_staleness": 60}
NORMALIZED = {"normalize_observations": True, "normalize_rewards": True}

CASES = {
    "ppo-native": ("PPO", "CartPole-v1", {**PPO, "vector": "native"}, 6),
    "ppo-inprocess": ("PPO", "CartPole-v1", {**PPO, "vector": "inprocess", **NORMALIZED}, 6),
    "ppo-subprocess": ("PPO", "CartPole-v1", {**PPO, "vector": "subprocess", "num_processes": 2}, 6),
    "ppo-lstm": ("PPO", "CartPole-v1", {**PPO, "use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4}, 6),
    "ppo-continuous": ("PPO", "Pendulum-v1", {**PPO, "normalize_observations": True}, 6),
    "a2c-native": ("A2C", "CartPole-v1", {**ON, "vector": "native"}, 8),
    "a2c-inprocess": ("A2C", "CartPole-v1", {**ON, "vector": "inprocess"}, 8),
    "a2c-subprocess": ("A2C", "CartPole-v1", {**ON, "vector": "subprocess", "num_processes": 2}, 8),
    "dqn-inprocess": ("DQN", "CartPole-v1", {**OFF, "prioritized": True, "n_step": 3, "dueling": True}, 4),
    "dqn-limits": ("DQN", "CartPole-v1", {**OFF, **LIMITS, "prioritized": True, "num_envs": 2}, 4),
    "dqn-native": ("DQN", "CartPole-v1", {**OFF, "num_envs": 2, "vector": "native"}, 4),
    "dqn-subprocess": ("DQN", "CartPole-v1", {**OFF, "num_envs": 2, "vector": "subprocess", "tau": 0.01}, 4),
    "rainbow": ("Rainbow", "CartPole-v1", {**OFF, "num_atoms": 11}, 4),
    "apex": ("Ape-X", "CartPole-v1", {**OFF, "num_envs": 2, "prioritized": True}, 4),
    "iqn": ("IQN", "CartPole-v1", OFF, 4),
    "r2d2": ("R2D2", "CartPole-v1", {**OFF, "num_envs": 2, "sequence_length": 6, "burn_in": 2, "lstm_cell_size": 8}, 4),
    "pqn": ("PQN", "CartPole-v1", ON, 8),
    "td3": ("TD3", "Pendulum-v1", {**OFF, "fcnet_hiddens": [16], "policy_delay": 3}, 4),
    "crossq": ("CrossQ", "Pendulum-v1", {**OFF, "fcnet_hiddens": [16], "critic_hiddens": [16]}, 4),
    "sac-inprocess": ("SAC", "Pendulum-v1", {**OFF, "fcnet_hiddens": [16]}, 4),
    "sac-limits": ("SAC", "Pendulum-v1", {**OFF, **LIMITS, "fcnet_hiddens": [16]}, 4),
    "sac-subprocess": ("SAC", "Pendulum-v1", {**OFF, "num_envs": 2, "vector": "subprocess", "fcnet_hiddens": [16]}, 4),
}

HUNT = {"teams": {"team": ["hunter_0", "hunter_1", "hunter_2"]}, "num_envs": 2}
Q_TEAM = {**HUNT, "target_period": 10}
MEMORY = {"use_lstm": True, "recurrent": "gru", "lstm_cell_size": 8}
GRU = {**MEMORY, "sequence_length": 4, "burn_in": 2}
CASES |= {
    "qmix": ("QMIX", "bray.envs.agent_games:Hunt", {**OFF, **Q_TEAM, "normalize_observations": True}, 2),
    "qmix-memory": ("QMIX", "bray.envs.agent_games:Hunt", {**OFF, **Q_TEAM, **GRU, "vector": "subprocess"}, 2),
    "vdn": ("VDN", "bray.envs.agent_games:Hunt", {**OFF, **Q_TEAM}, 2),
    "maddpg": ("MADDPG", "bray.envs.agent_games:Hunt", {**OFF, **HUNT, "normalize_observations": True}, 2),
    "mappo": ("MAPPO", "bray.envs.agent_games:Hunt", {**PPO, "num_envs": 2, "normalize_observations": True}, 3),
    "mappo-memory": ("MAPPO", "bray.envs.agent_games:Hunt", {**PPO, "num_envs": 2, **MEMORY}, 3),
    "coma": ("COMA", "bray.envs.agent_games:Hunt", {**ON, **HUNT, "normalize_observations": True}, 6),
    "coma-memory": ("COMA", "bray.envs.agent_games:Hunt", {**ON, **HUNT, **MEMORY}, 6),
    "atoc": ("ATOC", "bray.envs.agent_games:Hunt", {**OFF, **HUNT, "normalize_observations": True}, 4),
}


def run(path, case, iterations, seed=0):
    algo, env, config, _ = CASES[case]
    exp = Experiment(run=algo, env=env, use_preset=False, path=path, seed=seed, config=config)
    finish(exp, iterations)


def finish(exp, iterations):
    for _ in exp.train({"training_iteration": iterations}):
        pass
    exp.close()


def rows(path):
    out = []
    for line in (path / "result.jsonl").read_text().splitlines():
        row = json.loads(line)
        out.append({k: v for k, v in row.items() if not k.startswith(VOLATILE) and not k.endswith("_per_second")})
    return out


def assert_same(a, b):
    assert rows(a) == rows(b)
    ca, cb = RunDir.open(a).load_checkpoint(), RunDir.open(b).load_checkpoint()
    assert ca.step == cb.step
    assert set(ca.weights) == set(cb.weights)
    for name in ca.weights:
        assert ca.weights[name].tobytes() == cb.weights[name].tobytes(), name
    mine, theirs = dict(tree.paths(ca.state["arrays"])), dict(tree.paths(cb.state["arrays"]))
    for name in mine.keys() | theirs.keys():
        if name != "experience/ring/segments":  # the same rows, in more files
            assert np.array_equal(mine[name], theirs[name], equal_nan=mine[name].dtype.kind == "f"), name
    volatile = ("time", "row", "best")  # best is the best checkpoint, and the interrupted run saved one more
    assert {k: v for k, v in ca.state["json"].items() if k not in volatile} == {
        k: v for k, v in cb.state["json"].items() if k not in volatile
    }


SLOW = ("apex", "atoc")
MARKS = {
    case: [pytest.mark.slow] * (case in SLOW) + [pytest.mark.optimizes] * (env in ("CartPole-v1", "Pendulum-v1"))
    for case, (_, env, *_) in CASES.items()
}  # what teams record is ten times as long


@pytest.mark.parametrize("case", [pytest.param(c, marks=MARKS[c]) for c in CASES])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, case):
    total = CASES[case][3]
    run(tmp_path / "whole", case, total)
    run(tmp_path / "parts", case, total // 2)
    resumed = Experiment.resume(tmp_path / "parts")
    assert resumed.exact
    finish(resumed, total)
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_every_iteration_is_a_point_to_resume_from(tmp_path):
    run(tmp_path / "whole", "ppo-native", 5)
    run(tmp_path / "parts", "ppo-native", 1)
    for n in range(2, 6):
        finish(Experiment.resume(tmp_path / "parts"), n)
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_rows_written_after_the_last_checkpoint_are_dropped(tmp_path):
    run(tmp_path / "whole", "ppo-native", 4)
    run(tmp_path / "parts", "ppo-native", 2)
    with open(tmp_path / "parts" / "result.jsonl", "a") as f:
        f.write(json.dumps({"training_iteration": 3, "env_steps_total": 1}) + "\n")  # a run that was killed later
    finish(Experiment.resume(tmp_path / "parts"), 4)
    assert_same(tmp_path / "whole", tmp_path / "parts")


class Cuts:
    """A sink that remembers what it was told to drop."""

    def __init__(self):
        self.cuts = []

    def write(self, row): ...
    def close(self): ...

    def truncate_after(self, iteration, env_steps=None):
        self.cuts.append((iteration, env_steps))


def test_rows_of_a_run_that_was_killed_before_its_second_checkpoint_are_dropped(tmp_path):
    algo, env, config, _ = CASES["ppo-native"]
    exp = Experiment(run=algo, env=env, use_preset=False, path=tmp_path / "r", config=config)
    exp.save()
    exp.close()
    for sink in open_sinks(RunDir(tmp_path / "r"), []).sinks:
        sink.write({"training_iteration": 1, "env_steps_total": 24})
        sink.close()
    resumed, mine = Experiment.resume(tmp_path / "r"), Cuts()
    list(resumed.train({"training_iteration": 1}, sinks=[mine]))
    resumed.close()
    assert [r["training_iteration"] for r in rows(tmp_path / "r")] == [1]
    assert len((tmp_path / "r" / "progress.csv").read_text().splitlines()) == 2
    events = sorted((tmp_path / "r" / "tb").iterdir())[-1].read_bytes()
    assert Event(step=1, session_log=SessionLog(status=SessionLog.START)).SerializeToString() in events
    assert mine.cuts == [(0, 0)]


def test_seeds_differ(tmp_path):
    run(tmp_path / "a", "ppo-native", 2, seed=0)
    run(tmp_path / "b", "ppo-native", 2, seed=0)
    run(tmp_path / "c", "ppo-native", 2, seed=1)
    assert_same(tmp_path / "a", tmp_path / "b")
    assert rows(tmp_path / "a") != rows(tmp_path / "c")


def test_where_it_cannot_be_exact_the_run_says_so(tmp_path, caplog):
    pytest.importorskip("ale_py")
    config = {
        "num_envs": 2,
        "rollout_length": 4,
        "vector": "native",
        "epochs": 1,
        "conv_filters": [[4, [8, 8], 8]],
        "conv_features": 8,
    }
    exp = Experiment(run="PPO", env="ALE/Pong-v5", use_preset=False, path=tmp_path / "r", config=config)
    finish(exp, 1)
    resumed = Experiment.resume(tmp_path / "r")
    assert not resumed.exact
    assert "cannot be restored exactly" in caplog.text
    finish(resumed, 2)
    assert RunDir.open(tmp_path / "r").load_checkpoint().meta["exact"] is False
    assert [r["training_iteration"] for r in rows(tmp_path / "r")] == [1, 2]


def test_a_replay_that_was_not_saved_makes_the_resume_inexact(tmp_path, caplog):
    algo, env, config, _ = CASES["dqn-inprocess"]
    exp = Experiment(
        run=algo, env=env, use_preset=False, path=tmp_path / "r", config={**config, "checkpoint_replay": "never"}
    )
    finish(exp, 1)
    assert not (tmp_path / "r" / "replay").exists()
    assert RunDir.open(tmp_path / "r").load_checkpoint().meta["exact"] is False
    resumed = Experiment.resume(tmp_path / "r")
    assert not resumed.exact
    assert "the replay was not saved" in caplog.text
    assert "environments" not in caplog.text
    finish(resumed, 2)


def test_a_replay_that_is_too_large_to_be_saved_is_told_of_once(tmp_path, caplog):
    algo, env, config, _ = CASES["dqn-inprocess"]
    large = {**config, "replay_size": 120_000_000}  # its memory is not touched before it is used
    exp = Experiment(run=algo, env=env, use_preset=False, path=tmp_path / "r", config=large)
    exp.training.iterate()
    exp.save()
    exp.save()
    exp.close()
    assert caplog.text.count("is not saved with checkpoints") == 1


@pytest.mark.parametrize("case", ["ppo-inprocess", "dqn-inprocess", "sac-inprocess"])
def test_saving_changes_nothing(case, tmp_path):
    """A checkpoint after every iteration, or none but the first and the last: the same run."""
    algo, env, config, iterations = CASES[case]
    for name, often in (("often", {"checkpoint_freq": 1}), ("seldom", {"checkpoint_every_s": 0.0})):
        path = tmp_path / name
        finish(Experiment(algo, env, use_preset=False, path=path, seed=3, config={**config, **often}), iterations)
    assert len(RunDir.open(tmp_path / "often").steps()) > len(RunDir.open(tmp_path / "seldom").steps())
    assert_same(tmp_path / "often", tmp_path / "seldom")


def test_rewards_may_be_normalised_from_a_resume_on(tmp_path):
    config = {"vector": "inprocess", "num_envs": 2, "rollout_length": 32, "minibatches": 4}
    exp = Experiment(run="PPO", env="CartPole-v1", use_preset=False, path=tmp_path / "run", config=config)
    list(exp.train({"training_iteration": 1}))
    exp.close()
    exp = Experiment.resume(tmp_path / "run", normalize_rewards=True)
    *_, row = exp.train({"training_iteration": 2})
    assert 0 < exp.training.rollout.rewards.seen.count < row["env_steps_total"]
    exp.close()
