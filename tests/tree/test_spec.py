"""Spaces as data, and the flat layout of actions by number."""

import json
import warnings

import gymnasium as gym
import numpy as np
import pytest

from bray.errors import ConfigError, DataError
from bray.spec import ActionLayout, ActionPart, EnvSpec, Space

SPACES = {
    "discrete": gym.spaces.Discrete(4),
    "discrete from -1": gym.spaces.Discrete(3, start=-1),
    "multi discrete": gym.spaces.MultiDiscrete([2, 5]),
    "multi discrete 2d": gym.spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "multi discrete from 1": gym.spaces.MultiDiscrete([2, 3], start=[1, 5]),
    "multi binary": gym.spaces.MultiBinary(3),
    "box": gym.spaces.Box(-2.0, 2.0, (3,)),
    "box uneven": gym.spaces.Box(np.float32([-0.1, 0]), np.float32([0.2, 7])),
    "box half open": gym.spaces.Box(np.float32([-np.inf, 0]), np.float32([np.inf, 1])),
    "box open": gym.spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "image": gym.spaces.Box(0, 255, (2, 3), np.uint8),
    "bool image": gym.spaces.Box(0.0, 1.0, (2, 3), bool),
    "dict": gym.spaces.Dict(move=gym.spaces.Box(-1, 1, (2,)), jump=gym.spaces.Discrete(2)),
    "tuple": gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Tuple([gym.spaces.MultiBinary(2)])]),
}


@pytest.mark.parametrize("name", SPACES)
def test_a_space_survives_json(name):
    space = Space.from_gym(SPACES[name])
    assert Space.from_json(space.to_json()) == space
    assert Space.from_json(json.loads(json.dumps(space.to_json(), allow_nan=False))) == space


@pytest.mark.parametrize("name", SPACES)
def test_samples_are_members(name):
    space, rng = Space.from_gym(SPACES[name]), np.random.default_rng(0)
    for _ in range(20):
        x = space.sample(rng)
        assert SPACES[name].contains(x), x
        if name.startswith("box"):
            assert np.abs(x).max() < 10  # an open side is not 3e38 wide


@pytest.mark.parametrize("name", SPACES)
def test_flat_actions_become_members(name):
    space = Space.from_gym(SPACES[name])
    layout, rng = ActionLayout(space), np.random.default_rng(1)
    batch = 6
    flat = np.zeros((batch, layout.size), layout.dtype)
    for part in layout.parts:
        if part.kind == "categorical":
            flat[:, part.action.start] = rng.integers(part.n, size=batch)
        else:
            flat[:, part.action] = rng.choice([-3.0, -1.0, -0.3, 0.0, 1.0, 3.0], (batch, part.n))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = layout.to_env(flat[:, 0] if layout.single else flat)
    for i in range(batch):
        row = gym_row(out, i)
        assert SPACES[name].contains(row), row


def gym_row(x, i):
    if isinstance(x, dict):
        return {k: gym_row(v, i) for k, v in x.items()}
    if isinstance(x, tuple):
        return tuple(gym_row(v, i) for v in x)
    return x[i]


def test_layout_of_a_composite_space_by_number():
    space = Space.from_gym(
        gym.spaces.Tuple([gym.spaces.Discrete(3, start=2), gym.spaces.Box(-1, 1, (2,)), gym.spaces.MultiBinary(2)])
    )
    layout = ActionLayout(space)
    assert layout.parts == (
        ActionPart("categorical", 3, slice(0, 3), slice(0, 1), 2),
        ActionPart("gaussian", 2, slice(3, 7), slice(1, 3)),
        ActionPart("categorical", 2, slice(7, 9), slice(3, 4)),
        ActionPart("categorical", 2, slice(9, 11), slice(4, 5)),
    )
    assert (layout.num_params, layout.size, layout.num_logits) == (11, 5, 7)
    assert (layout.discrete, layout.continuous, layout.single) == (False, False, False)
    assert (layout.dtype, layout.shape) == (np.float32, (5,))
    choice, box, bits = layout.to_env(np.float32([[1, 0.5, -0.5, 1, 0]]))
    assert choice.tolist() == [3]
    assert box.tolist() == [[0.5, -0.5]]
    assert bits.tolist() == [[1, 0]]
    assert bits.dtype == np.int8


@pytest.mark.parametrize(
    ("name", "params", "size", "logits", "dtype", "shape"),
    [
        ("discrete", 4, 1, 4, np.int64, ()),
        ("multi discrete", 7, 2, 7, np.int64, (2,)),
        ("multi discrete 2d", 14, 4, 14, np.int64, (4,)),
        ("multi binary", 6, 3, 6, np.int64, (3,)),
        ("box", 6, 3, 0, np.float32, (3,)),
        ("dict", 6, 3, 2, np.float32, (3,)),
    ],
)
def test_layout_numbers(name, params, size, logits, dtype, shape):
    layout = ActionLayout(Space.from_gym(SPACES[name]))
    got = (layout.num_params, layout.size, layout.num_logits, layout.dtype, layout.shape)
    assert got == (params, size, logits, dtype, shape)


def test_discrete_actions_are_shifted_to_their_start():
    assert ActionLayout(Space.from_gym(SPACES["discrete"])).to_env(np.array([0, 3])).tolist() == [0, 3]
    assert ActionLayout(Space.from_gym(SPACES["discrete from -1"])).to_env(np.array([0, 2])).tolist() == [-1, 1]
    layout = ActionLayout(Space.from_gym(SPACES["multi discrete from 1"]))
    assert layout.to_env(np.array([[1, 2]])).tolist() == [[2, 7]]


