"""PopArt: statistics by a float64 loop, outputs that an update does not change, and targets of any scale."""

import numpy as np
import pytest
import torch

from bray.capture import capture
from bray.nn import PopArt


def slow_statistics(batches, step, least):
    """Mean and standard deviation of each output after all batches: weighted sums with the weights written out."""
    outputs = batches[0].shape[1]
    result = []
    for k in range(outputs):
        share, first, second = 0.0, 0.0, 0.0
        for i, batch in enumerate(batches):
            weight = step * (1.0 - step) ** (len(batches) - 1 - i)
            share += weight
            first += weight * sum(batch[:, k]) / len(batch)
            second += weight * sum(batch[:, k] ** 2) / len(batch)
        mean = first / share
        result.append((mean, max(max(second / share - mean**2, 0.0) ** 0.5, least)))
    return np.array(result).T


@pytest.mark.parametrize("step", [0.01, 0.3, 1.0])
def test_statistics_equal_a_loop(step):
    rng = np.random.default_rng(0)
    batches = [rng.normal(1000.0, 50.0, (7, 2)) for _ in range(5)]
    popart = PopArt(3, 2, step=step)
    for batch in batches:
        popart.update(batch)
    mean, std = slow_statistics(batches, step, 1e-4)
    np.testing.assert_allclose(popart.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(popart.std, std, rtol=1e-6)


def test_an_update_keeps_the_outputs():
    torch.manual_seed(0)
    popart = PopArt(8, 3, step=0.2).double()
    x = torch.randn(16, 8, dtype=torch.float64)
    popart.update(torch.tensor([[1.0, 2.0, 3.0], [2.0, 2.5, 9.0]]))  # the first one sets the scale
    before = popart(x).detach()
    for scale in (1.0, 1e4, 1e-2):
        popart.update(torch.randn(32, 3) * scale + scale)
        torch.testing.assert_close(popart(x), before, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(popart.layer(x), before), "the layer below has moved instead"


def test_by_hand():
    """Targets 1 and 3: mean 2, standard deviation 1; 10 becomes 8 of them."""
    popart = PopArt(1)
    popart.update(torch.tensor([1.0, 3.0]))
    assert popart.mean.item() == 2.0
    assert popart.std.item() == 1.0
    assert popart.normalize(torch.tensor([10.0])).tolist() == [8.0]
    assert popart.denormalize(torch.tensor([8.0])).tolist() == [10.0]


def test_rows_of_weight_zero_do_not_count_and_an_output_without_targets_stays():
    popart, same = PopArt(2, 2), PopArt(2, 2)
    target = torch.tensor([[1.0, 7.0], [5.0, 7.0], [900.0, 7.0]])
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    popart.update(target, weight)
    same.update(target[:2, :1].expand(2, 2))
    assert popart.mean.tolist() == [same.mean[0].item(), 0.0]
    assert popart.std.tolist() == [same.std[0].item(), 1.0]


def test_a_constant_target_has_the_least_deviation():
    popart = PopArt(2, least=0.5)
    popart.update(torch.full((4,), 3.0))
    assert popart.std.item() == 0.5


def test_it_learns_targets_of_any_scale_with_one_learning_rate():
    torch.manual_seed(0)
    x = torch.randn(256, 4)
    for scale in (1e-2, 1e4):
        target = scale * (x @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + 2.0)
        popart = PopArt(4, step=0.1)
        optimizer = torch.optim.Adam(popart.parameters(), 0.05)
        for _ in range(150):
            popart.update(target)
            loss = (popart.normalize(popart(x).squeeze(1)) - popart.normalize(target)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss.item() < 1e-3, f"of the variance, at scale {scale}"


@pytest.mark.optimizes
def test_an_update_can_be_recorded():
    popart, eager = PopArt(2), PopArt(2)
    eager.load_state_dict(popart.state_dict())

    def update(target):
        popart.update(target)
        return popart.mean + 0

    recorded = capture(update)
    for target in (torch.randn(5), torch.randn(5) * 9, torch.ones(5)):
        recorded(target), eager.update(target)
        for name, value in eager.state_dict().items():
            torch.testing.assert_close(popart.state_dict()[name], value, msg=name)
    assert recorded.recordings == 1


@pytest.mark.parametrize("options", [{"step": 0.0}, {"step": 1.5}, {"least": 0.0}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match="PopArt needs"):
        PopArt(2, **options)
