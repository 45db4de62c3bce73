"""Environments as people install them: shapes of MiniGrid, SlimeVolley, Flappy Bird and others in small, and (slow) the
packages themselves."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import types
import venv
from pathlib import Path

import envs_for_tests as e
import gymnasium as gym
import numpy as np
import pytest

from bray.envs import EnvConfig, make_env, make_vec
from bray.envs.families import FAMILIES
from bray.errors import ConfigError, EnvError, UnknownName
from bray.experiment import Experiment

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "environments.md"


@pytest.mark.parametrize(("form", "check"), [("inprocess", True), ("inprocess", False), ("subprocess", True)])
def test_float64_observations_and_array_rewards_become_what_is_declared(form, check):
    with make_vec(EnvConfig(e.DoubleObs, num_envs=2, vector=form, num_processes=1, check=check), seed=0) as v:
        assert v.reset().dtype == np.float32
        rows = [v.step([1, 2]) for _ in range(6)]
    assert all(r[0].dtype == r[1].dtype == np.float32 for r in rows)
    assert [r[0][:, 0].tolist() for r in rows] == [[t, t] for t in (1, 2, 3, 4, 5, 0)]
    assert [r[1].tolist() for r in rows] == [
        [t, t] for t in (1, 2, 3, 4, 5, 0)
    ]  # also where one row is a number: the dead ones


def test_the_cast_is_told_once(caplog):
    class ToldOnce(e.DoubleObs):
        pass

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            v = make_vec(EnvConfig(ToldOnce, num_envs=3), seed=0)
            v.reset()
            for _ in range(4):
                v.step([0] * 3)
    (told,) = [r.getMessage() for r in caplog.records]
    assert told.endswith("observation has dtype float32 in its space and comes as float64: it is cast to float32.")


@pytest.mark.parametrize(
    ("declared", "given", "fits"),
    [("uint8", np.int64([0, 255]), True), ("uint8", np.int64([0, 256]), False), ("uint8", np.float32([0, 1]), False),
     ("float32", np.int64([0, 1]), True), ("float32", np.array([True, False]), True)],
)  # fmt: skip
def test_only_casts_that_keep_the_numbers_are_made(declared, given, fits):
    class Cast(e.Scripted):
        def __init__(self):
            super().__init__()
            self.observation_space = gym.spaces.Box(0, 255, (2,), declared)

        def _obs(self, action=0):
            return given

    v = make_vec(EnvConfig(Cast), seed=0)
    if fits:
        assert v.reset().tolist() == [given.tolist()]
        assert v.step([0])[0].dtype == declared
    else:
        with pytest.raises(EnvError, match=f"has dtype {declared} in its space, got {given.dtype}"):
            v.reset()


@pytest.mark.parametrize(("factor", "fault"), [(1e6, None), (np.nan, "observation\\[0\\] is nan")])
def test_gymnasiums_own_environments_may_fly_beyond_their_bounds(factor, fault):
    def far(env):
        return gym.wrappers.TransformObservation(env, lambda obs: obs * np.float32(factor), env.observation_space)

    v = make_vec(EnvConfig("CartPole-v1", wrappers=[far]), seed=0)
    if fault is None:
        assert np.abs(v.reset()[0, 2]) > v.spec.observation.bounds()[1][2]
    else:
        with pytest.raises(EnvError, match=fault):
            v.reset()


def test_bounds_have_the_tolerance_of_float32():
    v = make_vec(EnvConfig(e.RoundedUp), seed=0)
    assert v.reset()[0, 1] == 1.0000000000000002
    with pytest.raises(EnvError, match=r"observation\[1\] is 1\.00001, outside its space \[0\.0, 1\.0\]"):
        make_vec(EnvConfig(e.RoundedUp, env_config={"value": 1.00001}), seed=0).reset()


# --- texts ------------------------------------------------------------------------------------------------------------


def test_texts_become_character_codes():
    v = make_vec(EnvConfig(e.WithMission, num_envs=2), seed=0)
    obs = v.reset()
    assert v.spec.observation.names == ("direction", "image", "mission", "note")
    assert (obs["mission"].dtype, obs["mission"].shape) == (np.uint8, (2, 128))
    assert bytes(obs["mission"][1]).rstrip(b"\0") == b"go to the goal"
    assert obs["note"].tolist() == [[97, 98, 0, 0]] * 2


def test_texts_that_are_too_long(caplog):
    v = make_vec(EnvConfig(e.WithMission, env_config={"mission": "north " * 30}), seed=0)
    with caplog.at_level(logging.WARNING):
        assert bytes(v.reset()["mission"][0]) == ("north " * 30)[:128].encode()
    assert "is longer than 128 characters and is cut" in caplog.text

    class TooLong(e.WithMission):
        def reset(self, **kw):
            self.note = "abcda"
            return super().reset(**kw)

    with pytest.raises(EnvError, match=r"observation\['note'\] has at most 4 characters in its space, got 5: 'abcda'"):
        make_vec(EnvConfig(TooLong), seed=0).reset()


def test_entries_of_an_observation_are_left_out_by_name():
    config = EnvConfig(e.WithMission, drop_obs=["mission", "note"])
    v = make_vec(config, seed=0)
    assert set(v.reset()) == set(v.step([0])[0]) == {"direction", "image"}
    assert v.spec.preprocessing == {"drop_obs": ["mission", "note"]}
    with pytest.raises(UnknownName, match=r"'misson' \(env\.drop_obs\)\. Did you mean 'mission'"):
        make_env(EnvConfig(e.WithMission, drop_obs=["misson"]))
    with pytest.raises(ConfigError, match="names entries of a Dict observation, and this one is Box"):
        make_env(EnvConfig(e.Scripted, drop_obs=["x"]))
    with pytest.raises(ConfigError, match="leaves nothing"):
        make_env(EnvConfig(e.WithMission, drop_obs=["mission", "note", "image", "direction"]))


def test_flatten_obs_takes_texts_and_refuses_what_has_no_fixed_size():
    flat = make_vec(EnvConfig(e.WithMission, flatten_obs=True), seed=0).reset()
    assert flat.shape == (1, 4 + 48 + 128 + 4)

    class Ragged(e.Scripted):
        def __init__(self):
            super().__init__()
            many = gym.spaces.Sequence(gym.spaces.Discrete(3))
            self.observation_space = gym.spaces.Dict({"x": gym.spaces.Discrete(3), "many": many})

        def _obs(self, action=0):
            return {"x": 1, "many": (1, 2)}

    with pytest.raises(ConfigError, match=r"kind Sequence has no fixed size: leave it out with env\.drop_obs"):
        make_env(EnvConfig(Ragged, flatten_obs=True))
    with pytest.raises(ConfigError, match=r"spaces of kind Sequence are not supported.*env\.drop_obs"):
        make_vec(EnvConfig(Ragged), seed=0)
    assert make_vec(EnvConfig(Ragged, drop_obs=["many"], flatten_obs=True), seed=0).reset().tolist() == [[0, 1, 0]]


# --- what is missing --------------------------------------------------------------------------------------------------

MISSING = {
    "module": r"the module 'no_such_module_at_all', which is not installed: pip install no_such_module_at_all$",
    "variable": r"the environment variable NO_SUCH_VARIABLE_HOME, which is not set: export "
    r"NO_SUCH_VARIABLE_HOME=\.\.\.$",
    "exit": r"an environment variable that is not set \(Please declare the environment variable",
    "program": r"the program 'no-such-simulator', which is not installed or not on the PATH$",
    "display": r"a display \(Cannot connect to .None.\): run it under `xvfb-run -a`, or set SDL_VIDEODRIVER=dummy",
}


@pytest.mark.parametrize("what", MISSING)
def test_what_an_environment_misses_is_one_sentence(what):
    with pytest.raises(ConfigError, match=rf"^envs_for_tests:NeedsSomething needs {MISSING[what]}"):
        make_vec(EnvConfig(e.NeedsSomething, env_config={"what": what}), seed=0)


def test_what_it_misses_later_too_and_restarts_do_not_hide_it():
    config = EnvConfig(e.NeedsSomething, env_config={"what": "display", "late": True}, max_restarts=5)
    with make_vec(config, seed=0) as v, pytest.raises(ConfigError, match=r"environment 0, .*: it needs a display"):
        v.reset()


def test_a_module_that_cannot_be_imported_says_what_it_needs(tmp_path, monkeypatch):
    (tmp_path / "needs_sumo.py").write_text("import os\nHOME = os.environ['NO_SUCH_VARIABLE_HOME']\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"cannot import the module 'needs_sumo': it needs the environment variable NO_"
    ):
        make_env(EnvConfig("needs_sumo:Env"))


def test_a_module_that_imports_what_is_not_installed_names_that(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import cv2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ConfigError, match=r"'needs_more': it needs the module 'cv2', .*: pip install opencv-python"):
        make_env(EnvConfig("needs_more:Env"))


def test_a_known_family_that_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", None)  # as if it were not there
    for name in ("MiniGrid-Empty-5x5-v0", "minigrid:MiniGrid-Empty-5x5-v0"):
        with pytest.raises(ConfigError, match=r"MiniGrid-Empty-5x5-v0 needs .*pip install minigrid"):
            make_env(EnvConfig(name))


# --- the old gym package ----------------------------------------------------------------------------------------------


class OrderEnforcing:
    """As old gym's: it passes on whatever the environment returns."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)


