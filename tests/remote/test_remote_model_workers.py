"""Workers of a model and those who ask them, over sockets of one process, without a cluster; and what lies on the
wire."""

import asyncio
import struct
import threading

import numpy as np
import pytest
import torch
from torch import nn

from bray import tree
from bray.cluster import io, session as sessions
from bray.errors import BrayError, DataError, RemoteError, Unreachable
from bray.remote.model import caller as caller_module
from bray.remote.model.caller import MOST_KINDS, Caller, RowsReader, Writer
from bray.remote.model.client import ModelWorker
from bray.remote.model.handle import RemoteModel
from tests.ray_for_tests import opened

X = np.arange(4, dtype=np.float32)
LIMIT_S = 120


class Weighted(nn.Module):
    """y = w x; refuses what is negative, and may be made to wait."""

    def __init__(self, w=2.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([float(w)]))

    def forward(self, x, scale=None):
        if (x < 0).any():
            raise ValueError("a negative number came in")
        y = self.w * x
        return {"y": y if scale is None else y * scale, "sum": y.sum(-1), "rows": torch.full((len(x),), len(x))}


# --- the wire ---------------------------------------------------------------------------------------------------------

BATCHES = {
    "array": np.arange(12, dtype=np.float32).reshape(3, 4),
    "scalars": np.arange(3),
    "bytes": np.arange(3 * 5 * 7, dtype=np.uint8).reshape(3, 5, 7),
    "flags": np.array([[True], [False], [True]]),
    "large": np.random.default_rng(0).random((3, 60, 60)),
    "not contiguous": np.arange(24, dtype=np.int16).reshape(4, 6).T[:3],
    "empty rows": np.zeros((3, 0), np.float32),
    "tree": ({"a": np.zeros((3, 2), np.float32), "b": [np.ones(3), (np.arange(3),)]}, np.arange(3)),
    "nothing": {},
}


def sent(writer, batch, rows=3, step=-1):
    return b"".join(bytes(p) for p in writer.write(batch, rows, step))


@pytest.mark.parametrize("name", BATCHES)
def test_batches_arrive_as_they_were(name):
    writer, reader = Writer(), RowsReader()
    first = sent(writer, BATCHES[name], step=7)
    second = sent(writer, BATCHES[name])
    assert len(second) < len(first)  # described once
    for body, step in ((first, 7), (second, -1)):
        batch = reader.read(memoryview(body))
        assert (batch.step, batch.rows) == (step, 3)
        assert tree.equal(batch.values, tree.map(np.asarray, BATCHES[name]))
        for x in tree.leaves(batch.values):
            assert x.flags.writeable
            assert x.flags.aligned


def test_kinds_beyond_those_remembered_are_described_each_time():
    writer, reader = Writer(), RowsReader()
    batches = [np.full((2, i + 1), i) for i in range(MOST_KINDS + 5)]
    for _ in range(2):
        for batch in batches:
            assert tree.equal(reader.read(memoryview(sent(writer, batch, 2))).values, batch)


def test_bodies_that_are_no_batches_are_refused():
    rng = np.random.default_rng(0)
    good = sent(Writer(), BATCHES["tree"])
    refused = 0
    bodies = [good[:n] for n in range(0, len(good), 3)]
    for _ in range(400):
        body = bytearray(good)
        for at in rng.integers(0, len(good), 3):
            body[at] = rng.integers(256)
        bodies.append(bytes(body))
    bodies.append(struct.pack("<qIII4x", -1, 1 << 31, 1, 2) + b'{"a":["<f4",[4294967295,4294967295]]}')
    for body in bodies:
        try:
            RowsReader().read(memoryview(body))
        except DataError:
            refused += 1
    assert refused > 100
    with pytest.raises(DataError, match="layout 9 was never described"):
        RowsReader().read(memoryview(struct.pack("<qIII4x", -1, 1, 9, 0)))
    with pytest.raises(DataError, match="numbers"):
        Writer().write(np.array(["text"]), 1, -1)


# --- workers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def session(tmp_path):
    with opened(tmp_path, "local") as made:
        yield made


