"""How a process computes: threads, and numbers that are too small to be normal ones."""

import platform
import resource

import numpy as np
import pytest
import torch

import bray
from bray.train.device import keep_freed_memory, tiny_as_zero


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such settings")
def test_a_process_that_learns_keeps_what_it_frees():
    keep_freed_memory()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        arrays = [np.ones(4_000_000, np.float32) for _ in range(5)]  # of 3,900 pages each
        assert all(x[-1] == 1.0 for x in arrays)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert min(faults() for _ in range(10)) < 1_000
