"""What one live game can do to the others: to their share of what is learnt, to rewards, to the score."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from bray.data.experience import Counts
from bray.train.fair import BEGINS, HEARD_S, NEW, PATIENCE_S, FairQueue, GameReturns, Places, RewardLimit, Votes

ROWS = 2048


def piece(rows=32, reward=1.0):
    return SimpleNamespace(length=rows, reward=np.full((rows, 1), reward, np.float32))


class Games:
    """Games that send at their own pace into a queue, and a learner that takes all that it is given."""

    def __init__(self, rates, rows=ROWS, **options):
        self.now, self.rates, self.sent = 0.0, rates, Counter()
        self.queue = FairQueue(rows, clock=lambda: self.now, **options)
        self.taken, self.batches, self.filled = Counter(), [], 0

    def play(self, seconds, every=0.01):
        for _ in range(round(seconds / every)):
            self.now += every
            for game, rate in self.rates.items():
                while self.sent[game] + 32 <= rate * self.now:
                    self.sent[game] += 32
                    self.queue.put(game, piece(), Counts(32))
            for took, _, game in self.queue.take():
                if took is not None:
                    self.taken[game] += took.length
            if self.taken.total() >= self.queue.rows:
                self.batches.append(self.taken)
                self.taken = Counter()
                self.queue.next_batch()


def test_a_game_that_is_1000_times_as_fast_does_not_own_the_batches():
    """31 games of 10 rows a second and one of 10,000: batches come as if it were one of 32."""
    games = Games({0: 10_000.0} | dict.fromkeys(range(1, 32), 10.0))
    games.play(4.0)  # until all have sent a piece
    games.batches.clear()
    games.play(30.0)
    assert len(games.batches) >= 4
    for batch in games.batches[1:]:
        assert batch[0] <= 3 * ROWS / 32
        assert len(batch) == 32
    games = Games({0: 10_000.0} | dict.fromkeys(range(1, 32), 10.0), fair=False)
    games.play(1.0)
    assert games.batches[-1][0] > 0.9 * ROWS, "fair=false: as they come"


def test_the_share_of_one_of_four_games_is_that_of_a_fast_one():
    games = Games({0: 1000.0, 1: 50.0, 2: 50.0, 3: 50.0})
    games.play(60.0)
    assert len(games.batches) > 3
    for batch in games.batches[2:]:
        assert batch[0] <= 0.42 * ROWS  # 2 / (N + 1)


def test_games_of_like_speed_lose_nothing():
    rates = {i: 60.0 + 10.0 * i for i in range(8)}
    games = Games(rates)
    games.play(60.0)
    assert games.queue.waiting < ROWS
    assert sum(games.sent.values()) - games.queue.waiting == sum((sum(games.batches, games.taken)).values())


def test_nobody_waits_for_games_that_are_silent():
    """Three games have sent one piece each and pause; the fourth is held up by them for five seconds at most."""
    games = Games({0: 1000.0})
    for silent in (1, 2, 3):
        games.queue.put(silent, piece(), Counts(32))
    games.play(PATIENCE_S + 3.0)
    assert len(games.batches) >= 1
    two = Games({0: 1000.0, 1: 1.0})
    two.play(5.0)
    assert len(two.batches) >= 2, "with two games nobody can say which one is odd"


def test_sessions_that_came_and_went_hold_nobody_up():
    """Somebody starts and ends sessions all the time, each long enough to be a game of its own."""
    games = Games(dict.fromkeys(range(8), 200.0), rows=512)
    for gone in range(1000, 1400):
        games.play(0.05)
        games.queue.put(gone, piece(), Counts(32))
        games.queue.end(gone)
    assert len(games.batches) >= 60, "20 s of 1,600 rows a second"


def test_games_that_bring_one_piece_and_nothing_more_hold_others_up_for_a_moment():
    games = Games({0: 1000.0}, rows=512)
    for silent in range(1000, 1400):  # they do not end
        games.play(0.05)
        games.queue.put(silent, piece(), Counts(32))
    assert len(games.batches) >= 3


def test_who_plays_session_after_session_is_one_game():
    """However long they are: the share is new for 32 rows, then it is his own."""
    for rows in (8, 33, 200):
        places = Places()
        games = []
        for session in range(20):
            games += [places.game(100 + session, min(32, rows - at)) for at in range(0, rows, 32)]
            places.leave(100 + session)
        sent = np.cumsum([min(32, rows - at) for at in range(0, rows, 32)] * 20)
        assert games == [100 if so_far > BEGINS else NEW for so_far in sent]


def test_sessions_at_once_are_games_each():
    places = Places()
    for session in range(3):
        assert places.game(session, 31) == NEW
        assert places.game(session, 2) == session
    assert places.leave(1) == 1
    assert places.game(7, 1) == 1
    assert places.game(8, 1) == NEW
    assert places.leave(99) == 99, "a session that has sent nothing"


def test_games_of_short_sessions_are_not_held_up():
    """32 games of like speed, sessions of 64 rows each: what they send is learnt from in the next batch or two."""
    games, places = Games(dict.fromkeys(range(32), 50.0), rows=1024), Places()
    put, waited = games.queue.put, []

    def put_session(game, piece, counts):
        sent = games.sent[game] - 32
        stream = 1000 * game + sent // 64
        put(places.game(stream, 32), piece, counts)
        if sent % 64:
            games.queue.end(places.leave(stream))
        waited.append(games.queue.waiting)

    games.queue.put = put_session
    games.play(20.0)
    assert len(games.batches) >= 25
    assert max(waited[len(waited) // 4 :]) <= 1024


def test_many_games_all_have_their_turn_where_more_comes_than_is_learnt():
    games = Games({}, rows=64)
    served = Counter()
    for _ in range(200):
        games.now += 0.01
        for game in range(40):
            games.queue.put(game, piece(16), Counts(16))
        served.update(game for took, _, game in games.queue.take() if took is not None)
    assert min(served[game] for game in range(40)) > 0


def test_what_is_dropped_is_the_oldest_of_who_has_most_and_is_counted():
    games = Games({}, rows=64)
    for i in range(10):
        games.queue.put(1, piece(32, i), Counts(32, ((float(i), 32),)))
    games.queue.put(2, piece(32, 99), Counts(32))
    assert games.queue.waiting <= 128
    took = games.queue.take() + games.queue.take() + games.queue.take()
    rewards = [x.piece.reward[0, 0] for x in took if x.piece is not None]
    assert 99 in rewards
    assert 9 in rewards
    assert 0 not in rewards
    assert sum(x.counts.env_steps for x in took) == 11 * 32
    assert sum(len(x.counts.episodes) for x in took) == 10
    assert sum(x.counts.dropped for x in took) + 32 * len(rewards) == 11 * 32


class Heard:
    """Rewards and returns of games, as a source hears of them."""

    def __init__(self, most=1e6):
        self.now = 0.0
        self.votes = Votes(lambda: self.now)
        self.limit, self.returns = RewardLimit(most, self.votes), GameReturns(self.votes)

    def send(self, game, sent, pieces=1):
        """Whether the last one passes."""
        for _ in range(pieces):
            self.votes.heard(game, sent.length)
            passes = self.limit.passes(sent, game)
        return passes


def test_rewards_beyond_what_most_games_send_are_cut_or_left_out():
    heard = Heard()
    assert heard.send(0, piece(reward=1e5)), "a game alone may send what it likes, up to reward_range"
    for game in range(1, 32):
        assert heard.send(game, piece())
    assert heard.limit.now == 10.0
    assert not heard.send(0, piece(reward=1e5))
    assert heard.limit.left_out == 32
    once = piece()
    once.reward[3] = 1e5
    assert heard.send(1, once)
    assert once.reward.max() == 10.0
    assert heard.limit.cut == 1
    assert heard.limit.possible((32.0, 32))
    assert not heard.limit.possible((1e5, 32)), "a return that such rewards cannot make"


def test_rewards_that_most_games_send_are_left_as_they_are():
    heard = Heard()
    for game in range(5):
        assert heard.send(game, piece(reward=700.0))
    assert heard.limit.now == 7000.0
    rare = piece(reward=-5000.0)
    assert heard.send(1, rare)
    assert rare.reward.min() == -5000.0
    small = Heard()
    for game in range(5):
        small.send(game, piece(reward=-0.01))
    goal = piece(reward=-0.01)
    goal.reward[-1] = 1.0
    assert small.send(0, goal)
    assert goal.reward[-1] == 1.0, "the first game that finds a goal learns from it"


def test_reward_range_bounds_what_games_agree_on():
    heard = Heard(20.0)
    for game in range(5):
        heard.send(game, piece(reward=15.0))
    assert heard.limit.now == 20.0


def test_games_are_compared_from_their_first_piece():
    heard = Heard()
    for game in range(3):
        heard.send(game, piece(16))
    assert not heard.send(3, piece(16, 1e5))


def test_many_short_games_do_not_outvote_a_few_long_ones():
    """Votes are rows, up to 512 of each; and games that are gone do not vote for ever."""
    heard = Heard()
    for game in range(4):
        heard.send(game, piece(), pieces=100)
    for game in range(100, 400):
        heard.send(game, piece(reward=1e5))  # of one piece each
    assert heard.limit.now == 10.0
    for game in range(400, 420):
        heard.send(game, piece(reward=1e5), pieces=2)
    assert heard.limit.now == 10.0
    heard.now += HEARD_S + 1.0
    for game in range(500, 503):
        heard.send(game, piece(reward=50.0), pieces=30)  # with so many games it is looked at now and then
    assert heard.limit.now == 500.0


@pytest.mark.parametrize("liars", [1, 3])
def test_a_game_that_lies_has_one_vote_in_the_score(liars):
    heard = Heard()
    assert heard.returns.median is None
    for game in range(8):
        heard.send(game, piece(), pieces=16)
        heard.returns.add(game, [4.0 + game / 8] * 3)
    for liar in range(100, 100 + liars):
        heard.send(liar, piece(), pieces=1000)
        heard.returns.add(liar, [1.6e18] * 500)
    assert 4.0 <= heard.returns.median <= 5.0


def test_the_score_is_of_the_last_episodes():
    heard = Heard()
    for game in range(3):
        heard.send(game, piece())
        heard.returns.add(game, [0.0] * 50 + [float(game)] * 10)
    assert heard.returns.median == 1.0