@pytest.fixture
def model(session):
    return RemoteModel("m", Weighted(), (X,), max_batch_size=32)


def start(session, index=0):
    return session.cluster.start(f"model/m/{index}", ModelWorker, "m", index)


def worker(session, index=0):
    return session.cluster.hosted(f"model/m/{index}").worker


def run(main):
    """On a loop of its own, as an Actor's would be."""

    async def bounded():
        return await asyncio.wait_for(main(), LIMIT_S)

    return asyncio.run(bounded())


def test_many_samples_in_one_frame(session, model):
    members = [start(session)]

    async def main():
        caller = Caller("m", members, 32)
        await caller.ask((X,), False, None, False)
        before = worker(session).served.numbers()["batches_total"]
        many = await asyncio.gather(*[caller.ask((X + i,), False, None, True) for i in range(20)])
        after = worker(session).served.numbers()["batches_total"]
        whole = await caller.ask((np.stack([X] * 50),), True, None, True)  # larger than a batch
        caller.close()
        return many, after - before, whole

    many, batches, (whole, step) = run(main)
    assert all(s == 0 for _, s in many)
    for i, (y, _) in enumerate(many):
        assert y["y"].tolist() == (2 * (X + i)).tolist()
        assert y["sum"] == 2 * (X + i).sum()
        assert isinstance(y["sum"], np.float32)
        y["y"][0] = 1  # one's own
    assert batches <= 2
    assert whole["y"].shape == (50, 4)
    assert step == 0


def test_callers_of_several_loops_share_batches_and_one_who_errs_harms_nobody(session, model):
    members = [start(session)]
    bad = RemoteError

    async def ask(value, times):
        caller = Caller("m", members, 32)
        got = []
        for _ in range(times):
            got += await asyncio.gather(
                *[caller.ask((np.full(4, value, np.float32),), False, None, False) for _ in range(4)],
                return_exceptions=True,
            )
        caller.close()
        return got

    async def main():
        threads = [asyncio.to_thread(lambda v=v: asyncio.run(ask(v, 20))) for v in (1, 2, -1, 3)]
        return await asyncio.gather(*threads)

    ones, twos, errors, threes = run(main)
    for value, got in ((1, ones), (2, twos), (3, threes)):
        assert [y["y"][0] for y in got] == [2.0 * value] * 80
    assert all(isinstance(e, bad) for e in errors)
    text = str(errors[0])
    assert text.index("Traceback") < text.index("a negative number came in") < text.index("raised in model/m/0 (pid ")
    assert 'raise ValueError("a negative number came in")' in text


class Doubles:
    """An engine that answers as `Weighted` does at first."""

    def forward(self, x):
        return {"y": 2 * x, "sum": 2 * x.sum(-1), "rows": np.full(len(x), len(x))}

    def set_weights(self, weights):
        pass


class held(Doubles):
    """While it is entered, a forward of this worker runs and all others wait for it."""

    def __init__(self, worker):
        self.host = worker.served
        self.entered, self.gate = threading.Event(), threading.Event()

    def forward(self, x):
        self.entered.set()
        self.gate.wait(LIMIT_S)
        return super().forward(x)

    def __enter__(self):
        self.host.replace_engine(self)
        threading.Thread(target=self.host, args=(X[None],), kwargs={"batch": True}, daemon=True).start()
        assert self.entered.wait(LIMIT_S)

    def __exit__(self, *exc):
        self.gate.set()


def test_frames_of_several_connections_are_merged(session, model):
    members = [start(session)]

    async def main():
        callers = [Caller("m", members, 32) for _ in range(3)]
        await asyncio.gather(*[c.ask((X,), False, None, False) for c in callers])
        with held(worker(session)):
            first = callers[0].ask((X,), False, None, False)
            await asyncio.sleep(0.2)
            rest = [c.ask((X,), False, None, False) for c in callers for _ in range(2)]
            await asyncio.sleep(0.2)
        outputs = await asyncio.gather(first, *rest)
        for c in callers:
            c.close()
        return [int(y["rows"]) for y in outputs]

    assert max(run(main)) >= 6  # of all three (and a recording is made for 8)


