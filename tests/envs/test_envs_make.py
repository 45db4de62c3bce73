"""Where environments come from: names, classes, factories, objects, old interfaces; which vector form is chosen."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import envs_for_tests as e
import gymnasium as gym
import numpy as np
import pytest

from bray.envs import EnvConfig, env_spec, list_envs, make_env, make_vec, register_env
from bray.envs.check import check_env
from bray.envs.inprocess import InProcessVecEnv
from bray.envs.native import NativeVecEnv
from bray.envs.registry import env_name, resolve
from bray.envs.subprocess import SubprocessVecEnv
from bray.errors import ConfigError, EnvError, UnknownName


def first(config, **kw):
    with make_vec(config, seed=0, **kw) as v:
        return v.reset()


# --- names ------------------------------------------------------------------------------------------------------------


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(UnknownName, match=r"unknown environment 'CartPol-v1'\. Did you mean 'CartPole-v1'"):
        make_env(EnvConfig("CartPol-v1"))
    with pytest.raises(UnknownName, match=r"Did you mean 'ALE/Pong-v5'"):
        make_env(EnvConfig("ALE/Pongg-v5"))
    register_env("tests-maze", e.make_scripted)
    with pytest.raises(UnknownName, match="'tests-maze'"):
        make_env(EnvConfig("tests-maz"))
    with pytest.raises(UnknownName, match=r"'Scriptd' \(in module envs_for_tests\)\. Did you mean 'Scripted'"):
        make_env(EnvConfig("envs_for_tests:Scriptd"))
    with pytest.raises(
        ConfigError,
        match=r"cannot import the module 'no_such_module': .* Modules are looked for .*PYTHONPATH",
    ):
        make_env(EnvConfig("no_such_module:Env"))
    with pytest.raises(ConfigError, match=r"set env\.id"):
        make_env(EnvConfig())
    with pytest.raises(
        ConfigError, match=r"env\.vector: expected 'auto', .* got 'subproces'\. Did you mean 'subprocess'"
    ):
        EnvConfig("CartPole-v1", vector="subproces")


def test_list_envs_has_all_that_can_be_made():
    register_env("tests-listed", e.make_scripted)
    names = list_envs()
    assert {"tests-listed", "CartPole-v1", "ALE/Pong-v5"} <= set(names)
    assert len(names) == len(set(names))


def test_a_missing_package_is_named():
    if importlib.util.find_spec("mujoco") is None:
        with pytest.raises(ConfigError, match=r"HalfCheetah-v5 needs the package mujoco: pip install '.\[mujoco\]'"):
            make_env(EnvConfig("HalfCheetah-v5"))


def test_atari_without_its_package_says_what_to_install(monkeypatch):
    import bray.envs.registry as registry

    monkeypatch.setattr(registry.gym, "registry", {})
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ALE/Pong-v5 needs the package ale_py: pip install '.\[atari\]'"):
        make_env(EnvConfig("ALE/Pong-v5"))


@pytest.mark.parametrize(
    "field", [{"num_envs": 0}, {"per_env": [{}, {}]}, {"max_episode_steps": 0}, {"step_timeout": -1.0}]
)
def test_bad_numbers_are_refused(field):
    with pytest.raises(ConfigError, match=next(iter(field))):
        EnvConfig("CartPole-v1", **field)


# --- custom environments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [e.Scripted, "envs_for_tests:Scripted", e.make_scripted, "tests-scripted", lambda config: e.Scripted(**config)],
    ids=["class", "module:Class", "creator", "registered", "lambda"],
)
def test_all_ways_to_name_an_environment(source):
    register_env("tests-scripted", e.make_scripted)
    v = make_vec(EnvConfig(source, env_config={"terminate_at": 2}, num_envs=2), seed=0)
    v.reset()
    v.step([0, 0])
    assert v.step([0, 0])[2].tolist() == [True, True]


def test_object_factory_and_object():
    made = []

    def factory():
        made.append(e.Scripted())
        return made[-1]

    make_vec(EnvConfig(factory, num_envs=3, vector="inprocess"), seed=0)
    assert len(made) == 3
    ready = e.Scripted(terminate_at=1)
    v = make_vec(EnvConfig(ready), seed=0)
    v.reset()
    assert v.step([0])[2].tolist() == [True]
    assert env_spec(EnvConfig(ready)).observation.shape == (3,)
    assert not ready.closed
    with pytest.raises(ConfigError, match="num_envs=2 need one each"):
        make_vec(EnvConfig(ready, num_envs=2), seed=0)
    assert env_name(ready) == env_name(e.Scripted) == "envs_for_tests:Scripted"
    assert env_name("CartPole-v1") == "CartPole-v1"


def test_arguments_reach_gymnasium_environments_and_wrong_ones_are_named():
    env = make_env(EnvConfig("CartPole-v1", env_config={"sutton_barto_reward": True}))
    env.reset()
    assert env.step(0)[1] == 0.0  # a step of the usual CartPole is worth 1
    with pytest.raises(ConfigError, match=r"does not take this env_config \{'gravityy': 1\}"):
        make_env(EnvConfig("CartPole-v1", env_config={"gravityy": 1}))
    with pytest.raises(UnknownName, match=r"'terminateat' \(env_config\)\. Did you mean 'terminate_at'"):
        make_env(EnvConfig(e.Scripted, env_config={"terminateat": 1}))


def test_a_lambda_reaches_worker_processes():
    amount = 7.0  # a closure goes with it
    register_env("tests-lambda", lambda config: e.AddOne(e.Scripted(**config), amount), replace=True)
    config = EnvConfig("tests-lambda", env_config={"terminate_at": 3}, num_envs=2, vector="subprocess", num_processes=1)
    with make_vec(config, seed=0) as v:
        assert v.reset()[:, 0].tolist() == [7.0, 7.0]
        assert v.step([0, 0])[0][:, 0].tolist() == [8.0, 8.0]


def test_what_cannot_be_sent_to_a_process_is_told():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be made in another process.*lock.*env\.vector=inprocess"):
        make_vec(EnvConfig(lambda: lock and e.Scripted(), num_envs=2, vector="subprocess"), seed=0)


def test_an_environment_of_the_script_itself_needs_no_guard(tmp_path):
    """Neither `if __name__ == "__main__"`, nor a second run of the script in each worker."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        import envs_for_tests as e
        from bray.envs import EnvConfig, make_vec
        print("script runs")
        class Mine(e.Scripted):
            pass
        with make_vec(EnvConfig(Mine, num_envs=2, vector="subprocess", num_processes=1), seed=0) as v:
            print(v.reset()[:, 0].tolist())
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("script runs\n[0.0, 0.0]\n", "")


