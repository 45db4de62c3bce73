"""`bray collect`: whole episodes of a trained agent as trajectory files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.act import GREEDY
from bray.cli.data import write_as
from bray.cli.options import Collect
from bray.cli.show import facts, how_to_act, log_shown, say, terminal, trusting
from bray.data.files import Episode, EpisodeWriter, to_pickle
from bray.data.piece import DEFAULT
from bray.envs.make import make_vec
from bray.envs.vector import VecEnv
from bray.errors import CheckpointError, ConfigError
from bray.experiment import Experiment
from bray.metrics import short
from bray.rundir import RunDir
from bray.spec import Space
from bray.train.callbacks import CallbackList, Callbacks
from bray.train.evaluate import EVAL_SEED, eval_config, trained
from bray.train.output import EpisodeRows, as_episode
from bray.train.rollout import Step
from bray.train.table import Match


class _Noisy:
    """An environment that is given other actions than the policy's now and then; `taken` are those of the last step."""

    def __init__(self, env: VecEnv, noise: float, seed: int):
        self._env, self._noise, self._rng = env, noise, np.random.default_rng([seed, 3])
        self.taken: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, actions: Any) -> Any:
        self.taken = self._changed(self._env.spec.action, actions)
        return self._env.step(self.taken)

    def _changed(self, space: Space, x: Any) -> Any:
        if space.composite:
            return space.join(self._changed(part, x[key]) for key, part in zip(space.keys, space.parts, strict=True))
        rows = len(x)
        drawn = np.stack([space.sample(self._rng) for _ in range(rows)])
        if space.kind != "box":
            other = self._rng.random(rows) < self._noise
            return np.where(other.reshape(-1, *[1] * (x.ndim - 1)), drawn, x).astype(x.dtype)
        low, high = space.bounds()
        half = np.where(np.isfinite(high - low), (high - low) / 2, 1.0)
        return np.clip(x + self._noise * half * self._rng.standard_normal(x.shape), low, high).astype(x.dtype)


def _log_probability(step: Step, taken: Any, space: Space, noise: float, drawn: bool) -> np.ndarray | None:
    """Of the actions that were taken, where it is known: what off-policy evaluation weighs by."""
    if drawn and not noise:
        return step.extras.get("logp")
    if drawn or not noise or space.kind != "discrete":
        return None
    same = np.asarray(taken) == np.asarray(step.action)
    return np.log((1.0 - noise) * same + noise / space.n[0]).astype(np.float32)


