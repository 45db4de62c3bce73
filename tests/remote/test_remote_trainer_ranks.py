"""Two ranks over gloo, and once four, in processes of their own, without a cluster: every test looks at what one run
of all scenarios has left."""

import os
import pickle
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from bray.act import Clock
from bray.data.piece import side_by_side
from bray.envs.fork_server import ForkedProcess
from bray.errors import ConfigError, Unreachable
from bray.remote.trainer.worker import is_worth_another_try
from bray.train import shared_mean
from bray.train.driver import Hook
from bray.train.ranks import DistributedLearner, RankLost, Ranks, average_gradients, is_rank_lost
from tests.trainer_for_tests import (
    Given,
    MemoryBuffer,
    MemoryModel,
    Regression,
    ToyRollouts,
    batch_of,
    drive_of,
    learner_drive,
    net,
    played,
    same,
    setup_of,
    toy_piece,
    transitions,
    weights,
)

STEPS = 15


def recorder(out):
    return Hook("after_step", lambda drive: out.append(weights(drive.model)), 1)


class Part(Regression):
    """Batches of two kinds, each of which trains another part of the model."""

    def loss(self, replay, step):
        side = int(replay["side"][0])
        return (self.model(replay["x"])[:, side] - replay["y"][:, side]).square().mean()


def sided(i):
    return {**batch_of(i), "side": np.full(4, i % 2)}


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)])

    def forward(self, x):
        return torch.cat([h(x) for h in self.heads[:2]], -1)


class OneHead(Part):
    """A rank's batch touches one head only: the other has no gradient there; the third has one nowhere."""

    def loss(self, replay, step):
        side = int(replay["side"][0])
        return (self.model.heads[side](replay["x"])[:, 0] - replay["y"][:, side]).square().mean()


# --- scenarios: each runs on both ranks and returns what is looked at -------------------------------------------------


def equal_steps(ranks, path):
    seen = []
    buffer = MemoryBuffer(lambda i: batch_of(2 * i + ranks.rank))
    remote = MemoryModel(net(seed=ranks.rank))  # the first rank's weights count
    summary = drive_of(buffers=[buffer], remote=remote, ranks=ranks, num_steps=STEPS, hooks=[recorder(seen)]).train()
    return {"seen": seen, "summary": summary, "published": remote.published}


def one_head_each(ranks, path):
    buffer = MemoryBuffer(lambda i: sided(2 * i + ranks.rank))
    drive = drive_of(OneHead, [buffer], MemoryModel(TwoHeads()), ranks=ranks, num_steps=STEPS)
    drive.train()
    return weights(drive.model)


def mean_gradients(ranks, path):
    model = net()
    model(torch.full((2, 3), 1.0 + ranks.rank)).sum().backward()
    before = [p.grad.clone().numpy() for p in model.parameters()]
    average_gradients(list(model.parameters()), ranks)
    return before, [p.grad.numpy() for p in model.parameters()]


def numbers(ranks, path):
    mine = bytes([ranks.rank]) * (3 + ranks.rank)
    return (
        ranks.all_reduce_sum(1, ranks.rank),
        ranks.all_reduce_min(5 - ranks.rank),
        ranks.broadcast(mine),
        ranks.gather(mine),
        ranks.broadcast(b""),
    )


def large_means(ranks, path):
    """Of arrays for which the ranks share memory; then of one for which there is none."""
    count = 3 * shared_mean.SMALLEST + 5
    rng = np.random.default_rng(ranks.rank)  # the second one needs new memory, the others take turns in it
    mine = [rng.standard_normal(count + i).astype(np.float32) for i in (0, 1, 0, 1, 0)]
    given = [torch.from_numpy(x) for x in mine]
    shared_mean.FOLDER = path
    means = [ranks.mean(x).numpy() for x in given]
    is_shared = shared_mean.SharedMean(ranks).mean(given[0]) is not None
    if ranks.first:
        shared_mean.FOLDER = f"{path}/no-such-folder"
    without = shared_mean.SharedMean(ranks)
    found = [without.mean(given[0]), without.mean(given[2])]
    kept = all(np.array_equal(x, y.numpy()) for x, y in zip(mine, given, strict=True))
    left = list(Path(path).glob("bray-ranks-*"))
    return mine, means, (is_shared, found, kept, left)


