"""DAgger: its loss against a loop in float64, who acts and who is asked, each kind of expert, what it refuses."""

import numpy as np
import pytest
import torch

import bray
from bray import tree
from bray.act import GREEDY, SAMPLE, TRAINED, Clock, Tick
from bray.algos import get_algo
from bray.algos.expert import load_expert
from bray.envs import EnvConfig, env_spec
from bray.errors import BrayError, ConfigError
from bray.nn import ModelConfig
from tests.algos.test_from_files import CHOICE, MANY, MASKED, NUMBERS, ask, log_prob, make, mask_of, rows, step

BALANCE = "benchmarks.learning.demos:balance"
SMALL = {"num_envs": 2, "fcnet_hiddens": [16], "learning_starts": 32, "batch_size": 32, "train_every": 2}
CARTPOLE = env_spec(EnvConfig(id="CartPole-v1"))


def turn(obs):
    """Pendulum, nested in nothing: against the speed."""
    return np.clip(-obs[2:], -2.0, 2.0)


def first_legal(obs):
    return int(np.argmax(obs["action_mask"]))


def third(obs):
    return 2


def fails(obs):
    raise KeyError("speed")


@pytest.mark.parametrize("spec", [CHOICE, MASKED, MANY, NUMBERS], ids=lambda spec: spec.id)
def test_it_clones_what_the_expert_said_and_not_what_was_played(spec):
    model, learner = make("DAgger", spec, min_std=0.9, entropy_coef=0.0)
    batch = rows(spec)
    batch["expert"] = batch["action"]
    batch["action"] = np.zeros_like(batch["action"])
    dist = ask(model, batch["obs"])["dist"]
    n = len(batch["expert"])
    expected = -sum(log_prob(spec, dist[b], batch["expert"][b], mask_of(batch, b), 0.9) for b in range(n)) / n
    told = step(learner, batch)
    assert told["loss"] == told["policy_loss"] == pytest.approx(expected, rel=1e-5)
    other = make("DAgger", spec, min_std=0.9)[1]
    batch["action"] = batch["expert"]
    assert step(other, batch) == told
    assert step(other, batch)["loss"] < told["loss"]


@pytest.mark.parametrize("spec", [MASKED, NUMBERS], ids=lambda spec: spec.id)
def test_sequences_are_judged_with_their_memory_behind_the_rows_that_warm_it_up(spec):
    torch.manual_seed(0)
    algo, model = get_algo("DAgger"), ModelConfig(fcnet_hiddens=(8,), use_lstm=True, lstm_cell_size=8, max_seq_len=3)
    config = algo.Config(batch_size=8, burn_in=2, min_std=0.9)
    network = algo.make_model(config, spec, model)
    learner = algo.Learner(config, spec, network, model, seed=0, record=False)
    assert algo.experience(config, spec, model).batch_size == 2
    rng, t, games = np.random.default_rng(0), 5, 2
    flat = rows(spec, batch=(t + 1) * games)
    batch = tree.map(lambda x: x.reshape(t + 1, games, *x.shape[1:]), {k: flat[k] for k in ("obs", "action")})
    batch |= {"expert": batch["action"][:-1], "action": 0 * batch["action"][:-1], "weight": np.ones(games, np.float32)}
    batch |= {"first": np.zeros((t + 1, games), bool), "valid": np.ones((t, games), bool)}
    batch["first"][3, 1], batch["valid"][2, 1] = True, False
    batch["state"] = {k: rng.standard_normal((games, 8)).astype(np.float32) for k in ("h", "c")}
    told = []
    for b in range(games):
        state = {k: torch.from_numpy(x[b : b + 1]) for k, x in batch["state"].items()}
        for i in range(t):
            if batch["first"][i, b]:
                state = {k: 0 * x for k, x in state.items()}
            obs = tree.map(lambda x, i=i, b=b: torch.from_numpy(x[i, b : b + 1]), batch["obs"])
            with torch.no_grad():
                out = network(obs, state)
            state = out["state"]
            mask = batch["obs"]["action_mask"][i, b] if spec is MASKED else None
            if i >= 2 and batch["valid"][i, b]:
                dist = out["dist"][0].double().numpy()
                told.append(log_prob(spec, dist, batch["expert"][i, b], mask, 0.9))
    assert len(told) == 5
    assert step(learner, batch)["loss"] == pytest.approx(-np.mean(told), rel=1e-5)


