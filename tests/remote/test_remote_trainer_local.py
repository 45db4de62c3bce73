"""RemoteTrainer over real models and buffers of a session in this process."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from bray.cluster import session as sessions
from bray.data.ring import ReplayRing
from bray.errors import ConfigError, MissingComponent, ResourceError, UnknownName
from bray.remote import master
from bray.remote.algo import algo_setup
from bray.remote.buffer.handle import RemoteBuffer
from bray.remote.model.handle import RemoteModel
from bray.remote.trainer.base import Trainer
from bray.remote.trainer.handle import RemoteTrainer
from bray.remote.trainer.worker import trainer_path
from bray.rundir import RunDir
from tests.ray_for_tests import local_session, opened  # noqa: F401
from tests.trainer_for_tests import MemoryModel, Regression, ToyRollouts, batch_of, net, played

pytestmark = pytest.mark.usefixtures("local_session")


def model(name="m"):
    return RemoteModel(name, net(), (np.zeros(3, np.float32),))


def filled(name="b", batches=40, **settings):
    buffer = RemoteBuffer(name, size=64, batch_size=4, num_workers=1, **settings)
    for i in range(batches):
        batch = batch_of(i)
        buffer.push(*[{k: v[j] for k, v in batch.items()} for j in range(4)], drop=False).result()
    return buffer


def train_function(model, buffer, weights_publish_interval, num_steps):
    """As users write them: names in, components found by name, torch's process group there."""
    assert isinstance(model, str)
    assert isinstance(buffer, str)
    remote = RemoteModel(model)
    module = remote.get_model()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    batches = iter(RemoteBuffer(buffer))
    for step in range(num_steps):
        batch = {k: torch.from_numpy(v) for k, v in next(batches).items()}
        loss = (module(batch["x"]) - batch["y"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        master.merge("loss/total", loss)
        if step % weights_publish_interval == 0:
            remote.publish_weights(module.state_dict())
    return dist.get_rank(), dist.get_world_size(), dist.get_backend()


def test_a_function_of_the_users_own():
    remote = model()
    filled()
    end = RemoteTrainer(use_gpu=False).train(
        train=train_function, model="m", buffer="b", weights_publish_interval=2, num_steps=10
    )
    assert end.result(60) == (0, 1, "gloo")
    assert remote.step == 5
    assert master.query("loss/total", "cnt") == 10


def test_a_trainer_is_driven_over_a_session():
    remote = model()
    filled("train")
    filled("more")
    filled("eval", 4)
    trainer = RemoteTrainer("t1")
    end = trainer.train(
        trainer=Regression,
        model="m",
        buffers=["train", RemoteBuffer("more")],
        buffer_weights=[0.75, 0.25],
        eval={"buffer": "eval", "interval": 10, "steps": 2},
        num_steps=20,
        weights_publish_interval=5,
    )
    summary = end.result(60)
    assert summary["steps"] == remote.step == 20
    weights, step = remote.get_weights()
    assert step == 20
    x = batch_of(0)["x"]
    assert np.allclose(remote(x, batch=True), _forward(weights, x), atol=1e-5)
    numbers = master.numbers()
    assert numbers["loss/loss{trainer=t1}"]["cnt"] == 20
    assert numbers["eval/loss{trainer=t1}"]["cnt"] == 4
    saved = RunDir.open(trainer_path(sessions.session().path, "t1")).load_checkpoint()
    assert saved.step == 20
    assert all(np.array_equal(saved.weights[k], weights[k]) for k in weights)


def _forward(weights, x):
    module = net()
    module.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in weights.items()})
    return module.eval()(torch.from_numpy(x)).detach().numpy()


def test_errors_of_the_users_code_are_the_promises_and_end_the_session():
    class Broken(Regression):
        def loss(self, replay, step):
            if step == 2:
                raise KeyError("advantage")
            return super().loss(replay, step)

    model()
    filled()
    end = RemoteTrainer("broken").train(trainer=Broken, model="m", buffers=["b"], num_steps=10)
    with pytest.raises(KeyError, match="advantage") as caught:
        end.result(60)
    assert any(entry.name == "loss" for entry in caught.traceback)
    assert RunDir(sessions.session().path).load_checkpoint().step == 2
    assert "step 2 is saved: the same command goes on from there" in caught.value.__notes__
    with pytest.raises(KeyError, match="advantage") as caught:
        sessions.run_until_asked_to_stop()
    assert any("trainer broken" in note for note in caught.value.__notes__)


def test_missing_components_are_named():
    model()
    with pytest.raises(MissingComponent, match=r"there is no model 'other'.*'m'"):
        RemoteTrainer().train(trainer=Regression, model="other", buffers=["b"], num_steps=1).result(60)


