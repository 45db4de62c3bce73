"""Acting: one generator whoever drives it, rules by name, and the same actions wherever a policy acts."""

import json

import numpy as np
import pytest
import torch

from bray import act, tree
from bray.act import TRAINED, ActingEngine, Clock, Decision, Policy, Tick, decide_now
from bray.algos import ppo
from bray.envs.make import make_vec
from bray.errors import ConfigError, UnknownName
from bray.experiment import Experiment
from bray.inference.torch_engine import TorchEngine
from bray.serving.config import ServedModelConfig
from bray.serving.model import ServedModel
from bray.spec import EnvSpec, Space
from bray.train.evaluate import eval_config, trained
from bray.train.local import describe_policy

SPEC = EnvSpec("test", Space("box", (3,)), Space("discrete", n=(4,), start=(2,)))
OBS = np.arange(6, dtype=np.float32).reshape(2, 3)
LOGITS = np.array([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 0.0, 0.0]], np.float32)


# --- deciding ---------------------------------------------------------------------------------------------------------


def test_the_default_asks_the_model_once():
    policy = Policy(SPEC.layout, act.make_rule("dist"))
    deciding = policy.decide(Tick(OBS), None, None, "greedy", Clock())
    (asked,) = next(deciding)
    assert asked is OBS
    with pytest.raises(StopIteration) as end:
        deciding.send({"dist": LOGITS})
    decision = end.value.value
    assert isinstance(decision, Decision)
    assert decision.action.tolist() == [3, 2]  # in the environment's units
    assert decision.extras["action"].tolist() == [1, 0]  # as the learner wants it
    assert decision.carry is None
    assert decision.outputs["dist"] is LOGITS


def test_what_a_model_remembers_goes_in_and_comes_out():
    policy = Policy(SPEC.layout, act.make_rule("dist"))
    carry = {"h": np.ones((2, 5), np.float32)}
    deciding = policy.decide(Tick(OBS), carry, None, "greedy", Clock())
    assert next(deciding) == (OBS, carry)
    with pytest.raises(StopIteration) as end:
        deciding.send({"dist": LOGITS, "state": {"h": carry["h"] * 2}})
    assert (end.value.value.carry["h"] == 2).all()


def test_random_inputs_of_a_model_are_drawn_when_sampling_and_left_out_when_greedy():
    policy = Policy(SPEC.layout, act.make_rule("dist"))
    policy.draws = {"noise": (7,)}
    drawn = next(policy.decide(Tick(OBS), None, np.random.default_rng(3), "sample", Clock()))[1]
    np.testing.assert_array_equal(drawn["noise"], np.random.default_rng(3).standard_normal(7, np.float32))
    assert len(next(policy.decide(Tick(OBS), None, np.random.default_rng(3), "greedy", Clock()))) == 1


def test_greedy_leaves_the_generator_alone():
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    for name, outputs in (("dist", {"dist": LOGITS}), ("q", {"q": LOGITS})):
        policy = Policy(SPEC.layout, act.make_rule(name))
        policy.act(outputs, Tick(OBS), rng, "greedy", Clock())
    assert rng.bit_generator.state == before


def test_a_mask_beside_the_observation_counts_before_one_in_it():
    policy = Policy(SPEC.layout, act.make_rule("dist"))
    inside, beside = (np.tile(np.array(m, bool), (2, 1)) for m in ([1, 0, 0, 1], [1, 0, 1, 0]))
    obs = {"x": OBS, "action_mask": inside}
    assert policy.act({"dist": LOGITS}, Tick(obs), None, "greedy", Clock())[0].tolist() == [5, 2]
    assert policy.act({"dist": LOGITS}, Tick(obs, mask=beside), None, "greedy", Clock())[0].tolist() == [4, 2]


class Search(ppo.Policy):
    """Looks one step ahead: where would each direction lead, and what would the Model think of it there?"""

    def decide(self, tick, carry, rng, mode, clock):
        outputs = yield (tick.obs,)
        n = self.layout.num_logits
        step = 0.1 * np.eye(n, tick.obs.shape[1], dtype=np.float32)
        ahead = yield ((tick.obs[:, None] + step).reshape(-1, tick.obs.shape[1]),)
        best = outputs | {"dist": ahead["value"].reshape(-1, n)}
        action, extras = self.act(best, tick, rng, mode, clock)
        return Decision(action, extras, None, best)


Search.reads = ("dist", "value")


class Searching:
    """PPO that searches."""

    Config, Policy, Learner = ppo.Config, Search, ppo.Learner
    make_model, experience = staticmethod(ppo.make_model), staticmethod(ppo.experience)


def expected_search(model, obs):
    def value(x):
        with torch.no_grad():
            return float(model(torch.from_numpy(x[None]))["value"])

    step = 0.1 * np.eye(2, 4, dtype=np.float32)
    return [int(np.argmax([value(row + step[0]), value(row + step[1])])) for row in obs]