def test_samples_of_other_kinds_have_batches_of_their_own(session, model):
    members = [start(session)]
    samples = [
        X,
        np.arange(3, dtype=np.float32),
        X.astype(np.float64),
        torch.arange(4.0),
        np.arange(3, dtype=np.float32),
    ]

    async def main():
        caller = Caller("m", members, 32)
        outputs = await asyncio.gather(
            *[caller.ask((x,), False, None, False) for x in samples],
            caller.ask((object(),), False, None, False),
            return_exceptions=True,
        )
        caller.close()
        return outputs

    *good, bad = run(main)
    assert [y["y"].tolist() for y in good] == [(2 * np.asarray(x)).tolist() for x in samples]
    assert isinstance(bad, DataError)


def test_a_sample_of_a_wrong_kind_spoils_nothing_for_the_others(session, model):
    members = [start(session)]

    async def main():
        caller = Caller("m", members, 32)
        wrong = [{"x": X}, (X, X), np.zeros((2, 3), np.float32)]
        errors = await asyncio.gather(*[caller.ask((x,), False, None, False) for x in wrong], return_exceptions=True)
        outputs = []
        for n in range(1, 7):  # batches of sizes that were not seen before
            outputs += await asyncio.gather(*[caller.ask((X,), False, None, False) for _ in range(n)])
        caller.close()
        return errors, outputs

    errors, outputs = run(main)
    assert all(isinstance(e, RemoteError) for e in errors[:2])
    assert all(y["y"].tolist() == (2 * X).tolist() for y in outputs)


def test_versions_are_asked_by_step_and_publishing_reaches_every_worker(session, model):
    members = [start(session, 0), start(session, 1)]
    model.publish_weights({"w": np.array([3], np.float32)}).result(LIMIT_S)
    model.add_to_pool()
    model.publish_weights({"w": np.array([4], np.float32)}).result(LIMIT_S)

    async def main():
        while any(m.call("numbers").result()["step"] != 2 for m in members):
            await asyncio.sleep(0.01)
        caller = Caller("m", members, 4)
        outputs = await asyncio.gather(
            *[caller.ask((X,), False, s, True) for s in (None, 1, None, 1, 2, 9) for _ in range(3)],
            return_exceptions=True,
        )
        caller.close()
        return outputs

    outputs = run(main)
    assert [(y["y"][1], s) for y, s in outputs[:15]] == [(4, 2)] * 3 + [(3, 1)] * 3 + [(4, 2)] * 3 + [(3, 1)] * 3 + [
        (4, 2)
    ] * 3
    assert all(isinstance(e, BrayError) and "no version 9" in str(e) for e in outputs[15:])


def test_the_worker_with_less_to_do_comes_first(session, model):
    members = [start(session, 0), start(session, 1)]

    async def main():
        caller = Caller("m", members, 4)
        await asyncio.gather(*[caller.ask((X,), False, None, False) for _ in range(4)])
        await asyncio.sleep(0.2)  # both are connected
        before = worker(session, 1).served.numbers()["samples_total"]
        with held(worker(session, 0)):
            first = [caller.ask((X,), False, None, False) for _ in range(2)]
            done = 0
            for _ in range(50):
                try:
                    await asyncio.wait_for(asyncio.shield(caller.ask((X,), False, None, False)), 0.5)
                    done += 1
                except TimeoutError:
                    pass
        await asyncio.gather(*first)
        caller.close()
        return done, worker(session, 1).served.numbers()["samples_total"] - before

    done, answered = run(main)
    assert done >= 45  # all but those that went to the slow one first
    assert answered >= 45


def test_what_a_worker_that_dies_had_not_answered_goes_to_another(session, model):
    members = [start(session, 0), start(session, 1)]

    async def main():
        caller = Caller("m", members, 8)
        await asyncio.gather(*[caller.ask((X,), False, None, False) for _ in range(16)])
        await asyncio.sleep(0.2)
        with held(worker(session, 0)):
            futures = [caller.ask((X + i,), False, None, False) for i in range(64)]
            await asyncio.sleep(0.2)
            await asyncio.wrap_future(io.submit(_cut(worker(session, 0))))
            outputs = await asyncio.gather(*futures)
        caller.close()
        return outputs

    for i, y in enumerate(run(main)):
        assert y["y"].tolist() == (2 * (X + i)).tolist()


