"""Which keys of a config are searched, and what is wrong with a space."""

import numpy as np
import pytest

from bray.config import ConfigSource, parse_yaml
from bray.errors import BrayError, UnknownName
from bray.experiment import Experiment
from bray.search.population import exploits
from bray.search.space import make_space, typed


def space_of(*sources, run="PPO"):
    return make_space(sources, lambda given: Experiment(run, "CartPole-v1", sources=given).config)


def told(*items, run="PPO"):
    return space_of(typed(items), run=run)


def test_what_is_typed_is_a_range_a_list_or_a_value():
    space = told("lr=1e-5..1e-2:log", "gamma=0.95,0.99", "epochs=2..8", "model.fcnet_hiddens=[64,64],[32]", "clip=0.1")
    assert [(d.name, d.key, str(d), d.whole) for d in space.dimensions] == [
        ("lr", "algo.lr", "1e-05..0.01:log", False),
        ("gamma", "algo.gamma", "[0.95, 0.99]", False),
        ("epochs", "algo.epochs", "2..8", True),
        ("model.fcnet_hiddens", "model.fcnet_hiddens", "[[64, 64], [32]]", False),
    ]
    assert space.fixed["algo.clip"] == 0.1
    assert "algo.lr" not in space.fixed
    values = {"lr": 3e-4, "gamma": 0.99, "epochs": 5, "model.fcnet_hiddens": [32]}
    config = Experiment("PPO", "CartPole-v1", sources=space.sources(values)).config
    assert (config["algo"].lr, config["algo"].gamma, config["algo"].epochs) == (3e-4, 0.99, 5)
    assert list(config["model"].fcnet_hiddens) == [32]
    assert config.provenance["algo.lr"] == "lr=1e-5..1e-2:log on the command line"
    before = Experiment("PPO", "CartPole-v1", sources=space.sources(None)).config
    assert before["algo"].clip == 0.1
    assert list(before["model"].fcnet_hiddens) != [32]


def test_a_file_has_grids_lists_and_ranges():
    text = "lr: {grid_search: [1e-3, 1e-4]}\ngamma: {choice: [0.9, 0.95]}\nalgo: {clip: 0.1..0.3, epochs: 4}\n"
    space = space_of(parse_yaml(text, "a.yaml"))
    assert [(d.name, str(d), d.grid) for d in space.dimensions] == [
        ("lr", "grid [0.001, 0.0001]", True),
        ("gamma", "[0.9, 0.95]", False),
        ("algo.clip", "0.1..0.3", False),
    ]
    assert space.combinations(grid_only=True) == [{"lr": 1e-3}, {"lr": 1e-4}]
    assert space.fixed["algo.epochs"] == 4


def test_a_later_source_takes_a_key_out_of_the_search():
    space = space_of(
        parse_yaml("lr: {grid_search: [1e-3, 1e-4]}\ngamma: {choice: [0.9, 0.95]}\n", "a.yaml"), typed(["lr=0.5"])
    )
    assert [d.name for d in space.dimensions] == ["gamma"]
    assert space.fixed["algo.lr"] == 0.5


@pytest.mark.parametrize(
    ("items", "says"),
    [
        (["lrr=1e-5..1e-2"], "unknown key 'lrr' (lrr=1e-5..1e-2 on the command line). Did you mean 'lr'?"),
        (["model.fcnet_hidens=[64],[32]"], "Did you mean 'model.fcnet_hiddens'"),
        (["device=1..3"], "a range is for numbers, and run.device is text: list its values instead"),
        (["model.fcnet_activation=0.1..0.3"], "a range is for numbers, and model.fcnet_activation is"),
        (["gamma=0.9..1.5"], "gamma=0.9..1.5 on the command line): expected a number >= 0 and <= 1"),
        (["gamma=0.9,2"], "gamma=0.9,2 on the command line): expected a number"),
        (["epochs=0.5..4"], "expected a whole number > 0"),
        (["lr=1e-2..1e-5"], "a range goes from the smaller number to the larger one, got 0.01 and 1e-05"),
        (["lr=0..1e-2:log"], "a logarithmic range begins above 0, got 0"),
        (["lr={grid_search: []}"], "grid_search takes a list of values, got []"),
        (["lr={uniform: [1]}"], "uniform takes two numbers, [low, high], got [1]"),
        (["lr=1e-3"], "there is nothing to search: give a key a range (lr=1e-5..1e-2:log) or several values"),
        ([], "there is nothing to search"),
    ],
)
def test_mistakes(items, says):
    with pytest.raises(BrayError) as e:
        told(*items)
    assert says in str(e.value)


def test_an_unknown_key_has_the_usual_error():
    with pytest.raises(UnknownName):
        space_of(ConfigSource("python", {"lrr": {"grid_search": [1, 2]}}))


@pytest.mark.parametrize(
    ("item", "value"),
    [("lr=1e-5..1e-2:log", 3e-4), ("clip=0.1..0.3", 0.2), ("epochs=1..8", 1), ("gamma=0.9,0.95,0.99", 0.95)],
)
def test_what_explores_stays_in_the_space_and_moves(item, value):
    (dimension,) = told(item).dimensions
    rng = np.random.default_rng(0)
    found = [dimension.explore(value, rng) for _ in range(200)]
    assert sum(x != value for x in found) > 100
    if dimension.values:
        assert set(found) <= set(dimension.values)
    else:
        assert all(dimension.low <= x <= dimension.high for x in found)
        assert all(type(x) is type(value) for x in found)
    factors = {round(x / value, 6) for x in found}
    assert dimension.values or dimension.whole or {0.8, 1.2} <= factors


def test_the_worst_quarter_goes_on_from_the_best():
    scores = {0: 5.0, 1: 9.0, 2: 1.0, 3: 8.0, 4: 4.0, 5: 2.0, 6: 7.0, 7: 6.0}
    pairs = exploits(scores, np.random.default_rng(0))
    assert [loser for loser, _ in pairs] == [2, 5]
    assert {parent for _, parent in pairs} <= {1, 3}
    assert exploits({0: 1.0}, np.random.default_rng(0)) == []
    assert exploits({4: 1.0, 5: 1.0}, np.random.default_rng(0)) == [(5, 4)]