def test_a_policy_that_searches_is_driven_in_line():
    sizes = []

    def forward(obs):
        sizes.append(len(obs))
        return {"dist": np.zeros((len(obs), 4), np.float32), "value": obs[:, 1]}

    policy = Search(ppo.Config(), SPEC)
    decision = decide_now(policy.decide(Tick(OBS), None, None, "greedy", Clock()), forward)
    assert sizes == [2, 8]
    assert decision.extras["action"].tolist() == [1, 1]
    assert not policy.acts_by_rule()


def test_a_policy_that_searches_trains_and_plays_everywhere(tmp_path):
    """The rollout, `exp.policy` and an acting engine of a service drive the same two forwards."""
    config = {"num_envs": 2, "rollout_length": 16, "fcnet_hiddens": [8]}
    exp = Experiment(Searching, "CartPole-v1", use_preset=False, path=tmp_path / "r", config=config)
    row = exp.training.iterate()
    assert np.isfinite(row["loss/policy_loss"])
    model = exp.training.model
    obs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    expected = expected_search(model, obs)
    assert len(set(expected)) == 2
    assert [int(exp.policy(x)) for x in obs] == expected
    served = exp.served
    engine = ActingEngine(served.engine, served.policy, "greedy", masked=True, recurrent=False)
    got = engine.forward(obs, np.ones((20, 2), bool))["action"]
    assert got.tolist() == expected
    seen = []
    exp.play(1, on_step=lambda step: seen.append((step.obs, step.action)))
    obs, action = (np.concatenate(x) for x in zip(*seen, strict=True))
    assert action.tolist() == expected_search(model, obs)
    assert describe_policy(served.policy, model)["rule"] is None  # no rule says what it does
    exp.close()


# --- rules ------------------------------------------------------------------------------------------------------------


def test_rules_are_made_by_name_with_their_settings():
    assert {"dist", "q", "squashed"} <= set(act.RULES)
    rule = act.make_rule("q", {"epsilon": {"kind": "linear", "start": 1.0, "end": 0.1, "steps": 100}})
    assert (rule.name, rule.reads) == ("q", ("q",))
    assert rule.numbers(50) == {"epsilon": pytest.approx(0.55)}
    assert rule.trained() == {"epsilon": pytest.approx(0.1)}
    again = act.make_rule("q", json.loads(json.dumps(rule.trained())))
    assert again.numbers(0) == rule.numbers(TRAINED.env_steps) == {"epsilon": pytest.approx(0.1)}


def test_sac_acts_at_random_before_learning_starts_and_by_its_model_after():
    layout = EnvSpec("b", Space("box", (3,)), Space("box", (2,), "float32", -1.0, 1.0)).layout
    rule = act.make_rule("squashed", {"learning_starts": 100})
    dist = np.tile(np.float32([3.0, 3.0, -9.0, -9.0]), (500, 1))
    early = rule.choose(layout, {"dist": dist}, None, np.random.default_rng(0), Clock(99))["action"]
    assert abs(early.mean()) < 0.1
    late = rule.choose(layout, {"dist": dist}, None, np.random.default_rng(0), Clock(100))["action"]
    np.testing.assert_allclose(late, np.tanh(3.0), atol=1e-2)
    greedy = rule.choose(layout, {"dist": dist}, None, None, Clock())["action"]
    np.testing.assert_allclose(greedy, np.tanh(3.0), rtol=1e-6)


@pytest.mark.parametrize("name", ["dist", "q"])
def test_outputs_that_know_nothing_give_every_legal_action(name):
    rule, rng = act.make_rule(name), np.random.default_rng(0)
    mask = np.tile(np.array([True, False, True, True]), (400, 1))
    actions = rule.choose(SPEC.layout, rule.blank(SPEC.layout, 400, rng), mask, rng, Clock())["action"]
    assert set(actions) == {0, 2, 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("act") / "run"
    exp = Experiment("PPO", "CartPole-v1", use_preset=False, path=path, num_envs=2, rollout_length=16, epochs=1)
    list(exp.train(stop={"training_iteration": 1}))
    exp.close()
    return path


def rewrite(run, tmp_path, **changes):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True)
    policy = json.loads((copy / "policy.json").read_text())
    (copy / "policy.json").write_text(json.dumps({**policy, **changes}))
    return copy


def test_an_unknown_rule_is_named_with_the_nearest(run, tmp_path):
    with pytest.raises(UnknownName, match=r"acting rule 'dits'.*Did you mean 'dist'"):
        act.make_rule("dits")
    path = rewrite(run, tmp_path, rule="squash")
    with pytest.raises(UnknownName, match=r"unknown acting rule 'squash' \(policy.json\).*Did you mean 'squashed'"):
        ServedModel("m", path, ServedModelConfig())


