"""Keys and rows that no other test turns: each one is changed by the command line, a file or Python, and something must
change.

The first part holds `docs/capabilities.md`, `docs/algorithms.md` and the pages of the algorithms to the code.
"""

import csv
import json
import re
import textwrap
from dataclasses import fields
from pathlib import Path

import envs_for_tests as e
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import bray
import bray.figures
from benchmarks.learning.__main__ import CASES
from bray.act import Clock, Tick
from bray.algos import ALGORITHMS, a2c, ars, dqn, es, get_algo, pg, ppo, sac
from bray.cli.advise import learns_from
from bray.cli.algos import PROBE, action_spaces
from bray.cli.main import main, make_app
from bray.config import load_yaml, to_plain
from bray.data.experience import Replay
from bray.data.files import write_episodes
from bray.data.ring import ReplayRing
from bray.envs import EnvConfig, env_spec, make_env
from bray.errors import ConfigError, DataError, EnvError, UnknownName
from bray.experiment import Experiment
from bray.figures import read_results
from bray.metrics import pretty_print
from bray.nn.catalog import ModelConfig
from bray.rundir import RunDir
from bray.train.config import RunConfig
from bray.train.device import resolve_device
from bray.train.local import LocalTraining, initial_state

DOCS = Path(__file__).parents[2] / "docs"
ALGOS = {"PPO": ppo, "A2C": a2c, "PG": pg, "DQN": dqn, "SAC": sac, "ES": es, "ARS": ars}
TINY = ["rollout_length=16", "num_envs=2", "minibatches=1", "epochs=1", "--no-preset"]


# --- the documents ----------------------------------------------------------------------------------------------------


def page_path(name):
    """Named as the module is."""
    return f"algorithms/{get_algo(name).__name__.rpartition('.')[2]}.md"


def page(name):
    """The page of an algorithm, and what it says under each of its `##` headings."""
    text = (DOCS / page_path(name)).read_text()
    parts = re.split(r"^## (.+)$", text, flags=re.M)
    return parts[0], dict(zip(parts[1::2], parts[2::2], strict=True))


def numbers_of_a_run():
    text = (DOCS / "algorithms.md").read_text().partition("\n## The numbers of a run\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w/]+)` \|", text, re.M)


def an_episode(env, steps=20):
    """Of CartPole or Pendulum."""
    ends, rng, numbers = np.arange(steps) == steps - 1, np.random.default_rng(0), env == "Pendulum-v1"
    return {
        "obs": rng.uniform(-1, 1, (steps + 1, 3 if numbers else 4)).astype(np.float32),
        "action": rng.uniform(-2, 2, (steps, 1)).astype(np.float32) if numbers else rng.integers(0, 2, steps),
        "reward": np.ones(steps, np.float32),
        "terminated": ends,
        "truncated": np.zeros(steps, bool),
    }


def a_row_of(name, path):
    """The first result row of a small training, on whichever of three environments the algorithm takes."""
    algo = get_algo(name)
    config = {"rollout_length": 8, "minibatches": 2, "learning_starts": 990, "train_every": 5, **PER}
    config = {k: v for k, v in config.items() if hasattr(algo.Config(), k)} | {"eval_freq": 1, "eval_episodes": 2}
    kinds = action_spaces(algo)
    env = "CartPole-v1" if "discrete" in kinds else "Pendulum-v1" if "box" in kinds else "bray.envs.agent_games:TwoStep"
    if name == "MAPPO":  # its critic sees a global state
        env = "bray.envs.agent_games:TwoStep"
    elif name == "AlphaZero":
        env = "bray.envs.agent_games:Nim"
    elif "TwoStep" in env:
        config["teams"] = {"team": ["a", "b"]}
    data = None
    if learns_from(algo, PROBE) == "dataset" or name in ("DQfD", "SQIL", "SQIL-Discrete", "GAIL"):
        write_episodes((data := path.parent / "data") / "episodes", [an_episode(env)])
    if name in ("SQIL", "SQIL-Discrete", "GAIL"):
        config["share"] = 0.5
    elif name == "DAgger":
        config["expert"] = "benchmarks.learning.demos:balance"
    exp = Experiment(name, env, data=data, use_preset=False, path=path, config=config)
    read_first = data is not None and "share" not in config
    *_, row = exp.train(stop={"training_iteration": 2 if read_first else 1})
    exp.close()
    return row


