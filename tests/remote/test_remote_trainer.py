"""The training loop of a rank over a model and buffers in memory."""

import contextlib
import copy
import errno
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import tests.trainer_for_tests as parts
from bray.data.experience import EndOfData
from bray.errors import BrayError, ConfigError, DataError, DiskFull, Diverged, UnknownName, Unreachable
from bray.inference.host import Promise
from bray.remote.model.definition import Definition
from bray.remote.trainer import worker
from bray.remote.trainer.base import LossLearner, Trainer
from bray.remote.trainer.drive import Settings
from bray.remote.trainer.feed import Feed
from bray.rundir import RunDir
from bray.train import driver as driver_module
from bray.train.driver import Hook
from tests.trainer_for_tests import MemoryBuffer, MemoryModel, Regression, batch_of, drive_of, net, same, weights


class Descent(Regression):
    """Adam would hide how long gradients are."""

    @staticmethod
    def make_optimizer(model, learning_rate):
        return torch.optim.SGD(model.parameters(), lr=learning_rate)


def plain_torch(batches, module, cls=Regression, norm=1.0):
    """The same training, written down directly."""
    optimizer = cls.make_optimizer(module, 0.01)
    for batch in batches:
        optimizer.zero_grad()
        (module(torch.from_numpy(batch["x"])) - torch.from_numpy(batch["y"])).square().mean().backward()
        if norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), norm)
        optimizer.step()
    return weights(module)


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [None, 0.05, 1.0])
@pytest.mark.parametrize("cls", [Regression, Descent])
def test_steps_and_clipping_equal_torch(cls, norm):
    drive = drive_of(cls, norm=norm, num_steps=20)
    summary = drive.train()
    assert summary["steps"] == summary["model_step"] == 20
    assert summary["samples"] == 80
    assert same(weights(drive.model), plain_torch(map(batch_of, range(20)), net(), cls, norm))
    if cls is Descent and norm == 0.05:
        assert not same(weights(drive.model), plain_torch(map(batch_of, range(20)), net(), cls), 1e-3)


def test_accumulation_equals_a_large_batch():
    small = drive_of(accumulate=4, num_steps=5)
    large = drive_of(batch_size=4, num_steps=5)
    assert small.train()["samples"] == large.train()["samples"] == 80
    assert same(weights(small.model), weights(large.model), 1e-6)


def test_the_default_learning_rate():
    drive = drive_of(rate=None, num_steps=1)
    assert drive.learner.optimizer.param_groups[0]["lr"] == 5e-4


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("concate", [(8, 3)]), ("stack", [(2, 4, 3)]), (None, [(4, 3), (4, 3)])],
    ids=["concate", "stack", "list"],
)
def test_batch_kinds(kind, shape):
    seen = []

    class Look(Regression):
        def handle(self, replay):
            seen.append([r["x"].shape for r in (replay if isinstance(replay, list) else [replay])])
            return batch_of(0)

    drive_of(Look, batch_size=2, batch_kind=kind, prefetch_size=0, num_steps=1).train()
    assert seen == [shape]


def test_samples_that_cannot_be_put_together():
    ragged = MemoryBuffer([batch_of(0, 4), batch_of(1, 3)])
    with pytest.raises(
        DataError, match=r"samples of buffer 'b' cannot be put together with batch_kind='stack'.*batch_kind=None"
    ):
        drive_of(buffers=[ragged], batch_size=2, batch_kind="stack", num_steps=1).train()
    with pytest.raises(ConfigError, match=r"batch_kind: expected .*Did you mean 'concate'"):
        drive_of(batch_kind="concat")


