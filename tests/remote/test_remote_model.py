"""RemoteModel in one process: what it takes and gives, versions, files, ONNX. The same handle on a real Ray is in
test_remote_model_ray.py."""

import asyncio
import pickle
import re
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import bray
from bray import tree
from bray.act import Clock
from bray.cluster import io, session as sessions
from bray.errors import BrayError, CheckpointError, ConfigError, DataError, MissingComponent, UnknownName, Unreachable
from bray.inference.onnx_engine import OnnxEngine
from bray.remote.model import keeper as keeper_module
from bray.remote.model.client import Client, client_of
from bray.remote.model.definition import Definition, find_example
from bray.remote.model.handle import RemoteModel
from bray.remote.model.weights import get_torch_model_weights, set_torch_model_weights
from bray.rundir import RunDir
from tests import forked
from tests.ray_for_tests import local_session, opened  # noqa: F401

X = np.arange(4, dtype=np.float32)
LIMIT_S = 120


class Scale(nn.Module):
    """y = w x: what it answers shows which weights it has."""

    def __init__(self, w=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([float(w)]))

    def forward(self, x):
        return self.w * x


class Many(nn.Module):
    """Trees in, trees out."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 3)

    def forward(self, obs, memory, *, bias):
        logits = self.l(obs["features"]) + bias
        return {
            "logits": logits,
            "value": logits.sum(-1),
            "action": logits.argmax(-1),
            "memory": (memory[0] + 1, memory[1]),
        }


class AtariModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 8, 4)
        self.fc = nn.Linear(8 * 9 * 9, 9)

    def forward(self, images):
        return self.fc(torch.relu(self.conv(images.permute(0, 3, 1, 2))).flatten(1))


class Sampling(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 3)

    def forward(self, x):
        p = torch.softmax(self.l(x), -1)
        return p, torch.multinomial(p, 1)[:, 0]


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 3)

    def forward(self, x):
        return self.l(x) if x.sum().item() > 0 else self.l(-x)


class Wide(nn.Sequential):
    """With layers that int8 is for."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(
            nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
        )


def until(condition, seconds=LIMIT_S):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def served(model):
    return client_of(model.name).served


def weights_of(w):
    return {"w": np.array([w], np.float32)}


inside = pytest.mark.usefixtures("local_session")


# --- what goes in and comes out ---------------------------------------------------------------------------------------


@inside
def test_a_torch_model_answers_and_takes_new_weights():
    inputs = np.random.randn(42, 42, 4).astype(np.float32)
    remote_model = bray.RemoteModel(
        name="atari_model",
        model=AtariModel(),
        forward_args=(np.random.randn(42, 42, 4).astype(np.float32),),
    )
    outputs = asyncio.run(remote_model.forward(inputs))
    model = remote_model.get_model()
    weights = bray.get_torch_model_weights(model)
    remote_model.publish_weights(weights)
    expected = model(torch.from_numpy(inputs[None]))[0].detach().numpy()
    assert isinstance(outputs, np.ndarray)
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    until(lambda: remote_model.step == 1)


@pytest.mark.parametrize(
    ("model", "args", "shape"),
    [
        (nn.Linear(4, 2), np.zeros((1, 4), np.float32), [1, 4]),  # as build_model gives it
        (nn.Linear(4, 2), np.zeros(4, np.float32), [1, 4]),  # as RemoteModel(forward_args=...) gets it
        (nn.Linear(4, 4), np.zeros(4, np.float32), [1, 4]),
        (nn.Linear(4, 2), torch.zeros(3, 4), [3, 4]),
        (nn.Linear(4, 2), torch.zeros(4), [1, 4]),
        (nn.Embedding(5, 2), np.int64(3), [1]),
        (AtariModel(), np.zeros((42, 42, 4), np.float32), [1, 42, 42, 4]),
        (AtariModel(), torch.zeros(2, 42, 42, 4), [2, 42, 42, 4]),
        (nn.Sequential(nn.Flatten(), nn.Linear(32, 2)), np.zeros((4, 8), np.float32), [1, 4, 8]),
    ],
)
def test_the_example_may_have_a_batch_dimension_or_not(model, args, shape):
    (found,), kwargs = find_example(model, (args,), {})
    assert list(found.shape) == shape
    assert kwargs == {}


@inside
def test_an_example_that_fits_neither_way_shows_both_errors():
    with pytest.raises(ConfigError, match=r"neither as a batch nor as one sample") as caught:
        RemoteModel("m", nn.Linear(4, 2), (np.zeros(5, np.float32),))
    text = str(caught.value)
    assert "As a batch, 0: float32[5]" in text
    assert "As one sample, 0: float32[1, 5]" in text
    assert text.count("shapes cannot be multiplied") == 2


def test_looking_for_the_example_leaves_the_callers_random_numbers_alone():
    net = Sampling()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    find_example(net, (X,), {})
    assert torch.equal(torch.rand(2), expected)


