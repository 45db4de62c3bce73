"""cpprb's PrioritizedReplayBuffer: add 1, sample 256, update 256 priorities.

`--variant compact` reads next observations from the next row (`next_of`, both cases) and shares the overlapping frames
of a stack (`stack_compress`, frames only; the stack is then the last axis).
"""

from importlib.metadata import version

import common
import numpy as np
from cpprb import PrioritizedReplayBuffer

CHUNK = 1_000


def main() -> None:
    parser = common.parser(__doc__, common.REPLAY_CASES)
    parser.add_argument("--variant", choices=["plain", "compact"], default="plain")
    args = parser.parse_args()
    capacity, shape, dtype = common.REPLAY_CASES[args.case]
    compact = args.variant == "compact"
    stacked = args.case == "replay-frames"
    if stacked and compact:
        frames = common.random_observations(84, (84, CHUNK + 4), dtype)
        observations = np.stack([frames[..., i : i + 4] for i in range(CHUNK + 1)])
    else:
        observations = common.random_observations(CHUNK + 1, shape, dtype)

    columns = {
        "obs": {"shape": observations.shape[1:], "dtype": dtype},
        "act": {"dtype": np.int64},
        "rew": {},
        "done": {},
    }
    options = {}
    if compact:
        options["next_of"] = "obs"
        if stacked:
            options["stack_compress"] = "obs"
    else:
        columns["next_obs"] = columns["obs"]
    replay = PrioritizedReplayBuffer(capacity, columns, alpha=common.REPLAY_ALPHA, **options)

    act, rew, done = np.zeros(CHUNK, np.int64), np.ones(CHUNK), np.zeros(CHUNK)
    for _ in range(capacity // CHUNK):
        replay.add(obs=observations[:-1], act=act, rew=rew, next_obs=observations[1:], done=done)
    assert replay.get_stored_size() == capacity

    batch = replay.sample(common.REPLAY_BATCH, beta=common.REPLAY_BETA)
    expected = (common.REPLAY_BATCH, *observations.shape[1:])
    assert batch["obs"].shape == batch["next_obs"].shape == expected, (batch["obs"].shape, expected)

    turn = 0

    def add() -> None:
        nonlocal turn
        turn = (turn + 1) % 64
        replay.add(obs=observations[turn], act=1, rew=1.0, next_obs=observations[turn + 1], done=0.0)

    def sample() -> np.ndarray:
        return replay.sample(common.REPLAY_BATCH, beta=common.REPLAY_BETA)["indexes"]

    name = "cpprb (compact)" if compact else "cpprb"
    common.measure_replay(name, version("cpprb"), args.case, args.seconds, add, sample, replay.update_priorities)


if __name__ == "__main__":
    main()
