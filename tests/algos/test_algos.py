"""Losses against independent float64 loops, options that change what they say, and small problems that must be
solved."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from bray import tree
from bray.act import Clock
from bray.algos import a2c, algo_name, appo, dqn, get_algo, ppo, sac
from bray.algos.base import to_torch
from bray.algos.packing import pack, piece_size, take, unpack
from bray.algos.rows import minibatches
from bray.envs.config import EnvConfig
from bray.errors import ConfigError, UnknownName
from bray.experiment import Experiment
from bray.nn.catalog import ModelConfig
from bray.spec import EnvSpec, Space
from bray.train.config import RunConfig
from bray.train.local import LocalTraining

DISCRETE = EnvSpec("test", Space("box", (3,)), Space("discrete", n=(4,), start=(0,)))
CONTINUOUS = EnvSpec("test", Space("box", (3,)), Space("box", (2,), "float32", -1.0, 1.0))
BOTH = EnvSpec("test", Space("box", (3,)), Space("tuple", parts=(DISCRETE.action, CONTINUOUS.action)))
SMALL = ModelConfig(fcnet_hiddens=(8,))
FALLS = {"kind": "linear", "start": 0.2, "end": 0.0, "steps": 2048}


def make(algo, spec, config=None, **options):
    torch.manual_seed(0)
    config = config or algo.Config(**options)
    model = algo.make_model(config, spec, SMALL)
    return config, model, algo.Learner(config, spec, model, SMALL, seed=0)


def rollout_batch(n=32, seed=0):
    rng = np.random.default_rng(seed)
    f = lambda *s: rng.normal(size=s).astype(np.float32)  # noqa: E731
    return {
        "obs": f(n, 3),
        "action": rng.integers(0, 4, n),
        "logp": -np.abs(f(n)) - 0.5,
        "value": f(n),
        "advantage": f(n),
        "target": f(n),
        "weight": (rng.random(n) < 0.8).astype(np.float32),
    }


def named(batch):
    """The rows as a gradient step gets them."""
    return unpack(to_torch(pack(batch), torch.device("cpu")))


def slow_ppo(outputs, batch, clip, dual_clip=None, clip_value=None):
    """One row at a time, in float64: policy loss, value loss, entropy, kl, clip fraction."""
    sums, count = np.zeros(5), 0.0
    for i in range(len(batch["weight"])):
        if batch["weight"][i] == 0:
            continue
        count += 1
        logits = outputs["dist"][i].astype(np.float64)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        ratio = np.exp(np.log(p[batch["action"][i]]) - float(batch["logp"][i]))
        a = float(batch["advantage"][i])
        gain = min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a)
        if dual_clip is not None and a < 0:
            gain = max(gain, dual_clip * a)
        v, target, old = float(outputs["value"][i]), float(batch["target"][i]), float(batch["value"][i])
        error = (v - target) ** 2
        if clip_value is not None:
            error = max(error, (old + min(max(v - old, -clip_value), clip_value) - target) ** 2)
        kl = (ratio - 1) - np.log(ratio)
        sums += [-gain, 0.5 * error, -(p * np.log(p)).sum(), kl, abs(ratio - 1) > clip]
    return sums / count


@pytest.mark.parametrize("options", [{}, {"dual_clip": 2.0}, {"clip_value": 0.1}, {"clip": 0.05}])
def test_ppo_losses_equal_an_independent_loop(options):
    config, model, learner = make(ppo, DISCRETE, minibatches=1, **options)
    batch = rollout_batch()
    outputs = {k: v.detach().numpy() for k, v in model(torch.from_numpy(batch["obs"])).items()}
    got = learner.gradient_step(named(batch)).metrics
    expected = slow_ppo(outputs, batch, config.clip, config.dual_clip, config.clip_value)
    names = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction")
    np.testing.assert_allclose([got[k] for k in names], expected, rtol=1e-4, atol=1e-5)


def test_ppo_gradient_equals_finite_differences():
    """The step goes down the loss that the independent loop computes: its directional derivative along the gradient is
    -|g|^2."""
    config, model, learner = make(ppo, DISCRETE, minibatches=1, max_grad_norm=None, entropy_coef=0.05)
    batch = rollout_batch()

    def loss():
        with torch.no_grad():
            outputs = {k: v.numpy() for k, v in model(torch.from_numpy(batch["obs"])).items()}
        policy, value, entropy, _, _ = slow_ppo(outputs, batch, config.clip)
        return policy + config.value_coef * value - config.entropy_coef * entropy

    flat, start = learner.optimizer.flat, learner.optimizer.flat.clone()
    learner.gradient_step(named(batch))
    grad = learner.optimizer.m / 0.1  # after one step of Adam from zero
    with torch.no_grad():
        direction = grad / grad.norm()
        flat.copy_(start + 1e-3 * direction)
        up = loss()
        flat.copy_(start - 1e-3 * direction)
        down = loss()
    assert (up - down) / 2e-3 == pytest.approx(float(grad.norm()), rel=2e-2)


@pytest.mark.parametrize("algo", [ppo, appo])
def test_noise_of_continuous_actions_earns_no_bonus_by_default(algo):
    for spec, expected in ((DISCRETE, 0.01), (CONTINUOUS, 0.0), (BOTH, 0.01)):
        assert float(make(algo, spec)[2].entropy_coef) == pytest.approx(expected)
    assert float(make(algo, CONTINUOUS, entropy_coef=0.02)[2].entropy_coef) == pytest.approx(0.02)


def test_rows_of_weight_zero_change_nothing():
    batch = rollout_batch()
    other = {k: v.copy() for k, v in batch.items()}
    dead = batch["weight"] == 0
    other["advantage"][dead] = 1e6
    other["target"][dead] = -1e6
    results = []
    for b in (batch, other):
        _, _, learner = make(ppo, DISCRETE, minibatches=1)
        learner.gradient_step(named(b))
        results.append(learner.optimizer.flat.clone())
    assert torch.equal(*results)


def test_a2c_losses_equal_an_independent_loop():
    _, model, learner = make(a2c, DISCRETE)
    batch = rollout_batch()
    with torch.no_grad():
        out = {k: v.numpy().astype(np.float64) for k, v in model(torch.from_numpy(batch["obs"])).items()}
    rows = [i for i in range(32) if batch["weight"][i]]
    logp = out["dist"] - np.log(np.exp(out["dist"]).sum(-1, keepdims=True))
    policy = np.mean([-logp[i, batch["action"][i]] * batch["advantage"][i] for i in rows])
    value = np.mean([0.5 * (out["value"][i] - batch["target"][i]) ** 2 for i in rows])
    got = learner.gradient_step(named(batch)).metrics
    np.testing.assert_allclose([got["policy_loss"], got["value_loss"]], [policy, value], rtol=1e-4)


def replay_batch(spec, n=16, seed=0):
    rng = np.random.default_rng(seed)
    f = lambda *s: rng.normal(size=s).astype(np.float32)  # noqa: E731
    discrete = spec.action.kind == "discrete"
    return {
        "obs": f(n, 3),
        "next_obs": f(n, 3),
        "action": rng.integers(0, 4, n) if discrete else np.tanh(f(n, 2)),
        "reward": f(n),
        "discount": np.where(rng.random(n) < 0.3, 0.0, 0.9).astype(np.float32),
        "weight": rng.uniform(0.2, 1.0, n).astype(np.float32),
        "id": np.arange(n),
    }


@pytest.mark.parametrize(("double", "huber"), [(True, None), (False, 1.0)])
def test_dqn_loss_and_priorities_equal_an_independent_loop(double, huber):
    _, model, learner = make(dqn, DISCRETE, double=double, huber=huber, prioritized=True)
    with torch.no_grad():  # a target network that differs
        generator = torch.Generator().manual_seed(1)
        for p in learner.target.module.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    batch = replay_batch(DISCRETE)
    with torch.no_grad():
        q = model(torch.from_numpy(batch["obs"]))["q"].double().numpy()
        online = model(torch.from_numpy(batch["next_obs"]))["q"].double().numpy()
        target = learner.target(torch.from_numpy(batch["next_obs"]))["q"].double().numpy()
    errors, loss = [], 0.0
    for i in range(16):
        best = (online if double else target)[i].argmax()
        error = q[i, batch["action"][i]] - (batch["reward"][i] + batch["discount"][i] * target[i, best])
        errors.append(abs(error))
        loss += batch["weight"][i] * (0.5 * error**2 if huber is None or abs(error) <= 1 else abs(error) - 0.5) / 16
    update = learner.update(batch, Clock())
    assert update.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    np.testing.assert_allclose(update.priorities, errors, rtol=1e-4, atol=1e-5)


def weights_of(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_dqn_target_copies_every_period_or_follows():
    _, _, learner = make(dqn, DISCRETE, target_period=3)
    for n in range(1, 7):
        learner.update(replay_batch(DISCRETE, seed=n), Clock())
        assert torch.equal(weights_of(learner.target.module), weights_of(learner.model)) == (n % 3 == 0)
    _, _, learner = make(dqn, DISCRETE, tau=0.5)
    before = weights_of(learner.target.module)
    learner.update(replay_batch(DISCRETE), Clock())
    torch.testing.assert_close(weights_of(learner.target.module), before.lerp(weights_of(learner.model), 0.5))


def test_sac_critic_loss_equals_an_independent_loop():
    _, model, learner = make(sac, CONTINUOUS)
    batch = replay_batch(CONTINUOUS)
    noise = np.random.default_rng([0, 1]).standard_normal((2, 16, 2), np.float32)  # what the learner will draw
    with torch.no_grad():
        dist = model(torch.from_numpy(batch["next_obs"]))["dist"].double().numpy()
        mean, log_std = dist[:, :2], dist[:, 2:]
        u = mean + np.exp(log_std) * noise[1]
        a = np.tanh(u)
        logp = (-0.5 * noise[1].astype(np.float64) ** 2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - a**2)).sum(-1)
        obs, next_obs = torch.from_numpy(batch["obs"]), torch.from_numpy(batch["next_obs"])
        q_next = learner.target(next_obs, torch.from_numpy(a.astype(np.float32))).double().numpy().min(0) - 0.2 * logp
        q = learner.critic(obs, torch.from_numpy(batch["action"])).double().numpy()
    y = batch["reward"] + batch["discount"] * q_next
    loss = sum(0.5 * np.mean(batch["weight"] * (q[k] - y) ** 2) for k in range(2))
    update = learner.update(batch, Clock())
    assert update.metrics["critic_loss"] == pytest.approx(loss, rel=1e-3)
    assert update.metrics["alpha"] == pytest.approx(0.2, rel=1e-5)


def test_sac_temperature_moves_towards_the_target_entropy():
    for target, sign in ((-50.0, -1), (50.0, 1)):  # far less, far more random than any policy here
        _, _, learner = make(sac, CONTINUOUS, target_entropy=target)
        before = learner.log_alpha.item()
        learner.update(replay_batch(CONTINUOUS), Clock())
        assert np.sign(learner.log_alpha.item() - before) == sign
    _, _, learner = make(sac, CONTINUOUS, adapt_alpha=False)
    learner.update(replay_batch(CONTINUOUS), Clock())
    assert learner.log_alpha.exp().item() == pytest.approx(0.2)


@pytest.mark.optimizes
@pytest.mark.parametrize(
    ("algo", "spec", "batch"),
    [
        (ppo, DISCRETE, rollout_batch()),
        (a2c, DISCRETE, rollout_batch()),
        (dqn, DISCRETE, replay_batch(DISCRETE)),
        (sac, CONTINUOUS, replay_batch(CONTINUOUS)),
    ],
    ids=["ppo", "a2c", "dqn", "sac"],
)
def test_a_recorded_learner_equals_an_eager_one(algo, spec, batch):
    flats = []
    for record in (True, False):
        torch.manual_seed(0)
        config = algo.Config()
        model = algo.make_model(config, spec, SMALL)
        learner = algo.Learner(config, spec, model, SMALL, seed=0, record=record)
        for _ in range(5):
            learner.update(batch, Clock())
        flats.append(learner.optimizer.flat.clone())
    torch.testing.assert_close(*flats, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("rows", "pieces"), [(12, 4), (13, 4), (48, 32), (16, 32)])
def test_minibatches_cover_the_rows_once(rows, pieces):
    cut = list(minibatches(np.random.default_rng(0), rows, pieces))
    assert sorted(np.concatenate(cut)) == list(range(rows))
    sizes = {len(p) for p in cut}
    assert len(cut) == min(rows, pieces)
    assert max(sizes) - min(sizes) == (1 if rows > pieces and rows % pieces else 0)


@pytest.mark.parametrize("record", [True, False])
def test_every_sequence_is_learnt_in_an_epoch(record):
    """Five sequences in three minibatches: another target of any of them ends in other weights."""
    rng = np.random.default_rng(0)
    rows = rollout_batch(20)
    batch = {k: x.reshape(4, 5, *x.shape[1:]) for k, x in rows.items()} | {"first": np.zeros((4, 5), bool)}
    batch["state"] = {k: rng.normal(size=(5, 6)).astype(np.float32) for k in ("h", "c")}
    config, memory = (
        ppo.Config(epochs=1, minibatches=3),
        ModelConfig(fcnet_hiddens=(8,), use_lstm=True, lstm_cell_size=6),
    )

    def learnt(batch):
        torch.manual_seed(0)
        learner = ppo.Learner(config, DISCRETE, ppo.make_model(config, DISCRETE, memory), memory, record=record)
        learner.update(batch, Clock())
        assert learner.steps == 3
        assert learner.is_recorded == record
        return learner.optimizer.flat.clone()

    as_it_is = learnt(batch)
    for s in range(5):
        target = batch["target"].copy()
        target[:, s] += 1.0
        assert not torch.equal(learnt({**batch, "target": target}), as_it_is), s


@pytest.mark.parametrize(("rows", "pieces"), [(12, 4), (13, 4), (48, 32), (16, 32)])
def test_a_loss_has_the_scale_of_its_rows_whatever_they_divide_into(rows, pieces):
    """A weighted sum over a minibatch is a mean: where the pieces do not divide the rows, and where there are more
    pieces than rows."""
    columns = dict.fromkeys(("logp", "value", "advantage", "target", "weight"), np.ones(rows, np.float32))
    packed = to_torch(pack(columns, pieces), torch.device("cpu"))
    for index in minibatches(np.random.default_rng(0), rows, pieces):
        minibatch = unpack(take(packed, index), piece_size(rows, pieces))
        assert float(minibatch["weight"].sum()) == pytest.approx(1.0)


def test_target_kl_ends_the_epochs():
    steps = []
    for target_kl in (None, 1e-9):
        _, _, learner = make(ppo, DISCRETE, target_kl=target_kl, lr=1e-2, epochs=4, minibatches=4)
        learner.update(rollout_batch(), Clock())
        steps.append(learner.steps)
    assert steps == [16, 4]


def test_lr_schedule_reaches_the_optimizer():
    _, _, learner = make(ppo, DISCRETE, lr={"kind": "linear", "start": 1.0, "end": 0.0, "steps": 100})
    learner.update(rollout_batch(), Clock(env_steps=25))
    assert learner.optimizer.lr.item() == pytest.approx(0.75)


@pytest.mark.parametrize("run", ["PPO", "A2C", "IMPALA", "APPO", "PG"])
def test_an_entropy_bonus_by_schedule_is_the_one_of_the_step(run, tmp_path):
    """Updates (recorded ones) at a point of the schedule are those with that number, and the row says it."""
    size = {"batch_size": 256} if run == "PG" else {"rollout_length": 32}
    size |= {"epochs": 1, "minibatches": 2} if run in ("PPO", "APPO") else {}
    ends = []
    for name, bonus in (("number", 0.2), ("flat", {"start": 0.2, "end": 0.2, "steps": 1}), ("falls", FALLS)):
        config = {**size, "entropy_coef": bonus, "iteration_steps": 256, "num_envs": 8, "export_graph_after_s": None}
        exp = Experiment(run, "CartPole-v1", path=tmp_path / name, seed=0, use_preset=False, config=config)
        rows = [exp.training.iterate() for _ in range(2)]
        ends.append(np.concatenate([x.ravel() for x in exp.training.weights().values()]))
        exp.close()
        assert exp.training.learner.is_recorded
        if name == "number":
            assert "loss/entropy_coef" not in rows[-1]
    assert np.array_equal(ends[0], ends[1])
    assert not np.array_equal(ends[0], ends[2])
    said = [row["loss/entropy_coef"] for row in rows]
    assert said == sorted(said, reverse=True)
    assert said[-1] == pytest.approx(0.2 * (1 - rows[-1]["env_steps_total"] / 2048))


def test_algorithms_refuse_spaces_they_cannot_act_in():
    with pytest.raises(ConfigError, match="Discrete"):
        dqn.Policy(dqn.Config(), CONTINUOUS)
    with pytest.raises(ConfigError, match="Box"):
        sac.Policy(sac.Config(), DISCRETE)


def test_unknown_algorithm_names_the_nearest():
    with pytest.raises(UnknownName, match="'PPO'"):
        get_algo("PPO3")
    assert get_algo("ppo") is ppo
    assert get_algo("bray.algos.dqn:") is dqn
    with pytest.raises(ConfigError, match="no such module"):
        get_algo("nowhere:Thing")
    with pytest.raises(ConfigError, match="missing"):
        get_algo("bray.algos.base:Update")


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("QRDQN", "QR-DQN"),
        ("qr_dqn", "QR-DQN"),
        ("QR DQN", "QR-DQN"),
        ("APEX_DQN", "Ape-X"),
        ("DoubleDQN", "DQN"),
        ("DQN_new", "DQN"),
        ("RainbowDQN", "Rainbow"),
        ("CategoricalDQN", "C51"),
        ("SACDiscrete", "SAC-Discrete"),
        ("discrete-sac", "SAC-Discrete"),
        ("REINFORCE", "PG"),
        ("PPO2", "PPO"),
    ],
)
def test_an_algorithm_is_known_as_other_libraries_write_it(given, ours):
    assert algo_name(given) == ours
    assert get_algo(given) is get_algo(ours)


def test_a_name_that_is_ours_with_an_option_is_answered_with_it():
    with pytest.raises(UnknownName, match=r"In Bray it is --run DQN dueling=true\."):
        get_algo("Dueling_DQN")


# --- small problems ---------------------------------------------------------------------------------------------------


class Masked(gym.Env):
    """Ten rounds; a random half of the actions is legal, the largest legal number pays. An illegal one raises. At the
    end nothing is legal."""

    observation_space = gym.spaces.Dict(x=gym.spaces.Box(0, 1, (2,)), action_mask=gym.spaces.MultiBinary(6))
    action_space = gym.spaces.Discrete(6)
    cut = False

    def _obs(self, end=False):
        self.mask = np.zeros(6, np.int8)
        if not end:
            self.mask[self.np_random.choice(6, 3, replace=False)] = 1
        return {"x": np.ones(2, np.float32), "action_mask": self.mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        if not self.mask[action]:
            raise ValueError(f"illegal action {action}")
        reward = float(action == np.flatnonzero(self.mask)[-1])
        self.t += 1
        over = self.t >= 10
        return self._obs(over), reward, over and not self.cut, over and self.cut, {}


class Cut(Masked):
    cut = True


class Bandit(gym.Env):
    """Episodes of one step: rollouts of one row play and end in turn."""

    observation_space = gym.spaces.Box(0, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(2, np.float32), {}

    def step(self, action):
        return np.ones(2, np.float32), float(action), True, False, {}


class Recall(gym.Env):
    """The first observation says left or right; three empty steps later the agent must say it back. Impossible without
    memory."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.side = 0, int(self.np_random.integers(2))
        return np.array([2.0 * self.side - 1], np.float32), {}

    def step(self, action):
        self.t += 1
        done = self.t == 4
        return np.zeros(1, np.float32), float(done and action == self.side), done, False, {}


