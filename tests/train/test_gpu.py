"""What only a CUDA GPU does; skipped where there is none."""

import numpy as np
import pytest
import torch
from torch import nn

from bray import Experiment
from bray.capture import capture
from bray.optim import Optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")

DEVICE = "cuda"
SIZES = {
    "small": (3, 64, 7),
    "one large": (33, 1_200_001, 5),
    "large ones beside each other": (300_001, 300_003),
    "several launches": (5, 4_000_003),
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_adam_over_cut_arrays_equals_a_float64_loop(sizes, recorded):
    rng = np.random.default_rng(0)
    start = [rng.normal(size=n) for n in sizes]
    pulls = [rng.normal(size=n) for n in sizes]
    params = [nn.Parameter(torch.tensor(x, dtype=torch.float32, device=DEVICE)) for x in start]
    targets = [torch.tensor(x, dtype=torch.float32, device=DEVICE) for x in pulls]
    unused = nn.Parameter(torch.ones(9, device=DEVICE))
    optimizer = Optimizer([*params, unused], 0.01)

    def loss_and_step(scale):
        loss = sum((scale * (p - t).square()).sum() for p, t in zip(params, targets, strict=True))
        return optimizer.step(loss)

    step = capture(loss_and_step, enabled=recorded)
    scales = [0.5, 2.0, 1.0, 0.25]
    for scale in scales:
        step(torch.tensor(scale, device=DEVICE))
    assert step.recordings == int(recorded)

    for p, x, pull in zip(params, start, pulls, strict=True):
        m, v = np.zeros_like(x), np.zeros_like(x)
        for k, scale in enumerate(scales, 1):
            g = 2.0 * scale * (x - pull)
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g * g
            x = x - 0.01 * (m / (1 - 0.9**k)) / (np.sqrt(v / (1 - 0.999**k)) + 1e-8)
        np.testing.assert_allclose(p.detach().cpu().numpy(), x, rtol=1e-4, atol=1e-5)
    assert torch.equal(unused.detach().cpu(), torch.ones(9))


@pytest.mark.parametrize(
    ("run", "env", "more"),
    [
        ("PPO", "CartPole-v1", {}),
        ("DQN", "CartPole-v1", {"learning_starts": 500}),
        ("SAC", "Pendulum-v1", {"learning_starts": 500}),
    ],
)
def test_training_on_the_gpu_records_its_updates(run, env, more):
    exp = Experiment(run, env, device=DEVICE, num_envs=4, use_preset=False, config=more)
    for _row in exp.train({"env_steps_total": 3000}, show=False):
        pass
    learner = exp.training.learner
    assert learner.is_recorded
    for x in learner.model.parameters():
        assert x.device.type == DEVICE
        assert torch.isfinite(x).all()
    exp.close()


def test_two_learners_that_share_a_gpu_learn_recorded_what_they_learn_eagerly():
    weights = {}
    for record in (False, True):
        config = {"num_learners": 2, "num_envs": 4, "rollout_length": 32, "minibatches": 2, "record": record}
        with Experiment("PPO", "CartPole-v1", device=DEVICE, seed=1, use_preset=False, config=config) as exp:
            assert list(exp.train({"training_iteration": 3}))
            assert exp.training.learner.is_recorded == record
            assert exp.training.agree
            weights[record] = exp.training.weights()
    for name, x in weights[False].items():
        np.testing.assert_allclose(weights[True][name], x, rtol=1e-3, atol=1e-4, err_msg=name)
