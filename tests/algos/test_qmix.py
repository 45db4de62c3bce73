"""QMIX and VDN: their loss against a loop in float64, what the mixer promises, legal actions, memory."""

import numpy as np
import pytest
import torch

from bray import act
from bray.act import Clock
from bray.algos import get_algo, make_policy, qmix, vdn
from bray.data.experience import Replay, Sequences
from bray.envs import EnvConfig, env_spec
from bray.envs.agent_games import Hunt, TwoStep
from bray.errors import ConfigError
from bray.nn import ModelConfig
from bray.nn.teams import MonotonicMixer
from bray.rl.mixing import monotonic_mix

HUNT = {"team": ["hunter_0", "hunter_1", "hunter_2"]}
B, N, A, D, S = 12, 3, 3, 24, 40


def hunt():
    return env_spec(EnvConfig(Hunt, teams=HUNT))


def make(algo, memory=False, **options):
    torch.manual_seed(0)
    config, spec = algo.Config(**options), hunt()
    model_config = ModelConfig(
        fcnet_hiddens=(16,), use_lstm=memory, recurrent="gru" if memory else "lstm", lstm_cell_size=8
    )
    model = algo.make_model(config, spec, model_config)
    return model, algo.Learner(config, spec, model, model_config, seed=0, record=False)


def observations(rng, *rows):
    mask = rng.random((*rows, N, A)) < 0.6
    mask[..., 1] = True
    return {
        "obs": rng.random((*rows, N, D), np.float32),
        "action_mask": mask.astype(np.int8),
        "global_state": rng.random((*rows, S), np.float32),
    }


def replayed(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "obs": observations(rng, B),
        "next_obs": observations(rng, B),
        "action": rng.integers(0, A, (B, N)),
        "reward": rng.standard_normal(B).astype(np.float32),
        "discount": np.where(rng.random(B) < 0.3, 0.0, 0.9).astype(np.float32),
        "weight": np.ones(B, np.float32),
        "alive": np.ones((B, N), bool),
    }


def double(module):
    """Its parameters as float64 arrays."""
    return {k: v.detach().numpy().astype(np.float64) for k, v in module.state_dict().items()}


def mixed(mixer, q, state):
    """The mixer's formula in plain numpy, one row."""
    p = double(mixer)

    def hyper(name):
        hidden = np.maximum(p[f"{name}.0.weight"] @ state + p[f"{name}.0.bias"], 0.0)
        return p[f"{name}.2.weight"] @ hidden + p[f"{name}.2.bias"]

    w1 = np.abs(hyper("w1").reshape(N, -1))
    hidden = q @ w1 + p["b1.weight"] @ state + p["b1.bias"]
    hidden = np.where(hidden > 0, hidden, np.exp(np.minimum(hidden, 0)) - 1.0)
    return float(hidden @ np.abs(hyper("w2")) + hyper("b2")[0])


def apart(learner):
    """Targets that differ from what they follow."""
    with torch.no_grad():
        for p in learner.target.module.parameters():
            p.add_(0.1 * torch.randn_like(p))


def q_of(module, obs):
    with torch.no_grad():
        return module({k: torch.from_numpy(x) for k, x in obs.items()})["q"].numpy().astype(np.float64)


@pytest.mark.parametrize("chooses", [True, False])
@pytest.mark.parametrize("algo", [qmix, vdn])
def test_the_loss_is_that_of_a_loop(algo, chooses):
    model, learner = make(algo, double=chooses)
    apart(learner)
    batch, online, target = replayed(), learner.online, learner.target.module
    now, after, late = q_of(model, batch["obs"]), q_of(model, batch["next_obs"]), q_of(target.agents, batch["next_obs"])
    errors, values = [], []
    for b in range(B):
        chosen = [now[b, i, batch["action"][b, i]] for i in range(N)]
        best = []
        for i in range(N):
            legal = [a for a in range(A) if batch["next_obs"]["action_mask"][b, i, a]]
            by = (after if chooses else late)[b, i]
            best.append(late[b, i, max(legal, key=lambda a: by[a])])
        if algo is qmix:
            value = mixed(online.mixer, np.array(chosen), batch["obs"]["global_state"][b].astype(np.float64))
            future = mixed(target.mixer, np.array(best), batch["next_obs"]["global_state"][b].astype(np.float64))
        else:
            value, future = sum(chosen), sum(best)
        values.append(value)
        errors.append(value - (batch["reward"][b] + batch["discount"][b] * future))
    metrics = learner.update(batch, Clock(1, 0)).metrics
    assert metrics["loss"] == pytest.approx(np.mean(0.5 * np.square(errors)), rel=1e-4)
    assert metrics["q"] == pytest.approx(np.mean(values), rel=1e-4)
    assert metrics["td_error"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-4)


def test_no_agents_value_lowers_the_teams():
    torch.manual_seed(1)
    mixer, state, q = MonotonicMixer(S, N), torch.randn(500, S), torch.randn(500, N, requires_grad=True)
    total = mixer(q, state)
    (slope,) = torch.autograd.grad(total.sum(), q)
    assert slope.min() >= 0.0
    assert (slope > 0.0).all(0).float().mean() == 1.0
    assert slope.std(0).min() > 0.0  # it is the state that says how much each counts
    w1 = torch.randn(5, N, 4)
    down = monotonic_mix(torch.zeros(5, N), w1, torch.zeros(5, 4), torch.ones(5, 4), torch.zeros(5))
    torch.testing.assert_close(down, torch.zeros(5))


