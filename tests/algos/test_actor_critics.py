"""DDPG, TD3, SAC for discrete actions, CrossQ: losses against independent float64 loops, how they act, what they
refuse."""

from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from bray.act import GREEDY, SAMPLE, TRAINED, Clock, Tick, make_rule
from bray.algos import crossq, ddpg, get_algo, sac, sac_discrete, td3
from bray.data import Replay
from bray.envs.build import env_spec
from bray.envs.config import EnvConfig
from bray.errors import ConfigError
from bray.experiment import Experiment
from bray.nn.catalog import ModelConfig, make_model
from bray.nn.layers import BatchRenorm
from bray.spec import EnvSpec, Space

CONTINUOUS = EnvSpec("test", Space("box", (3,)), Space("box", (2,), "float32", -1.0, 1.0))
DISCRETE = EnvSpec("test", Space("box", (3,)), Space("discrete", n=(4,), start=(0,)))
MASKED = EnvSpec(
    "test",
    Space("dict", names=("action_mask", "x"), parts=(Space("box", (4,), "float32", 0.0, 1.0), Space("box", (3,)))),
    DISCRETE.action,
)
SMALL = ModelConfig(fcnet_hiddens=(8,), fcnet_activation="relu")
SPECS = {ddpg: CONTINUOUS, td3: CONTINUOUS, crossq: CONTINUOUS, sac: CONTINUOUS, sac_discrete: DISCRETE}
N = 16


def make(algo, spec=None, record=True, **options):
    torch.manual_seed(0)
    spec = spec or SPECS[algo]
    config = algo.Config(**options)
    model = algo.make_model(config, spec, SMALL)
    return algo.Learner(config, spec, model, SMALL, seed=0, record=record)


def batch_of(spec, seed=0):
    rng = np.random.default_rng(seed)
    f = lambda *s: rng.normal(size=s).astype(np.float32)  # noqa: E731

    def obs():
        x = f(N, 3)
        if spec is not MASKED:
            return x
        mask = rng.random((N, 4)) < 0.6
        mask[:, 1] = True
        return {"action_mask": mask.astype(np.float32), "x": x}

    return {
        "obs": obs(),
        "next_obs": obs(),
        "action": np.full(N, 1) if spec is MASKED else rng.integers(0, 4, N) if spec is DISCRETE else np.tanh(f(N, 2)),
        "reward": f(N),
        "discount": np.where(rng.random(N) < 0.3, 0.0, 0.9).astype(np.float32),
        "weight": rng.uniform(0.2, 1.0, N).astype(np.float32),
        "id": np.arange(N),
    }


def build(experiment):
    return experiment.training