def test_signatures_of_trainers():
    seen = []

    class Old(Trainer):
        def __init__(self, name, config, model):
            self.model = model
            seen.append((name, config))

        def loss(self, replay):
            return self.model(replay["x"]).square().mean()

    class New(Old):
        def __init__(self, name, config, model, optimizer):
            super().__init__(name, config, model)
            self.optimizer = optimizer

        def loss(self, replay, step):
            seen.append(step)
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0  # what the optimizer is given for
            return super().loss(replay), {"mean": replay["x"].mean(), "loss/mine": 3.0}

    drive_of(Old, config={"t": {"a": 1}}, num_steps=1).train()
    assert seen == [("t", {"t": {"a": 1}})]
    remote = MemoryModel(net())
    numbers = {}
    before = remote.get_weights()[0]
    drive = drive_of(
        New, remote=remote, num_steps=2, merge=lambda name, value, **labels: numbers.update({name: (value, labels)})
    )
    metrics = drive.train()["metrics"]
    assert seen[2:] == [0, 1]
    assert same(weights(drive.model), before)
    assert metrics["mean"] == pytest.approx(batch_of(1)["x"].mean())
    assert set(metrics) == {"loss", "mean", "loss/mine", "grad_norm"}
    assert numbers["loss/mine"] == (3.0, {"trainer": "t"})
    assert {"loss/loss", "loss/mean", "loss/grad_norm", "perf/step_ms", "perf/wait_ms"} <= numbers.keys()


def test_an_optimizer_of_ones_own():
    class Plain(Regression):
        @staticmethod
        def make_optimizer(model, learning_rate):
            return torch.optim.SGD(model.parameters(), lr=10 * learning_rate)

    drive = drive_of(Plain, num_steps=1, norm=None)
    drive.train()
    module = net()
    (module(torch.from_numpy(batch_of(0)["x"])) - torch.from_numpy(batch_of(0)["y"])).square().mean().backward()
    expected = {k: p.detach() - 0.1 * p.grad for k, p in module.named_parameters()}
    assert same(weights(drive.model), {k: v.numpy() for k, v in expected.items()}, 1e-7)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (lambda loss: loss.detach(), "a tensor of shape .. without one"),
        (lambda loss: loss.item(), "got float"),
        (lambda loss: torch.stack([loss, loss]), r"a tensor of shape \[2\]"),
        (lambda loss: None, "got NoneType"),
    ],
)
def test_a_loss_that_is_none(out, said):
    class Wrong(Regression):
        def loss(self, replay, step):
            return out(super().loss(replay, step))

    with pytest.raises(BrayError, match=f"Wrong.loss: expected a tensor with one element.*{said}"):
        drive_of(Wrong, num_steps=1).train()


def test_read_only_arrays_and_other_leaves_reach_the_loss():
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    x.flags.writeable = False

    class Look(Regression):
        def handle(self, replay):
            return {"x": replay["x"], "y": batch_of(0)["y"], "note": "text", "many": [np.ones(2), torch.zeros(1)]}

        def loss(self, replay, step):
            assert replay["note"] == "text"
            assert [type(v) for v in replay["many"]] == [torch.Tensor, torch.Tensor]
            return super().loss(replay, step)

    assert drive_of(Look, [MemoryBuffer([{"x": x}])], num_steps=1).train()["steps"] == 1


# --- publishing, evaluating -------------------------------------------------------------------------------------------


def test_publish_interval():
    remote = MemoryModel(net())
    drive = drive_of(remote=remote, weights_publish_interval=3, num_steps=10)
    drive.train()
    assert remote.published == [3, 6, 9, 10]  # the last step too
    assert same(remote.get_weights()[0], weights(drive.model))


def test_versions_go_on_from_the_models_step():
    remote = MemoryModel(net(), step=500)
    assert drive_of(remote=remote, num_steps=2).train()["model_step"] == 502
    assert remote.published == [501, 502]


def test_slow_publishing_is_not_waited_for_and_the_newest_is_sent_next():
    remote = MemoryModel(net())
    remote.held = Promise()

    def release(drive):
        if drive.steps == 5:
            held, remote.held = remote.held, None
            held.set_result(None)

    drive_of(remote=remote, num_steps=7, hooks=[Hook("before_step", release)]).train()
    assert remote.published == [1, 6, 7]


def test_a_model_that_does_not_answer_does_not_stop_training(caplog):
    remote = MemoryModel(net())
    publish = remote.publish_weights

    def sometimes(given, step, env_steps):
        if step < 3:
            raise Unreachable("model/m did not answer")
        return publish(given, step, env_steps)

    remote.publish_weights = sometimes
    drive_of(remote=remote, num_steps=4).train()
    assert remote.published == [3, 4]
    assert "step 2 is not published, training goes on" in caplog.text


