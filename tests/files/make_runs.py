"""Small runs of the Bray that is installed, for tests/rundir/test_old_runs.py:

    python tests/files/make_runs.py tests/files/runs-0.3

They are what users of a version have on disk: made once, with its released code, and never again.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import bray

SMALL = "--no-preset --seed 0 --quiet save_figure=false fcnet_hiddens=[8] keep_checkpoints=2 export_graph_after_s=null"
RUNS = {
    "ppo-cartpole": "--run PPO --steps 512 num_envs=2 rollout_length=64 checkpoint_freq=2",
    "dqn-replay": "--run DQN --steps 400 learning_starts=100 checkpoint_freq=1 replay_size=256",
}
LEFT_OUT = ("tb", "figures", "bray.log", ".lock", "progress.csv")


def main(folder: Path) -> None:
    answered = {}
    for name, words in RUNS.items():
        where = ["--project", str(folder), "--trial", name, "--env", "CartPole-v1"]
        for command in (["train", *where, *words.split(), *SMALL.split()], ["export", str(folder / name)]):
            subprocess.run([sys.executable, "-m", "bray", *command], check=True)
        for path in (folder / name / part for part in LEFT_OUT):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        exp = bray.Experiment.load(folder / name)
        obs = np.random.default_rng(0).uniform(-0.2, 0.2, (20, 4)).astype(np.float32)
        answered[name] = {"obs": obs.tolist(), "actions": [int(exp.policy(x)) for x in obs]}
        exp.close()
    (folder / "actions.json").write_text(json.dumps(answered))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
