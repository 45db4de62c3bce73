"""ModelHost: versions, publishing between batches, and what an Actor sees of it; and FakeModel."""

import asyncio
import logging
import threading
import time

import numpy as np
import pytest
import uvloop

from bray.errors import BrayError, CheckpointError, ConfigError, DataError, Overloaded
from bray.fake import FakeModel
from bray.inference.batcher import Batcher
from bray.inference.engine import lasting
from bray.inference.host import ModelHost

LIMIT_S = 120


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request):
    def go(main):
        async def bounded():
            return await asyncio.wait_for(main(), LIMIT_S)

        return request.param(bounded())

    return go


class Linear:
    """y = w x + b, with a gate and a memory of what it saw. It takes weights one by one, as a careless engine would."""

    def __init__(self, w=1.0, b=0.0):
        self.weights = {"w": np.array([w]), "b": np.array([b])}
        self.sizes = []
        self.gate, self.started = threading.Event(), threading.Event()
        self.gate.set()
        self.inside = 0

    def forward(self, x, extra=None):
        self.inside += 1
        assert self.inside == 1
        self.sizes.append(len(x))
        w = self.weights["w"]
        self.started.set()
        assert self.gate.wait(LIMIT_S)
        y = w * x + self.weights["b"]  # a swap in the middle of a forward would mix two versions
        self.inside -= 1
        return {"y": y if extra is None else y + extra["bias"]}

    def set_weights(self, weights):
        assert not self.inside, "weights changed during a forward"
        for name in self.weights:
            if weights[name].shape != (1,):
                raise ValueError(f"{name} has shape {weights[name].shape}")
            self.weights[name] = weights[name]


class Fixed:
    """An engine that takes no weights."""

    def __init__(self, w):
        self.w = w

    def forward(self, x):
        return {"y": self.w * x}


def weights(w, b=0.0):
    return {"w": np.array([float(w)]), "b": np.array([float(b)])}


X = np.array([1.0])


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


# --- asking -----------------------------------------------------------------------------------------------------------


def test_forward_batches_samples_and_takes_batches_and_keywords(run):
    async def main():
        engine = Linear(3.0)
        host = ModelHost("m", engine, max_batch_size=8)
        out = await asyncio.gather(*[host.forward(np.array([float(i)])) for i in range(5)])
        assert [x["y"].tolist() for x in out] == [[3.0 * i] for i in range(5)]
        assert engine.sizes == [5]
        whole = await host.forward(np.arange(20.0)[:, None], batch=True)
        assert whole["y"][:, 0].tolist() == [3.0 * i for i in range(20)]
        assert engine.sizes == [5, 8, 8, 4]
        biased = await asyncio.gather(*[host.forward(X, bias=np.array([10.0 * i])) for i in range(3)])
        assert [x["y"].tolist() for x in biased] == [[3.0], [13.0], [23.0]]
        assert host(X, bias=np.array([1.0]))["y"].tolist() == [4.0]
        await host.close()

    run(main)


def test_the_host_can_be_called_without_a_loop_from_any_thread(run):
    host = ModelHost("m", Linear(2.0), step=4)
    assert host(X)["y"].tolist() == [2.0]
    assert host(np.ones((3, 1)), batch=True)["y"].shape == (3, 1)
    assert host(X, with_step=True)[1] == 4

    async def main():
        outs = await asyncio.gather(*[asyncio.to_thread(host, X) for _ in range(20)], host.forward(X))
        assert [x["y"].tolist() for x in outs] == [[2.0]] * 21
        assert host(X)["y"].tolist() == [2.0]  # in the loop too
        await host.close()

    run(main)


def test_decide_is_applied_to_the_whole_batch(run):
    seen = []

    def decide(outputs, x):
        seen.append(x.shape)
        return {"action": outputs["y"].argmax(-1), "best": x.max(-1)}

    async def main():
        host = ModelHost("m", Linear(-1.0), decide=decide)
        a, b = await asyncio.gather(host.forward(np.array([1.0, 2.0, 3.0])), host.forward(np.array([3.0, 2.0, 1.0])))
        assert (a["action"], b["action"]) == (0, 2)
        assert (a["best"], b["best"]) == (3.0, 3.0)
        assert host(np.array([1.0, 2.0]))["action"] == 0
        await host.close()

    run(main)
    assert seen == [(2, 3), (1, 2)]