def uneven_speed(ranks, path):
    """The second rank is slow, and has fewer batches."""

    def make(i):
        if ranks.rank == 1:
            time.sleep(0.02)
        return batch_of(i) if ranks.rank == 0 or i < 6 else None

    return drive_of(buffers=[MemoryBuffer(make, end=True)], ranks=ranks, num_steps=STEPS).train()


def stopped_by_one(ranks, path):
    def stop(drive):
        if drive.ranks.rank == 1 and drive.steps == 4:
            drive.stop()

    return drive_of(ranks=ranks, hooks=[Hook("after_step", stop)]).train()


def resumed(ranks, path):
    def run(name, first, steps, seed):
        buffer = MemoryBuffer(lambda i: batch_of(2 * (first + i) + ranks.rank))
        remote = MemoryModel(net(dropout=0.5), step=first)
        torch.manual_seed(seed + ranks.rank)
        drive = drive_of(
            buffers=[buffer], remote=remote, ranks=ranks, num_steps=steps, prefetch_size=0, path=Path(path) / name
        )
        drive.train()
        return drive

    whole = run("whole", 0, 10, 3)
    run("half", 0, 6, 3)
    rest = run("half", 6, 10, 77)
    return weights(whole.model), weights(rest.model), rest.resumed


def ppo(ranks, path):
    """`target_kl` makes the ranks want different numbers of steps."""
    setup = setup_of("PPO", "CartPole-v1", lr=0.05, epochs=4, minibatches=2, target_kl=0.02, gamma=0.0)
    torch.manual_seed(0)
    remote = MemoryModel(setup.make_model())
    rollouts = ToyRollouts(setup, remote, seed=10 + ranks.rank, rows=32 + 32 * ranks.rank)
    seen, steps, differed = [], [], []

    def look(drive):
        steps.append(drive.steps)
        differed.append(drive.distributed["default"].differ)

    drive = learner_drive(
        setup, remote, [rollouts], ranks=ranks, num_steps=40, hooks=[recorder(seen), Hook("after_step", look)]
    )
    drive.train()
    return {"seen": seen, "steps": steps, "made": drive.learner.optimizer.steps.item(), "differed": sum(differed)}


TOGETHER = {
    "PPO": {"epochs": 2, "minibatches": 1, "normalize_value": True, "target_kl": 10.0},
    "A2C": {"normalize_advantage": True},
    "IMPALA": {},
    "DQN": {},
}


def learnt(algorithm, record, batches, ranks=None):
    """The Model after each update of a Learner alone, or of one of several."""
    setup = setup_of(algorithm, "CartPole-v1", lr=0.01, **TOGETHER[algorithm])
    torch.manual_seed(0)
    learner = setup.make_learner(setup.make_model(), record=record)
    update = learner.update if ranks is None else DistributedLearner(learner, ranks).update
    seen = []
    for batch in batches:
        update(learner.prepare(batch), Clock(env_steps=1))
        seen.append(weights(learner.model))
    return seen, learner.is_recorded


def given_to(algorithm, rank):
    """What a rank learns from in three updates: of PPO and the like rows of which fewer or more are dead."""
    if algorithm == "DQN":
        return [transitions(10 * i + rank) for i in range(3)]
    rng = np.random.default_rng(rank)
    given = []
    for _ in range(3):
        obs, t = rng.standard_normal((13, 4)).astype(np.float32) + rank, 12
        logits = rng.standard_normal((t, 2)).astype(np.float32)
        logp = logits[:, 0] - np.logaddexp(logits[:, 0], logits[:, 1])
        extras = {"action": rng.integers(0, 2, t), "logp": logp}
        outputs = {"value": rng.standard_normal(t + 1).astype(np.float32)}
        piece = toy_piece(obs, extras, outputs, (1 + rank) * rng.standard_normal(t))
        given.append(replace(piece, valid=rng.random((t, 1)) < (0.9, 0.4, 0.7, 0.2)[rank]))
    return given


def first_steps(ranks, path):
    cases = [(name, record) for name in TOGETHER for record in (True, False)]
    return {case: learnt(*case, given_to(case[0], ranks.rank), ranks) for case in cases}


