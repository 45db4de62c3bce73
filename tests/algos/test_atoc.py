"""ATOC: thoughts and groups against loops in float64, agents that keep silent, what the attention unit learns."""

import numpy as np
import pytest
import torch

from bray.act import Clock
from bray.algos import atoc, get_algo, make_policy
from bray.envs import EnvConfig, env_spec
from bray.envs.agent_games import Hunt
from bray.errors import ConfigError
from bray.inference.export import export_onnx
from bray.inference.onnx_engine import OnnxEngine
from bray.nn import ModelConfig
from bray.spec import EnvSpec, Space

B, N, H, K = 9, 4, 6, 2
TEAM = ("a", "b", "c", "d")
SPEC = EnvSpec(
    "pushes",
    Space("dict", parts=(Space("box", (N, 5), "float32"),), names=("obs",)),
    Space("box", (N, 2), "float32", -1.0, 1.0),
    team=TEAM,
)


def make(spec=SPEC, **options):
    torch.manual_seed(0)
    config = atoc.Config(**{"thought_size": H, "group_size": K, **options})
    small = ModelConfig(fcnet_hiddens=(8,), fcnet_activation="tanh")
    model = atoc.make_model(config, spec, small)
    learner = atoc.Learner(config, spec, model, small, seed=0, record=False)
    with torch.no_grad():  # far from where they begin, and some want to talk
        for p in [*model.parameters(), *learner.target.module.parameters(), *learner.target_actor.module.parameters()]:
            p.add_(0.3 * torch.randn_like(p))
    return model, learner


def observed(seed=0):
    return {"obs": np.random.default_rng(seed).standard_normal((B, N, 5)).astype(np.float32)}


def tensors(obs):
    return {k: torch.from_numpy(x) for k, x in obs.items()}


def replayed():
    rng = np.random.default_rng(1)
    rewards = rng.standard_normal((B, N)).astype(np.float32)
    return {
        "obs": observed(2),
        "next_obs": observed(3),
        "action": rng.uniform(-1, 1, (B, 2 * N)).astype(np.float32),
        "reward": rewards.sum(-1),
        "rewards": rewards,
        "discount": np.where(rng.random(B) < 0.3, 0.0, 0.9).astype(np.float32),
        "weight": np.ones(B, np.float32),
        "alive": rng.random((B, N)) < 0.8,
    }