def test_the_end_of_a_session_saves_the_training(tmp_path):
    model()
    buffer = filled()
    end = RemoteTrainer("t").train(trainer=Regression, model="m", buffers=["b"])
    deadline = time.monotonic() + 60
    while RemoteModel("m").step < 30 and time.monotonic() < deadline:
        buffer.push({k: v[0] for k, v in batch_of(1).items()})
        time.sleep(0.001)
    path = sessions.session().path
    sessions.shutdown()
    summary = end.result(1)
    assert summary["stopped"]
    assert RunDir.open(trainer_path(path, "t")).load_checkpoint().step == summary["model_step"] >= 30
    assert not dist.is_initialized()
    with opened(path.parent.parent, "local"):  # the same trial: both go on
        remote = model()
        assert remote.step == summary["model_step"]
        filled()
        again = RemoteTrainer("t").train(trainer=Regression, model="m", buffers=["b"], num_steps=summary["steps"] + 3)
        assert again.result(60)["resumed_from"] == summary["model_step"]
        assert remote.step == summary["model_step"] + 3


def test_a_chosen_checkpoint_is_where_the_trainer_goes_on_too(local_session, caplog):  # noqa: F811
    def run(steps, **settings):
        RemoteModel("m", net(), (np.zeros(3, np.float32),), checkpoint_interval=5, **settings)
        asked = {"num_steps": steps, "checkpoint_interval": 5, "weights_publish_interval": 5}
        return RemoteTrainer("t").train(trainer=Regression, model="m", buffers=["b"], **asked).result(60)

    filled()
    assert run(20)["model_step"] == 20
    again = run(12, checkpoint=10)
    assert (again["resumed_from"], again["model_step"]) == (10, 12)
    saved = RunDir(local_session.path).load_checkpoint()
    optimizer = saved.state["arrays"]["learner"]["optimizer"]
    assert saved.step == 12
    assert int(optimizer["state"][0]["step"]) == 12  # it had made 10 steps then, not 20
    other = run(3, checkpoint=str(saved.path / "model.safetensors"))
    assert (other["resumed_from"], other["steps"]) == (None, 3)
    assert "no state of the trainer: optimizer and counters begin anew" in caplog.text


def test_two_trainers_side_by_side_and_one_name_twice():
    for name in "ab":
        model(name)
        filled(f"b{name}")
    ends = [RemoteTrainer(n).train(trainer=Regression, model=n, buffers=[f"b{n}"], num_steps=10) for n in "ab"]
    assert [e.result(60)["steps"] for e in ends] == [10, 10]
    RemoteBuffer("empty", size=4, batch_size=4, num_workers=1)
    waits = {"trainer": Regression, "model": "a", "buffers": ["empty"]}
    RemoteTrainer("c").train(**waits)
    with pytest.raises(ConfigError, match="trainer 'c' is training already"):
        RemoteTrainer("c").train(**waits)
    assert [e.result(10) for e in [RemoteTrainer().train(train=lambda: 5) for _ in range(2)]] == [5, 5]


def test_a_learner_from_the_graphs_config():
    from bray.algos import ppo

    section = {
        "kind": "config",
        "algorithm": "PPO",
        "env": "CartPole-v1",
        "settings": {"minibatches": 2, "epochs": 1, "gamma": 0.0},
    }
    config = {"trainer1": {"kind": "trainer", "algo": "ppo"}, "ppo": section}
    setup = algo_setup(section)
    made = setup.make_model()
    remote = RemoteModel("m", made, setup.forward_args())
    buffer = RemoteBuffer("b", size=4, batch_size=64, num_workers=1)
    rollouts = ToyRollouts(setup, MemoryModel(made), rows=64)
    for _ in range(3):
        buffer.push_batch(next(rollouts), drop=False).result()
    end = RemoteTrainer("trainer1").train(
        trainer=ppo.Learner, model=remote, buffers=[buffer], num_steps=6, config=config
    )
    summary = end.result(60)
    assert summary["steps"] == remote.step == 6
    assert summary["samples"] == remote.env_steps == 3 * 60
    assert "policy_loss" in summary["metrics"]


DQN = {"algorithm": "DQN", "env": "CartPole-v1"}


def test_prioritized_replay_gets_priorities_and_follows_the_schedule_of_beta(monkeypatch):
    betas, rings = [], []
    sample = ReplayRing.sample

    def look(self, size, rng, beta):
        betas.append(beta)
        rings.append(self)
        return sample(self, size, rng, beta)

    monkeypatch.setattr(ReplayRing, "sample", look)
    settings = {
        "prioritized": True,
        "priority_beta": {"kind": "linear", "start": 0.4, "end": 1.0, "steps": 60},
        "learning_starts": 0,
        "batch_size": 8,
        "train_every": 15,
    }
    section = {"kind": "config", **DQN, "settings": settings}
    setup = algo_setup(section)
    remote = RemoteModel("m", setup.make_model(), setup.forward_args())
    buffer = RemoteBuffer("b", size=8, batch_size=17, num_workers=1)
    for i in range(6):
        buffer.push_batch(played(i), drop=False).result()
    config = {"t": {"algo": "dqn"}, "dqn": section}
    end = RemoteTrainer("t").train(model=remote, buffers=["b"], num_steps=5, config=config)
    assert end.result(60)["steps"] == 5
    assert betas == pytest.approx([0.4 + 0.6 * min(1.0, 15 * i / 60) for i in range(1, 6)])
    leaves = rings[-1].get_state()["priority"]
    assert len(np.unique(leaves[leaves > 0])) > 5  # new samples have one priority; these have got their own