@inside
def test_trees_keywords_scalars_and_batches():
    net = Many()
    args = ({"features": X}, (np.float32(2), np.arange(2)))
    kwargs = {"bias": np.ones(3, np.float32)}
    model = RemoteModel("m", net, args, kwargs, max_batch_size=8)
    with torch.no_grad():
        expected = (net.l(torch.from_numpy(X)) + 1).numpy()

    async def main():
        return await asyncio.gather(
            model.forward(*args, **kwargs, with_step=True),
            model.forward(*tree.map(lambda x: np.stack([x] * 3), args), bias=np.ones((3, 3), np.float32), batch=True),
        )

    (one, step), many = asyncio.run(main())
    assert step == 0
    np.testing.assert_allclose(one["logits"], expected, atol=1e-6)
    assert one["action"] == expected.argmax()
    assert np.shape(one["action"]) == np.shape(one["value"]) == np.shape(one["memory"][0]) == ()
    assert isinstance(one["value"], np.float32)
    assert isinstance(one["memory"], tuple)
    assert one["memory"][0] == 3
    np.testing.assert_allclose(many["logits"], np.stack([expected] * 3), atol=1e-6)
    assert tree.map(np.shape, many)["memory"] == ((3,), (3, 2))
    assert model(*args, **kwargs)["action"] == one["action"]  # plain code
    assert [list(x.shape) for x in tree.leaves(model.get_torch_forward_args())] == [[1, 4], [1], [1, 2]]
    assert all(isinstance(x, torch.Tensor) for x in tree.leaves(model.get_torch_forward_args()))


@inside
def test_keywords_that_were_not_defined_are_named():
    model = RemoteModel("m", Scale(), (X,))
    with pytest.raises(ConfigError, match="this forward has mask"):
        model(X, mask=X)


@inside
def test_a_model_without_an_example():
    model = RemoteModel("m", Scale(2))
    assert model(X).tolist() == (2 * X).tolist()
    assert model.get_torch_forward_args() == ()


@inside
@pytest.mark.parametrize(("largest", "batches"), [(1, 40), (16, 3), (40, 1)])
def test_max_batch_size(largest, batches):
    model = RemoteModel("m", Scale(), (X,), max_batch_size=largest)

    async def main():
        await model.forward(X)
        before = served(model).numbers()
        outputs = await asyncio.gather(*[model.forward(np.full(4, i, np.float32)) for i in range(40)])
        after = served(model).numbers()
        return outputs, {k: after[k] - before[k] for k in ("batches_total", "samples_total")}

    outputs, counts = asyncio.run(main())
    assert [y[0] for y in outputs] == list(range(40))
    assert counts == {"batches_total": batches, "samples_total": 40}


@inside
def test_forward_by_name():
    RemoteModel("m", Scale(2), (X,))
    assert asyncio.run(bray.forward("m", X)).tolist() == (2 * X).tolist()
    with pytest.raises(MissingComponent, match="there is no model 'n'"):
        asyncio.run(bray.forward("n", X))


@inside
def test_forward_in_many_loops_at_once():
    model = RemoteModel("m", Scale(3), (X,), max_batch_size=8)
    errors = []

    async def ask():
        for i in range(50):
            ys = await asyncio.gather(*[model.forward(X + i) for _ in range(5)])
            if not all((y == 3 * (X + i)).all() for y in ys):
                errors.append(i)

    threads = [threading.Thread(target=lambda: asyncio.run(ask())) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT_S)
    assert not any(t.is_alive() for t in threads)
    assert errors == []
    for _ in range(3):  # one loop after the other
        assert asyncio.run(model.forward(X)).tolist() == (3 * X).tolist()


@inside
def test_an_error_of_the_model_shows_its_own_lines_and_what_was_expected():
    import traceback

    model = RemoteModel("m", AtariModel(), (np.zeros((42, 42, 4), np.float32),))
    with pytest.raises(RuntimeError) as caught:
        model(np.zeros((42, 30, 4), np.float32))
    assert "self.fc(torch.relu" in "".join(traceback.format_exception(caught.value))
    assert "expected float32[42, 42, 4], got float32[42, 30, 4]" in caught.value.__notes__[0]


@inside
def test_a_handle_is_found_by_name_and_pickled_by_name():
    RemoteModel("first", Scale(2), (X,))
    model = RemoteModel("first")
    assert model(X).tolist() == (2 * X).tolist()
    data = pickle.dumps(model)
    assert len(data) < 200
    assert pickle.loads(data)(X).tolist() == (2 * X).tolist()
    with pytest.raises(MissingComponent, match=r"there is no model 'other'.*there are: 'first'"):
        RemoteModel("other")
    with pytest.raises(MissingComponent):
        pickle.loads(pickle.dumps(model).replace(b"first", b"fir5t"))(X)


