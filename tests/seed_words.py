"""The commands, flags and keys on the pages of Bray's four ancestors, and what Bray answers when they are typed:

python -m tests.seed_words        # one line each: works, translated, or not here and why
"""

import contextlib
import io
import json
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import yaml

from bray.cli.main import main
from bray.config import ConfigSource, parse_assignments, parse_json
from bray.errors import ConfigError
from bray.launch.graph import load
from bray.train.setup import set_up

LAUNCH_FILE = Path(__file__).parent / "files" / "launch_sl_rl.yaml"
"""The launch file on Bray's own page, every key of it."""

COMMANDS = {
    "Bray": ["launch --help"],
    "nerveX": [
        f"{name}_start --config a.yaml" for name in ("coordinator", "manager", "league_manager", "learner", "actor")
    ],
    "JoyRL": ["train --yaml FILE"],
    "RLlib": [
        "train --help",
        "train --run DQN --env CartPole-v1",
        "train --env=CartPole-v1 --run=A2C",
        "train -f FILE",
        "rollout checkpoint-1 --run DQN --env CartPole-v0 --steps 10000",
    ],
}
"""What was typed after `rllib`, or in place of `python main.py` and `python -m nervex.system.X`."""

FLAGS = {
    "checkpoint-freq": "10",
    "steps": "10000",
    "stop": '{"episode_reward_mean": 200}',
    "config": '{"num_workers": 8}',
    "config-file": "a.yaml",
    "checkpoint-at-end": "",
    "keep-checkpoints-num": "3",
    "checkpoint-score-attr": "episode_reward_mean",
    "redis-address": "a:1",
    "ray-num-cpus": "1",
    "ray-num-gpus": "1",
    "ray-num-nodes": "1",
    "ray-redis-max-memory": "1",
    "ray-object-store-memory": "1",
    "experiment-name": "a",
    "queue-trials": "",
    "resources-per-trial": "{}",
    "num-samples": "3",
    "local-dir": "a",
    "upload-dir": "a",
    "trial-name-creator": "a",
    "sync-function": "a",
    "loggers": "a",
    "export-formats": "a",
    "max-failures": "1",
    "scheduler": "HyperBand",
    "scheduler-config": "{}",
    "restore": "a",
}
"""Of `rllib train`."""

RLLIB = {
    **{"num_workers": 8, "num_gpus": 0.2, "num_cpus_per_worker": 1, "num_gpus_per_worker": 0, "num_envs_per_worker": 4},
    **{"lr": 0.01, "gamma": 0.85, "env": "CartPole-v1", "env_config": {}, "log_level": "DEBUG", "monitor": True},
    **{"output": "/tmp/debug", "output_compress_columns": [], "input": "sampler", "input_evaluation": []},
    **{"multiagent": {}, "policy_graphs": {}, "policy_mapping_fn": 0, "policies_to_train": ["first"], "callbacks": []},
    **{"resources_per_trial": {}, "ignore_worker_failures": False, "horizon": 9, "soft_horizon": True},
    **{"clip_rewards": True, "clip_actions": True, "preprocessor_pref": "rllib", "evaluation_interval": 1},
    **{"evaluation_num_episodes": 1, "evaluation_config": {}, "custom_resources_per_worker": {}},
    **{"num_cpus_for_driver": 1, "sample_batch_size": 200, "train_batch_size": 200, "batch_mode": "truncate_episodes"},
    "optimizer": "adam",
}
_BESIDE = {"policies_to_train": {"policies": {"first": "DQN", "second": "PPO"}}}
"""What a key of RLlib goes with."""
RLLIB_MODEL = {
    **{"conv_filters": None, "conv_activation": "relu", "fcnet_activation": "tanh", "fcnet_hiddens": [256, 256]},
    **{"free_log_std": False, "squash_to_range": False, "use_lstm": False, "max_seq_len": 20, "lstm_cell_size": 256},
    **{"lstm_use_prev_action_reward": False, "framestack": True, "dim": 84, "grayscale": False, "zero_mean": True},
    **{"custom_preprocessor": None, "custom_model": None, "custom_options": {}},
}
JOYRL = {
    "general_cfg": {
        **{"algo_name": "DQN_new", "device": "cpu", "env_name": "gym", "mode": "train", "collect_traj": True},
        **{"mp_backend": "single", "n_workers": 1, "load_checkpoint": False, "load_path": "Train_CartPole-v1_DQN"},
        **{"max_episode": 100, "max_step": 200, "seed": 1, "online_eval": True, "online_eval_episode": 10},
        **{"model_save_fre": 500, "save_best_model": None, "save_fig": True, "show_fig": False},
    },
    "algo_cfg": {
        "value_layers": [{"layer_type": "linear", "layer_dim": [256], "activation": "relu"}],
        **{"batch_size": 64, "buffer_type": "REPLAY_QUE", "buffer_size": 100000, "epsilon_decay": 500},
        **{"epsilon_end": 0.01, "epsilon_start": 0.95, "gamma": 0.95, "lr": 0.0001, "target_update": 4},
    },
    "env_cfg": {"id": "CartPole-v1", "render_mode": None},
}
NERVEX = {
    **{"policy.use_cuda": True, "env.env_type": "cartpole", "env.import_names": [], "env.env_id": "CartPole-v1"},
    **{"evaluator.stop_val": 195, "policy.policy_type": "dqn", "policy.import_names": [], "policy.on_policy": False},
    **{
        "policy.model.encoder": "fc",
        "use_cuda": True,
        "use_distributed": True,
        "path_agent": ".",
        "ip": "a",
        "port": 1,
    },
    **{"learner.dqn.is_double": True, "learner.dqn.dueling": True, "dqn.discount_factor": 0.9, "env_num": 4},
    **{"episode_num": 2, "maxlen": 10000},
}
ALGORITHMS = {
    "nerveX": "DQN RainbowDQN PPO A2C DDPG TD3 SAC R2D2 IMPALA QMIX COMA ATOC",
    "JoyRL": "DQN_new DQN",
    "RLlib": "DQN PPO A2C PG Q-Mix",
}