@pytest.mark.parametrize("name", ALGORITHMS)
def test_documented_metrics_are_those_that_are_logged(name, tmp_path):
    row = a_row_of(name, tmp_path / "r")
    own = re.findall(r"^\| `((?:loss|policy)/\w+)` \|", page(name)[1]["Numbers in a row"], re.M)
    assert own == [k for k in row if k.startswith(("loss/", "policy/"))]
    others = [k for k in numbers_of_a_run() if not k.startswith("replay/") or k in row]  # each replay has its own
    row = {k: v for k, v in row.items() if not k.startswith(("data/", "replay/files"))}  # of files: docs/options.md
    if name == "DQN":
        others = numbers_of_a_run()
    row = [k for k in row if not k.startswith(("agent", "eval/agent/"))]  # of games of several: docs/agents.md
    assert sorted([*others, *own]) == sorted([*row, "nan_metrics", "health", "health/dead_units", "video"])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_page_and_a_case(name):
    start, parts = page(name)
    assert start.startswith(f"# {name}\n")
    assert f"bray train --run {name} --env " in start
    assert list(parts) == ["Options", "Numbers in a row", "Implementation details", "Measured"]
    assert f"<!-- keys: {name} -->" in parts["Options"]
    assert f"<!-- scores: {name} -->" in parts["Measured"]
    assert name in {case.run for case in CASES.values()}
    assert f"({page_path(name)})" in (DOCS / "algorithms.md").read_text()


def test_the_links_of_the_pages_lead_somewhere():
    for file in [DOCS / "algorithms.md", *(DOCS / "algorithms").iterdir()]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", file.read_text()):
            assert (file.parent / target).exists(), f"{file.name}: {target}"


def test_every_capability_has_a_state_and_every_done_one_a_test():
    rows = re.findall(r"^\| *([BNJR]\d[^|]*)\|([^|]*)\|([^|]*)\|(.*)$", (DOCS / "capabilities.md").read_text(), re.M)
    seen = []
    files = {path.stem: path for path in Path(__file__).parents[1].rglob("test_*.py")}
    for ids, what, state, rest in rows:
        letter, first, last = re.fullmatch(r"([BNJR])(\d+)(?:-[BNJR](\d+))?", ids.strip()).groups()
        seen += [f"{letter}{n}" for n in range(int(first), int(last or first) + 1)]
        assert what.strip(), ids
        assert state.strip() in ("done", "part", "not yet"), ids
        tests = re.findall(r"`(test_\w+)::(test_\w+)`", rest)
        assert tests or state.strip() != "done", f"{ids} is done by which test?"
        assert not tests or state.strip() != "not yet", f"{ids} is not there, and a test shows it?"
        for file, test in tests:
            before, found, _ = files[file].read_text().partition(f"\ndef {test}(")
            assert found, f"{ids}: {file}::{test}"
            is_slow = re.search(r"^@pytest.mark.slow$", before.rpartition("\n\n")[2], re.M) is not None
            assert is_slow == (f"`{file}::{test}` (slow)" in rest), f"{ids}: is {file}::{test} slow?"
    expected = [
        f"{letter}{n}" for letter, last in (("B", 26), ("N", 95), ("J", 54), ("R", 86)) for n in range(1, last + 1)
    ]
    assert seen == expected


# --- every key of every algorithm -------------------------------------------------------------------------------------

