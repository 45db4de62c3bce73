"""DT: its loss row by row, what it is told while it plays, and that it plays for what it is asked."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import bray
from bray import tree
from bray.act import GREEDY, TRAINED, Clock, Tick, decide_now
from bray.act.asking import ASKED, with_return
from bray.algos import get_algo
from bray.cli.main import main
from bray.client import ClientError
from bray.data.file_windows import Windows
from bray.data.files import write_episodes
from bray.errors import ConfigError
from bray.nn import ModelConfig
from bray.nn.functions import action_features
from bray.train.acting import acting_engine
from tests.algos.test_file_windows import batches, opened
from tests.algos.test_from_files import CHOICE, MANY, MASKED, NUMBERS, log_prob

TINY = {"use_lstm": True, "recurrent": "gtrxl", "attention_window": 8, "attention_layers": 2, "attention_heads": 2}
TINY |= {"lstm_cell_size": 16, "fcnet_hiddens": (16,), "max_seq_len": 4}


def made(spec, **options):
    torch.manual_seed(0)
    algo, small = get_algo("DT"), ModelConfig(**TINY)
    config = algo.Config(batch_size=8, lr=1e-9, min_std=0.9, **options)
    model = algo.make_model(config, spec, small)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return algo, model, algo.Learner(config, spec, model, small, seed=0, record=False)


def tensors(obs):
    return tree.map(lambda x: torch.from_numpy(x[None]), obs)


@pytest.mark.parametrize("spec", [CHOICE, MASKED, NUMBERS], ids=lambda spec: spec.id)
def test_rows_are_judged_by_the_return_that_came_and_the_action_before(spec, tmp_path):
    """As by a policy that goes through each episode and is told what really came."""
    _, model, learner = made(spec)
    data = Windows(8, 4, epochs=2)
    played = opened(tmp_path / "files", data, spec)
    scale = max(np.abs(np.cumsum(e["reward"][::-1])).max() for e in played)
    best = max(float(e["reward"].sum()) for e in played)
    model.scale.fill_(float(scale))  # as after the first epoch
    known = {}
    for episode in played:
        state, to_go = model.initial_state(1), float(episode["reward"].sum())
        for t, action in enumerate(episode["action"]):
            obs = {k: x[t] for k, x in episode["obs"].items()} if spec is MASKED else episode["obs"][t]
            state[ASKED] = torch.tensor([[to_go, 1.0, 0.0]])
            with torch.no_grad():
                out = model(tensors(obs), state)
            state, to_go = out["state"], to_go - float(episode["reward"][t])
            state["previous_action"] = action_features(spec.layout, torch.from_numpy(np.array([action])).reshape(1, -1))
            numbers = obs["obs"] if spec is MASKED else obs
            mask = obs["action_mask"] if spec is MASKED else None
            known[numbers.tobytes()] = log_prob(spec, out["dist"][0].double().numpy(), action, mask, 0.9)
    for batch in batches(data):
        obs = batch.data["obs"]["obs"] if spec is MASKED else batch.data["obs"]
        expected = [known[x.tobytes()] for x in obs[batch.data["weight"] > 0]]
        assert learner.update(batch.data, Clock()).metrics["loss"] == pytest.approx(-np.mean(expected), rel=1e-4)
    assert learner.numbers()["target_return"] == pytest.approx(best, rel=1e-5)
    assert float(model.scale) == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("spec", [CHOICE, MASKED, MANY, NUMBERS], ids=lambda spec: spec.id)
def test_what_is_left_of_the_return_and_what_was_played_are_remembered(spec):
    algo, model, _ = made(spec)
    model.best.fill_(40.0)
    policy, rng = algo.Policy(algo.Config(), spec), np.random.default_rng(0)
    engine, state = acting_engine(model, policy), {k: x.numpy() for k, x in model.initial_state(3).items()}
    left = [np.full(3, 40.0), np.full(3, 40.0)]
    policies = [policy, algo.Policy(algo.Config(), spec)]
    policies[1].target_return, left[1] = 12.5, np.full(3, 12.5)
    for one, expected in zip(policies, left, strict=True):
        carry = state
        for reward in (None, np.array([1.0, 2.0, -3.0]), np.array([0.5, 0.0, 1.0])):
            obs = rng.standard_normal((3, 4)).astype(np.float32)
            if spec is MASKED:
                obs = {"obs": obs, "action_mask": np.array([[1, 0, 0], [0, 1, 1], [0, 1, 0]], np.int8)}
            decision = decide_now(one.decide(Tick(obs, reward), carry, rng, GREEDY, TRAINED), engine.forward)
            carry = decision.carry
            expected = expected - (0.0 if reward is None else reward)
            np.testing.assert_allclose(carry[ASKED], np.stack([expected, np.ones(3), np.zeros(3)], 1))
            action = torch.from_numpy(np.asarray(decision.extras["action"])).reshape(3, -1)
            features = action_features(spec.layout, action).clamp(-1.0, 1.0).numpy()
            np.testing.assert_allclose(carry["previous_action"], features, atol=1e-6)


def test_the_reward_before_an_episode_counts_for_nothing_and_other_memories_are_left_alone():
    told = with_return({ASKED: np.array([[0.0, 0.0, 0.0], [7.0, 1.0, 0.0]])}, 5.0, np.array([3.0, 2.0]))[ASKED]
    assert told.tolist() == [[5.0, 1.0, 0.0], [7.0, 1.0, 2.0]]
    other = {"h": np.zeros((2, 3))}
    assert with_return(other, 5.0, 1.0) is other


# --- a game in which one can have any return --------------------------------------------------------------------------


class Ones(gym.Env):
    """Six steps; the reward is the action, 0 or 1."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,))
    action_space = gym.spaces.Discrete(2)

    def _see(self):
        return np.array([self.t / 6.0], np.float32)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._see(), {}

    def step(self, action):
        self.t += 1
        return self._see(), float(action), self.t == 6, False, {}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("dt"), np.random.default_rng(0)

    def episode():
        action = (rng.random(6) < rng.random()).astype(np.int64)
        flags = {"terminated": np.arange(6) == 5, "truncated": np.zeros(6, bool)}
        return {"obs": np.arange(7, dtype=np.float32)[:, None] / 6, "action": action, "reward": action * 1.0, **flags}

    write_episodes(folder / "files" / "episodes", [episode() for _ in range(300)])
    config = {**TINY, "lr": 5e-3, "batch_size": 384, "max_seq_len": 6, "epochs": 60}
    given = {"data": folder / "files", "use_preset": False, "config": config}
    with bray.Experiment("DT", f"{__name__}:Ones", path=folder / "run", **given) as exp:
        list(exp.train(stop={"training_iteration": 1000}))
    return folder / "run"


