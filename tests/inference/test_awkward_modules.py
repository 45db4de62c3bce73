"""Models that are hard to record. Recorded, each must do what it does eagerly, for acting and for learning, results and
side effects; one that cannot be recorded runs eagerly, and one warning says why."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

from bray.capture import capture
from bray.inference.export import export_onnx
from bray.inference.onnx_engine import OnnxEngine
from bray.inference.torch_engine import TorchEngine
from bray.optim import Optimizer

pytestmark = pytest.mark.optimizes

IN, OUT = 4, 3
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(IN, OUT)


class Dropout(Base):
    def forward(self, x):
        return {"y": nn.functional.dropout(self.dense(x), 0.5, self.training)}


class BatchNorm(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(OUT)

    def forward(self, x):
        return {"y": self.norm(self.dense(x))}


class Branch(Base):
    def forward(self, x):
        y = self.dense(x)
        return {"y": y if x.mean() > 0 else -2 * y}


class ThroughNumpy(Base):
    def forward(self, x):
        return {"y": self.dense(x) * torch.from_numpy(np.tanh(x.detach().cpu().numpy().mean(1, keepdims=True))).to(x)}


class NumpyBranch(Base):
    """The branch that is taken first is right for most inputs."""

    def forward(self, x):
        y = self.dense(x)
        return {"y": y if np.asarray(x.detach().cpu()).mean() > -0.3 else -2 * y}


class PythonCounter(Base):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return {"y": self.dense(x) / self.calls}


class QuietCounter(Base):
    """Its outputs tell nothing of what changes, until the third call."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(len(x))
        return {"y": self.dense(x) * (2.0 if len(self.seen) > 3 else 1.0)}


class InPlaceBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(IN))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls.add_(1)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return {"y": self.dense(x - self.mean) / self.calls}


class ReboundBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(IN))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return {"y": self.dense(x - self.mean)}


class Noise(Base):
    def forward(self, x):
        return {
            "y": self.dense(x) + torch.randn(OUT, device=x.device) * torch.rand_like(torch.ones(OUT, device=x.device))
        }


class NoiseThroughNumpy(Base):
    def forward(self, x):
        return {"y": self.dense(x) + torch.as_tensor(np.random.standard_normal(OUT)).to(x)}


class NoiseFromAGenerator(Base):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, x):
        return {"y": self.dense(x) + float(self.rng.standard_normal())}


class ShapesAsValues(Base):
    def forward(self, x):
        return {"y": self.dense(x) / x.shape[0] + torch.arange(x.shape[0], device=x.device)[:, None]}


class DataShapesAsValues(Base):
    def forward(self, x):
        return {"y": self.dense(x) / (1 + x[x > 0].shape[0])}


class ViewOfInput(Base):
    def forward(self, x):
        return {"y": self.dense(x), "same": x, "view": x[:, 1:], "turned": x.t()}


class MadeTensors(Base):
    def forward(self, x):
        total = torch.tensor(0.25, device=x.device)
        total += x.detach().abs().mean()  # a new tensor at each call, changed in place
        return {"y": self.dense(x) * torch.tensor(0.5) + total}


class Constants(Base):
    def forward(self, x):
        return {"y": self.dense(x) * torch.tensor(0.5) + torch.tensor([1.0, 2.0, 3.0], device=x.device)}


class SetUpAtFirstCall(Base):
    def __init__(self):
        super().__init__()
        self.scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale = torch.linspace(1.0, 2.0, OUT, device=x.device)
        return {"y": self.dense(x) * self.scale}


RECORDED = [
    Dropout, BatchNorm, InPlaceBuffer, Noise, ShapesAsValues, ViewOfInput, Constants, SetUpAtFirstCall,
]  # fmt: skip
REFUSED = {
    Branch: "reads the value",
    ThroughNumpy: "reads the value of a tensor (Tensor.numpy)",
    NumpyBranch: "reads the value of a tensor (Tensor.__array__)",
    PythonCounter: "each call changes PythonCounter.calls",
    QuietCounter: "each call changes QuietCounter.seen",
    ReboundBuffer: "each call changes ReboundBuffer.mean",
    NoiseThroughNumpy: "each call changes numpy.random",
    NoiseFromAGenerator: "each call changes NoiseFromAGenerator.rng",
    DataShapesAsValues: "reads the value",
    MadeTensors: "differ",
}
ALL = [*RECORDED, *REFUSED]