def test_evaluation():
    seen = []

    class Evaluated(Regression):
        def eval(self, replay):
            seen.append((self.model.training, torch.is_grad_enabled(), float(replay["x"][0, 0])))
            return {"error": 2.0, "eval/other": 4.0}

    numbers = []
    evaluation = MemoryBuffer(lambda i: {"x": np.full((1, 3), i, np.float32)})
    drive = drive_of(
        Evaluated,
        eval_buffer=evaluation,
        eval_interval=4,
        eval_steps=2,
        num_steps=9,
        merge=lambda name, value, **_: numbers.append((name, value)),
    )
    drive.train()
    assert seen == [(False, False, float(i)) for i in range(4)]
    assert drive.model.training
    assert [n for n in numbers if n[0].startswith("eval/")] == [("eval/error", 2.0), ("eval/other", 4.0)] * 4


def test_evaluation_without_a_method_is_the_loss_and_ends_with_its_data(caplog):
    numbers = []
    drive = drive_of(
        eval_buffer=MemoryBuffer([batch_of(0)], end=True),
        eval_interval=1,
        eval_steps=3,
        num_steps=1,
        merge=lambda name, value, **_: numbers.append((name, float(value))),
    )
    drive.train()
    (loss,) = [v for n, v in numbers if n == "eval/loss"]
    module = drive.model.eval()
    expected = (module(torch.from_numpy(batch_of(0)["x"])) - torch.from_numpy(batch_of(0)["y"])).square().mean()
    assert loss == pytest.approx(expected.item())
    assert "the evaluation has 1 of 3 batches" in caplog.text


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [[0.5, 0.5], [3, 1], [0.9, 0.1], None])
def test_buffer_weights_hold(shares):
    a, b = MemoryBuffer(batch_of, "a"), MemoryBuffer(batch_of, "b")
    drive_of(buffers=[a, b], buffer_weights=shares, prefetch_size=0, num_steps=200).train()
    share = (shares or [1, 1])[0] / sum(shares or [1, 1])
    assert abs(a.taken / 200 - share) <= 0.01
    assert a.taken + b.taken == 200


def test_ranks_begin_at_different_buffers():
    def first(rank):
        feed = Feed({n: MemoryBuffer(batch_of, n) for n in "ab"}, turn=rank)
        batch = feed.get(5.0)
        feed.close()
        return batch.origin

    assert [first(rank) for rank in range(3)] == ["a", "b", "a"]


@pytest.mark.parametrize("shares", [[1.0], [1, -1], [0, 0]])
def test_wrong_buffer_weights(shares):
    with pytest.raises(
        ConfigError,
        match=r"expected 2 numbers >= 0, one for each of a, b|the weights of buffers are numbers of at least 0|"
        r"buffer_weights\[1\]: expected a number >= 0, got -1",
    ):
        drive_of(buffers=[MemoryBuffer(batch_of, "a"), MemoryBuffer(batch_of, "b")], buffer_weights=shares)


def test_max_reuse_bounds_how_often_a_batch_is_given():
    buffer = MemoryBuffer([{"i": np.array([0])}, {"i": np.array([1])}])
    feed = Feed({"b": buffer}, prefetch_size=1, max_reuse=2)
    given = []
    while (batch := feed.get(0.3)) is not None:
        given.append(int(batch.data["i"][0]))
        time.sleep(0.05)  # the thread has had its time
    assert given == [0, 1, 1, 1]
    assert feed.reused == 2
    feed.close()


def test_batches_are_made_ready_beforehand():
    taken = {}
    for size in (0, 1, 3):
        buffer = MemoryBuffer(batch_of)
        feed = Feed({"b": buffer}, prefetch_size=size)
        feed.get(5.0)
        deadline = time.monotonic() + 5
        while buffer.taken < 1 + size and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        taken[size] = buffer.taken
        feed.close()
    assert taken == {0: 1, 1: 2, 3: 4}


def test_handle_runs_beside_training_and_its_errors_arrive():
    threads = set()

    class Broken(Regression):
        def handle(self, replay):
            threads.add(threading.current_thread())
            if len(threads) and replay["x"][0, 0] == batch_of(3)["x"][0, 0]:
                raise KeyError("no such column")
            return replay

    drive = drive_of(Broken, num_steps=100)
    with pytest.raises(KeyError, match="no such column") as caught:
        drive.train()
    assert any(entry.name == "handle" for entry in caught.traceback)
    assert threading.current_thread() not in threads
    assert drive.steps == 3