def test_options_reach_the_batcher(run):
    async def main():
        engine = Linear()
        host = ModelHost("m", engine, max_batch_size=4, max_queue=2, pad_to=(4,), inline_below=0.0, template=(X,))
        engine.gate.clear()
        first = host.forward(X)
        await until(engine.started.is_set)
        waiting = [host.forward(X), host.forward(X)]
        with pytest.raises(Overloaded, match="max_queue is 2"):
            host.forward(X)
        engine.gate.set()
        await asyncio.gather(first, *waiting)
        assert engine.sizes == [4, 4]
        with pytest.raises(DataError, match=r"expected float64\[1\], got float64\[2\]"):
            await host.forward(np.ones(2))
        await host.close()

    run(main)
    with pytest.raises(ConfigError, match="pad_to"):
        ModelHost("m", Linear(), pad_to=(2,))


# --- publishing -------------------------------------------------------------------------------------------------------


def test_publish_changes_step_weights_and_answers(run):
    async def main():
        host = ModelHost("m", Linear(1.0), step=7, weights=weights(1.0))
        assert (host.step, host.steps) == (7, [7])
        assert (await host.forward(X, with_step=True)) == ({"y": [1.0]}, 7)
        mine = weights(5.0)
        assert await host.publish_weights(mine) == 8
        mine["w"][:] = -1.0  # a trainer goes on with its arrays
        out, step = await host.forward(X, with_step=True)
        assert (out["y"].tolist(), step, host.step, host.steps) == ([5.0], 8, 8, [8])
        held, step = host.get_weights()
        assert (held["w"].tolist(), step) == ([5.0], 8)
        assert host.publish_weights(weights(6.0), step=20).result(LIMIT_S) == 20
        assert host.step == 20
        out, step = await host.forward(np.ones((2, 1)), batch=True, with_step=True)
        assert (out["y"].tolist(), step) == ([[6.0], [6.0]], 20)
        await host.publish_weights(weights(7.0), step=20)  # the same step again is allowed
        assert host(X)["y"].tolist() == [7.0]
        await host.close()

    run(main)