def sac(ranks, path):
    """Three optimizers, critics that each rank has drawn for itself, and normalised observations."""
    setup = setup_of("SAC", "Pendulum-v1")
    torch.manual_seed(ranks.rank)
    remote = MemoryModel(setup.make_model())
    batches = Given(lambda i: transitions(2 * i + ranks.rank, actions=1))
    drive = learner_drive(setup, remote, batches, ranks=ranks, num_steps=6)
    drive.train()
    learner = drive.learner
    return {
        "model": weights(drive.model),
        "critic": weights(learner.critic),
        "target": weights(learner.target.module),
        "alpha": {"a": learner.log_alpha.detach().numpy().copy()},
        "noise": learner.rng.bit_generator.state["state"]["state"],
    }


def counted(ranks, path):
    """A process of games whose samples come to the second rank first, and to the first one later."""
    setup = setup_of("DQN", "CartPole-v1", learning_starts=0, train_every=15, batch_size=8)

    def make(i):
        samples = played(i)
        if ranks.rank == 1 or i >= 3:
            samples |= {"origin": samples["origin"] + 1, "steps": np.full_like(samples["steps"], 1000)}
        return samples

    seen = []
    hook = Hook("after_step", lambda drive: seen.append(drive.clock.env_steps))
    remote = MemoryModel(setup.make_model())
    learner_drive(setup, remote, [MemoryBuffer(make)], ranks=ranks, num_steps=5, hooks=[hook], prefetch_size=0).train()
    return seen, remote.env_steps


class TorchLearner:
    """A Learner of the user's own, with torch's optimizer; the ranks want different numbers of steps."""

    def __init__(self, wanted):
        self.model, self.steps, self.wanted = net(), 0, wanted
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)

    def update(self, batch, env_steps):
        for _ in range(self.wanted):
            self.optimizer.zero_grad()
            self.model(torch.from_numpy(batch["x"])).square().mean().backward()
            self.optimizer.step()
            self.steps += 1


def own_learner(ranks, path):
    learner = TorchLearner(2 + ranks.rank)
    learning = DistributedLearner(learner, ranks)
    for i in range(3):
        learning.update(batch_of(2 * i + ranks.rank), 0)
    return weights(learner.model), learner.steps


def statistics(ranks, path):
    """Buffers (what a model remembers of its observations) are the first rank's."""
    model = nn.BatchNorm1d(3)

    class Norm(TorchLearner):
        def __init__(self):
            self.model, self.steps = model, 0
            self.optimizer = torch.optim.SGD(model.parameters(), 0.01)
            self.wanted = 1

    learning = DistributedLearner(Norm(), ranks)
    learning.update(batch_of(ranks.rank), 0)
    return weights(model)


def batch_statistics(ranks, path):
    torch.manual_seed(0)
    model = MemoryModel(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    buffer = MemoryBuffer(lambda i: batch_of(2 * i + ranks.rank))
    drive = drive_of(buffers=[buffer], remote=model, ranks=ranks, num_steps=5)
    drive.train()
    return weights(drive.model), dict(model.get_weights()[0])


def lost(ranks, path):
    """The last scenario: the second rank dies."""
    if ranks.rank == 1:
        os._exit(9)
    try:
        ranks.all_reduce_sum(1)
    except RankLost as e:
        return is_rank_lost(e), is_rank_lost(e.__cause__), str(e)
    return None


SCENARIOS = [
    equal_steps, one_head_each, mean_gradients, numbers, large_means, uneven_speed, stopped_by_one, resumed, ppo,
    first_steps, sac, counted, own_learner, statistics, batch_statistics, lost,
]  # fmt: skip


class Rank(ForkedProcess):
    """Begins with all that this file imports: four of them would be most of what the test costs."""

    module = __name__


def rank_main(rank, size, path, scenarios):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=size)
    ranks = Ranks()
    for name in scenarios:
        try:
            out = globals()[name](ranks, path)
        except BaseException:
            out = traceback.format_exc()
            print(out, file=sys.stderr)
            os._exit(1)  # the others do not wait
        with open(f"{path}/{name}-{rank}", "wb") as f:
            pickle.dump(out, f)


