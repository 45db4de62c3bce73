"""Names of other libraries are answered with ours; files of JoyRL are read; values that cannot be right are refused."""

import re

import pytest

import bray
from bray.algos import ALGORITHMS, get_algo
from bray.cli.main import main
from bray.cli.options import COMMANDS
from bray.config.declare import ScheduleIn, all_keys, members, metadata, options
from bray.config.hints import ELSEWHERE
from bray.envs.config import EnvConfig
from bray.errors import ConfigError
from bray.figures import read_results
from bray.nn import ModelConfig
from bray.optim import Optimizer
from bray.rundir import RunDir
from bray.train.config import DataConfig, LiveConfig, RunConfig
from tests.seed_words import answers

SECTIONS = {"run": RunConfig, "env": EnvConfig, "model": ModelConfig, "live": LiveConfig, "data": DataConfig} | {
    name: get_algo(name).Config for name in ALGORITHMS
}


def experiment(run="PPO", **keys):
    return bray.Experiment(run, "CartPole-v1", use_preset=False, **keys)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("learning_rate", "lr"),
        ("n_steps", "rollout_length"),
        ("net_arch", "model.fcnet_hiddens"),
        ("total_timesteps", "--steps N"),
        ("clip_range", "clip"),
        ("observation_filter", "model.normalize_observations=true"),
        ("num_sgd_iter", "epochs"),
        ("vf_loss_coeff", "value_coef"),
        ("num_gpus", "device=cuda"),
        ("framestack", "env.frame_stack"),
        ("grayscale", "env.atari.grayscale"),
        ("lstm_use_prev_action_reward", "env.wrappers=[obs_plus_prev_action_reward]"),
    ],
)
def test_a_key_of_another_library_is_answered_with_ours(key, ours):
    with pytest.raises(ConfigError, match=rf"unknown key '{key}'.* In Bray it is .*{re.escape(ours)}"):
        experiment(**{key: 1})


def test_a_key_of_another_algorithm_is_answered_with_those_that_have_it():
    with pytest.raises(
        ConfigError, match=r"unknown key 'rnd' \(python\). PQN has none; it is a key of PPO, A2C, .*DQN"
    ):
        experiment("PQN", rnd=1.0)
    with pytest.raises(ConfigError, match=r"unknown key 'rdn'.*Did you mean .*'rnd'"):
        experiment("PPO", rdn=1.0)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["train", "--run", "PPO", "--env", "CartPole-v1", "--num-samples", "3"], "In Bray it is --seed 0 --seed 1"),
        (["train", "--run", "PPO", "--env", "CartPole-v1", "--local-dir", "x"], "In Bray it is --project DIR"),
        (["rollout", "x"], "In Bray it is bray eval RUN_DIR"),
    ],
)
def test_a_flag_and_a_command_of_another_library(argv, said, capsys):
    assert main(argv) == 2
    assert said in capsys.readouterr().err


def test_every_hint_names_something_that_is_there():
    keys = {name for cls in SECTIONS.values() for path, _ in all_keys(cls) for name in (path[-1], ".".join(path))}
    keys |= {f"{section}.{'.'.join(path)}" for section, cls in SECTIONS.items() for path, _ in all_keys(cls)}
    keys |= {"lambda", "steps", "the"}  # `lambda_` in Python; `--steps`; a sentence
    flags = {"--" + name.replace("_", "-") for name in options(COMMANDS["train"][0])} | {"--seed", "--device"}
    flags |= {f"--{name.replace('_', '-')}" for cls in (RunConfig, DataConfig) for name in options(cls)} | {"-f"}
    for theirs, ours in ELSEWHERE.items():
        word = re.match(r"[\w.-]+", ours.lstrip("`"))[0].rstrip(".")
        known = {"bray", "nothing", "not"} | keys | flags
        assert word in known, (theirs, ours)
        assert not (ours.startswith("bray ") and ours.split()[1] not in COMMANDS), ours


