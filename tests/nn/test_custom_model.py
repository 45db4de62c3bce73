"""`custom_model`: networks of a user's own, as tutorials write them, are trained; those that do not fit get one
message."""

import re
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import bray
import bray.figures
from bray.cli.main import main
from bray.envs.config import EnvConfig
from bray.envs.make import make_env
from bray.errors import ConfigError
from bray.figures import read_results
from bray.nn import ModelConfig, make_model
from bray.rundir import RunDir
from bray.serving.graph import export_graph
from bray.spec import EnvSpec, Space

PAGE = Path(__file__).parents[2] / "docs" / "networks.md"
BOX = Space("box", (4,), "float32", -1.0, 1.0)
DISCRETE = EnvSpec("x", BOX, Space("discrete", (), "int64", n=(3,), start=(0,)))
CONTINUOUS = EnvSpec("y", BOX, Space("box", (2,), "float32", -1.0, 1.0))
SMALL = {"num_envs": 2, "rollout_length": 16, "export_graph_after_s": None, "save_figure": False}


class Qnet(nn.Module):
    """The network of a DQN tutorial, with the parameter names of one."""

    def __init__(self, state_dim, hidden_dim, action_dim):
        super().__init__()
        self.fc1 = nn.Linear(state_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, action_dim)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


class Net(nn.Module):
    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.layer = nn.Linear(obs_dim, act_dim)

    def forward(self, x):
        return self.layer(x)


class Pair(Net):
    def __init__(self, n_states, n_actions):
        super().__init__(n_states, n_actions)
        self.value = nn.Linear(n_states, 1)

    def forward(self, x):
        return self.layer(x), self.value(x)


class Gaussian(Net):
    def __init__(self, obs_dim, act_dim):
        super().__init__(obs_dim, 2 * act_dim)

    def forward(self, x):
        return self.layer(x).chunk(2, -1)


class Softmax(Net):
    def forward(self, x):
        return super().forward(x).softmax(-1)


class Double(Net):
    def forward(self, x):
        return super().forward(x).double()


class Crooked(Net):
    def forward(self, x):
        return self.layer(x.reshape(-1, 3))


class RllibStyle(nn.Module):
    def __init__(self, obs_space, action_space, num_outputs, model_config, name):
        super().__init__()


class Lstm(nn.Module):
    """Its state is nn.LSTM's: a tuple, with the batch in the second axis."""

    def __init__(self, obs_dim, act_dim, hidden=8):
        super().__init__()
        self.rnn = nn.LSTM(obs_dim, hidden)
        self.policy, self.value = nn.Linear(hidden, act_dim), nn.Linear(hidden, 1)

    def forward(self, x, state):
        out, state = self.rnn(x.unsqueeze(0), state)
        return self.policy(out[0]), self.value(out[0]), state


class Cell(nn.Module):
    """Ours, with a dict and an initial_state, and no attribute that says so."""

    def __init__(self, spec, config):
        super().__init__()
        self.cell = nn.GRUCell(spec.observation.shape[0], 16)
        self.policy, self.value = nn.Linear(16, spec.layout.num_params), nn.Linear(16, 1)

    def initial_state(self, batch_size):
        return {"h": torch.zeros(batch_size, 16)}

    def forward(self, obs, state):
        h = self.cell(obs, state["h"])
        return {"dist": self.policy(h), "value": self.value(h).squeeze(1), "state": {"h": h}}


