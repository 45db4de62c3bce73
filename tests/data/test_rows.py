"""Pieces as samples of a buffer and back: nothing changes on the way, wherever batches are cut and whatever is
dropped."""

from dataclasses import replace

import numpy as np
import pytest

from bray import tree
from bray.act import Clock
from bray.algos.rows import advantages
from bray.data.experience import Counts, Replay
from bray.data.piece import Piece
from bray.data.rollouts import Rollouts
from bray.data.rows import Decoder, to_samples

COLUMNS = ("obs", "action", "reward", "terminated", "truncated", "valid", "first", "outputs", "extras", "version")


class Game:
    """A game that is played at random by the autoreset rule, in pieces; each observation says whose it is and when it
    was."""

    def __init__(self, stream, rng, state_every=None, most=9):
        self.stream, self.rng, self.state_every, self.most = stream, rng, state_every, most
        self.tick, self.steps, self.dead, self.length = 0, 0, False, 0
        self.return_ = 0.0

    def _obs(self, ticks):
        number = np.stack([np.full(len(ticks), self.stream), ticks], -1).astype(np.float32)
        return {"number": number[:, None], "picture": (ticks[:, None, None] % 250).astype(np.uint8)}

    def play(self):
        """(piece, counts)"""
        t, rng = int(self.rng.integers(1, self.most + 1)), self.rng
        if self.state_every is not None:
            t = self.state_every * int(rng.integers(1, 4))
        ticks = self.tick + np.arange(t + 1)
        valid, first, terminated, truncated = (np.zeros((t + 1, 1), bool) for _ in range(4))
        reward = np.zeros((t, 1), np.float32)
        ended, steps = [], 0
        was_dead = self.tick == 0
        for i in range(t):
            valid[i], first[i] = not self.dead, was_dead
            was_dead, was = self.dead, self.dead
            self.dead = False
            if not was:
                reward[i] = rng.integers(-5, 6)
                self.return_ += float(reward[i, 0])
                self.length += 1
                steps += 1
                over = rng.random()
                terminated[i], truncated[i] = over < 0.2, 0.2 <= over < 0.3
                if over < 0.3:
                    ended.append((self.return_, self.length))
                    self.return_, self.length, self.dead = 0.0, 0, True
        first[t] = was_dead
        self.tick += t
        self.steps += steps
        state = None
        if self.state_every is not None:
            state = (np.arange(ticks[0], ticks[-1], self.state_every, dtype=np.float32)[:, None, None],)
        piece = Piece(
            obs=self._obs(ticks),
            action=rng.integers(0, 3, (t, 1)),
            reward=reward,
            terminated=terminated[:t],
            truncated=truncated[:t],
            valid=valid[:t],
            first=first,
            outputs={"value": rng.standard_normal((t + 1, 1)).astype(np.float32)},
            extras={"logp": rng.standard_normal((t, 1)).astype(np.float32)},
            state=state,
            state_every=self.state_every or 1,
            version=rng.integers(0, 100, (t, 1)),
            stream=np.array([self.stream]),
            start=int(ticks[0]),
        )
        return piece.check(), Counts(steps, tuple(ended))


def pushed(games, pieces, rng, origin=1):
    """(pieces, counts, samples) of games that push in turns, from one process."""
    made, total = [], 0
    for _ in range(pieces):
        piece, counts = games[rng.integers(len(games))].play()
        total += counts.env_steps
        made.append((piece, counts, to_samples(piece, origin, total, counts.episodes)))
    return made


def cut(samples, rng, most=11):
    """The samples in batches of any size."""
    at, n = 0, len(samples["reward"])
    while at < n:
        size = int(rng.integers(1, most))
        yield tree.index(samples, slice(at, at + size))
        at += size


def decoded(batches):
    decoder = Decoder()
    out, total, episodes = [], 0, []
    for batch in batches:
        pieces, counts = decoder.decode(batch)
        out += [piece.check() for piece in pieces]
        total += counts.env_steps
        episodes += counts.episodes
    return out, total, episodes


