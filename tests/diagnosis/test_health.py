"""A run says what looks wrong with it: each cause is provoked, and sound runs are left in peace."""

import json
import logging
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import bray.diagnosis.watch
from bray.cli.main import main
from bray.data.experience import Replay
from bray.diagnosis.symptoms import CHECKS, Symptoms
from bray.experiment import Experiment
from bray.figures import read_results
from bray.rundir import RunDir
from bray.train.units import dead_share

ON = {"num_envs": 8, "rollout_length": 64, "save_figure": False, "checkpoint_freq": 0}
FEW = {**ON, "epochs": 2, "minibatches": 8}
OFF = {"num_envs": 4, "learning_starts": 100, "train_every": 4, "save_figure": False, "checkpoint_freq": 0}


@pytest.fixture(autouse=True)
def short_iterations(monkeypatch):
    monkeypatch.setattr(Replay, "iteration_steps", 100)
    monkeypatch.setattr(bray.diagnosis.watch, "COUNT_UNITS", 5)


def trained(algo, env, config, iterations, path=None):
    if ":" in env:
        config = {"step_ms": 0.01, **config}  # of our own classes here: they need not be timed
    exp = Experiment(algo, env, use_preset=False, config=config, path=path, seed=0)
    rows = list(exp.train({"training_iteration": iterations}))
    exp.close()
    return rows


def warnings(caplog):
    return [r.message for r in caplog.records if r.levelno == logging.WARNING]


# --- provoked ---------------------------------------------------------------------------------------------------------


class Big(gym.Wrapper):
    """CartPole whose rewards are 10,000 times as large."""

    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action):
        obs, reward, *rest = self.env.step(action)
        return obs, 1e4 * reward, *rest


def test_a_learning_rate_that_is_too_high(tmp_path, caplog, capsys):
    """The policy jumps; it may also jump to an end where it stays."""
    rows = trained("PPO", "CartPole-v1", {**ON, "lr": 0.1, "epochs": 4, "minibatches": 4}, 10, tmp_path / "r")
    said = next(w for w in warnings(caplog) if "moves too far in each update" in w or "always does the same" in w)
    assert "Usually helps: lower lr (0.100 now), " in said or "Usually helps: lower lr (0.100 now) or" in said
    assert "health" not in rows[0]
    assert rows[-1]["health"].startswith(("step size", "entropy", "dead units"))
    assert read_results(tmp_path / "r")[-1]["health"] == rows[-1]["health"]
    assert said in RunDir.open(tmp_path / "r").log.read_text()
    assert main(["runs", str(tmp_path)]) == 0
    assert rows[-1]["health"] in capsys.readouterr().out

    caplog.clear()
    exp = Experiment.resume(tmp_path / "r")
    again = list(exp.train({"training_iteration": 14}))
    exp.close()
    assert again[0]["health"].startswith(rows[-1]["health"])
    assert said.partition("(")[0] not in caplog.text  # it was said before


@pytest.mark.parametrize(("algo", "config"), [("PPO", FEW), ("A2C", ON), ("DQN", OFF)])
def test_rewards_of_ten_thousand(algo, config, caplog, tmp_path):
    rows = trained(algo, "test_health:Big", config, 12, tmp_path / "r")
    assert rows[-1]["health"] == "reward scale"
    (said,) = warnings(caplog)
    assert re.match(r"rewards are large \(returns of [\d,]+, so values of about [\de.+]+\)", said)
    assert said.endswith("Usually helps: set normalize_rewards or set clip_rewards.")


def test_rewards_of_ten_thousand_that_are_normalised(caplog, tmp_path):
    trained("PPO", "test_health:Big", {**ON, "normalize_rewards": True}, 8, tmp_path / "r")
    assert not warnings(caplog)


