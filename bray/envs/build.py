"""From a config to one environment with its wrappers (`Builder`), and what it looks like (`env_spec`)."""

from __future__ import annotations

import dataclasses
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym

from bray.envs import atari, compat, observations, wrappers
from bray.envs.config import EnvConfig
from bray.envs.many_games import ManyGames, OneOfMany
from bray.envs.missing import what_is_missing
from bray.envs.multi_agent import MultiAgentEnv, adapt_agents, may_be_of_agents
from bray.envs.positions import WithMoves
from bray.envs.registry import EnvContext, EnvOrigin, resolve
from bray.envs.spaces import spec_from_gym
from bray.envs.table import ALL_ONE, Seating, TableEnv
from bray.envs.teams import OneAgent, Teams
from bray.errors import BrayError, ConfigError, EnvError
from bray.spec import EnvSpec


@dataclass(frozen=True)
class Builder:
    """Makes the environments of one config, here or in another process."""

    config: EnvConfig
    source: EnvOrigin
    render_mode: str | None = None
    worker_index: int = 0
    remote: bool = False
    """Whether the environments are made in another process than the one that steps the vector."""
    seating: Seating = ALL_ONE
    """Which policy decides for which agent of a game of several."""

    @staticmethod
    def of(
        config: EnvConfig, render_mode: str | None = None, worker_index: int = 0, seating: Seating | None = None
    ) -> Builder:
        return Builder(config, resolve(config), render_mode, worker_index, seating=seating or ALL_ONE)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def pictures(self) -> bool:
        """Whether this is an Atari game shown as preprocessed pictures."""
        return self._pictures(self.config.env_config)

    def _pictures(self, arguments: dict[str, Any]) -> bool:
        return atari.is_atari(self.source.gym_spec) and atari.shows_pictures(self.config.atari, arguments)

    def __call__(self, index: int = 0) -> tuple[gym.Env, int | None]:
        """Environment `index` without its time limit, and that limit (a VecEnv counts steps itself)."""
        config, source, limit = self.config, self.source, None
        env, pictures = self._raw(index)
        if source.registered:
            env, limit = _strip(env, keep_limit=bool(config.wrappers) and config.max_episode_steps is None)
        if not isinstance(env, gym.Env) and not hasattr(env, "step"):
            raise EnvError(f"{self.name}: its creator returned {type(env).__name__}, which is not an environment")
        if (several := adapt_agents(env)) is not None:
            env = self._joined(several)
        elif config.teams or config.moves:
            what = "teams joins agents" if config.teams else "moves shows the actions"
            raise ConfigError(f"env.{what} of a game of several, and {self.name} has one: leave it out")
        else:
            env = compat.adapt(env)
        if config.drop_obs:
            env = observations.drop(env, config.drop_obs)
        env = observations.encode_texts(env)
        if pictures:
            env = atari.AtariFrames(env, config.atari, config.frame_stack)
        for wrapper in config.wrappers:
            env = wrappers.apply(wrapper, env)
        if config.action_bounds is not None:
            env = wrappers.BoundedActions(env, *config.action_bounds)
        if config.frame_stack and not pictures:
            env = wrappers.frame_stack(env, config.frame_stack)
        if config.flatten_obs:
            env = wrappers.flatten(env)
        if config.max_episode_steps is not None:
            limit = config.max_episode_steps if config.max_episode_steps > 0 else None
        return env, limit

    def _joined(self, game: MultiAgentEnv) -> gym.Env:
        """A game of several agents as one environment: of a single agent where all are a team, else a table."""
        config = self.config
        if config.teams and config.moves:
            raise ConfigError(
                "env.moves is for agents that take turns, and those of env.teams act at once: leave it out"
            )
        game = Teams(game, config.teams) if config.teams else WithMoves(game) if config.moves else game
        if len(game.possible_agents) == 1:
            return OneAgent(game)
        changed = ("drop_obs", "wrappers", "action_bounds", "frame_stack", "flatten_obs")
        if found := [key for key in changed if getattr(config, key)]:
            raise ConfigError(
                f"env.{found[0]} changes what one agent sees or does, and {self.name} is a game of several "
                f"({', '.join(game.possible_agents)}): leave it out, and wrap the game itself"
            )
        limit = config.max_episode_steps if (config.max_episode_steps or 0) > 0 else None

        def make_spec(observation: Any, action: Any, global_state: bool, team: tuple[str, ...]) -> EnvSpec:
            made = spec_from_gym(self.name, observation, action, limit, self.preprocessing(), global_state, team)
            return with_game(made, config)

        return TableEnv(game, self.seating, self.name, make_spec, config.check)

    @property
    def may_have_agents(self) -> bool:
        """Whether several agents may play it, as far as that shows before one is made: some take long to start."""
        source = self.source
        if source.registered or of_tensors(source):
            return False
        made = source.creator if isinstance(source.creator, type) else type(source.creator) if source.single else None
        return made is None or may_be_of_agents(made)

    def agents(self) -> MultiAgentEnv | None:
        """The game of several agents that this is, before they are joined; None for one of a single agent."""
        if of_tensors(self.source) or self.source.gym_id is not None:
            return None
        env, _ = self._raw(0)
        several = adapt_agents(env)
        if several is None and not self.source.single and callable(close := getattr(env, "close", None)):
            close()
        return several

    def _raw(self, index: int) -> tuple[Any, bool]:
        """Environment `index` as its creator made it, and whether it is shown as pictures of Atari."""
        remote = self.remote or self.worker_index > 0
        arguments = EnvContext(self.config.arguments(index), self.worker_index, index, remote)
        pictures = self._pictures(arguments)
        if pictures:
            arguments.update({**atari.game_arguments(self.config.atari), **arguments})
        env = self._make(arguments, index)
        return (OneOfMany(env) if isinstance(env, ManyGames) else env), pictures

    def many(self, num_games: int) -> ManyGames:
        """So many games as one object, where `many_games.plays_many`."""
        made: ManyGames = self._make(EnvContext({**self.config.env_config, "num_games": num_games}), 0)
        return made

    def _make(self, arguments: EnvContext, index: int) -> Any:
        try:
            return self.source.make(arguments, self.render_mode)
        except BrayError:
            raise
        except (Exception, SystemExit) as e:
            if (what := what_is_missing(e)) is not None:
                raise ConfigError(f"{self.name} needs {what}") from e
            trace = "".join(traceback.format_exception(e)).rstrip()
            raise EnvError(f"{trace}\n{self.name}: making environment {index} raised {type(e).__name__}") from e

    def preprocessing(self) -> dict[str, Any]:
        """For the record in spec.json: what is done between the game and the agent."""
        config = self.config
        out: dict[str, Any] = {}
        if self.pictures:
            out["atari"] = dataclasses.asdict(config.atari)
        if config.drop_obs:
            out["drop_obs"] = list(config.drop_obs)
        if config.wrappers:
            out["wrappers"] = [w if isinstance(w, (str, dict)) else repr(w) for w in config.wrappers]
        if config.action_bounds is not None:
            out["action_bounds"] = list(config.action_bounds)
        if config.frame_stack:
            out["frame_stack"] = config.frame_stack
        if config.flatten_obs:
            out["flatten_obs"] = True
        if config.moves:
            out["moves"] = True
        if config.teams:
            out["teams"] = {name: list(map(str, members)) for name, members in config.teams.items()}
        return out

    def spec_of(self, env: Any, limit: int | None) -> EnvSpec:
        """The EnvSpec of an environment made here."""
        inner = env.unwrapped
        if isinstance(inner, TableEnv):
            spec = spec_from_gym(self.name, env.observation_space, env.action_space, limit, self.preprocessing())
            return dataclasses.replace(spec, sides=inner.sides, agents=tuple(inner.env.possible_agents))
        team = inner.members if isinstance(inner, OneAgent) else ()
        declared = getattr(inner, "global_state_space", None) is not None
        spaces = env.observation_space, env.action_space
        return spec_from_gym(self.name, *spaces, limit, self.preprocessing(), declared, team)


