"""Layers: activations, the net written as a list (counts by hand)."""

import pytest
import torch

from bray.errors import ConfigError, UnknownName
from bray.nn import ModelConfig, make_encoder
from bray.nn.layers import ACTIVATIONS, activation
from bray.spec import Space

VECTOR = Space("box", (4,), "float32")
IMAGE = Space("box", (4, 84, 84), "uint8", 0, 255)


def count(module):
    return sum(p.numel() for p in module.parameters())


def build(space, *layers):
    torch.manual_seed(0)
    return make_encoder(space, ModelConfig(layers=list(layers)))


def test_every_activation_differs_and_other_names_work():
    x = torch.tensor([[-2.0, 0.5, 1.0]])
    values = {name: tuple(fn(x)[0].tolist()) for name, fn in ACTIVATIONS.items()}
    assert len(set(values.values())) == len(ACTIVATIONS)
    assert activation("Leaky_ReLU") is ACTIVATIONS["leakyrelu"]
    assert activation(None)(x) is x
    with pytest.raises(UnknownName, match="Did you mean 'sigmoid'"):
        activation("sigmoidd")


def test_a_list_of_linear_layers():
    net = build(
        VECTOR,
        {"layer_type": "linear", "layer_dim": [256], "activation": "relu"},
        {"layer_type": "linear", "layer_dim": [256], "activation": "relu"},
    )
    assert count(net) == 4 * 256 + 256 + 256 * 256 + 256
    assert net.out_features == 256
    assert (net(torch.randn(3, 4)) >= 0).all()


def test_a_convolutional_list():
    net = build(
        IMAGE,
        {"layer_type": "conv2d", "out_channel": 16, "kernel_size": 8, "stride": 4, "activation": "relu"},  # 20
        {"layer_type": "pooling", "pooling_type": "max2d", "kernel_size": 2},  # 10
        {"layer_type": "conv2d", "layer_dim": [32], "kernel_size": [3, 3], "padding": 1, "activation": "relu"},  # 10
        {"layer_type": "pooling", "pooling_type": "avg2d", "kernel_size": 2, "stride": 2},  # 5
        {"layer_type": "norm", "norm_type": "layernorm"},
        {"layer_type": "flatten"},
        {"layer_type": "linear", "layer_size": 64, "activation": "tanh"},
        {"layer_type": "none"},
    )
    want = 4 * 64 * 16 + 16 + 16 * 9 * 32 + 32 + 2 * 32 * 25 + 32 * 25 * 64 + 64
    assert count(net) == want
    assert net(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).shape == (2, 64)


def test_a_list_on_a_flattened_image_and_one_that_ends_in_an_image():
    assert count(build(IMAGE, {"layer_type": "linear", "layer_dim": [2]})) == 4 * 84 * 84 * 2 + 2
    net = build(IMAGE, {"layer_type": "conv2d", "layer_dim": [2], "kernel_size": 84})
    assert net(torch.zeros(3, 4, 84, 84, dtype=torch.uint8)).shape == (3, net.out_features) == (3, 2)


def test_embed_looks_up_a_discrete_observation():
    space = Space("discrete", (), "int64", n=(10,), start=(5,))
    net = build(space, {"layer_type": "embed", "layer_dim": [6]}, {"layer_type": "linear", "layer_dim": [3]})
    assert count(net) == 10 * 6 + 6 * 3 + 3
    with torch.no_grad():
        table, dense = net.trunk.layers
        torch.testing.assert_close(net(torch.tensor([5, 14])), dense(table.weight[[0, 9]]))
    with pytest.raises(ConfigError, match="one Discrete"):
        build(VECTOR, {"layer_type": "embed", "layer_dim": [6]})


@pytest.mark.parametrize(
    ("space", "layer", "message"),
    [
        (VECTOR, {"layer_type": "conv2d", "layer_dim": [2], "kernel_size": 3}, "one image"),
        (IMAGE, {"layer_type": "conv2d", "layer_dim": [2], "kernel_size": 99}, "does not fit"),
        (IMAGE, {"layer_type": "pooling", "pooling_type": "min2d"}, "unknown pooling type"),
        (IMAGE, {"layer_type": "conv2d", "layer_dim": [2], "kernel_size": 0}, "at least 1"),
        (VECTOR, {"layer_type": "norm", "norm_type": "batchnorm"}, "unknown norm type"),
        (VECTOR, {"layer_type": "linear", "layer_dim": [2, 3]}, "positive integer or a list of one"),
        (VECTOR, {"layer_type": "linear", "layer_dim": [2], "activation": "rlu"}, "Did you mean"),
        (VECTOR, "linear", "expected keys and values, got 'linear'"),
    ],
)
def test_layers_that_cannot_work_are_refused(space, layer, message):
    with pytest.raises(ConfigError, match=message):
        build(space, layer)


def test_noisy_list_counts():
    net = build(VECTOR, {"layer_type": "noisy_linear", "layer_dim": [8], "activation": "relu"})
    assert count(net) == 2 * (4 * 8 + 8)
