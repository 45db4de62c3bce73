"""COMA: its losses against loops in float64, what the critic of an agent does not see, a baseline that leaves nothing
where nothing depends on the agent."""

import dataclasses

import numpy as np
import pytest
import torch

from bray.act import Clock
from bray.algos import coma, get_algo, make_policy
from bray.data.piece import Piece
from bray.envs import EnvConfig, env_spec
from bray.envs.agent_games import Hunt
from bray.errors import ConfigError
from bray.nn import ModelConfig
from bray.nn.catalog import register_loss_term

HUNT = {"team": ["hunter_0", "hunter_1", "hunter_2"]}
T, B, N, A, D, S = 7, 4, 3, 3, 24, 40
GAMMA, LAMBDA = 0.9, 0.8


def make(memory=False, loss_terms=None, **options):
    torch.manual_seed(0)
    config, spec = (
        coma.Config(gamma=GAMMA, lambda_=LAMBDA, rollout_length=T, **options),
        env_spec(EnvConfig(Hunt, teams=HUNT)),
    )
    small = ModelConfig(fcnet_hiddens=(16,), use_lstm=memory, recurrent="gru" if memory else "lstm", lstm_cell_size=8)
    small = dataclasses.replace(small, loss_terms=loss_terms or {})
    model = coma.make_model(config, spec, small)
    learner = coma.Learner(config, spec, model, small, seed=0, record=False)
    with torch.no_grad():  # agents that are sure of something, a target that differs from what it follows
        for p in [*model.parameters(), *learner.target.module.parameters()]:
            p.add_(0.2 * torch.randn_like(p))
    return model, learner


