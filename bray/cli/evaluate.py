"""`bray eval`: whole episodes with a checkpoint, a small table, and a video."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any, Literal

from bray.act import GREEDY, SAMPLE, search_with
from bray.cli.options import Eval
from bray.cli.show import facts, how_to_act, log_shown, plain_table, put, say, terminal, trusting
from bray.data.piece import DEFAULT
from bray.errors import CheckpointError, ConfigError
from bray.experiment import Experiment
from bray.metrics import short
from bray.rundir import RunDir
from bray.train.evaluate import much_worse, summarize
from bray.train.rollout import Step
from bray.train.table import Match
from bray.video import write_video

Render = Literal["video", "human"]
_MAX_GIF = 3000  # frames; what is longer is for a video format
_LOOK_S = 0.2  # between two looks for a new checkpoint
_GIF_SIDE = 320  # pixels: choosing the colours of a large picture takes longer than playing the episode


@log_shown()
def evaluate(options: Eval) -> int:
    """Load, play, say; returns the exit code."""
    path, checkpoint = options.path, options.checkpoint
    if options.episodes is not None and options.steps is not None:
        raise ConfigError("give either --episodes or --steps, not both")
    if options.follow is not None:
        return _follow(options, options.follow)
    exp = Experiment.load(path, checkpoint, trust=trusting(options))
    if options.simulations is not None:
        for name in list(exp.policies) or [DEFAULT]:
            search_with(exp.policy_named(name).policy, options.simulations, f"{path}, {exp.algorithms}")
    if options.target_return is not None:
        exp.ask_for(options.target_return)
    number = RunDir.open(path).pointer(checkpoint) if checkpoint in ("latest", "best") else checkpoint
    how: dict[str, Any] = {
        "out": path,
        "act": how_to_act(options),
        "seed": options.seed,
        "note": f", checkpoint {number}",
    }
    render: Render | None = "human" if options.render_human else "video" if options.render else None
    videos = judge(exp, options.episodes or 10, render, steps=options.steps, **how)
    facts([("video", video) for video in videos])
    exp.close()
    return 0


def _follow(options: Eval, seconds: float) -> int:
    """Evaluate each new checkpoint, a line each, until none has come for so many seconds; returns the exit code."""
    path, label, trust = options.path, options.checkpoint, trusting(options)
    other = (options.steps, options.simulations, options.target_return)
    if options.render or options.render_human or other != (None, None, None) or label not in ("latest", "best"):
        raise ConfigError("--follow plays whole episodes of checkpoint latest or best as they come: leave out the rest")
    seen, since = None, time.monotonic()
    while time.monotonic() < since + seconds:
        number = RunDir.open(path).pointer(label) if (path / "config.yaml").exists() else None
        if number is None or number == seen:
            time.sleep(_LOOK_S)
            continue
        try:
            exp = Experiment.load(path, number, trust=trust)
        except CheckpointError:
            if RunDir.open(path).pointer(label) == number:
                raise
            continue  # it was gone before it was read
        result = summarize(exp.play(options.episodes or 10, seed=options.seed, act=how_to_act(options)))
        exp.close()
        mean, half = result["eval/return_mean"], result["eval/return_ci95"]
        interval = "" if half is None else f" [{short(mean - half)}, {short(mean + half)}]"
        say(f"checkpoint {number}: return {short(mean)}{interval} over {result['eval/episodes']} episodes")
        seen, since = number, time.monotonic()
    if seen is None:
        raise CheckpointError(f"{path} had no checkpoint {label!r} within {seconds:g} s (--follow)")
    return 0


def judge(
    exp: Experiment,
    episodes: int,
    render: Render | None = None,
    *,
    out: Path,
    steps: int | None = None,
    act: str = GREEDY,
    seed: int | None = None,
    quiet: bool = False,
    note: str = "",
) -> list[Path]:
    """Evaluate whole episodes (or exactly `steps` steps), print the table, and draw one more episode where asked;
    returns the videos."""
    folder = RunDir(out).folder("videos") if render == "video" else out
    cut, matches = (0.0, 0), []
    if steps is None:
        with terminal().status("playing") as status:  # nothing is shown where this is not a terminal
            played = itertools.count(1)

            def on_step(step: Step) -> None:
                if (n := next(played)) % 1000 == 0:
                    status.update(f"playing: {n:,} steps in each of {len(step.reward)} environments")

            if exp.is_game:
                matches = exp.play_games(episodes, seed=seed, act=act)
                results = [(match.total, match.length) for match in matches]
            else:
                results = exp.play(episodes, seed=seed, act=act, on_step=on_step)
    else:
        results, cut = exp.play_steps(steps, seed=seed, act=act)
    if not quiet:
        say(f"{exp.algorithms} on {exp.env_id}{note}", "bold")
        if results:
            _table(summarize(results), act)
        if matches:
            _table_of_agents(matches)
        if steps is not None:
            say(_played(steps, len(results), *cut))
        elif act == GREEDY:
            say_if_greedy_is_worse(exp, results, seed)
    if render is None:
        return []
    frames, return_, length, fps = exp.shoot("human" if render == "human" else "rgb_array", seed, act)
    videos = []
    if render == "video":
        videos.append(write_video(frames, folder / "eval.mp4", fps))
        if len(frames) <= _MAX_GIF:
            every = -(-max(frames[0].shape[:2]) // _GIF_SIDE)
            videos.append(write_video([f[::every, ::every] for f in frames], folder / "eval.gif", fps))
    if not quiet:
        what = "filmed" if render == "video" else "showed"
        say(f"{what} one episode of {length:,} steps, return {short(return_)}", "dim")
    return videos


def say_if_greedy_is_worse(exp: Experiment, greedy: list[tuple[float, int]], seed: int | None = None) -> None:
    """A policy that draws its actions may need the draws: then both numbers are told."""
    if exp.is_game:  # with several policies it would have to be said of each
        return
    rule = exp.served.policy.rule
    if rule is not None and not rule.stochastic:
        return
    sampled = exp.play(len(greedy), seed=seed, act=SAMPLE, most_steps=2 * sum(n for _, n in greedy) + 1000)
    worse = much_worse(greedy, sampled)
    if worse is not None:
        say(
            f"greedy plays much worse than sampled here: {short(worse[0])} against {short(worse[1])}; --act sample "
            "plays as in training",
            "yellow",
        )


def _played(steps: int, episodes: int, return_: float, length: int) -> str:
    """What became of the steps that were asked for."""
    said = f"played {steps:,} step{'s' if steps > 1 else ''}: {episodes:,} whole episode{'s' if episodes != 1 else ''}"
    return said + (f", {length:,} of one that was cut, return {short(return_)} so far" if length else "")


def _table(result: dict[str, Any], act: str) -> None:
    table = plain_table("episodes", ">mean return", ">95 % interval", ">min", ">max", ">mean length")
    half = result["eval/return_ci95"]
    mean = result["eval/return_mean"]
    interval = "–" if half is None else f"{short(mean - half)} … {short(mean + half)}"
    numbers = [short(result[f"eval/{k}"]) for k in ("return_min", "return_max", "length_mean")]
    table.add_row(
        f"{result['eval/episodes']} {'sampled' if act == SAMPLE else 'greedy'}", short(mean), interval, *numbers
    )
    put(table)


def _table_of_agents(matches: list[Match]) -> None:
    """The returns of each agent, and whose policy played it."""
    table = plain_table("agent", "policy", ">games", ">mean return", ">min", ">max")
    for agent in dict.fromkeys(agent for match in matches for agent in match.returns):
        mine = [match.returns[agent] for match in matches if agent in match.returns]
        policies = dict.fromkeys(match.players[agent] for match in matches if agent in match.players)
        numbers = (short(sum(mine) / len(mine)), short(min(mine)), short(max(mine)))
        table.add_row(agent, ", ".join(policies), str(len(mine)), *numbers)
    put(table)