@inside
@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"use_onnx": "Train"}, ConfigError, "Did you mean 'train'"),
        ({"max_batch_size": 0}, ConfigError, r"model 'm'\.max_batch_size: expected a whole number > 0, got 0"),
        ({"num_workers": -1}, ConfigError, "num_workers: expected a whole number >= 0, got -1"),
        ({"checkpoint_interval": 0}, ConfigError, "checkpoint_interval: expected a whole number > 0 or null, got 0"),
        ({"checkpoint_every_s": 0}, ConfigError, "checkpoint_every_s: expected a number > 0, got 0"),
        ({"checkpoint": 7}, UnknownName, "unknown checkpoint '7'"),
        ({"checkpoint": "nowhere.safetensors"}, CheckpointError, "neither a step of this trial nor a weight file"),
        ({"use_onnx": "train", "forward_args": ()}, ConfigError, "needs forward_args"),
        ({"name": "../m"}, CheckpointError, "expected a model name"),
        ({"forward_args": ("text",)}, DataError, "arrays of numbers, this one holds a str"),
    ],
)
def test_wrong_settings_are_refused_and_nothing_is_left(keys, error, message):
    with pytest.raises(error, match=message):
        RemoteModel(**{"name": "m", "model": Scale(), "forward_args": (X,), **keys})
    assert sessions.session().cluster.names("model/") == []


# --- publishing -------------------------------------------------------------------------------------------------------


@inside
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_publish(kind):
    model = RemoteModel("m", Scale(1), (X,))
    assert model(X, with_step=True)[1] == 0
    weights = weights_of(5) if kind == "numpy" else {"w": torch.tensor([5.0], requires_grad=True)}
    assert model.publish_weights(weights).result(LIMIT_S) == 1
    until(lambda: model(X, with_step=True)[1] == 1)
    assert model(X).tolist() == (5 * X).tolist()
    assert model.step == 1
    got, step = model.get_weights()
    assert (got["w"].tolist(), step) == ([5.0], 1)
    with pytest.raises(ValueError, match="read-only"):
        got["w"][0] = 7
    own = model.get_model()
    assert own.w.item() == 5.0
    with torch.no_grad():
        own.w.fill_(9.0)  # one's own
    assert model.get_model().w.item() == 5.0
    assert model.publish_weights(weights_of(6), step=10).result(LIMIT_S) == 10
    assert RemoteModel("m").step == 10


@inside
def test_environment_steps_travel_with_the_weights():
    model = RemoteModel("m", Scale(1), (X,))
    assert model.env_steps == 0
    model.publish_weights(weights_of(2), step=5, env_steps=100).result(LIMIT_S)
    until(lambda: RemoteModel("m").env_steps == 100)
    model.publish_weights(weights_of(3)).result(LIMIT_S)  # by somebody who does not count
    until(lambda: model(X, with_step=True)[1] == 6)
    assert model.env_steps == 100
    model.publish_weights(weights_of(3), step=6, env_steps=180).result(
        LIMIT_S
    )  # the same weights again, after a restart
    until(lambda: model.env_steps == 180)
    assert Client("m").clock.env_steps == 180  # of a process that begins to follow when nothing is published any more


@inside
def test_publish_copies_before_it_returns():
    model = RemoteModel("m", Scale(1), (X,))
    weights = weights_of(5)
    promise = model.publish_weights(weights)
    weights["w"][0] = 77
    promise.result(LIMIT_S)
    until(lambda: model(X, with_step=True)[1] == 1)
    assert model(X).tolist() == (5 * X).tolist()