def policy_of(spec, games, **options):
    algo = get_algo("DAgger")
    policy = algo.Policy(algo.Config(**options), spec)
    policy.seat(0, games, games)
    return policy


def test_the_mixture_and_its_labels():
    games, layout = 4000, CARTPOLE.layout
    policy = policy_of(CARTPOLE, games, expert=BALANCE, beta={"kind": "linear", "start": 1, "end": 0, "steps": 100})
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((games, 4)).astype(np.float32)
    says = (obs @ np.array([0.1, 0.3, 3.0, 1.0], np.float32) > 0).astype(np.int64)
    outputs = {"dist": np.where(np.arange(2) == 1 - says[:, None], 50.0, 0.0).astype(np.float32)}  # the opposite
    tick = Tick(obs, None, np.zeros(games, bool))
    for steps, share in ((0, 1.0), (75, 0.25), (100, 0.0)):
        action, extras = policy.act(outputs, tick, rng, SAMPLE, Clock(steps))
        np.testing.assert_array_equal(extras["expert"], says)
        np.testing.assert_array_equal(layout.to_env(extras["action"]), action)
        assert np.mean(action == says) == pytest.approx(share, abs=0.03)
        assert policy.numbers(Clock(steps)) == {"beta": pytest.approx(share)}
    for mode, clock in ((GREEDY, Clock()), (SAMPLE, TRAINED)):  # evaluated and served it is on its own
        action, extras = policy.act(outputs, tick, rng, mode, clock)
        np.testing.assert_array_equal(action, 1 - says)
        assert "expert" not in extras
    assert policy.acts_by_rule()
    assert policy.served_outputs == ("dist",)


def test_numbers_become_what_the_network_draws():
    spec = env_spec(EnvConfig(id="Pendulum-v1"))
    policy = policy_of(spec, 3, expert=f"{__name__}:turn", beta=1.0)
    obs = np.array([[1, 0, 0.5], [1, 0, -1.0], [1, 0, 9.0]], np.float32)
    outputs = {"dist": np.zeros((3, 2), np.float32)}
    action, extras = policy.act(outputs, Tick(obs, None, np.ones(3, bool)), np.random.default_rng(0), SAMPLE, Clock())
    np.testing.assert_allclose(action, [[-0.5], [1.0], [-2.0]])  # the torque
    np.testing.assert_allclose(extras["expert"], [[-0.25], [0.5], [-1.0]])  # in units of [-1, 1]


def test_a_mask_holds_for_the_expert_too():
    obs = {"obs": np.zeros((2, 4), np.float32), "action_mask": np.array([[0, 1, 1], [1, 1, 0]], np.int8)}
    tick, outputs = Tick(obs, None, np.ones(2, bool)), {"dist": np.zeros((2, 3), np.float32)}
    rng = np.random.default_rng(0)
    _, extras = policy_of(MASKED, 2, expert=f"{__name__}:first_legal").act(outputs, tick, rng, SAMPLE, Clock())
    assert extras["expert"].tolist() == [1, 0]
    with pytest.raises(ConfigError, match=r"third chose 2 of 3 where it is not legal"):
        policy_of(MASKED, 2, expert=f"{__name__}:third").act(outputs, tick, rng, SAMPLE, Clock())


# --- a training with each kind of expert ------------------------------------------------------------------------------