class Composite(gym.Env):
    """A Dict action: an index, two switches and a number; the reward counts how many are right."""

    observation_space = gym.spaces.Box(0, 1, (3,))
    action_space = gym.spaces.Dict(
        index=gym.spaces.Discrete(3, start=1), number=gym.spaces.Box(-5, 5, (1,)), switches=gym.spaces.MultiBinary(2)
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def _obs(self):
        self.side = int(self.np_random.integers(3))
        return np.eye(3, dtype=np.float32)[self.side]

    def step(self, action):
        assert self.action_space.contains(action), action
        right = (
            int(action["index"] == self.side + 1) + int(action["switches"][0] == 1) + int(action["switches"][1] == 0)
        )
        reward = float(right) + float(abs(action["number"][0] - 2.5) < 1.0)
        self.t += 1
        return self._obs(), reward / 4, False, self.t >= 8, {}


def train(env, iterations, algo="PPO", seed=0, **config):
    exp = Experiment(run=algo, env=env, use_preset=False, seed=seed, config=config)
    training = exp.training
    for _ in range(iterations):
        training.iterate()
    result = exp.evaluate(20)["eval/return_mean"]
    exp.close()
    return result


def test_masked_ppo_never_acts_illegally_and_learns():
    config = {"num_envs": 8, "rollout_length": 32, "lr": 3e-3, "epochs": 4, "minibatches": 4, "fcnet_hiddens": [32]}
    assert train(Masked, 20, **config) >= 9.0


def test_masked_dqn_never_acts_illegally_and_learns():
    config = {"num_envs": 4, "learning_starts": 200, "train_every": 4, "lr": 3e-3, "batch_size": 32, "gamma": 0.5}
    config["epsilon"] = {"kind": "linear", "start": 1.0, "end": 0.05, "steps": 2000}
    assert train(Masked, 5, "DQN", **config) >= 9.0


@pytest.mark.parametrize("env", [Masked, Cut])
@pytest.mark.parametrize("algo", ["PQN", "SAC-Discrete", "DQN", "IMPALA"])
def test_nothing_is_infinite_where_nothing_is_legal(algo, env):
    replay = {"learning_starts": 100, "batch_size": 32, "train_every": 16, "iteration_steps": 400}
    config = {"num_envs": 4, **({"rollout_length": 16} if algo in ("PQN", "IMPALA") else replay)}
    exp = Experiment(run=algo, env=env, use_preset=False, seed=0, config=config)
    for _ in range(5):
        row = exp.training.iterate()
    assert all(np.isfinite(x) for k, x in row.items() if k.startswith("loss/"))
    assert any(k.startswith("loss/") for k in row)
    exp.close()


@pytest.mark.parametrize("algo", ["PPO", "APPO"])
def test_a_rollout_without_a_step_teaches_nothing(algo):
    config = {"num_envs": 8, "rollout_length": 1, "epochs": 1, "minibatches": 1}
    exp = Experiment(run=algo, env=Bandit, use_preset=False, seed=0, config=config)
    for _ in range(4):
        row = exp.training.iterate()
        assert np.isfinite(row["loss/policy_loss"])
    exp.close()


@pytest.mark.parametrize(
    ("run", "metric", "expected"), [("PPO", "kl", 0.0), ("APPO", "kl", 0.0), ("IMPALA", "rho", 1.0)]
)
def test_ratios_begin_at_one_with_statistics_that_move(run, metric, expected):
    """What acts and what learns see observations on the same scale, from the second rollout on: at first there is
    none."""
    config = {"num_envs": 4, "rollout_length": 32, "normalize_observations": True}
    config |= {} if run == "IMPALA" else {"epochs": 1, "minibatches": 1}
    exp = Experiment(run=run, env="Pendulum-v1", use_preset=False, seed=0, config=config)
    said = [exp.training.iterate()[f"loss/{metric}"] for _ in range(5)]
    assert said[1:] == pytest.approx([expected] * 4, abs=1e-6)
    exp.close()


@pytest.mark.parametrize("cell", ["lstm", "gru", pytest.param("gtrxl", marks=pytest.mark.slow)])
def test_recurrent_ppo_remembers(cell):
    config = {
        "num_envs": 16,
        "rollout_length": 20,
        "lr": 5e-3,
        "fcnet_hiddens": [16],
        "use_lstm": True,
        "lstm_cell_size": 16,
    }
    config |= {"recurrent": cell, "epochs": 4, "minibatches": 2, "max_seq_len": 5}
    assert train(Recall, 40, **config) == 1.0


def test_without_memory_recall_is_chance():
    config = {"num_envs": 16, "rollout_length": 20, "lr": 5e-3, "fcnet_hiddens": [16], "epochs": 4, "minibatches": 2}
    assert train(Recall, 20, **config) < 0.9


def test_composite_actions_learn():
    config = {
        "num_envs": 8,
        "rollout_length": 32,
        "lr": 3e-3,
        "epochs": 6,
        "minibatches": 4,
        "fcnet_hiddens": [32],
        "entropy_coef": 0.0,
    }
    assert train(Composite, 45, **config) >= 7.0


def test_bfloat16_updates_learn_too():
    config = {
        "num_envs": 8,
        "rollout_length": 32,
        "lr": 3e-3,
        "epochs": 4,
        "minibatches": 4,
        "fcnet_hiddens": [32],
        "precision": "bfloat16",
    }
    assert train(Masked, 20, **config) >= 9.0


def test_observation_normalisation_is_part_of_the_weights():
    env = EnvConfig(id="Pendulum-v1", num_envs=4)
    training = LocalTraining(
        ppo, RunConfig(), env, ModelConfig(normalize_observations=True), ppo.Config(rollout_length=16)
    )
    before = training.weights()
    training.iterate()
    after = training.weights()
    moved = [k for k in before if "mean" in k and not np.array_equal(before[k], after[k])]
    assert moved
    training.close()


def test_values_of_a_rollout_are_those_of_the_model():
    """Computed once at the end of a rollout (separate networks) or step by step (shared ones): the same numbers."""
    for shared in (False, True):
        model = ModelConfig(vf_share_layers=shared)
        training = LocalTraining(ppo, RunConfig(), EnvConfig(id="CartPole-v1", num_envs=4), model, ppo.Config())
        (source,) = training.sources
        assert ("value" in source.rollout.engine.forward(source.rollout.obs)) == shared
        source.rows = 16
        (t,), _ = source.gather()
        with torch.no_grad():
            value = training.model(torch.from_numpy(t.obs.reshape(-1, 4)))["value"].numpy().reshape(17, 4)
        np.testing.assert_allclose(t.outputs["value"], value, rtol=1e-4, atol=1e-5)
        training.close()


def test_no_transition_crosses_an_episode_end():
    training = LocalTraining(ppo, RunConfig(), EnvConfig(id="CartPole-v1", num_envs=4), ModelConfig(), ppo.Config())
    (source,) = training.sources
    source.rows = 200
    (t,), counts = source.gather()
    ended = t.terminated | t.truncated
    assert ended.any()
    np.testing.assert_array_equal(t.valid[1:], ~ended[:-1])
    np.testing.assert_array_equal(t.first[2:], ~t.valid[1:])
    assert (t.reward[~t.valid] == 0).all()
    assert training.rollout.env_steps == counts.env_steps == t.valid.sum()
    starts = tree.index(t.obs, np.s_[:])[t.first]
    assert (np.abs(starts) <= 0.05).all()
    training.close()