class Answer(NamedTuple):
    page: str
    word: str
    kind: str
    """works, translated, not here; or unanswered."""
    text: str

    def __str__(self) -> str:
        return f"{self.page:<7} {self.word:<46} {self.kind}{': ' * bool(self.text)}{self.text}"


def typed(page: str, word: str, argv: list[str]) -> Answer:
    """What `bray ARGV` says."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = main(argv)
    return _answer(page, word, "" if code == 0 else err.getvalue())


def given(page: str, word: str, source: ConfigSource, algo: str = "DQN") -> Answer:
    """What `bray train` says of a config: it would begin to train, or refuse it."""
    try:
        set_up(algo, "CartPole-v1", [source], use_preset=False)
    except ConfigError as e:
        return _answer(page, word, str(e))
    return _answer(page, word, "")


def _answer(page: str, word: str, refusal: str) -> Answer:
    if not refusal:
        return Answer(page, word, "works", "")
    said = re.sub(r" `bray [\w ]+ --help` lists all options\.$", "", refusal.strip().splitlines()[-1])
    for kind, begins in (("translated", "In Bray it is"), ("not here", "It is not here, because|Leave it out:")):
        if found := re.search(rf"(?:{begins}) (.*?)\.?$", said):
            return Answer(page, word, kind, found[1])
    return Answer(page, word, "unanswered", said)


def answers(folder: Path):
    """Every word, one after the other. `folder` is for files."""
    files = {"JoyRL": folder / "joyrl.yaml", "RLlib": folder / "rllib.yaml"}
    files["JoyRL"].write_text(yaml.safe_dump({"general_cfg": {"algo_name": "DQN"}, "env_cfg": {"id": "CartPole-v1"}}))
    files["RLlib"].write_text(yaml.safe_dump({"cartpole": {"run": "PPO", "env": "CartPole-v1"}}))
    for page, commands in COMMANDS.items():
        for command in commands:
            argv = [str(files[page]) if word == "FILE" else word for word in command.split()]
            more = ["--print-config"] if argv[0] == "train" and "--help" not in argv else []
            yield typed(page, command, [*argv, *more])
    run = ["train", "--run", "DQN", "--env", "CartPole-v1", "--print-config"]
    for flag, value in FLAGS.items():
        yield typed("RLlib", f"--{flag}", [*run, f"--{flag}", *([value] if value else [])])
    for page, names in ALGORITHMS.items():
        for name in names.split():
            yield given(page, f"--run {name}", ConfigSource("--run", {}), name)
    for key, value in RLLIB.items():
        source = parse_json(json.dumps(_BESIDE.get(key, {}) | {key: value}))
        yield given("RLlib", key, source, "A2C" if key == "optimizer" else "DQN")
    for key, value in RLLIB_MODEL.items():
        yield given("RLlib", f"model.{key}", parse_json(json.dumps({"model": {key: value}})))
    for group, keys in JOYRL.items():
        for key, value in keys.items():
            yield given("JoyRL", f"{group}.{key}", ConfigSource("file", {group: {key: value}}))
    for key, value in NERVEX.items():
        yield given("nerveX", key, parse_assignments([f"{key}={json.dumps(value)}"]))
    yield from keys_of_launch_file()


def keys_of_launch_file():
    """Every key of the launch file, changed from the command line to what the file says already."""
    graph = load(LAUNCH_FILE)
    for name, values in yaml.safe_load(LAUNCH_FILE.read_text()).items():
        if isinstance(values, dict):
            for key, value in values.items():
                if key not in ("kind", "tick_input_proto", "tick_output_proto", "eval"):
                    load(LAUNCH_FILE, [f"{name}.{key}={json.dumps(value)}"])
                yield Answer("Bray", f"{name}.{key}", "works" if name in graph.components else "unanswered", "")
        else:
            yield Answer("Bray", name, "works" if hasattr(graph.settings, name) else "unanswered", "")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        for answer in answers(Path(made)):
            print(answer)
