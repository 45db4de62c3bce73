"""Weights on their way to whoever acts: the contract of all carriers, and what each of them promises."""

import asyncio
from concurrent.futures import Future

import numpy as np
import pytest

from bray.act import Clock
from bray.act.feed import FileFeed, Latest, SharedFeed
from bray.errors import CheckpointError
from bray.rundir import RunDir

LIMIT_S = 60


def arrays(value):
    return {"weight": np.full((3, 5), value, np.float32), "bias": np.full(7, value, np.float64), "n": np.array(value)}


def publish(feed, value):
    feed.publish(lambda: arrays(float(value)), Clock(10 * value, value))


def holds(publication, value):
    return publication.clock.version == value and all((x == value).all() for x in publication.weights.values())


# --- all carriers -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "files"])
def feed(request, tmp_path):
    if request.param == "memory":
        return SharedFeed(arrays(0.0))
    return FileFeed(RunDir(tmp_path), "m")


def test_the_newest_is_given_once_and_the_same_version_may_be_published_again(feed):
    assert feed.newest(feed.mark) is None
    publish(feed, 1)
    first = feed.newest()
    assert holds(first, 1)
    assert feed.newest(first.mark) is None
    publish(feed, 2)
    publish(feed, 3)
    assert holds(feed.newest(first.mark), 3)
    assert holds(first, 1)  # what was read stays as it is


def test_weights_are_copied_before_publish_returns(feed):
    weights = arrays(1.0)
    feed.publish(lambda: weights, Clock(1, 1))
    weights["weight"][:] = 7
    assert holds(feed.newest(), 1)


def test_who_waits_is_given_what_comes(feed):
    async def main():
        publish(feed, 1)
        known = feed.mark
        assert await feed.wait(known, 0.05) is None
        waiting = asyncio.create_task(feed.wait(known, LIMIT_S))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        publish(feed, 2)
        return await waiting

    assert holds(asyncio.run(main()), 2)


# --- memory that processes share --------------------------------------------------------------------------------------


class Peeping(dict):
    """Weights whose writing lets somebody else read."""

    def __init__(self, feed, value):
        super().__init__(arrays(value))
        self.feed, self.seen = feed, []

    def __getitem__(self, name):
        self.seen.append(self.feed.read())
        return super().__getitem__(name)


def test_weights_are_never_read_half_written():
    feed = SharedFeed(arrays(0.0))
    for value in range(1, 5):
        weights = Peeping(feed, float(value))
        feed.publish(lambda weights=weights: weights, Clock(10 * value, value))
        for seen in weights.seen:
            assert seen.clock == Clock(10 * (value - 1), value - 1)
            assert holds(seen, value - 1)
    assert feed.read().clock == Clock(40, 4)


def test_weights_are_read_whole_after_a_write_that_was_cut_short():
    class CutShort(dict):
        def __getitem__(self, name):
            raise KeyboardInterrupt

    feed = SharedFeed(arrays(0.0))
    publish(feed, 1)
    known = feed.mark
    with pytest.raises(KeyboardInterrupt):
        feed.publish(lambda: CutShort(arrays(2.0)), Clock(2, 2))
    assert feed.newest(known) is None
    assert holds(feed.read(), 1)
    for value in (3, 4, 5):
        weights = Peeping(feed, float(value))
        feed.publish(lambda weights=weights: weights, Clock(value, value))
        assert all(holds(seen, seen.clock.version) for seen in weights.seen)
        assert holds(feed.read(), value)


def test_a_reader_that_was_overtaken_twice_reads_again():
    class Overtaken(SharedFeed):
        overtaken = False

        def views(self, slot):
            if self.overtaken:
                self.overtaken = False
                for value in (2, 3):
                    publish(self, value)
            return super().views(slot)

    feed = Overtaken(arrays(0.0))
    publish(feed, 1)
    feed.overtaken = True
    assert holds(feed.read(), 3)


def test_the_same_version_again_is_something_new():
    feed = SharedFeed(arrays(0.0))
    publish(feed, 1)
    known = feed.mark
    feed.publish(lambda: arrays(5.0), Clock(10, 1))
    assert (feed.newest(known).weights["weight"] == 5).all()


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_label_names_the_newest_and_versions_that_are_skipped_are_not_it(tmp_path):
    run = RunDir(tmp_path)
    for step in (1, 5, 9):
        run.save_checkpoint(step, arrays(float(step)), {}, name="m", best=step == 5)
    assert holds(FileFeed(run, "m", "latest").newest(), 9)
    assert holds(FileFeed(run, "m", "best").newest(), 5)
    assert FileFeed(run, "m", "best").newest(known=5) is None
    assert holds(FileFeed(run, "m", skips=[9]).newest(), 5)
    assert holds(FileFeed(run, "m").read(1), 1)


def test_a_run_without_a_version_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="has no checkpoint 'latest' yet"):
        FileFeed(RunDir(tmp_path), "m", "latest").read()


# --- the newest of many -----------------------------------------------------------------------------------------------


class Sent:
    """Takes publications; each arrives when it is told to."""

    def __init__(self, at_once=False):
        self.versions, self.at_once, self.under_way = [], at_once, []

    def __call__(self, weights, clock):
        self.versions.append(clock.version)
        self.under_way.append(Future())
        if self.at_once:
            self.under_way[-1].set_result(None)
        return self.under_way[-1]


def test_of_publications_that_come_meanwhile_the_newest_follows():
    sent = Sent()
    latest = Latest(sent)
    for value in (1, 2, 3):
        publish(latest, value)
    assert sent.versions == [1]
    sent.under_way[0].set_result(None)
    publish(latest, 4)
    assert sent.versions == [1, 4]  # 2 and 3 were never asked for their weights
    publish(latest, 5)
    sent.under_way[1].set_exception(CheckpointError("they do not fit"))
    with pytest.raises(CheckpointError, match="they do not fit"):
        latest.flush()
    latest.flush()
    assert sent.versions == [1, 4, 5]
    sent.under_way[2].set_result(None)
    latest.flush()  # nothing waits
    assert sent.versions == [1, 4, 5]


def test_publications_are_so_many_seconds_apart_unless_flushed():
    sent = Sent(at_once=True)
    latest = Latest(sent, every=1000.0)
    for value in (1, 2, 3):
        publish(latest, value)
    assert sent.versions == [1]
    latest.flush()
    assert sent.versions == [1, 3]