def left_by(size, path, scenarios):
    """What a scenario has returned on each of so many ranks that run these; of one that died nothing."""
    names = [scenario.__name__ for scenario in scenarios]
    children = [Rank(target=rank_main, args=(r, size, str(path), names)) for r in range(size)]
    for child in children:
        child.start()
    try:
        for child in children:
            child.join(300)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()

    def read(scenario):
        files = [Path(path) / f"{scenario.__name__}-{r}" for r in range(size)]
        return [pickle.loads(file.read_bytes()) for file in files if file.exists()]

    return read


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return left_by(2, tmp_path_factory.mktemp("ranks"), SCENARIOS)


@pytest.fixture(scope="module")
def outcome_of_four(tmp_path_factory):
    return left_by(4, tmp_path_factory.mktemp("four"), [first_steps, large_means])


# --- what they have left ----------------------------------------------------------------------------------------------


def test_parameters_are_equal_after_every_step_and_equal_one_rank_with_both_batches(outcome):
    a, b = outcome(equal_steps)
    assert len(a["seen"]) == len(b["seen"]) == STEPS
    assert all(same(x, y) for x, y in zip(a["seen"], b["seen"], strict=True))
    alone = []
    drive_of(batch_size=2, num_steps=STEPS, hooks=[recorder(alone)]).train()
    assert all(same(x, y, 1e-5) for x, y in zip(a["seen"], alone, strict=True))
    assert not same(a["seen"][0], a["seen"][1], 1e-5)


def test_the_first_rank_publishes(outcome):
    a, b = outcome(equal_steps)
    assert a["published"] == list(range(1, STEPS + 1))
    assert b["published"] == []
    assert a["summary"]["ranks"] == 2
    assert a["summary"]["samples"] == b["summary"]["samples"] == 2 * 4 * STEPS


def test_gradients_are_the_mean_of_the_ranks(outcome):
    (before_a, after_a), (before_b, after_b) = outcome(mean_gradients)
    for x, y, z, w in zip(before_a, before_b, after_a, after_b, strict=True):
        assert np.allclose((x + y) / 2, z, rtol=1e-6)
        assert np.array_equal(z, w)
    assert not np.allclose(before_a[0], before_b[0])


def test_a_parameter_without_gradient_on_one_rank(outcome):
    a, b = outcome(one_head_each)
    assert same(a, b)
    alone = drive_of(OneHead, [MemoryBuffer(sided)], MemoryModel(TwoHeads()), accumulate=2, num_steps=STEPS)
    alone.train()
    assert same(a, weights(alone.model), 1e-5)
    assert same({"w": a["heads.2.weight"]}, {"w": weights(TwoHeads())["heads.2.weight"]})


def test_numbers_and_bytes_of_all_ranks(outcome):
    a, b = outcome(numbers)
    assert a == b
    assert a == ([2.0, 1.0], 4.0, b"\0\0\0", [b"\0\0\0", b"\1\1\1\1"], b"")


@pytest.mark.parametrize(("fixture", "size"), [("outcome", 2), ("outcome_of_four", 4)])
def test_means_of_large_arrays_go_through_shared_memory_where_all_have_it(request, fixture, size):
    given, means, found = zip(*request.getfixturevalue(fixture)(large_means), strict=True)
    for arrays, theirs in zip(zip(*given, strict=True), zip(*means, strict=True), strict=True):
        assert len(arrays) == size
        assert all(np.array_equal(mean, sum(arrays[1:], arrays[0]) * np.float32(1 / size)) for mean in theirs)
    assert found == ((True, [None, None], True, []),) * size


def test_ranks_of_different_speed_make_the_same_steps_and_end_together(outcome):
    a, b = outcome(uneven_speed)
    assert a["steps"] == b["steps"] == 6
    assert a["out_of_data"]
    assert b["out_of_data"]


def test_one_rank_stops_all(outcome):
    a, b = outcome(stopped_by_one)
    assert a["steps"] == b["steps"] == 4
    assert a["stopped"]
    assert b["stopped"]


def test_resumed_ranks_equal_ranks_never_interrupted(outcome):
    for whole, rest, step in outcome(resumed):
        assert step == 6
        assert same(whole, rest)