def test_training_ends_with_its_data(caplog):
    caplog.set_level("INFO")
    summary = drive_of(buffers=[MemoryBuffer([batch_of(i) for i in range(5)], end=True)], num_steps=100).train()
    assert summary["steps"] == 5
    assert summary["out_of_data"]
    assert not summary["stopped"]
    assert "trainer t, rank 0 of 1: training ends: b: no more data" in caplog.text
    with pytest.raises(EndOfData):
        Feed({"b": iter(())}).get(5.0)


def test_a_rank_without_data_says_so_and_can_be_stopped(monkeypatch, caplog):
    monkeypatch.setattr(driver_module, "SAY_AFTER", 0.2)
    monkeypatch.setattr(driver_module, "WAIT_S", 0.05)
    drive = drive_of(buffers=[MemoryBuffer([batch_of(0)])], num_steps=5)
    summary = []
    thread = threading.Thread(target=lambda: summary.append(drive.train()))
    thread.start()
    deadline = time.monotonic() + 10
    while "no batch for" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    assert re.search(r"trainer t, rank 0 of 1: no batch for \d+ s: nothing comes from b: is anything", caplog.text)
    drive.stop()
    thread.join(10)
    assert summary[0]["stopped"]
    assert summary[0]["steps"] == 1


def test_who_asks_to_stop_before_training_has_begun_is_heard():
    drive = drive_of()
    drive.stop()
    summary = drive.train()
    assert summary["stopped"]
    assert summary["steps"] == 0


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_hooks_run_by_priority():
    order = []

    def hook(position, priority):
        return Hook(position, lambda drive: order.append((position, priority, drive.steps)), priority)

    hooks = [
        hook("after_step", 5),
        hook("after_step", 1),
        hook("before_run", 2),
        hook("after_run", 3),
        hook("before_step", 0),
    ]
    drive_of(num_steps=2, hooks=hooks).train()
    step = [("before_step", 0), ("after_step", 1), ("after_step", 5)]
    assert order == [
        ("before_run", 2, 0),
        *[(*x, i + (x[0] == "after_step")) for i in range(2) for x in step],
        ("after_run", 3, 2),
    ]
    with pytest.raises(UnknownName, match="position 'after_iter'"):
        Hook("after_iter", print)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="weights_publish_interval: expected a whole number > 0, got 0"):
        drive_of(weights_publish_interval=0)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def noisy(path, remote, first, num_steps, **settings):
    """Dropout, so that the random generators matter; batches go on where the checkpoint is."""
    buffer = MemoryBuffer(lambda i: batch_of(first + i))
    return drive_of(buffers=[buffer], remote=remote, path=path, num_steps=num_steps, prefetch_size=0, **settings)


def test_resumed_training_equals_training_never_interrupted(tmp_path):
    def model():
        return MemoryModel(net(dropout=0.5))

    remote = model()
    torch.manual_seed(7)
    whole = noisy(tmp_path / "whole", remote, 0, 20)
    whole.train()

    remote = model()
    torch.manual_seed(7)
    half = noisy(tmp_path / "half", remote, 0, 10)
    half.train()
    torch.manual_seed(99)
    random.seed(99)
    rest = noisy(tmp_path / "half", remote, 10, 20)
    summary = rest.train()
    assert summary["resumed_from"] == 10
    assert summary["steps"] == 20
    assert summary["samples"] == 80
    assert same(weights(rest.model), weights(whole.model))
    assert rest.learner.optimizer.state_dict()["state"][0]["step"] == 20


def test_checkpoints_at_the_start_by_steps_by_time_and_at_the_end(tmp_path, monkeypatch):
    saved = []
    real = RunDir.save_checkpoint

    def save(self, step, *args, **kwargs):
        saved.append(step)
        return real(self, step, *args, **kwargs)

    monkeypatch.setattr(RunDir, "save_checkpoint", save)
    drive_of(path=tmp_path / "a", checkpoint_interval=4, num_steps=10).train()
    assert saved == [0, 4, 8, 10]
    run = RunDir.open(tmp_path / "a")
    assert run.pointer("latest") == 10
    assert run.steps() == [0, 4, 8, 10]
    drive_of(path=tmp_path / "a", checkpoint_interval=1, num_steps=13).train()
    assert RunDir.open(tmp_path / "a").steps() == [8, 10, 11, 12, 13]  # old ones go
    saved.clear()
    drive_of(path=tmp_path / "b", num_steps=10).train()
    assert saved == [0, 10]
    saved.clear()
    remote = MemoryModel(net())
    remote.definition = Definition("m", checkpoint_every_s=1e-9)
    drive_of(remote=remote, path=tmp_path / "c", num_steps=3).train()
    assert saved == [0, 1, 2, 3]