def test_a_publish_takes_effect_between_batches_and_drops_nobody(run):
    async def main():
        engine = Linear(1.0)
        host = ModelHost("m", engine, weights=weights(1.0), inline_below=0.0)
        engine.gate.clear()
        running = host.forward(X, with_step=True)
        await until(engine.started.is_set)
        waiting = [host.forward(X, with_step=True) for _ in range(3)]
        publishing = asyncio.ensure_future(asyncio.to_thread(host.publish_weights, weights(2.0, 100.0)))
        await asyncio.sleep(0.02)
        assert not publishing.done()  # it waits for the forward
        assert host.step == 0
        engine.gate.set()
        assert await running == ({"y": [1.0]}, 0)
        await publishing
        for out, step in await asyncio.gather(*waiting):
            assert (out["y"].tolist(), step) in (([1.0], 0), ([102.0], 1))  # whole, either way
        assert await host.forward(X, with_step=True) == ({"y": [102.0]}, 1)
        await host.close()

    run(main)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"w": np.ones(1)}, r"b: expected \[1\], got none"),
        ({**weights(2.0), "c": np.ones(2)}, r"c: expected none, got \[2\]"),
        ({"w": np.ones(1), "b": np.ones(2)}, r"goes on with those it has: b: expected \[1\], got \[2\]"),
        ({}, r"w: expected \[1\], got none; b: expected"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_version_goes_on(run, new, message):
    async def main():
        for make_engine in (None, lambda w: Linear(float(w["w"][0]))):
            host = ModelHost("m", Linear(1.0), step=3, weights=weights(1.0), make_engine=make_engine)
            with pytest.raises(CheckpointError, match=message):
                host.publish_weights(new)
            assert await host.forward(X, with_step=True) == ({"y": [1.0]}, 3)
            assert host.get_weights()[1] == 3
            assert await host.publish_weights(weights(4.0)) == 4  # the refused one took no number
            await host.close()

    run(main)


def test_an_engine_that_refuses_in_the_middle_gets_its_old_weights_back():
    engine = Linear(1.0)
    host = ModelHost("m", engine, weights=weights(1.0))
    real = engine.set_weights

    def careless(new):
        engine.weights["w"] = new["w"]
        if new["w"] == 9:
            raise ValueError("no nine")
        real(new)

    engine.set_weights = careless
    with pytest.raises(ValueError, match="no nine"):
        host.publish_weights(weights(9.0))
    assert host(X, with_step=True) == ({"y": [1.0]}, 0)
    host.publish_weights(weights(2.0))
    assert host(X, with_step=True) == ({"y": [2.0]}, 1)


def test_steps_go_up_only():
    host = ModelHost("m", Linear(), step=10)
    with pytest.raises(ConfigError, match=r"'m' is at step 10 already, got weights of step 9: .*add_version"):
        host.publish_weights(weights(2.0), step=9)
    assert (host.step, host(X)["y"].tolist()) == (10, [1.0])


def test_weights_that_are_not_known_cannot_be_had_and_engines_without_set_weights_say_so():
    host = ModelHost("m", Fixed(2.0))
    with pytest.raises(ConfigError, match=r"weights=\.\.\."):
        host.get_weights()
    with pytest.raises(ConfigError, match=r"Fixed takes no new weights.*make_engine"):
        host.publish_weights(weights(1.0))
    assert (host.step, host(X)["y"].tolist()) == (0, [2.0])


def test_make_engine_builds_beside_the_loop_and_swaps_when_it_is_ready(run):
    async def main():
        gate, threads = threading.Event(), []

        def make_engine(w):
            threads.append(threading.get_ident())
            assert gate.wait(LIMIT_S)
            return Fixed(float(w["w"][0]))

        host = ModelHost("m", Fixed(1.0), weights=weights(1.0), make_engine=make_engine)
        two, three = host.publish_weights(weights(2.0)), host.publish_weights(weights(3.0), step=5)
        with pytest.raises(ConfigError, match="is at step 5 already"):
            host.publish_weights(weights(4.0), step=4)  # older than one that is on its way
        for _ in range(5):  # the old one answers meanwhile, and the loop turns
            assert await host.forward(X, with_step=True) == ({"y": [1.0]}, 0)
        assert not two.done()
        gate.set()
        assert await two == 1
        assert await three == 5
        assert await host.forward(X, with_step=True) == ({"y": [3.0]}, 5)
        assert host.get_weights()[0]["w"] == 3.0
        assert set(threads) != {threading.get_ident()}
        await host.close()

    run(main)


def test_an_engine_that_cannot_be_built_leaves_the_old_one_and_says_why(run, caplog):
    async def main():
        def make_engine(w):
            if w["w"] == 2:
                raise ValueError("cannot export")
            return Fixed(float(w["w"][0]))

        host = ModelHost("m", Fixed(1.0), step=3, make_engine=make_engine)
        with caplog.at_level(logging.ERROR, "bray.inference"):
            failing = host.publish_weights(weights(2.0))
            with pytest.raises(ValueError, match="cannot export"):
                await failing
        assert "step 4 is not published, step 3 goes on: cannot export" in caplog.text
        assert await host.forward(X, with_step=True) == ({"y": [1.0]}, 3)
        assert await host.publish_weights(weights(5.0)) == 4
        assert await host.forward(X, with_step=True) == ({"y": [5.0]}, 4)
        await host.close()

    run(main)


def test_publishing_from_many_threads_while_callers_ask(run):
    """Each answer is one version's and says which: w = b = step, so y = step * x + step."""

    async def main():
        host = ModelHost("m", Linear(0.0), weights=weights(0.0, 0.0), inline_below=2e-4)
        stop = threading.Event()
        turn = threading.Lock()
        errors = []

        def publisher():
            while not stop.is_set():
                with turn:  # so that the numbers go up
                    n = host.step + 1
                    try:
                        host.publish_weights(weights(n, n), step=n)
                    except Exception as e:
                        errors.append(e)
                time.sleep(0.0005)

        def asker():
            while not stop.is_set():
                out, step = host(X, with_step=True)
                if out["y"] != 2 * step:
                    errors.append((out, step))

        threads = [threading.Thread(target=f) for f in (publisher, publisher, asker)]
        for t in threads:
            t.start()
        last = 0
        try:
            for _ in range(150):
                outs = await asyncio.gather(*[host.forward(X, with_step=True) for _ in range(8)])
                whole, step = await host.forward(np.ones((100, 1)), batch=True, with_step=True)
                assert (whole["y"] == 2 * step).all()
                for out, step in outs:
                    assert out["y"] == 2 * step
                    assert step >= last
                    last = step
        finally:
            stop.set()
            for t in threads:
                await asyncio.to_thread(t.join, LIMIT_S)
        assert not errors
        assert host.step > 1
        await host.close()

    run(main)


# --- versions ---------------------------------------------------------------------------------------------------------


def test_several_versions_are_asked_by_step(run):
    async def main():
        host = ModelHost("m", Linear(10.0), step=10, weights=weights(10.0))
        host.add_version(3, Linear(3.0))  # older is fine here
        host.add_version(20, Linear(20.0))
        assert (host.step, host.steps) == (10, [3, 10, 20])
        asked = [None, 3, 10, 20, 3]
        outs = await asyncio.gather(*[host.forward(X, step=s, with_step=True) for s in asked])
        assert [(o["y"].tolist(), s) for o, s in outs] == [([s or 10.0], s or 10) for s in asked]
        assert host(X, step=3)["y"].tolist() == [3.0]
        with pytest.raises(ConfigError, match=r"holds the versions \[3, 10, 20\], not 4"):
            host.forward(X, step=4)
        with pytest.raises(ConfigError, match="not 4"):
            host(X, step=4)
        with pytest.raises(ConfigError, match="holds version 3 already"):
            host.add_version(3, Linear())
        await host.publish_weights(weights(11.0))
        assert host.steps == [3, 11, 20]
        assert await host.forward(X, step=3, with_step=True) == ({"y": [3.0]}, 3)
        assert host.stats[3]["samples"] == 4
        assert host.numbers()["samples_total"] == sum(s["samples"] for s in host.stats.values()) == 7
        assert host.numbers()["versions"] == 3
        await host.close()

    run(main)


def test_dropping_a_version(run):
    async def main():
        engine = Linear(3.0)
        host = ModelHost("m", Linear(10.0), step=10, inline_below=0.0)
        host.add_version(3, engine)
        with pytest.raises(ConfigError, match=r"holds the versions \[3, 10\], not 4"):
            host.drop_version(4)
        await host.forward(X, step=3)
        engine.gate.clear()
        engine.started.clear()
        running = host.forward(X, step=3)
        await until(engine.started.is_set)
        waiting = host.forward(X, step=3)
        before = host.numbers()["samples_total"]
        dropping = host.drop_version(3)
        assert host.steps == [10]
        assert host.numbers()["samples_total"] == before  # counters do not go down
        with pytest.raises(ConfigError, match="not 3"):
            host.forward(X, step=3)
        with pytest.raises(BrayError, match="closed while this caller waited"):
            await waiting
        assert not dropping.done()
        engine.gate.set()
        assert (await running)["y"].tolist() == [3.0]
        await dropping
        assert (await host.forward(X))["y"].tolist() == [10.0]
        with pytest.raises(ConfigError, match="holds version 10 only"):
            host.drop_version(10)
        await host.close()

    run(main)


def test_dropping_the_current_version_makes_the_newest_other_one_current(run):
    async def main():
        host = ModelHost("m", Linear(1.0), step=1)
        await host.forward(X)
        host.add_version(5, Linear(5.0))
        host.add_version(3, Linear(3.0))
        await asyncio.to_thread(lambda: host.drop_version(1).result(LIMIT_S))  # from a thread
        assert (host.step, host.steps) == (5, [3, 5])
        assert await host.forward(X, with_step=True) == ({"y": [5.0]}, 5)
        assert await host.publish_weights(weights(6.0)) == 6
        assert host.steps == [3, 6]
        await host.drop_version(3)  # never asked: it has no loop to end in
        await host.close()

    run(main)


def test_close_ends_every_version_and_publishing(run):
    before = set(threading.enumerate())

    async def main():
        engine = Linear()
        host = ModelHost("m", engine, inline_below=0.0, make_engine=lambda w: Linear())
        host.add_version(5, Linear())
        await host.forward(X, step=5)
        await host.publish_weights(weights(1.0))
        await host.close()
        for step in (None, 5):
            with pytest.raises(BrayError, match="closed"):
                host.forward(X, step=step)
            with pytest.raises(BrayError, match="closed"):
                host(X, step=step)
        with pytest.raises(BrayError, match="closed and takes no more weights"):
            host.publish_weights(weights(1.0))
        await until(
            lambda: (
                not [
                    t
                    for t in set(threading.enumerate()) - before
                    if t.name.startswith(("bray-batcher", "bray-publish"))
                ]
            )
        )

    run(main)


# --- over ONNX Runtime ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["weights are inputs", "weights are constants"])
def test_over_an_onnx_engine(run, way):
    import torch

    from bray.inference.export import export_onnx
    from bray.inference.onnx_engine import OnnxEngine

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 16), torch.nn.Linear(16, 3)

        def forward(self, obs):
            return {"dist": self.second(torch.tanh(self.first(obs["x"]))), "value": obs["x"].sum(-1)}

    obs = {"x": np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)}
    nets = [Net(), Net()]
    states = [{k: v.detach().numpy() for k, v in net.state_dict().items()} for net in nets]
    expected = [net({"x": torch.from_numpy(obs["x"])})["dist"].detach().numpy() for net in nets]
    graph = OnnxEngine(export_onnx(nets[0], [obs]))
    if way == "weights are inputs":
        graph.set_weights(states[0])
        host = ModelHost("m", graph, weights=states[0], max_batch_size=16)
    else:
        host = ModelHost("m", graph.with_weights(states[0]), weights=states[0], make_engine=graph.with_weights)

    async def ask():
        rows = await asyncio.gather(*[host.forward({"x": x}) for x in obs["x"]])
        whole = await host.forward(obs, batch=True)
        np.testing.assert_allclose(whole["value"], obs["x"].sum(-1), atol=1e-5)
        np.testing.assert_allclose([row["dist"] for row in rows], whole["dist"], atol=1e-6)
        return whole["dist"]

    async def main():
        np.testing.assert_allclose(await ask(), expected[0], atol=1e-5)
        with pytest.raises(CheckpointError, match=r"second.bias: expected \[3\], got none"):
            host.publish_weights({k: v for k, v in states[1].items() if k != "second.bias"})
        np.testing.assert_allclose(await ask(), expected[0], atol=1e-5)
        await host.publish_weights(states[1])
        np.testing.assert_allclose(await ask(), expected[1], atol=1e-5)
        bad = await asyncio.gather(
            host.forward({"x": np.zeros(5, np.float32)}), host.forward({"x": obs["x"][0]}), return_exceptions=True
        )
        assert isinstance(bad[0], DataError)
        np.testing.assert_allclose(bad[1]["dist"], expected[1][0], atol=1e-5)
        with pytest.raises(DataError, match="expected float32"):
            await host.forward({"x": np.zeros(5, np.float32)})  # alone: the engine says it
        await host.close()

    run(main)


