"""An algorithm of a user's own: mistakes are answered with the contract; the example is right where environments have
masks and Dicts."""

import math
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

import bray
from bray.algos import a2c, get_algo, ppo
from bray.errors import ConfigError

ROOT = Path(__file__).parents[2]
SMALL = {"use_preset": False, "num_envs": 2, "rollout_length": 16, "export_graph_after_s": None, "save_figure": False}


def algorithm(**changed):
    """A2C with other parts."""
    parts = {name: getattr(a2c, name) for name in ("Config", "make_model", "experience", "Policy", "Learner")}
    return SimpleNamespace(**{**parts, **changed})


class ReturnsDict(a2c.Learner):
    def update(self, batch, clock):
        return super().update(batch, clock).metrics


class TakesLess(a2c.Learner):
    def __init__(self, config, model):
        raise AssertionError("it is not called")


class PlainConfig:
    rollout_length = 16
    lr = 1e-3
    gamma = 0.99


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"Config": PlainConfig}, "its Config is no dataclass: write @dataclass"),
        ({"Config": a2c.Config()}, "its Config is no dataclass"),
        ({"Learner": ReturnsDict}, "its update returned dict, not an Update"),
        ({"Learner": TakesLess}, r"its Learner takes \(config, model\): .*too many positional arguments"),
        (
            {"make_model": lambda config, spec: None},
            r"its make_model takes \(config, spec\), it is called with \(config, spec, model\)",
        ),
        ({"make_model": lambda config, spec, model: None}, "its make_model returned NoneType, not an nn.Module"),
        ({"Policy": lambda spec: None}, r"its Policy takes \(spec\)"),
    ],
)
def test_a_mistake_is_answered_with_the_contract(changed, said, tmp_path):
    def train():
        next(bray.Experiment(algorithm(**changed), "CartPole-v1", path=tmp_path / "run", **SMALL).train())

    with pytest.raises(ConfigError, match=said) as error:
        train()
    assert "Learner.update(batch, clock) -> bray.algos.base.Update(names, values, priorities=None)" in str(error.value)
    assert "examples/custom_algorithm.py" in str(error.value)


@dataclass(frozen=True)
class Bare:
    rollout_length: int = 16


def test_a_config_needs_no_keys_that_the_algorithm_does_not_use(tmp_path):
    class Still(bray.algos.base.Learner):
        def build(self):
            return {}

        def update(self, batch, clock):
            self.steps += 1
            return bray.algos.base.Update((), bray.algos.base.torch.zeros(0))

    exp = bray.Experiment(algorithm(Config=Bare, Learner=Still), "CartPole-v1", path=tmp_path / "run", **SMALL)
    (row,) = islice(exp.train(), 1)
    exp.close()
    assert row["learner_steps_total"] == 1


class Unclipped(ppo.Learner):
    """PPO without its clip."""

    def policy_loss(self, ratio, advantage):
        return -ratio * advantage


def rows_of(run, path, **more):
    keys = {**SMALL, "epochs": 4, "minibatches": 4, "lr": 1e-2, **more}
    exp = bray.Experiment(run, "CartPole-v1", path=path, **keys)
    rows = list(islice(exp.train(), 3))
    exp.close()
    return [{k: v for k, v in row.items() if k.startswith("loss/")} for row in rows]


def test_the_surrogate_of_ppo_can_be_changed_alone(tmp_path):
    """Without a clip it is what a clip that is never reached leaves, number by number."""
    never = rows_of("PPO", tmp_path / "never", clip=1e6)
    assert rows_of(Unclipped, tmp_path / "mine", clip=1e6) == never
    assert rows_of("PPO", tmp_path / "ppo", clip=0.01) != rows_of(Unclipped, tmp_path / "again", clip=0.01)


@dataclass(frozen=True)
class Longer(ppo.Config):
    rollout_length: int = 32


class Alone(Unclipped):
    Config, DEFAULTS = Longer, {"env": {"num_envs": 3}}


def test_what_an_algorithm_leaves_out_is_as_in_the_one_that_it_is_derived_from():
    made = get_algo(Unclipped)
    for name in ("Config", "make_model", "experience", "Policy", "DEFAULTS"):
        assert getattr(made, name) is getattr(ppo, name), name
    assert made.Learner is Unclipped
    assert get_algo(f"{__name__}:Unclipped").DEFAULTS == ppo.DEFAULTS
    assert bray.Experiment(Unclipped, "CartPole-v1").config["env"].num_envs == 8
    own = get_algo(Alone)
    assert (own.Config, own.DEFAULTS, own.Policy) == (Longer, {"env": {"num_envs": 3}}, ppo.Policy)
    parts = {name: getattr(a2c, name) for name in ("Config", "make_model", "Policy", "Learner")}
    assert get_algo(SimpleNamespace(**parts)).DEFAULTS == a2c.DEFAULTS
    assert get_algo(SimpleNamespace(**parts, DEFAULTS={})).DEFAULTS == {}
    with pytest.raises(ConfigError, match="it needs Config, make_model, Policy, Learner; Config, make_model, Policy"):
        get_algo(bray.algos.base.Learner)


class Masked(gym.Env):
    """A Dict observation; two of four choices are legal, the others end the test."""

    observation_space = gym.spaces.Dict(
        {"x": gym.spaces.Box(-1, 1, (3,), np.float32), "action_mask": gym.spaces.MultiBinary(4)}
    )
    action_space = gym.spaces.Discrete(4)

    def _obs(self):
        self.legal = np.roll(np.array([1, 1, 0, 0], np.int8), self.t)
        return {"x": np.full(3, self.t / 10, np.float32), "action_mask": self.legal}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        assert self.legal[action], "an illegal choice"
        self.t += 1
        return self._obs(), float(action == self.t % 4), self.t == 10, False, {}


def test_the_example_knows_masks_and_dicts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    exp = bray.Experiment("examples.custom_algorithm:Reinforce", Masked, path=tmp_path / "run", **SMALL)
    first = next(exp.train())
    exp.close()
    assert first["loss/entropy"] == pytest.approx(math.log(2), abs=1e-3)  # of four choices without the mask: log 4
    sys.modules.pop("examples.custom_algorithm", None)