OrderEnforcing.__module__ = "gym.wrappers.order_enforcing"


class TimeLimit(OrderEnforcing):
    """As old gym's: it expects five values, and old environments give four."""

    _max_episode_steps = 2

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated, info


TimeLimit.__module__ = "gym.wrappers.time_limit"


@pytest.fixture
def old_gym(monkeypatch):
    """The old package, as far as it is used; its ids are in no other registry."""
    module = types.ModuleType("gym")
    spec = types.SimpleNamespace(entry_point="envs_for_tests:OldGym")
    module.envs = types.SimpleNamespace(registry={"TestsOld-v0": spec})
    module.made = []

    def make(id, disable_env_checker=None, **kwargs):
        module.made.append((id, disable_env_checker, kwargs))
        return TimeLimit(OrderEnforcing(e.OldGym(**kwargs)))

    module.make = make
    monkeypatch.setitem(sys.modules, "gym", module)
    return module


@pytest.mark.parametrize("name", ["gym:TestsOld-v0", "TestsOld-v0", "envs_for_tests:TestsOld-v0"])
def test_ids_of_the_old_gym_package_are_found(old_gym, name):
    v = make_vec(EnvConfig(name, env_config={"limit": 9}), seed=0)
    assert v.spec.max_episode_steps == 2  # its own TimeLimit, which could not step it
    assert v.reset().tolist() == [[0.0]]
    assert [v.step([0])[3].tolist() for _ in range(3)] == [[False], [True], [False]]
    assert old_gym.made[0] == ("TestsOld-v0", True, {"limit": 9})