def assert_same(got, want):
    for name in COLUMNS:
        for (path, a), (_, b) in zip(
            tree.paths(getattr(got, name), name), tree.paths(getattr(want, name), name), strict=True
        ):
            assert np.asarray(a).dtype == np.asarray(b).dtype, path
            np.testing.assert_array_equal(a, b, err_msg=path)
    assert int(got.stream[0]) == int(want.stream[0])
    assert int(got.start) == int(want.start)


def test_a_piece_becomes_its_rows_and_the_observation_behind_them():
    piece, _ = Game(4, np.random.default_rng(1)).play()
    samples = to_samples(piece, 17, 40, ((2.0, 3),))
    t = piece.length
    assert {len(x) for x in tree.leaves(samples)} == {t + 1}
    assert samples["joint"].tolist() == [False] * t + [True]
    assert samples["tick"].tolist() == list(range(t + 1))
    assert set(samples["stream"].tolist()) == {4}
    assert samples["valid"].tolist() == [*piece.valid[:, 0].tolist(), False]
    np.testing.assert_array_equal(samples["obs"]["number"], piece.obs["number"][:, 0])
    np.testing.assert_array_equal(samples["outputs"]["value"], piece.outputs["value"][:, 0])
    (back,), told = Decoder().decode(samples)
    assert_same(back, piece)
    assert told == Counts(40, ((2.0, 3),))
    one = replace(piece, version=7)
    assert Decoder().decode(to_samples(one, 17, 1, ()))[0][0].version.tolist() == [[7]] * t


@pytest.mark.parametrize("seed", range(25))
def test_batches_may_be_cut_anywhere(seed):
    """Games of one process push in turns; what comes back are the pieces that were pushed, each whole."""
    rng = np.random.default_rng(seed)
    made = pushed([Game(i, rng) for i in range(3)], 30, rng)
    samples = tree.concat([s for *_, s in made])
    got, total, episodes = decoded(cut(samples, rng))
    assert len(got) == len(made)
    for piece, (want, *_) in zip(got, made, strict=True):
        assert_same(piece, want)
    assert total == sum(c.env_steps for _, c, _ in made) == sum(int(p.valid.sum()) for p in got)
    assert episodes == [e for _, c, _ in made for e in c.episodes]


@pytest.mark.parametrize("seed", range(25))
def test_rows_that_are_dropped_leave_what_still_follows_each_other(seed):
    """A full queue drops rows. Nothing is joined that does not follow, nothing else is lost, and all steps are
    counted."""
    rng = np.random.default_rng(100 + seed)
    made = pushed([Game(i, rng) for i in range(2)], 30, rng)
    samples = tree.concat([s for *_, s in made])
    n = len(samples["reward"])
    keep = np.ones(n, bool)
    for _ in range(6):
        start = int(rng.integers(0, n - 1))
        keep[start : start + int(rng.integers(1, 15))] = False
    keep[-1] = True  # somebody goes on
    left = tree.index(samples, keep)
    got, total, episodes = decoded(cut(left, rng))

    # by hand: a row can be learnt from if its successor, of the same piece, is there too
    ends = np.append(samples["joint"], True)
    follows = {i for i in range(n - 1) if keep[i] and keep[i + 1] and not ends[i]}
    wanted = sorted((int(samples["stream"][i]), int(samples["tick"][i])) for i in follows)
    rows = sorted((int(p.stream[0]), int(p.start) + t) for p in got for t in range(p.length))
    assert rows == wanted
    whole = {int(g): [] for g in np.unique(samples["stream"])}
    for piece, *_ in made:
        whole[int(piece.stream[0])].append(piece)
    for piece in got:
        origin = next(
            p for p in whole[int(piece.stream[0])] if p.start <= piece.start and piece.start < p.start + p.length
        )
        at = int(piece.start - origin.start)
        assert_same(piece, origin.rows(at, at + piece.length))
    assert total == sum(c.env_steps for _, c, _ in made)
    sent = [e for _, c, _ in made for e in c.episodes]
    assert len(episodes) <= len(sent)
    assert set(episodes) <= set(sent)


