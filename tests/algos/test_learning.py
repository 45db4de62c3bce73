"""Slow: the presets reach their reference scores (one seed each; `python -m benchmarks.learning` does all seeds)."""

import importlib.util

import pytest

from benchmarks.learning.__main__ import CASES, train


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_preset_reaches_its_score(tmp_path, name):
    if "lunarlander" in name and importlib.util.find_spec("Box2D") is None:
        pytest.skip("needs Box2D: make box2d")
    if CASES[name].env.startswith(("HalfCheetah", "Hopper")) and importlib.util.find_spec("mujoco") is None:
        pytest.skip("needs MuJoCo: pip install 'bray-rl[mujoco]'")
    if CASES[name].env.startswith("openspiel:"):
        pytest.importorskip("pyspiel")
    result = train(CASES[name], 7, tmp_path / "run")  # a seed that no preset was tuned on
    assert result["passed"], result
    assert result["env_steps"] <= CASES[name].limit + 5_000
