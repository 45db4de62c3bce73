"""The contract of VecEnv: autoreset, seeds, flags, restarts, exact resume; the same for every form."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import envs_for_tests as e
import numpy as np
import pytest

from bray import tree
from bray.envs import EnvConfig, episode_seed, make_vec
from bray.envs.inprocess import InProcessVecEnv
from bray.envs.native import NativeVecEnv
from bray.errors import CheckpointError, ConfigError, EnvError, StoppedBySignal

HERE = Path(__file__).parents[1]


def vec(env=e.Scripted, n=2, seed=7, form="inprocess", **kw):
    v = make_vec(EnvConfig(env, num_envs=n, vector=form, **kw), seed=seed)
    return v


def play(v, actions):
    """All that steps return, and `dead`, as arrays; infos aside."""
    return [(*v.step(a)[:4], v.dead) for a in actions]


def same(a, b):
    return all(tree.equal(list(x), list(y)) for x, y in zip(a, b, strict=True)) and len(a) == len(b)


def actions(steps, n, choices=4, seed=0):
    return np.random.default_rng(seed).integers(0, choices, (steps, n))


# --- autoreset --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["inprocess", "subprocess"])
def test_episode_end_is_followed_by_one_dead_row_and_the_next_episode(form):
    with vec(per_env=[{"terminate_at": 3}, {"terminate_at": None, "truncate_at": 2}], form=form) as v:
        obs = v.reset()
        seeds = [[episode_seed(7, i, k) % 1000 for k in range(3)] for i in range(2)]
        assert obs.tolist() == [[0, seeds[0][0], 0], [0, seeds[1][0], 0]]
        rows = []
        for t in range(5):
            obs, reward, terminated, truncated, infos = v.step(np.array([t % 4, t % 4]))
            rows.append(
                (obs[:, 0].tolist(), obs[:, 1].tolist(), reward.tolist(), terminated.tolist(), truncated.tolist())
            )
            assert v.dead.tolist() == (terminated | truncated).tolist()
            assert reward.dtype == np.float32
            assert terminated.dtype == truncated.dtype == v.dead.dtype == bool
            assert infos is None
        (a0, a1, a2), (b0, b1, b2) = seeds
        F, T = False, True
        assert rows == [
            ([1, 1], [a0, b0], [1, 1], [F, F], [F, F]),
            ([2, 2], [a0, b0], [2, 2], [F, F], [F, T]),  # env 1 truncated: its last observation
            (
                [3, 0],
                [a0, b1],
                [3, 0],
                [T, F],
                [F, F],
            ),  # env 0 terminated; env 1: dead row gives the next first observation
            ([0, 1], [a1, b1], [0, 1], [F, F], [F, F]),
            ([1, 2], [a1, b1], [1, 2], [F, F], [F, T]),
        ]
        assert a2 != a1
        assert b2 != b1


def test_native_cartpole_keeps_the_same_contract():
    v = make_vec(EnvConfig("CartPole-v1", num_envs=8, max_episode_steps=12), seed=1)
    assert isinstance(v, NativeVecEnv)
    obs, ends, cuts = v.reset(), 0, 0
    for a in actions(200, 8, 2):
        before, was_dead = obs, v.dead
        obs, reward, terminated, truncated, _ = v.step(a)
        assert obs.flags.c_contiguous
        assert (reward == ~was_dead).all()  # 1 per transition, 0 for the dead row
        assert not (terminated & was_dead).any()
        assert not (truncated & was_dead).any()
        assert (np.abs(obs[was_dead]) <= 0.05).all()  # a first observation
        assert (np.abs(obs[terminated][:, 0]) > 2.4).sum() + (
            np.abs(obs[terminated][:, 2]) > 0.2094
        ).sum() >= terminated.sum()
        assert (v.dead == (terminated | truncated)).all()
        assert not np.shares_memory(before, obs)
        ends, cuts = ends + terminated.sum(), cuts + truncated.sum()
    assert ends > 10
    assert cuts > 10
    assert v.spec.max_episode_steps == 12


def test_single_cartpole_gives_gymnasiums_own_trajectory():
    import gymnasium as gym

    v = make_vec(EnvConfig("CartPole-v1", num_envs=1), seed=3)
    assert isinstance(v, InProcessVecEnv)
    theirs = gym.make("CartPole-v1")
    expected, _ = theirs.reset(seed=episode_seed(3, 0, 0))
    obs, episode = v.reset(), 0
    assert (obs[0] == expected).all()
    for a in actions(300, 1, 2):
        if v.dead[0]:
            episode += 1
            obs, reward, *_ = v.step(a)
            expected, _ = theirs.reset(seed=episode_seed(3, 0, episode))
            assert reward[0] == 0.0
        else:
            obs, reward, terminated, truncated, _ = v.step(a)
            expected, r, te, tr, _ = theirs.step(int(a[0]))
            assert (reward[0], terminated[0], truncated[0]) == (r, te, tr)
        assert (obs[0] == expected).all()
    assert episode > 5


def test_time_limit_truncates_and_minus_one_lifts_it():
    v = vec(n=1, env_config={"terminate_at": None}, max_episode_steps=4)
    v.reset()
    assert [v.step([0])[3][0] for _ in range(6)] == [False, False, False, True, False, False]
    short, long = (make_vec(EnvConfig("MountainCar-v0", max_episode_steps=m), seed=0) for m in (None, -1))
    assert short.spec.max_episode_steps == 200
    assert long.spec.max_episode_steps is None
    for v, ends in ((short, 1), (long, 0)):
        v.reset()
        assert sum(v.step([1])[3][0] for _ in range(210)) == ends


def test_a_lost_life_is_terminated_for_the_learner_only():
    v = vec(n=1, env_config={"terminate_at": 4, "lives_at": (2,)})
    v.reset()
    got = [(o[0, 0], te[0], v.dead[0]) for o, _, te, _, _ in (v.step([0]) for _ in range(4))]
    assert got == [(1, False, False), (2, True, False), (3, False, False), (4, True, True)]


def test_returned_arrays_are_never_written_again():
    v = vec(e.Aliased)
    kept = [v.reset()] + [v.step([0, 0])[0] for _ in range(4)]
    assert [o[0, 0] for o in kept] == [0, 1, 2, 3, 4]


def test_infos_are_none_or_one_dict_per_environment():
    v = vec(n=2, per_env=[{}, {"lives_at": (1,)}])
    v.reset()
    assert v.step([0, 0])[4] == [{}, {"life_lost": True}]
    assert v.step([0, 0])[4] is None


def test_reset_with_a_seed_starts_over_and_without_goes_on():
    v = vec(n=1)
    seeds = [v.reset()[0, 1], v.reset()[0, 1], v.reset(7)[0, 1], v.reset(8)[0, 1]]
    assert seeds == [episode_seed(s, 0, k) % 1000 for s, k in ((7, 0), (7, 1), (7, 0), (8, 0))]


def test_workers_play_different_episodes():
    config = EnvConfig(e.Scripted, num_envs=2)
    seen = [make_vec(config, seed=7, worker_index=w).reset()[:, 1].tolist() for w in (1, 2)]
    whole = make_vec(EnvConfig(e.Scripted, num_envs=4), seed=7).reset()[:, 1].tolist()
    assert seen[0] + seen[1] == whole
    assert len(set(whole)) == 4


def test_episode_seed_is_a_fixed_function():
    assert [episode_seed(0, 0, 0), episode_seed(1, 2, 3), episode_seed(1, 3, 2)] == [595752380, 1793398209, 88008358]
    many = {episode_seed(s, i, k) for s in range(10) for i in range(10) for k in range(100)}
    assert len(many) >= 9999  # two of 10,000 numbers of 32 bits may meet


def test_step_before_reset_and_wrong_actions_are_refused():
    v = vec()
    with pytest.raises(EnvError, match="reset comes before"):
        v.step([0, 0])
    v.reset()
    with pytest.raises(EnvError, match=r"actions have shape \(2,\), got \(3,\)"):
        v.step([0, 0, 0])


# --- composite spaces -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["inprocess", "subprocess"])
def test_dict_and_tuple_spaces_with_a_mask_per_action_part(form):
    made = []

    def here():
        made.append(e.Composite())
        return made[-1]

    with vec(here if form == "inprocess" else e.Composite, form=form, seed=1) as v:
        obs = v.reset()
        assert {k: getattr(x, "dtype", None) for k, x in obs.items()} | {"pair": None, "action_mask": None} == {
            "vector": np.float32,
            "place": np.int64,
            "kinds": np.int64,
            "bits": np.int8,
            "pair": None,
            "action_mask": None,
        }
        layout = v.spec.layout
        assert layout.mask(obs).tolist() == [[True] * 5 + [False, True, True]] * 2  # items: 2 + 3, move: 3
        flat = np.array([[0.5, -1.0, 1, 2, 2], [0.0, 1.0, 0, 1, 0]], np.float32)
        obs, reward, *_ = v.step(layout.to_env(flat))
        assert reward.tolist() == [5.0, 1.0]
        assert obs["place"].tolist() == [2, 2]
        assert obs["pair"][0].tolist() == [[[1, 1], [1, 1]]] * 2
        assert layout.mask(obs)[0].tolist() == [True] * 5 + [True, False, True]
    if form == "inprocess":
        action = made[0].actions[0]
        assert (action["move"], action["items"].tolist(), action["aim"].tolist()) == (2, [1, 2], [1.0, -2.0])
        assert action["aim"].dtype == np.float32


# --- forms agree ------------------------------------------------------------------------------------------------------


def test_subprocess_and_inprocess_give_identical_trajectories():
    acts = actions(120, 5, 2)
    results = []
    for form, kw in (("inprocess", {}), ("subprocess", {"num_processes": 2})):
        with vec("CartPole-v1", n=5, seed=11, form=form, **kw) as v:
            first = v.reset()
            results.append((first, play(v, acts)))
    assert (results[0][0] == results[1][0]).all()
    assert same(results[0][1], results[1][1])
    assert sum(r[2].sum() for r in results[0][1]) > 10


def test_a_part_of_the_environments_plays_as_it_does_among_all():
    config = EnvConfig(id="CartPole-v1", num_envs=5, vector="subprocess", num_processes=5)
    acts = actions(40, 5, 2)
    with make_vec(replace(config, vector="inprocess", num_processes=None), seed=11) as v:
        first, all_ = v.reset(), play(v, acts)
    with make_vec(config, seed=11, numbers=range(2, 5)) as v:
        assert len(v.process_ids) == 3
        assert (v.reset() == first[2:]).all()
        for mine, theirs in zip(play(v, acts[:, 2:]), all_, strict=True):
            assert same([mine[:4]], [tuple(x[2:] for x in theirs[:4])])


# --- exact resume -----------------------------------------------------------------------------------------------------


def through_json(state):
    """As a checkpoint does it: arrays packed, the rest as JSON text."""
    return {"arrays": tree.unpack(tree.pack(state["arrays"])), "json": json.loads(json.dumps(state["json"]))}


@pytest.mark.parametrize("steps", [1, 23, 60])
@pytest.mark.parametrize(
    ("env", "form"),
    [("CartPole-v1", "native"), ("CartPole-v1", "inprocess"), ("Pendulum-v1", "inprocess"), (e.Composite, "inprocess")],
)
def test_resumed_equals_uninterrupted(env, form, steps):
    def make():
        return make_vec(EnvConfig(env, num_envs=8, vector=form, max_episode_steps=17), seed=5)

    a = make()
    a.reset()
    rng = np.random.default_rng(0)
    acts = [tree.stack([a.spec.action.sample(rng) for _ in range(8)]) for _ in range(steps + 60)]
    last, dead = play(a, acts[:steps])[-1][0], a.dead
    state = through_json(a.get_state())
    rest = play(a, acts[steps:])
    b = make()
    b.reset(99)
    obs = b.set_state(state)
    assert b.exact
    assert tree.equal(obs, last)
    assert (b.dead == dead).all()
    assert same(play(b, acts[steps:]), rest)
    # and once more, from a state that was itself restored
    c = make()
    c.set_state(state)
    play(c, acts[steps : steps + 9])
    d = make()
    d.set_state(through_json(c.get_state()))
    assert same(play(d, acts[steps + 9 :]), rest[9:])


def test_subprocess_resumes_exactly_and_takes_an_inprocess_state():
    acts = actions(60, 4, 2)
    with vec("CartPole-v1", n=4, form="subprocess") as a:
        a.reset()
        last = play(a, acts[:30])[-1][0]
        state = through_json(a.get_state())
        rest = play(a, acts[30:])
        assert tree.equal(a.set_state(state), last)
        assert a.exact
        assert same(play(a, acts[30:]), rest)
    b = vec("CartPole-v1", n=4)
    b.set_state(state)
    assert same(play(b, acts[30:]), rest)


def test_an_environment_that_cannot_be_replayed_starts_anew_and_says_so(caplog):
    a = vec(e.Hidden, n=1)
    a.reset()
    play(a, [[0]] * 2)
    state = a.get_state()
    with caplog.at_level(logging.WARNING):
        obs = a.set_state(state)
    assert not a.exact
    assert "not deterministic under reset(seed=...)" in caplog.text
    assert obs[0, :2].tolist() == [0, episode_seed(7, 0, 1) % 1000]
    assert a.step([0])[0][0, 0] == 1


def test_an_environments_own_state_is_used():
    a = vec(e.Stateful, n=1, env_config={"terminate_at": 9})
    a.reset()
    play(a, [[1]] * 3)
    state = through_json(a.get_state())
    rest = play(a, [[1]] * 12)
    a.set_state(state)
    assert a.exact
    assert same(play(a, [[1]] * 12), rest)


def test_a_very_long_episode_is_not_kept_forever(monkeypatch, caplog):
    import bray.envs.inprocess as module

    monkeypatch.setattr(module, "REPLAY_LIMIT", 2000)
    v = vec(n=2, per_env=[{"terminate_at": None}, {"terminate_at": 5}], check=False)
    v.reset()
    for _ in range(5000):
        v.step([0, 0])
    state = v.get_state()
    assert sum(len(entry.get("actions", ())) for entry in state["arrays"]["envs"]) < 2000
    assert not v.exact
    with caplog.at_level(logging.WARNING):
        assert v.set_state(state)[0, 0] == 0
    assert "too long to be replayed" in caplog.text


def test_a_state_of_other_environments_is_refused():
    state = vec(n=2)
    state.reset()
    state = state.get_state()
    with pytest.raises(CheckpointError, match="2 environments in the form 'episodes', these are 3"):
        vec(n=3).set_state(state)
    with pytest.raises(CheckpointError, match="not the state"):
        vec(n=2).set_state({"arrays": {}})
    native = make_vec(EnvConfig("CartPole-v1", num_envs=2, vector="native"), seed=0)
    with pytest.raises(CheckpointError, match="in the form 'native'"):
        native.set_state(state)


# --- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["inprocess", "subprocess"])
def test_an_environment_that_raises_is_rebuilt_up_to_a_limit(form, caplog):
    per_env = [{"terminate_at": None}, {"fault": "raise"}]
    with vec(per_env=per_env, form=form, max_restarts=2, num_processes=1) as v:
        v.reset()
        with caplog.at_level(logging.WARNING):
            rows = [(*v.step([1, 1])[:4], v.dead) for _ in range(6)]
        assert rows[2][0].tolist()[1] == rows[1][0].tolist()[1]  # its last observation again
        assert [r[1][1] for r in rows] == [1, 2, 0, 0, 1, 2]
        assert [bool(r[3][1]) for r in rows] == [False, False, True, False, False, False]
        assert [bool(r[4][1]) for r in rows] == [False, False, True, False, False, False]
        assert rows[3][0][1, :2].tolist() == [0, episode_seed(7, 1, 1) % 1000]
        assert [r[0][0, 0] for r in rows] == [1, 2, 3, 4, 5, 6]  # the neighbour never noticed
        assert v.restarts == 1
        first = caplog.records[0].getMessage()
        assert first.startswith("Traceback")
        assert "scripted failure" in first
        assert "environment 1, episode 0, step 2" in first
        v.step([1, 1])
        assert v.restarts == 2
        play(v, [[1, 1]] * 3)
        with pytest.raises(EnvError, match=r"(?s)^Traceback.*scripted failure.*max_restarts=2"):
            v.step([1, 1])


@pytest.mark.parametrize("form", ["inprocess", "subprocess"])
def test_an_environment_that_ends_the_program_has_failed(form):
    with vec(n=1, env_config={"fault": "exit"}, form=form) as v:
        v.reset()
        v.step([0])
        v.step([0])
        with pytest.raises(EnvError, match=r"(?s)^Traceback.*sys.exit\(3\).*step 2: it raised SystemExit"):
            v.step([0])


def test_a_signal_that_ends_the_program_is_no_failure_of_the_environment(monkeypatch):
    def stop(self, action):
        raise StoppedBySignal(130)

    monkeypatch.setattr(e.Scripted, "step", stop)
    with vec(n=1, max_restarts=9) as v:
        v.reset()
        with pytest.raises(StoppedBySignal):
            v.step([0])


def test_without_restarts_the_users_traceback_comes_at_once():
    v = vec(n=1, env_config={"fault": "raise"})
    v.reset()
    v.step([0])
    v.step([0])
    with pytest.raises(EnvError, match=r"(?s)^Traceback.*envs_for_tests.py.*RuntimeError: scripted failure.*step 2"):
        v.step([0])


@pytest.mark.parametrize(
    ("fault", "timeout", "says"), [("die", None, "exit code 7"), ("hang", 0.5, "did not answer within 0.5 s")]
)
def test_a_worker_that_dies_or_hangs_is_replaced(fault, timeout, says, caplog):
    per_env = [{"terminate_at": 2}, {"fault": fault, "terminate_at": None}, {"terminate_at": None}]
    with vec(n=3, per_env=per_env, form="subprocess", num_processes=2, max_restarts=1, step_timeout=timeout) as v:
        assert len(v.process_ids) == 2  # environments 0 and 1 share one
        v.reset()
        play(v, [[1] * 3] * 2)
        pid = v.process_ids[0]
        with caplog.at_level(logging.WARNING):
            obs, reward, terminated, truncated, _ = v.step([1] * 3)
        # environment 0 was dead: its next episode starts as it was to; 1 is cut; 2 lives elsewhere
        assert obs[:, 0].tolist() == [0, 2, 3]
        assert obs[0, 1] == episode_seed(7, 0, 1) % 1000
        assert reward.tolist() == [0, 0, 3]
        assert terminated.tolist() == [False] * 3
        assert truncated.tolist() == v.dead.tolist() == [False, True, False]
        assert v.restarts == 1
        assert says in caplog.text
        if fault == "hang":
            assert "_break" in caplog.records[0].getMessage().split("environments")[0]  # where it hung, first
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        obs, *_ = v.step([1] * 3)
        assert obs[:, 0].tolist() == [1, 0, 4]
        assert obs[1, 1] == episode_seed(7, 1, 1) % 1000
        play(v, [[1] * 3] * 2)
        with pytest.raises(EnvError, match="max_restarts=1"):
            v.step([1] * 3)


def test_an_environment_that_cannot_be_made_in_a_worker_says_why(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="an environment object cannot be moved"):
        vec(e.Scripted(), n=1, form="subprocess")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EnvError, match=r"(?s)Traceback.*only in the main process"):
        vec(e.MainProcessOnly, form="subprocess")
    assert list(tmp_path.glob("bray-env-*")) == []  # nothing is left behind


# --- no orphans -------------------------------------------------------------------------------------------------------


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_close_ends_all_workers():
    v = vec(form="subprocess")
    pids = v.process_ids
    assert len(pids) == min(2, os.cpu_count())
    v.close()
    v.close()
    assert all(gone(p) for p in pids)


def test_workers_do_not_outlive_a_killed_parent():
    """Even one that hangs in a step, and without running the parent's script again."""
    script = textwrap.dedent(f"""
        import sys, threading
        sys.path.insert(0, {str(HERE)!r})
        import envs_for_tests as e
        from bray.envs import EnvConfig, make_vec
        print("script runs", flush=True)
        v = make_vec(EnvConfig(e.Scripted, num_envs=2, vector="subprocess", num_processes=2,
                               per_env=[{{"fault": "hang"}}, {{}}]), seed=0)
        v.reset()
        print(*v.process_ids, flush=True)
        for _ in range(3):
            v.step([0, 0])
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "script runs\n"
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert parent.stdout.read() == ""  # ends when the workers, who inherited the pipe, have ended
    for pid in pids:
        for _ in range(2000):
            if gone(pid):
                break
            os.sched_yield()
        assert gone(pid)


def test_render_and_spec_come_from_the_environments():
    for form in ("inprocess", "native", "subprocess"):
        with make_vec(EnvConfig("CartPole-v1", num_envs=2, vector=form), seed=0, render_mode="rgb_array") as v:
            v.reset()
            assert v.render().shape == (400, 600, 3)
            assert v.spec.num_actions == 2
            assert v.spec.max_episode_steps == 500