def test_after_a_crash_no_version_is_given_twice(tmp_path):
    """The model is ahead of the checkpoint: the counter does not go back, and the weights are those of the
    checkpoint."""
    remote = MemoryModel(net())

    def crash(drive):
        if drive.steps == 7:
            raise SystemExit("crash")  # an error of the user's code would be saved first

    with pytest.raises(SystemExit, match="crash"):
        drive_of(remote=remote, path=tmp_path / "t", checkpoint_interval=5, hooks=[Hook("after_step", crash)]).train()
    assert remote.step == 7
    drive = drive_of(remote=remote, path=tmp_path / "t", num_steps=9)
    summary = drive.train()
    assert summary["resumed_from"] == 5
    assert remote.published[-2:] == [8, 9]
    assert summary["model_step"] == 9
    assert drive.learner.optimizer.state_dict()["state"][0]["step"] == 7  # 5 of the checkpoint and 2 more


def test_weights_of_a_checkpoint_that_the_model_does_not_have_are_published(tmp_path):
    drive_of(path=tmp_path / "t", num_steps=6).train()
    behind = MemoryModel(net(seed=3), step=2)
    drive = drive_of(remote=behind, path=tmp_path / "t", num_steps=6)
    assert drive.train()["steps"] == 6
    assert behind.published == [6]
    assert same(behind.get_weights()[0], weights(drive.model))


def test_state_of_the_users_own(tmp_path):
    class Counts(Regression):
        seen = 0

        def loss(self, replay, step):
            self.seen += 1
            return super().loss(replay, step)

        def state_dict(self):
            return {"seen": self.seen, "table": torch.ones(2)}

        def load_state_dict(self, state):
            self.seen = state["seen"]
            assert state["table"].tolist() == [1.0, 1.0]

    drive_of(Counts, path=tmp_path / "t", num_steps=3).train()
    drive = drive_of(Counts, path=tmp_path / "t", num_steps=5)
    drive.train()
    assert drive.learner.trainer.seen == 5


def test_another_optimizer_or_model_than_the_checkpoints(tmp_path):
    class Two(Regression):
        @staticmethod
        def make_optimizer(model, learning_rate):
            first, *rest = model.parameters()
            return torch.optim.Adam([{"params": [first]}, {"params": rest}], lr=learning_rate)

    drive_of(path=tmp_path / "t", num_steps=1).train()
    with pytest.raises(ConfigError, match="the checkpoint's optimizer is another one than Adam"):
        drive_of(Two, path=tmp_path / "t", num_steps=2).train()
    other = MemoryModel(nn.Linear(3, 2))
    with pytest.raises(BrayError, match="the weights do not fit the model"):
        drive_of(remote=other, path=tmp_path / "t", num_steps=2).train()


CHILD = """
import sys
from pathlib import Path
import torch
from tests.trainer_for_tests import drive_of
from bray.train.driver import Hook
torch.set_num_threads(1)
hooks = [Hook("after_step", lambda d: print(d.steps, flush=True))]
drive_of(path=Path(sys.argv[1]), checkpoint_interval=1, hooks=hooks).train()
"""


def test_no_kill_point_leaves_a_broken_checkpoint(tmp_path):
    """`kill -9` while every step is saved: what is there can be read, is not behind what was said, and training goes on
    from it."""
    before = 0
    for delay in (0.0, 0.013):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "t")],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        try:
            said = [int(child.stdout.readline())]
            assert said[0] == before + 1
            time.sleep(0.3 + delay)
        finally:
            os.kill(child.pid, signal.SIGKILL)
        said += [int(line) for line in child.stdout.read().split()]
        child.wait(10)
        child.stdout.close()
        before = RunDir.open(tmp_path / "t").load_checkpoint().step
        assert said[-1] <= before <= said[-1] + 1
    assert before > 3


# --- Learners ---------------------------------------------------------------------------------------------------------


