"""Terms of a user's own in the loss of any algorithm, and preprocessors of a user's own: by name in the config."""

import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

import bray
from bray.act import Clock
from bray.errors import ConfigError, UnknownName
from bray.nn import ModelConfig, make_encoder, make_model, register_loss_term
from bray.rundir.trust import named
from bray.spec import EnvSpec, Space

slow = pytest.mark.slow
PPO = {"num_envs": 4, "rollout_length": 8, "minibatches": 2, "epochs": 2, "fcnet_hiddens": [8], "save_figure": False}


def train(run, updates=2, **keys):
    """Weights after so many updates of a new run, and the numbers of the last one."""
    exp = bray.Experiment(run, "CartPole-v1", use_preset=False, **keys)
    training = exp.training
    try:
        for _ in range(updates):
            training.learner.numbers()  # those of earlier updates
            while not training.learn(one=True):
                training.gather(0.0)
        return training.weights(), training.update.metrics | training.learner.numbers()
    finally:
        exp.close()


def squared_error(batch, outputs, model):
    """The value loss of PPO and A2C, written by a user."""
    return 0.5 * (outputs["value"] - batch["target"]).square()


def size_of_outputs(batch, outputs, model):
    q = outputs["q"] if "q" in outputs else outputs["dist"]
    return q.square().mean(), {"largest": q.detach().abs().max(), "rows": torch.tensor(float(len(batch["weight"])))}


for function in (squared_error, size_of_outputs):
    register_loss_term(function.__name__, function)


