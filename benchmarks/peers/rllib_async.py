"""RLlib's IMPALA and APPO with two env runners, through its own API: steps/s, or the seconds to a return.

RLlib is inside Ray's wheel; it needs ray[rllib] (dm-tree, lz4, scipy, ormsgpack), for Pong ale-py and
opencv-python-headless. Prints one JSON line. The clock of `--until` begins with the building of the algorithm, after
ray.init. Pong's frames are stacked by RLlib's connectors in env runner and learner, as in its own examples.
Its count of steps learnt from has one more for each piece of an episode, and the whole batch for each minibatch: it is
divided by their number.
"""

import logging

import async_cases as cases
import ray
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.connectors.learner.frame_stacking import FrameStackingLearner
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env


def network(case: cases.Case) -> DefaultModelConfig:
    if not case.pictures:
        return DefaultModelConfig(fcnet_hiddens=list(cases.HIDDEN), fcnet_activation="tanh", vf_share_layers=False)
    dense = (512, 7, 1)  # what reaches it is 7 x 7
    filters = [[*f, "valid"] for f in (*cases.NATURE, dense)]
    return DefaultModelConfig(conv_filters=filters, conv_activation="relu", vf_share_layers=True)


def configure(case: cases.Case, seed: int):
    made = IMPALAConfig()
    if case.run == "APPO":
        made = APPOConfig().training(
            lambda_=cases.LAMBDA,
            clip_param=cases.CLIP,
            # it drops batches where the learner is the slower side, and passes are then fewer
            use_circular_buffer=False,
            num_epochs=cases.EPOCHS,
            minibatch_size=case.batch // cases.MINIBATCHES,
        )
    if case.pictures:
        register_env("pong", lambda _: cases.make_pong(scale_obs=True, grayscale_newaxis=True))
        made.env_runners(env_to_module_connector=lambda *_: FrameStackingEnvToModule(num_frames=cases.FRAMES))
        made.training(learner_connector=lambda *_: FrameStackingLearner(num_frames=cases.FRAMES))
    return (
        made.environment("pong" if case.pictures else case.env)
        .env_runners(
            num_env_runners=cases.WORKERS, num_envs_per_env_runner=cases.ENVS, rollout_fragment_length=case.length
        )
        .learners(num_learners=0)
        .training(
            lr=case.lr,
            gamma=cases.GAMMA,
            train_batch_size_per_learner=case.batch,
            entropy_coeff=cases.ENTROPY_COEF,
            vf_loss_coeff=cases.VALUE_COEF,
            grad_clip=cases.MAX_GRAD_NORM,
        )
        .rl_module(model_config=network(case))
        .reporting(min_time_s_per_iteration=1)
        .debugging(seed=seed)
    )


def main() -> None:
    args = cases.arguments(__doc__, list(cases.CASES))
    case = cases.CASES[args.case]
    alike = {"worker_niceness": 0}  # else env runners give way to whatever else runs
    ray.init(
        num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False, _system_config=alike
    )
    watch = cases.Watch(args.seconds, args.until)
    algo = configure(case, args.seed).build_algo()
    done, learnt = False, {}
    while not done:
        result = algo.train()
        runners, learnt = result["env_runners"], result.get("learners", {}).get("__all_modules__", learnt)
        done = watch.tick(
            runners.get("num_env_steps_sampled_lifetime"),
            learnt.get("num_env_steps_trained_lifetime", 0) // (cases.MINIBATCHES if case.run == "APPO" else 1),
            runners.get("episode_return_mean"),
        )
    cases.report("rllib", ray.__version__, args.case, watch)
    algo.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