@pytest.mark.parametrize("algorithm", ["PPO", "DQN"])
def test_a_trainer_of_ones_own_over_agents_with_an_algorithm_gets_what_its_learner_would(algorithm):
    """Rows with advantages, or replayed transitions: what agents push is prepared by their algorithm."""
    seen = []

    class Look(Trainer):
        def loss(self, replay):
            seen.append(sorted(replay))
            out = self.model(replay["obs"])
            return out["value" if "value" in out else "q"].mean()

    small = {"learning_starts": 20, "batch_size": 8} if algorithm == "DQN" else {}
    section = {"kind": "config", "algorithm": algorithm, "env": "CartPole-v1", "settings": small}
    setup = algo_setup(section)
    remote = RemoteModel("m", setup.make_model(), setup.forward_args())
    buffer = RemoteBuffer("b", size=8, batch_size=64, num_workers=1)
    rollouts = ToyRollouts(setup, MemoryModel(setup.make_model()), rows=64)
    for _ in range(3):
        buffer.push_batch(next(rollouts), drop=False).result()
    config = {"t": {}, "agent1": {"kind": "agent", "algo": "a", "buffer": "b"}, "a": section}
    end = RemoteTrainer("t").train(trainer=Look, model=remote, buffers=["b"], num_steps=3, config=config)
    assert end.result(60)["steps"] == 3
    rows = ["action", "advantage", "logp", "obs", "target", "value", "weight"]
    replayed = ["action", "discount", "id", "next_obs", "obs", "reward", "weight"]
    assert seen == [rows if algorithm == "PPO" else replayed] * 3


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        (
            {"trainer": Regression, "buffers": ["b"]},
            "expected train=FUNCTION, or trainer=CLASS with model= and buffers=",
        ),
        ({"trainer": Regression, "model": "m", "buffers": "b"}, r"expected buffers=\['b'\], a list"),
        (
            {"trainer": Regression, "model": "m", "buffers": ["b"], "eval": {"interval": 3}},
            "eval needs the name of a buffer",
        ),
        (
            {"trainer": Regression, "model": "m", "buffers": ["b"], "num_steps": 0},
            "num_steps: expected a whole number > 0",
        ),
        ({"train": 3}, "expected a function, got 3"),
    ],
)
def test_what_is_asked_for_is_checked(kwargs, said):
    with pytest.raises(ConfigError, match=said):
        RemoteTrainer().train(**kwargs)


def test_gpus_of_a_rank():
    assert RemoteTrainer("t").gpus_per_worker == 0
    assert RemoteTrainer("t", use_gpu=True).gpus_per_worker == 1
    assert RemoteTrainer("t", use_gpu=True, gpus_per_worker=0.5).gpus_per_worker == 0.5
    with pytest.raises(ConfigError, match="together with use_gpu=True"):
        RemoteTrainer("t", gpus_per_worker=0.5)


def test_unknown_arguments_and_resources():
    with pytest.raises(UnknownName, match=r"argument 'learning_rat'.*Did you mean 'learning_rate'"):
        RemoteTrainer().train(trainer=Regression, model="m", buffers=["b"], learning_rat=1)
    with pytest.raises(UnknownName, match=r"key 'steps_'.*Did you mean 'steps'"):
        RemoteTrainer().train(trainer=Regression, model="m", buffers=["b"], eval={"buffer": "e", "steps_": 1})
    with pytest.raises(ConfigError, match="expected num_workers >= 1"):
        RemoteTrainer(num_workers=0)
    if not torch.cuda.is_available():
        with pytest.raises(ResourceError, match="asks for a GPU"):
            RemoteTrainer(use_gpu=True).train(train=print)


def test_local_has_one_rank_and_says_so(caplog):
    assert RemoteTrainer(num_workers=2).train(train=dist.get_world_size).result(30) == 1
    assert "cluster='local' has one rank, not 2" in caplog.text


class Frozen(nn.Module):
    """A model without parameters that can be trained is refused by torch's optimizer, and that reaches the caller."""

    def forward(self, x):
        return x


def test_a_model_without_parameters():
    RemoteModel("f", Frozen(), (np.zeros(3, np.float32),))
    filled()
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        RemoteTrainer().train(trainer=Regression, model="f", buffers=["b"], num_steps=1).result(30)