def episodes(
    exp: Experiment,
    count: int,
    seed: int,
    act: str = GREEDY,
    num_envs: int | None = None,
    steps: int | None = None,
    noise: float = 0.0,
) -> Iterator[Episode]:
    """`count` whole episodes in the order they end, each environment its share of them, as columns: obs `[T + 1, ...]`,
    action (in the environment's units), reward (raw), terminated, truncated `[T]`, and `logp`, the log probability of
    the action, where actions are drawn and it is known.

    With `steps` it is exactly that many in one environment instead; an episode that is cut by that is truncated."""
    served = exp.served
    if steps is not None:
        count, num_envs = steps, 1  # no episode is shorter than a step
    config = eval_config(exp.config["env"], num_envs or min(count, 16))
    with make_vec(config, seed=seed) as made:
        env: Any = _Noisy(made, noise, seed) if noise else made
        if env.spec.observation != served.spec.observation or env.spec.action != served.spec.action:
            raise CheckpointError("the environment has other spaces than the policy was trained for")
        left = [count // env.num_envs + (b < count % env.num_envs) for b in range(env.num_envs)]
        rows = EpisodeRows()
        rollout = trained(env, served.engine, served.policy, seed, act, served.initial_state)
        while any(left):
            step = rollout.step()
            taken = env.taken if noise else step.action
            columns = {
                "obs": step.obs,
                "action": taken,
                "reward": step.reward,
                "terminated": step.terminated,
                "truncated": step.truncated,
            }
            if (logp := _log_probability(step, taken, env.spec.action, noise, act != GREEDY)) is not None:
                columns["logp"] = logp
            rows.add(columns, step.valid & (np.array(left) > 0), step.first)
            for b, _, _ in rollout.ended:
                if left[b] and (episode := rows.end(b, rollout.obs)) is not None:
                    left[b] -= 1
                    yield episode
            if rollout.env_steps == steps:
                if (episode := rows.end(0, rollout.obs, cut=True)) is not None:
                    yield episode
                return


class AgentEpisodes(Callbacks):
    """Of each game that counts, the decisions of an agent from its first one to its end, with the rewards between them
    summed, as training has them. `write(policy, episode)` is called with each, which has two columns more: the number
    of the `agent` and of the `game`."""

    def __init__(self, share: Sequence[int], agents: Sequence[str], write: Callable[[str, Episode], None]):
        """share: how many games of each environment count"""
        self._left, self._numbers, self._write = list(share), {a: i for i, a in enumerate(agents)}, write

    def on_episode_start(self, episode: Any) -> None:
        episode.user_data["seen"], episode.user_data["rows"] = episode.obs, {}

    def on_episode_step(self, episode: Any) -> None:
        if not self._left[episode.env_index]:
            return
        seen, rows = episode.user_data["seen"], episode.user_data["rows"]
        for agent, action in episode.action.items():
            row = {"obs": seen[agent], "action": action, "reward": 0.0, "terminated": False, "truncated": False}
            rows.setdefault(agent, []).append(row | {"agent": self._numbers[agent], "game": episode.id})
        for agent in rows:
            rows[agent][-1]["reward"] += episode.reward[agent]
        seen.update(episode.obs)
        for agent, terminated in episode.ended.items():
            mine = rows.pop(agent)
            mine[-1]["terminated" if terminated else "truncated"] = True
            whole = as_episode([tree.map(np.array, row) for row in mine], tree.map(np.array, seen[agent]))
            self._write(episode.policies[agent], whole | {"reward": whole["reward"].astype(np.float32)})

    def on_episode_end(self, episode: Any) -> None:
        self._left[episode.env_index] -= self._left[episode.env_index] > 0


def collect_games(
    exp: Experiment, games: int, out: Path, per_file: int, seed: int, act: str = GREEDY
) -> tuple[list[Match], list[Path], int]:
    """Play games, each environment its share of them; files of each policy, in a folder of its own where there are
    several. Also the games, and how many decisions were written."""
    spec, steps = exp.spec_of(), 0
    folders = {name: out if name == DEFAULT else out / name for name in spec.sides}
    envs = min(games, 16)
    share = [games // envs + (b < games % envs) for b in range(envs)]
    with ExitStack() as stack:
        writers = {n: stack.enter_context(EpisodeWriter(f / "episodes", per_file)) for n, f in folders.items()}

        def write(policy: str, episode: Episode) -> None:
            nonlocal steps
            steps += len(episode["reward"])
            writers[policy].write(episode)

        watch = CallbackList([AgentEpisodes(share, spec.agents, write)])
        matches = exp.play_games(games, seed, act, envs, callbacks=watch)
    for name, folder in folders.items():  # so that `bray train --data` needs no environment
        folder.mkdir(parents=True, exist_ok=True)
        RunDir(folder).write_spec(spec.sides[name].spec)
    return matches, [path for writer in writers.values() for path in writer.paths], steps


@log_shown()
def collect(options: Collect) -> int:
    """Load, play, write; returns the exit code."""
    steps, act = options.steps, how_to_act(options)
    if options.episodes is not None and steps is not None:
        raise ConfigError("give either --episodes or --steps, not both")
    exp = Experiment.load(options.path, options.checkpoint, trust=trusting(options))
    exp.check_env()
    console = terminal()
    count, seed = options.episodes or 100, EVAL_SEED if options.seed is None else options.seed
    out = options.out or RunDir(options.path).folder("trajectories")
    returns: list[float] = []
    done = 0
    if exp.is_game:
        if steps is not None or options.format != "bray" or options.noise:
            raise ConfigError(
                f"{exp.env_id} is a game of several agents: it is played to its end (--episodes), without --noise, and "
                "its files are Bray's (--format bray)"
            )
        matches, paths, done = collect_games(exp, count, out, options.per_file, seed, act)
        exp.close()
        say(f"{exp.algorithms} on {exp.env_id}: {len(matches):,} games, {done:,} decisions", "bold")
        said = [(a, short(float(np.mean([m.returns[a] for m in matches])))) for a in matches[0].returns]
        facts([("return", ", ".join(f"{agent} {mean}" for agent, mean in said)), *[("file", p) for p in paths]])
        return 0

    def played() -> Iterator[Episode]:
        nonlocal done
        with console.status("") as status:
            for episode in episodes(exp, count, seed, act, steps=steps, noise=options.noise):
                returns.append(float(np.sum(episode["reward"], dtype=np.float64)))
                done += len(episode["reward"])
                if console.is_terminal:
                    of = (f" of {count:,}", "") if steps is None else ("", f" of {steps:,}")
                    status.update(f"{len(returns):,}{of[0]} episodes, {done:,}{of[1]} steps")
                yield episode

    if options.format == "pkl":
        paths = _write_pickles(played(), out, options.per_file)
    else:
        paths = write_as(options.format, out, played(), exp.served.spec, options.per_file)
    exp.close()
    say(f"{exp.config['run'].algorithm} on {exp.env_id}: {len(returns):,} episodes, {done:,} steps", "bold")
    facts(
        [
            ("return", f"{short(float(np.mean(returns)))} on average, {short(min(returns))} … {short(max(returns))}"),
            *[("file", p) for p in paths],
        ],
    )
    if options.format == "bray":
        say(f'read them: bray.EpisodeReader("{out}"); look at them: bray data {out}', "dim")
    return 0


def _write_pickles(played: Iterator[Episode], out: Path, per_file: int) -> list[Path]:
    """`trajs_0.pkl`, `trajs_1.pkl`, ... after those that are there."""
    taken = [int(p.stem[6:]) for p in out.glob("trajs_*.pkl") if p.stem[6:].isdigit()]
    number, paths = max(taken, default=-1) + 1, []
    while part := list(islice(played, per_file)):
        paths.append(out / f"trajs_{number}.pkl")
        to_pickle(paths[-1], part)
        number += 1
    return paths