def test_every_word_of_the_ancestors_is_answered(tmp_path):
    """Each command, flag, algorithm and key of their pages works, is answered with ours, or is said not to be here."""
    said = {answer.word: answer for answer in answers(tmp_path)}
    assert [str(a) for a in said.values() if a.kind == "unanswered"] == []
    for word, meaning in {
        "--scheduler": "bray tune --scheduler asha",
        "input": "bray train --data",
        "clip_actions": "clipped always",
        "general_cfg.mode": "bray eval RUN_DIR",
        "rollout checkpoint-1 --run DQN --env CartPole-v0 --steps 10000": "bray eval RUN_DIR",
        "policy.use_cuda": "device=cuda",
        "multiagent": "policies={first: PPO, second: DQN}",
        "policy_mapping_fn": "policy_mapping={agent: policy}",
        "league_manager_start --config a.yaml": "bray train -f LEAGUE.yaml",
    }.items():
        assert meaning in said[word].text
    assert said["output"].kind == "works"
    assert {said[f"--run {name}"].kind for name in ("RainbowDQN", "DQN_new", "R2D2", "QMIX", "Q-Mix", "COMA")} == {
        "works"
    }


def test_a_flag_that_is_a_key_is_answered_with_the_key_and_another_is_not(capsys):
    assert main(["train", "--run", "PPO", "--env", "CartPole-v1", "--rollout-length", "8"]) == 2
    assert "Config keys are written without dashes: rollout_length=VALUE" in capsys.readouterr().err
    assert main(["train", "--run", "PPO", "--env", "CartPole-v1", "--frobnicate", "8"]) == 2
    assert "VALUE" not in capsys.readouterr().err
    assert main(["train", "--run", "PPO", "--env", "CartPole-v1", "--vf-coef", "8"]) == 2
    assert "In Bray it is value_coef" in capsys.readouterr().err


JOYRL = """
general_cfg: {algo_name: DQN, device: cpu, seed: 1, max_episode: 4, max_step: 200}
algo_cfg: {gamma: 0.95, lr: 0.0001, batch_size: 16, memory_capacity: 500, target_update: 4, learning_starts: 20,
  train_every: 2,
  value_layers: [{layer_type: linear, layer_dim: [16], activation: relu}]}
env_cfg: {id: "envs_for_tests:Scripted", terminate_at: 12}
"""


def test_a_file_of_joyrl_is_trained(tmp_path):
    (tmp_path / "joy.yaml").write_text(JOYRL)
    where = ["--project", str(tmp_path), "--trial", "t", "--quiet", "export_graph_after_s=null"]
    assert main(["train", "--yaml", str(tmp_path / "joy.yaml"), *where]) == 0
    last = read_results(tmp_path / "t")[-1]
    assert (last["episodes_total"], last["env_steps_total"]) == (
        4,
        48,
    )  # the arguments of the environment have reached it
    assert last["learner_steps_total"] > 5
    assert RunDir.open(tmp_path / "t").load_checkpoint().weights["core.trunk.layers.0.weight"].shape[0] == 16


def test_a_key_of_joyrl_that_is_other_here_is_answered_with_its_line(tmp_path, capsys):
    (tmp_path / "joy.yaml").write_text(JOYRL.replace("gamma: 0.95", "epsilon_decay: 500"))
    assert main(["train", "--yaml", str(tmp_path / "joy.yaml")]) == 2
    assert re.search(
        r"unknown key 'epsilon_decay' \(.*joy.yaml:3\). In Bray it is epsilon=\{kind: exp", capsys.readouterr().err
    )


PRINTED = """
general_cfg: {algo_name: DQN, device: cpu, env_name: gym, mode: train, collect_traj: true, mp_backend: single,
  n_workers: 1, load_checkpoint: false, load_path: Train_CartPole-v1_DQN_20221026-054757, max_episode: 100,
  max_step: 200, seed: 1, online_eval: true, online_eval_episode: 10, model_save_fre: 500, save_best_model: true,
  save_fig: true, show_fig: false, no_such_key: 1}
algo_cfg: {batch_size: 64, buffer_type: REPLAY_QUE, buffer_size: 5000, epsilon_decay: 500, epsilon_end: 0.01,
  epsilon_start: 0.95, gamma: 0.95, lr: 0.0001, target_update: 4}
env_cfg: {id: CartPole-v1, render_mode: null}
"""


