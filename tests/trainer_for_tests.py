"""A model and buffers in memory, with the methods of the remote ones, and small trainings on them."""

import copy
import threading
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from bray.act import SAMPLE, Clock, Tick
from bray.data.experience import Batch, EndOfData, Experience
from bray.data.piece import Piece
from bray.data.rows import to_samples
from bray.errors import ConfigError
from bray.inference.host import Promise
from bray.remote.algo import algo_setup
from bray.remote.trainer import worker
from bray.remote.trainer.base import Trainer
from bray.remote.trainer.drive import RankDriver, Settings
from bray.train.ranks import Ranks
from bray.train.side import Side


class MemoryModel:
    """What a trainer needs of a RemoteModel."""

    name = "m"

    def __init__(self, module, step=0):
        self.module, self.step, self.env_steps = module, step, 0
        self.published = []
        self.held = None  # a Promise that publishing waits for
        self.fails = 0

    def get_model(self):
        return copy.deepcopy(self.module)

    def get_weights(self):
        return {k: v.numpy().copy() for k, v in self.module.state_dict().items()}, self.step

    def publish_weights(self, weights, step=None, env_steps=0):
        if step < self.step:
            raise ConfigError(f"model is at step {self.step} already")
        promise = Promise()
        self.published.append(step)
        self.step, self.env_steps = step, env_steps
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
    """A driver of a `bray.Trainer` over things in memory."""
    remote = remote or MemoryModel(net())
    buffers = buffers or [MemoryBuffer(batch_of)]
    place = {} if merge is None else {"merge": merge}
    evaluation = settings.pop("eval_buffer", None)
    plan = worker.TrainPlan(
        "t",
        trainer=cls,
        config=config or {"t": {}},
        settings=Settings(learning_rate=rate, clip_grad_max_norm=norm, **settings),
    )
    return worker.assemble(
        plan,
        remote.get_model(),
        remote,
        {b.name: b for b in buffers},
        evaluation,
        ranks=ranks or Ranks(),
        run_path=path,
        **place,
    )


def weights(module):
    return {k: v.detach().numpy().copy() for k, v in module.state_dict().items()}


def same(a, b, tolerance=0.0):
    return a.keys() == b.keys() and all(np.allclose(a[k], b[k], rtol=0, atol=tolerance) for k in a)


# --- algorithms' Learners ---------------------------------------------------------------------------------------------


def section_of(algorithm, env, **settings):
    return {"algorithm": algorithm, "env": env, "settings": settings, "model": {"fcnet_hiddens": [16]}}


def setup_of(algorithm, env, **settings):
    """An AlgoSetup, and the section that it is made of."""
    section = section_of(algorithm, env, **settings)
    setup = algo_setup(section)
    object.__setattr__(setup, "section", section)
    return setup


def right_action(obs):
    """What the toy game rewards: CartPole's spaces, and the sign of a number."""
    return (obs[:, 0] > 0).astype(np.int64)


EPISODE = 15
"""Decisions of an episode of the toy game."""


def toy_piece(obs, extras, outputs, reward):
    """Rows of one game as a piece: episodes of EPISODE decisions, each with its final observation behind it. `obs` has
    one row more."""
    dead = np.arange(len(obs)) % (EPISODE + 1) == EPISODE
    ends = np.append(dead[1:], False)
    t = len(reward)
    extras = {k: v[:t, None] for k, v in extras.items()}
    return Piece(
        obs=obs[:, None],
        action=extras.pop("action"),
        reward=np.where(dead[:t], np.float32(0), reward.astype(np.float32))[:, None],
        terminated=(ends & ~dead)[:t, None],
        truncated=np.zeros((t, 1), bool),
        valid=~dead[:t, None],
        first=np.append(True, dead[:-1])[:, None],
        outputs={k: v[:, None] for k, v in outputs.items()},
        extras=extras,
        stream=np.array([7]),
    )


class ToyRollouts:
    """On-policy samples of decisions that are rewarded at once (for gamma = 0), drawn with the newest published
    weights. Each batch is the rollout of one update."""

    name = "b"

    def __init__(self, setup, remote, rows=128, seed=0, batches=None, scale=1.0):
        self.scale, self.setup, self.remote, self.rows, self.batches = scale, setup, remote, rows, batches
        self.settings = SimpleNamespace(batch_size=rows, store="queue")
        self.policy, self.rng = setup.make_policy(), np.random.default_rng(seed)
        self.origin, self.steps = 100 + seed, 0
        self.rewards = []

    def __iter__(self):
        return self

    def __next__(self):
        if self.batches is not None and len(self.rewards) >= self.batches:
            raise StopIteration
        obs = self.rng.standard_normal((self.rows, 4)).astype(np.float32)
        with torch.no_grad():
            outputs = {k: v.numpy() for k, v in self.remote.module(torch.from_numpy(obs)).items()}
        action, extras = self.policy.act(outputs, Tick(obs), self.rng, SAMPLE, Clock())
        reward = self.scale * (action == right_action(obs)).astype(np.float32)
        self.rewards.append(float(reward.mean()))
        kept = {k: outputs[k] for k in self.policy.keeps}
        piece = toy_piece(obs, extras, kept, reward[:-1])
        self.steps += int(piece.valid.sum())
        return to_samples(piece, self.origin, self.steps, ())


def played(i, rows=17, actions=None):
    """Samples of a game that was played at random: CartPole, or Pendulum where `actions` is its action's size."""
    rng = np.random.default_rng(i)
    size = 4 if actions is None else 3
    action = rng.integers(0, 2, rows) if actions is None else rng.uniform(-1, 1, (rows, actions)).astype(np.float32)
    obs = rng.standard_normal((rows, size)).astype(np.float32)
    piece = toy_piece(obs, {"action": action}, {}, rng.standard_normal(rows - 1).astype(np.float32))
    return to_samples(piece, 1, (i + 1) * int(piece.valid.sum()), ())


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


class Given(Experience):
    """Batches of a function of their number; remembers what comes back."""

    def __init__(self, make, batches=None):
        self.make, self.batches = make, batches
        self.given, self.priorities = 0, []

    def next(self, clock, timeout=0.0):
        if self.given == self.batches:
            raise EndOfData("all batches are given")
        data = self.make(self.given)
        self.given += 1
        return Batch(data, len(data["reward"]), data["id"])

    def feedback(self, batch, priorities, version):
        self.priorities.append((batch.ids, priorities, version))


def learner_drive(setup, remote, buffers, *, ranks=None, path=None, merge=lambda *a, **k: None, **settings):
    """A driver of an algorithm's Learner over samples in memory, or over the batches of an experience of the test's
    own."""
    ranks = ranks or Ranks()
    if isinstance(buffers, Experience):
        learner = setup.make_learner(remote.get_model(), seed=ranks.rank, record=ranks.size == 1)
        side = Side(learner.model, setup.make_policy(), buffers, learner, config=setup.config)
        return RankDriver("t", side, [], remote, Settings(**settings), ranks=ranks, run_path=path, merge=merge)
    plan = worker.TrainPlan("t", config={"t": {"algo": setup.section}}, settings=Settings(**settings))
    by_name = {b.name: b for b in buffers}
    return worker.assemble(plan, remote.get_model(), remote, by_name, ranks=ranks, run_path=path, merge=merge)