ON = {"num_envs": 4, "rollout_length": 16, "lr": 1e-2, "fcnet_hiddens": [8]}
OFF = {"num_envs": 8, "learning_starts": 48, "train_every": 16, "batch_size": 16, "lr": 1e-2, "fcnet_hiddens": [8]}
BASE = {
    "PPO": ("CartPole-v1", {**ON, "epochs": 2, "minibatches": 2}),
    "A2C": ("CartPole-v1", ON),
    "PG": ("CartPole-v1", {"num_envs": 4, "lr": 1e-2, "batch_size": 100, "fcnet_hiddens": [8], "iteration_steps": 300}),
    "ES": ("CartPole-v1", {"num_envs": 8, "fcnet_hiddens": [4], "iteration_steps": 0}),
    "ARS": ("CartPole-v1", {"num_envs": 8, "iteration_steps": 0}),
    "DQN": ("CartPole-v1", {**OFF, "target_period": 3}),
    "SAC": ("Pendulum-v1", {**OFF, "updates": 2}),
}
PER = {"prioritized": True}
OTHER = {
    "PPO": {"rollout_length": 8, "epochs": 1, "minibatches": 1, "lr": 1e-3, "gamma": 0.5, "lambda_": 0.5, "clip": 1e-3,
            "dual_clip": 1.001, "clip_value": 1e-3, "entropy_coef": 1.0, "value_coef": 9.0, "max_grad_norm": 1e-3,
            "rnd": 1.0, "rnd_lr": {"rnd": 1.0, "rnd_lr": 0.1}, "normalize_advantage": False, "target_kl": 1e-9,
            "kl_coef": 1.0, "kl_aim": {"kl_coef": 1.0, "kl_aim": 1e-9}, "magnet_coef": 1.0,
            "magnet": {"magnet_coef": 1.0, "magnet": "slow"},
            "magnet_tau": {"magnet_coef": 1.0, "magnet": "slow", "magnet_tau": 1.0},
            "normalize_value": True, "recompute_advantages": True, "adam_eps": 0.1, "precision": "bfloat16"},
    "A2C": {"rollout_length": 8, "lr": 1e-3, "optimizer": "rmsprop", "gamma": 0.5, "lambda_": 0.5, "entropy_coef": 1.0,
            "value_coef": 9.0, "max_grad_norm": 1e-3, "rnd": 1.0, "rnd_lr": {"rnd": 1.0, "rnd_lr": 0.1},
            "normalize_advantage": True},
    "PG": {"batch_size": 50, "lr": 1e-3, "optimizer": "rmsprop", "gamma": 0.5, "baseline": False,
           "normalize_advantage": False, "entropy_coef": 1.0, "max_grad_norm": 1e-3},
    "ES": {"lr": 1e-3, "sigma": 0.5, "l2": 1.0},
    "ARS": {"lr": 1e-3, "sigma": 0.5, "top": 1.0},
    "DQN": {"lr": 1e-3, "gamma": 0.5, "n_step": 3, "double": False, "dueling": True, "noisy": True, "rnd": 1.0,
            "rnd_lr": {"rnd": 1.0, "rnd_lr": 0.1}, "prioritized": True,
            "priority_alpha": {**PER, "priority_alpha": 0.0},
            "priority_beta": {**PER, "priority_beta": {"kind": "linear", "start": 0.4, "end": 1.0, "steps": 100}},
            "initial_priority": {**PER, "initial_priority": "td_error"},
            "replay_size": 40, "max_use": 1, "max_staleness": 2, "batch_size": 8, "learning_starts": 100,
            "train_every": 8, "updates": 2, "target_period": 9,
            "tau": {"tau": 0.1, "target_period": 250}, "epsilon": 0.0, "epsilon_spread": 50.0, "huber": 1e-3,
            "max_grad_norm": 1e-3, "max_grad_value": 1e-4},
    "SAC": {"lr": 1e-3, "critic_lr": 1e-2, "alpha_lr": 0.1, "gamma": 0.5, "n_step": 3, "initial_alpha": 0.01,
            "adapt_alpha": False, "prioritized": True,
            "priority_alpha": {**PER, "priority_alpha": 0.0}, "priority_beta": {**PER, "priority_beta": 1.0},
            "replay_size": 40, "max_use": 1, "max_staleness": 2, "batch_size": 8, "learning_starts": 100,
            "train_every": 8, "updates": 1, "max_grad_norm": 1e-3, "target_entropy": 3.0,
            "random_hold": 1, "noise_hold": 8, "tau": 0.5},
}  # fmt: skip


def outcome(name, **changes):
    """Everything that a short training comes to: rows without times, and weights."""
    env, base = BASE[name]
    exp = Experiment(name, env, use_preset=False, config={**base, **changes, "record": False})
    rows = [exp.training.iterate() for _ in range(2 if name in ("PPO", "A2C") else 1)]
    rows = [{k: v for k, v in r.items() if not k.startswith(("perf/", "time_", "env_steps_per"))} for r in rows]
    weights = {k: v.tobytes().hex() for k, v in exp.training.weights().items()}
    exp.close()
    return json.dumps([rows, weights])


@pytest.mark.parametrize("name", ALGOS)
def test_every_key_of_an_algorithm_changes_the_training(name, monkeypatch):
    monkeypatch.setattr(Replay, "iteration_steps", 240)
    assert sorted(OTHER[name]) == sorted(f.name for f in fields(ALGOS[name].Config))
    plain = outcome(name)
    assert plain == outcome(name)
    prioritized = outcome(name, **PER) if name in ("DQN", "SAC") else plain
    for key, value in OTHER[name].items():
        changes = value if isinstance(value, dict) and key in value else {key: value}
        other = outcome(name, **changes)
        assert other != (prioritized if "priority" in key else plain), key


# --- environments -----------------------------------------------------------------------------------------------------


class OnlyTheMethods:
    """An environment of the old kind: no base class, a `cfg` dict, four values from step [N6]."""

    def __init__(self, cfg):
        self.goal, self.t = cfg["goal"], 0
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(3)

    def reset(self):
        self.t = 0
        return np.zeros(1, np.float32)

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), float(action == self.goal), self.t == 5, {}

    def seed(self, seed):
        pass

    def close(self):
        pass