def test_an_algorithms_learner_is_driven_and_improves(tmp_path):
    setup = parts.setup_of("PPO", "CartPole-v1", lr=3e-3, epochs=2, minibatches=4, gamma=0.0)
    torch.manual_seed(0)
    remote = MemoryModel(setup.make_model())
    rollouts = parts.ToyRollouts(setup, remote)
    drive = parts.learner_drive(setup, remote, [rollouts], num_steps=8 * 40, prefetch_size=0, path=tmp_path / "t")
    summary = drive.train()
    assert np.mean(rollouts.rewards[:2]) < 0.65
    assert np.mean(rollouts.rewards[-5:]) > 0.93
    assert summary["steps"] == 8 * 40  # gradient steps: 2 epochs of 4 minibatches each
    assert remote.published == [8 * i for i in range(1, 41)]
    assert summary["samples"] == drive.env_steps == remote.env_steps == 120 * 40  # rows that count
    assert {"policy_loss", "value_loss", "entropy", "kl"} <= summary["metrics"].keys()


def test_a_learner_tells_where_its_schedules_stand():
    fading = {"start": 0.5, "end": 0.1, "steps": 480}
    setup = parts.setup_of("PPO", "CartPole-v1", entropy_coef=fading, epochs=1, minibatches=1, gamma=0.0)
    remote, told = MemoryModel(setup.make_model()), []
    parts.learner_drive(
        setup, remote, [parts.ToyRollouts(setup, remote)], num_steps=4, prefetch_size=0,
        merge=lambda name, value, **labels: told.append((name, value)),
    ).train()  # fmt: skip
    assert [x for name, x in told if name == "loss/entropy_coef"] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_what_looks_wrong_is_said_with_the_options_of_the_learner(caplog):
    setup = parts.setup_of("PPO", "CartPole-v1", lr=2e-4, epochs=1, minibatches=1, gamma=0.0)
    remote = MemoryModel(setup.make_model())
    rollouts = parts.ToyRollouts(setup, remote, scale=1e12)
    parts.learner_drive(setup, remote, [rollouts], num_steps=2, prefetch_size=0).train()
    assert "this run is lost" in caplog.text
    assert (
        "Usually helps: lower lr (0.0002 now) or set clip_rewards." in caplog.text
    )  # its gradients are clipped already


def test_a_resumed_learner_equals_one_never_interrupted(tmp_path):
    setup = parts.setup_of("SAC", "Pendulum-v1")
    torch.manual_seed(0)
    model = setup.make_model()

    def run(path, remote, first, steps):
        batches = parts.Given(lambda i: parts.transitions(first + i, actions=1))
        torch.manual_seed(5 + first)  # critics are drawn, and then overwritten by the checkpoint's
        drive = parts.learner_drive(setup, remote, batches, num_steps=steps, path=path)
        drive.train()
        return drive

    whole = run(tmp_path / "whole", MemoryModel(copy.deepcopy(model)), 0, 8)
    remote = MemoryModel(copy.deepcopy(model))
    run(tmp_path / "half", remote, 0, 4)
    rest = run(tmp_path / "half", remote, 4, 8)
    assert rest.resumed == 4
    for part in ("model", "critic", "target"):
        module = getattr(getattr(rest.learner, part), "module", getattr(rest.learner, part))
        other = getattr(getattr(whole.learner, part), "module", getattr(whole.learner, part))
        assert same(weights(module), weights(other)), part


def test_priorities_go_back_to_the_experience():
    setup = parts.setup_of("DQN", "CartPole-v1", prioritized=True)
    given = parts.Given(parts.transitions)
    parts.learner_drive(setup, MemoryModel(setup.make_model()), given, num_steps=3).train()
    assert [ids[:, 1].tolist() for ids, *_ in given.priorities] == [[i] * 16 for i in range(3)]
    assert all(p.shape == (16,) and (p >= 0).all() and p.std() > 0 for _, p, _ in given.priorities)
    assert [version for *_, version in given.priorities] == [1, 2, 3]

    setup = parts.setup_of("DQN", "CartPole-v1", prioritized=True, learning_starts=0, batch_size=16, train_every=5)
    drive = parts.learner_drive(setup, MemoryModel(setup.make_model()), [MemoryBuffer(parts.played)], num_steps=20)
    drive.train()
    leaves = drive.experience.ring.get_state()["priority"]
    assert len(np.unique(leaves[leaves > 0])) > 10  # new rows have one priority; these have got their own


