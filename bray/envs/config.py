"""What a user says about an environment: the `env` section of a run's config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bray.errors import ConfigError, UnknownName

VECTOR_FORMS = ("auto", "native", "inprocess", "subprocess", "envpool")


@dataclass(frozen=True)
class AtariConfig:
    """How an Atari game is shown to the agent; used for ids of the Arcade Learning Environment only."""

    preprocess: bool = True
    """False leaves the game as its package makes it (full colour pictures, or RAM with env_config obs_type: ram)."""
    frame_skip: int = 4
    """Frames that one action lasts; the picture is the maximum of the last two."""
    size: int = 84
    """Height and width of a picture in pixels."""
    grayscale: bool = True
    """One channel per picture instead of three."""
    frame_stack: int = 4
    """Pictures per observation, oldest first; zeros before the first."""
    noop_max: int = 30
    """At most this many random idle frames at the start of an episode (0: none)."""
    fire_reset: bool = True
    """Press FIRE once at the start of an episode in games that have it."""
    episodic_life: bool = False
    """A lost life is `terminated` for the learner; the game goes on."""
    full_action_space: bool = False
    """All 18 joystick positions instead of those the game uses."""
    repeat_action_probability: float | None = None
    """Sticky actions: chance that a frame repeats the previous action. null = what the id says (ALE/*-v5: 0.25)."""

    def __post_init__(self) -> None:
        for name in ("frame_skip", "size", "frame_stack"):
            if getattr(self, name) < 1:
                raise ConfigError(f"env.atari.{name} must be 1 or more, got {getattr(self, name)}")
        if self.noop_max < 0:
            raise ConfigError(f"env.atari.noop_max must be 0 or more, got {self.noop_max}")


@dataclass(frozen=True)
class EnvConfig:
    """Which environment, how many of it, in which form, and what is done to its observations and rewards."""

    id: Any = ""
    """A Gymnasium id, a name given to `register_env`, `module:Class`, a class, a factory, or (num_envs=1) an environment object."""
    env_config: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment: keywords, or one dict where its constructor takes `env_config`, `config` or `cfg`."""
    import_modules: list[str] = field(default_factory=list)
    """Modules imported first, e.g. those that register environments."""
    vector: str = "auto"
    """How several environments run: auto (the fastest that is correct), native, inprocess, subprocess, envpool."""
    num_envs: int = 1
    """Environments stepped together."""
    per_env: list[dict[str, Any]] = field(default_factory=list)
    """`env_config` of environment i, merged over the common one."""
    num_processes: int | None = None
    """Processes of the subprocess form; null = one per core, at most one per environment (with `wait_num`: one per environment)."""
    max_episode_steps: int | None = None
    """Steps after which an episode is truncated. null = the environment's own limit, -1 = none."""
    wrappers: list[Any] = field(default_factory=list)
    """Wrappers from the inside out: a known name, a Gymnasium wrapper's name, `module:Class`, or a dict {name: ..., **arguments}."""
    frame_stack: int = 0
    """Observations stacked along a new first axis (0: none). Atari games have their own, `atari.frame_stack`."""
    flatten_obs: bool = False
    """The observation as one flat vector (an action mask stays beside it)."""
    atari: AtariConfig = field(default_factory=AtariConfig)
    """How an Atari game is shown."""
    clip_rewards: bool | float | list[float] | None = None
    """What the learner sees of a reward: true = its sign, c = clipped to [-c, c], [low, high] = clipped. Metrics stay raw."""
    normalize_rewards: bool = False
    """Divide rewards by the running deviation of the discounted return, in training only."""
    check: bool = True
    """Stop at once when the environment returns NaN, a wrong shape or type, or a value outside its space."""
    max_restarts: int = 0
    """How often environments that raise, die or hang are rebuilt before the run stops."""
    step_timeout: float | None = None
    """Seconds after which a step counts as hung (subprocess form)."""
    wait_num: int | None = None
    """A step returns as soon as this many environments are ready, so that slow ones do not hold up the others (vector=subprocess); the
    others are waited for in later steps. Environments of one process are ready together. Runs then depend on timing. null = all."""
    step_wait_timeout: float = 0.0
    """Seconds to wait further for the other environments once `wait_num` are ready."""

    def __post_init__(self) -> None:
        if self.vector not in VECTOR_FORMS:
            raise UnknownName("vector form", str(self.vector), VECTOR_FORMS, where="env.vector")
        if self.num_envs < 1:
            raise ConfigError(f"env.num_envs must be 1 or more, got {self.num_envs}")
        if len(self.per_env) > self.num_envs:
            raise ConfigError(f"env.per_env has {len(self.per_env)} entries for num_envs={self.num_envs}")
        if self.num_processes is not None and self.num_processes < 1:
            raise ConfigError(f"env.num_processes must be 1 or more, got {self.num_processes}")
        if self.max_episode_steps is not None and self.max_episode_steps != -1 and self.max_episode_steps < 1:
            raise ConfigError(
                f"env.max_episode_steps must be positive, -1 (no limit) or null, got {self.max_episode_steps}"
            )
        if self.frame_stack < 0 or self.max_restarts < 0:
            raise ConfigError("env.frame_stack and env.max_restarts must not be negative")
        if self.step_timeout is not None and self.step_timeout <= 0:
            raise ConfigError(f"env.step_timeout is seconds and positive, got {self.step_timeout}")
        if self.wait_num is not None and self.vector != "subprocess":
            raise ConfigError(
                f"env.wait_num={self.wait_num} is for env.vector=subprocess, where environments run beside each other; got "
                f"env.vector={self.vector}. Set env.vector=subprocess, or leave env.wait_num out."
            )
        if self.wait_num is not None and not 1 <= self.wait_num <= self.num_envs:
            raise ConfigError(f"env.wait_num is between 1 and num_envs={self.num_envs}, got {self.wait_num}")
        if self.step_wait_timeout < 0 or (self.step_wait_timeout > 0 and self.wait_num is None):
            raise ConfigError(
                f"env.step_wait_timeout is seconds, 0 or more, after env.wait_num environments are ready; got "
                f"{self.step_wait_timeout} with env.wait_num={self.wait_num}"
            )

    def arguments(self, index: int) -> dict[str, Any]:
        """`env_config` of environment `index`."""
        return {**self.env_config, **(self.per_env[index] if index < len(self.per_env) else {})}