def stir(module, scale=0.3):
    """Other weights, so that a target differs from its source."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator))


def numbers(x):
    return x.detach().double().numpy()


def tensors(obs):
    return {k: torch.from_numpy(v) for k, v in obs.items()} if isinstance(obs, dict) else torch.from_numpy(obs)


def expected_loss(batch, q, q_next):
    """Half the squared TD error of each critic, weighted, one row at a time; and the priorities."""
    loss, priorities = 0.0, []
    for i in range(N):
        y = float(batch["reward"][i]) + float(batch["discount"][i]) * q_next[i]
        loss += sum(0.5 * float(batch["weight"][i]) * (row[i] - y) ** 2 for row in q) / N
        priorities.append(np.mean([abs(row[i] - y) for row in q]))
    return loss, priorities


@pytest.mark.parametrize("algo", [ddpg, td3])
def test_critic_loss_equals_an_independent_loop(algo):
    learner, batch = make(algo, prioritized=True), batch_of(CONTINUOUS)
    stir(learner.target.module), stir(learner.target_actor.module)
    next_obs = torch.from_numpy(batch["next_obs"])
    mu = numbers(learner.target_actor(next_obs)["mu"])
    if algo is td3:  # the noise that the learner will draw
        noise = np.random.default_rng([0, 1]).standard_normal((N, 2), np.float32)
        mu = np.clip(mu + np.clip(0.2 * noise, -0.5, 0.5), -1.0, 1.0)
    q_next = numbers(learner.target(next_obs, torch.from_numpy(mu.astype(np.float32)))).min(0)
    q = numbers(learner.critic(torch.from_numpy(batch["obs"]), torch.from_numpy(batch["action"])))
    assert len(q) == (2 if algo is td3 else 1)
    loss, priorities = expected_loss(batch, q, q_next)
    update = learner.update(batch, Clock())
    assert update.metrics["critic_loss"] == pytest.approx(loss, rel=1e-4)
    np.testing.assert_allclose(update.priorities, priorities, rtol=1e-4, atol=1e-5)


def test_target_noise_is_clipped():
    learner, batch = make(td3, target_noise=100.0, target_noise_clip=0.01), batch_of(CONTINUOUS)
    columns = {k: torch.from_numpy(v) for k, v in learner.columns(batch).items()}
    mu = learner.target_actor(columns["next_obs"])["mu"]
    smoothed = learner.next_action(columns, ())
    torch.testing.assert_close((smoothed - mu).abs(), torch.full_like(mu, 0.01))


def test_the_actor_climbs_the_first_critic():
    learner, batch = make(ddpg, lr=1e-3), batch_of(CONTINUOUS)
    obs = torch.from_numpy(batch["obs"])

    def value():
        return float(numbers(learner.critic(obs, learner.model(obs)["mu"])).mean())

    before = value()
    metrics = learner.update(batch | {"weight": np.zeros(N, np.float32)}, Clock()).metrics  # the critic stays
    assert metrics["actor_loss"] == pytest.approx(-before, rel=1e-4)
    assert value() > before


@pytest.mark.parametrize("algo", [td3, crossq])
def test_the_actor_learns_after_every_so_many_steps_of_the_critics(algo):
    learner, moved = make(algo, policy_delay=3), []
    for i in range(7):
        before = learner.optimizer.flat.clone(), learner.critic_optimizer.flat.clone()
        learner.update(batch_of(CONTINUOUS, i), Clock())
        moved.append(not torch.equal(before[0], learner.optimizer.flat))
        assert not torch.equal(before[1], learner.critic_optimizer.flat)
    assert moved == [False, False, True, False, False, True, False]


def test_td3_targets_follow_when_the_actor_learns():
    learner = make(td3, tau=0.5)
    start = [numbers(p) for p in learner.target.module.parameters()]
    learner.update(batch_of(CONTINUOUS), Clock())
    assert all(np.array_equal(a, numbers(b)) for a, b in zip(start, learner.target.module.parameters(), strict=True))
    learner.update(batch_of(CONTINUOUS), Clock())
    now = [numbers(p) for p in learner.critic.parameters()]
    for a, b, c in zip(start, now, learner.target.module.parameters(), strict=True):
        np.testing.assert_allclose(numbers(c), 0.5 * a + 0.5 * b, atol=1e-6)


# --- SAC for discrete actions -----------------------------------------------------------------------------------------


def probabilities(logits, legal):
    p = np.where(legal, np.exp(logits - logits.max()), 0.0)
    return p / p.sum()


@pytest.mark.parametrize("spec", [DISCRETE, MASKED], ids=["plain", "masked"])
def test_discrete_sac_losses_equal_an_independent_loop(spec):
    learner, batch = make(sac_discrete, spec, prioritized=True, initial_alpha=0.3), batch_of(spec)
    stir(learner.model), stir(learner.target.module)
    obs, next_obs = tensors(batch["obs"]), tensors(batch["next_obs"])
    legal, next_legal = (
        np.ones((N, 4), bool) if spec is DISCRETE else batch[k]["action_mask"] > 0.5 for k in ("obs", "next_obs")
    )
    logits, next_logits = (numbers(learner.model(x)["dist"]) for x in (obs, next_obs))
    target, q = numbers(learner.target(next_obs)).min(0), numbers(learner.critic(obs))
    q_next = []
    for i in range(N):
        p = probabilities(next_logits[i], next_legal[i])
        q_next.append(sum(p[a] * (target[i, a] - 0.3 * np.log(p[a])) for a in range(4) if next_legal[i, a]))
    taken = [[row[i, batch["action"][i]] for i in range(N)] for row in q]
    loss, priorities = expected_loss(batch, taken, q_next)
    frozen = batch | {"weight": np.zeros(N, np.float32)}  # so that the actor sees the critics above
    metrics = learner.update(frozen, Clock()).metrics
    actor_loss, entropy = 0.0, 0.0
    for i in range(N):
        p = probabilities(logits[i], legal[i])
        for a in np.flatnonzero(legal[i]):
            actor_loss += p[a] * (0.3 * np.log(p[a]) - q[:, i, a].min()) / N
            entropy -= p[a] * np.log(p[a]) / N
    assert metrics["actor_loss"] == pytest.approx(actor_loss, rel=1e-4)
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-4)
    learner = make(sac_discrete, spec, prioritized=True, initial_alpha=0.3)
    stir(learner.model), stir(learner.target.module)
    update = learner.update(batch, Clock())
    assert update.metrics["critic_loss"] == pytest.approx(loss, rel=1e-4)
    np.testing.assert_allclose(update.priorities, priorities, rtol=1e-4, atol=1e-5)


def test_discrete_sac_aims_at_a_share_of_the_uniform_entropy():
    for scale, sign in ((0.0, -1), (1.0, 1)):
        learner = make(sac_discrete, MASKED, entropy_scale=scale)
        stir(learner.model)
        before = learner.log_alpha.item()
        learner.update(batch_of(MASKED), Clock())
        assert np.sign(learner.log_alpha.item() - before) == sign


class Bandit(gym.Env):
    """One decision: the number shown is the action that pays; with `masked`, the paying one of two legal ones."""

    def __init__(self, masked=False):
        x = spaces.Box(0.0, 1.0, (3,), np.float32)
        mask = spaces.Box(0.0, 1.0, (3,), np.float32)
        self.masked, self.action_space = masked, spaces.Discrete(3)
        self.observation_space = spaces.Dict({"action_mask": mask, "x": x}) if masked else x

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(), {}

    def _obs(self):
        self.right = int(self.np_random.integers(3))
        self.legal = np.ones(3, np.float32)
        if self.masked:
            self.legal[(self.right + 1) % 3] = 0.0
        x = np.eye(3, dtype=np.float32)[self.right]
        return {"action_mask": self.legal, "x": x} if self.masked else x

    def step(self, action):
        assert self.legal[action]
        reward = float(action == self.right)
        return self._obs(), reward, True, False, {}


def test_discrete_sac_learns_and_never_acts_illegally():
    config = {"env_config": {"masked": True}, "num_envs": 8, "learning_starts": 100, "train_every": 8, "batch_size": 32}
    config |= {"lr": 1e-2, "critic_lr": 1e-2, "fcnet_hiddens": [16], "entropy_scale": 0.2, "updates": 2}
    exp = Experiment("SAC-Discrete", Bandit, config=config, seed=0)
    exp.training.iterate()
    assert exp.evaluate(episodes=20)["eval/return_mean"] == 1.0
    exp.close()


# --- CrossQ -----------------------------------------------------------------------------------------------------------


def test_crossq_loss_equals_an_independent_loop():
    """Both halves of the transitions go through the critics as one batch, normalised layer by layer by its own mean and
    variance."""
    learner, batch = make(crossq, critic_hiddens=(8,)), batch_of(CONTINUOUS)
    noise = np.random.default_rng([0, 1]).standard_normal((2, N, 2), np.float32)[1].astype(np.float64)
    dist = numbers(learner.model(torch.from_numpy(batch["next_obs"]))["dist"])
    mean, log_std = dist[:, :2], dist[:, 2:]
    a = np.tanh(mean + np.exp(log_std) * noise)
    logp = (-0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - a**2)).sum(-1)
    now = np.concatenate([batch["obs"], batch["action"]], 1)
    x = np.concatenate([now, np.concatenate([batch["next_obs"], a], 1)]).astype(np.float64)
    towers = learner.critic.towers
    q = []
    for k in range(2):
        h = x
        for layer, (weight, bias) in enumerate(zip(towers.weights, towers.biases, strict=True)):
            h = (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-3)
            h = h @ numbers(weight[k]) + numbers(bias[k])
            h = np.maximum(h, 0.0) if layer == 0 else h
        q.append(h[:, 0])
    q_next = np.minimum(q[0][N:], q[1][N:]) - 0.2 * logp
    loss, _ = expected_loss(batch, [row[:N] for row in q], q_next)
    assert learner.update(batch, Clock()).metrics["critic_loss"] == pytest.approx(loss, rel=1e-3)


def test_batch_renorm_equals_its_formula():
    rng = np.random.default_rng(0)
    layer = BatchRenorm(2, 3, momentum=0.1, warmup=2, r_max=1.5, d_max=0.5)
    mean, var = np.zeros((2, 3)), np.ones((2, 3))
    for i in range(5):
        x = 2.0 * rng.normal(size=(2, 7, 3)) + 1.0
        got = numbers(layer(torch.from_numpy(x).float(), True))
        for n in range(2):
            m, v = x[n].mean(0), x[n].var(0)
            r = np.clip(np.sqrt((v + 1e-3) / (var[n] + 1e-3)), 1 / 1.5, 1.5) if i >= 2 else 1.0
            d = np.clip((m - mean[n]) / np.sqrt(var[n] + 1e-3), -0.5, 0.5) if i >= 2 else 0.0
            np.testing.assert_allclose(got[n], (x[n] - m) / np.sqrt(v + 1e-3) * r + d, rtol=1e-4, atol=1e-5)
            mean[n], var[n] = 0.9 * mean[n] + 0.1 * m, 0.9 * var[n] + 0.1 * v
    x = rng.normal(size=(2, 4, 3))
    expected = (x - mean[:, None]) / np.sqrt(var[:, None] + 1e-3)
    np.testing.assert_allclose(numbers(layer(torch.from_numpy(x).float())), expected, rtol=1e-4, atol=1e-5)
    first = numbers(layer(torch.from_numpy(x[:1]).float()))
    np.testing.assert_allclose(first, expected[:1], rtol=1e-4, atol=1e-5)


# --- all --------------------------------------------------------------------------------------------------------------


@pytest.mark.optimizes
@pytest.mark.parametrize("algo", [ddpg, td3, crossq, sac_discrete])
def test_a_recorded_learner_equals_an_eager_one(algo):
    flats = []
    for record in (True, False):
        learner = make(algo, record=record)
        for _ in range(6):
            learner.update(batch_of(SPECS[algo]), Clock())
        assert learner.is_recorded == record
        flats.append(learner.optimizer.flat.clone())
    torch.testing.assert_close(*flats, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("algo", [ddpg, td3, crossq, sac_discrete])
def test_a_loaded_learner_goes_on_as_the_saved_one(algo):
    one, other = make(algo, record=False), make(algo, record=False)
    for i in range(4):
        one.update(batch_of(SPECS[algo], i), Clock())
    other.load_state_dict(one.state_dict())
    other.model.load_state_dict(one.model.state_dict())
    results = [x.update(batch_of(SPECS[algo], 9), Clock()).metrics for x in (one, other)]
    assert results[0] == results[1]


def test_noise_of_the_acting_rule():
    rule = make_rule("deterministic", {"noise": {"kind": "linear", "start": 0.4, "end": 0.1, "steps": 100}})
    mu = np.zeros((4000, 2), np.float32)
    assert np.array_equal(rule.choose(CONTINUOUS.layout, {"mu": mu}, None, None, Clock())["action"], mu)
    for steps, std in ((0, 0.4), (1000, 0.1)):
        action = rule.choose(CONTINUOUS.layout, {"mu": mu}, None, np.random.default_rng(0), Clock(steps))["action"]
        assert action.std() == pytest.approx(std, rel=0.05)
        assert np.abs(action).max() <= 1.0
        assert action.dtype == np.float32
    assert rule.trained() == {"noise": pytest.approx(0.1)}


def test_random_actions_turn_from_white_to_pink_noise_that_comes_again_after_a_resume():
    steps = 8000
    policy, layout = sac.Policy(sac.Config(learning_starts=steps, random_hold=8), CONTINUOUS), CONTINUOUS.layout
    outputs = {"dist": np.zeros((2, layout.num_params), np.float32)}

    def play(rng, steps):
        tick = Tick(np.zeros((2, 3), np.float32))
        return [policy.act(outputs, tick, rng, SAMPLE, Clock(n, 0, n // 2))[1]["action"] for n in steps]

    white, actions = np.array(play(np.random.default_rng([7, 0]), range(0, steps, 2))).reshape(
        2, -1, 2, 2
    )  # two environments: two steps at a time
    assert white.var() == pytest.approx(1 / 3, rel=0.1)
    assert np.corrcoef(white[:-1].reshape(-1), white[1:].reshape(-1))[0, 1] == pytest.approx(0.0, abs=0.06)
    assert np.abs(actions.mean()) < 0.1
    assert actions.var() == pytest.approx(1 / 3, rel=0.1)  # uniform
    # Of the four parts the one that changes every n steps is the same k steps later in 1 - k / n of the cases.
    for apart, alike in ((1, (0 + 4 + 6 + 7) / 32), (4, (0 + 0 + 0 + 4) / 32), (8, 0.0)):
        found = np.corrcoef(actions[:-apart].reshape(-1), actions[apart:].reshape(-1))[0, 1]
        assert found == pytest.approx(alike, abs=0.06), apart
    rng = np.random.default_rng([7, 0])
    rng.random(100)  # where its state is does not matter
    assert np.array_equal(play(rng, range(4040, 4060, 2)), actions[20:30])
    assert not np.array_equal(play(np.random.default_rng([8, 0]), range(4000, 4100, 2)), actions[:50])
    assert np.array_equal(policy.act(outputs, Tick(np.zeros(0)), None, GREEDY, Clock(0))[1]["action"], np.zeros((2, 2)))


def test_noise_while_learning_may_be_pink():
    """Its neighbours are alike, its spread is that of white noise."""
    found = {}
    for hold in (1, 8):
        policy = sac.Policy(sac.Config(learning_starts=0, noise_hold=hold), CONTINUOUS)
        outputs = {"dist": np.zeros((2, CONTINUOUS.layout.num_params), np.float32)}
        rng, tick = np.random.default_rng([7, 0]), Tick(np.zeros((2, 3), np.float32))
        drawn = np.array(
            [policy.act(outputs, tick, rng, SAMPLE, Clock(n, 0, n // 2))[1]["action"] for n in range(0, 8000, 2)]
        )
        noise = np.arctanh(drawn)  # mean 0, standard deviation 1
        assert noise.std() == pytest.approx(1.0, rel=0.05)
        found[hold] = np.corrcoef(noise[:-1].reshape(-1), noise[1:].reshape(-1))[0, 1]
    assert found[1] == pytest.approx(0.0, abs=0.05)
    assert found[8] == pytest.approx((0 + 4 + 6 + 7) / 32, abs=0.05)
    after = [policy.act(outputs, tick, rng, SAMPLE, TRAINED)[1]["action"] for _ in range(2)]
    assert not np.array_equal(*after)  # nobody counts them: white noise, not the same again and again


class Arm(gym.Env):
    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, low=-np.inf, high=np.inf):
        self.action_space = spaces.Box(np.float32(low), np.float32(high), (2,), np.float32)
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        assert np.abs(action).max() <= 3.0
        return np.zeros(2, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("name", ["SAC", "TD3", "DDPG", "CrossQ"])
@pytest.mark.parametrize("bounds", [{}, {"low": -1.0}, {"high": 2.0}])
def test_a_box_without_bounds_is_refused_at_construction(name, bounds):
    with pytest.raises(ConfigError, match=r"has low .*inf.*env.action_bounds=\[low, high\], or use PPO or A2C"):
        build(Experiment(name, Arm, config={"env_config": bounds}))


@pytest.mark.parametrize("name", ["SAC", "TD3", "DDPG", "CrossQ"])
def test_discrete_actions_are_refused_by_algorithms_for_boxes(name):
    with pytest.raises(
        ConfigError, match=r"needs a Box action space, .* has discrete\. Algorithms that take these .*DQN.*SAC-Discrete"
    ):
        build(Experiment(name, "CartPole-v1", use_preset=False))


def test_boxes_are_refused_by_sac_for_discrete_actions():
    with pytest.raises(ConfigError, match="needs a Discrete action space"):
        build(Experiment("SAC-Discrete", "Pendulum-v1", use_preset=False))


def test_bounds_given_in_the_config_are_those_actions_are_scaled_to():
    config = EnvConfig(id=Arm, action_bounds=(-3.0, [1.0, 2.0]))
    assert env_spec(config).layout.bounds()[0].tolist() == [-3.0, -3.0]
    assert env_spec(config).layout.bounds()[1].tolist() == [1.0, 2.0]
    options = {"action_bounds": [-3, 3], "learning_starts": 900, "fcnet_hiddens": [8], "batch_size": 8}
    exp = Experiment("TD3", Arm, config={**options, "max_episode_steps": 50})
    exp.training.iterate()
    exp.close()


@pytest.mark.parametrize(
    ("space", "bounds", "said"),
    [
        ({}, [1.0, -1.0], "low below high"),
        ({}, [-1.0, float("inf")], "finite"),
        ({}, [-1.0, [1.0, 2.0, 3.0]], "a number, or"),
        ({"low": -1.0, "high": 1.0}, [-2.0, 1.0], "within Box"),
    ],
)
def test_bounds_that_do_not_fit_are_refused(space, bounds, said):
    with pytest.raises(ConfigError, match=f"env.action_bounds.*{said}"):
        env_spec(EnvConfig(id=Arm, env_config=space, action_bounds=tuple(bounds)))


def test_bounds_of_discrete_actions_are_refused():
    with pytest.raises(ConfigError, match=r"env\.action_bounds is for a Box action space"):
        env_spec(EnvConfig(id="CartPole-v1", action_bounds=(-1.0, 1.0)))


@pytest.mark.parametrize(("name", "spec", "width"), [("TD3", CONTINUOUS, 2), ("SAC-Discrete", DISCRETE, 4)])
def test_a_plain_module_may_be_the_actor(name, spec, width):
    algo, config = get_algo(name), ModelConfig(custom_model=torch.nn.Linear(3, width))
    model = algo.make_model(algo.Config(), spec, config)
    learner = algo.Learner(algo.Config(policy_delay=1) if name == "TD3" else algo.Config(), spec, model, SMALL)
    assert np.isfinite(list(learner.update(batch_of(spec), Clock()).metrics.values())).all()


def test_actors_have_no_memory():
    for kind, spec in (("deterministic", CONTINUOUS), ("categorical", DISCRETE)):
        with pytest.raises(ConfigError, match="use_lstm must be false"):
            make_model(kind, spec, ModelConfig(use_lstm=True))


@pytest.mark.parametrize("name", ["DQN", "TD3"])
def test_learning_waits_for_a_whole_batch(name, monkeypatch):
    monkeypatch.setattr(Replay, "iteration_steps", 5)
    env = "CartPole-v1" if name == "DQN" else "Pendulum-v1"
    config = {"learning_starts": 0, "train_every": 1, "batch_size": 40, "fcnet_hiddens": [8], "record": False}
    exp = Experiment(name, env, use_preset=False, config=config)
    while not exp.training.learner.steps:
        exp.training.iterate()
    assert 40 <= exp.training.env_steps <= 45
    exp.close()


def test_an_iteration_of_no_steps_is_one_step_of_all_environments():
    config = {"iteration_steps": 0, "num_envs": 3, "fcnet_hiddens": [8], "record": False}
    with closing(Experiment("DQN", "CartPole-v1", use_preset=False, config=config)) as exp:
        assert [exp.training.iterate()["env_steps_total"] for _ in range(3)] == [3, 6, 9]


def test_a_replay_that_never_holds_a_batch_is_refused():
    with pytest.raises(
        ConfigError, match="batch_size=64 transitions can be drawn, so replay_size is at least 128; got 100"
    ):
        build(Experiment("DQN", "CartPole-v1", use_preset=False, config={"replay_size": 100, "batch_size": 64}))


def test_half_cheetah_trains(monkeypatch):
    pytest.importorskip("mujoco")
    monkeypatch.setattr(Replay, "iteration_steps", 100)
    config = {"learning_starts": 80, "batch_size": 16, "fcnet_hiddens": [8], "record": False}
    exp = Experiment("SAC", "HalfCheetah-v5", config=config)
    assert np.isfinite(exp.training.iterate()["loss/critic_loss"])
    exp.close()