def test_two_games_whose_rows_are_interleaved_are_not_mixed():
    """As from two shards of a buffer, a batch of each in turn: a piece ends where the other game's rows come."""
    rng = np.random.default_rng(3)
    games = [Game(i, rng, most=12) for i in range(2)]
    (a, _), (b, _) = (next(made for made in iter(g.play, None) if made[0].length >= 8) for g in games)
    x, y = to_samples(a, 1, 5, ()), to_samples(b, 2, 6, ())
    batches = [tree.index(s, slice(i, i + 3)) for i in range(0, 18, 3) for s in (x, y)]
    got, total, _ = decoded([batch for batch in batches if len(batch["reward"])])
    assert total == 11
    for piece in got:
        numbers = piece.obs["number"][:, 0]
        assert set(numbers[:, 0].tolist()) == {float(piece.stream[0])}
        assert np.diff(numbers[:, 1]).tolist() == [1.0] * piece.length
        whole = (a, b)[int(piece.stream[0])]
        at = int(piece.start - whole.start)
        assert_same(piece, whole.rows(at, at + piece.length))


def test_a_gap_in_the_ticks_of_a_game_begins_a_new_piece():
    piece, _ = Game(1, np.random.default_rng(8), most=9).play()
    samples = to_samples(piece, 1, piece.length, ())
    assert piece.length >= 5
    got, *_ = decoded([tree.index(samples, [0, 1, 2, 4, *range(5, piece.length + 1)])])
    assert [(p.start, p.length) for p in got] == [(0, 2), (4, piece.length - 4)]


def test_steps_are_counted_by_those_who_make_them():
    """Of several processes, in any order, each step once."""
    rng = np.random.default_rng(0)
    decoder, total = Decoder(), 0
    piece, _ = Game(1, rng).play()
    for origin, steps in ((1, 5), (2, 100), (1, 9), (1, 7), (2, 100), (3, 1), (2, 101)):
        total += decoder.decode(to_samples(piece, origin, steps, ()))[1].env_steps
    assert total == 9 + 101 + 1


@pytest.mark.parametrize("seed", range(10))
def test_pieces_of_a_memory_come_back_whole(seed):
    rng = np.random.default_rng(200 + seed)
    made = pushed([Game(i, rng, state_every=4) for i in range(3)], 12, rng)
    samples = tree.concat([s for *_, s in made])
    got, total, episodes = decoded(cut(samples, rng, most=6))
    assert total == sum(c.env_steps for _, c, _ in made)
    assert episodes == [e for _, c, _ in made for e in c.episodes]  # also where a sequence ends several
    assert len(got) == len(made)
    for piece, (want, *_) in zip(got, made, strict=True):
        for name in (*COLUMNS, "state"):
            tree.map(
                lambda x, y, name=name: np.testing.assert_array_equal(x, y, err_msg=name),
                getattr(piece, name),
                getattr(want, name),
            )
        assert (piece.stream, piece.start, piece.state_every) == (want.stream, want.start, 4)


def test_a_dropped_sequence_cuts_the_piece_in_two():
    game = Game(1, np.random.default_rng(1), state_every=4)
    while (piece := game.play()[0]).length < 12:
        pass
    first = piece.start
    got, *_ = decoded([tree.index(to_samples(piece, 1, piece.length, ()), [0, 2])])
    assert [(p.start, p.length) for p in got] == [(first, 4), (first + 8, 4)]
    np.testing.assert_array_equal(got[0].outputs["value"][4], piece.outputs["value"][4])  # what it bootstraps from


