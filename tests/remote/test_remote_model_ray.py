"""RemoteModel on a real Ray: workers and a keeper in processes of their own, some of which are killed."""

import asyncio
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from bray.cluster import session as sessions
from bray.errors import BrayError, ConfigError, MissingComponent, RemoteError, ResourceError, Unreachable
from bray.remote.model.client import client_of
from bray.remote.model.handle import RemoteModel
from tests.ray_for_tests import ray_session  # noqa: F401

X = np.arange(4, dtype=np.float32)
LIMIT_S = 300

pytestmark = pytest.mark.usefixtures("ray_session")


class Scale(nn.Module):
    """y = w x, and w is the step of the weights: an answer shows its version."""

    def __init__(self, w=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([float(w)]))

    def forward(self, x):
        if (x < 0).any():
            raise ValueError("a negative number came in")
        return {"y": self.w * x, "pid": torch.full((len(x),), os.getpid())}


class Asker:
    """Another process of the session, with a handle that was sent to it."""

    def __init__(self, model):
        self.model = model

    async def ask(self, n):
        outputs = await asyncio.gather(*[self.model.forward(X + i, with_step=True) for i in range(n)])
        return [(y["y"].tolist(), step) for y, step in outputs], os.getpid(), self.model.step

    def publish(self, w):
        return self.model.publish_weights(weights_of(w)).result(LIMIT_S)


def weights_of(w):
    return {"w": np.array([w], np.float32)}


def until(condition, seconds=LIMIT_S):
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
    return result


def steps(name="m", n=2):
    """The step that each worker answers with; None while one that was started again is not ready, which takes longer
    than a call on a busy machine."""
    find = sessions.session().cluster.find
    try:
        return [find(f"model/{name}/{i}").call("numbers", retry=True).result()["step"] for i in range(n)]
    except Unreachable:
        return None


@pytest.fixture(scope="module")
def model(ray_session):  # noqa: F811
    return RemoteModel("m", Scale(), (X,), max_batch_size=8, num_workers=2, cpus_per_worker=0.5, checkpoint_interval=10)


@pytest.fixture(scope="module")
def exported(ray_session):  # noqa: F811
    """Made early: its graph is made while other tests run."""
    return RemoteModel("exported", nn.Linear(4, 2), (X,), use_onnx="train", num_workers=2, local_mode=True)


def test_forwards_go_to_the_workers(model, exported):
    assert sessions.session().cluster.names("model/m") == ["model/m", "model/m/0", "model/m/1"]

    pids = set()

    async def main():
        while len(pids) < 2:  # whichever worker is reached first may answer many before the other is reached
            outputs = await asyncio.gather(*[model.forward(X, with_step=True) for _ in range(100)])
            assert {step for _, step in outputs} == {0}
            pids.update(int(y["pid"]) for y, _ in outputs)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert os.getpid() not in pids
    assert int(model(X)["pid"]) in pids  # plain code too
    assert model(np.stack([X, X, X]), batch=True)["y"].shape == (3, 4)
    assert client_of("m").definition.cpus_per_worker == 0.5
    assert pickle.loads(pickle.dumps(model))(X)["y"].tolist() == [0, 0, 0, 0]


def test_a_publish_from_anywhere_reaches_every_worker_and_every_process(model):
    asker = sessions.session().cluster.start("asker", Asker, model)
    outputs, pid, step = asker.call("ask", 20).result()
    assert pid != os.getpid()
    assert [s for _, s in outputs] == [0] * 20
    assert step == 0
    before = model.step
    assert asker.call("publish", before + 1).result() == before + 1
    until(lambda: steps() == [before + 1] * 2)
    until(lambda: model.step == before + 1)
    outputs, _, step = asker.call("ask", 4).result()
    assert outputs == [(((before + 1) * (X + i)).tolist(), before + 1) for i in range(4)]
    assert step == before + 1
    weights, step = model.get_weights()
    assert (weights["w"].tolist(), step) == ([before + 1.0], before + 1)
    assert model.get_model().w.item() == before + 1
    sessions.session().cluster.stop("asker")


def test_an_error_of_the_users_model_shows_its_traceback_and_where_it_ran(model):
    with pytest.raises(RemoteError) as caught:
        model(-X)
    text = str(caught.value)
    assert 'raise ValueError("a negative number came in")' in text
    assert text.index("Traceback") < text.index("raised in model/m/")
    with pytest.raises(RemoteError) as caught:
        model({"x": X})
    assert "expected float32[4]" not in str(caught.value)
    assert "defined with other arguments" in caught.value.__notes__[0]


def test_a_missing_model_names_those_that_exist(model):
    with pytest.raises(MissingComponent, match=r"there is no model 'n'.*'m'"):
        RemoteModel("n")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"cpus_per_worker": 500}, "500 CPUs"),
        ({"gpus_per_worker": 2}, "2 GPUs"),
        ({"memory_per_worker": 10**9}, "1000000000 MB"),
    ],
)
def test_what_a_worker_asks_for_is_asked_of_ray(keys, message, model):
    with pytest.raises(ResourceError, match=message):
        RemoteModel("large", Scale(), (X,), num_workers=1, **keys)
    assert sessions.session().cluster.names("model/large") == []


def test_a_model_that_cannot_be_sent_is_refused(model):
    class Locked(Scale):
        def __deepcopy__(self, memo):
            return Scale()

    net = Locked()
    net.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"model 'locked' cannot be sent to other processes.*lock"):
        RemoteModel("locked", net, (X,))
    assert sessions.session().cluster.names("model/locked") == []


