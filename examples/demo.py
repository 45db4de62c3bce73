"""`make demo`: train an agent in seconds, judge it, film it. The same as

bray train --run PPO --env CartPole-v1 --project demo --trial <time> --render
"""

import sys
import time
from pathlib import Path

from bray.cli.train import Options, train
from bray.errors import BrayError


def main() -> int:
    trial = time.strftime("%Y%m%d-%H%M%S")
    try:
        code = train(Options(run="PPO", env="CartPole-v1", project=Path("demo"), trial=trial, render=True))
    except BrayError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    if code == 0:
        print("next: bray train --run DQN --env CartPole-v1    bray algos    bray envs    bray doctor")
    return code


if __name__ == "__main__":
    sys.exit(main())