def test_schedules_count_environment_steps():
    """As the games have counted them, whatever is learnt from how often."""
    linear = {"kind": "linear", "start": 1e-2, "end": 0.0, "steps": 1000}
    ppo = parts.setup_of("PPO", "CartPole-v1", lr=linear, epochs=1, minibatches=1, gamma=0.0)
    remote = MemoryModel(ppo.make_model())
    drive = parts.learner_drive(ppo, remote, [parts.ToyRollouts(ppo, remote)], num_steps=4)
    drive.train()
    assert float(drive.learner.optimizer.lr) == pytest.approx(1e-2 * (1 - 480 / 1000))
    dqn = parts.setup_of("DQN", "CartPole-v1", lr=linear, learning_starts=100, train_every=50, batch_size=8)
    remote = MemoryModel(dqn.make_model())
    drive = parts.learner_drive(dqn, remote, [MemoryBuffer(parts.played)], num_steps=5)
    drive.train()
    # 15 steps come at a time. Learning starts with 105 of them, when one visit is due; the next ones are with 150, 210,
    # 255 and 300.
    assert float(drive.learner.optimizer.lr) == pytest.approx(1e-2 * (1 - 300 / 1000))
    assert drive.env_steps == remote.env_steps == 300


def test_steps_of_games_that_go_on_are_not_counted_twice_after_a_restart(tmp_path):
    setup = parts.setup_of("DQN", "CartPole-v1", learning_starts=0, train_every=15, batch_size=8)
    remote = MemoryModel(setup.make_model())

    def run(first, steps):
        buffer = MemoryBuffer(lambda i: parts.played(first + i))
        drive = parts.learner_drive(setup, remote, [buffer], num_steps=steps, path=tmp_path / "t", prefetch_size=0)
        drive.train()
        return drive.env_steps

    assert run(0, 4) == 60
    told = []
    publish = remote.publish_weights
    remote.publish_weights = lambda w, step, env_steps: told.append((step, env_steps)) or publish(w, step, env_steps)
    assert run(6, 6) == 120  # what came while nobody trained is counted too
    assert told == [(4, 60), (5, 105), (6, 120)]  # agents hear at once how far training is