def make(cls, device="cpu"):
    torch.manual_seed(0)
    return cls().to(device)


def inputs(rows, n=8):
    """Some alike, some far from each other, the first one all zeros."""
    rng = np.random.default_rng(rows)
    found = [rng.normal(m, 1.0, (rows, IN)).astype(np.float32) for m in np.linspace(-2.0, 2.0, n - 2)]
    return [np.zeros((rows, IN), np.float32), *found, found[0].copy()]


def state_of(model):
    plain = {k: v for k, v in vars(model).items() if isinstance(v, (int, float, str, list))}
    return plain, {k: v.clone() for k, v in model.state_dict().items()}


def assert_same_state(a, b):
    (plain_a, tensors_a), (plain_b, tensors_b) = state_of(a), state_of(b)
    assert plain_a == plain_b
    torch.testing.assert_close(tensors_a, tensors_b, rtol=1e-5, atol=1e-6)


@pytest.fixture
def warnings(caplog):
    with caplog.at_level(logging.WARNING, "bray"):
        yield caplog


def seed():
    torch.manual_seed(7)
    np.random.seed(7)


def later(device):
    """What is drawn next shows what was drawn before."""
    return [torch.rand(2), torch.rand(2, device=device), np.random.rand(2)]


def expect(warnings, cls, recorded):
    assert recorded == (cls in RECORDED), [w.getMessage() for w in warnings.records]
    assert len(warnings.records) == (0 if recorded else 1)
    if not recorded:
        assert REFUSED[cls] in warnings.records[0].getMessage()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("cls", ALL)
def test_acting_recorded_equals_acting_eagerly(cls, rows, device, warnings):
    models, answers = [make(cls, device), make(cls, device)], []
    for model, record in zip(models, (True, False), strict=True):
        engine = TorchEngine(model, record=record)
        seed()
        answers.append([engine.forward(x.copy()) for x in inputs(rows)] + later(device))
        assert all(m.training for m in model.modules())
        if record:
            expect(warnings, cls, engine.is_recorded)
    for recorded, eager in zip(*answers, strict=True):
        torch.testing.assert_close(recorded, eager, rtol=1e-5, atol=1e-6)
    assert_same_state(*models)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", ALL)
def test_learning_recorded_equals_learning_eagerly(cls, device, warnings):
    models, answers = [make(cls, device), make(cls, device)], []
    for model, record in zip(models, (True, False), strict=True):
        optimizer = Optimizer(model.parameters(), 1e-2, max_grad_norm=0.5)

        def step(batch, model=model, optimizer=optimizer):
            loss = (model(batch["x"])["y"] - batch["target"]).square().mean()
            return {"loss": loss.detach(), "norm": optimizer.step(loss)}

        captured = capture(step, enabled=record)
        seed()
        target = torch.linspace(-1, 1, 5 * OUT, device=device).reshape(5, OUT)
        made = [captured({"x": torch.tensor(x, device=device), "target": target}) for x in inputs(5)]
        answers.append([*made, *later(device), optimizer.flat, optimizer.m, optimizer.steps])
        if record:
            expect(warnings, cls, captured.recordings > 0)
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-5)
    assert_same_state(*models)


@pytest.mark.parametrize("cls", [c for c in RECORDED if c not in (Noise, InPlaceBuffer)])
def test_evaluation_answers_the_same_twice(cls):
    engine = TorchEngine(make(cls))
    for x in inputs(4):
        torch.testing.assert_close(engine.forward(x.copy()), engine.forward(x.copy()), rtol=0, atol=0)


class NormAndDropout(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(IN), self.dense, nn.Dropout(0.5), nn.Tanh())
        self.frozen = nn.BatchNorm1d(OUT).eval()

    def forward(self, x):
        return {"y": self.frozen(self.net(x))}