@inside
@pytest.mark.parametrize(
    ("weights", "step", "error", "message"),
    [
        ({"w": np.zeros(2, np.float32)}, None, CheckpointError, r"w \(expected float32\[1\], got float32\[2\]\)"),
        ({"w": np.zeros(1, np.float64)}, None, CheckpointError, r"w \(expected float32\[1\], got float64\[1\]\)"),
        ({"v": np.zeros(1, np.float32)}, None, CheckpointError, "missing: w; redundant: v"),
        (weights_of(3), 1, ConfigError, "is at step 2 already, got weights of step 1"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_model_goes_on(weights, step, error, message, caplog):
    model = RemoteModel("m", Scale(1), (X,))
    model.publish_weights(weights_of(2), step=2).result(LIMIT_S)
    with pytest.raises(error, match=message):
        model.publish_weights(weights, step).result(LIMIT_S)
    assert "weights are not published" in caplog.text  # also for who does not wait
    assert model.publish_weights(weights_of(4)).result(LIMIT_S) == 3
    until(lambda: model(X)[1] == 4)


@inside
def test_weights_must_have_names():
    model = RemoteModel("m", Scale(1), (X,))
    with pytest.raises(BrayError, match="expected weights by name"):
        model.publish_weights([np.zeros(1)])


@inside
def test_publications_that_come_faster_than_they_travel_are_counted_and_the_newest_wins(monkeypatch):
    model = RemoteModel("m", Scale(0), (X,))
    model(X)
    gate, calls = threading.Event(), []
    real = keeper_module.Keeper.publish

    async def slow(self, *args):
        calls.append(args)
        await asyncio.to_thread(gate.wait)
        return real(self, *args)

    monkeypatch.setattr(keeper_module.Keeper, "publish", slow)
    promises = [model.publish_weights(weights_of(i)) for i in range(1, 11)]
    gate.set()
    assert [p.result(LIMIT_S) for p in promises] == [1] + [10] * 9
    assert len(calls) == 2
    until(lambda: model(X, with_step=True)[1] == 10)
    assert model(X)[1] == 10
    promises = [model.publish_weights(weights_of(i), step=i) for i in (20, 30)] + [
        model.publish_weights(weights_of(31))
    ]
    assert [p.result(LIMIT_S) for p in promises][-1] == 31


def test_set_torch_model_weights():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    weights = get_torch_model_weights(net)
    assert all(type(x) is np.ndarray for x in weights.values())
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    set_torch_model_weights(other, weights)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))
    weights["0.weight"][:] = 7  # arrays of their own
    assert not (net[0].weight == 7).any()
    with pytest.raises(CheckpointError, match=r"0\.bias"):
        set_torch_model_weights(other, {k: v for k, v in weights.items() if k != "0.bias"})


# --- files ------------------------------------------------------------------------------------------------------------


def versions(path, name="m"):
    return RunDir(path / "project" / "trial").versions(name)


def publish_all(model, steps):
    for step in steps:
        model.publish_weights(weights_of(step), step=step).result(LIMIT_S)


def test_checkpoint_interval_is_in_steps(tmp_path):
    with opened(tmp_path, "local"):
        model = RemoteModel("m", Scale(0), (X,), checkpoint_interval=10)
        publish_all(model, [9])
        assert versions(tmp_path) == [0]
        for step, expected in ((12, [0, 12]), (19, [0, 12]), (25, [0, 12, 25])):
            publish_all(model, [step])
            until(lambda expected=expected: versions(tmp_path) == expected)
    assert versions(tmp_path) == [0, 12, 25]


def test_without_an_interval_it_is_saved_every_so_many_seconds(tmp_path):
    with opened(tmp_path, "local"):
        model = RemoteModel("m", Scale(0), (X,), checkpoint_every_s=0.05)
        for step in (3, 4, 5, 6, 7, 8):
            publish_all(model, [step])
            until(lambda step=step: versions(tmp_path)[-1:] == [step])
        until(lambda: versions(tmp_path) == [4, 5, 6, 7, 8])


def test_the_first_version_is_saved_before_anybody_is_answered_and_the_last_at_the_end(tmp_path):
    with opened(tmp_path, "local"):
        model = RemoteModel("m", Scale(0), (X,))
        assert versions(tmp_path) == [0]
        publish_all(model, [3, 4])
        assert versions(tmp_path) == [0]  # a minute is not over
    assert versions(tmp_path) == [0, 4]


def test_a_second_run_goes_on(tmp_path):
    with opened(tmp_path, "local"):
        publish_all(RemoteModel("m", Scale(0), (X,)), [7])
    with opened(tmp_path, "local"):
        model = RemoteModel("m", Scale(0), (X,))
        assert model.step == 7
        assert model(X)[1] == 7
        assert model.publish_weights(weights_of(8)).result(LIMIT_S) == 8


def test_a_script_that_just_ends_has_saved_its_model(tmp_path):
    script = f"""
import numpy as np
from torch import nn
import bray
from bray.remote.model.handle import RemoteModel

bray.init({str(tmp_path / "project")!r}, "trial", cluster="local")
net = nn.Linear(4, 2)
model = RemoteModel("m", net, (np.zeros(4, np.float32),))
model(np.zeros(4, np.float32))
model.publish_weights(net.state_dict(), step=6).result()
"""
    done = forked.run([sys.executable, "-c", script], timeout=LIMIT_S)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert versions(tmp_path) == [0, 6]


def test_checkpoint_is_a_step_or_a_path(tmp_path):
    with opened(tmp_path, "local"):
        model = RemoteModel("m", Scale(0), (X,), checkpoint_interval=1)
        for step in (5, 6, 9):
            publish_all(model, [step])
            until(lambda step=step: step in versions(tmp_path))
    path = RunDir(tmp_path / "project" / "trial").weights_path(6, "m")
    for i, (checkpoint, step) in enumerate(
        [(5, 5), ("6", 6), (str(path), 6), (str(tmp_path / "project" / "trial"), 9)]
    ):
        with opened(tmp_path / str(i), "local"):
            if isinstance(checkpoint, int) or checkpoint.isdigit():
                run = RunDir(sessions.session().path)
                for s in (5, 6, 9):
                    run.save_weights(s, weights_of(s), "m")
            model = RemoteModel("m", Scale(0), (X,), checkpoint=checkpoint)
            assert (model.step, model(X)[1]) == (step, step)


def test_a_future_that_was_given_up_does_not_come_back(tmp_path):
    with opened(tmp_path, "local"):
        model = RemoteModel("m", Scale(0), (X,), checkpoint_interval=1)
        for step in (5, 9):
            publish_all(model, [step])
            until(lambda step=step: step in versions(tmp_path))
    with opened(tmp_path, "local"):
        publish_all(RemoteModel("m", Scale(0), (X,), checkpoint=5), [6])
    with opened(tmp_path, "local"):  # the newest is what was trained last, not the largest number
        model = RemoteModel("m", Scale(0), (X,))
        assert (model.step, model(X)[1]) == (6, 6)
        publish_all(model, [9])  # made again
    with opened(tmp_path, "local"):
        assert RemoteModel("m", Scale(0), (X,)).step == 9


def test_weights_of_another_model_are_refused(tmp_path):
    with opened(tmp_path, "local"):
        publish_all(RemoteModel("m", Scale(0), (X,)), [7])
    with opened(tmp_path, "local"):
        with pytest.raises(CheckpointError, match=r"cannot start from version 7 of this trial.*another trial or name"):
            RemoteModel("m", nn.Linear(4, 2), (X,))
        assert sessions.session().cluster.names("model/") == []


@inside
def test_the_first_forward_is_asked_again_until_the_model_is_loaded():
    """Only its caller's deadline ends it; once it has answered, a model that cannot be reached is told at once."""
    model = RemoteModel("m", Scale(2), (X,))
    client = client_of("m")
    client.opening().result(30)
    answer, failing = client.ask, 3

    async def loading(*asked):
        nonlocal failing
        if failing:
            failing -= 1
            raise Unreachable("no worker is there yet")
        return await answer(*asked)

    client.ask = loading
    io.run(model.forward(X))
    assert failing == 0
    failing = 1
    with pytest.raises(Unreachable, match="no worker is there yet"):
        io.run(model.forward(X))


@pytest.mark.parametrize(("settings", "newest"), [({}, [8, 9, 10, 11, 12]), ({"keep_checkpoints": 2}, [11, 12])])
def test_old_versions_go_and_protected_ones_stay(settings, newest, tmp_path):
    with opened(tmp_path, "local"):
        model = RemoteModel("m", Scale(0), (X,), checkpoint_interval=1, **settings)
        for step in range(1, 13):
            publish_all(model, [step])
            until(lambda step=step: step in versions(tmp_path))
            if step == 2:
                model.add_to_pool()
            if step == 3:
                model.clone()
            if step == 4:
                RunDir(sessions.session().path).protect(4, "m")
        until(lambda: len(versions(tmp_path)) == 3 + len(newest))
    assert versions(tmp_path) == [2, 3, 4, *newest]


@inside
def test_a_model_of_the_same_name_is_replaced_unless_told_otherwise():
    RemoteModel("m", Scale(2), (X,))
    old = RemoteModel("m")
    publish_all(old, [5])
    until(lambda: old(X)[1] == 5)  # who decides follows a moment later
    assert RemoteModel("m", Scale(3), (X,), override_model=False, max_batch_size=7)(X).tolist() == old(X).tolist()
    assert client_of("m").definition.max_batch_size == 1
    new = RemoteModel("m", Scale(3), (X,), max_batch_size=7)
    assert (new.step, new(X)[1]) == (5, 5)  # what was trained goes on
    assert client_of("m").definition.max_batch_size == 7
    assert old(X)[1] == 5  # and a handle of earlier asks the new one


# --- the keeper, killed -----------------------------------------------------------------------------------------------


@inside
def test_who_has_newer_weights_gives_them_to_a_keeper_that_lost_them():
    model = RemoteModel("m", Scale(0), (X,), checkpoint_interval=10)
    publish_all(model, [10])
    until(lambda: versions(sessions.session().path.parent.parent) == [0, 10])
    publish_all(model, [13])
    until(lambda: model(X, with_step=True)[1] == 13)
    fresh = keeper_module.Keeper(client_of("m").definition, None, sessions.session().cluster.put(weights_of(0)), 0)
    assert fresh.step() == 10  # what the run directory has

    known = client_of("m").about.news
    news = io.run(fresh.newer(known.mark, wait=5))  # at once: what this one says is not what the other said last
    assert (news.step, news.mark[0] == known.mark[0]) == (10, False)
    assert fresh.offer(sessions.session().cluster.put(weights_of(13)), Clock(7, 13), "t") == 13
    assert fresh.offer(sessions.session().cluster.put(weights_of(12)), Clock(0, 12), "old") == 13
    assert fresh.about().news.clock == Clock(7, 13)
    assert (
        fresh.publish(sessions.session().cluster.put(weights_of(14)), None, "n", 1, 20) == 21
    )  # the publisher knew of 20
    assert fresh.publish(sessions.session().cluster.put(weights_of(14)), None, "n", 1, 20) == 21  # the same once more


@inside
def test_a_keeper_that_is_started_again_is_offered_what_this_process_has():
    model = RemoteModel("m", Scale(0), (X,), checkpoint_interval=10)
    publish_all(model, [3])
    model(X)
    here = sessions.session().cluster
    hosted, about = here.hosted("model/m"), client_of("m").about
    old = hosted.worker
    hosted.worker = keeper_module.Keeper(about.definition, about.module, here.put(weights_of(0)), 0)
    assert hosted.worker.step() == 0  # what the run directory has
    old.publish(here.put(weights_of(4)), 4, "four", env_steps=40)  # ends the wait for the one that is gone
    until(lambda: hosted.worker.step() == 4)
    assert hosted.worker.about().news.clock == (40, 4, None)
    assert model(X, with_step=True)[1] == model.step == 4
    publish_all(model, [5])
    until(lambda: model(X, with_step=True)[1] == 5)


@inside
def test_waiting_for_something_newer():
    model = RemoteModel("m", Scale(0), (X,))
    keeper = sessions.session().cluster.hosted("model/m").worker

    async def main():
        mark = keeper.about().news.mark
        assert await keeper.newer(mark, wait=0.05) is None
        waiting = asyncio.create_task(keeper.newer(mark, wait=10))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        model.publish_weights(weights_of(3))
        return await asyncio.wait_for(waiting, LIMIT_S)

    news = io.run(main())
    assert (news.step, sessions.session().cluster.get(news.weights)["w"].tolist()) == (1, [3.0])


@inside
def test_those_who_wait_are_told_one_after_the_other(monkeypatch):
    RemoteModel("m", Scale(0), (X,))
    here = sessions.session().cluster
    keeper = here.hosted("model/m").worker
    monkeypatch.setattr("bray.cluster.feed.GAP_S", 0.2)
    monkeypatch.setattr("bray.cluster.feed.MOST_GAPS_S", 10.0)

    async def main():
        waiting = [asyncio.create_task(keeper.newer(keeper.about().news.mark, wait=LIMIT_S)) for _ in range(3)]
        await asyncio.sleep(0.05)
        keeper.publish(here.put(weights_of(3)), 5, "five")
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        told = sum(task.done() for task in waiting)
        keeper.publish(here.put(weights_of(4)), 6, "six")
        return told, sorted([(await task).step for task in waiting])

    assert io.run(main()) == (1, [5, 6, 6])  # who is told later is told of the newest


# --- ONNX -------------------------------------------------------------------------------------------------------------

ENGINES = {"train": "onnx", "infer": "constant", "quantize": "int8"}


@pytest.mark.parametrize(("mode", "tolerance"), [("train", 1e-5), ("infer", 1e-5), ("quantize", 0.1)])
def test_onnx_answers_as_torch_does_and_takes_new_weights(mode, tolerance, tmp_path, caplog):
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(64, 4)).astype(np.float32)
    net = Wide()
    with opened(tmp_path, "local"):
        model = RemoteModel("m", net, (xs,), use_onnx=mode, max_batch_size=16)
        model(xs[0])
        until(lambda: served(model).engine == ENGINES[mode])
        expected = net(torch.from_numpy(xs)).detach().numpy()
        np.testing.assert_allclose(model(xs, batch=True), expected, atol=tolerance)
        ys = asyncio.run(_gather(model, xs[:5]))
        np.testing.assert_allclose(ys, expected[:5], atol=tolerance)
        with torch.no_grad():
            net[-1].bias += 1.0
        assert model.publish_weights(get_torch_model_weights(net)).result(LIMIT_S) == 1
        until(lambda: model(xs[0], with_step=True)[1] == 1)
        np.testing.assert_allclose(model(xs, batch=True), expected + 1, atol=tolerance)
        assert served(model).engine == ENGINES[mode]
        np.testing.assert_allclose(model(xs[0]), expected[0] + 1, atol=tolerance)
        # an older version beside it
        model.add_to_pool()
        model.publish_weights({k: np.zeros_like(v) for k, v in get_torch_model_weights(net).items()}).result(LIMIT_S)
        until(lambda: model(xs[0], with_step=True)[1] == 2)
        np.testing.assert_allclose(model(xs[0], step=1), expected[0] + 1, atol=tolerance)
        assert model(xs[0]).tolist() == [0, 0, 0]
    OnnxEngine(tmp_path / "project" / "trial" / "models" / "m" / "graph.onnx")  # with its proof beside it
    assert "without a proof" not in caplog.text