def test_every_process_knows_which_worker_it_belongs_to(tmp_path):
    """Also the environment that is made in the parent to look at its spaces."""
    seen = tmp_path / "seen"

    def note(config):
        with seen.open("a") as f:
            print(config.worker_index, config.vector_index, config.remote, file=f)
        return e.MultiEnv(config)

    for form, worker_index in (("subprocess", 2), ("inprocess", 0)):
        config = EnvConfig(note, num_envs=2, vector=form, num_processes=1)
        with make_vec(config, seed=0, worker_index=worker_index):
            pass
    assert seen.read_text().splitlines() == ["2 0 True", "2 0 True", "2 1 True", "0 0 False", "0 1 False"]


@pytest.mark.parametrize("form", ["inprocess", "subprocess"])
def test_env_config_knows_worker_and_place(form):
    register_env("tests-multi", e.MultiEnv)
    config = EnvConfig("tests-multi", num_envs=3, vector=form, env_config={"bonus": 1.0}, per_env=[{}, {"bonus": 5.0}])
    with make_vec(config, seed=0, worker_index=2) as v:
        assert v.reset().tolist() == [[2, 0], [2, 1], [2, 2]]
        assert v.step([0, 0, 0])[1].tolist() == [1.0, 5.0, 1.0]


def test_import_modules_can_register(monkeypatch):
    module = types.ModuleType("tests_registering_module")
    monkeypatch.setitem(sys.modules, "tests_registering_module", module)
    assert first(EnvConfig("CartPole-v1", import_modules=["tests_registering_module"])).shape == (1, 4)
    with pytest.raises(ConfigError, match="import_modules: cannot import 'tests_no_module'"):
        make_env(EnvConfig("CartPole-v1", import_modules=["tests_no_module"]))


