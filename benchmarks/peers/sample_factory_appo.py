"""Sample Factory's APPO with two rollout workers, through its own API: steps/s, or the seconds to a return.

It needs a Python of its own (`../install_sample_factory.sh`: numpy below 2, gymnasium below 1). Prints one JSON line.
The clock of `--until` begins with the making of its runner.
As it comes: advantages by GAE, environments of a worker in two groups by turns, inference for both workers in one more
process, the learner in another.
"""

import tempfile
from importlib.metadata import version

import async_cases as cases
import gymnasium as gym
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.envs.env_wrappers import NumpyObsWrapper
from sample_factory.train import make_runner


def make_env(name, cfg=None, env_config=None, render_mode=None):
    if name == "CartPole-v1":
        return gym.make(name)
    return NumpyObsWrapper(gym.wrappers.FrameStack(cases.make_pong(), cases.FRAMES))


def words(case: cases.Case, seed: int, folder: str) -> list[str]:
    """The command line of its training programs, which is how it is configured."""
    set_to = {
        "algo": "APPO",
        "env": case.env,
        "experiment": "case",
        "train_dir": folder,
        "device": "cpu",
        "seed": seed,
        "num_workers": cases.WORKERS,
        "num_envs_per_worker": cases.ENVS,
        "rollout": case.length,
        "batch_size": case.batch // cases.MINIBATCHES,
        "num_batches_per_epoch": cases.MINIBATCHES,
        "num_epochs": cases.EPOCHS,
        "gamma": cases.GAMMA,
        "gae_lambda": cases.LAMBDA,
        "ppo_clip_ratio": cases.CLIP,
        "learning_rate": case.lr,
        "exploration_loss_coeff": cases.ENTROPY_COEF,
        "value_loss_coeff": cases.VALUE_COEF,
        "max_grad_norm": cases.MAX_GRAD_NORM,
        "normalize_input": False,
        "normalize_returns": False,
        "use_rnn": False,
        "nonlinearity": "relu" if case.pictures else "tanh",
        "actor_critic_share_weights": case.pictures,
        "encoder_conv_architecture": "convnet_atari",
        "obs_scale": 255.0 if case.pictures else 1.0,
    }
    return [*(f"--{name}={value}" for name, value in set_to.items()), "--encoder_mlp_layers", *map(str, cases.HIDDEN)]


class Stop(AlgoObserver):
    def __init__(self, watch: cases.Watch):
        self.watch = watch

    def on_training_step(self, runner, training_iteration_since_resume):
        returns = runner.policy_avg_stats.get("reward", [[]])[0]
        mean = sum(returns) / len(returns) if len(returns) else None
        steps = runner.env_steps.get(0, 0)
        if self.watch.tick(steps, cases.EPOCHS * steps, mean):
            runner.cfg.train_for_env_steps = 0  # it stops after this batch


def main() -> None:
    args = cases.arguments(__doc__, [name for name, case in cases.CASES.items() if case.run == "APPO"])
    case = cases.CASES[args.case]
    register_env(case.env, make_env)
    with tempfile.TemporaryDirectory() as folder:
        given = words(case, args.seed, folder)
        cfg = parse_full_cfg(parse_sf_args(given)[0], given)
        watch = cases.Watch(args.seconds, args.until)
        _, runner = make_runner(cfg)
        runner.register_observer(Stop(watch))
        runner.init()
        runner.run()
    cases.report("sample-factory", version("sample-factory"), args.case, watch)


if __name__ == "__main__":
    main()