def test_an_environment_with_only_the_methods_trains_with_dqn():
    config = {
        "env_config": {"goal": 2},
        "learning_starts": 200,
        "train_every": 8,
        "lr": 1e-2,
        "fcnet_hiddens": [8],
        "num_envs": 4,
    }
    exp = Experiment("DQN", OnlyTheMethods, use_preset=False, config=config)
    exp.training.iterate()
    assert exp.evaluate(4)["eval/return_mean"] == 5.0
    exp.close()


class Wave(gym.Env):
    """Observation and reward are the number of the step; four steps."""

    observation_space = spaces.Box(-100.0, 100.0, (2, 1), np.float32)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.last = 0, 0
        return np.zeros((2, 1), np.float32), {}

    def step(self, action):
        self.t, self.last = self.t + 1, action
        return np.array([[self.t], [self.last]], np.float32), float(self.t), self.t == 8, False, {}


def wrapped(*names):
    env = make_env(EnvConfig(Wave, wrappers=list(names)))
    env.reset(seed=0)
    return env


def test_the_wrappers_that_gymnasium_makes():
    obs, reward, *_ = wrapped({"name": "max_and_skip", "skip": 3}).step(1)
    assert (obs[0, 0], reward) == (3.0, 6.0)  # the larger of the last two; 1 + 2 + 3
    env = wrapped({"name": "time_limit", "max_episode_steps": 2})
    assert [env.step(0)[3] for _ in range(2)] == [False, True]
    assert wrapped("flatten").step(3)[0].tolist() == [1.0, 3.0]
    sticky = wrapped({"name": "sticky_action", "probability": 0.999999})
    assert [sticky.step(a)[0][1, 0] for a in (1, 2, 3)] == [1.0, 1.0, 1.0]
    env = wrapped("obs_norm")
    seen = [np.array([0.0, 1.0, 2.0])[: n + 1] for n in (1, 2)]
    for n, past in zip((1, 2), seen, strict=True):
        got = env.step(0)[0][0, 0]
        assert got == pytest.approx((n - past.mean()) / past.std(), rel=0.05)  # Gymnasium starts its count at 1e-4
    env = wrapped("reward_norm")
    rewards = [env.step(0)[1] for _ in range(3)]
    returns, g = [], 0.0
    for r in (1.0, 2.0, 3.0):
        g = 0.99 * g + r
        returns.append(g)
    assert rewards[2] == pytest.approx(3.0 / np.std(returns), rel=0.05)


def test_restarts_keep_a_training_alive(caplog):
    config = {"num_envs": 2, "rollout_length": 16, "fcnet_hiddens": [8], "per_env": [{"fault": "raise", "fault_at": 4}]}
    with pytest.raises(EnvError, match="scripted failure"):
        Experiment("A2C", e.Scripted, use_preset=False, config=config).training.iterate()
    exp = Experiment("A2C", e.Scripted, use_preset=False, config={**config, "max_restarts": 50})
    exp.training.iterate()
    assert exp.training.env.restarts >= 2
    exp.close()


def test_two_episodes_in_each_of_four_processes():
    per_env = [{"terminate_at": n} for n in (1, 2, 3, 4)]
    config = {"num_envs": 4, "per_env": per_env, "vector": "subprocess", "num_processes": 2, "fcnet_hiddens": [8]}
    exp = Experiment("A2C", e.Scripted, use_preset=False, config=config)
    assert len(exp.training.env.process_ids) == 2
    assert [n for _, n in exp.play(8, num_envs=4)] == [1, 1, 2, 2, 3, 3, 4, 4]
    exp.close()
    exp = Experiment("A2C", e.Scripted, use_preset=False, config={**config, "num_processes": 1})
    assert len(exp.training.env.process_ids) == 1
    exp.close()


@pytest.mark.parametrize(("clip", "learned"), [(None, [1, 2, 3]), (True, [1, 1, 1]), (2.0, [1, 2, 2])])
def test_clipped_rewards_are_learned_from_and_raw_ones_are_told(clip, learned):
    config = {"env_config": {"terminate_at": 3}, "num_envs": 1, "rollout_length": 3, "clip_rewards": clip}
    exp = Experiment("A2C", e.Scripted, use_preset=False, config=config)
    (piece,), counts = exp.training.sources[0].gather()
    assert piece.reward[:, 0].tolist() == learned
    assert counts.episodes == ((6.0, 3),)
    exp.training.totals.add(counts)
    assert exp.training.iterate()["episode_return_mean"] == 6.0
    assert exp.evaluate(1)["eval/return_mean"] == 6.0