def test_both_networks_learn_and_the_targets_follow():
    _, learner = make(qmix, target_period=2, lr=0.01)
    before, late = double(learner.online), double(learner.target.module)
    learner.update(replayed(), Clock(1, 0))
    after = double(learner.online)
    assert all((before[k] != after[k]).any() for k in before if not k.endswith("numbers"))
    assert all((late[k] == v).all() for k, v in double(learner.target.module).items())
    learner.update(replayed(1), Clock(2, 1))
    for k, v in double(learner.online).items():
        np.testing.assert_array_equal(v, double(learner.target.module)[k])


def test_sequences_learn_as_steps_one_by_one():
    """Rows of a network with a memory: the same numbers as the agents unrolled by hand give, row by row."""
    model, learner = make(qmix, memory=True, sequence_length=4, burn_in=2)
    apart(learner)
    rng = np.random.default_rng(3)
    rows, games = 6, 5
    data = {
        "obs": observations(rng, rows + 1, games),
        "action": rng.integers(0, A, (rows, games, N)),
        "reward": rng.standard_normal((rows, games)).astype(np.float32),
        "terminated": np.zeros((rows, games), bool),
        "truncated": np.zeros((rows, games), bool),
        "valid": np.ones((rows, games), bool),
        "first": np.zeros((rows + 1, games), bool),
        "state": {"h": rng.standard_normal((games, N, 8)).astype(np.float32)},
        "weight": np.ones(games, np.float32),
        "alive": np.ones((rows, games, N), bool),
    }
    data["terminated"][3, 0], data["valid"][4, 0], data["first"][5, 0] = True, False, True

    def steps(module):
        state, out = {"h": torch.from_numpy(data["state"]["h"])}, []
        for t in range(rows + 1):
            keep = torch.from_numpy(~data["first"][t]).float().reshape(-1, 1, 1)
            got = module({"obs": torch.from_numpy(data["obs"]["obs"][t])}, {"h": state["h"] * keep})
            state = got["state"]
            out.append(got["q"].detach().numpy().astype(np.float64))
        return out

    now, late = steps(model), steps(learner.target.module.agents)
    errors = []
    for t in range(2, rows):
        for b in range(games):
            if not data["valid"][t, b]:
                continue
            chosen = np.array([now[t][b, i, data["action"][t, b, i]] for i in range(N)])
            value = mixed(learner.online.mixer, chosen, data["obs"]["global_state"][t, b].astype(np.float64))
            goal = float(data["reward"][t, b])
            if not data["terminated"][t, b]:
                mask = data["obs"]["action_mask"][t + 1, b]
                best = [
                    late[t + 1][b, i, max(np.flatnonzero(mask[i]), key=lambda a, i=i: now[t + 1][b, i, a])]
                    for i in range(N)
                ]
                state = data["obs"]["global_state"][t + 1, b].astype(np.float64)
                goal += 0.99 * mixed(learner.target.module.mixer, np.array(best), state)
            errors.append(value - goal)
    metrics = learner.update(learner.prepare(data), Clock(1, 0)).metrics
    assert metrics["loss"] == pytest.approx(np.mean(0.5 * np.square(errors)), rel=1e-4)


def test_agents_have_their_number_unless_told_otherwise():
    same = {"obs": torch.ones(2, N, D)}
    told, _ = make(qmix)
    assert (told(same)["q"].std(1) > 0).all()
    alike, _ = make(qmix, agent_ids=False)
    assert (alike(same)["q"].std(1) < 1e-6).all()


def test_each_agent_explores_by_itself_and_only_legally():
    spec = hunt()
    rule, rng = act.make_rule("q_each", {"epsilon": 0.5}), np.random.default_rng(0)
    q = rng.random((4000, N, A)).astype(np.float32)
    mask = rng.random((4000, N, A)) < 0.5
    mask[..., 2] |= ~mask.any(-1)
    best = np.where(mask, q, -np.inf).argmax(-1)
    greedy = rule.choose(spec.layout, {"q": q}, mask.reshape(4000, -1), None, act.TRAINED)["action"]
    np.testing.assert_array_equal(greedy, best)
    drawn = rule.choose(spec.layout, {"q": q}, mask.reshape(4000, -1), rng, Clock(0, 0))["action"]
    assert np.take_along_axis(mask, drawn[..., None], -1).all()
    other = drawn != best
    expected = 0.5 * (1 - 1 / mask.sum(-1)).mean()
    np.testing.assert_allclose(other.mean(0), expected, atol=0.03)
    both = (other[:, 0] & other[:, 1]).mean()
    assert both == pytest.approx(expected**2, abs=0.02)  # one at random does not make the others so


def test_what_is_no_team_is_refused_with_what_to_write():
    with pytest.raises(ConfigError, match=r"CartPole-v1 has none: join the agents of a game with env.teams="):
        make_policy(get_algo("QMIX"), qmix.Config(), env_spec(EnvConfig("CartPole-v1")))


def test_a_memory_replays_sequences():
    spec = hunt()
    assert type(qmix.experience(qmix.Config(), spec, ModelConfig())) is Replay
    assert type(qmix.experience(qmix.Config(), spec, ModelConfig(use_lstm=True))) is Sequences


def test_the_state_is_all_observations_where_none_is_declared():
    class Silent(TwoStep):
        def __init__(self):
            super().__init__()
            self.global_state_space = None

    spec = env_spec(EnvConfig(Silent, teams={"t": ["a", "b"]}))
    model = qmix.make_model(qmix.Config(), spec, ModelConfig())
    learner = qmix.Learner(qmix.Config(), spec, model, ModelConfig(), record=False)
    obs = {"obs": torch.arange(12.0).reshape(2, 2, 3)}
    torch.testing.assert_close(learner.state(obs), torch.arange(12.0).reshape(2, 6))