def test_every_key_that_joyrl_prints_is_read_or_answered(tmp_path, capsys):
    """Those that only have another name here are read under it; each of the others is answered with what to do."""
    file = tmp_path / "joy.yaml"
    file.write_text(PRINTED)
    show = ["train", "--yaml", str(file), "--no-preset", "--print-config"]
    assert main(show) == 2
    said = re.findall(
        r"unknown key '(\w+)' \(.*joy.yaml:\d+\)\. (In Bray it is|Leave it out:|)", capsys.readouterr().err
    )
    other = "env_name mode collect_traj mp_backend n_workers load_checkpoint load_path online_eval save_best_model"
    other = [*other.split(), "no_such_key", "buffer_type", "epsilon_decay", "epsilon_end", "epsilon_start"]
    assert [key for key, _ in said] == other
    assert [key for key, answer in said if not answer] == ["no_such_key"]
    file.write_text(re.sub(rf"({'|'.join(other)}): [^,}}]+(, |,(?=\n))?", "", PRINTED))
    assert main(show) == 0
    out, err = capsys.readouterr()
    assert re.search(
        r"joy.yaml is a file of JoyRL. Read as ours: algo_name as run.algorithm, .*buffer_size as algo.", err
    )
    shown = dict(re.findall(r"^ *([\w.]+) +(\S+) +.*joy.yaml:\d+", out, re.M))
    want = {"run.eval_episodes": "10", "run.checkpoint_updates": "500", "run.save_figure": "true"}
    want |= {"run.show_figure": "false", "algo.replay_size": "5000", "algo.target_period": "4", "algo.gamma": "0.95"}
    assert want.items() <= shown.items()


# --- ranges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "keys", "said"),
    [
        ("PPO", {"lr": -1}, "algo.lr.*expected a number > 0 or a schedule of numbers >= 0, got -1"),
        ("PPO", {"lr": {"start": 1e-3, "end": -1e-3, "steps": 10}}, "algo.lr.*a schedule of numbers >= 0"),
        ("PPO", {"seed": -1}, "run.seed.*expected a whole number >= 0, got -1"),
        ("DQN", {"epsilon": 1.5}, "algo.epsilon.*>= 0 and <= 1.*got 1.5"),
        ("DQN", {"epsilon": {"kind": "piecewise", "points": [[0, 1.0], [5, -0.1]]}}, "algo.epsilon"),
        ("DQN", {"priority_beta": -0.1}, "algo.priority_beta"),
        ("PPO", {"fcnet_hiddens": [64, 0]}, r"model.fcnet_hiddens\[1\].*expected a whole number > 0, got 0"),
        ("PPO", {"log_std_init": 1e3}, "model.log_std_init.*<= 20"),
        ("PPO", {"env.atari.repeat_action_probability": 2}, "repeat_action_probability.*<= 1"),
    ],
)
def test_values_that_cannot_be_right_are_refused(run, keys, said):
    with pytest.raises(ConfigError, match=said):
        experiment(run, **keys)


def test_a_learning_rate_may_end_at_zero():
    schedule = {"kind": "linear", "start": 1e-3, "end": 0.0, "steps": 100}
    assert experiment(lr=schedule).config["algo"].lr == schedule


def test_an_algorithm_of_ones_own_cannot_climb_either():
    with pytest.raises(ConfigError, match="lr: expected a number >= 0, got -1"):
        Optimizer([], -1)


WITHOUT_RANGE = {
    "env.clip_rewards": "a sign, a number or a pair; checked where it is used",
    "SAC.target_entropy": "any number is an entropy",
    "CrossQ.target_entropy": "any number is an entropy",
    "CQL.target_entropy": "any number is an entropy",
    "CQL.cql_gap": "any difference of values",
    "SQIL.target_entropy": "any number is an entropy",
    "C51.v_min": "any return; below v_max, checked by the Config",
    "C51.v_max": "any return; above v_min, checked by the Config",
    "Rainbow.v_min": "as of C51",
    "Rainbow.v_max": "as of C51",
    "DT.target_return": "any return",
    "IQN.eta": "depends on risk, checked by the Config",
}


def test_every_number_has_a_range():
    open_ended = set()
    for section, cls in SECTIONS.items():
        for path, option in all_keys(cls):
            if not {int, float} & set(members(option.hint)):
                continue
            limits = [m for m in option.metadata if type(m).__module__ == "annotated_types"]
            if not limits:
                open_ended.add(f"{section}.{'.'.join(path)}")
    assert open_ended == set(WITHOUT_RANGE)
    assert {"PPO", "A2C", "DQN", "SAC"} <= set(ALGORITHMS)
    assert str(ScheduleIn(0.0, 1.0)) == "a schedule of numbers >= 0 and <= 1"
    assert metadata(options(RunConfig)["eval_episodes"].hint)
