"""The model section of a config: the user's own models and first layers, and what a built model must return."""

import sys
import types

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from bray.errors import ConfigError, UnknownName
from bray.nn import (
    ActorCritic,
    ContinuousQ,
    ModelConfig,
    QNetwork,
    RunningNorm,
    SquashedGaussianActor,
    make_encoder,
    make_model,
    register_model,
    register_preprocessor,
    update_normalizers,
)
from bray.spec import EnvSpec, Space

BOX = Space("box", (4,), "float32", -1.0, 1.0)
SPEC = EnvSpec("x", BOX, Space("discrete", (), "int64", n=(3,), start=(0,)))
ACT = EnvSpec("y", BOX, BOX)


class Mine(nn.Module):
    def __init__(self, spec, config, width=8):
        super().__init__()
        self.body = nn.Linear(4, width)
        self.dist = nn.Linear(width, spec.layout.num_params)
        self.v = nn.Linear(width, 1)

    def forward(self, obs):
        x = self.body(obs).relu()
        return {"dist": self.dist(x), "value": self.v(x).squeeze(1)}


class Wrong(Mine):
    def forward(self, obs):
        out = super().forward(obs)
        return {"dist": out["dist"], "value": out["value"][:, None]}


class Halve(nn.Module):
    """Keeps the first two numbers, halved."""

    def __init__(self, space, factor=0.5):
        super().__init__()
        self.factor = factor
        self.space = Space("box", (2,), "float32")

    def forward(self, obs):
        return obs[:, :2] * self.factor


def test_kinds_of_models():
    config = ModelConfig()
    assert isinstance(make_model("actor_critic", SPEC, config), ActorCritic)
    q = make_model("q", SPEC, config, dueling=True, num_atoms=5)
    assert isinstance(q, QNetwork)
    assert (q.dueling, q.atoms) == (True, 5)
    assert isinstance(make_model("squashed_gaussian", ACT, config), SquashedGaussianActor)
    assert isinstance(make_model("continuous_q", ACT, config, n=3), ContinuousQ)
    with pytest.raises(UnknownName, match="actor_critic"):
        make_model("actor_critics", SPEC, config)


def test_custom_model_by_class_by_name_and_by_module():
    for name in (Mine, "mine", "my_models:Mine"):
        register_model("mine", Mine)
        sys.modules["my_models"] = types.SimpleNamespace(Mine=Mine)
        try:
            model = make_model("actor_critic", SPEC, ModelConfig(custom_model=name, custom_options={"width": 12}))
        finally:
            del sys.modules["my_models"]
        assert isinstance(model, Mine)
        assert model.body.out_features == 12


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"custom_model": Wrong}, r"returned .*'value': \[2, 1\](.|\n)*\"value\": \[B\]"),
        ({"custom_model": lambda spec, config: 3}, "should make an nn.Module, it made int"),
        ({"custom_model": Mine, "use_lstm": True}, "initial_state"),
        ({"custom_model": "no_such_module_here:X"}, "cannot be imported.*PYTHONPATH"),
        ({"custom_model": "bray.nn:ActorCritik"}, "Did you mean 'ActorCritic'"),
        ({"custom_model": "my_net"}, "unknown custom_model 'my_net'"),
    ],
)
def test_custom_models_that_cannot_work_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        make_model("actor_critic", SPEC, ModelConfig(**config))


def test_custom_preprocessor_is_the_first_layer():
    register_preprocessor("halve", Halve)
    config = ModelConfig(custom_preprocessor="halve", custom_options={"factor": 2.0}, normalize_observations=True)
    encoder = make_encoder(BOX, config)
    assert encoder.features.out_features == 2
    x = torch.randn(3, 4)
    torch.testing.assert_close(encoder.features(x), x[:, :2] * 2.0)
    update_normalizers(encoder, torch.stack([x, x + 1]))
    (norm,) = (m for m in encoder.modules() if isinstance(m, RunningNorm))
    torch.testing.assert_close(norm.mean, (2.0 * (x[:, :2].double().mean(0) + 0.5)), rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match="attribute `space`"):
        make_encoder(BOX, ModelConfig(custom_preprocessor=lambda space: nn.Identity()))


def test_config_reads_plain_data_and_keeps_its_own_messages():
    adapter = TypeAdapter(ModelConfig)
    data = {"fcnet_hiddens": [32, 16], "conv_filters": [[16, [4, 4], 2]], "layers": [{"layer_type": "none"}], "dim": 42}
    config = adapter.validate_python(data)
    assert config.fcnet_hiddens == (32, 16)
    assert adapter.validate_json(adapter.dump_json(config)) == config
    with pytest.raises(ConfigError, match="Did you mean 'tanh'"):
        adapter.validate_python({"fcnet_activation": "tan"})


def test_same_seed_same_weights():
    def weights():
        torch.manual_seed(7)
        return make_model("actor_critic", SPEC, ModelConfig()).state_dict()

    a, b = weights(), weights()
    assert all(torch.equal(a[k], b[k]) for k in a)
    torch.manual_seed(8)
    c = make_model("actor_critic", SPEC, ModelConfig()).state_dict()
    assert not torch.equal(a["policy.weight"], c["policy.weight"])