@inside
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_workers": 1}, "there is no Ray cluster"),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"num_workers": 2, "local_mode": True}, "local_mode is set"),
        ({"num_workers": 1, "gpus_per_worker": 0}, None),
    ],
)
def test_gpus_that_no_worker_takes_are_said_to_have_no_effect(settings, said, caplog):
    RemoteModel("m", Scale(), (X,), **({"gpus_per_worker": 2} | settings))
    lines = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]
    assert len(lines) == (said is not None)
    assert said is None or lines[0].startswith(f"model m: gpus_per_worker=2 has no effect: {said}")


@inside
@pytest.mark.parametrize(
    ("mode", "broken", "engine"),
    [("train", "float32", "torch"), ("infer", "float32", "torch"), ("quantize", "int8", "constant")],
)
def test_an_engine_that_answers_otherwise_than_where_it_was_made_is_not_used(mode, broken, engine, monkeypatch, caplog):
    xs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    net = Wide()
    model = RemoteModel("m", net, (xs,), use_onnx=mode, max_batch_size=64)
    keeper = sessions.session().cluster.hosted("model/m").worker
    until(lambda: getattr(keeper.about().news, "int8" if mode == "quantize" else "graph") is not None)
    real = OnnxEngine.forward
    monkeypatch.setattr(
        OnnxEngine, "forward", lambda self, *args: real(self, *args) + np.float32(self.signature.precision == broken)
    )
    expected = net(torch.from_numpy(xs)).detach().numpy()
    np.testing.assert_allclose(model(xs, batch=True), expected, atol=1e-5)
    until(lambda: "it is not used" in caplog.text)
    assert served(model).engine == engine
    with torch.no_grad():
        net[-1].bias += 1.0
    model.publish_weights(get_torch_model_weights(net)).result(LIMIT_S)
    until(lambda: model(xs[0], with_step=True)[1] == 1)
    np.testing.assert_allclose(model(xs, batch=True), expected + 1, atol=1e-5)
    (said,) = [r.getMessage() for r in caplog.records if "it is not used" in r.getMessage()]
    assert re.search(r"Output 'output' is off by (1|0\.9|1\.0)\S*, at most 0\.\d+ was expected", said)
    assert said.endswith("In this process it is served by torch" if engine == "torch" else "it is served in float32")