# --- FakeModel --------------------------------------------------------------------------------------------------------

OUTPUTS = {
    "dist": ((4,), "float32"),
    "value": ((), "float64"),
    "action": ((2, 3), "int64"),
    "legal": ((5,), "bool"),
    "state": {"h": ((6,), "float16")},
}


def test_a_fake_model_has_the_asked_for_outputs_and_answers_the_same_whatever_the_batch():
    obs = {"a": np.random.default_rng(0).random((7, 3)), "b": np.arange(14).reshape(7, 2)}
    out = FakeModel(OUTPUTS).forward(obs)
    kinds = {k: (v.shape, v.dtype.name) for k, v in {**out, "state": out["state"]["h"]}.items()}
    expected = {**OUTPUTS, "state": OUTPUTS["state"]["h"]}
    assert kinds == {k: ((7, *shape), dtype) for k, (shape, dtype) in expected.items()}
    again = FakeModel(OUTPUTS)
    for i in range(7):
        one = again.forward({k: v[i : i + 1] for k, v in obs.items()})
        assert all((one[k][0] == out[k][i]).all() for k in ("dist", "value", "action", "legal"))
    assert len(np.unique(out["value"])) > 3  # they depend on the sample
    assert ((out["action"] >= 0) & (out["action"] < 10)).all()
    assert (FakeModel(OUTPUTS, seed=1).forward(obs)["dist"] != out["dist"]).any()
    again.set_weights({"w": np.ones(2)})
    changed = again.forward(obs)["dist"]
    assert (changed != out["dist"]).any()
    again.set_weights({"w": np.ones(2)})
    assert (again.forward(obs)["dist"] == changed).all()