def train(path, expert, steps=400, **more):
    config = {**SMALL, "expert": expert, **more}
    exp = bray.Experiment("DAgger", "CartPole-v1", path=path, use_preset=False, config=config)
    list(exp.train(stop={"env_steps_total": steps}))
    exp.close()
    return exp


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A policy that need not be good; it has a memory."""
    path = tmp_path_factory.mktemp("teacher") / "run"
    config = {"num_envs": 2, "rollout_length": 8, "use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8]}
    exp = bray.Experiment("PPO", "CartPole-v1", path=path, use_preset=False, config=config)
    exp.save()
    exp.close()
    return path


def test_a_run_a_service_and_a_function_that_asks_the_run_say_the_same(teacher, tmp_path):
    """Over two episodes, with the memory of each game, which begins anew where `first` says so."""
    exp = bray.Experiment.load(teacher)
    rng = np.random.default_rng(0)
    starts = [(0, 4), (0,), (0, 2)]
    ticks = [(rng.standard_normal((3, 4)).astype(np.float32), np.array([t in s for s in starts])) for t in range(6)]
    run = load_expert(str(teacher), CARTPOLE, 3)
    with exp.serve(port=0, use_tcp=True, block=False, engine="torch") as server:
        service = [load_expert(f"{s}://127.0.0.1:{server.port}", CARTPOLE, 3) for s in ("http", "tcp")]
        states = [None] * 3
        for obs, first in ticks:
            expected = []
            for b in range(3):
                action, states[b] = exp.policy(obs[b], None if first[b] else states[b])
                expected.append(int(action))
            for expert in (run, *service):
                assert np.asarray(expert.act(obs, first)).tolist() == expected
        for expert in service:
            expert.close()
    exp.close()


def test_a_training_learns_what_its_expert_does_and_goes_on_exactly(teacher, tmp_path):
    whole = train(tmp_path / "whole", str(teacher), 600, beta=0.5).training.weights()
    train(tmp_path / "half", str(teacher), 300, beta=0.5)
    with bray.Experiment.resume(tmp_path / "half") as resumed:
        *_, row = resumed.train(stop={"env_steps_total": 600})
        assert row["policy/beta"] == 0.5
        for name, x in resumed.training.weights().items():
            np.testing.assert_array_equal(x, whole[name])


@pytest.mark.slow
def test_workers_ask_experts_of_their_own(tmp_path):
    config = {**SMALL, "expert": BALANCE, "beta": 1.0, "num_workers": 1, "use_lstm": True, "lstm_cell_size": 16}
    config |= {"max_seq_len": 8, "burn_in": 4, "lr": 3e-3}
    with bray.Experiment("DAgger", "CartPole-v1", path=tmp_path / "r", use_preset=False, config=config) as exp:
        *_, row = exp.train(stop={"env_steps_total": 1500})
    assert row["episode_return_mean"] == 500.0  # of the script, which plays all the time
    assert row["loss/policy_loss"] < 0.6  # ln 2 at the start


@pytest.mark.parametrize(
    ("expert", "message"),
    [
        ("", r"algo.expert is not set: say who is asked what to do, expert=EXPERT: a run directory, module:function"),
        ("nowhere", r"there is no run directory nowhere"),
        ("math:tau", r"math:tau is no function of an observation"),
        ("no_such_module:act", r"algo.expert: cannot load 'no_such_module:act'"),
        (f"{__name__}:fails", r"fails raised KeyError: it is called with the observation of one game"),
        (f"{__name__}:third", r"the action of .*third: expected 0 to 1, got 2"),
        ("http://127.0.0.1:1", r"http://127.0.0.1:1 did not answer .* `bray serve RUN_DIR`"),
    ],
)
def test_what_cannot_be_asked_is_refused(expert, message, tmp_path):
    with pytest.raises(BrayError, match=message):
        train(tmp_path / "r", expert)


def test_a_run_of_other_spaces_is_refused(teacher, tmp_path):
    config = {**SMALL, "expert": str(teacher)}
    with pytest.raises(ConfigError, match=r"has another observation space .* with the same environment"):
        _ = bray.Experiment("DAgger", "Acrobot-v1", path=tmp_path / "r", use_preset=False, config=config).training