async def _gather(model, xs):
    return await asyncio.gather(*[model.forward(x) for x in xs])


def test_int8_is_calibrated_on_what_the_model_sees(monkeypatch, tmp_path):
    monkeypatch.setattr("bray.remote.model.engine_host.CALIBRATION_ROWS", 40)
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(64, 4)).astype(np.float32)
    net = Wide()
    with opened(tmp_path, "local"):
        model = RemoteModel("m", net, (xs[0],), use_onnx="quantize", max_batch_size=16)
        model(xs[0])
        until(lambda: served(model).engine == "constant")  # float32 until it has seen something
        for x in xs:
            model(x)
        until(lambda: served(model).engine == "int8")
        np.testing.assert_allclose(model(xs, batch=True), net(torch.from_numpy(xs)).detach().numpy(), atol=0.1)
    with opened(tmp_path, "local"):  # and remembers it
        model = RemoteModel("m", net, (xs[0],), use_onnx="quantize", override_model=False)
        model(xs[0])
        until(lambda: served(model).engine == "int8")


@inside
@pytest.mark.parametrize(
    ("net", "why"),
    [
        (Sampling(), r"draws random numbers \(multinomial\)"),
        (Branching(), r"goes another way for other values.*test_remote_model.py"),
    ],
    ids=["samples", "branches"],
)
def test_a_model_that_cannot_be_exported_says_why_and_goes_on_with_torch(net, why, caplog):
    model = RemoteModel("m", net, (X,), use_onnx="train")
    model(X)
    until(lambda: "is served by torch, not by ONNX" in caplog.text)
    assert re.search(why, caplog.text)
    weights = get_torch_model_weights(net)
    weights["l.bias"] = np.array([0, 0, 100], np.float32)
    model.publish_weights(weights).result(LIMIT_S)
    until(lambda: model(X, with_step=True)[1] == 1)
    outputs = model(X)
    assert int(np.argmax(outputs[0] if isinstance(outputs, tuple) else outputs)) == 2
    assert served(model).engine == "torch"