def test_an_environment_object_trains():
    ready = e.Scripted(terminate_at=3)
    exp = Experiment("A2C", ready, use_preset=False, rollout_length=8)
    assert exp.training.iterate()["episode_return_mean"] == 6.0  # 1 + 2 + 3
    assert exp.evaluate(10)["eval/return_mean"] == 6.0  # there is one of it: ten episodes, one after the other


def test_modules_named_in_a_config_register_environments(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_plugin.py").write_text(
        "import envs_for_tests as e, bray\nbray.register_env('plugin-game', lambda config: e.Scripted(**config))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    argv = [
        "train",
        "--run",
        "PPO",
        "--env",
        "plugin-game",
        *TINY,
        "--stop",
        '{"training_iteration": 1}',
        "--trial",
        "t",
    ]
    assert main(argv) == 2
    assert "unknown environment 'plugin-game'" in capsys.readouterr().err
    assert main([*argv, "import_modules=[my_plugin]", "env_config={terminate_at: 2}"]) == 0
    assert read_results(tmp_path / "runs" / "t")[0]["episode_length_mean"] == 2


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of six iterations with an evaluation after each."""
    path = tmp_path_factory.mktemp("runs")
    argv = ["train", "--run", "PPO", "--env", "CartPole-v1", *TINY, "--project", str(path), "--trial", "t", "--quiet"]
    more = [
        "--eval-freq",
        "1",
        "--eval-episodes",
        "2",
        "--stop",
        '{"training_iteration": 6}',
        "lr=0.01",
        "--keep-checkpoints",
        "99",
    ]
    assert main([*argv, *more, "--seed", "3"]) == 0
    return path / "t"


def test_best_is_the_largest_evaluation(done):
    rows = read_results(done)
    scores = [row["eval/return_mean"] for row in rows]
    assert len(set(scores)) > 1
    best = rows[int(np.argmax(scores))]
    run = RunDir.open(done)
    assert run.pointer("best") == best["learner_steps_total"]
    assert run.load_checkpoint("best").meta["eval/return_mean"] == max(scores)
    assert run.pointer("latest") == rows[-1]["learner_steps_total"]


def test_a_checkpoint_is_chosen_by_its_step(done, capsys):
    steps = RunDir.open(done).steps()
    assert len(steps) > 1
    for step in (steps[0], steps[-1]):
        assert main(["eval", str(done), "--checkpoint", str(step), "--episodes", "2"]) == 0
        assert f"checkpoint {step}\n" in capsys.readouterr().out
        loaded = Experiment.load(done, step).served.model.state_dict()
        for name, value in RunDir.open(done).load_weights(step).items():
            np.testing.assert_array_equal(loaded[name].numpy(), value)


def test_the_files_of_a_run_agree(done):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = read_results(done)
    with open(done / "progress.csv", newline="") as f:
        table = list(csv.DictReader(f))
    events = EventAccumulator(str(done / "tb"), size_guidance={"scalars": 0})
    events.Reload()
    scalars = events.Scalars("loss/value_loss")
    steps = [row["env_steps_total"] for row in rows]
    assert [row["training_iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert steps == sorted(set(steps)) == [int(r["env_steps_total"]) for r in table] == [s.step for s in scalars]
    assert [s.value for s in scalars] == pytest.approx([r["loss/value_loss"] for r in rows])
    assert "loss/kl: " in pretty_print(rows[-1])


def test_config_yaml_runs_again_and_params_json_is_what_ran(done, tmp_path):
    argv = ["train", "-f", str(done / "config.yaml"), "--project", str(tmp_path), "--trial", "again", "--quiet"]
    assert main(argv) == 0
    keys = ("env_steps_total", "episode_return_mean", "loss/policy_loss", "eval/return_mean")
    rows, again = read_results(done), read_results(tmp_path / "again")
    assert [[r[k] for k in keys] for r in rows] == [[r[k] for k in keys] for r in again]
    params = json.loads((done / "params.json").read_text())
    assert params == load_yaml(done / "config.yaml").values
    assert (params["algo"]["lr"], params["run"]["seed"], params["env"]["num_envs"]) == (0.01, 3, 2)


def test_a_run_ends_when_the_evaluation_is_good_enough(tmp_path):
    argv = [
        "train",
        "--run",
        "PPO",
        "--env",
        "envs_for_tests:Scripted",
        *TINY,
        "--project",
        str(tmp_path),
        "--trial",
        "t",
    ]
    stop = '{"eval/return_mean": 15, "training_iteration": 9}'
    assert main([*argv, "--eval-freq", "3", "--eval-episodes", "1", "--stop", stop, "--quiet"]) == 0
    rows = read_results(tmp_path / "t")
    assert [r.get("eval/return_mean") for r in rows] == [None, None, 15.0]
    assert RunDir.open(tmp_path / "t").pointer("best") == rows[-1]["learner_steps_total"]


def test_a_run_ends_with_the_episode_that_is_asked_for(tmp_path):
    exp = Experiment("A2C", e.Scripted, use_preset=False, path=tmp_path / "r", rollout_length=16, num_envs=1)
    rows = list(exp.train(stop={"episodes_total": 5}))
    exp.close()
    assert [r["episodes_total"] for r in rows] == [2, 5]


def test_an_exception_leaves_a_checkpoint_of_what_was_learned(tmp_path, capsys):
    argv = [
        "train",
        "--run",
        "PPO",
        "--env",
        "envs_for_tests:Scripted",
        *TINY,
        "--project",
        str(tmp_path),
        "--trial",
        "t",
    ]
    faults = "env_config={terminate_at: null, fault: raise, fault_at: 40}"
    assert main([*argv, faults, "--quiet"]) == 2
    assert f"what was learned so far is saved in {tmp_path / 't'}" in capsys.readouterr().err
    assert RunDir.open(tmp_path / "t").load_checkpoint().meta["training_iteration"] == 2


@pytest.mark.parametrize("name", ["A2C", "DQN", "PPO"])
def test_changing_only_the_algorithm(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Replay, "iteration_steps", 100)
    argv = ["train", "--run", name, "--env", "CartPole-v1", "--no-preset", "--project", str(tmp_path), "--trial", "t"]
    assert main([*argv, "--stop", '{"training_iteration": 1}', "--num-envs-per-worker", "3"]) == 0
    assert capsys.readouterr().out.startswith(f"{name} on CartPole-v1 · 3 envs (in process) · ")
    assert load_yaml(tmp_path / "t" / "config.yaml").values["run"]["algorithm"] == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.py", "main_config = {'run': 'A2C', 'env': 'CartPole-v1', 'config': {'lr': 0.5}}"),
        ("run.json", '{"run": "A2C", "env": "CartPole-v1", "config": {"lr": 0.5}}'),
        ("run.yaml", "run: A2C\nenv: CartPole-v1\nconfig: {lr: 0.5}"),
    ],
)
def test_a_run_as_a_file(name, text, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert main(["train", "-f", str(tmp_path / name), "--print-config"]) == 0
    assert re.search(r"^ *algo\.lr +0\.5 ", capsys.readouterr().out, re.M)


def test_config_as_a_dict_or_as_keywords():
    defaults = to_plain(ppo.Config())
    by_dict = Experiment("PPO", "CartPole-v1", config={**defaults, "lr": 0.5, "num_envs": 3}, use_preset=False)
    by_keywords = Experiment(run="ppo", env="CartPole-v1", lr=0.5, num_envs=3, use_preset=False)
    assert by_dict.config["algo"] == by_keywords.config["algo"] == ppo.Config(lr=0.5)
    assert by_dict.config["env"] == by_keywords.config["env"]


def test_a_graphics_card_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"run.device is 'cuda', but PyTorch finds no CUDA GPU here.* or auto"):
        Experiment("PPO", "CartPole-v1", device="cuda").training  # noqa: B018
    with pytest.raises(ConfigError, match="expected cpu, cuda, cuda:N or auto, got 'gpu'"):
        resolve_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")


def test_threads_and_recording():
    before = torch.get_num_threads()
    try:
        for threads, record in ((2, True), (1, False)):
            training = LocalTraining(
                ppo,
                RunConfig(threads=threads, record=record),
                EnvConfig("CartPole-v1"),
                ModelConfig(),
                ppo.Config(rollout_length=8),
            )
            assert torch.get_num_threads() == threads
            training.iterate()
            assert training.learner.is_recorded == record
            training.close()
    finally:
        torch.set_num_threads(before)


def test_log_level_decides_what_is_said(tmp_path, capsys):
    argv = [
        "train",
        "--run",
        "PPO",
        "--env",
        "CartPole-v1",
        *TINY,
        "--stop",
        '{"training_iteration": 1}',
        "--project",
        str(tmp_path),
    ]
    said = {}
    for level in ("WARN", "INFO"):
        assert main([*argv, "--trial", level, "--log-level", level]) == 0
        said[level] = capsys.readouterr().err
    assert "info: bray " not in said["WARN"]
    assert f"info: bray {bray.__version__}, torch " in said["INFO"]
    assert main([*argv, "--trial", "key", "run.log_level=info"]) == 0  # a key of the run section like any other
    assert f"info: bray {bray.__version__}, torch " in capsys.readouterr().err
    assert main([*argv, "--trial", "wrong", "log_level=loud"]) == 2
    assert "unknown log level 'loud'" in capsys.readouterr().err


def test_train_help_lists_every_flag(capsys, monkeypatch):
    import typer

    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    command = typer.main.get_command(make_app(["train"])).commands["train"]
    flags = [option for p in command.params for option in p.opts if option.startswith("--")]
    assert len(flags) > 20
    assert all(re.search(rf"{flag}\b", out) for flag in flags)


def test_a_window_is_opened(done, capsys, monkeypatch):
    import pygame

    opened = []
    real = pygame.display.set_mode
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(pygame.display, "set_mode", lambda *a, **k: opened.append(a) or real(*a, **k))
    monkeypatch.setattr(pygame.time, "Clock", lambda: type("Clock", (), {"tick": lambda self, fps: 0})())
    assert main(["eval", str(done), "--episodes", "1", "--render", "human"]) == 0
    assert re.search(r"showed one episode of \d+ steps", capsys.readouterr().out)
    assert opened == [((600, 400),)]
    assert not (done / "videos").exists()


# --- acting and learning by hand --------------------------------------------------------------------------------------


def test_epsilon_follows_its_formula_and_is_acted_on():
    epsilon = {"kind": "exp", "start": 0.95, "end": 0.01, "decay": 500}
    exp = Experiment("DQN", "CartPole-v1", use_preset=False, num_envs=1, config={"epsilon": epsilon})
    policy = exp.training.policy
    for k in (0, 100, 5000):
        assert policy.numbers(Clock(k))["epsilon"] == pytest.approx(0.01 + (0.95 - 0.01) * np.exp(-k / 500))
    q, rng = np.tile([[0.0, 1.0]], (4000, 1)), np.random.default_rng(0)
    for k in (0, 500):
        action, _ = policy.act({"q": q}, Tick(None), rng, "sample", Clock(k))
        epsilon = policy.numbers(Clock(k))["epsilon"]
        assert abs((action == 0).mean() - epsilon / 2) < 0.03  # half of the random actions are the best one
    assert policy.act({"q": q}, Tick(None), rng, "greedy", Clock())[0].all()
    exp.close()


def test_the_policy_predicts_or_samples(done):
    exp = Experiment.load(done)
    obs = [0.0, 0.1, 0.02, -0.1]
    greedy = {int(exp.policy(obs)) for _ in range(20)}
    with torch.no_grad():
        logits = exp.served.model(torch.tensor([obs]))["dist"]
    assert greedy == {int(logits.argmax())}
    assert {int(exp.policy(obs, act="sample")) for _ in range(100)} == {0, 1}
    with pytest.raises(DataError, match=r"obs: expected shape \[4\], got \[3\]"):
        exp.policy(obs[:3])


def test_nothing_is_learned_before_learning_starts(monkeypatch):
    monkeypatch.setattr(Replay, "iteration_steps", 100)
    exp = Experiment("DQN", "CartPole-v1", use_preset=False, num_envs=1, learning_starts=150, train_every=10)
    rows = [exp.training.iterate() for _ in range(2)]
    exp.close()
    assert [r["learner_steps_total"] for r in rows] == [0, 6]  # after 151, 161, ... 191 steps, and what was due at 150
    assert [r.get("loss/q") is None for r in rows] == [True, False]


def test_an_episode_loop_of_ones_own():
    """Model, Policy, ReplayRing and Learner are ordinary objects: a user's own loop drives them."""
    game = EnvConfig(OnlyTheMethods, env_config={"goal": 1})
    env, spec = make_env(game), env_spec(game)
    config, net = dqn.Config(lr=1e-2, epsilon=0.3, batch_size=16), ModelConfig(fcnet_hiddens=(8,))
    torch.manual_seed(0)
    model = dqn.make_model(config, spec, net)
    policy, learner = dqn.Policy(config, spec), dqn.Learner(config, spec, model, net, record=False)
    replay = ReplayRing(500, 1, {"obs": np.zeros(1, np.float32), "action": np.int64(0)}, gamma=config.gamma)
    rng = np.random.default_rng(0)

    def remember(obs, action, reward=0.0, terminated=False, valid=True):
        replay.add(
            obs[None], action, np.float32([reward]), np.array([terminated]), np.array([False]), np.array([valid])
        )

    def train_one_episode():
        obs, terminated, total = env.reset()[0], False, 0.0
        while not terminated:
            q = model(torch.from_numpy(obs[None]))["q"].detach().numpy()
            action, _ = policy.act({"q": q}, Tick(obs[None]), rng, "sample", Clock())
            following, reward, terminated, _, _ = env.step(int(action[0]))
            remember(obs, action, reward, terminated)
            obs, total = following, total + reward
            if len(replay) >= config.batch_size:
                learner.update(replay.sample(config.batch_size, rng), Clock())
        remember(obs, action, valid=False)  # the episode's last observation
        return total

    returns = [train_one_episode() for _ in range(30)]
    assert np.mean(returns[-10:]) > np.mean(returns[:3]) + 0.5
    assert learner.steps > 100


