"""Data: rollouts, replay and trajectory files. Numpy and Numba only."""

from bray.data.files import EpisodeReader, EpisodeWriter, to_pickle, write_episodes
from bray.data.limit import RateLimit
from bray.data.replay import Replay
from bray.data.store import PrioritizedBuffer, ReplayBuffer
from bray.data.trajectory import Trajectory, nstep, unroll

__all__ = [
    "EpisodeReader",
    "EpisodeWriter",
    "PrioritizedBuffer",
    "RateLimit",
    "Replay",
    "ReplayBuffer",
    "Trajectory",
    "nstep",
    "to_pickle",
    "unroll",
    "write_episodes",
]
