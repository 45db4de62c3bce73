"""What reaches a recording's inputs, and how Adam is done on a GPU; both on the CPU, where they are the same code."""

import os
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from bray.capture.replay import Copies, Results
from bray.capture.transfer import to_device, to_host
from bray.experiment import Experiment
from bray.inference.torch_engine import TorchEngine
from bray.optim import Optimizer
from bray.spec import EnvSpec, Space
from bray.train.local import threads_for
from bray.train.rollout import EnvSource


def test_an_input_that_has_not_changed_is_copied_once():
    static = [torch.zeros(1 << 18), torch.zeros(3)]
    copies = Copies(static)
    columns, index = torch.ones(1 << 18), torch.tensor([1.0, 2.0, 3.0])
    copies.take([columns, index])
    assert static[0].eq(1).all()
    assert static[1].tolist() == [1, 2, 3]
    static[0][7] = 5.0  # stays only where nothing is copied
    copies.take([columns, index + 1])
    assert static[0][7] == 5
    assert static[1].tolist() == [2, 3, 4]
    columns[0] = 9.0  # changed in place
    copies.take([columns, index])
    assert static[0][0] == 9
    assert static[0][7] == 1
    static[0][7] = 5.0
    copies.take([columns.clone(), index])  # another tensor
    assert static[0][7] == 1


def test_results_are_copies_with_their_shapes():
    made = [torch.tensor(1.0), torch.tensor([[2.0]]), torch.arange(3.0), torch.tensor(4)]
    got = Results(made).copy()
    assert [x.tolist() for x in got] == [1.0, [[2.0]], [0.0, 1.0, 2.0], 4]
    for x in made:
        x.zero_()
    assert [x.tolist() for x in got] == [1.0, [[2.0]], [0.0, 1.0, 2.0], 4]


def test_arrays_to_a_device_and_back():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert to_host([to_device(torch.from_numpy(x), torch.device("cpu"))])[0].tolist() == x.tolist()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_in_one_kernel_is_adam(weight_decay):
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        x, y = torch.randn(32, 5), torch.randn(32, 1)
        model = nn.Linear(5, 1)
        optimizer = Optimizer(model.parameters(), 1e-2, max_grad_norm=0.5, weight_decay=weight_decay)
        optimizer.fused = fused
        for step in range(20):
            optimizer.set_lr(1e-2 / (1 + step))
            optimizer.step((model(x) - y).square().mean())
        ends.append(optimizer.flat.clone())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-7)


def test_few_threads_where_a_gpu_computes(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    choices = Space("discrete", n=(6,), start=(0,))
    pictures, vectors = (EnvSpec("e", Space("box", shape), choices) for shape in ((4, 84, 84), (4,)))
    assert [threads_for(pictures, torch.device(name)) for name in ("cpu", "cuda")] == [16, 4]
    assert [threads_for(vectors, torch.device(name)) for name in ("cpu", "cuda")] == [1, 1]


class Noise(gym.Env):
    """Random pictures, and a reward for doing what the first pixel says."""

    observation_space = gym.spaces.Box(0, 255, (3, 32, 32), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._look(), {}

    def step(self, action):
        reward = float(action == self._obs[0, 0, 0] % 2)
        return self._look(), reward, bool(self.np_random.random() < 0.1), False, {}

    def _look(self):
        self._obs = self.np_random.integers(0, 256, (3, 32, 32), np.uint8)
        return self._obs


@pytest.mark.parametrize("run", ["PPO", "A2C", "APPO", "IMPALA", "PQN"])
@pytest.mark.parametrize("shared", [True, False])
def test_pictures_that_stay_on_the_device_are_learnt_as_those_that_do_not(run, shared, monkeypatch, tmp_path):
    """With the CPU in the place of a GPU: what was sent for acting is what the Learner gets, and it learns the same
    from it."""
    make = TorchEngine.__init__

    def on_a_device(engine, *args, **more):
        make(engine, *args, **more)
        engine.on_cpu = False

    ends, pieces = [], []
    for stays in (False, True):
        if stays:
            monkeypatch.setattr(TorchEngine, "__init__", on_a_device)
            monkeypatch.setattr(EnvSource, "sends_pictures", lambda source: True)
        config = {"num_envs": 2, "rollout_length": 8, "iteration_steps": 16, "record": False, "threads": 1}
        config |= {"vf_share_layers": shared, "conv_filters": [[4, 4, 4]], "export_graph_after_s": None}
        config |= {"epochs": 1, "minibatches": 2} if run in ("PPO", "APPO", "PQN") else {}
        exp = Experiment(run, Noise, path=tmp_path / str(stays), seed=0, config=config)
        for _ in range(2):
            exp.training.iterate()
        ends.append({k: v.copy() for k, v in exp.training.weights().items()})
        pieces.append(exp.training.sources[0].gather()[0][0])
        exp.close()
    assert pieces[0].on_device is None
    kept = pieces[1]
    assert np.array_equal(kept.seen.numpy(), kept.obs)
    assert not kept.obs.flags.writeable
    others = kept.obs + 1
    assert replace(kept, obs=others).seen is others  # not what the GPU has of the first ones
    for name, weight in ends[0].items():
        assert np.array_equal(weight, ends[1][name]), name