def test_a_policy_without_a_rule_is_served_by_torch_alone(run, tmp_path):
    with pytest.raises(ConfigError, match="--engine torch"):
        ServedModel("m", rewrite(run, tmp_path, rule=None), ServedModelConfig())


class Always(act.rules.Distribution):
    """A rule of one's own: the last legal action, whatever the Model says."""

    name = "always"

    def __init__(self, of: int = 0):
        self.of = of

    def choose(self, layout, outputs, mask, rng, clock):
        return {"action": np.full(len(outputs["dist"]), self.of), "logp": np.zeros(len(outputs["dist"]), np.float32)}

    def trained(self):
        return {"of": self.of}


def test_a_rule_of_ones_own_is_registered_and_served(run, tmp_path, monkeypatch):
    monkeypatch.setitem(act.RULES, "always", Always)
    policy = Policy(SPEC.layout, act.make_rule("always", {"of": 1}))
    assert policy.reads == ("dist",)
    assert policy.acts_by_rule()
    about = describe_policy(policy, torch.nn.Linear(1, 1))
    assert (about["rule"], about["settings"], about["outputs"]) == ("always", {"of": 1}, ["dist"])
    model = ServedModel("m", rewrite(run, tmp_path, rule="always", settings={"of": 1}), ServedModelConfig())
    engine = ActingEngine(None, model.policy, "sample", masked=True, recurrent=False)
    engine.engine = type("Fake", (), {"forward": staticmethod(lambda obs: {"dist": np.zeros((len(obs), 2))})})
    assert engine.forward(np.zeros((3, 4)), np.ones((3, 2), bool))["action"].tolist() == [1, 1, 1]


# --- one way to act ---------------------------------------------------------------------------------------------------

SMALL = {"num_envs": 2, "fcnet_hiddens": [16], "max_episode_steps": 20}
ON, OFF = {**SMALL, "rollout_length": 16}, {**SMALL, "learning_starts": 50, "train_every": 50, "batch_size": 16}
CASES = {
    "ppo": ("PPO", "CartPole-v1", ON),
    "ppo-box": ("PPO", "Pendulum-v1", ON),
    "ppo-lstm": ("PPO", "CartPole-v1", {**ON, "use_lstm": True, "lstm_cell_size": 8}),
    "dqn": ("DQN", "CartPole-v1", {**OFF, "epsilon": 0.5}),
    "sac": ("SAC", "Pendulum-v1", OFF),
    "td3": ("TD3", "Pendulum-v1", OFF),
}


@pytest.mark.parametrize("mode", act.MODES)
@pytest.mark.parametrize("case", CASES)
def test_the_same_actions_wherever_a_policy_acts(case, mode):
    """Equal observations, weights and random state: a rollout, `exp.policy`, and a service that has only
    policy.json."""
    algo, env_id, config = CASES[case]
    exp = Experiment(algo, env_id, use_preset=False, config=config)
    exp.training.iterate()
    served, seed = exp.served, 11
    with make_vec(eval_config(exp.config["env"], 1), seed=0) as env:
        rollout = trained(env, served.engine, served.policy, 0, mode, served.initial_state)
        rollout.rng = np.random.default_rng(seed)
        steps = [rollout.step() for _ in range(60)]
    actions = [tree.index(s.action, 0) for s in steps]
    assert sum(s.first[0] for s in steps) >= 2  # also over the start of an episode
    if mode == "sample":
        assert len({np.asarray(a).tobytes() for a in actions}) > 1

    served.rng, state, got = np.random.default_rng(seed), None, []
    for step in steps:
        answer = exp.policy(step.obs[0], None if step.first[0] else state, act=mode)
        if served.recurrent:
            answer, state = answer
        got.append(answer)
    np.testing.assert_array_equal(np.array(got), np.array(actions))

    about = json.loads(json.dumps(describe_policy(served.policy, served.model)))
    by_rule = Policy(served.spec.layout, act.make_rule(about["rule"], about["settings"]))
    masked = served.spec.layout.num_logits > 0
    outputs = (*about["outputs"], *(["state"] if about["recurrent"] else []))
    engine = ActingEngine(TorchEngine(served.model, outputs), by_rule, mode, masked, about["recurrent"])
    engine.rng, state, got = np.random.default_rng(seed), None, []
    for step in steps:
        rest = (np.ones((1, served.spec.layout.num_logits), bool),) if masked else ()
        if served.recurrent:
            rest += (served.initial_state(1) if step.first[0] else state,)
        out = engine.forward(step.obs, *rest)
        state = out.get("state")
        got.append(out["action"][0])
    np.testing.assert_array_equal(np.array(got), np.array(actions))
    exp.close()
