"""MADDPG: its losses against loops in float64, what an agent's gradient passes through, draws, dead agents."""

import numpy as np
import pytest
import torch

from bray.act import Clock
from bray.algos import get_algo, maddpg, make_policy
from bray.envs import EnvConfig, env_spec
from bray.envs.agent_games import Hunt
from bray.errors import ConfigError
from bray.nn import ModelConfig
from bray.nn.catalog import register_loss_term
from bray.rl.transforms import gumbel_softmax, one_hot
from bray.spec import EnvSpec, Space

HUNT = {"team": ["hunter_0", "hunter_1", "hunter_2"]}
B, N, A, D, S = 10, 3, 3, 24, 40


def pushes(low=-1.0, high=1.0):
    """A team of three, each with two numbers to choose, and no global state."""
    seen = Space("dict", parts=(Space("box", (N, 4), "float32"),), names=("obs",))
    return EnvSpec("pushes", seen, Space("box", (N, 2), "float32", low, high), team=("a", "b", "c"))


def make(spec, **options):
    torch.manual_seed(0)
    config, model_config = maddpg.Config(**options), ModelConfig(fcnet_hiddens=(16,), fcnet_activation="relu")
    model = maddpg.make_model(config, spec, model_config)
    learner = maddpg.Learner(config, spec, model, model_config, seed=0, record=False)
    with torch.no_grad():  # policies that are sure of something, targets that differ from what they follow
        for p in [*model.parameters(), *learner.target.module.parameters(), *learner.target_actor.module.parameters()]:
            p.add_(0.2 * torch.randn_like(p))
    return model, learner


def replayed(spec, seed=0):
    rng = np.random.default_rng(seed)

    def observed():
        if not spec.layout.discrete:
            return {"obs": rng.standard_normal((B, N, 4)).astype(np.float32)}
        mask = rng.random((B, N, A)) < 0.6
        mask[..., 1] = True
        obs, state = rng.random((B, N, D), np.float32), rng.random((B, S), np.float32)
        return {"obs": obs, "action_mask": mask.astype(np.int8), "global_state": state}

    chosen = rng.integers(0, A, (B, N)) if spec.layout.discrete else rng.uniform(-1, 1, (B, 2 * N)).astype(np.float32)
    rewards = rng.standard_normal((B, N)).astype(np.float32)
    return {
        "obs": observed(),
        "next_obs": observed(),
        "action": chosen,
        "reward": rewards.sum(-1),
        "rewards": rewards,
        "discount": np.where(rng.random(B) < 0.3, 0.0, 0.9).astype(np.float32),
        "weight": np.ones(B, np.float32),
        "alive": rng.random((B, N)) < 0.8,
    }


def value(critic, agent, state, actions):
    """One agent's critic in plain numpy, one row."""
    x = np.concatenate([np.ravel(state), np.ravel(actions)]).astype(np.float64)
    layers = list(zip(critic.towers.weights, critic.towers.biases, strict=True))
    for k, (weight, bias) in enumerate(layers):
        x = x @ weight[agent].detach().numpy().astype(np.float64) + bias[agent, 0].detach().numpy()
        x = np.maximum(x, 0.0) if k < len(layers) - 1 else x
    return float(x[0])


def chosen_by(module, obs, noise=None):
    """The actions `[B, N, ...]` of a policy, and its outputs."""
    with torch.no_grad():
        out = module({k: torch.from_numpy(x) for k, x in obs.items()})
    if "mu" in out:
        return out["mu"].numpy().reshape(B, N, -1).astype(np.float64), out["mu"].numpy()
    logits = out["dist"].numpy().reshape(B, N, A).astype(np.float64)
    best = np.where(obs["action_mask"] == 1, logits + noise, -np.inf).argmax(-1)
    return np.eye(A)[best], logits


@pytest.mark.parametrize("spec", [env_spec(EnvConfig(Hunt, teams=HUNT)), pushes()], ids=["choices", "numbers"])
def test_the_losses_are_those_of_a_loop(spec):
    model, learner = make(spec, critic_lr=1e-12, logit_penalty=0.01)
    batch, discrete = replayed(spec), spec.layout.discrete
    noise = learner.columns(batch).get("noise", np.zeros((2, B, N, A)))
    learner.rng = np.random.default_rng([0, 1])  # the update draws the same again
    after, _ = chosen_by(learner.target_actor.module, batch["next_obs"], noise[1])
    mine, outputs = chosen_by(model, batch["obs"], noise[0])
    did = np.eye(A)[batch["action"]] if discrete else batch["action"].reshape(B, N, 2)
    key = "global_state" if discrete else "obs"
    errors, gains = [], []
    for b in range(B):
        now, later = batch["obs"][key][b], batch["next_obs"][key][b]
        for i in range(N):
            future = value(learner.target.module, i, later, after[b])
            goal = batch["rewards"][b, i] + batch["discount"][b] * future
            errors.append(value(learner.critic, i, now, did[b]) - goal)
            if batch["alive"][b, i]:
                instead = did[b].copy()
                instead[i] = mine[b, i]
                gains.append(value(learner.critic, i, now, instead))
    metrics = learner.update(batch, Clock(1, 0)).metrics
    assert metrics["critic_loss"] == pytest.approx(np.mean(0.5 * np.square(errors)), rel=1e-4)
    assert metrics["td_error"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-4)
    penalty = 0.01 * np.square(outputs).mean() if discrete else 0.0
    assert metrics["actor_loss"] == pytest.approx(penalty - np.mean(gains), rel=1e-4)