async def _cut(dead):
    """As a kill does: no connection, and no new one."""
    dead.address = lambda: (_ for _ in ()).throw(Unreachable("killed"))
    for link in list(dead.listener.links):
        link.abort()


class Deadly(Doubles):
    """Cuts the connections of its worker instead of answering."""

    def __init__(self, worker):
        self.worker = worker

    def forward(self, x):
        for link in list(self.worker.listener.links):
            link.abort()
        return super().forward(x)


def test_a_sample_that_kills_workers_is_given_up(session, model):
    members = [start(session, 0), start(session, 1), start(session, 2)]

    async def main():
        caller = Caller("m", members, 8)
        await caller.ask((X,), False, None, False)
        for index in range(3):
            worker(session, index).served.replace_engine(Deadly(worker(session, index)))
        return await asyncio.gather(caller.ask((X,), False, None, False), return_exceptions=True)

    (error,) = run(main)
    assert isinstance(error, Unreachable)
    assert "2 workers of model 'm' died" in str(error)


def test_nobody_waits_for_ever(session, model, monkeypatch):
    monkeypatch.setattr(caller_module, "NOBODY_S", 0.5)
    monkeypatch.setattr(caller_module, "ANSWER_S", 0.5)
    monkeypatch.setattr(caller_module, "CONNECT_S", 0.2)
    members = [start(session)]

    async def main():
        caller = Caller("m", members, 8)
        await caller.ask((X,), False, None, False)
        with held(worker(session)):
            hung = await asyncio.gather(caller.ask((X,), False, None, False), return_exceptions=True)
        again = await caller.ask((X,), False, None, False)  # connected anew
        await asyncio.wrap_future(io.submit(_cut(worker(session))))
        nobody = await asyncio.gather(caller.ask((X,), False, None, False), return_exceptions=True)
        return *hung, again, *nobody

    hung, again, nobody = run(main)
    assert isinstance(hung, Unreachable)
    assert "model/m/0 did not answer in 0.5 s" in str(hung)
    assert again["y"].tolist() == (2 * X).tolist()
    assert isinstance(nobody, Unreachable)
    assert "no worker of model 'm' was there for 0.5 s (model/m/0: killed" in str(nobody)


def test_a_wrong_message_is_answered_with_an_error(session, model):
    member = start(session)

    async def main():
        link = await sessions.session().connect(member.call("address").result())
        with pytest.raises(DataError, match="not a batch"):
            await link.request(1, b"junk")
        with pytest.raises(BrayError, match="messages of kind 1"):
            await link.request(2, b"junk")
        reply = await link.request(1, *Writer().write((X[None],), 1, -1))
        link.close()
        return RowsReader().read(reply)

    assert run(main).values["y"].tolist() == [(2 * X).tolist()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_with_a_gpu_the_worker_runs_there_and_takes_new_weights(session):
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))
    model = RemoteModel("m", net, (X,), max_batch_size=16, num_workers=1, gpus_per_worker=1, use_onnx="train")
    members = [start(session)]
    served = worker(session).served
    assert torch.cuda.memory_allocated() > 0
    assert served.engine == "torch"
    xs = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)

    async def main():
        caller = Caller("m", members, 16)
        first = await asyncio.gather(*[caller.ask((x,), False, None, False) for x in xs])
        weights = {k: v.numpy() + 1 for k, v in net.state_dict().items()}
        await model.publish_weights(weights)
        while served.step < 1:
            await asyncio.sleep(0.01)
        second, step = await caller.ask((xs,), True, None, True)
        caller.close()
        return first, second, step, weights

    first, second, step, weights = run(main)
    np.testing.assert_allclose(first, net(torch.from_numpy(xs)).detach(), atol=1e-4)
    net.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()})
    np.testing.assert_allclose(second, net(torch.from_numpy(xs)).detach(), atol=1e-3)
    assert step == 1