class Qnet(nn.Module):
    """A network as a tutorial writes it."""

    def __init__(self, spec, config, width=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, spec.num_actions))

    def forward(self, obs):
        return {"q": self.layers(obs)}


def test_ones_own_network_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(Replay, "iteration_steps", 100)
    argv = [
        "train",
        "--run",
        "DQN",
        "--env",
        "CartPole-v1",
        "--no-preset",
        "--quiet",
        "--stop",
        '{"training_iteration": 2}',
    ]
    more = ["custom_model=test_capabilities:Qnet", "custom_options={width: 24}", "learning_starts=50"]
    assert main([*argv, *more, "--project", str(tmp_path), "--trial", "t"]) == 0
    weights = RunDir.open(tmp_path / "t").load_checkpoint().weights
    assert {k: v.shape for k, v in weights.items()}["layers.0.weight"] == (24, 4)
    assert read_results(tmp_path / "t")[-1]["learner_steps_total"] > 10


def test_collected_episodes_teach_another_network(done, tmp_path):
    """Imitation in ten lines: what `collect` wrote is read back and a linear policy learns the same choices."""
    assert main(["collect", str(done), "--episodes", "8", "--out", str(tmp_path)]) == 0
    data = bray.EpisodeReader(tmp_path).transitions()
    obs, action = torch.from_numpy(data["obs"]), torch.from_numpy(data["action"])
    torch.manual_seed(0)
    student = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(student.parameters(), 0.05)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(student(obs), action).backward()
        optimizer.step()
    alike = (student(obs).argmax(1) == action).float().mean().item()
    assert alike > max(0.9, action.float().mean().item(), 1 - action.float().mean().item())


