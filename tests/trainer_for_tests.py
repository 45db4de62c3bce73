"""A model and buffers in memory, with the methods of the remote ones, and small trainings on them."""

import copy
import threading

import numpy as np
import torch
from torch import nn

from bray.errors import ConfigError
from bray.inference.host import Promise
from bray.remote.algo import algo_setup
from bray.remote.trainer.base import LossLearner, Trainer
from bray.remote.trainer.drive import Drive, Settings
from bray.remote.trainer.ranks import Ranks


class MemoryModel:
    """What a trainer needs of a RemoteModel."""

    name = "m"

    def __init__(self, module, step=0):
        self.module, self.step = module, step
        self.published = []
        self.held = None  # a Promise that publishing waits for
        self.fails = 0

    def get_model(self):
        return copy.deepcopy(self.module)

    def get_weights(self):
        return {k: v.numpy().copy() for k, v in self.module.state_dict().items()}, self.step

    def publish_weights(self, weights, step=None):
        if step < self.step:
            raise ConfigError(f"model is at step {self.step} already")
        promise = Promise()
        promise.set_running_or_notify_cancel()
        self.published.append(step)
        self.step = step
        self.module.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()})
        if self.held is not None:
            self.held.add_done_callback(lambda _: promise.set_result(step))
        else:
            promise.set_result(step)
        return promise


class MemoryBuffer:
    """Batches of a list, or of a function of their number; what is asked for after the last one never comes."""

    def __init__(self, batches, name="b", end=False):
        self.name, self.end = name, end
        self.make = batches if callable(batches) else lambda i: batches[i] if i < len(batches) else None
        self.taken = 0
        self.more = threading.Event()
        self.priorities = []

    def __iter__(self):
        return self

    def __next__(self):
        batch = self.make(self.taken)
        if batch is None:
            if self.end:
                raise StopIteration
            self.more.wait()
            return next(self)
        self.taken += 1
        return batch

    def update_priorities(self, ids, priorities):
        self.priorities.append((ids, priorities))


def net(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))


def batch_of(i, rows=4):
    rng = np.random.default_rng(i)
    x = rng.standard_normal((rows, 3)).astype(np.float32)
    return {"x": x, "y": x[:, :2] * 2.0 - 1.0}


class Regression(Trainer):
    def loss(self, replay, step):
        return (self.model(replay["x"]) - replay["y"]).square().mean()


def drive_of(
    cls=Regression,
    buffers=None,
    remote=None,
    *,
    path=None,
    ranks=None,
    config=None,
    rate=0.01,
    norm=1.0,
    merge=None,
    **settings,
):
    """A Drive over things in memory."""
    remote = remote or MemoryModel(net())
    ranks = ranks or Ranks()
    learner = LossLearner(cls, "t", config or {"t": {}}, remote.get_model(), ranks, rate, norm)
    buffers = buffers or [MemoryBuffer(batch_of)]
    extra = {} if merge is None else {"merge": merge}
    evaluation = settings.pop("eval_buffer", None)
    return Drive(
        "t",
        learner,
        remote,
        {b.name: b for b in buffers},
        Settings(**settings),
        eval_buffer=evaluation,
        run_path=path,
        ranks=ranks,
        **extra,
    )


def weights(module):
    return {k: v.detach().numpy().copy() for k, v in module.state_dict().items()}


def same(a, b, tolerance=0.0):
    return a.keys() == b.keys() and all(np.allclose(a[k], b[k], rtol=0, atol=tolerance) for k in a)


# --- algorithms' Learners ---------------------------------------------------------------------------------------------


def setup_of(algorithm, env, **settings):
    return algo_setup({"algorithm": algorithm, "env": env, "settings": settings, "model": {"fcnet_hiddens": [16]}})


def right_action(obs):
    """What the toy game rewards: CartPole's spaces, and the sign of a number."""
    return (obs[:, 0] > 0).astype(np.int64)


class ToyRollouts:
    """On-policy batches of single decisions, drawn with the newest published weights."""

    name = "b"

    def __init__(self, setup, remote, rows=128, seed=0, batches=None):
        self.setup, self.remote, self.rows, self.batches = setup, remote, rows, batches
        self.policy, self.rng = setup.make_policy(), np.random.default_rng(seed)
        self.rewards = []

    def __iter__(self):
        return self

    def __next__(self):
        if self.batches is not None and len(self.rewards) >= self.batches:
            raise StopIteration
        obs = self.rng.standard_normal((self.rows, 4)).astype(np.float32)
        with torch.no_grad():
            outputs = {k: v.numpy() for k, v in self.remote.module(torch.from_numpy(obs)).items()}
        action, extras = self.policy.act(outputs, obs, self.rng, 0)
        reward = (action == right_action(obs)).astype(np.float32)
        self.rewards.append(float(reward.mean()))
        weight = np.ones(self.rows, np.float32)
        weight[-8:] = 0.0  # rows that are no decisions
        return {
            "obs": obs,
            "action": extras["action"],
            "logp": extras["logp"],
            "value": outputs["value"],
            "advantage": reward - outputs["value"],
            "target": reward,
            "weight": weight,
        }


def transitions(i, rows=16, actions=None):
    """A batch of replayed transitions of CartPole, or of Pendulum where `actions` is its action's size."""
    rng = np.random.default_rng(i)
    size = 4 if actions is None else 3
    action = rng.integers(0, 2, rows) if actions is None else rng.uniform(-1, 1, (rows, actions)).astype(np.float32)
    return {
        "obs": rng.standard_normal((rows, size)).astype(np.float32),
        "next_obs": rng.standard_normal((rows, size)).astype(np.float32),
        "action": action,
        "reward": rng.standard_normal(rows).astype(np.float32),
        "discount": np.full(rows, 0.99, np.float32),
        "weight": np.ones(rows, np.float32),
        "id": np.stack([np.zeros(rows, np.int64), np.full(rows, i), np.arange(rows)], 1),
    }


def learner_drive(setup, remote, buffers, *, ranks=None, path=None, **settings):
    ranks = ranks or Ranks()
    learner = setup.make_learner(remote.get_model(), seed=ranks.rank, record=ranks.size == 1)
    env_steps = (lambda rows, steps: rows) if setup.config.on_policy else (lambda rows, steps: setup.env_steps(steps))
    return Drive(
        "t",
        learner,
        remote,
        {b.name: b for b in buffers},
        Settings(**settings),
        ranks=ranks,
        run_path=path,
        env_steps=env_steps,
    )
