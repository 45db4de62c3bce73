"""FakeBuffer: made-up samples for a trainer that is developed alone."""

import contextlib
import itertools
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import bray.fake
from bray import tree
from bray.act import Clock
from bray.data.rows import Decoder
from bray.errors import ConfigError, DataError
from bray.fake.buffer import FakeBuffer, algo_sample
from bray.remote.algo import algo_setup
from bray.remote.buffer.handle import RemoteBuffer
from bray.remote.model.handle import RemoteModel
from bray.remote.trainer.handle import RemoteTrainer
from tests import forked
from tests.ray_for_tests import local_session  # noqa: F401
from tests.trainer_for_tests import Regression, net

pytestmark = pytest.mark.usefixtures("local_session")

SAMPLE = {"state": {"image": np.zeros((4, 6), np.float32)}, "action": 8, "done": True, "pair": (np.uint8([3, 0]), 0.0)}


def take(name, n):
    return list(itertools.islice(RemoteBuffer(name), n))


def test_samples_have_the_shapes_and_types_of_the_template():
    assert bray.fake.FakeBuffer is FakeBuffer
    fake = FakeBuffer("b", SAMPLE, size=4, batch_size=16, num_workers=1)
    (batch,) = take("b", 1)
    found = {path: (leaf.shape, leaf.dtype) for path, leaf in tree.paths(batch)}
    assert found == {
        "state/image": ((16, 4, 6), np.float32),
        "action": ((16,), np.int64),
        "done": ((16,), np.bool_),
        "pair/0": ((16, 2), np.uint8),
        "pair/1": ((16,), np.float64),
    }
    many = tree.concat([batch, *take("b", 30)])
    assert set(many["action"].tolist()) == set(range(9))
    assert set(many["pair"][0].ravel().tolist()) == {0, 1, 2, 3}
    assert 0 < many["done"].mean() < 1
    assert abs(many["state"]["image"].mean()) < 0.1
    assert many["state"]["image"].std() == pytest.approx(1.0, abs=0.1)
    end = time.monotonic() + 10
    while fake.pushed < 31 * 16 and time.monotonic() < end:  # a chunk may be read before its push is acknowledged
        time.sleep(0.01)
    assert fake.pushed >= 31 * 16
    assert fake.error is None


def test_nothing_is_dropped_and_it_can_be_ended():
    counted = itertools.count()
    fake = FakeBuffer("ended", lambda rng: {"i": np.int64(next(counted))}, size=2, batch_size=8, num_workers=1)
    got = np.concatenate([b["i"] for b in take("ended", 20)])
    assert np.array_equal(got, np.arange(160))
    (thread,) = [t for t in threading.enumerate() if t.name == "bray-fake-ended"]
    fake.close()
    buffer, end = RemoteBuffer("ended"), time.monotonic() + 10
    while thread.is_alive() and time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            buffer.pop(0.1)  # room for what it was about to push
    assert not thread.is_alive()
    assert fake.pushed < 300


def test_a_rate():
    fake = FakeBuffer("b", {"x": 0.0}, rate=200, size=1000, num_workers=1)
    time.sleep(1.0)
    assert 20 <= fake.pushed <= 240
    with pytest.raises(ConfigError, match="expected rate > 0"):
        FakeBuffer("c", {"x": 0.0}, rate=0)


def test_what_a_model_takes():
    with pytest.raises(ConfigError, match=r"expected a sample to imitate.*models: none"):
        FakeBuffer("b")
    RemoteModel("m", net(), (np.zeros(3, np.float32),))
    FakeBuffer("b", size=4, batch_size=2, num_workers=1)
    assert take("b", 1)[0].shape == (2, 3)
    RemoteModel("n", net(), (np.zeros(3, np.float32),))
    with pytest.raises(ConfigError, match="models: m, n"):
        FakeBuffer("c")
    FakeBuffer("c", model="n", size=4, batch_size=2, num_workers=1)
    assert take("c", 1)[0].dtype == np.float32
    RemoteModel("bare", net())
    with pytest.raises(ConfigError, match="model 'bare' was defined without forward_args"):
        FakeBuffer("d", model="bare")


def test_templates_that_cannot_work():
    with pytest.raises(ConfigError, match="expected a template of numbers, got <U4"):
        FakeBuffer("b", {"x": "text"})

    def wrong(rng):
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        FakeBuffer("b", wrong)


def test_an_error_while_pushing_is_kept(caplog):
    made = itertools.count()

    def changes(rng):
        return {"x": np.zeros(2 if next(made) < 5 else 3)}

    fake = FakeBuffer("b", changes, size=100, batch_size=4, num_workers=1)
    deadline = time.monotonic() + 10
    while fake.error is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert isinstance(fake.error, DataError)
    assert "the fake buffer b has ended" in caplog.text


def test_a_trainer_runs_on_it():
    """A model, a fake buffer, a trainer."""
    RemoteModel("m", net(), (np.zeros(3, np.float32),))
    FakeBuffer("b", {"x": np.zeros(3, np.float32), "y": np.zeros(2, np.float32)}, size=4, batch_size=8, num_workers=1)
    end = RemoteTrainer().train(trainer=Regression, model="m", buffers=["b"], num_steps=20)
    assert end.result(60)["samples"] == 160


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (
            {"algorithm": "PPO", "env": "CartPole-v1"},
            {"obs", "action", "logp", "value", "advantage", "target", "weight"},
        ),
        (
            {"algorithm": "PPO", "env": "CartPole-v1", "model": {"use_lstm": True}},
            {"obs", "action", "first", "state", "value"},
        ),
        ({"algorithm": "SAC", "env": "Pendulum-v1"}, {"obs", "action", "reward", "discount", "next_obs"}),
    ],
    ids=["ppo", "lstm", "sac"],
)
def test_samples_as_an_algorithm_wants_them(section, keys):
    """What a trainer makes of them: its Learner takes it."""
    setup = algo_setup(section)
    rng = np.random.default_rng(0)
    make = algo_sample(setup, rng)
    experience, decoder = setup.make_experience(), Decoder()
    learner = setup.make_learner(setup.make_model(), record=False)
    steps, batch = 0, None
    for _ in range(200):
        pieces, counts = decoder.decode(tree.stack([make(rng) for _ in range(32)]))
        steps += counts.env_steps
        for piece in pieces:
            experience.add(piece.check())
        batch = experience.next(Clock(steps))
        if batch is not None:
            break
    data = learner.prepare(batch.data)
    assert keys <= set(data)
    update = learner.update(data, Clock(steps))
    assert all(np.isfinite(v) for v in update.metrics.values())


def test_the_command(tmp_path):
    """`bray fake buffer` runs a launch file's trainers on it, in a trial of their own."""
    (tmp_path / "game.yaml").write_text("""
project: runs
trial: v0
m: {kind: model, algo: ppo}
b: {kind: buffer, size: 2, batch_size: 64, num_workers: 1}
t: {kind: trainer, algo: ppo, model: m, buffers: [b], num_steps: 48}
ppo: {kind: config, algorithm: PPO, env: CartPole-v1, settings: {epochs: 4, minibatches: 4}}
""")
    command = [sys.executable, "-m", "bray", "fake", "buffer", "--config", "game.yaml", "--seconds", "60"]
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = forked.run(command, cwd=tmp_path, timeout=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "b: filled with made-up samples, for t" in done.stdout
    assert "t           48" in done.stdout.replace(",", "")
    assert (tmp_path / "runs" / "v0-fake" / "checkpoints" / "48").is_dir()
    assert not (tmp_path / "runs" / "v0").exists()
