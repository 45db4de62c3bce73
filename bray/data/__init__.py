"""Data: rollouts, replay and trajectory files. Numpy and Numba only."""

from bray.data.episodes import Episodes
from bray.data.experience import Batch, Counts, Dataset, EndOfData, Experience, Replay, Sequences
from bray.data.files import EpisodeReader, EpisodeWriter, to_pickle, write_episodes
from bray.data.generation import Generation
from bray.data.limit import RateLimit
from bray.data.piece import Piece, nstep, unroll
from bray.data.ring import ReplayRing
from bray.data.rollouts import Rollouts
from bray.data.sources import DataSet, EpisodeSource, open_data
from bray.data.store import PrioritizedBuffer, ReplayBuffer

__all__ = [
    "Batch",
    "Counts",
    "DataSet",
    "Dataset",
    "EndOfData",
    "EpisodeReader",
    "EpisodeSource",
    "EpisodeWriter",
    "Episodes",
    "Experience",
    "Generation",
    "Piece",
    "PrioritizedBuffer",
    "RateLimit",
    "Replay",
    "ReplayBuffer",
    "ReplayRing",
    "Rollouts",
    "Sequences",
    "nstep",
    "open_data",
    "to_pickle",
    "unroll",
    "write_episodes",
]
