"""Lists of pieces from samplers: through memory that two processes share, and from several workers to one learner."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from sources_for_tests import make_piece, side_by_side

from bray import tree
from bray.act import Clock
from bray.data import Counts, Piece
from bray.data.piece import COLUMNS
from bray.envs.rewards import Moments
from bray.train.config import RunConfig
from bray.train.piece_memory import PLACES, PieceReader, PieceWriter
from bray.train.sampler import Played, SamplerPlan
from bray.train.workers import WorkerSource


def same(a: Piece, b: Piece):
    told = ("side", "state_every", "start", "in_line")
    assert [getattr(a, name) for name in told] == [getattr(b, name) for name in told]
    return all(
        (getattr(a, name) is None) == (getattr(b, name) is None) and tree.equal(getattr(a, name), getattr(b, name))
        for name in COLUMNS
        if getattr(a, name) is not None
    )


def pieces_of(rng, number, lengths):
    out = []
    for i, length in enumerate(lengths):
        piece = make_piece(rng, length, i, version=number, state_every=4 if i == 1 else None)
        out.append(replace(piece, side="ab"[i % 2]))
    return out


def test_pieces_of_any_number_and_length_go_through_memory(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "m"
    writer, reader = PieceWriter(path), PieceReader(path)
    kept, files, layouts = [], 0, 0
    for number in range(40):
        lengths = [8, 8] if number < 10 else [int(n) for n in rng.integers(1, 60, rng.integers(0, 4))]
        pieces = pieces_of(rng, number, lengths)
        written = writer.write(pieces)
        assert all(piece.obs is None for piece in written.pieces)  # not sent
        files, layouts = files + (written.file is not None), layouts + (written.layout is not None)
        kept.append((pieces, reader.read(written)))
        assert list(tmp_path.iterdir()) == []
        for sent, got in kept[-PLACES:]:  # those before are written over
            assert len(sent) == len(got)
            assert all(map(same, sent, got))
        if number == 9:
            assert (files, layouts) == (1, 1)  # nothing more is told while nothing changes
    assert files < 12


def test_files_that_nobody_read_are_taken_away(tmp_path):
    writer, reader = PieceWriter(tmp_path / "m"), PieceReader(tmp_path / "m")
    writer.write(pieces_of(np.random.default_rng(0), 0, [5]))
    assert len(list(tmp_path.iterdir())) == 1
    reader.remove()
    assert list(tmp_path.iterdir()) == []


class Scripted:
    """A worker that plays what it is told."""

    name, process_id = "scripted", 0

    def __init__(self, answers):
        self.answers, self.asked = list(answers), 0

    def started(self):
        pass

    def send(self, method, *arguments):
        assert method == "play"
        self.asked += 1

    def receive(self, timeout):
        self.asked -= 1
        pieces = self.answers.pop(0)
        return Played(pieces, Counts(sum(int(p.valid.sum()) for p in pieces)), {}, [], Moments())

    def close(self):
        pass


def source_of(answers):
    home = SimpleNamespace(
        start=lambda plan: Scripted(answers[plan.index - 1]),
        publish=lambda weights, clock: None,
        wait=lambda workers, timeout: [w for w in workers if w.asked],
        close=lambda: None,
    )
    plan = SamplerPlan(None, RunConfig(num_workers=len(answers)), None, None, None, index=0, rows=8, state_every=1)
    source = WorkerSource(plan, home, dict)
    source.publish("default", dict, Clock())
    return source


def test_workers_bring_the_pieces_of_each_side():
    """Those that are in step side by side, as one process would have played them; ragged ones as they are."""
    rng = np.random.default_rng(1)
    in_step = [
        [replace(side_by_side(*(make_piece(rng, 8, None) for _ in range(2))), side=side) for side in "ab"]
        for _ in range(3)
    ]
    source = source_of([[answer] for answer in in_step])
    pieces, counts = source.gather()
    assert [(piece.side, piece.num_envs) for piece in pieces] == [("a", 6), ("b", 6)]
    for k, piece in enumerate(pieces):
        assert tree.equal(piece.obs, np.concatenate([answer[k].obs for answer in in_step], 1))
    assert counts.env_steps == sum(int(p.valid.sum()) for answer in in_step for p in answer)
    source.close()
    ragged = [pieces_of(rng, w, lengths) for w, lengths in enumerate(([3, 9], [], [5]))]
    source = source_of([[answer] for answer in ragged])
    pieces, _ = source.gather()
    assert all(piece.lent for piece in pieces)
    assert all(map(same, pieces, [piece for answer in ragged for piece in answer]))
    source.close()