@pytest.mark.parametrize(
    ("run", "keys"),
    [
        ("PPO", {**PPO, "minibatches": 1}),
        ("PPO", {**PPO, "minibatches": 1, "use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4}),
        pytest.param("PPO", {**PPO, "minibatches": 1, "record": False}, marks=slow),
        pytest.param("A2C", {"num_envs": 4, "fcnet_hiddens": [8], "rollout_length": 8}, marks=slow),
    ],
    ids=["rows", "sequences", "eager", "A2C"],
)
def test_a_term_is_what_it_would_be_inside_the_algorithm(run, keys):
    """PPO without its value loss, and that loss as a term of the same weight: the same weights after two updates."""
    inside, row = train(run, **keys, value_coef=0.5)
    as_term, with_term = train(run, **keys, value_coef=0.0, loss_terms={"squared_error": 0.5})
    without, _ = train(run, **keys, value_coef=0.0)
    for name in inside:
        np.testing.assert_allclose(as_term[name], inside[name], atol=2e-6, err_msg=name)
    assert any(not np.allclose(without[name], inside[name], atol=1e-5) for name in inside)
    assert with_term["squared_error"] == pytest.approx(row["value_loss"], rel=1e-4)


def transitions(continuous, seed):
    rng = np.random.default_rng(seed)
    size = 3 if continuous else 4
    obs, next_obs = rng.normal(size=(2, 8, size)).astype(np.float32)
    action = rng.normal(size=(8, 1)).astype(np.float32) if continuous else rng.integers(0, 2, 8)
    reward, discount, weight = rng.random((3, 8)).astype(np.float32)
    columns = {"obs": obs, "action": action, "reward": reward, "discount": discount, "next_obs": next_obs}
    return {**columns, "weight": weight}


def learn(run, **terms):
    """(weights after three updates on the same batches, numbers of the terms)."""
    env = "Pendulum-v1" if run == "SAC" else "CartPole-v1"
    exp = bray.Experiment(run, env, use_preset=False, fcnet_hiddens=[8], num_envs=1, loss_terms=terms)
    learner = exp.training.learner
    for seed in range(3):
        learner.update(transitions(run == "SAC", seed), Clock(0, 0))
    assert learner.is_recorded
    weights = exp.training.weights()
    exp.close()
    return weights, learner.numbers()


@pytest.mark.parametrize(
    "run", ["DQN", "SAC", *(pytest.param(name, marks=slow) for name in ("C51", "QR-DQN", "IQN", "Rainbow"))]
)
def test_algorithms_with_a_replay_take_terms_and_report_their_numbers(run):
    plain, nothing = learn(run)
    watched, numbers = learn(run, size_of_outputs=0.0)
    changed, _ = learn(run, size_of_outputs=1.0)
    assert nothing == {}
    for name in plain:
        np.testing.assert_allclose(watched[name], plain[name], atol=1e-6, err_msg=name)
    assert any(not np.allclose(changed[name], plain[name], atol=1e-5) for name in plain)
    assert numbers["largest"] ** 2 >= numbers["size_of_outputs"] > 0
    assert numbers["rows"] == 8


def test_pqn_takes_terms():
    keys = {"num_envs": 4, "rollout_length": 8, "fcnet_hiddens": [8]}
    plain, _ = train("PQN", 1, **keys)
    changed, row = train("PQN", 1, **keys, loss_terms={"size_of_outputs": 1.0})
    assert any(not np.allclose(changed[name], plain[name], atol=1e-5) for name in plain)
    assert row["largest"] > 0


def test_numbers_are_means_over_the_updates_of_an_iteration():
    exp = bray.Experiment(
        "PPO", "CartPole-v1", use_preset=False, **PPO, loss_terms={"size_of_outputs": 0, "squared_error": 0}
    )
    row = exp.training.iterate()
    exp.close()
    assert {"loss/size_of_outputs", "loss/squared_error", "loss/policy_loss"} <= row.keys()
    assert row["loss/rows"] == 16, "32 rows in two pieces"


def test_a_term_is_named_by_its_module(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_terms", types.SimpleNamespace(term=squared_error))
    _, row = train("PPO", 1, **PPO, loss_terms={"my_terms:term": 0.1})
    assert "term" in row
    assert ("model.loss_terms", "my_terms:term", None) in named({"model": {"loss_terms": {"my_terms:term": 0.1}}})


def broken(batch, outputs, model):
    return outputs["nothing"]


def too_wide(batch, outputs, model):
    return outputs["dist"]


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ("no_such_module:f", "loss_terms 'no_such_module:f': module 'no_such_module' cannot be imported"),
        ("squared_eror", "Did you mean 'squared_error'"),
        ("broken", "broken.batch, outputs, model. raised KeyError: 'nothing'"),
        (
            "too_wide",
            r"too_wide should return a tensor of one number, or of one per row \[16\].*got a tensor \[16, 2\]",
        ),
    ],
)
def test_terms_that_cannot_work_are_one_message(term, message):
    for function in (broken, too_wide):
        register_loss_term(function.__name__, function)
    with pytest.raises(ConfigError, match=message):
        train("PPO", 1, **PPO, loss_terms={term: 1.0})


def reports_policy_loss(batch, outputs, model):
    return outputs["dist"].mean(), {"policy_loss": outputs["dist"].detach().mean()}


def reports_a_schedule(batch, outputs, model):
    return outputs["dist"].mean(), {"entropy_coef": outputs["dist"].detach().mean()}


def test_a_number_of_a_row_is_of_one_term_and_not_of_the_algorithm(monkeypatch):
    terms = types.SimpleNamespace(
        entropy=squared_error, squared_error=squared_error, liar=reports_policy_loss, other=reports_a_schedule
    )
    monkeypatch.setitem(sys.modules, "my_terms", terms)
    with pytest.raises(ConfigError, match="squared_error and my_terms:squared_error both report loss/squared_error"):
        train("PPO", 1, **PPO, loss_terms={"squared_error": 0.0, "my_terms:squared_error": 0.0})
    register_loss_term("reports_policy_loss", reports_policy_loss)
    with pytest.raises(ConfigError, match="my_terms:liar and reports_policy_loss both report loss/policy_loss"):
        train("PPO", 1, **PPO, loss_terms={"my_terms:liar": 0.0, "reports_policy_loss": 0.0})
    schedule = {"kind": "linear", "start": 0.01, "end": 0.0, "steps": 100}
    for term, number in (("entropy", "entropy"), ("liar", "policy_loss"), ("other", "entropy_coef")):
        keys = {**PPO, "entropy_coef": schedule, "loss_terms": {f"my_terms:{term}": 0.0}}
        exp = bray.Experiment("PPO", "CartPole-v1", use_preset=False, **keys)
        with pytest.raises(
            ConfigError, match=f"my_terms:{term} reports loss/{number}, which the algorithm reports too"
        ):
            exp.training.iterate()
        exp.close()


# --- preprocessors ----------------------------------------------------------------------------------------------------


def clip_and_split(obs, at=1.0):
    return {"place": obs[:, :2].clamp(-at, at), "speed": obs[:, 2:] * 10.0}


def test_a_function_is_a_preprocessor_and_says_by_itself_what_it_makes():
    box = Space("box", (4,), "float32")
    keys = {"custom_preprocessor": clip_and_split, "custom_options": {"at": 0.5}, "merge": "gate"}
    encoder = make_encoder(box, ModelConfig(**keys))
    assert encoder.features.names == ["place", "speed"]
    plain = make_encoder(box, ModelConfig(custom_preprocessor=clip_and_split, fcnet_hiddens=()))
    assert plain(torch.tensor([[3.0, -3.0, 0.5, 0.25]])).tolist() == [[1.0, -1.0, 5.0, 2.5]]


def drop_colour(obs):
    return {"screen": obs["screen"][..., :1], "kind": obs["kind"]}


def test_members_that_stay_keep_their_space_and_bytes_are_pictures():
    kind = Space("discrete", (), "int64", n=(5,), start=(1,))
    space = Space("dict", parts=(Space("box", (8, 8, 3), "uint8", 0, 255), kind), names=("screen", "kind"))
    encoder = make_encoder(space, ModelConfig(custom_preprocessor=drop_colour))
    out = dict(encoder.features.space.items)
    assert out["kind"] == kind
    assert (out["screen"].shape, out["screen"].dtype, out["screen"].high) == ((8, 8, 1), "uint8", 255)


class Linear(nn.Module):
    def __init__(self, spec, config):
        super().__init__()
        assert spec.observation.names == ("place", "speed")
        self.layer = nn.Linear(4, spec.layout.num_params)

    def forward(self, obs):
        return self.layer(torch.cat([obs["place"], obs["speed"]], 1))


def test_a_network_of_ones_own_sees_what_the_preprocessor_makes():
    spec = EnvSpec("x", Space("box", (4,), "float32"), Space("discrete", (), "int64", n=(2,), start=(0,)))
    model = make_model("q", spec, ModelConfig(custom_model=Linear, custom_preprocessor=clip_and_split))
    x = torch.tensor([[3.0, -3.0, 0.5, 0.25]])
    torch.testing.assert_close(model(x)["q"], model.net.layer(torch.tensor([[1.0, -1.0, 5.0, 2.5]])))


def wrong_rows(obs):
    return obs.sum()


def asks_too_much(obs):
    return obs.no_such_thing


class NeedsPictures(nn.Module):
    def __init__(self, space):
        super().__init__()
        self.channels = space.shape[2]


def test_preprocessors_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"clip_and_split raised TypeError: .* unexpected keyword argument 'att'"):
        make_encoder(
            Space("box", (4,), "float32"), ModelConfig(custom_preprocessor=clip_and_split, custom_options={"att": 1})
        )
    with pytest.raises(ConfigError, match="custom_preprocessor asks_too_much raised AttributeError"):
        make_encoder(Space("box", (4,), "float32"), ModelConfig(custom_preprocessor=asks_too_much))
    with pytest.raises(ConfigError, match=r"custom_preprocessor .*NeedsPictures.* raised IndexError"):
        make_encoder(Space("box", (4,), "float32"), ModelConfig(custom_preprocessor=NeedsPictures))
    with pytest.raises(ConfigError, match="for a batch of 2 it returned"):
        make_encoder(Space("box", (4,), "float32"), ModelConfig(custom_preprocessor=wrong_rows))
    with pytest.raises(UnknownName):
        make_encoder(Space("box", (4,), "float32"), ModelConfig(custom_preprocessor="clipp"))


def test_training_evaluation_and_serving_have_the_preprocessor(tmp_path, monkeypatch):
    """The policy of a loaded run sees the same: the place far outside is the place at the edge."""
    monkeypatch.setitem(sys.modules, "my_obs", types.SimpleNamespace(clip_and_split=clip_and_split))
    keys = {**PPO, "custom_preprocessor": "my_obs:clip_and_split", "export_graph_after_s": None}
    exp = bray.Experiment("PPO", "CartPole-v1", use_preset=False, path=tmp_path / "a", **keys)
    exp.fit({"training_iteration": 1}, progress=False)
    exp.close()
    loaded = bray.Experiment.load(tmp_path / "a")
    out = [loaded.served.model(torch.tensor([[x, 0.0, 0.1, 0.0]]))["dist"] for x in (1.0, 50.0, 0.5)]
    torch.testing.assert_close(out[0], out[1])
    assert not torch.allclose(out[0], out[2])
    loaded.close()