def test_what_the_parent_registered_with_gymnasium_reaches_workers():
    gym.register(
        "tests/Scripted-v0", entry_point="envs_for_tests:Scripted", max_episode_steps=3, kwargs={"terminate_at": None}
    )
    with make_vec(EnvConfig("tests/Scripted-v0", num_envs=2, vector="subprocess", num_processes=1), seed=0) as v:
        v.reset()
        assert [v.step([0, 0])[3].tolist() for _ in range(3)] == [[False] * 2] * 2 + [[True] * 2]


def test_a_constructor_that_raises_is_told_with_its_traceback():
    class Broken(e.Scripted):
        def __init__(self):
            raise KeyError("no such level")

    with pytest.raises(EnvError, match=r"(?s)^Traceback.*no such level.*making environment 0 raised KeyError"):
        make_vec(EnvConfig(Broken), seed=0)


def test_an_object_that_raises_is_used_on():
    ready = e.Scripted(fault="raise")
    v = make_vec(EnvConfig(ready, max_restarts=1), seed=0)
    v.reset()
    assert [v.step([0])[0][0, 0] for _ in range(5)] == [1, 2, 2, 0, 1]
    assert not ready.closed


# --- older interfaces -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut", "ends"), [(False, (True, False)), (True, (False, True))])
def test_old_four_tuple_environments_are_adapted(cut, ends):
    old = e.OldGym(cut=cut)
    v = make_vec(EnvConfig(old), seed=0)
    assert v.reset().tolist() == [[0.0]]
    rows = [v.step([0]) for _ in range(4)]
    assert [r[0][0, 0] for r in rows] == [1, 2, 3, 0]
    assert (bool(rows[2][2][0]), bool(rows[2][3][0])) == ends
    assert len(old.seeds) == 2


def test_a_gymnasium_class_with_four_values_is_adapted_too():
    v = make_vec(EnvConfig(e.FiveByFour), seed=0)
    v.reset()
    assert [bool(v.step([0])[2][0]) for _ in range(7)] == [False] * 4 + [True, False, False]


def test_a_plain_class_is_enough_wherever_a_class_is_taken():
    """reset, step and two spaces; neither seed, render, close, metadata nor a base class."""

    class Plain:
        observation_space, action_space = gym.spaces.Box(0.0, 9.0, (1,), np.float32), gym.spaces.Discrete(2)

        def reset(self):
            self.t = 0
            return np.zeros(1, np.float32)

        def step(self, action):
            self.t += 1
            return np.full(1, self.t, np.float32), 1, self.t == 3, {}

    assert env_spec(EnvConfig(Plain)).observation.shape == (1,)
    for keys in ({}, {"wrappers": ["frame_stack", "eval_episode_return"], "flatten_obs": True, "max_episode_steps": 2}):
        with make_vec(EnvConfig(Plain, num_envs=2, **keys), seed=0) as v:
            v.reset()
            ended = [bool((step[2] | step[3]).all()) for step in (v.step([0, 1]) for _ in range(3))]
            assert ended == ([False, True, False] if keys else [False, False, True])
            assert v.render() is None
            state = v.get_state()
            v.set_state(state)
            assert v.exact
    assert not any(f.severity == "error" for f in check_env(EnvConfig(Plain), steps=20))


def test_old_spaces_are_converted():
    class Box:  # as in the gym package
        low, high, dtype = np.zeros(2, np.float32), np.ones(2, np.float32), np.dtype(np.float32)

    class Discrete:
        n = 3

    env = e.OldGym()
    env.observation_space, env.action_space = Box(), Discrete()
    adapted = make_env(EnvConfig(env))
    assert adapted.observation_space == gym.spaces.Box(0.0, 1.0, (2,), np.float32)
    assert adapted.action_space == gym.spaces.Discrete(3)


