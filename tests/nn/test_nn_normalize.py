"""RunningNorm: statistics equal numpy's over all rows, however they arrive."""

import numpy as np
import pytest
import torch

from bray.nn import ActorCritic, ModelConfig, RunningNorm, make_encoder, update_normalizers
from bray.nn.encoders import ImageInput, blocks
from bray.spec import EnvSpec, Space

BOX = Space("box", (3,), "float32")
DISCRETE = Space("discrete", (), "int64", n=(2,), start=(0,))


def test_statistics_equal_numpy_over_all_rows():
    rng = np.random.default_rng(0)
    rows = rng.normal([1e4, -2.0, 0.0], [1.0, 3.0, 0.1], (1000, 3)).astype(np.float32)
    norm = RunningNorm((3,))
    for chunk in np.split(rows, [1, 10, 400]):
        norm.update(chunk)
    assert norm.count.item() == 1000
    np.testing.assert_allclose(norm.mean, rows.astype(np.float64).mean(0), rtol=1e-12)
    np.testing.assert_allclose(norm.var, rows.astype(np.float64).var(0), rtol=1e-9)
    want = (rows - rows.mean(0, dtype=np.float64)) / np.sqrt(rows.var(0, dtype=np.float64) + 1e-8)
    np.testing.assert_allclose(norm(torch.from_numpy(rows)), want, atol=1e-3)


def test_merging_workers_equals_one_that_saw_all():
    rng = np.random.default_rng(1)
    rows = rng.normal(5.0, 2.0, (300, 2))
    one, a, b = RunningNorm((2,)), RunningNorm((2,)), RunningNorm((2,))
    one.update(rows)
    a.update(rows[:100])
    b.update(rows[100:])
    a.merge(b.mean, b.var, b.count)
    torch.testing.assert_close(a.mean, one.mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(a.var, one.var, rtol=1e-12, atol=0)
    assert a.count == one.count


def test_rows_of_weight_zero_do_not_count():
    rows = torch.tensor([[1.0], [2.0], [100.0], [3.0]])
    norm = RunningNorm((1,))
    norm.update(rows, torch.tensor([True, True, False, True]))
    assert norm.mean.item() == pytest.approx(2.0)
    assert norm.var.item() == pytest.approx(2 / 3)
    assert norm.count.item() == 3
    before = norm.mean.clone()
    norm.update(rows, torch.zeros(4))
    assert torch.equal(norm.mean, before)
    with pytest.raises(ValueError, match="one entry for each of 4 rows, got 3"):
        norm.update(rows, torch.ones(3))


def test_before_the_first_update_nothing_changes_and_values_are_clipped():
    norm = RunningNorm((2,), clip=5.0)
    assert norm(torch.tensor([[0.5, -100.0]])).tolist() == [[0.5, -5.0]]


def test_it_is_the_first_layer_of_a_model_and_travels_with_its_weights():
    space = Space(
        "dict",
        parts=(BOX, Space("box", (2,), "int64", 0, 9), Space("dict", parts=(BOX,), names=("in",)), DISCRETE),
        names=("a", "b", "c", "d"),
    )
    spec = EnvSpec("x", space, DISCRETE)
    model = ActorCritic(spec, ModelConfig(normalize_observations=True))
    norms = [m for m in model.modules() if isinstance(m, RunningNorm)]
    assert len(norms) == 4  # in both encoders: the float vectors a and c/in; neither integers nor choices
    rng = np.random.default_rng(0)
    obs = {
        "a": rng.normal(3, 2, (4, 5, 3)).astype(np.float32),
        "b": rng.integers(0, 9, (4, 5, 2)),
        "c": {"in": rng.normal(-3, 1, (4, 5, 3)).astype(np.float32)},
        "d": rng.integers(0, 2, (4, 5)),
    }
    dead = np.zeros((4, 5), bool)
    dead[0] = True
    update_normalizers(model, obs, ~dead)
    np.testing.assert_allclose(norms[0].mean, obs["a"][1:].reshape(-1, 3).mean(0), rtol=1e-5)
    np.testing.assert_allclose(norms[1].mean, obs["c"]["in"][1:].reshape(-1, 3).mean(0), rtol=1e-5)
    other = ActorCritic(spec, ModelConfig(normalize_observations=True))
    other.load_state_dict(model.state_dict())
    batch = {
        "a": torch.from_numpy(obs["a"][0]),
        "b": torch.from_numpy(obs["b"][0]),
        "c": {"in": torch.from_numpy(obs["c"]["in"][0])},
        "d": torch.from_numpy(obs["d"][0]),
    }
    before = ActorCritic(spec, ModelConfig(normalize_observations=True))
    weights = dict(model.named_parameters())
    before.load_state_dict({k: weights.get(k, v) for k, v in before.state_dict().items()})
    assert torch.equal(model(batch)["dist"], other(batch)["dist"])
    assert not torch.allclose(model(batch)["value"], before(batch)["value"])


def test_pictures_are_normalised_pixel_by_pixel_and_clipped_at_5():
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (100, 4, 84, 84), dtype=np.uint8)  # more than is taken in at a time
    rows[:, :, :40] = 87  # what never changes
    rows[7, 0, 0, 0] = 88  # and once does
    stem = ImageInput(Space("box", (4, 84, 84), "uint8", 0, 255), ModelConfig(normalize_observations=True))
    stem.norm.update(rows, np.ones(100, np.float32))
    mean, std = rows.mean(0, dtype=np.float64), rows.std(0, dtype=np.float64)
    np.testing.assert_allclose(stem.norm.mean, mean, rtol=1e-12)
    want = np.clip((rows - mean) / np.sqrt(std**2 + 1e-8), -5, 5)
    got = stem(torch.from_numpy(rows)).numpy()
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert got[7, 0, 0, 0] == 5.0
    assert not got[:, 1:, :40].any()
    in_blocks = stem(torch.from_numpy(rows[:3]), block=4)  # as GPUs read it
    torch.testing.assert_close(in_blocks, blocks(torch.from_numpy(got[:3]), 4))