def test_ids_of_the_old_gym_package_are_offered_and_gymnasiums_come_first(old_gym):
    with pytest.raises(UnknownName, match="Did you mean 'TestsOld-v0'"):
        make_env(EnvConfig("TestsOld-v1"))
    old_gym.envs.registry["CartPole-v1"] = old_gym.envs.registry["TestsOld-v0"]
    assert make_vec(EnvConfig("gym:CartPole-v1"), seed=0).reset().shape == (1, 4)


# --- interfaces -------------------------------------------------------------------------------------------------------


def test_an_environment_of_nervex_trains_as_it_is():
    config = {"num_envs": 2, "rollout_length": 8, "fcnet_hiddens": [8], "env_config": {"length": 5}}
    exp = Experiment("A2C", e.ConfiguredEnv, use_preset=False, config=config)
    for _ in range(3):
        row = exp.training.iterate()
    exp.close()
    assert row["episode_return_mean"] == 5.0


def test_shapes_of_installed_environments_train():
    for env in (e.WithMission, e.DoubleObs):
        config = {"num_envs": 2, "rollout_length": 8, "fcnet_hiddens": [8]}
        exp = Experiment("PPO", env, use_preset=False, config=config)
        row = exp.training.iterate()
        assert np.isfinite([v for k, v in row.items() if k.startswith("loss/")]).all()
        exp.close()


# --- the packages themselves ------------------------------------------------------------------------------------------


def rows_of_the_page() -> dict[str, tuple[str, str]]:
    """family: (what pip installs, command), of the table in docs/environments.md"""
    rows = re.findall(
        r"^\| (?!family|--)([^|]+) \| `pip install ([^`]+)` \| `(bray train [^`]+)`", PAGE.read_text(), re.M
    )
    return {name: (install, command) for name, install, command in rows}


def test_the_page_has_every_known_family():
    told = {install for install, _ in rows_of_the_page().values()}
    assert told >= {f.install for f in FAMILIES if not f.module.startswith(("gymnasium.", "ale_py"))}


@pytest.mark.slow
@pytest.mark.parametrize("family", rows_of_the_page())
def test_installed_families_train_with_the_command_of_the_page(family, tmp_path):
    """In a virtual environment of its own, beside the packages of this one; skipped where nothing can be installed."""
    install, command = rows_of_the_page()[family]
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (site / "shared.pth").write_text("\n".join([str(ROOT), *(p for p in sys.path if p.endswith("site-packages"))]))
    pip = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *install.split()]
    installed = subprocess.run(pip, capture_output=True, text=True, timeout=900)
    if installed.returncode:
        pytest.skip(f"pip install {install} does not work here: {installed.stderr.strip().splitlines()[-1]}")
    words = command.replace("'", "").split()
    arguments = [*words[1:], "--stop", '{"env_steps_total": 2000}', "--project", str(tmp_path)]
    done = subprocess.run(
        [python, "-m", "bray", *arguments],
        capture_output=True, text=True, timeout=900, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