def test_samples_of_agents_reach_the_learner_as_the_loops_would():
    """What an update gets is GAE over the rows that agents pushed, standardised over the rollout; env steps and
    episodes are counted."""
    setup = parts.setup_of("PPO", "CartPole-v1", gamma=0.0, epochs=1, minibatches=1)
    remote = MemoryModel(setup.make_model())
    samples = next(parts.ToyRollouts(setup, remote))
    samples["ended"][5] = 3.0, 15
    rollouts = MemoryBuffer([samples], end=True)
    rollouts.settings = SimpleNamespace(batch_size=128)
    seen = []
    drive = parts.learner_drive(setup, remote, [rollouts], hooks=[Hook("before_step", lambda d: seen.append(d.batch))])
    summary = drive.train()
    assert summary["out_of_data"]
    (batch,) = seen
    rows = drive.learner.prepare(batch.data)
    live = samples["valid"]
    assert np.array_equal(rows["weight"] > 0, live)
    advantage = (samples["reward"] - samples["outputs"]["value"])[live]
    wanted = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    np.testing.assert_allclose(rows["advantage"][live], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(rows["obs"][live], samples["obs"][live])
    np.testing.assert_allclose(rows["target"][live], samples["reward"][live], atol=1e-6)
    assert drive.totals.episodes.row()["episode_return_mean"] == 3.0
    assert drive.totals.env_steps == 120


def test_what_a_learner_cannot():
    setup = parts.setup_of("DQN", "CartPole-v1")
    remote = MemoryModel(setup.make_model())
    with pytest.raises(ConfigError, match=r"accumulate=2 needs a bray\.Trainer"):
        parts.learner_drive(setup, remote, [MemoryBuffer(parts.played)], accumulate=2)
    config = {"t": {"algo": setup.section}}
    with pytest.raises(ConfigError, match=r"eval needs a bray\.Trainer with a method `eval`"):
        parts.worker.assemble(plan(None, config=config), remote.get_model(), remote, {}, [], ranks=parts.Ranks())


# --- plans ------------------------------------------------------------------------------------------------------------


def plan(trainer, **more):
    return worker.TrainPlan("t", trainer=trainer, **more)


ALGO = {
    "t": {"algo": "ppo"},
    "ppo": {"kind": "config", "algorithm": "PPO", "env": "CartPole-v1", "settings": {"lr": 1e-3}},
}


def made_of(plan, module):
    """The learner that a plan makes."""
    buffers = {"b": MemoryBuffer(batch_of)}
    return worker.assemble(plan, module, MemoryModel(module), buffers, ranks=parts.Ranks()).learner


def test_what_a_plan_makes():
    from bray.algos import ppo

    made = made_of(plan("tests.trainer_for_tests:Regression", settings=Settings(learning_rate=0.1)), net())
    assert isinstance(made, LossLearner)
    assert isinstance(made.trainer, Regression)
    assert made.optimizer.param_groups[0]["lr"] == 0.1
    model = parts.setup_of("PPO", "CartPole-v1").make_model()
    for given in (None, ppo.Learner, "bray.algos.ppo:Learner"):
        made = made_of(plan(given, config=ALGO), model)
        assert isinstance(made, ppo.Learner)
        assert made.config.lr == 1e-3

    class Mine(ppo.Learner):
        pass

    assert isinstance(made_of(plan(Mine, config=ALGO), model), Mine)


@pytest.mark.parametrize(
    ("given", "config", "said"),
    [
        ("tests.trainer_for_tests:Nothing", {}, "cannot load 'tests.trainer_for_tests:Nothing'"),
        ("tests.no_such_module:X", {}, "cannot load 'tests.no_such_module:X'"),
        (object, {}, "expected a bray.Trainer .with `loss`. or a Learner .with `update`."),
        (None, {"other": {}}, r"config\['t'\]\['algo'\].*config has 'other'"),
        (None, {"t": {"algo": "nothing"}}, "nothing"),
    ],
)
def test_plans_that_cannot_work(given, config, said):
    with pytest.raises(BrayError, match=said):
        made_of(plan(given, config=config), net())


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Unreachable("model/m did not answer"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection reset by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("advantage"), False),
        (ConfigError("no such key"), False),
        (SystemExit(1), False),
    ],
)
def test_which_errors_are_tried_again(error, again):
    assert worker.is_worth_another_try(error) is again


def test_parts_are_what_they_seem():
    """The helpers of these tests: the reference above must be able to fail."""
    assert not same(weights(net(0)), weights(net(1)))
    assert parts.batch_of(1)["x"].shape == (4, 3)


# --- what it survives -------------------------------------------------------------------------------------------------


def test_weights_that_are_not_finite_end_it_and_are_neither_published_nor_saved(tmp_path):
    class Breaks(Regression):
        def loss(self, replay, step):
            return super().loss(replay, step) * (float("nan") if step == 6 else 1.0)

    remote = MemoryModel(net())
    with pytest.raises(Diverged, match=r"loss/loss is nan.* 50 of 50 weights .* are not finite, since iteration 7"):
        drive_of(Breaks, remote=remote, path=tmp_path / "t", checkpoint_interval=5, num_steps=20).train()
    assert remote.published[-1] == 6
    checkpoint = RunDir.open(tmp_path / "t").load_checkpoint()
    assert checkpoint.step == 5
    assert all(np.isfinite(w).all() for w in checkpoint.weights.values())


@pytest.mark.parametrize("frees", [True, False])
def test_it_goes_on_while_the_disk_is_full(tmp_path, monkeypatch, caplog, frees):
    steps, real = [], os.replace

    def replace(a, b, **kwargs):
        if steps and (steps[-1] < 8 or not frees):
            raise OSError(errno.ENOSPC, "No space left on device", str(b))
        return real(a, b, **kwargs)

    monkeypatch.setattr(os, "replace", replace)
    hook = Hook("before_step", lambda drive: steps.append(drive.steps))
    drive = drive_of(path=tmp_path / "t", checkpoint_interval=1, num_steps=10, hooks=[hook])
    with contextlib.nullcontext() if frees else pytest.raises(DiskFull, match="or the same bray launch again"):
        drive.train()
    assert steps == list(range(10))
    assert caplog.text.count("Training goes on, and tries to write again") == 1
    assert RunDir.open(tmp_path / "t").pointer("latest") == (10 if frees else 0)
