"""Encoders: every kind of observation, parameter counts by hand, and each key of the model config changes what it
says."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bray import tree
from bray.errors import ConfigError, UnknownName
from bray.nn import ActorCritic, ModelConfig, example_obs, make_encoder
from bray.nn.encoders import ImageInput, blocks, default_filters
from bray.spec import EnvSpec, Space

DISCRETE = Space("discrete", (), "int64", n=(2,), start=(0,))


def box(*shape, dtype="float32", low=None, high=None):
    return Space("box", shape, dtype, low, high)


def image(*shape):
    return box(*shape, dtype="uint8", low=0, high=255)


def count(module):
    return sum(p.numel() for p in module.parameters())


def sample(space, rows=3, seed=0):
    rng = np.random.default_rng(seed)
    return tree.map(lambda *x: torch.from_numpy(np.stack(x)), *[space.sample(rng) for _ in range(rows)])


# --- parameter counts -------------------------------------------------------------------------------------------------

R84 = [[16, [8, 8], 4], [32, [4, 4], 2], [256, [11, 11], 1]]
R42 = [[16, [4, 4], 2], [32, [4, 4], 2], [256, [11, 11], 1]]


@pytest.mark.parametrize(
    ("space", "config", "params", "features"),
    [
        # 84 x 84 -> 21 -> 11 -> 1; 42 x 42 -> 21 -> 11 -> 1; no dense layer after 1 x 1
        (image(4, 84, 84), {"conv_filters": R84}, 4 * 64 * 16 + 16 + 16 * 16 * 32 + 32 + 32 * 121 * 256 + 256, 256),
        (image(4, 42, 42), {"conv_filters": R42}, 4 * 16 * 16 + 16 + 16 * 16 * 32 + 32 + 32 * 121 * 256 + 256, 256),
        # the last filter with 512 channels, images of 84 resized to 42
        (
            image(4, 84, 84),
            {"dim": 42, "conv_filters": [*R42[:2], [512, [11, 11], 1]]},
            4 * 16 * 16 + 16 + 16 * 16 * 32 + 32 + 32 * 121 * 512 + 512,
            512,
        ),
        # the dense network
        (box(8), {"fcnet_hiddens": (256, 256)}, 8 * 256 + 256 + 256 * 256 + 256, 256),
        # nature, as published for 84 x 84
        (image(4, 84, 84), {}, 1_684_128, 512),
        (image(4, 84, 84), {"conv_filters": "nature", "conv_features": 0}, 8224 + 32832 + 36928, 3136),
        # a board of 10 x 10 cells: MinAtar's own
        (box(10, 10, 4), {}, 4 * 9 * 16 + 16 + 1024 * 128 + 128, 128),
        # impala: entry convolutions, 4 residual convolutions each, 32 * 11 * 11 -> 256
        (
            image(4, 84, 84),
            {"conv_filters": "impala"},
            (4 * 9 * 16 + 16 + 4 * (16 * 9 * 16 + 16))
            + (16 * 9 * 32 + 32 + 4 * (32 * 9 * 32 + 32))
            + (32 * 9 * 32 + 32 + 4 * (32 * 9 * 32 + 32))
            + 3872 * 256
            + 256,
            256,
        ),
    ],
)
def test_parameter_counts_equal_hand_counts(space, config, params, features):
    encoder = make_encoder(space, ModelConfig(**config))
    assert count(encoder) == params
    assert encoder.out_features == features
    assert encoder(sample(space, 2)).shape == (2, features)


# --- kinds of observations --------------------------------------------------------------------------------------------

KINDS = {
    "vector": (box(4), 4),
    "scalar": (box(), 1),
    "table": (box(3, 4), 12),
    "rank4": (box(2, 2, 2, 2), 128),
    "float64": (box(4, dtype="float64"), 4),
    "ints": (box(4, dtype="int32", low=0, high=9), 4),
    "ram": (box(128, dtype="uint8", low=0, high=255), 128),
    "discrete": (Space("discrete", (), "int64", n=(5,), start=(2,)), 5),
    "multi_discrete": (Space("multi_discrete", (3,), "int64", n=(2, 3, 4), start=(0, 0, 1)), 9),
    "multi_discrete_2d": (Space("multi_discrete", (2, 2), "int64", n=(2, 3, 2, 2), start=(0,) * 4), 9),
    "multi_binary": (Space("multi_binary", (2, 3), "int8"), 6),
    "image84": (image(4, 84, 84), 512),
    "image42": (image(1, 42, 42), 512),
    "image24": (image(3, 24, 24), 512),
    "atari_raw": (image(210, 160, 3), 512),
    "grid10": (image(10, 10, 4), 128),
    "grid5": (box(2, 5, 5), 128),
    "grid2": (box(3, 2, 2), 128),
    "bytes_rank2": (image(84, 84), 512),
    "dict": (Space("dict", parts=(box(4), image(1, 10, 10), DISCRETE), names=("v", "i", "d")), 134),
    "tuple": (Space("tuple", parts=(box(4), Space("tuple", parts=(box(2), DISCRETE)))), 8),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_observation_is_encoded_and_all_weights_learn(name):
    space, features = KINDS[name]
    torch.manual_seed(0)
    encoder = make_encoder(space, ModelConfig(fcnet_hiddens=(32,), conv_activation="elu"))
    out = encoder(sample(space))
    alone = space.kind == "box" and len(space.shape) in (2, 3, 4) and features >= 128
    assert out.shape == (3, features if alone else 32)
    assert out.dtype == torch.float32
    stem = encoder.features(sample(space))
    assert stem.shape == (3, features)
    for name, parameter in encoder.named_parameters():
        (grad,) = torch.autograd.grad(out.square().sum(), parameter, retain_graph=True)
        assert grad.abs().sum() > 0, name
    assert encoder(example_obs(space, 2)).shape[0] == 2


def test_values_of_the_stems():
    config = ModelConfig()
    start = Space("discrete", (), "int64", n=(3,), start=(-1,))
    assert make_encoder(start, config).features(torch.tensor([-1, 1])).tolist() == [[1, 0, 0], [0, 0, 1]]
    multi = Space("multi_discrete", (2,), "int64", n=(2, 3), start=(0, 5))
    assert make_encoder(multi, config).features(torch.tensor([[1, 6]])).tolist() == [[0, 1, 0, 1, 0]]
    ram = box(2, dtype="uint8", low=0, high=255)
    assert make_encoder(ram, config).features(torch.tensor([[0, 255]], dtype=torch.uint8)).tolist() == [[0.0, 1.0]]
    ints = box(2, dtype="int16", low=0, high=9)
    assert make_encoder(ints, config).features(torch.tensor([[3, 9]], dtype=torch.int16)).tolist() == [[3.0, 9.0]]
    both = Space("dict", parts=(box(2), start), names=("b", "a"))
    obs = {"b": torch.tensor([[0.5, 2.0]]), "a": torch.tensor([0])}
    assert make_encoder(both, config).features(obs).tolist() == [[0.5, 2.0, 0, 1, 0]]


def test_spaces_of_gymnasium_fit():
    space = gym.spaces.Dict(
        {
            "pos": gym.spaces.Box(-1, 1, (3,)),
            "cam": gym.spaces.Box(0, 255, (16, 16, 3), np.uint8),
            "k": gym.spaces.Discrete(3),
        }
    )
    ours = Space.from_gym(space)
    assert make_encoder(ours, ModelConfig())(sample(ours)).shape == (3, 64)


def test_the_action_mask_never_enters():
    parts = (box(4), Space("multi_binary", (2,), "int8"))
    masked = Space("dict", parts=parts, names=("x", "action_mask"))
    encoder = make_encoder(masked, ModelConfig())
    assert encoder.features.out_features == 4
    obs = sample(masked)
    before = encoder(obs)
    obs["action_mask"] = 1 - obs["action_mask"]
    assert torch.equal(encoder(obs), before)
    inner = Space("dict", parts=(masked,), names=("agent",))  # only at the top is it the mask
    assert make_encoder(inner, ModelConfig()).features.out_features == 6
    with pytest.raises(ConfigError, match="besides 'action_mask'"):
        make_encoder(Space("dict", parts=parts[1:], names=("action_mask",)), ModelConfig())


def test_images_are_scaled_and_turned():
    first = ImageInput(image(3, 8, 8), ModelConfig())
    last = ImageInput(image(8, 8, 3), ModelConfig())
    assert first.out_shape == last.out_shape == (3, 8, 8)
    assert ImageInput(image(210, 160, 3), ModelConfig()).out_shape == (3, 210, 160)
    assert ImageInput(image(16, 10, 10), ModelConfig()).out_shape == (16, 10, 10)
    assert ImageInput(image(10, 10, 16), ModelConfig()).out_shape == (16, 10, 10)
    assert ImageInput(image(84, 84), ModelConfig()).out_shape == (1, 84, 84)
    x = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(first(x), x.float() / 255)
    torch.testing.assert_close(last(x.permute(0, 2, 3, 1)), x.float() / 255)
    white = torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
    zero_mean = ImageInput(image(3, 8, 8), ModelConfig(zero_mean=True))
    torch.testing.assert_close(zero_mean(white), torch.ones(1, 3, 8, 8))
    torch.testing.assert_close(zero_mean(0 * white), -torch.ones(1, 3, 8, 8))
    floats = ImageInput(box(3, 8, 8), ModelConfig(zero_mean=True))
    torch.testing.assert_close(floats(white.float()), white.float())
    planes = box(3, 8, 8, dtype="uint8", low=0, high=1)  # of a board
    torch.testing.assert_close(ImageInput(planes, ModelConfig())(white // 255), torch.ones(1, 3, 8, 8))
    torch.testing.assert_close(ImageInput(planes, ModelConfig(zero_mean=True))(0 * white), -torch.ones(1, 3, 8, 8))


@pytest.mark.parametrize("shape", [(8, 8, 3), (3, 8, 8)])
def test_stacked_pictures_are_channels_of_one(shape):
    stem = ImageInput(image(4, *shape), ModelConfig())
    x = torch.randint(0, 256, (2, 4, *shape), dtype=torch.uint8)
    single = ImageInput(image(*shape), ModelConfig())
    assert stem.out_shape == (12, 8, 8)
    torch.testing.assert_close(stem(x), torch.cat([single(x[:, k]) for k in range(4)], 1))
    encoder = make_encoder(image(4, *shape), ModelConfig(conv_filters="impala"))
    assert encoder.has_image
    assert encoder(x).shape == (2, encoder.out_features)


@pytest.mark.parametrize("side", [*range(1, 40), 63, 64, 84, 96, 210])
def test_default_convolutions_fit_every_size(side):
    encoder = make_encoder(image(2, side, side), ModelConfig(conv_features=8))
    cells = encoder.features.stems[0].convs.out_shape
    assert min(cells) >= 1
    assert math.prod(cells) >= 16
    if side >= 5:
        assert math.prod(cells) <= 64 * 23 * 23
    assert encoder(torch.zeros(1, 2, side, side, dtype=torch.uint8)).shape == (1, 8)


def test_same_padding_is_that_of_the_reference():
    # n -> ceil(n / stride), one more cell after than before when odd, none for the last filter
    for side, kernel, stride in ((84, 8, 4), (21, 4, 2), (42, 4, 2), (7, 3, 2), (10, 5, 3)):
        filters = [[4, [kernel, kernel], stride], [8, [1, 1], 1]]
        encoder = make_encoder(image(1, side, side), ModelConfig(conv_filters=filters))
        convs = encoder.features.stems[0].convs
        assert convs.out_shape == (8, math.ceil(side / stride), math.ceil(side / stride))
    x = torch.zeros(1, 1, 3, 3)
    convs = (
        make_encoder(box(1, 3, 3), ModelConfig(conv_filters=[[1, [2, 2], 1], [1, [1, 1], 1]])).features.stems[0].convs
    )
    x[0, 0, 2, 2] = 1.0  # a 2 x 2 kernel pads after, so the corner is seen by the top left weight of the last cell
    torch.testing.assert_close(
        torch.nn.functional.conv2d(
            torch.nn.functional.pad(x, (0, 1, 0, 1)), convs.convs[0].weight, convs.convs[0].bias
        ),
        convs.convs[0](torch.nn.functional.pad(x, convs.pads[0])),
    )
    assert convs.pads[0] == (0, 1, 0, 1)


def test_default_filters_of_known_sizes():
    assert default_filters(84, 84)[0][0] == (32, (8, 8), 4)
    assert make_encoder(image(1, 42, 42), ModelConfig()).features.stems[0].convs.out_shape == (64, 7, 7)
    assert make_encoder(image(1, 10, 10), ModelConfig()).features.stems[0].convs.out_shape == (16, 8, 8)


# --- each key changes what it says ------------------------------------------------------------------------------------


def outputs(space, action=DISCRETE, **keys):
    torch.manual_seed(0)
    model = ActorCritic(EnvSpec("x", space, action), ModelConfig(**keys))
    obs = sample(space)
    return model, model(obs)


V, PIC, A = box(4), image(1, 20, 20), box(2, low=-1.0, high=1.0)


@pytest.mark.parametrize(
    ("space", "action", "keys"),
    [
        (V, DISCRETE, {"fcnet_hiddens": (64, 32)}),
        (V, DISCRETE, {"fcnet_activation": "relu"}),
        (PIC, DISCRETE, {"conv_filters": [[8, [4, 4], 2], [16, [10, 10], 1]]}),
        (PIC, DISCRETE, {"conv_filters": "impala"}),
        (PIC, DISCRETE, {"conv_activation": "tanh"}),
        (PIC, DISCRETE, {"conv_features": 64}),
        (PIC, DISCRETE, {"dim": 36}),
        (PIC, DISCRETE, {"zero_mean": True}),
        (V, A, {"free_log_std": False}),
        (V, A, {"log_std_init": -1.0}),
        (V, DISCRETE, {"vf_share_layers": True}),
        (PIC, DISCRETE, {"vf_share_layers": False}),
        (V, DISCRETE, {"layer_norm": True}),
        (PIC, DISCRETE, {"layer_norm": True}),
        (V, DISCRETE, {"init": "torch"}),
        (V, DISCRETE, {"layers": [{"layer_type": "linear", "layer_dim": [16], "activation": "relu"}]}),
    ],
)
def test_each_key_changes_the_outputs(space, action, keys):
    _, plain = outputs(space, action)
    _, changed = outputs(space, action, **keys)
    assert not all(torch.allclose(plain[k], changed[k], atol=1e-6) for k in plain)
    _, again = outputs(space, action, **keys)
    assert all(torch.equal(again[k], changed[k]) for k in changed)  # same seed, same net


def test_layer_norm_is_a_layer_norm_in_all_forms():
    torch.manual_seed(0)
    shared = make_encoder(V, ModelConfig(layer_norm=True, fcnet_activation="none"))
    towers, _ = outputs(V, layer_norm=True, fcnet_activation="none")
    x = torch.randn(6, 4)
    for features in (shared(x), *towers.core(x)):
        torch.testing.assert_close(features.mean(-1), torch.zeros(6), atol=1e-5, rtol=0)
        torch.testing.assert_close(features.std(-1, unbiased=False), torch.ones(6), atol=1e-3, rtol=0)


def test_zero_mean_turns_the_first_convolution():
    """[-1, 1] is 2x - 1 of [0, 1]: the same net sees twice the input less one."""
    torch.manual_seed(0)
    half = make_encoder(PIC, ModelConfig())
    full = make_encoder(PIC, ModelConfig(zero_mean=True))
    full.load_state_dict(half.state_dict())
    x = sample(PIC)
    torch.testing.assert_close(full.features.stems[0].input(x), half.features.stems[0].input(x) * 2 - 1)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fcnet_hiddens": (64, 0)}, r"fcnet_hiddens\[1\]: expected a whole number > 0, got 0"),
        ({"fcnet_hiddens": 64}, "fcnet_hiddens: expected a list of whole numbers > 0, got 64"),
        ({"fcnet_activation": "rellu"}, "Did you mean 'relu'"),
        ({"conv_activation": "x"}, "unknown activation 'x'"),
        ({"conv_filters": "natur"}, "Did you mean 'nature'"),
        ({"conv_filters": [[16, 4]]}, r"conv_filters\[0\] should be \[channels"),
        ({"conv_filters": [[16, [4, 4, 4], 2]]}, r"conv_filters\[0\]"),
        ({"conv_filters": []}, "conv_filters is empty"),
        ({"conv_features": -1}, "conv_features"),
        ({"dim": 0}, "dim: expected a whole number > 0 or null, got 0"),
        ({"lstm_cell_size": 0}, "lstm_cell_size"),
        ({"max_seq_len": -5}, "max_seq_len: expected a whole number > 0, got -5"),
        ({"init": "orthogonall"}, "Did you mean 'orthogonal'"),
        ({"layers": []}, "at least one layer"),
        ({"layers": [{"layer_type": "linaer", "layer_dim": [2]}]}, "Did you mean 'linear'"),
        ({"layers": [{"layer_type": "linear"}]}, "needs layer_dim"),
        ({"layers": [{"layer_type": "linear", "layer_dim": [2], "bias": True}]}, "unknown key of a linear layer"),
    ],
)
def test_wrong_values_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**keys)


def test_filters_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"conv_filters\[2\]: a kernel of \[11, 11\] does not fit the 5 x 5"):
        make_encoder(image(1, 20, 20), ModelConfig(conv_filters=R42))


def test_unknown_kinds_are_refused():
    with pytest.raises(ConfigError, match="kind 'text'"):
        make_encoder(Space("text"), ModelConfig())
    with pytest.raises(UnknownName):
        make_encoder(V, ModelConfig(custom_preprocessor="nothing"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
@pytest.mark.parametrize(("kernel", "stride"), [(8, 4), (4, 2), (3, 3)])
def test_a_convolution_of_blocks_is_the_convolution(kernel, stride, dtype):
    pictures = torch.randint(0, 255, (3, 5, 6 * stride, 4 * stride), dtype=dtype)
    weight = torch.randn(7, 5, kernel, kernel, dtype=torch.float64)
    expected = F.conv2d(pictures.double(), weight, stride=stride)
    for given in (pictures, pictures.contiguous(memory_format=torch.channels_last)):
        torch.testing.assert_close(F.conv2d(blocks(given, stride).double(), blocks(weight, stride)), expected)