def test_an_agents_gradient_is_that_of_its_own_critic():
    """By differences of the loop's values: what agent i does counts in critic i alone."""
    spec = pushes()
    _, learner = make(spec)
    batch = replayed(spec)
    tensors = {"obs": {k: torch.from_numpy(x) for k, x in batch["obs"].items()}}
    tensors |= {k: torch.from_numpy(batch[k]) for k in ("action", "alive")}
    mine = torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, (B, N, 2)).astype(np.float32)).requires_grad_()
    (slope,) = torch.autograd.grad(learner.actor_loss(tensors, mine), mine)
    step, count, did = 1e-6, batch["alive"].sum(), batch["action"].reshape(B, N, 2).astype(np.float64)
    for b in range(B):
        for i in range(N):
            for d in range(2):
                values = []
                for sign in (-1.0, 1.0):
                    instead = did[b].copy()
                    instead[i] = mine[b, i].detach().numpy()
                    instead[i, d] += sign * step
                    values.append(value(learner.critic, i, batch["obs"]["obs"][b], instead))
                expected = -float(batch["alive"][b, i]) * (values[1] - values[0]) / (2 * step) / count
                assert slope[b, i, d] == pytest.approx(expected, abs=1e-5)


def test_draws_are_those_of_the_policy_and_have_its_gradient():
    rng = np.random.default_rng(0)
    logits = torch.tensor([0.5, -1.0, 1.5, -1e9]).requires_grad_()
    noise = torch.from_numpy(rng.gumbel(size=(20_000, 4)))
    drawn = gumbel_softmax(logits, noise, temperature=0.7)
    assert set(drawn.detach().unique().round(decimals=6).tolist()) == {0.0, 1.0}
    torch.testing.assert_close(drawn.detach().mean(0).float(), logits.detach().softmax(-1), atol=0.01, rtol=0)
    weight = torch.tensor([1.0, 2.0, -1.0, 5.0], dtype=torch.float64)
    (slope,) = torch.autograd.grad((drawn[0] * weight).sum(), logits)
    (expected,) = torch.autograd.grad((((logits + noise[0]) / 0.7).softmax(-1) * weight).sum(), logits)
    torch.testing.assert_close(slope, expected)
    torch.testing.assert_close(one_hot(torch.tensor([[2], [0]]), 3), torch.eye(3)[torch.tensor([[2], [0]])])


def test_critics_learn_and_the_targets_follow():
    spec = pushes()
    model, learner = make(spec, lr=0.01, critic_lr=0.01, tau=0.5)
    parts = {"actor": model, "critic": learner.critic}
    late = {"actor": learner.target_actor.module, "critic": learner.target.module}
    before = {name: [p.detach().clone() for p in module.parameters()] for name, module in parts.items()}
    old = {name: [p.clone() for p in module.parameters()] for name, module in late.items()}
    learner.update(replayed(spec), Clock(1, 0))
    for name, module in parts.items():
        for p, was, target, target_was in zip(
            module.parameters(), before[name], late[name].parameters(), old[name], strict=True
        ):
            assert (p != was).any()
            torch.testing.assert_close(target, 0.5 * (p.detach() + target_was))


def test_a_loss_term_sees_the_steps_that_are_learnt():
    register_loss_term("strong", lambda batch, outputs, model: outputs["mu"].square().mean(-1), replace=True)
    spec, config = pushes(), maddpg.Config()
    model_config = ModelConfig(fcnet_hiddens=(16,), loss_terms={"strong": 0.5})
    model = maddpg.make_model(config, spec, model_config)
    learner = maddpg.Learner(config, spec, model, model_config, seed=0, record=False)
    batch = replayed(spec)
    batch["alive"][3] = False
    _, mu = chosen_by(model, batch["obs"])
    learner.update(batch, Clock(1, 0))
    expected = np.square(mu.astype(np.float64)).mean(-1)[batch["alive"].any(-1)].mean()
    assert learner.numbers()["strong"] == pytest.approx(expected, rel=1e-4)


def test_what_it_does_not_train_is_refused():
    algo = get_algo("MADDPG")
    with pytest.raises(ConfigError, match="agents with Discrete or Box actions, and CartPole-v1 has none"):
        make_policy(algo, maddpg.Config(), env_spec(EnvConfig("CartPole-v1")))
    with pytest.raises(ConfigError, match=r"give them with env\.action_bounds"):
        make_policy(algo, maddpg.Config(), pushes(None, None))