def with_game(spec: EnvSpec, config: EnvConfig) -> EnvSpec:
    """The spec of one who decides, with what makes the game where its policy may search it."""
    return dataclasses.replace(spec, game=partial(_game_of, config)) if config.moves else spec


def _game_of(config: EnvConfig) -> MultiAgentEnv:
    game = Builder.of(config).agents()
    assert game is not None, f"{config.id} had several agents before"
    return game


def env_spec(config: EnvConfig, seating: Seating | None = None) -> EnvSpec:
    """Spaces, time limit and preprocessing; makes one environment and closes it."""
    return built_spec(Builder.of(config, seating=seating))


def agent_spec(config: EnvConfig) -> EnvSpec:
    """What one agent sees and does: where several play, all are alike, and each has a session or a file of its own."""
    spec = env_spec(config)
    return next(iter(spec.sides.values())).spec if spec.sides else spec


def of_tensors(source: EnvOrigin) -> bool:
    """Whether an environment is one of tensors alone (`tensor_game.Game`): it says so by itself, without torch."""
    return isinstance(source.creator, type) and getattr(source.creator, "plays_tensors", False)


def built_spec(build: Builder) -> EnvSpec:
    """`env_spec` of what a Builder makes."""
    if of_tensors(build.source) or (build.config.vector == "device" and build.source.gym_id is None):
        from bray.envs.device import make_device

        with make_device(
            dataclasses.replace(build.config, num_envs=1), build.source, build.preprocessing(), 0, None
        ) as made:
            return made.spec
    env, limit = build()
    try:
        return build.spec_of(env, limit)
    finally:
        if not build.source.single:
            env.close()


_LAYERS = ("TimeLimit", "OrderEnforcing", "PassiveEnvChecker", "EnvCompatibility", "StepAPICompatibility")


def _strip(env: Any, keep_limit: bool) -> tuple[Any, int | None]:
    """Without the layers that `make` of Gymnasium and old gym adds and that we do faster ourselves, or that expect one
    age of the interface:
    order enforcing, checking, and the limit unless a wrapper needs it."""
    limit = None
    while type(env).__name__ in _LAYERS and type(env).__module__.split(".")[0] in ("gym", "gymnasium"):
        if type(env).__name__ == "TimeLimit":
            if keep_limit and isinstance(env, gym.Env):
                return env, None
            limit = env._max_episode_steps
        env = env.env
    return env, limit