def test_a_fake_model_refuses_what_is_no_batch():
    for args in ((), (np.float32(1),), (np.zeros((2, 1)), np.zeros((3, 1))), (np.zeros((0, 2)),)):
        with pytest.raises(DataError, match="same B >= 1"):
            FakeModel(OUTPUTS).forward(*args)


def test_a_fake_model_takes_its_time_and_fails_when_asked():
    model = FakeModel(OUTPUTS, latency_s=0.02, per_sample_s=0.01, fail_every=3)
    start = time.perf_counter()
    model.forward(np.zeros((3, 1)))
    assert time.perf_counter() - start >= 0.05
    model.forward(np.zeros((1, 1)))
    with pytest.raises(RuntimeError, match="forward 3, as fail_every=3"):
        model.forward(np.zeros((1, 1)))
    model.forward(np.zeros((1, 1)))


def test_callers_of_a_failing_fake_model_get_its_error(run):
    async def main():
        host = ModelHost("m", FakeModel(OUTPUTS, latency_s=0.001, fail_every=2))
        assert (await host.forward(X))["dist"].shape == (4,)
        for e in await asyncio.gather(host.forward(X), host.forward(X), return_exceptions=True):
            with pytest.raises(RuntimeError, match="fail_every=2"):
                raise e
        host.publish_weights({"w": np.ones(1)})
        assert (await host.forward(X, with_step=True))[1] == 1
        await host.close()

    run(main)


def test_a_sleeping_model_stays_out_of_the_loop(run):
    """Sleeping costs no processor time, but it would block the loop all the same."""
    threads = []

    async def main():
        model = FakeModel(OUTPUTS, latency_s=0.01)

        def forward(x):
            threads.append(threading.get_ident())
            return model.forward(x)

        b = Batcher(forward)
        for _ in range(10):
            await b.submit(X)
        await b.close()

    run(main)
    assert threading.get_ident() not in threads


def test_weights_that_nobody_writes_into_are_not_copied():
    mine = np.arange(6, dtype=np.float32)
    kept = lasting(mine)
    assert kept is not mine
    assert not kept.flags.writeable
    assert lasting(kept) is kept
    from_store = np.frombuffer(mine.tobytes(), np.float32).reshape(2, 3)
    assert lasting(from_store) is from_store
    view = mine[:]
    view.flags.writeable = False
    assert lasting(view) is not view  # `mine` may be written to
    assert lasting(kept[::2]).flags.c_contiguous
    mine[:] = 7
    assert kept.tolist() == [0, 1, 2, 3, 4, 5]