CONV = [{"layer_type": "conv2d", "layer_dim": 4, "kernel_size": 3}, {"layer_type": "flatten"}]


@pytest.mark.parametrize(
    ("shape", "more"),
    [
        ((3, 16, 16), {}),
        ((16, 16, 3), {"dim": 8}),
        ((16, 16), {}),
        ((4, 16, 16, 3), {}),
        ((3, 16, 16), {"layers": CONV}),
    ],
)
def test_every_network_of_a_picture_sees_it_normalised(shape, more):
    space = Space("box", shape, "uint8", 0, 255)
    encoder = make_encoder(space, ModelConfig(normalize_observations=True, **more))
    rng = np.random.default_rng(0)
    rows = rng.normal(100.0, 20.0, (2, 30, *shape)).clip(0, 255).astype(np.uint8)
    dead = rng.random((2, 30)) < 0.3
    rows[dead] = 255
    update_normalizers(encoder, rows, ~dead)
    brighter = (rows // 2 + 60).astype(np.uint8)  # half the contrast, on a lighter ground
    other = make_encoder(space, ModelConfig(normalize_observations=True, **more))
    other.load_state_dict({**other.state_dict(), **dict(encoder.named_parameters())})
    update_normalizers(other, brighter, ~dead)
    seen, same = (torch.from_numpy(x[~dead]) for x in (rows, brighter))
    torch.testing.assert_close(encoder(seen), other(same), atol=0.2, rtol=0.05)
    plain = make_encoder(space, ModelConfig(**more))
    plain.load_state_dict(dict(encoder.named_parameters()))
    assert not torch.allclose(plain(seen), encoder(seen), atol=0.2)


def test_pictures_of_yes_and_no_are_normalised():
    space = Space("box", (10, 10, 4), "bool", 0, 1)
    encoder = make_encoder(space, ModelConfig(normalize_observations=True))
    rows = np.random.default_rng(0).random((50, 10, 10, 4)) < 0.1
    update_normalizers(encoder, rows)
    (norm,) = (m for m in encoder.modules() if isinstance(m, RunningNorm))
    np.testing.assert_allclose(norm.mean, rows.mean(0), rtol=1e-12)
    assert torch.isfinite(encoder(torch.from_numpy(rows))).all()


def test_before_the_first_statistics_bytes_are_told_apart():
    stem = ImageInput(Space("box", (3, 8, 8), "uint8", 0, 255), ModelConfig(normalize_observations=True))
    x = torch.arange(192, dtype=torch.uint8).reshape(1, 3, 8, 8)
    assert len(stem(x).unique()) == 192
    assert stem(x).abs().max() < 2.0
