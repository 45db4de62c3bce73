"""What is learnt from: ragged pieces of many games, files, late workers. References are plain loops over each piece
alone."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from sources_for_tests import Workers, count, make_piece, side_by_side

from bray import act, tree
from bray.act import Clock
from bray.algos import base, dqn, ppo
from bray.algos.base import Update, to_torch
from bray.data import Batch, Counts, Dataset, EndOfData, Replay, Rollouts, Sequences, write_episodes
from bray.data.experience import ITERATION_STEPS
from bray.data.ring import ReplayRing
from bray.errors import ConfigError, DataError
from bray.experiment import Experiment
from bray.nn.catalog import ModelConfig
from bray.optim import Optimizer
from bray.rundir import pack_state, unpack_state
from bray.spec import EnvSpec, Space
from bray.train.driver import Driver
from bray.train.side import Side
from bray.train.source import FileSource, Source
from tests.rl.test_rl import slow_gae

SPEC = EnvSpec("test", Space("box", (3,)), Space("discrete", n=(4,), start=(0,)))
SMALL = ModelConfig(fcnet_hiddens=(8,))
GAMMA, LAMBDA = 0.9, 0.8
ROWS = ("obs", "action", "reward", "terminated", "truncated", "valid", "first", "outputs", "extras")


def make_side(algo, experience, **options):
    torch.manual_seed(0)
    config = algo.Config(gamma=GAMMA, **options)
    model = algo.make_model(config, SPEC, SMALL)
    learner = algo.Learner(config, SPEC, model, SMALL, record=False)
    return Side(model, algo.Policy(config, SPEC), experience, learner, config=config)


def ppo_learner():
    return make_side(ppo, Rollouts(1), lambda_=LAMBDA, normalize_advantage=False, minibatches=2, epochs=1).learner


def batches(experience, clock=Clock(1 << 40)):
    while (batch := experience.next(clock)) is not None:
        yield batch


# --- rollouts ---------------------------------------------------------------------------------------------------------


def ragged(seed=0, number=40, streams=5):
    """Pieces of several games as they come: each game's in order, of any length; some with episode ends, some that end
    with rows that wait."""
    rng = np.random.default_rng(seed)
    ticks, pieces = [0] * streams, []
    for i in range(number):
        stream, length = int(rng.integers(streams)), int(rng.integers(1, 12))
        ends = (int(rng.integers(length)),) if i % 3 == 0 else ()
        waits = tuple(range(length - 2, length)) if i % 4 == 1 and length > 4 else ()
        pieces.append(make_piece(rng, length, stream, start=ticks[stream], version=i, ends=ends, waits=waits))
        ticks[stream] += length
    return pieces


def stretches(canvas, pieces):
    """Where the rows of pieces lie in a canvas: (piece, first row of it, end, row of the canvas, column)."""
    of = {(p.stream[0], p.start + t): (i, t) for i, p in enumerate(pieces) for t in range(p.length)}
    written = canvas.extras["logp"] < 0  # ours are, those of joints are not
    for column in range(canvas.num_envs):
        row = 0
        while row < canvas.length:
            if not written[row, column]:
                row += 1
                continue
            i, t = of[tuple(canvas.obs[row, column, :2].astype(int))]
            n = 1
            while row + n < canvas.length and written[row + n, column] and t + n < pieces[i].length:
                n += 1
            yield i, t, t + n, row, column
            row += n


def test_ragged_pieces_give_the_advantages_of_each_piece_alone():
    """And each row once, in order, on canvases of one shape; a piece is cut only where a column ends."""
    pieces, learner, experience = ragged(), ppo_learner(), Rollouts(16, columns=3)
    at = [0] * len(pieces)
    whole = canvases = 0
    for piece in pieces:
        experience.add(piece)
        for batch in batches(experience):
            canvas = batch.data.check()
            canvases += 1
            assert (canvas.length, canvas.num_envs) == (16, 3)
            rows = learner.prepare(canvas)
            assert {k: v.shape for k, v in rows.items()} == {
                **dict.fromkeys(("action", "logp", "value", "advantage", "target", "weight"), (48,)),
                "obs": (48, 3),
            }
            advantage = rows["advantage"].reshape(16, 3)
            seen = np.zeros((16, 3), bool)
            for i, a, b, row, column in stretches(canvas, pieces):
                p, here = pieces[i], (slice(row, row + b - a), column)
                assert at[i] == a
                at[i] = b
                assert b == p.length or row + b - a == 16
                whole += (a, b) == (0, p.length)
                expected = slow_gae(
                    p.outputs["value"][a : b + 1],
                    *(getattr(p, k)[a:b] for k in ("reward", "terminated", "truncated", "valid")),
                    GAMMA,
                    LAMBDA,
                )
                np.testing.assert_allclose(advantage[here], expected[:, 0], rtol=1e-4, atol=1e-5)
                np.testing.assert_array_equal(canvas.valid[here], p.valid[a:b, 0])
                np.testing.assert_array_equal(canvas.action[here], p.action[a:b, 0])
                np.testing.assert_array_equal(canvas.version[here], p.version)
                np.testing.assert_array_equal(canvas.obs[row : row + b - a + 1, column], p.obs[a : b + 1, 0])
                seen[here] = True
            assert not canvas.valid[~seen].any()  # joints weigh nothing
            assert batch.rows == canvas.valid.sum() == rows["weight"].sum()
    assert whole > 10
    assert canvases >= 5
    laid = sum(at)
    left = sum(p.length for p in pieces) - laid
    assert 0 < left < 48  # the remainder waits for more
    assert "of 48 rows of the next rollout have come" in experience.wait_reason()
    more = make_piece(np.random.default_rng(9), 48, stream=9)
    experience.add(more)
    (batch,) = batches(experience)
    mine = [(i, a, b) for i, a, b, _, _ in stretches(batch.data, [*pieces, more]) if i < len(pieces)]
    assert sum(b - a for _, a, b in mine) == left
    for i, a, b in mine:
        assert at[i] == a
        at[i] = b
    assert at == [p.length for p in pieces]


def test_nothing_leaks_over_a_joint():
    """Another piece may hold anything: advantages beside it stay the same bits."""
    learner = ppo_learner()

    def advantages(wild):
        experience, out = Rollouts(16, columns=3), []
        for i, piece in enumerate(ragged()):
            if i % 2 and wild:
                piece.outputs["value"] *= 1e6
                piece.reward *= -1e6
            experience.add(piece)
        for batch in batches(experience):
            advantage = learner.prepare(batch.data)["advantage"].reshape(16, 3)
            even = (batch.data.version % 2 == 0) & batch.data.valid
            out.append(advantage[even])
        return np.concatenate(out)

    np.testing.assert_array_equal(advantages(False), advantages(True))


def test_columns_of_a_piece_are_games_of_their_own():
    rng = np.random.default_rng(0)
    one, two = make_piece(rng, 8, 1), make_piece(rng, 8, 2)
    together, apart = Rollouts(8, columns=2), Rollouts(8, columns=2)
    together.add(side_by_side(one, two))
    apart.add(one)
    apart.add(two)
    a, b = (x.next(Clock()).data for x in (together, apart))
    assert all(tree.equal(getattr(a, k), getattr(b, k)) for k in ROWS)


def test_pieces_of_this_process_pass_as_they_are():
    experience = Rollouts(8)
    piece = side_by_side(*(make_piece(np.random.default_rng(i), 8, None) for i in range(3)))
    experience.add(piece)
    assert experience.next(Clock()).data is piece
    assert experience.next(Clock()) is None
    experience.add(piece)
    experience.add(piece)
    assert not experience.room()
    experience.cut()  # the next piece does not follow; these are whole
    assert not experience.room()
    experience.forget()  # a learner that goes back does not learn from what led it astray
    assert experience.next(Clock()) is None


@pytest.mark.parametrize("how", ["ragged", "recurrent", "whole", "beside"])
def test_what_waits_in_rollouts_is_saved(how):
    """In the middle of a canvas, in full ones, and beside others: as if nothing had happened."""
    rng = np.random.default_rng(1)

    def make():
        games = 5 if how == "beside" else None
        return Rollouts(8, columns=3, state_every=4 if how == "recurrent" else 1, games=games)

    if how in ("whole", "beside"):
        pieces = [side_by_side(*(make_piece(rng, 8, None, version=i) for _ in range(2))) for i in range(9)]
    else:
        every = 4 if how == "recurrent" else None
        pieces = [
            make_piece(rng, int(rng.integers(1, 12)), i % 3, version=i, state_every=every, start=20 * i)
            for i in range(30)
        ]
    whole, again, learnt = make(), make(), [[], []]
    for i, piece in enumerate(pieces):
        for experience, got in ((whole, learnt[0]), (again, learnt[1])):
            experience.add(piece)
            if i % 3 == 2:
                got += [copy.deepcopy(batch.data) for batch in batches(experience)]
        state = unpack_state(pack_state(again.get_state(None)))
        again = make()
        assert again.set_state(state, None)
    assert len(learnt[0]) == len(learnt[1]) > 2
    for a, b in zip(*learnt, strict=True):
        assert all(tree.equal(getattr(a, name), getattr(b, name)) for name in ROWS if getattr(a, name) is not None)
        assert np.array_equal(np.broadcast_to(a.version, a.reward.shape), np.broadcast_to(b.version, b.reward.shape))
        assert (a.state_every, a.in_line) == (b.state_every, b.in_line)
        if how == "recurrent":
            assert tree.equal(a.state, b.state)


def test_batches_are_as_wide_whoever_played_the_rows():
    """One process with all games, or workers with some of them; what is over goes to the next batch."""
    rng = np.random.default_rng(4)
    games = [[make_piece(rng, 8, None, version=i) for _ in range(16)] for i in range(2)]
    games.insert(1, games[0][:12])
    learnt = []
    for wide in (16, 2, 3):
        experience, got = Rollouts(8, asynchronous=True, games=8), []
        for row in games:
            for at in range(0, len(row), wide):
                experience.add(side_by_side(*row[at : at + wide]))
                got += [copy.deepcopy(batch.data) for batch in batches(experience)]
        learnt.append(got)
    assert [data.num_envs for data in learnt[0]] == [8] * 5
    for other in learnt[1:]:
        for a, b in zip(learnt[0], other, strict=True):
            assert all(tree.equal(getattr(a, name), getattr(b, name)) for name in ROWS)
            assert (np.broadcast_to(a.version, a.reward.shape) == b.version).all()


def test_rows_that_wait_and_are_not_sound_are_left_out():
    rng = np.random.default_rng(2)
    for spoil in (lambda p: p.obs.__setitem__((1, 0, 0), np.nan), lambda p: p.reward.__setitem__((1, 0), 1e9)):
        experience, piece = Rollouts(8, columns=2), make_piece(rng, 5)
        experience.add(piece)
        assert experience.leave_out(1e6) == 0
        spoil(piece)
        experience.add(piece)
        assert experience.leave_out(1e6) > 0
        assert experience.leave_out(1e6) == 0


def test_recurrent_pieces_become_sequences_with_the_advantages_of_the_whole_piece():
    """Sequences of four rows, each with the state before its first row; what is short is filled up with rows of weight
    zero. Advantages end where a piece ends, not with a sequence; a piece that begins in one batch and ends in the next
    is cut there."""
    rng = np.random.default_rng(0)
    lengths = (6, 3, 4, 9, 1, 7, 2)
    ends = {0: (1,), 3: (2,), 5: (3,)}
    pieces = [make_piece(rng, n, i, state_every=4, ends=ends.get(i, ())) for i, n in enumerate(lengths)]
    experience, learner, got = Rollouts(8, columns=2, state_every=4), ppo_learner(), []
    for piece in pieces:
        experience.add(piece)
    for batch in batches(experience):
        canvas = batch.data.check()
        sequences = learner.prepare(canvas)
        assert sequences["weight"].shape == (4, 4)
        assert sequences["state"].shape == (4, 2)
        starts = [tuple(int(x) for x in sequences["obs"][0, s, :2]) for s in range(4)]
        for s, (stream, tick) in enumerate(starts):
            p = pieces[stream]
            rows = min(4, p.length - tick)
            assert sequences["weight"][:rows, s].tolist() == p.valid[tick : tick + rows, 0].tolist()
            assert not sequences["weight"][rows:, s].any()
            assert sequences["state"][s].tolist() == [stream, tick]
            np.testing.assert_array_equal(sequences["obs"][:rows, s, 1], np.arange(tick, tick + rows))
            assert sequences["first"][:rows, s].tolist() == p.first[tick : tick + rows, 0].tolist()
            here = [t for other, t in starts if other == stream]  # the sequences of this piece in this batch
            first, last = min(here), min(p.length, max(here) + 4)
            flags = (getattr(p, k)[first:last] for k in ("reward", "terminated", "truncated", "valid"))
            whole = slow_gae(p.outputs["value"][first : last + 1], *flags, GAMMA, LAMBDA)
            expected = whole[tick - first : tick - first + rows]
            np.testing.assert_allclose(sequences["advantage"][:rows, s], expected[:, 0], rtol=1e-4, atol=1e-5)
            got.append((stream, tick, rows))
    expected = [(i, t, min(4, n - t)) for i, n in enumerate(lengths) for t in range(0, n, 4)]
    assert got == expected[: len(got)]
    assert len(got) == 8


# --- replay -----------------------------------------------------------------------------------------------------------


def expected_transition(piece, t, n):
    """Sum of at most n rewards within the piece, what the rest is discounted by, and the observation it is valued
    at."""
    total, factor = 0.0, 1.0
    while True:
        total += factor * float(piece.reward[t, 0])
        factor *= GAMMA
        n, ended = n - 1, piece.terminated[t, 0] or piece.truncated[t, 0]
        if piece.terminated[t, 0]:
            factor = 0.0
        t += 1
        if n == 0 or ended or t == piece.length or not piece.valid[t, 0]:
            return total, factor, piece.obs[t, 0]


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("n_step", [1, 3])
def test_transitions_of_ragged_pieces_equal_a_loop(n_step, prioritized):
    """No window reaches over a joint; every row that was played can be drawn."""
    experience = Replay(2000, 16, gamma=GAMMA, n_step=n_step, prioritized=prioritized)
    pieces = ragged(seed=1)
    for piece in pieces:
        experience.add(piece)
    drawn = experience.ring.take(experience.ring.ids())
    wanted = {(p.stream[0], p.start + t): (p, t) for p in pieces for t in np.flatnonzero(p.valid[:, 0])}
    assert len(drawn["id"]) == len(experience) == len(wanted) > 150
    for i in range(len(drawn["id"])):
        piece, t = wanted.pop(tuple(drawn["obs"][i, :2].astype(int)))
        total, discount, after = expected_transition(piece, t, n_step)
        assert drawn["reward"][i] == pytest.approx(total, rel=1e-5, abs=1e-6)
        assert drawn["discount"][i] == pytest.approx(discount, rel=1e-6)
        assert drawn["action"][i] == piece.action[t, 0]
        assert drawn["logp"][i] == piece.extras["logp"][t, 0]
        if discount:  # else it is not looked at
            np.testing.assert_array_equal(drawn["next_obs"][i], after)
    assert not wanted


def add_one_by_one(ring, piece):
    """The rows of each game, then its last observation as a dead row."""
    t = piece.length
    for b in range(piece.num_envs):
        for i in range(t + 1):
            row = min(i, t - 1)
            dead = i == t or not piece.valid[row, b]
            terminated = bool(piece.terminated[row, b]) and not dead
            cut = (i == t - 1 and not terminated) or bool(piece.truncated[row, b])
            ring.add(
                piece.obs[i, b : b + 1],
                piece.action[row, b : b + 1],
                np.array([0.0 if dead else piece.reward[row, b]], np.float32),
                np.array([terminated]),
                np.array([cut and not dead]),
                np.array([not dead]),
                first=piece.first[i, b : b + 1],
                version=piece.version,
                logp=piece.extras["logp"][row, b : b + 1],
            )


@pytest.mark.parametrize(
    "options",
    [{}, {"prioritized": True}, {"prioritized": True, "n_step": 3, "max_use": 2}, {"max_staleness": 40}],
    ids=["uniform", "prioritized", "used", "stale"],
)
def test_ragged_rows_at_once_are_those_of_a_loop(options):
    """Pieces of any length and number of games, in a ring that is written over many times: draws, priorities, and all
    that is saved."""
    rng, replay = np.random.default_rng(3), Replay(60, 4, **options)
    loop = ReplayRing(60, 1, {"obs": np.zeros(3, np.float32), "action": np.int64(0), "logp": np.float32(0)},
                      monitor=True, **{"alpha": 0.6, **options})  # fmt: skip
    for number in range(80):
        length, games = int(rng.integers(1, 40)), int(rng.integers(1, 4))
        ends = (int(rng.integers(length)),) if number % 2 else ()
        piece = side_by_side(*(make_piece(rng, length, b, version=number, ends=ends) for b in range(games)))
        replay.add(piece)
        add_one_by_one(loop, piece)
        assert len(replay.ring) == len(loop)
        for i in range(3 if len(loop) else 0):
            drawn = [ring.sample(4, np.random.default_rng([number, i]), 0.5) for ring in (replay.ring, loop)]
            assert tree.equal(*drawn)
            errors = rng.random(4)
            for ring in (replay.ring, loop) if "prioritized" in options else ():
                ring.update_priorities(drawn[0]["id"], errors)
        assert tree.equal(replay.ring.get_state(), loop.get_state())
        for ring in (replay.ring, loop):
            ring.advance(number + 1)
        assert replay.ring.stats() == loop.stats()


def test_pieces_that_come_too_late_are_not_learnt_from():
    experience, rng = Replay(500, 4, max_staleness=10), np.random.default_rng(0)
    experience.add(make_piece(rng, 8, 0))
    for version in range(1, 26):
        experience.feedback(Batch(None, 0), None, version)
    assert len(experience) == 0  # what was there has become stale
    for version, there in ((15, 0), (16, 8), (25, 16)):
        experience.add(make_piece(rng, 8, version, version=version))
        assert len(experience) == there


def test_batches_are_owed_for_rows_and_not_for_calls():
    """Whoever brings the rows, in whatever pieces: `updates` batches for every `train_every` of them."""
    experience = Replay(2000, 16, train_every=4, updates=2, learning_starts=10)
    rng = np.random.default_rng(0)
    steps = 0
    for length, due in ((8, 0), (13, 8), (3, 2), (1, 0), (40, 20)):  # before learning starts one visit is owed at most
        experience.add(make_piece(rng, length, 0, start=steps))
        steps += length
        got = list(batches(experience, Clock(steps)))
        assert len(got) == due, length
        assert all(b.data["obs"].shape == (16, 3) and b.rows == 16 for b in got)


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_replay_goes_on_exactly(tmp_path, prioritized):
    def fresh():
        return Replay(120, 8, gamma=GAMMA, n_step=2, prioritized=prioritized, train_every=3, updates=2)

    def learn(experience, version):
        out = []
        for batch in batches(experience):
            version += 1
            priorities = np.abs(batch.data["reward"]) if prioritized else None
            experience.feedback(batch, priorities, version)
            out.append(batch.data)
        return out, version

    pieces, original = ragged(seed=2), fresh()
    original.seed(7)
    version = 0
    for piece in pieces[:25]:
        original.add(piece)
        _, version = learn(original, version)
    original.add(pieces[25])
    original.next(Clock(1 << 40))  # in the middle of a visit
    state = original.get_state(tmp_path)
    resumed = fresh()
    assert resumed.set_state({"arrays": state["arrays"], "json": json.loads(json.dumps(state["json"]))}, tmp_path)
    assert len(resumed) == len(original)
    for piece in pieces[26:]:
        a, b = (learn(x, version)[0] for x in (original, resumed))
        assert len(a) == len(b)
        assert all(tree.equal(x, y) for x, y in zip(a, b, strict=True))
        version += len(a)
        original.add(piece)
        resumed.add(piece)
    assert not fresh().set_state(original.get_state(None), None)  # without its rows that is not exact


# --- sequences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [False, True])
def test_sequences_are_runs_with_their_first_state(live):
    rng = np.random.default_rng(0)
    experience = Sequences(400, 6, length=4, burn_in=2, prioritized=True, alpha=1.0)
    if live:
        pieces = [
            make_piece(rng, 9, i % 3, start=9 * (i // 3), state_every=1, ends=(4,) if i == 4 else ()) for i in range(12)
        ]
        for piece in pieces:
            experience.add(piece)
    else:  # three environments that step together
        for t in range(30):
            row = [make_piece(rng, 1, b, start=t, state_every=1) for b in range(3)]
            piece = side_by_side(*row)
            piece.stream = None
            experience.add(piece)
            if t < 6:
                assert experience.next(Clock(100)) is None  # six rows of each game and what follows them
    batch = experience.next(Clock(100))
    data = batch.data
    assert data["obs"].shape == (7, 6, 3)
    assert data["reward"].shape == (6, 6)
    crossed = 0
    for b in range(6):
        assert data["state"][b].tolist() == data["obs"][0, b, :2].tolist()
        for t in range(6):
            if data["valid"][t, b]:
                assert data["obs"][t + 1, b, :2].tolist() == (data["obs"][t, b, :2] + [0, 1]).tolist()
            else:
                crossed += 1
    assert bool(crossed) == live
    assert batch.ids.shape == (6,)


def test_priorities_of_sequences_go_to_the_row_where_learning_begins():
    rng = np.random.default_rng(0)
    experience = Sequences(400, 5, length=3, burn_in=2, prioritized=True, alpha=0.5)
    experience.add(make_piece(rng, 40, 0, state_every=1))
    batch = experience.next(Clock(100))
    before = experience.ring.get_state()["priority"]
    experience.feedback(batch, np.arange(1.0, 6.0), version=1)
    after = experience.ring.get_state()["priority"]
    wanted = {
        int(i): (p + experience.ring.config.eps) ** 0.5 for i, p in zip(batch.ids, np.arange(1.0, 6.0), strict=True)
    }
    assert {int(i): after[i] for i in wanted} == pytest.approx(wanted)
    others = [i for i in range(41) if i not in wanted]
    np.testing.assert_array_equal(after[others], before[others])
    # those that have left the ring since are counted, never an error
    for i in range(1, 12):
        experience.add(make_piece(rng, 40, 0, start=40 * i, state_every=1))
    experience.feedback(batch, np.ones(5), version=2)
    assert experience.ring.late_updates == 5


# --- workers ----------------------------------------------------------------------------------------------------------


def deliveries(pieces, seed=0, lost=4):
    """What workers send of these pieces: some at once, some late, out of order; every `lost`-th piece is lost, its
    counts are not."""
    rng = np.random.default_rng(seed)
    out = []
    for i in rng.permutation(len(pieces)):
        piece = pieces[i]
        counts = count(piece)
        if i % lost == 0:
            out.append(([], counts._replace(dropped=piece.length)))
        else:
            out += [([], counts), ([piece], Counts())] if i % lost == 1 else [([piece], counts)]
        if rng.random() < 0.3:
            out.append(([], Counts()))  # nothing has come
    return out


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_late_lost_and_old_pieces_keep_the_counters_right(algo):
    pieces = ragged(seed=3, number=120)
    if algo == "ppo":
        side = make_side(ppo, Rollouts(16, columns=3), minibatches=2, epochs=1)
    else:
        side = make_side(dqn, Replay(500, 16, gamma=GAMMA, learning_starts=50, train_every=8))
    source, learnt = Workers(deliveries(pieces)), []
    prepare = side.learner.prepare
    side.learner.prepare = lambda data: learnt.append(data) or prepare(data)
    driver = Driver([side], [source])
    rows = []
    while (row := driver.iterate()) is not None:
        rows.append(row)
    assert driver.ended
    assert driver.iterate() is None
    assert source.closed == 1
    kept = [p for i, p in enumerate(pieces) if i % 4]
    lost = [p for i, p in enumerate(pieces) if i % 4 == 0]
    assert driver.env_steps == sum(p.valid.sum() for p in pieces)
    assert driver.totals.episodes.total == sum((p.terminated | p.truncated).sum() for p in pieces)
    assert driver.totals.dropped == sum(p.length for p in lost)
    assert all(np.isfinite(v) for k, v in rows[-1].items() if k.startswith("loss/"))
    assert [c.version for c in source.published] == sorted(c.version for c in source.published)
    assert source.published[-1].version <= side.learner.steps == len(learnt) * (2 if algo == "ppo" else 1)
    steps = [row["env_steps_total"] for row in rows]
    assert steps == sorted(steps)
    if algo == "ppo":  # rows of old weights count like others, each once
        assert len(rows) == len(learnt)
        total = sum(int(c.valid.sum()) for c in learnt)
        assert sum(int(p.valid.sum()) for p in kept) - 48 < total <= sum(int(p.valid.sum()) for p in kept)
        versions = np.concatenate([c.version[c.valid] for c in learnt])
        assert set(versions) <= {p.version for p in kept}
        assert (np.diff(versions) < 0).any()  # out of order
    else:
        assert len(learnt) > 40


def test_a_source_that_ends_leaves_the_others_running():
    pieces = ragged(seed=4, number=60)
    side = make_side(ppo, Rollouts(16, columns=3), minibatches=2, epochs=1)
    short, long = Workers(deliveries(pieces[:5])), Workers(deliveries(pieces[5:]))
    driver = Driver([side], [short, long])
    while driver.iterate() is not None:
        pass
    assert (short.closed, long.closed) == (1, 1)
    assert driver.env_steps == sum(p.valid.sum() for p in pieces)
    driver.close()
    assert (short.closed, long.closed) == (1, 1)


def test_a_stop_is_heard_while_nothing_comes():
    class Silent(Source):
        def gather(self, timeout=0.0):
            driver.stop()
            return [], Counts(env_steps=3)

    driver = Driver([make_side(ppo, Rollouts(16))], [Silent()])
    row = driver.iterate()
    assert driver.stopped
    assert row["env_steps_total"] == 3
    assert "no game has sent a row" in driver.experience.wait_reason()


# --- files ------------------------------------------------------------------------------------------------------------

TASK = np.random.default_rng(5).normal(size=(3, 4))


def episodes(number=9, seed=0):
    """The action is a function of the observation; the reward of both."""
    rng = np.random.default_rng(seed)
    for i in range(number):
        n = 10 + i
        obs = rng.normal(size=(n + 1, 3)).astype(np.float32)
        action = (obs[:-1] @ TASK).argmax(-1)
        ends = np.arange(n) == n - 1
        no = np.zeros(n, bool)
        yield {
            "obs": obs,
            "action": action,
            "reward": (obs[:-1, 0] + action).astype(np.float32),
            "terminated": ends if i % 2 else no,
            "truncated": no if i % 2 else ends,
        }


class Clone:
    """Behaviour cloning: an algorithm that learns from files alone."""

    Policy = ppo.Policy
    make_model = staticmethod(ppo.make_model)

    class Config:
        def __init__(self, gamma=0.99, lr=0.02):
            self.gamma, self.lr = gamma, lr

    class Learner(base.Learner):
        def build(self):
            self.optimizer = Optimizer(self.model.parameters(), self.config.lr)
            return {"optimizer": self.optimizer}

        def update(self, batch, clock):
            values = self._step(to_torch({k: batch[k] for k in ("obs", "action")}, self.device))
            self.steps += 1
            return Update(("loss",), values)

        def gradient_step(self, batch):
            loss = torch.nn.functional.cross_entropy(self.model(batch["obs"])["dist"], batch["action"])
            self.optimizer.step(loss)
            return loss.detach().unsqueeze(0)


ROWS_OF_FILES = sum(10 + i for i in range(9))


def test_a_learner_of_ones_own_learns_from_files_without_an_environment(tmp_path):
    paths = write_episodes(tmp_path / "a", episodes(), per_file=4)
    assert len(paths) == 3
    side = make_side(Clone, Dataset(16, epochs=30))
    driver = Driver([side], [FileSource(tmp_path)])
    rows, sizes = [], set()
    while (row := driver.iterate()) is not None:
        rows.append(row)
        sizes.add(driver.batch.data["obs"].shape)
    assert driver.ended
    assert sizes == {(16, 3)}
    assert len(rows) == side.learner.steps == 30 * ROWS_OF_FILES // 16  # an iteration is a batch
    losses = [row["loss/loss"] for row in rows]
    assert np.mean(losses[:3]) > 1.0
    assert np.mean(losses[-10:]) < 0.4
    assert driver.env_steps == ROWS_OF_FILES
    assert rows[-1]["data/episodes"] == 9
    expected = [float(e["reward"].sum(dtype=np.float64)) for e in episodes()]
    assert rows[-1]["data/return_mean"] == pytest.approx(np.mean(expected))


def test_dqn_learns_from_files_without_an_environment(tmp_path):
    write_episodes(tmp_path / "a", episodes())
    side = make_side(dqn, Dataset(16, epochs=40, gamma=0.0), lr=0.02)
    driver = Driver([side], [FileSource(tmp_path)])
    rows = []
    while (row := driver.iterate()) is not None:
        rows.append(row)
    losses = [row["loss/loss"] for row in rows]
    assert np.mean(losses[-10:]) < 0.2 * np.mean(losses[:3])


@pytest.mark.parametrize("n_step", [1, 3])
def test_each_epoch_has_every_transition_once(tmp_path, n_step):
    write_episodes(tmp_path / "a", episodes())
    source, data = FileSource(tmp_path), Dataset(7, epochs=3, gamma=GAMMA, n_step=n_step)
    pieces = []
    for _ in range(9):
        (piece,), _ = source.gather()
        pieces.append(piece)
        data.add(piece)
        assert data.next(Clock()) is None  # until all is there
    with pytest.raises(EndOfData):
        source.gather()
    data.complete()
    wanted = {}
    for piece in pieces:
        for t in range(piece.length):
            wanted[piece.obs[t, 0].tobytes()] = expected_transition(piece, t, n_step)
    drawn = [data.next(Clock()) for _ in range(3 * 126 // 7)]
    with pytest.raises(EndOfData, match="3 epochs of 126 transitions"):
        data.next(Clock())
    assert {b.rows for b in drawn} == {7}
    keys = [row.tobytes() for b in drawn for row in b.data["obs"]]
    orders = [tuple(keys[i * 126 : (i + 1) * 126]) for i in range(3)]
    assert all(set(order) == set(wanted) for order in orders)
    assert len(set(orders)) == 3
    for batch in drawn[:18]:
        for i in range(7):
            total, discount, after = wanted[batch.data["obs"][i].tobytes()]
            assert batch.data["reward"][i] == pytest.approx(total, rel=1e-5, abs=1e-6)
            assert batch.data["discount"][i] == pytest.approx(discount, rel=1e-6)
            if discount:
                np.testing.assert_array_equal(batch.data["next_obs"][i], after)


def test_what_an_epoch_leaves_comes_first_in_the_next():
    data = Dataset(4, epochs=2)
    data.add(make_piece(np.random.default_rng(0), 10, 0))
    data.complete()
    ticks = [tick for _ in range(5) for tick in data.next(Clock()).data["obs"][:, 1].tolist()]
    with pytest.raises(EndOfData):
        data.next(Clock())
    assert sorted(ticks[:10]) == sorted(ticks[10:]) == list(range(10))
    small = Dataset(64, epochs=2)
    small.add(make_piece(np.random.default_rng(0), 10, 0))
    small.complete()
    assert small.next(Clock()).rows == 10  # fewer rows than a batch has: all of them


def test_wrong_data_sets_are_refused():
    with pytest.raises(ConfigError, match="epochs >= 1"):
        Dataset(4, epochs=0)
    with pytest.raises(DataError, match="no transitions"):
        Dataset(4).complete()
    data = Dataset(4)
    data.add(make_piece(np.random.default_rng(0), 3, 0))
    data.complete()
    with pytest.raises(DataError, match="complete"):
        data.add(make_piece(np.random.default_rng(0), 3, 0))


@pytest.mark.parametrize("when", [0, 5, 20, 39])
def test_learning_from_files_goes_on_exactly(tmp_path, when):
    """Also while the files are read, and with counters that are right: the files are read again, not counted again."""
    write_episodes(tmp_path / "a", episodes())

    def fresh():
        side = make_side(Clone, Dataset(16, epochs=5))
        side.experience.seed(3)
        return Driver([side], [FileSource(tmp_path)])

    original = fresh()
    if when == 0:
        original.gather()
        original.gather()
    for _ in range(when):
        original.iterate()
    state, weights = original.get_state(), original.weights()
    state["json"] = json.loads(json.dumps(state["json"]))
    state["arrays"] = tree.unpack(tree.pack(state["arrays"]))
    resumed = fresh()
    assert resumed.set_state(state, weights)
    losses = []
    for driver in (original, resumed):
        losses.append([])
        while (row := driver.iterate()) is not None:
            losses[-1].append(row["loss/loss"])
        assert driver.env_steps == ROWS_OF_FILES
        assert driver.sources[0].numbers()["data/episodes"] == 9
        assert driver.learner.steps == driver.iteration == 39
    assert losses[0] == losses[1]
    assert len(losses[0]) == 39 - when
    assert all(np.array_equal(original.weights()[k], v) for k, v in resumed.weights().items())


@pytest.mark.parametrize(
    "space",
    [
        Space("discrete", n=(5,), start=(-2,)),
        Space("multi_discrete", (2,), "int64", n=(2, 3), start=(0, 4)),
        Space("multi_binary", (3,), "int8"),
        Space("box", (2,), "float32", (-2.0, 0.0), (2.0, 10.0)),
        Space("box", (1,), "float32"),
        Space(
            "dict",
            parts=(
                Space(
                    "tuple", parts=(Space("discrete", n=(3,), start=(1,)), Space("box", (2, 2), "float32", -1.0, 3.0))
                ),
                Space("multi_binary", (2,), "int8"),
            ),
            names=("a", "b"),
        ),
    ],
    ids=["discrete", "multi", "binary", "box", "unbounded", "composite"],
)
def test_actions_of_files_become_those_of_the_learner(space, tmp_path):
    """Files hold what the environment was told (`bray collect`); learners think in flat, scaled actions."""
    layout, rng, columns = EnvSpec("e", Space("box", (3,)), space).layout, np.random.default_rng(0), []
    for part in layout.parts:
        columns.append(
            rng.integers(0, part.n, (20, 1)) if part.kind == "categorical" else rng.uniform(-1, 1, (20, part.n))
        )
    flat = np.concatenate(columns, 1).astype(layout.dtype)
    flat = flat[:, 0] if layout.single else flat
    no = np.zeros(20, bool)
    episode = {"obs": np.zeros((21, 3), np.float32), "action": layout.to_env(flat), "reward": np.zeros(20, np.float32)}
    write_episodes(tmp_path / "a", [{**episode, "terminated": no, "truncated": no}])
    (piece,), _ = FileSource(tmp_path, layout).gather()
    assert piece.check().action.dtype == flat.dtype
    np.testing.assert_allclose(piece.action[:, 0], flat, atol=1e-5)


def test_policies_beside_files_need_no_environment():
    """What acts is made from the spaces alone."""
    side = make_side(Clone, Dataset(4))
    obs = np.zeros((2, 3), np.float32)
    out = {k: v.detach().numpy() for k, v in side.model(torch.from_numpy(obs)).items()}
    action, extras = side.policy.act(out, act.Tick(obs), None, "greedy", Clock())
    assert action.tolist() == out["dist"].argmax(-1).tolist()
    assert math.isfinite(extras["logp"][0])


def test_an_algorithm_may_bring_its_own_iterate():
    """It uses the driver's methods, and what it returns is in the row."""

    class Twice:
        Config, make_model, experience = ppo.Config, staticmethod(ppo.make_model), staticmethod(ppo.experience)
        Policy, Learner = ppo.Policy, ppo.Learner

        @staticmethod
        def iterate(driver):
            for _ in range(2):
                driver.gather()
                driver.learn()
            return {"rollouts": 2.0}

    exp = Experiment(
        Twice,
        "CartPole-v1",
        use_preset=False,
        config={"num_envs": 1, "rollout_length": 16, "epochs": 1, "minibatches": 1},
    )
    row = exp.training.iterate()
    assert row["loss/rollouts"] == 2.0
    assert row["learner_steps_total"] == 2
    assert 16 < row["env_steps_total"] <= 32
    exp.close()