def played(memory=False, seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random((T + 1, B, N, A)) < 0.6
    mask[..., 1] = True
    legal = np.cumsum(mask, -1)
    drawn = 1 + (rng.random((T + 1, B, N)) * legal[..., -1]).astype(int)
    action = (legal < drawn[..., None]).sum(-1)[:T]
    first, valid = np.zeros((T + 1, B), bool), np.ones((T, B), bool)
    terminated, truncated = np.zeros((T, B), bool), np.zeros((T, B), bool)
    terminated[2, 0] = truncated[3, 1] = True
    for t, b in ((2, 0), (3, 1)):
        valid[t + 1, b], first[t + 2, b] = False, True
    return Piece(
        obs={
            "obs": rng.random((T + 1, B, N, D), np.float32),
            "action_mask": mask.astype(np.int8),
            "global_state": rng.random((T + 1, B, S), np.float32),
        },
        action=action,
        reward=np.where(valid, rng.standard_normal((T, B)), 0.0).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        first=first,
        extras={"alive": rng.random((T, B, N)) < 0.8},
        state={"h": rng.standard_normal((1, B, N, 8)).astype(np.float32)} if memory else None,
    )


def weights_of(module):
    return {k: v.detach().numpy().astype(np.float64) for k, v in module.state_dict().items()}


def critic_of(weights, obs, t, b, agent, actions):
    """The values of one agent's choices in plain numpy; its own action is not read."""
    others = np.zeros((N, A))
    for j in range(N):
        if j != agent:
            others[j, actions[j]] = 1.0
    x = np.concatenate([obs["global_state"][t, b], obs["obs"][t, b, agent], others.ravel(), np.eye(N)[agent]])
    x = np.tanh(weights["body.layers.0.weight"] @ x + weights["body.layers.0.bias"])
    return weights["head.weight"] @ x + weights["head.bias"]


def policies(model, piece, memory):
    """Probabilities `[T + 1, B, N, A]` in float64, by one forward after the other."""
    out, state = [], None
    if memory:
        state = {"h": torch.from_numpy(piece.state["h"][0])}
    for t in range(T + 1):
        obs = {"obs": torch.from_numpy(piece.obs["obs"][t])}
        with torch.no_grad():
            if memory:
                keep = torch.from_numpy(~piece.first[t]).float().reshape(-1, 1, 1)
                got = model(obs, {"h": state["h"] * keep})
                state = got["state"]
            else:
                got = model(obs)
        logits = got["dist"].numpy().reshape(B, N, A).astype(np.float64)
        weight = np.where(piece.obs["action_mask"][t] == 1, np.exp(logits), 0.0)
        out.append(weight / weight.sum(-1, keepdims=True))
    return np.array(out)


@pytest.mark.parametrize("memory", [False, True])
def test_a_loss_term_sees_the_rows_that_are_learnt(memory):
    def sure(batch, outputs, model):
        return outputs["dist"].square().mean(-1)

    register_loss_term("sure", sure, replace=True)
    model, learner = make(memory, loss_terms={"sure": 0.5})
    piece = played(memory)
    dist = []
    state = {"h": torch.from_numpy(piece.state["h"][0])} if memory else None
    for t in range(T):
        obs = {"obs": torch.from_numpy(piece.obs["obs"][t])}
        with torch.no_grad():
            if memory:
                keep = torch.from_numpy(~piece.first[t]).float().reshape(-1, 1, 1)
                state = {"h": state["h"] * keep}
            got = model(obs, state) if memory else model(obs)
        state = got.get("state")
        dist.append(got["dist"].numpy())
    counts = piece.valid & piece.extras["alive"].any(-1)
    expected = np.square(np.array(dist, np.float64)).mean(-1)[counts].mean()
    learner.update(learner.prepare(piece), Clock(1, 0))
    assert learner.numbers()["sure"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("memory", [False, True])
def test_the_losses_are_those_of_a_loop(memory):
    model, learner = make(memory, critic_updates=1, critic_lr=1e-12, entropy_coef=0.0)
    piece = played(memory)
    probs, critic, target = (
        policies(model, piece, memory),
        weights_of(learner.critic),
        weights_of(learner.target.module),
    )
    noise = np.random.default_rng([0, 1]).gumbel(size=(B, N, A)).astype(np.float32)  # what the Learner draws
    with np.errstate(divide="ignore"):
        following = (np.log(probs[-1]) + noise).argmax(-1)
    did = np.concatenate([piece.action, following[None]])
    goals = np.zeros((T, B, N))
    for b in range(B):
        for i in range(N):
            worth = [critic_of(target, piece.obs, t, b, i, did[t, b])[did[t, b, i]] for t in range(T + 1)]
            later = worth[T]  # the target of the next row that counts
            for t in reversed(range(T)):
                if not piece.valid[t, b]:
                    later = None
                    continue
                if piece.terminated[t, b]:
                    future = 0.0
                elif piece.truncated[t, b] or t == T - 1:
                    future = worth[t + 1]
                else:
                    future = (1 - LAMBDA) * worth[t + 1] + LAMBDA * later
                later = goals[t, b, i] = piece.reward[t, b] + GAMMA * future
    count, errors, gains, surprise, said = 0, 0.0, 0.0, 0.0, 0.0
    for t, b, i in np.ndindex(T, B, N):
        if piece.valid[t, b] and piece.extras["alive"][t, b, i]:
            q, u = critic_of(critic, piece.obs, t, b, i, did[t, b]), did[t, b, i]
            count += 1
            errors += 0.5 * (q[u] - goals[t, b, i]) ** 2
            gains += np.log(probs[t, b, i, u]) * (q[u] - probs[t, b, i] @ q)
            p = probs[t, b, i][probs[t, b, i] > 0]
            surprise -= p @ np.log(p)
            said += q[u]
    metrics = learner.update(learner.prepare(piece), Clock(1, 0)).metrics
    assert metrics["critic_loss"] == pytest.approx(errors / count, rel=1e-4)
    assert metrics["policy_loss"] == pytest.approx(-gains / count, rel=1e-3)
    assert metrics["entropy"] == pytest.approx(surprise / count, rel=1e-4)
    assert metrics["q"] == pytest.approx(said / count, rel=1e-4)


def test_the_critic_of_an_agent_sees_the_others_actions_and_not_its_own():
    _, learner = make()
    obs = {k: torch.from_numpy(x[0]) for k, x in played().obs.items()}
    action = torch.from_numpy(played().action[0])
    for agent in range(N):
        changed = action.clone()
        changed[:, agent] = (changed[:, agent] + 1) % A
        before, after = learner.critic.inputs(obs, action), learner.critic.inputs(obs, changed)
        assert (before[:, agent] == after[:, agent]).all()
        q, other = learner.critic(obs, action), learner.critic(obs, changed)
        assert (q[:, agent] == other[:, agent]).all()
        for someone in set(range(N)) - {agent}:
            assert (q[:, someone] != other[:, someone]).all()


def test_where_a_choice_changes_nothing_nothing_is_learnt():
    """The same value for all choices: an advantage of exactly 0, and agents that stay as they are."""
    _, learner = make(critic_updates=1, critic_lr=1e-12, entropy_coef=0.0)
    with torch.no_grad():
        learner.critic.head.weight.copy_(learner.critic.head.weight[:1].expand(A, -1))
        learner.critic.head.bias.fill_(3.0)
    piece = played()
    q = learner.critic({k: torch.from_numpy(x[0]) for k, x in piece.obs.items()}, torch.from_numpy(piece.action[0]))
    assert q.std() > 0.01  # it is worth something else in every game
    metrics = learner.update(learner.prepare(piece), Clock(1, 0)).metrics
    assert metrics["advantage"] < 1e-6
    assert metrics["grad_norm"] < 1e-6


def test_both_networks_learn_and_the_target_follows():
    model, learner = make(lr=0.01, critic_lr=0.01, critic_updates=1, tau=0.5)
    agents, critic, target = (weights_of(m) for m in (model, learner.critic, learner.target.module))
    learner.update(learner.prepare(played()), Clock(1, 0))
    assert all((agents[k] != v).any() for k, v in weights_of(model).items() if k.startswith("net"))
    now = weights_of(learner.critic)
    assert all((critic[k] != v).any() for k, v in now.items())
    for k, v in weights_of(learner.target.module).items():
        np.testing.assert_allclose(v, 0.5 * (target[k] + now[k]), atol=1e-6)


def test_what_is_no_team_with_choices_is_refused():
    with pytest.raises(ConfigError, match="trains a team of agents with Discrete actions, and CartPole-v1 has none"):
        make_policy(get_algo("COMA"), coma.Config(), env_spec(EnvConfig("CartPole-v1")))