class Loop:
    """The network in plain numpy and float64, one game at a time."""

    def __init__(self, module):
        self.p = {k: v.detach().numpy().astype(np.float64) for k, v in module.state_dict().items()}

    def layer(self, name, x):
        return self.p[f"{name}.weight"] @ x + self.p[f"{name}.bias"]

    def thought(self, obs, i):
        x = np.concatenate([obs[i], np.eye(N)[i]])
        return np.tanh(self.layer("thought", np.tanh(self.layer("encoder.trunk.layers.0", x))))

    def wants(self, thought):
        return float(self.layer("attention.2", np.maximum(self.layer("attention.0", thought), 0.0))[0])

    def side(self, name, thoughts):
        h = c = np.zeros(H // 2)
        out = []
        for x in thoughts:
            sums = self.layer(f"{name}.project", x) + h @ self.p[f"{name}.hidden"]
            i, f, o = (1 / (1 + np.exp(-s)) for s in np.split(sums[: 3 * (H // 2)], 3))
            c = f * c + i * np.tanh(sums[3 * (H // 2) :])
            h = o * np.tanh(c)
            out.append(h)
        return out

    def talk(self, thoughts):
        ahead, back = self.side("ahead", thoughts), self.side("back", thoughts[::-1])[::-1]
        return [np.concatenate(pair) for pair in zip(ahead, back, strict=True)]

    def group(self, thoughts, i):
        others = sorted(set(range(N)) - {i}, key=lambda j: np.square(thoughts[j] - thoughts[i]).sum())
        return [i, *others[: K - 1]]

    def think(self, obs):
        old = [self.thought(obs, i) for i in range(N)]
        new = list(old)
        for i in range(N):
            if self.wants(old[i]) > 0:
                group = self.group(old, i)
                for j, x in zip(group, self.talk([new[j] for j in group]), strict=True):
                    new[j] = x
        return old, new

    def decide(self, old, new):
        x = np.tanh(self.layer("body", np.concatenate([old, new])))
        return np.tanh(self.layer("head", x))


def value(critic, obs, i, action):
    p = Loop(critic)
    x = np.tanh(p.layer("body.layers.0", np.concatenate([obs[i], np.eye(N)[i], action])))
    return float(p.layer("head", x)[0])


def test_thoughts_and_actions_are_those_of_a_loop():
    model, _ = make()
    obs, loop = observed(), Loop(model)
    with torch.no_grad():
        thoughts, mu = model.think(tensors(obs)), model(tensors(obs))["mu"].numpy().reshape(B, N, 2)
    talked = 0
    for b in range(B):
        old, new = loop.think(obs["obs"][b])
        talked += sum((x != y).any() for x, y in zip(old, new, strict=True))
        np.testing.assert_allclose(thoughts.old[b], old, atol=1e-5)
        np.testing.assert_allclose(thoughts.new[b], new, atol=1e-5)
        np.testing.assert_allclose(mu[b], [loop.decide(x, y) for x, y in zip(old, new, strict=True)], atol=1e-5)
    assert 0 < talked < B * N  # some talk and some keep silent


def test_without_initiators_new_thoughts_are_the_old_ones():
    model, _ = make()
    with torch.no_grad():
        model.attention[2].bias.fill_(-100.0)
        silent = model.think(tensors(observed()))
        model.attention[2].bias.fill_(100.0)
        talking = model.think(tensors(observed()))
    assert (silent.new == silent.old).all()
    assert (talking.new != talking.old).any(-1).all()  # each is in its own group


def test_the_exported_graph_talks_as_the_model_does_for_any_number_of_games():
    three = Space("dict", parts=(Space("box", (3, 5), "float32"),), names=("obs",))
    actions = Space("box", (3, 2), "float32", -1.0, 1.0)
    model, _ = make(EnvSpec("pushes", three, actions, team=TEAM[:3]))
    engine = OnnxEngine(export_onnx(model, [{"obs": observed()["obs"][:, :3]}]))
    engine.set_weights({k: v.numpy() for k, v in model.state_dict().items()})
    for games in (1, B):
        obs = {"obs": observed(7)["obs"][:games, :3]}
        with torch.no_grad():
            np.testing.assert_allclose(engine.forward(obs)["mu"], model(tensors(obs))["mu"], atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_group_is_an_agent_and_those_nearest(size):
    model, _ = make(group_size=size)
    thoughts = torch.randn(50, N, H)
    thoughts[0] = 1.0  # all alike
    groups = model.groups(thoughts)
    assert groups.shape == (50, N, size)
    assert (groups[..., 0] == torch.arange(N)).all()
    assert all(len(set(group.tolist())) == size for game in groups for group in game)
    for b, i in np.ndindex(50, N):
        far = (thoughts[b] - thoughts[b, i]).square().sum(-1)
        out = [j for j in range(N) if j not in groups[b, i]]
        assert not out or far[out].min() >= far[groups[b, i]].max()


def test_the_losses_are_those_of_a_loop():
    model, learner = make(critic_lr=1e-12)
    batch = replayed()
    loop, late = Loop(model), Loop(learner.target_actor.module)
    errors, gains, values = [], np.zeros((B, N)), []
    for b in range(B):
        now, later = batch["obs"]["obs"][b], batch["next_obs"]["obs"][b]
        (old, new), (late_old, late_new) = loop.think(now), late.think(later)
        for i in range(N):
            future = value(learner.target.module, later, i, late.decide(late_old[i], late_new[i]))
            did = batch["action"][b].reshape(N, 2)[i]
            errors.append(value(learner.critic, now, i, did) - batch["rewards"][b, i] - batch["discount"][b] * future)
            if batch["alive"][b, i]:
                values.append(value(learner.critic, now, i, loop.decide(old[i], new[i])))
            group = loop.group(old, i)
            for j, x in zip(group, loop.talk([old[j] for j in group]), strict=True):
                alone = value(learner.critic, now, j, loop.decide(old[j], old[j]))
                gains[b, i] += (value(learner.critic, now, j, loop.decide(old[j], x)) - alone) / K
    alive = batch["alive"]
    goal = (gains - gains[alive].min()) / (gains[alive].max() - gains[alive].min())
    wants = np.array([[loop.wants(loop.thought(batch["obs"]["obs"][b], i)) for i in range(N)] for b in range(B)])
    p = 1 / (1 + np.exp(-wants))
    attention = -(goal * np.log(p) + (1 - goal) * np.log(1 - p))[alive].mean()
    metrics = learner.update(batch, Clock(1, 0)).metrics
    assert metrics["critic_loss"] == pytest.approx(np.mean(0.5 * np.square(errors)), rel=1e-4)
    assert metrics["actor_loss"] == pytest.approx(-np.mean(values), rel=1e-4)
    assert metrics["gain"] == pytest.approx(gains[alive].mean(), rel=1e-3)
    assert metrics["attention_loss"] == pytest.approx(attention, rel=1e-4)
    assert metrics["initiators"] == pytest.approx((wants > 0)[alive].mean())


def test_the_attention_unit_learns_who_gains_and_nobody_else_is_moved_by_it():
    model, learner = make()
    thoughts = model.think(tensors(observed()))
    gain = torch.where(thoughts.old[..., 0].detach() > 0, 1.0, -1.0)
    alive = torch.ones(B, N, dtype=torch.bool)
    loss = learner.attention_loss(gain, thoughts.attention, alive)
    names, weights = zip(*model.named_parameters(), strict=True)
    slopes = torch.autograd.grad(loss, weights, allow_unused=True)
    moved = [name for name, slope in zip(names, slopes, strict=True) if slope is not None]
    assert set(moved) == {f"attention.{k}.{what}" for k in (0, 2) for what in ("weight", "bias")}
    optimizer = torch.optim.Adam(model.attention.parameters(), 0.05)
    for _ in range(200):
        optimizer.zero_grad()
        attention = model.think(tensors(observed())).attention
        learner.attention_loss(gain, attention, alive).backward()
        optimizer.step()
    assert ((attention > 0) == (gain > 0)).float().mean() > 0.9


def test_what_it_does_not_train_is_refused():
    with pytest.raises(ConfigError, match="agents with Discrete or Box actions, and CartPole-v1 has none"):
        make_policy(get_algo("ATOC"), atoc.Config(), env_spec(EnvConfig("CartPole-v1")))
    with pytest.raises(ConfigError, match=r"group_size: a group has 2 to 4 members in pushes, got 5"):
        make(group_size=5)
    with pytest.raises(ConfigError, match=r"thought_size: .* got 7"):
        make(thought_size=7)
    with pytest.raises(ConfigError, match="leave out use_lstm and custom_model"):
        atoc.make_model(atoc.Config(), SPEC, ModelConfig(use_lstm=True))


def test_agents_with_choices_draw_only_legal_ones():
    spec = env_spec(EnvConfig(Hunt, teams={"team": ["hunter_0", "hunter_1", "hunter_2"]}))
    config, small = atoc.Config(thought_size=H), ModelConfig(fcnet_hiddens=(8,))
    model = atoc.make_model(config, spec, small)
    learner = atoc.Learner(config, spec, model, small, seed=0, record=False)
    rng = np.random.default_rng(0)
    mask = torch.from_numpy(rng.random((200, 3, 3)) < 0.5)
    mask[..., 1] = True
    out = model({"obs": torch.rand(200, 3, 24)})
    drawn = learner.actions(out, mask, torch.from_numpy(rng.gumbel(size=(1, 200, 3, 3))).float(), 0)
    assert drawn.sum(-1).allclose(torch.ones(200, 3))
    assert (drawn.argmax(-1, keepdim=True) != 1).any()
    assert mask.gather(-1, drawn.argmax(-1, keepdim=True)).all()
