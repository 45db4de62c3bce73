"""How a process computes: threads, and numbers that are too small to be normal ones."""

import torch

import bray
from bray.train.device import tiny_as_zero


def tiny() -> float:
    return float(torch.full((1,), 2e-38).mul(0.1))


def test_tiny_numbers_are_zero_inside_and_themselves_outside():
    with tiny_as_zero():
        assert tiny() == 0.0
    assert tiny() > 0.0
    torch.set_flush_denormal(True)
    try:
        with tiny_as_zero():
            pass
        assert tiny() == 0.0  # a user's choice for the whole process stays
    finally:
        torch.set_flush_denormal(False)


def test_an_update_takes_tiny_numbers_as_zero_and_acting_does_not(tmp_path):
    seen = {}
    exp = bray.Experiment(
        "PPO", "CartPole-v1", use_preset=False, path=tmp_path / "run", config={"rollout_length": 16, "minibatches": 2}
    )
    learner, policy = exp.training.learner, exp.training.rollout.policy
    update, act = learner.update, policy.act

    def watched(name, call):
        def run(*given):
            seen[name] = tiny()
            return call(*given)

        return run

    learner.update, policy.act = watched("update", update), watched("act", act)
    exp.training.iterate()
    exp.close()
    assert seen["update"] == 0.0
    assert seen["act"] > 0.0