def test_what_is_no_environment_is_refused():
    with pytest.raises(EnvError, match="which is not an environment"):
        make_env(EnvConfig(lambda: 3))

    class NoSpaces:
        def reset(self): ...
        def step(self, action): ...

    with pytest.raises(EnvError, match="has no 'observation_space'"):
        make_env(EnvConfig(NoSpaces))


# --- which form -------------------------------------------------------------------------------------------------------


def test_auto_takes_the_fastest_form():
    def kind(env, n, **kw):
        with make_vec(EnvConfig(env, num_envs=n, **kw), seed=0) as v:
            return type(v)

    assert kind("CartPole-v1", 8) is NativeVecEnv
    assert kind("CartPole-v1", 1) is InProcessVecEnv
    assert kind("CartPole-v1", 8, frame_stack=2) is InProcessVecEnv
    assert kind("Acrobot-v1", 2) is InProcessVecEnv
    assert kind(e.Slow, 4, num_processes=2) is SubprocessVecEnv
    assert kind(e.Sleepy, 4, num_processes=2, env_config={"seconds": 0.002}) is InProcessVecEnv  # it does not say so
    assert kind(e.Scripted, 1, step_timeout=5.0) is SubprocessVecEnv
    assert kind("CartPole-v1", 8, step_timeout=5.0) is SubprocessVecEnv  # although there is a native form


def test_auto_goes_by_what_is_declared_and_never_measures(monkeypatch):
    """By the class, by its package; the number of cores is the only thing it asks the machine for."""

    def cost(env):
        return resolve(EnvConfig(env)).step_ms

    monkeypatch.setattr(time, "perf_counter", None)
    monkeypatch.setattr(time, "monotonic", None)
    gym.register("tests/Slow-v0", entry_point="envs_for_tests:Slow")
    assert [cost(x) for x in (e.Slow, "envs_for_tests:Slow", "tests/Slow-v0", e.Scripted, "CartPole-v1")] == [
        2,
        2,
        2,
        None,
        0,
    ]
    assert cost("ALE/Pong-v5") > 0
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert isinstance(make_vec(EnvConfig(e.Slow, num_envs=4), seed=0), InProcessVecEnv)


def test_a_cost_that_is_given_comes_before_what_is_declared():
    assert isinstance(make_vec(EnvConfig(e.Slow, num_envs=4, step_ms=0.0), seed=0), InProcessVecEnv)


def test_native_is_refused_where_there_is_none():
    for config, why in (
        (EnvConfig("Acrobot-v1", vector="native"), "no vector_entry_point"),
        (EnvConfig(e.Scripted, vector="native"), "not an environment of Gymnasium's registry"),
        (EnvConfig("CartPole-v1", vector="native", flatten_obs=True), "wrappers work on single"),
    ):
        with pytest.raises(ConfigError, match=why):
            make_vec(config, seed=0)


def test_environments_of_one_batch_need_the_same_spaces():
    config = EnvConfig(e.Composite, num_envs=2, vector="inprocess", per_env=[{}, {"mask_entries": (5, 2)}])
    with pytest.raises(EnvError, match="need one observation_space"):
        make_vec(config, seed=0)


class FakePool:
    """EnvPool's Gymnasium interface, as far as we use it: two environments that end at their third step."""

    observation_space, action_space = gym.spaces.Box(0.0, 9.0, (1,), np.float32), gym.spaces.Discrete(2)

    def __init__(self, seed):
        self.t, self.seed = 0, seed

    def reset(self):
        self.t = 0
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions):
        self.t = 0 if self.t == 3 else self.t + 1
        done = np.full(2, self.t == 3)
        return np.full((2, 1), self.t, np.float32), np.full(2, float(self.t)), done, np.zeros(2, bool), {}

    def close(self):
        pass


