"""What other libraries call things, and how to say them here. Messages about unknown keys, flags and commands look here
first."""

from __future__ import annotations

_EPSILON = "epsilon={kind: exp, start: 0.95, end: 0.01, decay: 500} (or kind: linear with steps)"
_SIZE = "rollout_length x num_envs is the size of a batch of PPO and A2C; batch_size that of DQN and SAC"

ELSEWHERE: dict[str, str] = {
    # algorithms
    "learning_rate": "lr",
    "n_steps": "rollout_length (PPO, A2C: steps of each environment per update) or n_step (DQN, SAC: rewards summed "
    "per return)",
    "rollout_fragment_length": "rollout_length",
    "train_batch_size": _SIZE,
    "sgd_minibatch_size": "minibatches: the number of pieces a rollout is cut into",
    "minibatch_size": "minibatches: the number of pieces a rollout is cut into",
    "num_minibatches": "minibatches",
    "n_epochs": "epochs",
    "num_sgd_iter": "epochs",
    "update_epochs": "epochs",
    "clip_range": "clip",
    "clip_param": "clip",
    "clip_coef": "clip",
    "eps_clip": "clip",
    "clip_range_vf": "clip_value",
    "vf_clip_param": "clip_value",
    "vf_coef": "value_coef",
    "vf_loss_coeff": "value_coef",
    "ent_coef": "entropy_coef",
    "entropy_coeff": "entropy_coef",
    "entropy_coeff_schedule": "entropy_coef={kind: linear, start: 0.01, end: 0.001, steps: 1000000}",
    "gae_lambda": "lambda",
    "use_gae": "lambda (1 is the n-step return)",
    "kl_target": "target_kl",
    "grad_clip": "max_grad_norm",
    "buffer_size": "replay_size",
    "memory_capacity": "replay_size",
    "replay_capacity": "replay_size",
    "train_freq": "train_every",
    "gradient_steps": "updates",
    "target_update": "target_period, in gradient steps",
    "target_update_interval": "target_period, in gradient steps",
    "target_network_update_freq": "target_period, in gradient steps",
    "double_q": "double",
    "prioritized_replay": "prioritized",
    "prioritized_replay_alpha": "priority_alpha",
    "prioritized_replay_beta": "priority_beta",
    "epsilon_start": _EPSILON,
    "epsilon_end": _EPSILON,
    "epsilon_decay": _EPSILON,
    "exploration_fraction": _EPSILON,
    "exploration_final_eps": _EPSILON,
    "exploration_config": _EPSILON,
    # networks
    "net_arch": "model.fcnet_hiddens=[64, 64]",
    "hidden_dim": "model.fcnet_hiddens=[128, 128]",
    "policy_kwargs": "the model section: model.fcnet_hiddens, model.fcnet_activation",
    "activation_fn": "model.fcnet_activation",
    "value_layers": "model.layers, the same list",
    "actor_layers": "model.layers, the same list",
    "critic_layers": "model.layers, the same list; model.vf_share_layers=false gives the value its own",
    "branch_layers": "model.layers, as one list",
    "merge_layers": "model.layers, as one list",
    "observation_filter": "model.normalize_observations=true (MeanStdFilter)",
    "squash_to_range": "nothing: actions of bounded boxes are scaled to their bounds always",
    "lstm_use_prev_action_reward": "use_lstm=true with env.wrappers=[obs_plus_prev_action_reward]",
    "lstm_use_prev_action": "use_lstm=true with env.wrappers=[obs_plus_prev_action_reward]",
    "lstm_use_prev_reward": "use_lstm=true with env.wrappers=[obs_plus_prev_action_reward]",
    "framestack": "env.frame_stack=4 (Atari games: env.atari.frame_stack)",
    "grayscale": "env.atari.grayscale",
    "use_attention": "use_lstm=true with model.recurrent=gtrxl",
    "attention_num_transformer_units": "model.attention_layers",
    "attention_num_heads": "model.attention_heads",
    "attention_dim": "model.lstm_cell_size",
    "attention_memory_inference": "model.attention_window",
    "features_extractor_class": "model.custom_preprocessor for the first layer, model.custom_model for all of them",
    "custom_loss": "model.loss_terms={module:function: weight}",
    "load_path": "init_from: `--init-from RUN_OR_CHECKPOINT`",
    # the run
    "total_timesteps": 'steps: `--steps N` or stop={"env_steps_total": N}',
    "max_episode": 'stop={"episodes_total": N}',
    "train_eps": 'stop={"episodes_total": N}',
    "max_step": "env.max_episode_steps",
    "horizon": "env.max_episode_steps",
    "env_name": "env.id",
    "env_id": "env.id",
    "algo_name": "run.algorithm",
    "n_envs": "num_envs",
    "num_envs_per_worker": "num_envs",
    "num_gpus": "device=cuda (auto: a GPU where there is one)",
    "num_cpus": "threads",
    "framework": "nothing: Bray computes with PyTorch",
    "evaluation_interval": "eval_freq",
    "evaluation_num_episodes": "eval_episodes",
    "online_eval": "eval_freq",
    "evaluation_parallel_to_training": "eval_parallel",
    "monitor": "video_freq (films while it trains), or --render (a film of the trained agent)",
    "collect_traj": "`bray collect RUN_DIR`",
    "model_save_fre": "checkpoint_updates",
    "load_checkpoint": "`bray train --resume RUN_DIR` or `--init-from RUN_DIR`",
    "verbose": "--quiet, --log-level",
    "tensorboard_log": "nothing: RUN_DIR/tb always has the events",
    # flags of `bray train`
    "--num-samples": "--seed 0 --seed 1 ...: one run for each",
    "--local-dir": "--project DIR",
    "--experiment-name": "--trial NAME",
    "--checkpoint-at-end": "nothing: there always is a checkpoint at the end",
    "--keep-checkpoints-num": "--keep-checkpoints N",
    "--checkpoint-score-attr": "--checkpoint-score KEY",
    "--total-timesteps": "--steps N",
    "--algo": "--run ALGO",
    "--gym-id": "--env ENV",
    "--num-gpus": "--device cuda",
    "--num-timesteps": "--steps N",
    # commands
    "bray rollout": "bray eval RUN_DIR",
    "bray evaluate": "bray eval RUN_DIR",
    "bray enjoy": "bray eval RUN_DIR --render",
    "bray test": "bray eval RUN_DIR",
    "bray learn": "bray train",
    "bray list": "bray runs",
}
"""A name elsewhere (a key, `--flag` or `bray command`) -> ours."""


def hint(name: str) -> str:
    """The end of a message about a name that other libraries have; empty for other names."""
    ours = ELSEWHERE.get(name)
    if ours is None:
        return ""
    if ours.startswith("nothing: "):
        return f" Leave it out: {ours.removeprefix('nothing: ')}."
    return f" In Bray it is {ours}."