@pytest.mark.parametrize(
    ("name", "rows", "updates"),
    [("A2C", [1000, 2000, 3000], 8), ("PPO", [1000, 2000, 3000], 16), ("DQN", [50, 100], 1)],
)
def test_an_iteration_has_a_thousand_steps_or_as_many_as_are_asked_for(name, rows, updates, monkeypatch):
    """On-policy algorithms end it with the rollout that passes the next multiple."""
    if name == "DQN":
        config = {"iteration_steps": 50, "learning_starts": 40, "train_every": 50, "batch_size": 8}
    else:
        monkeypatch.setattr(Rollouts, "iteration_steps", ITERATION_STEPS)  # as it is outside of tests
        config = {"rollout_length": 16, "num_envs": 8, "epochs": 1, "minibatches": 2, "vector": "native"}
        config = {k: v for k, v in config.items() if name == "PPO" or k not in ("epochs", "minibatches")}
    exp = Experiment(name, "CartPole-v1", use_preset=False, config={**config, "fcnet_hiddens": [8]})
    told, before = [exp.training.iterate() for _ in rows], 0
    for row, least in zip(told, rows, strict=True):
        assert least <= row["env_steps_total"] < least + (1 if name == "DQN" else 16 * 8)
        assert abs(row["learner_steps_total"] - before - updates) <= updates // 8
        before = row["learner_steps_total"]
