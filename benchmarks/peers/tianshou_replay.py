"""Tianshou's PrioritizedReplayBuffer: add 1, sample 256, update 256 priorities.

`--variant compact` keeps one copy of each frame: next observations are read from the next row (both cases), and the
stack of four is put together when sampled (frames only).
"""

from importlib.metadata import version

import common
import numpy as np
from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer

CHUNK = 1_000


def main() -> None:
    parser = common.parser(__doc__, common.REPLAY_CASES)
    parser.add_argument("--variant", choices=["plain", "compact"], default="plain")
    args = parser.parse_args()
    capacity, shape, dtype = common.REPLAY_CASES[args.case]
    compact = args.variant == "compact"
    options = {"ignore_obs_next": True} if compact else {}
    if compact and args.case == "replay-frames":
        options.update(stack_num=4, save_only_last_obs=True)
    replay = PrioritizedReplayBuffer(capacity, alpha=common.REPLAY_ALPHA, beta=common.REPLAY_BETA, **options)

    frames = common.random_observations(CHUNK, shape, dtype)

    def transition(i: int) -> Batch:
        return Batch(
            obs=frames[i],
            act=1,
            rew=1.0,
            terminated=i == CHUNK - 1,
            truncated=False,
            obs_next=frames[(i + 1) % CHUNK],
            info={},
        )

    options.pop("stack_num", None)  # the source of a bulk copy has to be unstacked
    chunk = ReplayBuffer(CHUNK, **options)
    for i in range(CHUNK):
        chunk.add(transition(i))
    for _ in range(capacity // CHUNK):
        replay.update(chunk)
    assert len(replay) == capacity

    batch, _ = replay.sample(common.REPLAY_BATCH)
    expected = (common.REPLAY_BATCH, *shape)
    assert batch.obs.shape == batch.obs_next.shape == expected, (batch.obs.shape, batch.obs_next.shape, expected)

    ready = [transition(i) for i in range(64)]
    turn = 0

    def add() -> None:
        nonlocal turn
        turn = (turn + 1) % len(ready)
        replay.add(ready[turn])

    def sample() -> np.ndarray:
        return replay.sample(common.REPLAY_BATCH)[1]

    name = "tianshou (compact)" if compact else "tianshou"
    common.measure_replay(name, version("tianshou"), args.case, args.seconds, add, sample, replay.update_weight)


if __name__ == "__main__":
    main()
