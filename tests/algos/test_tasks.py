"""The small tasks of benchmarks/learning: what the best and the worst policy get."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from benchmarks.learning.__main__ import CASES
from benchmarks.learning.tasks import Chain, Cue, MaskedCartPole


def play(env, policy, seed=0):
    """Return, length and the observations of one episode."""
    obs, _ = env.reset(seed=seed)
    seen, total, ended = [obs], 0.0, False
    while not ended:
        obs, reward, terminated, truncated, _ = env.step(policy(seen))
        seen.append(obs)
        total, ended = total + reward, terminated or truncated
    return total, len(seen) - 1, seen


@pytest.mark.parametrize("task", [Cue, Chain])
def test_they_are_environments(task):
    check_env(task(), skip_render_check=True)


def test_a_cue_is_asked_for_twenty_steps_later_and_not_shown_again():
    answers = set()
    for seed in range(8):
        right, length, seen = play(Cue(), lambda seen: int(seen[0][0] > 0), seed)
        wrong, _, _ = play(Cue(), lambda seen: int(seen[0][0] < 0), seed)
        assert (right, wrong, length) == (1.0, -1.0, 21)
        assert np.array(seen)[1:20].tolist() == [[0.0, 0.0]] * 19  # nothing to see on the way
        assert seen[20].tolist() == [0.0, 1.0]
        answers.add(float(seen[0][0]))
    assert answers == {-1.0, 1.0}


def test_a_chain_pays_those_who_go_right_all_the_way():
    chain = Chain()
    assert play(chain, lambda seen: chain.right[seen[-1]])[:2] == (11.0, 59)
    assert play(chain, lambda seen: 1 - chain.right[seen[-1]])[0] == pytest.approx(0.058)
    rng = np.random.default_rng(0)
    for policy in (lambda seen: 0, lambda seen: 1, lambda seen: rng.integers(2)):
        assert play(chain, policy)[0] < 0.1


def test_velocities_are_hidden():
    masked = MaskedCartPole()
    obs, _ = masked.reset(seed=3)
    full = masked.unwrapped.state
    np.testing.assert_allclose(obs, [full[0], full[2]], rtol=1e-6)
    assert masked.observation_space.shape == (2,)


def test_a_control_is_its_case_without_one_thing():
    for with_, without in (("ppo-chain-rnd", "ppo-chain"), ("ppo-mountaincar-rnd", "ppo-mountaincar")):
        assert (CASES[with_].must, CASES[without].must) == ("reach", "stay below")
        assert (CASES[with_].target, CASES[with_].limit) == (CASES[without].target, CASES[without].limit)
        assert {**CASES[without].config, "rnd": 0} == {**CASES[with_].config, "rnd": 0}
