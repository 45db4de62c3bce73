"""What a user says about an environment: the `env` section of a run's config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge

from bray.config.check import check_fields
from bray.config.declare import Amount, Count, Flag, Positive, Secret, Share, Whole
from bray.errors import ConfigError


@dataclass(frozen=True)
class AtariConfig:
    """How an Atari game is shown to the agent; used for ids of the Arcade Learning Environment only."""

    preprocess: bool = True
    """False leaves the game as its package makes it (full colour pictures, or RAM with env_config obs_type: ram)."""
    frame_skip: Count = 4
    """Frames that one action lasts; the picture is the maximum of the last two."""
    size: Count = 84
    """Height and width of a picture in pixels."""
    grayscale: bool = True
    """One channel per picture instead of three."""
    frame_stack: Count = 4
    """Pictures per observation, oldest first; zeros before the first."""
    noop_max: Whole = 30
    """At most this many random idle frames at the start of an episode (0: none)."""
    fire_reset: bool = True
    """In games that have it, press FIRE at the start of an episode and after a lost life, in place of two actions: some
    wait for it for ever."""
    episodic_life: bool = False
    """The learner sees a lost life as `terminated`, while the game continues."""
    full_action_space: bool = False
    """All 18 joystick positions instead of those the game uses."""
    repeat_action_probability: Share | None = None
    """Sticky actions: chance that a frame repeats the previous action. null = what the id says (ALE/*-v5: 0.25)."""

    def __post_init__(self) -> None:
        check_fields(self, "env.atari")


@dataclass(frozen=True)
class EnvConfig:
    """Which environment, how many of it, in which form, and what is done to its observations and rewards."""

    id: Any = ""
    """A Gymnasium id, a name given to `register_env`, `module:Class`, a class, a factory, or (num_envs=1) an
    environment object."""
    env_config: Annotated[dict[str, Any], Secret(inside=True)] = field(default_factory=dict)
    """Arguments of the environment: keywords, or one dict where its constructor takes `env_config`, `config` or
    `cfg`."""
    eval_env_config: Annotated[dict[str, Any], Secret(inside=True)] = field(default_factory=dict)
    """Arguments that are others in evaluations, merged over `env_config`: held-out levels, or the real start of a game
    that is learnt from any position."""
    import_modules: list[str] = field(default_factory=list)
    """Modules imported first, e.g. those that register environments."""
    vector: Literal["auto", "native", "inprocess", "subprocess", "envpool", "device"] = "auto"
    """How several environments run: native, inprocess, subprocess, envpool, device (as tensors, where the learner
    computes); auto chooses by what is known of the environment, not by a measurement (docs/environments.md has the
    rule)."""
    num_envs: Annotated[Count, Flag("--num-envs-per-worker")] = 1
    """Environments stepped together."""
    per_env: Annotated[list[dict[str, Any]], Secret(inside=True)] = field(default_factory=list)
    """`env_config` of environment i (of each rollout worker), merged over the common one."""
    num_processes: Count | None = None
    """Processes of the subprocess form; null = one per core, at most one per environment (with `wait_num`: one per
    environment)."""
    step_ms: Amount | None = None
    """What a step of one environment costs in milliseconds, for the choice of its form and of workers. null = what its
    class (`metadata["step_ms"]`) or its package declares; where neither does, a few steps are timed before training."""
    teams: dict[str, list[Any]] = field(default_factory=dict)
    """In a game of several agents: {team: [a, b, c]} joins them into one that sees and decides for all
    (docs/agents.md)."""
    moves: bool = False
    """In a game of several agents that take turns: observations have `moves`, the actions of all agents so far, for
    policies that search the game (docs/algorithms/alphazero.md)."""
    drop_obs: list[str] = field(default_factory=list)
    """Entries of a Dict observation that are left out, e.g. [mission]."""
    max_episode_steps: Annotated[int, Ge(-1)] | None = None
    """Steps after which an episode is truncated. null = the environment's own limit, -1 = none."""
    wrappers: Annotated[list[Any], Secret(inside=True)] = field(default_factory=list)
    """Wrappers from the inside out: a known name, a Gymnasium wrapper's name, `module:Class`, or a dict {name: ...,
    **arguments}."""
    action_bounds: tuple[float | list[float], float | list[float]] | None = None
    """[low, high] of a Box action space that has none, or within its own: numbers, or one list of them each. SAC, TD3,
    DDPG and CrossQ scale their actions to the bounds. null = the environment's own."""
    frame_stack: Whole = 0
    """Observations stacked along a new first axis (0: none); an action mask stays that of now. Atari games have their
    own, `atari.frame_stack`."""
    flatten_obs: bool = False
    """The observation as one flat vector (an action mask stays beside it)."""
    atari: AtariConfig = field(default_factory=AtariConfig)
    """How an Atari game is shown."""
    clip_rewards: bool | float | list[float] | None = None
    """What the learner sees of a reward: true = its sign, c = clipped to [-c, c], [low, high] = clipped. Metrics stay
    raw."""
    normalize_rewards: bool = False
    """Divide rewards by the running deviation of the discounted return, in training only. Rollout workers begin each
    piece with what all of them have seen."""
    check: bool = True
    """Stop at once when the environment returns NaN, a wrong shape or type, or a value outside its space. Other types
    of numbers are cast, with one warning; floats may lie outside by a rounding error, and those of Gymnasium's own
    environments anywhere: some fly beyond their bounds."""
    max_restarts: Whole = 0
    """How often environments that raise, die or hang are rebuilt before the run stops."""
    step_timeout: Positive | None = None
    """Seconds after which a step counts as hung: environments then run in processes of their own (vector: auto or
    subprocess)."""
    wait_num: Count | None = None
    """A step returns as soon as this many environments are ready, so that slow ones do not hold up the others
    (vector=subprocess); the others are waited for in later steps. Environments of one process are ready together. Runs
    then depend on timing. null = all."""
    step_wait_timeout: Amount = 0.0
    """Seconds to wait further for the other environments once `wait_num` are ready."""

    def __post_init__(self) -> None:
        check_fields(self, "env")
        if len(self.per_env) > self.num_envs:
            raise ConfigError(f"env.per_env has {len(self.per_env)} entries for num_envs={self.num_envs}")
        if self.max_episode_steps == 0:
            raise ConfigError("env.max_episode_steps must be positive, -1 (no limit) or null, got 0")
        if self.wait_num is not None and self.vector != "subprocess":
            raise ConfigError(
                f"env.wait_num={self.wait_num} is for env.vector=subprocess, where environments run beside each "
                f"other; got env.vector={self.vector}. Set env.vector=subprocess, or leave env.wait_num out."
            )
        if self.wait_num is not None and self.wait_num > self.num_envs:
            raise ConfigError(f"env.wait_num is between 1 and num_envs={self.num_envs}, got {self.wait_num}")
        if self.step_wait_timeout > 0 and self.wait_num is None:
            raise ConfigError(
                "env.step_wait_timeout is for the environments that are not ready when env.wait_num of them are: set "
                "env.wait_num too"
            )

    def arguments(self, index: int) -> dict[str, Any]:
        """`env_config` of environment `index`."""
        return {**self.env_config, **(self.per_env[index] if index < len(self.per_env) else {})}