def test_a_learner_on_two_ranks_makes_as_many_steps_as_the_rank_that_wants_fewest(outcome):
    a, b = outcome(ppo)
    assert a["steps"] == b["steps"]
    assert all(same(x, y) for x, y in zip(a["seen"], b["seen"], strict=True))
    assert len(a["seen"]) > 5  # updates of at most 8 steps that are cut short
    assert a["steps"][-1] >= 40
    assert a["made"] == b["made"] == a["steps"][-1]  # the optimizer's own count
    assert a["differed"] == b["differed"] == 0  # they look at the KL of all rows


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", TOGETHER)
def test_several_ranks_learn_what_one_with_all_their_batches_learns(request, algorithm, size):
    outcome = request.getfixturevalue("outcome" if size == 2 else "outcome_of_four")
    all_of_them = zip(*(given_to(algorithm, rank) for rank in range(size)), strict=True)
    join = side_by_side if algorithm != "DQN" else lambda xs: {k: np.concatenate([x[k] for x in xs]) for k in xs[0]}
    alone, _ = learnt(algorithm, False, [join(list(parts)) for parts in all_of_them])
    for record in (True, False):
        ranks = [one[algorithm, record] for one in outcome(first_steps)]
        assert len(ranks) == size
        for seen, is_recorded in ranks:
            assert is_recorded == record
            for step, (mine, its) in enumerate(zip(seen, alone, strict=True)):
                assert same(mine, its, 1e-6 if step == 0 else 2e-5), (record, step)
        assert all(same(x, y) for other in ranks[1:] for x, y in zip(ranks[0][0], other[0], strict=True))


def test_a_learner_with_parts_of_its_own_on_two_ranks(outcome):
    a, b = outcome(sac)
    for part in ("model", "critic", "target", "alpha"):
        assert same(a[part], b[part]), part
    assert a["noise"] != b["noise"]


def test_steps_are_the_same_on_all_ranks_and_counted_once(outcome):
    (a, published), (b, _) = outcome(counted)
    assert a == b == [1000, 1000, 1000, 1045, 1045]
    assert published == 1045


def test_a_learner_with_torchs_optimizer_on_two_ranks(outcome):
    (a, steps_a), (b, steps_b) = outcome(own_learner)
    assert same(a, b)
    assert steps_a == steps_b == 6


def test_statistics_of_observations_are_the_first_ranks(outcome):
    a, b = outcome(statistics)
    assert same(a, b)
    reference = nn.BatchNorm1d(3)
    reference(torch.from_numpy(batch_of(0)["x"]))
    assert np.allclose(a["running_mean"], reference.running_mean.numpy())


def test_batch_statistics_are_equal_and_published(outcome):
    (a, published), (b, _) = outcome(batch_statistics)
    assert same(a, b)
    assert same(a, published)
    assert a["0.num_batches_tracked"] == 5
    assert np.abs(a["0.running_mean"]).max() > 0


def test_the_death_of_a_rank_is_told_from_an_error_of_the_users_code(outcome):
    ((wrapped, raw, said),) = outcome(lost)
    assert wrapped
    assert raw
    assert "rank 0 of 2 lost another one" in said
    assert not is_rank_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_rank_lost(ConnectionResetError("Connection reset by peer"))


@pytest.mark.parametrize("alive", [True, False])
def test_nccl_that_is_set_up_wrongly_is_told_from_a_dead_rank(monkeypatch, alive):
    """It is an error of the setup, shown at once, where every rank still answers; else the ranks are started again."""

    def fails(*_, **__):
        raise RuntimeError("NCCL error in: unhandled system error\nno socket interface found")

    for name, value in {"is_initialized": True, "get_rank": 0, "get_world_size": 2, "get_backend": "nccl"}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist, "new_group", lambda backend: "gloo")
    monkeypatch.setattr(dist, "all_reduce", fails)
    monkeypatch.setattr(dist, "monitored_barrier", (lambda *_: None) if alive else fails)
    with pytest.raises(ConfigError if alive else Unreachable) as caught:
        Ranks().check_gpus(torch.device("cpu"))
    assert is_worth_another_try(caught.value) is not alive
    assert "no socket interface found" in str(caught.value)