@inside
def test_draws_inside_forward_differ_from_call_to_call():
    net = Sampling()
    with torch.no_grad():
        net.l.weight.zero_()
        net.l.bias.zero_()
    model = RemoteModel("m", net, (X,))
    assert len({int(model(X)[1]) for _ in range(64)}) == 3


def test_a_graph_of_earlier_is_used_again_when_the_model_is_not_overridden(tmp_path, monkeypatch):
    from bray.remote.model import graphs

    exports = []
    real = graphs.export_onnx
    monkeypatch.setattr(graphs, "export_onnx", lambda *args: exports.append(1) or real(*args))
    net = Wide()
    for override in (True, False):
        with opened(tmp_path, "local"):
            model = RemoteModel("m", net, (X,), use_onnx="train", override_model=override)
            model(X)
            until(lambda model=model: served(model).engine == "onnx")
            np.testing.assert_allclose(model(X), net(torch.from_numpy(X[None]))[0].detach(), atol=1e-5)
        assert len(exports) == 1


# --- versions beside each other ---------------------------------------------------------------------------------------


@inside
def test_clones_and_the_pool():
    model = RemoteModel("m", Scale(1), (X,))
    with pytest.raises(ConfigError, match="the pool of model 'm' is empty"):
        model.sample_pool()
    publish_all(model, [2])
    clone = model.clone()
    assert clone.name == "m-2"
    assert (clone.step, clone(X)[1]) == (2, 2)
    assert model.add_to_pool() == 2
    publish_all(model, [3])
    assert model.add_to_pool() == 3
    publish_all(model, [4])
    until(lambda: model(X, with_step=True)[1] == 4)
    assert clone(X)[1] == 2  # frozen
    assert model.pool == [2, 3]
    assert {model.sample_pool() for _ in range(60)} == {2, 3}
    assert {model.sample_pool([0, 1]) for _ in range(20)} == {3}
    with pytest.raises(ConfigError, match="a weight for each of the 2 versions"):
        model.sample_pool([1])

    async def main():
        return await asyncio.gather(*[model.forward(X, step=s, with_step=True) for s in (2, 3, None, 2)])

    assert [(y[1], s) for y, s in asyncio.run(main())] == [(2, 2), (3, 3), (4, 4), (2, 2)]
    with pytest.raises(CheckpointError, match=r"no version 77; there are: 0, 2, 3, 4"):
        model(X, step=77)
    again = model.clone(2)  # the same one
    assert again.step == 2
    named = model.clone(3, name="rival")
    assert (named.name, named(X)[1]) == ("rival", 3)
    named.publish_weights(weights_of(9)).result(LIMIT_S)  # a model of its own
    until(lambda: named(X)[1] == 9)
    assert model(X)[1] == 4