def test_it_plays_for_what_it_is_asked(asked, capsys):
    exp = bray.Experiment.load(asked)
    got = []
    for target in range(7):
        exp.ask_for(target)
        got.append(exp.evaluate(2)["eval/return_mean"])
    assert np.abs(np.array(got) - np.arange(7)).max() <= 1.0
    assert np.corrcoef(np.argsort(np.argsort(got)), np.arange(7))[0, 1] >= 0.9
    assert bray.Experiment.load(asked).evaluate(2)["eval/return_mean"] >= 5.0  # the best of the files
    capsys.readouterr()
    assert main(["eval", str(asked), "--target-return", "3", "--episodes", "2"]) == 0
    assert f"2 greedy {got[3]:12g} " in capsys.readouterr().out


def test_a_session_plays_for_what_its_start_says(asked):
    exp = bray.Experiment.load(asked)

    def expected(target):
        exp.ask_for(target)
        state, reward, actions = None, None, []
        for t in range(6):
            action, state = exp.policy(np.array([t / 6], np.float32), state, reward=reward)
            reward = float(action)
            actions.append(int(action))
        return actions

    with (
        exp.serve(port=0, block=False, engine="torch", target_return=2.0) as server,
        bray.Client(port=server.port) as client,
    ):
        for start, target in ((b"", 2), ({"target_return": 4}, 4), ({"target_return": 0}, 0)):
            client.start(data=start)
            said, body = [], {}
            for t in range(6):
                said.append(client.tick({"obs": [t / 6], **body})["action"])
                body = {"reward": said[-1]}
            client.end()
            assert said == expected(target)
        with pytest.raises(ClientError, match="target_return"):
            client.start(data={"target_return": "much"})
    assert expected(2) != expected(4)


def test_others_are_not_asked(tmp_path):
    config = {"num_envs": 2, "rollout_length": 8, "fcnet_hiddens": [8]}
    with bray.Experiment("PPO", "CartPole-v1", path=tmp_path / "r", use_preset=False, config=config) as exp:
        exp.save()
        with pytest.raises(ConfigError, match="does not play for a return"):
            exp.ask_for(10)
        with pytest.raises(ConfigError, match=r"does not play for a return .*target_return=10"):
            exp.serve(port=0, block=False, target_return=10)


def test_a_network_without_memory_is_refused():
    with pytest.raises(ConfigError, match="leave use_lstm=true, or use BC"):
        get_algo("DT").make_model(get_algo("DT").Config(), CHOICE, ModelConfig())