def test_envpool_form(monkeypatch):
    made = []
    module = types.ModuleType("envpool")
    module.list_all_envs = lambda: ["CartPole-v1"]
    module.make_gymnasium = lambda task, num_envs, seed, **kw: made.append((task, num_envs, seed, kw)) or FakePool(seed)
    module.__spec__ = importlib.machinery.ModuleSpec("envpool", None)
    monkeypatch.setitem(sys.modules, "envpool", module)
    v = make_vec(EnvConfig("CartPole-v1", num_envs=2, vector="envpool", max_episode_steps=50), seed=4)
    assert v.reset().tolist() == [[0], [0]]
    rows = [(v.step(np.zeros(2, int)), v.dead.tolist()) for _ in range(4)]
    assert [r[0][0][0, 0] for r in rows] == [1, 2, 3, 0]
    assert rows[2][0][1].dtype == np.float32
    assert [r[1] for r in rows] == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]
    assert made[-1] == ("CartPole-v1", 2, 4, {"max_episode_steps": 50})
    assert not v.exact
    with pytest.raises(UnknownName, match="EnvPool environment"):
        make_vec(EnvConfig("Acrobot-v1", vector="envpool"), seed=0)


def test_envpool_missing_says_what_to_install():
    if importlib.util.find_spec("envpool") is None:
        with pytest.raises(ConfigError, match="pip install envpool"):
            make_vec(EnvConfig("CartPole-v1", vector="envpool"), seed=0)


# --- what is done to observations -------------------------------------------------------------------------------------


def test_frame_stack_and_flatten():
    v = make_vec(EnvConfig(e.Scripted, frame_stack=3), seed=0)
    v.reset()
    v.step([0])
    assert v.step([0])[0][0, :, 0].tolist() == [0, 1, 2]
    flat = make_vec(EnvConfig(e.Composite, flatten_obs=True, wrappers=[]), seed=0).reset()
    assert set(flat) == {"observation", "action_mask"}
    # bits 4, kinds 2+3, pair 4+3, place 5, vector 2: discrete parts one-hot
    assert flat["observation"].shape == (1, 23)
    assert [m.shape for m in flat["action_mask"]] == [(1, 5), (1, 3)]


@pytest.mark.parametrize("keys", [{"frame_stack": 3}, {"wrappers": [{"name": "frame_stack", "n": 3}]}])
def test_a_mask_beside_stacked_frames_is_that_of_now(keys):
    v = make_vec(EnvConfig(e.Composite, **keys), seed=0)
    v.reset()
    obs = v.step(v.spec.layout.to_env(np.zeros((1, 5), np.float32)))[0]
    assert obs["vector"].shape == (1, 3, 2)
    assert obs["bits"][0, :, 0].tolist() == [0, 0, 1]
    assert v.spec.layout.mask(obs).tolist() == [[True] * 5 + [True, False, True]]
    assert v.spec.frame_stack is None  # the replay's store of frames is for observations that are one array


def test_env_spec_records_limit_and_preprocessing():
    spec = env_spec(EnvConfig("CartPole-v1", frame_stack=2, wrappers=[{"name": "action_repeat", "repeat": 2}]))
    assert spec.observation.shape == (2, 4)
    assert spec.preprocessing == {"wrappers": [{"name": "action_repeat", "repeat": 2}], "frame_stack": 2}
    assert env_spec(EnvConfig("CartPole-v1")).max_episode_steps == 500


def test_the_environments_own_limit_counts_inside_wrappers():
    v = make_vec(EnvConfig("MountainCar-v0", wrappers=[{"name": "action_repeat", "repeat": 10}]), seed=0)
    v.reset()
    assert [v.step([1])[3][0] for _ in range(20)].index(True) == 19  # 200 steps of the game
    v = make_vec(
        EnvConfig("MountainCar-v0", max_episode_steps=5, wrappers=[{"name": "action_repeat", "repeat": 10}]), seed=0
    )
    v.reset()
    assert [v.step([1])[3][0] for _ in range(5)].index(True) == 4  # five decisions


def test_make_env_is_a_plain_gymnasium_environment():
    env = make_env(EnvConfig("CartPole-v1", max_episode_steps=3), render_mode="rgb_array")
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]
    assert env.render().shape == (400, 600, 3)