class Recall(gym.Env):
    """Shows a bit, then nothing; the last action is to repeat it. A policy without memory gets half of the reward."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bit, self.left = int(self.np_random.integers(2)), 3
        return np.array([2.0 * self.bit - 1.0, 0.0], np.float32), {}

    def step(self, action):
        self.left -= 1
        last = self.left == 0
        return np.array([0.0, self.left == 1], np.float32), float(last and action == self.bit), last, False, {}


def train(run, env, model, path, iterations=2, **more):
    exp = bray.Experiment(run, env, custom_model=model, use_preset=False, path=path, **{**SMALL, **more})
    rows = list(islice(exp.train(), iterations))
    exp.close()
    return exp, rows[-1]


@pytest.mark.parametrize("model", [Net, Net(4, 2), Pair], ids=["class", "instance", "policy and value"])
def test_a_tutorials_network_is_trained_by_ppo(model, tmp_path):
    exp, row = train("PPO", "CartPole-v1", model, tmp_path / "run", epochs=4, minibatches=4)
    assert row["learner_steps_total"] == 32
    weights = RunDir.open(tmp_path / "run").load_checkpoint().weights
    assert weights["net.layer.weight"].shape == (2, 4)
    assert exp.policy([0.0, 0.0, 0.05, 0.0]) in (0, 1)
    if (
        model is not Pair
    ):  # an instance is copied: it keeps its weights, and a second run starts where the first one did
        assert any(name.startswith("read.value") for name in weights)


def test_a_tutorials_qnet_is_trained_by_dqn_on_the_command_line(tmp_path):
    argv = "train --run DQN --env CartPole-v1 --no-preset --quiet learning_starts=50 export_graph_after_s=null"
    more = ["custom_model=test_custom_model:Qnet", "custom_options={hidden_dim: 24}", "--steps", "1000"]
    assert main([*argv.split(), *more, "--project", str(tmp_path), "--trial", "t"]) == 0
    assert RunDir.open(tmp_path / "t").load_checkpoint().weights["net.fc1.weight"].shape == (24, 4)
    assert read_results(tmp_path / "t")[-1]["learner_steps_total"] > 100
    assert main(["eval", str(tmp_path / "t"), "--episodes", "1"]) == 0


def test_a_network_of_the_users_script_is_found_by_that_script_alone(tmp_path, caplog, capsys, monkeypatch):
    net = type("ScriptNet", (Net,), {"__module__": "__main__"})
    path = tmp_path / "run"
    small = {**SMALL, "epochs": 1, "export_graph_after_s": 0.0}
    exp = bray.Experiment("PPO", "CartPole-v1", custom_model=net, path=path, **small)
    for steps in (1, 2):  # the second call continues the run and must not warn again
        list(exp.train({"training_iteration": steps}))
    exp.close()
    warned = [r.getMessage() for r in caplog.records if "__main__" in r.getMessage()]
    assert len(warned) == 1
    assert "model.custom_model=__main__:ScriptNet: defined in this script" in warned[0]
    assert "`bray eval`" in warned[0]
    assert "my_module:ScriptNet" in warned[0]
    assert main(["eval", str(path)]) == 2
    said = capsys.readouterr().err
    assert "unknown custom_model 'ScriptNet' (__main__). It was defined in the script" in said
    assert "bray.Experiment.load" in said
    assert "Known" not in said
    with pytest.raises(ConfigError, match="defined in the script") as refused:
        export_graph(path)
    assert "--engine torch" not in str(refused.value)  # which would not find it either
    monkeypatch.setattr(sys.modules["__main__"], "ScriptNet", net, raising=False)  # the script itself
    assert bray.Experiment.load(path).policy([0.0, 0.0, 0.05, 0.0]) in (0, 1)


def test_an_environment_of_the_users_script_is_looked_for_in_vain_elsewhere():
    with pytest.raises(
        ConfigError, match=r"'Foes' \(in module __main__\)\. It was defined in the script.*my_module:Foes"
    ):
        make_env(EnvConfig("__main__:Foes"))


def test_sizes_of_other_spaces():
    one_hot = EnvSpec("x", Space("discrete", (), "int64", n=(5,), start=(0,)), DISCRETE.action)
    model = make_model("actor_critic", one_hot, ModelConfig(custom_model=Net))
    assert model(torch.tensor([0, 4]))["dist"].shape == (2, 3)
    assert model.net.layer.in_features == 5
    mean_only = make_model("actor_critic", CONTINUOUS, ModelConfig(custom_model=Net, log_std_init=-1.0))
    dist = mean_only(torch.zeros(3, 4))["dist"]
    assert dist.shape == (3, 4)
    assert dist[:, 2:].tolist() == [[-1.0, -1.0]] * 3
    sac = make_model("squashed_gaussian", CONTINUOUS, ModelConfig(custom_model=Gaussian))
    assert sac(torch.zeros(3, 4))["dist"].shape == (3, 4)
    assert make_model("q", DISCRETE, ModelConfig(custom_model=Qnet)).net.fc1.out_features == 64  # of fcnet_hiddens


@pytest.mark.parametrize(
    ("kind", "model", "said"),
    [
        ("actor_critic", Softmax, "leave out the softmax"),
        ("q", Softmax, "leave out the softmax"),
        ("q", Pair, r"for a batch of 2 it returned \(\[2, 3\], \[2, 1\]\)"),
        (
            "actor_critic",
            Crooked,
            r"Crooked.forward raised RuntimeError at test_custom_model.py:\d+: shape '\[-1, 3\]'",
        ),
        ("actor_critic", RllibStyle, r"RllibStyle\(obs_space, .*missing a required argument"),
        ("q", Lstm, "cannot train a memory"),
        ("q", Double, r"it returned q as torch.float64: return float32"),
        ("actor_critic", Double, r"it returned dist as torch.float64: return float32"),
    ],
)
def test_what_does_not_fit_is_one_message_with_the_signature(kind, model, said):
    with pytest.raises(ConfigError, match=said) as error:
        make_model(kind, DISCRETE, ModelConfig(custom_model=model))
    message = str(error.value)
    assert "def __init__(self, spec, config, **custom_options)" in message
    assert "def forward(self, obs)" in message
    assert ('{"q": [B, 3]}' if kind == "q" else '{"dist": [B, 3], "value": [B]}') in message


@pytest.mark.parametrize("run", ["PG", "ES", "ARS"])
def test_a_memory_where_the_algorithm_has_none_is_one_message(run):
    with pytest.raises(ConfigError, match=r"custom_model .*Lstm does not fit: .* cannot train a memory"):
        bray.Experiment(run, "CartPole-v1", custom_model=Lstm, use_preset=False).training  # noqa: B018


def test_an_image_is_no_number():
    spec = EnvSpec("x", Space("box", (84, 84, 3), "uint8", 0, 255), DISCRETE.action)
    with pytest.raises(ConfigError, match=r"holds an image: take \(spec, config\)"):
        make_model("q", spec, ModelConfig(custom_model=Net))


class Cnn(nn.Module):
    def __init__(self, input_shape, n_actions):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(input_shape[0], 4, 3), nn.Flatten(), nn.LazyLinear(n_actions))
        self.layers(torch.zeros(1, *input_shape))

    def forward(self, x):
        return self.layers(x.float() / 255)


def test_a_network_that_asks_for_a_shape_sees_the_image():
    spec = EnvSpec("x", Space("box", (1, 8, 8), "uint8", 0, 255), DISCRETE.action)
    model = make_model("q", spec, ModelConfig(custom_model=Cnn))
    assert model(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))["q"].shape == (2, 3)


class Agent:
    """The agent of a tutorial, with its own loop: Qnet and bray.ReplayBuffer as they stand."""

    def __init__(self, cfg):
        self.cfg, self.memory = cfg, bray.ReplayBuffer(cfg.memory_capacity)
        self.policy_net = Qnet(cfg.n_states, 16, cfg.n_actions)
        self.optimizer = torch.optim.Adam(self.policy_net.parameters(), cfg.lr)
        self.updates = 0

    def predict(self, state):
        return self.policy_net(torch.tensor(state).unsqueeze(0)).max(1)[1].item()

    def update(self):
        if len(self.memory) < self.cfg.batch_size:
            return
        state, action, reward, next_state, done = (
            np.array(x, np.float32) for x in self.memory.sample(self.cfg.batch_size)
        )
        q = self.policy_net(torch.tensor(state)).gather(1, torch.tensor(action).long()[:, None])
        q_next = self.policy_net(torch.tensor(next_state)).max(1)[0].detach()
        loss = nn.MSELoss()(q, (torch.tensor(reward) + 0.95 * q_next * (1 - torch.tensor(done)))[:, None])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.updates += 1


def test_the_classes_of_a_tutorial_run_in_their_own_loop():
    env = gym.make("CartPole-v1")
    agent = Agent(SimpleNamespace(n_states=4, n_actions=2, memory_capacity=50, batch_size=16, lr=1e-3))
    state, _ = env.reset(seed=0)
    for step in range(1, 61):
        action = agent.predict(state)
        next_state, reward, terminated, truncated, _ = env.step(action)
        agent.memory.push(state, action, reward, next_state, terminated)
        agent.update()
        assert agent.updates == max(0, step - 15)  # none before there is a batch
        state = env.reset()[0] if terminated or truncated else next_state
    assert len(agent.memory) == 50


@pytest.mark.parametrize("model", [Lstm, Cell])
def test_a_sequence_is_its_steps(model):
    """The outputs of `unroll` are those of acting step by step, with zeros where an episode starts."""
    torch.manual_seed(0)
    made = make_model("actor_critic", DISCRETE, ModelConfig(custom_model=model))
    obs, first = torch.randn(5, 3, 4), torch.zeros(5, 3, dtype=torch.bool)
    first[2, 1] = True
    together = made.unroll(obs, made.initial_state(3), first)
    state = made.initial_state(3)
    for t in range(5):
        state = {k: x * (~first[t]).float().reshape(-1, *[1] * (x.ndim - 1)) for k, x in state.items()}
        out = made(obs[t], state)
        state = out.pop("state")
        for key in ("dist", "value"):
            torch.testing.assert_close(together[key][t], out[key])
    assert all(torch.equal(together["state"][k], x) for k, x in state.items())
    assert all(x.shape[0] == 3 for x in state.values())


def test_a_custom_recurrent_model_is_trained_resumed_and_asked(tmp_path):
    whole, row = train("PPO", "CartPole-v1", Lstm, tmp_path / "whole", iterations=4, max_seq_len=8, epochs=2)
    train("PPO", "CartPole-v1", Lstm, tmp_path / "half", iterations=2, max_seq_len=8, epochs=2)
    resumed = bray.Experiment.resume(tmp_path / "half", trust=True)
    again = list(islice(resumed.train(), 2))[-1]
    resumed.close()
    assert again["loss/policy_loss"] == row["loss/policy_loss"]
    runs = [RunDir.open(tmp_path / name).load_checkpoint().weights for name in ("whole", "half")]
    assert all(np.array_equal(runs[0][k], runs[1][k]) for k in runs[0])
    action, state = whole.policy([0.0, 0.0, 0.05, 0.0])
    assert action in (0, 1)
    assert whole.policy([0.0, 0.0, 0.05, 0.0], state)[0] in (0, 1)
    assert len(whole.evaluate(2)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", [Lstm, Cell])
def test_a_custom_recurrent_model_learns_to_remember(model, tmp_path):
    exp = bray.Experiment(
        "PPO",
        Recall,
        custom_model=model,
        path=tmp_path / "run",
        num_envs=16,
        rollout_length=48,
        lr=5e-3,
        max_seq_len=12,
    )
    for _ in exp.train({"episode_return_mean": 0.95, "env_steps_total": 100_000}):
        pass
    assert exp.evaluate(50)["eval/return_mean"] > 0.95  # without memory: 0.5
    exp.close()


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bray.figures, "learning_curve", lambda *args, **kwargs: None)  # takes longer than these runs
    page = PAGE.read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)).replace("2_000", "200")
    names: dict = {"__name__": "my_nets"}
    exec(compile(code, str(PAGE), "exec"), names)
    assert names["action"] in (0, 1)
    made = ["calm", "foes", "instance", "remember", "second", "split", "tutorial-dqn", "two-heads"]
    assert sorted(p.name for p in Path("runs").iterdir()) == made