# --- networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_seq_len", "shape"), [(20, (16, 2)), (8, (8, 4)), (5, (4, 8)), (1, (1, 32))])
def test_max_seq_len_cuts_the_sequences(max_seq_len, shape):
    model = {"use_lstm": True, "lstm_cell_size": 4, "fcnet_hiddens": [4], "max_seq_len": max_seq_len}
    exp = Experiment("PPO", "CartPole-v1", use_preset=False, config={**model, "num_envs": 2, "rollout_length": 16})
    (piece,), _ = exp.training.sources[0].gather()
    batch = exp.training.learner.prepare(piece)
    assert batch["advantage"].shape == shape
    assert batch["state"]["h"].shape == (shape[1], 4)
    exp.close()


def test_an_lstm_that_sees_the_last_action_and_reward():
    config = {"use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8], "rollout_length": 8, "num_envs": 1}
    plain = Experiment("PPO", "CartPole-v1", use_preset=False, config=config)
    sees = Experiment(
        "PPO", "CartPole-v1", use_preset=False, config={**config, "wrappers": ["obs_plus_prev_action_reward"]}
    )
    sees.training.iterate()
    widths = [x.training.model.core.encoder.features.out_features for x in (plain, sees)]
    assert widths == [4, 4 + 2 + 1]
    obs = sees.training.rollout.obs
    changed = {**obs, "prev_reward": obs["prev_reward"] + 1}
    state = initial_state(sees.training.model)(1)
    a, b = (sees.training.rollout.engine.forward(o, state)["dist"] for o in (obs, changed))
    assert not np.array_equal(a, b)


def test_keys_of_other_frameworks_are_refused():
    for key in ("squash_to_range", "lstm_use_prev_action_reward"):
        with pytest.raises(UnknownName, match=f"unknown key '{key}'"):
            Experiment("PPO", "CartPole-v1", config={key: True})


# --- learning ---------------------------------------------------------------------------------------------------------

SCRIPT = """
    import bray
    stop = {"episode_return_mean": 195, "env_steps_total": 100_000}
    exp = bray.Experiment("PPO", "CartPole-v1", seed=0, trial="six-lines", stop=stop)
    for result in exp.train():
        pass
"""


@pytest.mark.slow
def test_a_script_of_a_few_lines_trains_cartpole_to_195(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(textwrap.dedent(SCRIPT), names)
    assert names["result"]["episode_return_mean"] >= 195
    assert names["exp"].reached == {"episode_return_mean": names["result"]["episode_return_mean"]}
