"""Models: shapes, layouts, first outputs, dueling and distributional identities, critics evaluated together."""

import pytest
import torch

from bray import distributions
from bray.errors import ConfigError
from bray.nn import ActorCritic, ContinuousQ, ModelConfig, QNetwork, SquashedGaussianActor, Towers
from bray.spec import EnvSpec, Space


def box(*shape):
    return Space("box", shape, "float32", -1.0, 1.0)


def discrete(n):
    return Space("discrete", (), "int64", n=(n,), start=(0,))


OBS = box(4)
IMAGE = Space("box", (4, 84, 84), "uint8", 0, 255)
MIXED = Space("dict", parts=(box(2), discrete(3), box(1)), names=("a", "b", "c"))
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def spec(action, observation=OBS):
    return EnvSpec("x", observation, action)


def count(module):
    return sum(p.numel() for p in module.parameters())


def grads_reach_all(model, loss):
    for (name, _), grad in zip(
        model.named_parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), strict=True
    ):
        assert grad is not None, name
        assert grad.abs().sum() > 0, name


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("action", [discrete(3), box(2), MIXED], ids=["discrete", "box", "mixed"])
def test_actor_critic_outputs_follow_the_layout(action, free, share):
    torch.manual_seed(0)
    config = ModelConfig(free_log_std=free, vf_share_layers=share, log_std_init=-0.7)
    model = ActorCritic(spec(action), config)
    out = model(X)
    layout = spec(action).layout
    assert out["dist"].shape == (5, layout.num_params)
    assert out["value"].shape == (5,)
    grads_reach_all(model, out["dist"].square().sum() + out["value"].sum())
    for part in layout.parts:
        if part.kind == "gaussian":
            log_std = out["dist"][:, part.param][:, part.n :]
            torch.testing.assert_close(log_std, torch.full((5, part.n), -0.7), atol=0.1, rtol=0)
            assert bool((log_std == log_std[:1]).all()) == free  # the same for all observations only when it is free


def test_mixed_parts_lie_in_order():
    """Set the policy's bias to numbers that name the outputs and read them back from the layout's places."""
    model = ActorCritic(spec(MIXED), ModelConfig())
    with torch.no_grad():
        model.policy.weight.zero_()
        model.policy.bias.copy_(torch.tensor([1.0, 2, 11, 12, 13, 21]))  # means a, logits b, mean c
        model.log_std.copy_(torch.tensor([-1.0, -2, -3]))
    assert model(X)["dist"][0].tolist() == [1, 2, -1, -2, 11, 12, 13, 21, -3]


def test_the_first_policy_is_nearly_uniform_and_the_value_head_is_of_gain_one():
    torch.manual_seed(0)
    for share in (True, False):
        s = spec(discrete(4))
        model = ActorCritic(s, ModelConfig(vf_share_layers=share))
        dist = model(X)["dist"]
        action = torch.zeros(s.layout.shape, dtype=torch.int64).expand(len(dist), *s.layout.shape)
        assert distributions.log_prob_entropy(s.layout, dist, action)[1].min() > torch.log(torch.tensor(4.0)) - 1e-3
        policy, value = model.head.weight.split([4, 1]) if share else (model.policy.weight, model.value.weight)
        torch.testing.assert_close(policy @ policy.t(), 1e-4 * torch.eye(4), atol=1e-7, rtol=0)
        torch.testing.assert_close(value.norm(), torch.tensor(1.0))


def test_sharing_is_on_for_images_and_off_for_vectors():
    small = Space("box", (1, 10, 10), "uint8", 0, 255)
    assert ActorCritic(spec(discrete(2), small), ModelConfig(conv_features=8)).shared
    assert not ActorCritic(spec(discrete(2)), ModelConfig()).shared
    # shared: 4*64+64, 64*64+64, 64*3+3; separate: the dense layers twice, 64*2+2 and 64+1
    assert count(ActorCritic(spec(discrete(2)), ModelConfig(vf_share_layers=True))) == 320 + 4160 + 195
    assert count(ActorCritic(spec(discrete(2)), ModelConfig())) == 2 * (320 + 4160) + 130 + 65
    apart = ActorCritic(spec(discrete(2), small), ModelConfig(conv_features=8, vf_share_layers=False))
    x = torch.randint(0, 256, (3, 1, 10, 10), dtype=torch.uint8)
    (unused,) = torch.autograd.grad(
        apart(x)["value"].sum(), apart.core.encoders[0].parameters().__next__(), allow_unused=True
    )
    assert unused is None


def test_separate_towers_do_not_touch_each_other():
    model = ActorCritic(spec(discrete(2)), ModelConfig())
    policy, value = (list(e.parameters()) for e in model.core.encoders)
    grads = torch.autograd.grad(model(X)["value"].sum(), policy + value, allow_unused=True)
    assert all(g is None for g in grads[: len(policy)])
    assert all(g.abs().sum() > 0 for g in grads[len(policy) :])