@inside
def test_a_clone_is_of_the_nearest_version_at_or_below():
    model = RemoteModel("m", Scale(0), (X,))
    for step in (4, 8):
        publish_all(model, [step])
        model.add_to_pool()
    publish_all(model, [12])
    below = model.clone(7)
    assert (below.name, below.step, below(X)[1]) == ("m-4", 4, 4)
    assert model.clone(8).name == "m-8"
    assert model.clone(99).step == 12
    assert model.add_to_pool(11) == 8
    assert model.add_to_pool(3) == 0


@inside
def test_no_version_at_or_below_is_said_with_those_that_there_are(tmp_path):
    model = RemoteModel("m", Scale(0), (X,), checkpoint_interval=1, keep_checkpoints=2)
    for step in range(1, 5):
        publish_all(model, [step])
        until(lambda step=step: step in versions(tmp_path))
    until(lambda: versions(tmp_path) == [3, 4])
    with pytest.raises(CheckpointError, match=r"no version at or below 2; there are: 3, 4\. keep_checkpoints"):
        model.clone(2)


def test_all_versions_stay_where_that_is_asked_for_and_those_given_up_are_not_cloned(tmp_path):
    with opened(tmp_path, "local"):
        model = RemoteModel("m", Scale(0), (X,), checkpoint_interval=1, keep_checkpoints=None)
        for step in range(1, 9):
            publish_all(model, [step])
            until(lambda step=step: step in versions(tmp_path))
    assert versions(tmp_path) == list(range(9))
    with opened(tmp_path, "local"):
        model = RemoteModel("m", Scale(0), (X,), checkpoint=3)
        publish_all(model, [10])
        assert model.clone(9).step == 3


@inside
def test_few_old_versions_are_held_at_a_time(monkeypatch):
    monkeypatch.setattr("bray.remote.model.engine_host.MOST_VERSIONS", 2)
    model = RemoteModel("m", Scale(0), (X,))
    for step in range(1, 6):
        publish_all(model, [step])
        model.add_to_pool()
    for step in (1, 2, 3, 4, 1, 3):
        assert model(X, step=step)[1] == step
        assert len(served(model).steps) <= 3


def test_the_pool_outlives_the_session(tmp_path):
    with opened(tmp_path, "local"):
        model = RemoteModel("m", Scale(0), (X,))
        publish_all(model, [3])
        model.add_to_pool()
    with opened(tmp_path, "local"):
        model = RemoteModel("m", Scale(0), (X,))
        assert model.pool == [3]


# --- TensorBoard ------------------------------------------------------------------------------------------------------


@inside
def test_tensorboard_keys_reach_the_master(monkeypatch):
    calls = []
    monkeypatch.setattr("bray.remote.model.handle.add_graph", lambda model, args: calls.append((model, args)))
    monkeypatch.setattr("bray.remote.model.handle.set_tensorboard_step", calls.append)
    net = nn.Linear(4, 2)
    RemoteModel("plain", net, (X,))
    assert calls == []
    RemoteModel("m", net, (X,), tensorboard_graph=True, tensorboard_step=True)
    (shown, args), name = calls
    assert shown is net
    assert list(args[0].shape) == [1, 4]
    assert name == "m"


def test_definitions_are_different_models():
    assert Definition("m").id != Definition("m").id
    assert Definition("m").frozen("c").id != Definition("m").id