def test_box_actions_are_scaled_from_minus_one_to_one():
    layout = ActionLayout(Space.from_gym(gym.spaces.Box(np.float32([-2, 0]), np.float32([2, 10]))))
    assert layout.to_env(np.float32([[-1, -1], [0, 0], [1, 1], [9, -9]])).tolist() == [[-2, 0], [0, 5], [2, 10], [2, 0]]
    half = ActionLayout(Space.from_gym(SPACES["box half open"]))
    assert half.to_env(np.float32([[-7, 0]])).tolist() == [[-7, 0.5]]  # an open side takes the number as it is


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32, np.uint8])
def test_whole_ranges_of_integers_do_not_overflow(dtype):
    info = np.iinfo(dtype)
    box = gym.spaces.Box(info.min, info.max, (2,), dtype)
    space = Space.from_gym(box)
    low, high = ActionLayout(space).to_env(np.float32([[-1, 1]]))[0]
    assert low == info.min
    assert high == pytest.approx(info.max)
    assert space.sample(np.random.default_rng(0)) in box


def test_open_sides_read_as_infinite():
    low, high = Space.from_gym(SPACES["box half open"]).bounds()
    assert low.tolist() == [-np.inf, 0]
    assert high.tolist() == [np.inf, 1]
    big = np.finfo(np.float32).max
    low, high = Space.from_gym(gym.spaces.Box(-big, big, (2,))).bounds()
    assert low.tolist() == [-np.inf] * 2
    assert high.tolist() == [np.inf] * 2


def test_action_masks_flat_or_as_a_tree():
    layout = ActionLayout(Space.from_gym(SPACES["multi discrete"]))
    flat = layout.mask({"action_mask": np.array([[1, 0, 1, 1, 0, 0, 1]])})
    assert flat.tolist() == [[True, False, True, True, False, False, True]]
    pair = layout.mask({"action_mask": (np.array([[1, 0]]), np.array([[1, 1, 0, 0, 1]]))})
    assert pair.tolist() == flat.tolist()
    assert layout.mask({"obs": np.zeros(3)}) is None
    assert layout.mask(np.zeros(3)) is None


def test_a_mask_with_names_is_read_by_them():
    """Gymnasium sorts the names of `Dict({...})` and keeps the order of `Dict(move=..., attack=...)`."""
    unit = gym.spaces.Dict(move=gym.spaces.Discrete(2), attack=gym.spaces.Discrete(3), aim=gym.spaces.Box(0, 1))
    layout = ActionLayout(Space.from_gym(gym.spaces.Dict(unit=unit, build=gym.spaces.Discrete(2))))
    masks = {"attack": np.array([[0, 0, 1]]), "move": np.array([[1, 0]])}
    got = layout.mask({"action_mask": {"build": np.array([[0, 1]]), "unit": masks}})
    assert got.astype(int).tolist() == [[1, 0, 0, 0, 1, 0, 1]]
    with pytest.raises(ConfigError, match=r"action_mask has \['jump'\], the action has \['unit', 'build'\]"):
        layout.mask({"action_mask": {"jump": np.array([[0, 1]])}})


def test_where_nothing_is_legal_everything_counts_for_those_who_learn():
    layout = ActionLayout(Space.from_gym(SPACES["multi discrete"]))
    obs = {"action_mask": np.array([[1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 1]])}
    assert layout.legal(obs).astype(int).tolist() == [[1, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 1]]
    assert obs["action_mask"].sum() == 4
    assert layout.legal(np.zeros(3)) is None


def test_spaces_we_do_not_have_are_refused():
    with pytest.raises(ConfigError, match="spaces of kind Text are not supported"):
        Space.from_gym(gym.spaces.Text(5))
    with pytest.raises(ConfigError, match="got 'text'"):
        ActionLayout(Space("text"))
    with pytest.raises(ConfigError, match="got an empty one"):
        ActionLayout(Space("tuple"))


def spec():
    return EnvSpec(
        "Game-v0", Space.from_gym(SPACES["image"]), Space.from_gym(SPACES["discrete"]), 500, {"frame_stack": 4}
    )


def test_env_spec_survives_json():
    again = EnvSpec.from_json(json.loads(json.dumps(spec().to_json())))
    assert again == spec()
    assert again.num_actions == 4
    assert again.layout.num_params == 4
    with pytest.raises(ConfigError, match="needs a Discrete action space, Game-v0 has box"):
        _ = EnvSpec("Game-v0", Space("box"), Space("box", (1,))).num_actions


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "sphere"},
        {"kind": 3},
        {"kind": ["box"]},
        {"shape": ["a"]},
        {"shape": [-1]},
        {"shape": 3},
        {"shape": [1 << 50]},
        {"dtype": "nope"},
        {"low": "a"},
        {"low": [0, 1, 2]},
        {"kind": "discrete", "n": [], "start": []},
        {"kind": "discrete", "n": [0], "start": [0]},
        {"kind": "discrete", "n": [2.5], "start": [0]},
        {"kind": "discrete", "n": [2], "start": []},
        {"kind": "dict", "parts": [], "names": ["x"]},
        {"kind": "dict", "parts": [3], "names": ["x"]},
    ],
)
def test_a_space_from_a_file_is_checked(change):
    data = Space.from_gym(SPACES["image"]).to_json() | change
    with pytest.raises(DataError, match="not a space"):
        Space.from_json(data)


@pytest.mark.parametrize("data", [None, [], {}, {"id": "x"}, {"id": "x", "observation": 3, "action": 4}])
def test_an_env_spec_from_a_file_is_checked(data):
    with pytest.raises(DataError, match="not a"):
        EnvSpec.from_json(data)