def test_towers_equal_separate_networks():
    torch.manual_seed(3)
    towers = Towers(3, 4, (8, 6), "relu", layer_norm=True, out=2)
    y = towers(X)
    assert y.shape == (3, 5, 2)
    for k in range(3):
        x = X
        for i in range(3):
            x = x @ towers.weights[i][k] + towers.biases[i][k]
            if i < 2:
                x = torch.nn.functional.layer_norm(x, x.shape[-1:]).relu()
        torch.testing.assert_close(y[k], x)
    w = towers.weights[1]  # orthogonal columns of gain sqrt 2, each tower its own
    torch.testing.assert_close(w.mT @ w, 2 * torch.eye(6).expand(3, 6, 6), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(w[0], w[1])


@pytest.mark.parametrize("atoms", [1, 11])
@pytest.mark.parametrize("dueling", [False, True])
def test_q_network(dueling, atoms):
    torch.manual_seed(0)
    model = QNetwork(spec(discrete(3)), ModelConfig(fcnet_hiddens=(16,)), dueling, atoms, support=(-1.0, 4.0))
    out = model(X)
    assert out["q"].shape == (5, 3)
    grads_reach_all(model, out["q"].square().sum())
    streams = 16 * 32 + 32 + (16 * 3 * atoms + 3 * atoms) + (16 * atoms + atoms)
    assert count(model) == 4 * 16 + 16 + (streams if dueling else 16 * 3 * atoms + 3 * atoms)
    if atoms > 1:
        assert out["logits"].shape == (5, 3, 11)
        p = out["logits"].softmax(-1).detach()
        torch.testing.assert_close(out["q"].detach(), (p * torch.linspace(-1, 4, 11)).sum(-1))
    if dueling:
        a, v = torch.tanh(model.streams(model.core(X))).chunk(2, 1)
        a, v = model.advantage(a).view(5, 3, atoms), model.value(v).view(5, 1, atoms)
        want = v + a - a.mean(1, keepdim=True)
        torch.testing.assert_close(out["logits"] if atoms > 1 else out["q"][..., None], want, atol=1e-5, rtol=1e-5)
        if atoms == 1:  # the mean over actions of Q is V
            torch.testing.assert_close(out["q"].mean(1), v[:, 0, 0], atol=1e-5, rtol=1e-5)


def test_convolutional_q_network():
    model = QNetwork(spec(discrete(6), IMAGE), ModelConfig())
    assert model(torch.zeros(2, 4, 84, 84, dtype=torch.uint8))["q"].shape == (2, 6)
    assert count(model) == 1_684_128 + 512 * 6 + 6


def test_q_network_refuses():
    with pytest.raises(ConfigError, match="Discrete action space"):
        QNetwork(spec(box(2)), ModelConfig())
    with pytest.raises(ConfigError, match="num_atoms=0"):
        QNetwork(spec(discrete(2)), ModelConfig(), num_atoms=0)


def test_squashed_gaussian_actor_stays_in_bounds():
    torch.manual_seed(0)
    model = SquashedGaussianActor(spec(box(3)), ModelConfig(fcnet_activation="relu"))
    out = model(X)["dist"]
    assert out.shape == (5, 6)
    grads_reach_all(model, out.square().sum())
    assert out[:, 3:].abs().max() < 0.1  # starts at a deviation of 1
    with torch.no_grad():
        model.head.bias.fill_(100.0)
    assert (model(X)["dist"][:, 3:] == 2.0).all()
    with torch.no_grad():
        model.head.bias.fill_(-100.0)
    assert (model(X)["dist"][:, 3:] == -5.0).all()
    cold = SquashedGaussianActor(spec(box(3)), ModelConfig(log_std_init=-3.0))
    torch.testing.assert_close(cold(X)["dist"][:, 3:], torch.full((5, 3), -3.0), atol=0.1, rtol=0)
    with pytest.raises(ConfigError, match=r"continuous \(Box\) actions"):
        SquashedGaussianActor(spec(discrete(3)), ModelConfig())


@pytest.mark.parametrize("n", [1, 2, 5])
def test_continuous_critics(n):
    torch.manual_seed(0)
    model = ContinuousQ(spec(box(3)), ModelConfig(fcnet_hiddens=(16, 8), fcnet_activation="relu"), n)
    action = torch.randn(5, 3)
    q = model(X, action)
    assert q.shape == (n, 5)
    assert count(model) == n * (7 * 16 + 16 + 16 * 8 + 8 + 8 + 1)
    if n > 1:
        assert not torch.allclose(q[0], q[1])
    assert not torch.allclose(model(X, action + 1.0), q)
    grads_reach_all(model, q.square().sum())


def test_continuous_critics_of_images():
    small = Space("box", (1, 10, 10), "uint8", 0, 255)
    model = ContinuousQ(spec(box(3), small), ModelConfig(conv_features=16))
    x = torch.randint(0, 256, (2, 1, 10, 10), dtype=torch.uint8)
    assert model(x, torch.zeros(2, 3)).shape == (2, 2)