def test_acting_is_in_eval_mode_as_exported_and_learning_in_train_mode():
    model, x = make(NormAndDropout), inputs(16)[2] * 3 + 5
    optimizer = Optimizer(model.parameters(), 1e-2)
    engines = [TorchEngine(model), TorchEngine(model, record=False)]
    engines[0].forward(x)  # the recording is made before anything is learnt

    def step(x):
        loss = model(x)["y"].square().mean()
        optimizer.step(loss)
        return {"loss": loss.detach()}

    captured = capture(step)
    losses = [captured(torch.from_numpy(x))["loss"].item() for _ in range(20)]
    norm = model.net[0]
    assert norm.num_batches_tracked.item() == 20
    expected = x.mean(0) * (1 - 0.9**20)  # batch statistics, moved into the running ones
    np.testing.assert_allclose(norm.running_mean.numpy(), expected, rtol=1e-4)
    assert len(set(losses)) == 20  # dropout
    assert model.frozen.num_batches_tracked.item() == 0

    before = state_of(model)[1]
    graph = OnnxEngine(export_onnx(model, [x]))
    graph.set_weights({k: v.numpy() for k, v in model.state_dict().items()})
    want = graph.forward(x)["y"]
    for engine in engines:
        for _ in range(2):
            np.testing.assert_allclose(engine.forward(x)["y"], want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state_of(model)[1], before, rtol=0, atol=0)
    assert [m.training for m in model.modules()] == [m is not model.frozen for m in model.modules()]


class LooksUpThroughATable(Base):
    """What it reads of its whole numbers by stealth (as an extension in C may) is wrong only for other whole
    numbers."""

    def __init__(self):
        super().__init__()
        self.table = torch.arange(10.0)

    def forward(self, kind):
        with torch._C.DisableTorchFunction():
            first = int(kind.numpy().ravel()[0])
        return {"y": self.table[kind] + float(first)}


@pytest.mark.parametrize("rows", [1, 3])
def test_an_input_that_had_one_value_is_tried_when_it_has_another(rows, warnings):
    model = make(LooksUpThroughATable)
    engine, eager = TorchEngine(model), TorchEngine(model, record=False)
    for i, kind in enumerate([2, 2, 2, 5, 2, 9]):
        x = np.full(rows, kind)
        np.testing.assert_array_equal(engine.forward(x)["y"], eager.forward(x)["y"])
        assert engine.is_recorded == (i < 3)
    assert len(warnings.records) == 1
    assert "differ" in warnings.records[0].getMessage()


def test_a_right_lookup_stays_recorded(warnings):
    table = torch.arange(10.0)
    recorded = capture(lambda i, flag: torch.where(flag, table[i], -table[i]))
    for i in (2, 2, 5, 9):
        assert recorded(torch.tensor([i]), torch.tensor([True])).tolist() == [i]
        assert recorded(torch.tensor([i]), torch.tensor([False])).tolist() == [-i]
    assert recorded.recordings == 1
    assert not warnings.records


def test_a_wrong_input_is_no_reason_to_give_up_a_recording(warnings):
    table = torch.arange(10.0)
    recorded = capture(lambda i: table[i] * 2)
    assert recorded(torch.tensor([3])).item() == 6
    with pytest.raises(IndexError):
        recorded(torch.tensor([10]))
    assert recorded(torch.tensor([9])).item() == 18
    assert recorded.recordings == 1
    assert not warnings.records


def test_the_reason_names_the_part_of_a_model(warnings):
    model = nn.Sequential(nn.Tanh(), nn.Sequential(PythonCounter()))
    TorchEngine(model).forward(np.zeros((2, IN), np.float32))
    assert "each call changes Sequential.1.0.calls" in warnings.text


class Ticking:
    def __init__(self):
        self.count = 0

    def step(self, x):
        self.count += 1
        return x + 1


def test_a_method_that_counts_its_calls_goes_on_counting(warnings):
    ticking = Ticking()
    captured = capture(ticking.step)
    for _ in range(3):
        captured(torch.zeros(2))
        captured(torch.zeros(3))
    assert ticking.count == 6
    assert len(warnings.records) == 1
    assert "each call changes Ticking.count" in warnings.records[0].getMessage()