def test_a_sequence_that_is_not_full_is_padded_with_rows_that_do_not_count():
    rng = np.random.default_rng(0)
    piece, counts = Game(1, rng, state_every=4).play()
    while piece.length < 8:
        piece, counts = Game(1, rng, state_every=4).play()
    short = piece.rows(0, 6)
    samples = to_samples(short, 1, counts.env_steps, counts.episodes)
    assert samples["reward"].shape == (2, 4)
    (got,), _ = Decoder().decode(samples)
    assert not got.valid[6:].any()
    np.testing.assert_array_equal(got.valid[:6], short.valid)
    # the observation behind the last row is there, and its value too: it bootstraps
    np.testing.assert_array_equal(got.obs["number"][6], piece.obs["number"][6])
    np.testing.assert_array_equal(got.outputs["value"][6], piece.outputs["value"][6])


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("memory", [False, True])
def test_advantages_of_a_rollout_are_those_of_the_pieces_it_is_made_of(seed, memory):
    """Whatever lies side by side in a canvas: each row is there once, with the advantage of the stretch that it came
    in."""
    rng = np.random.default_rng(300 + seed)
    made = pushed([Game(i, rng, state_every=4 if memory else None) for i in range(3)], 40, rng)
    experience, decoder = Rollouts(16, columns=2, state_every=4 if memory else 1), Decoder()
    for batch in cut(tree.concat([s for *_, s in made]), rng):
        for piece in decoder.decode(batch)[0]:
            experience.add(piece)
    found = {}
    while (batch := experience.next(Clock())) is not None:
        c = batch.data.check()
        assert c.reward.shape == ((4, 8) if memory else (16, 2))
        advantage = advantages(c, 0.9, 0.8)
        for t, b in zip(*np.nonzero(c.valid), strict=True):
            key = tuple(c.obs["number"][t, b].tolist())
            assert key not in found
            found[key] = (float(advantage[t, b]), bool(c.truncated[t, b] or c.terminated[t, b]), t, b)
    rows = [(tuple(p.obs["number"][t, 0].tolist()), p, t) for p, *_ in made for t in np.flatnonzero(p.valid[:, 0])]
    missing = [key for key, *_ in rows if key not in found]
    assert len(missing) <= 32  # of the last canvas, which is not full
    assert len(found) > 60
    for key, piece, t in rows:
        if key not in found or not found[key][1]:
            continue
        # the last row of a stretch: its own reward and the value behind it
        value, end = piece.outputs["value"][:, 0], piece.terminated[t, 0]
        want = piece.reward[t, 0] + (0.0 if end else 0.9 * value[t + 1]) - value[t]
        assert found[key][0] == pytest.approx(float(want), abs=1e-5)
    for key, piece, t in rows:  # the others: by the definition, from the row behind them
        after = (key[0], key[1] + 1)
        if key in found and not found[key][1] and after in found:
            value = piece.outputs["value"][:, 0]
            want = piece.reward[t, 0] + 0.9 * value[t + 1] - value[t] + 0.9 * 0.8 * found[after][0]
            assert found[key][0] == pytest.approx(float(want), abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_transitions_of_a_replay_are_those_of_the_games(seed):
    rng = np.random.default_rng(400 + seed)
    made = pushed([Game(i, rng) for i in range(3)], 30, rng)
    experience, decoder = Replay(10_000, 32, gamma=0.9), Decoder()
    for batch in cut(tree.concat([s for *_, s in made]), rng):
        for piece in decoder.decode(batch)[0]:
            experience.add(replace(piece, extras={}))
    live = [(p, t) for p, *_ in made for t in np.flatnonzero(p.valid[:, 0])]
    assert len(experience) == len(live)
    drawn = experience.ring.sample(4096, rng, 1.0)
    rows = {tuple(p.obs["number"][t, 0].tolist()): (p, t) for p, t in live}
    seen = set()
    for i in range(4096):
        key = tuple(drawn["obs"]["number"][i].tolist())
        seen.add(key)
        piece, t = rows[key]
        assert drawn["next_obs"]["number"][i].tolist() == [key[0], key[1] + 1]
        assert drawn["reward"][i] == piece.reward[t, 0]
        assert drawn["discount"][i] == pytest.approx(0.0 if piece.terminated[t, 0] else 0.9)
    assert seen == set(rows)