class Load:
    """Callers that ask without a pause, and what became of it."""

    def __init__(self, model, callers=8):
        self.model, self.callers = model, callers
        self.answered, self.errors, self.steps = 0, [], []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()

    async def _main(self):
        async def caller(i):
            while not self._stop.is_set():
                try:
                    y, step = await asyncio.wait_for(self.model.forward(X + i, with_step=True), LIMIT_S)
                    assert y["y"].tolist() == (step * (X + i)).tolist(), "an answer of another version than it says"
                    self.answered += 1
                    self.steps.append(step)
                except (BrayError, TimeoutError, AssertionError) as e:
                    self.errors.append(e)

        await asyncio.gather(*[caller(i) for i in range(self.callers)])

    def end(self):
        self._stop.set()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "a caller hangs"


def test_a_worker_that_is_killed_is_replaced_and_nobody_notices(model):
    find = sessions.session().cluster.find
    publish_to(model, model.step + 1)
    load = Load(model)
    until(lambda: load.answered > 200)
    pid = find("model/m/0").call("numbers").result()["pid"]
    os.kill(pid, signal.SIGKILL)
    killed = load.answered
    until(lambda: load.answered > killed + 200)  # the other one goes on
    new = until(lambda: _pid("model/m/0", pid))
    publish_to(model, model.step + 1)
    until(lambda: steps() == [model.step] * 2)  # the new one too has the newest version
    marks = find("model/m/0").call("numbers").result()["samples_total"]
    until(lambda: find("model/m/0").call("numbers").result()["samples_total"] > marks)  # and is asked again
    load.end()
    assert load.errors == []
    assert new != pid


def test_the_keeper_is_killed_and_the_step_does_not_go_back(model):
    step = model.step
    publish_to(model, step + 1)
    load = Load(model, 2)
    until(lambda: load.answered > 20)
    pid = sessions.session().cluster.pid("model/m")
    os.kill(pid, signal.SIGKILL)
    assert model.publish_weights(weights_of(step + 2)).result(LIMIT_S) == step + 2  # waits for the new one
    assert until(lambda: _pid("model/m", pid)) != pid
    until(lambda: steps() == [step + 2] * 2)
    pid = sessions.session().cluster.pid("model/m")
    os.kill(pid, signal.SIGKILL)
    until(lambda: _pid("model/m", pid))
    # nothing is published now: what the workers have is offered to the new one, whose files are older
    until(lambda: sessions.session().cluster.find("model/m").call("step", retry=True).result() == step + 2)
    assert model.get_weights()[0]["w"].tolist() == [step + 2.0]
    assert model.step == step + 2
    load.end()
    assert load.errors == []
    assert set(load.steps) <= {step + 1, step + 2}
    publish_to(model, step + 3)
    until(lambda: steps() == [step + 3] * 2)


def test_who_published_last_gives_it_to_a_keeper_that_lost_it():
    lone = RemoteModel("lone", Scale(), (X,))  # nobody has an engine
    assert lone.publish_weights(weights_of(5), step=5).result(LIMIT_S) == 5
    pid = sessions.session().cluster.pid("model/lone")
    os.kill(pid, signal.SIGKILL)
    until(lambda: _pid("model/lone", pid))
    until(lambda: sessions.session().cluster.find("model/lone").call("step", retry=True).result() == 5)
    assert lone(X, with_step=True)[1] == 5
    assert lone(X)["y"].tolist() == (5 * X).tolist()
    assert lone.publish_weights(weights_of(6)).result(LIMIT_S) == 6


def publish_to(model, step):
    assert model.publish_weights(weights_of(step)).result(LIMIT_S) == step
    until(lambda: steps() == [step] * 2)


def _pid(name, old):
    try:
        found = sessions.session().cluster.pid(name)
    except BrayError:
        return None
    return found if found != old else None


def test_versions_of_the_pool_are_hosted_beside_the_current_one(model):
    old = model.add_to_pool()
    publish_to(model, model.step + 1)
    new = model.step

    async def main():
        return await asyncio.gather(*[model.forward(X, step=s, with_step=True) for s in [old, None] * 10])

    assert [(y["y"][1], s) for y, s in asyncio.run(main())] == [(old, old), (new, new)] * 10


def test_local_mode_starts_no_workers_and_goes_over_to_onnx_when_that_is_ready(exported):
    assert sessions.session().cluster.names("model/exported") == ["model/exported"]
    net = exported.get_model()
    expected = net(torch.from_numpy(X[None]))[0].detach().numpy()
    np.testing.assert_allclose(exported(X), expected, atol=1e-6)
    until(lambda: client_of(exported.name).served.engine == "onnx")
    np.testing.assert_allclose(exported(X), expected, atol=1e-5)
    with torch.no_grad():
        net.bias += 1
    exported.publish_weights(net.state_dict()).result(LIMIT_S)
    until(lambda: exported(X, with_step=True)[1] == 1)
    np.testing.assert_allclose(exported(X), expected + 1, atol=1e-5)


def test_clones_and_a_model_that_is_defined_anew(exported):
    clone = exported.clone(name="rival")
    assert sessions.session().cluster.names("model/rival") == ["model/rival"]
    np.testing.assert_allclose(clone(X), exported(X), atol=1e-5)
    other = RemoteModel("exported", nn.Linear(4, 2), (X,), local_mode=True, max_batch_size=3)
    assert other.step == exported.step == 1
    assert client_of(exported.name).definition.max_batch_size == 3
    np.testing.assert_allclose(exported(X), clone(X), atol=1e-5)