def test_dead_relus(caplog, tmp_path):
    exp = Experiment(
        "DQN", "CartPole-v1", use_preset=False, path=tmp_path / "r", config={**OFF, "fcnet_activation": "relu"}
    )
    layers = [m for m in exp.training.model.modules() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        layers[0].bias.fill_(-1e3)  # where one step that is far too large leads
    rows = list(exp.train({"training_iteration": 6}))
    exp.close()
    assert rows[4]["health/dead_units"] == 1.0
    assert rows[4]["health"] == "dead units"
    (said,) = warnings(caplog)
    assert said.startswith(
        "100% of the units of a layer say the same of every observation (ReLUs at zero, tanh at one end)"
    )
    assert "set layer_norm, change fcnet_activation (relu now)" in said


def test_entropy_collapse(caplog, tmp_path):
    rows = trained("A2C", "CartPole-v1", {**ON, "lr": 1.0}, 12, tmp_path / "r")
    assert "entropy" in rows[-1]["health"].split(", ")
    (said,) = [w for w in warnings(caplog) if "always does the same" in w]
    assert "no better than at the start" in said
    assert said.endswith("Usually helps: lower lr (1 now) or raise entropy_coef (0.010 now).")


def test_values_that_feed_on_themselves(caplog, tmp_path):
    """The target network is the network itself, and a linear one: nothing holds the values."""
    config = {**OFF, "lr": 0.3, "target_period": 1, "double": False, "max_grad_norm": None, "fcnet_activation": "none"}
    rows = trained("DQN", "test_health:Growing", config, 14, tmp_path / "r")
    assert "action values" in rows[-1]["health"].split(", ")
    (said,) = [w for w in warnings(caplog) if "far beyond what the rewards allow" in w]
    assert "lower lr (0.300 now), raise target_period (1 now)" in said
    assert said.endswith("or set double.")


def test_minibatches_of_a_few_rows(caplog, tmp_path):
    """PPO's pieces are cut for eight environments; one game alone leaves two rows in each."""
    rows = trained("PPO", "CartPole-v1", {"num_envs": 1, "rollout_length": 64, "epochs": 2}, 6, tmp_path / "r")
    assert rows[-1]["health"] == "small minibatches"
    (said,) = warnings(caplog)
    assert said.startswith("each gradient step learns from 2 rows only")
    assert said.endswith("lower minibatches (32 now), raise num_envs (1 now) or raise rollout_length (64 now).")


def test_atoms_that_do_not_reach_the_returns(caplog, tmp_path):
    rows = trained("C51", "CartPole-v1", {**OFF, "v_max": 10.0}, 8, tmp_path / "r")
    assert rows[-1]["health"] == "support"
    (said,) = warnings(caplog)
    assert re.search(r"beyond the atoms of the values \(-10 to 10\).* set v_min=-10 v_max=\d\d", said)


def test_a_temperature_that_drowns_the_rewards(caplog, tmp_path):
    config = {**OFF, "initial_alpha": 1e3, "learning_starts": 20, "max_episode_steps": 20}
    rows = trained("SAC", "Pendulum-v1", config, 8, tmp_path / "r")
    assert rows[-1]["health"] == "temperature"
    assert "only entropy counts, rewards do not" in caplog.text
    assert "lower alpha_lr (0.001 now), lower initial_alpha (1,000 now)" in caplog.text


def test_a_generation_that_is_all_alike(caplog, tmp_path):
    rows = trained("ES", "test_health:Growing", {"num_envs": 4, "save_figure": False}, 8, tmp_path / "r")
    assert rows[-1]["health"] == "equal returns"
    assert "all players of a generation return 10: no direction is better than another" in caplog.text


def test_what_was_learnt_is_lost(caplog, tmp_path):
    """A learning rate that leaps after 15,000 steps."""
    rate = {"kind": "piecewise", "points": [[5_000, 1e-5], [5_001, 3e-3], [15_000, 3e-3], [15_001, 0.5]]}
    rows = trained("PPO", "CartPole-v1", {**ON, "lr": rate, "epochs": 4, "minibatches": 4}, 44, tmp_path / "r")
    assert "collapse" in rows[-1]["health"].split(", ")
    (said,) = [w for w in warnings(caplog) if "what was learnt is lost" in w]
    assert re.match(r"the return has fallen from [\d.]+ to 9\.\d+, about where it began \(", said)


def test_rows_of_a_policy_long_gone(caplog, tmp_path):
    """A worker plays while the learner leaps: every row is of other weights."""
    config = {"num_workers": 1, "num_envs": 8, "lr": 0.3, "save_figure": False, "checkpoint_freq": 0}
    with Experiment("IMPALA", "Pendulum-v1", use_preset=False, config=config, path=tmp_path / "r", seed=0) as exp:
        rows = exp.train({"training_iteration": 100})
        assert any("unused rows" in row.get("health", "").split(", ") for row in rows)
    assert re.search(r"what was played counts for \d+% only .*Usually helps: lower lr \(0\.300 now\), ", caplog.text)


def test_values_that_are_worse_than_a_constant(caplog, tmp_path):
    config = {**ON, "lr": 1.0, "value_coef": 10.0, "fcnet_activation": "none", "max_grad_norm": None}
    rows = trained("A2C", "CartPole-v1", config, 36, tmp_path / "r")
    assert "value function" in rows[-1]["health"].split(", ")
    assert re.search(r"worse than a constant \(explained variance -\d.*\), so advantages are noise", caplog.text)


class Endless(gym.Env):
    """Never ends, never rewards."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


def test_games_without_an_end_or_a_reward(caplog, tmp_path, monkeypatch):
    monkeypatch.setattr("bray.diagnosis.symptoms.ENDLESS", 100)
    rows = trained("PPO", "test_health:Endless", FEW, 4, tmp_path / "r")
    assert rows[-1]["health"] == "endless episodes"
    assert re.search(r"no episode has ended for [\d,]+ steps\. .*env\.max_episode_steps=1000", caplog.text)

    monkeypatch.setattr("bray.diagnosis.symptoms.FLAT_STEPS", 3_000)
    monkeypatch.setattr("bray.diagnosis.symptoms.FLAT_ROWS", 12)
    rows = trained("PPO", "test_health:Endless", {**FEW, "max_episode_steps": 20}, 13, tmp_path / "s")
    assert rows[-1]["health"] == "no gradients, flat return"
    assert "the gradient is exactly 0: nothing is learnt" in caplog.text
    assert "no reward was ever seen in " in caplog.text


def test_files_have_no_episodes_that_end(caplog):
    symptoms = Symptoms(OPTIONS)
    for step in range(0, 40_000, 4_000):
        assert symptoms.look({**SOUND, "env_steps_total": step, "episodes_total": 0, "data/episodes": 20}) == []
    assert not warnings(caplog)


class Growing(gym.Env):
    """One reward a step, ten steps, observations that grow."""

    observation_space = spaces.Box(-1e3, 1e3, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.float32([10.0 * self.t, -self.t]), 1.0, False, self.t == 10, {}


# --- by hand ----------------------------------------------------------------------------------------------------------

EPISODES = {
    "episode_return_mean": 20.0,
    "episode_return_min": 10.0,
    "episode_return_max": 50.0,
    "episode_length_mean": 20.0,
    "episodes_total": 100,
}
OPTIONS = {
    "gamma": 0.99,
    "lr": 1e-3,
    "normalize_rewards": False,
    "clip_rewards": None,
    "max_staleness": None,
    "epochs": 10,
    "minibatches": 32,
    "v_min": -10.0,
    "v_max": 60.0,
}
SOUND = {"loss/kl": 0.01, "loss/clip_fraction": 0.1, "loss/entropy": 0.5, "loss/explained_variance": 0.8,
         "loss/value_loss": 5.0, "loss/grad_norm": 3.0, "loss/q": 40.0, "health/dead_units": 0.4,
         "replay/size": 1000.0, "replay/staleness_mean": 300.0, "env_steps_total": 2000,
         "learner_steps_total": 1000}  # fmt: skip
SIGNS = {
    "loss": ({"loss/value_loss": 1e25}, 1),
    "entropy": ({"loss/entropy": 1e-6}, 5),
    "step size": ({"loss/clip_fraction": 0.7}, 5),
    "value function": ({"loss/explained_variance": -0.3, "loss/value_loss": 500.0}, 20),
    "action values": ({"loss/q": -1_300.0}, 5),
    "reward scale": ({"episode_return_mean": 5e3, "loss/explained_variance": 0.0}, 5),
    "gradients": ({"loss/grad_norm": 4_000.0}, 5),
    "no gradients": ({"loss/grad_norm": 0.0}, 5),
    "flat return": ({"env_steps_total": 200_000, "episodes_total": 10_000}, 38),
    "collapse": ({"episode_return_mean": 21.0}, 5),
    "endless episodes": ({"env_steps_total": 9_000}, 1),
    "support": ({"episode_return_max": 500.0}, 5),
    "temperature": ({"loss/alpha": 1e3}, 5),
    "unused rows": ({"loss/rho": 0.05}, 5),
    "equal returns": ({"loss/return_std": 0.0, "loss/return_mean": 20.0}, 5),
    "dead units": ({"health/dead_units": 0.95}, 1),
    "stale replay": ({"replay/staleness_mean": 1_200.0}, 5),
    "small minibatches": ({"env_steps_total": 3_000, "learner_steps_total": 5_000}, 1),
}


@pytest.mark.parametrize("cause", SIGNS)
def test_each_cause_is_said_once_and_only_after_its_patience(cause, caplog):
    changed, patience = SIGNS[cause]
    symptoms = Symptoms(OPTIONS)
    for i in range(24 if cause == "collapse" else 12):
        assert symptoms.look({**EPISODES, **SOUND, **({"episode_return_mean": 450.0} if i >= 12 else {})}) == []
    for n in range(1, 2 * patience + 5):
        told = symptoms.look({**EPISODES, **SOUND, **changed})
        assert told == ([cause] if n >= patience else [])
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("cause", ["flat return", "entropy"])
@pytest.mark.parametrize("more", [{}, {"agent/first/return_mean": 0.5, "agent/second/return_mean": -0.5}])
def test_the_sum_of_what_agents_get_tells_nothing(more, cause):
    """Where both betray each other the sum is as low as can be, and each does its best."""
    symptoms = Symptoms(OPTIONS)
    for _ in range(60):
        symptoms.look({**EPISODES, **SOUND, **SIGNS[cause][0], **more})
    assert (cause in symptoms.told) == (not more)


def test_rewards_that_are_not_discounted_are_no_larger_than_the_return(caplog):
    symptoms = Symptoms({**OPTIONS, "gamma": 1.0})
    for _ in range(60):
        symptoms.look({**EPISODES, **SOUND, "episode_return_mean": -20.0, "loss/explained_variance": 0.0})
    assert "reward scale" not in symptoms.told


@pytest.mark.parametrize("cause", [c for c in SIGNS if CHECKS[c][0] > 0])
def test_a_bad_row_now_and_then_is_nothing(cause, caplog):
    changed, patience = SIGNS[cause]
    symptoms = Symptoms(OPTIONS)
    for i in range(4 * patience):
        symptoms.look({**EPISODES, **SOUND, **(changed if i % 3 == 0 else {})})
    assert not caplog.records


def test_all_causes_are_tried_here_and_documented():
    assert list(SIGNS) == list(CHECKS)
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    table = text.partition("\n## When something looks wrong\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z ]+)` \|", table, re.M) == list(CHECKS)


def test_numbers_that_are_missing_or_not_finite_say_nothing(caplog):
    symptoms = Symptoms()
    for row in ({}, dict.fromkeys([*SOUND, *EPISODES]), dict.fromkeys([*SOUND, *EPISODES], float("nan"))):
        for _ in range(30):
            assert symptoms.look(row) == []
    assert not caplog.records


# --- dead units -------------------------------------------------------------------------------------------------------


def test_dead_units_are_counted_in_any_network():
    obs = np.random.default_rng(0).normal(size=(251, 4)).astype(np.float32)
    dense = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
    dense[0].bias.data = torch.tensor([-1e3] * 6 + [1e3] * 2)  # a ReLU far above zero is alive
    dense[2].weight.data.zero_()
    assert dead_share(dense, obs) == 0.75
    dense[2].bias.data = torch.tensor([-1e3] * 4 + [1e3] * 4)
    assert dead_share(dense, obs) == 1.0  # tanh at both ends, but never at another one
    dense[2].bias.data = torch.tensor([4.0] * 8)
    assert dead_share(dense, obs) == 0.75  # 0.9993: far out, and it comes back
    pictures = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 8, 1), nn.ReLU(inplace=True), nn.Flatten())
    pictures[1].bias.data = torch.tensor([-1e3] * 2 + [1e3] * 6)
    assert dead_share(pictures, obs) == 0.25
    assert dead_share(nn.Sequential(nn.Linear(4, 8), nn.ELU()), obs) is None
    assert dead_share(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), obs) is None  # an action, not a layer


def test_counting_dead_units_leaves_a_network_as_it_was():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    dead_share(model, np.ones((9, 4), np.float32))
    assert model.training
    assert model[1].training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("config", [{}, {"use_lstm": True, "lstm_cell_size": 8, "rollout_length": 8}])
def test_dead_units_of_a_run_with_memory(config, tmp_path):
    rows = trained(
        "PPO", "CartPole-v1", {**FEW, **config, "fcnet_activation": "relu", "fcnet_hiddens": [16]}, 5, tmp_path / "r"
    )
    assert 0.0 <= rows[-1]["health/dead_units"] < 0.5


# --- no false alarm ---------------------------------------------------------------------------------------------------

RECORDS = Path(__file__).parents[2] / "benchmarks" / "learning"
LEARNT_NOTHING = {"ppo-cue-mlp", "ppo-mountaincar"}  # what memory and curiosity are shown beside
POKER = "ppo-kuhn", "ppo-leduc", "nfsp-kuhn"  # returns of their agents are in rows, and not in what is kept of them


@pytest.mark.parametrize("record", sorted(RECORDS.glob("*-*.jsonl")), ids=lambda path: path.stem)
def test_the_records_of_sound_runs_raise_no_alarm(record, caplog):
    runs: dict[object, list[dict[str, float]]] = {}
    for line in record.read_text().splitlines():
        runs.setdefault((row := json.loads(line)).get("seed"), []).append(row)
    options: dict[str, object] = {"id": "ALE/Pong-v5"} if record.stem.startswith(("pong", "breakout")) else {}
    if record.stem == "pong-appo-auto":  # so many games that none has ended after 200,000 steps
        options |= {"num_envs": 16, "num_workers": 16}
    of_agents = {"agent/0/return_mean": 0.0} if record.stem.startswith(POKER) else {}
    for rows in runs.values():
        symptoms = Symptoms(options)
        for row in rows:
            symptoms.look({**row, **of_agents})
        assert symptoms.told == (["flat return"] if record.stem in LEARNT_NOTHING else [])


PRESETS = [("PPO", "CartPole-v1"), ("A2C", "CartPole-v1"), ("PQN", "CartPole-v1"), ("DQN", "CartPole-v1"),
           ("C51", "CartPole-v1"), ("QR-DQN", "CartPole-v1"), ("IQN", "CartPole-v1"), ("Rainbow", "CartPole-v1"),
           ("PPO", "Pendulum-v1"), ("SAC", "Pendulum-v1")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "env"), PRESETS)
def test_presets_train_without_a_warning(algo, env, caplog, tmp_path, monkeypatch):
    monkeypatch.undo()  # the iterations of a user
    exp = Experiment(algo, env, path=tmp_path / "r", seed=7, config={"save_figure": False})
    rows = list(exp.train())
    exp.close()
    assert [w for w in warnings(caplog) if "bray doctor" not in w] == []  # what it says of its speed is the machine's
    assert not any("health" in row for row in rows)
