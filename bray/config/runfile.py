"""A run as a file, and the presets that ship with Bray."""

from __future__ import annotations

import copy
import fnmatch
import functools
import json
import logging
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from bray.config.sources import ConfigSource, Key, load_config, load_yaml

logger = logging.getLogger("bray")

_JOYRL: dict[str, Key] = {
    "algo_name": ("run", "algorithm"),
    "max_episode": ("run", "stop", "episodes_total"),
    "max_step": ("env", "max_episode_steps"),
    "memory_capacity": ("algo", "replay_size"),
    "buffer_size": ("algo", "replay_size"),
    "target_update": ("algo", "target_period"),
    "value_layers": ("model", "layers"),
    "model_save_fre": ("run", "checkpoint_updates"),
    "online_eval_episode": ("run", "eval_episodes"),
    "save_fig": ("run", "save_figure"),
    "show_fig": ("run", "show_figure"),
}
"""Keys of JoyRL's `general_cfg` and `algo_cfg` that only have another name here; `bray.config.hints` answers for the
others."""


def load_run_file(path: str | Path) -> ConfigSource:
    """A run as YAML, JSON or Python: `run` and `env` may be names, `stop` and `config` stand beside them, sections work
    too. The groups of JoyRL's files (`general_cfg`, `algo_cfg`, `env_cfg`) are read, and names that become others are
    told."""
    source = load_config(path)
    moved = [(old[-1], ".".join(new)) for old, new, _ in _moves(source.values) if _JOYRL.get(old[-1]) == new]
    if moved:
        logger.warning("%s is a file of JoyRL. Read as ours: %s", path, ", ".join(f"{a} as {b}" for a, b in moved))
    return spread_sections(source)


def spread_sections(source: ConfigSource) -> ConfigSource:
    """`{run: PPO, env: CartPole-v1, stop: {...}, config: {...}}` as sections; keys remember their lines."""
    values: dict[str, Any] = {}
    lines: dict[Key, int] = {}
    for old, new, value in _moves(source.values):
        node = values
        for part in new[:-1]:
            node = node.setdefault(part, {})
        both = isinstance(node.get(new[-1]), dict) and isinstance(value, dict)
        node[new[-1]] = {**node[new[-1]], **value} if both else value
        lines |= {new + key[len(old) :]: n for key, n in (source.lines or {}).items() if key[: len(old)] == old}
    return ConfigSource(source.name, values, lines or None, source.texts)


def _moves(values: Mapping[str, Any]) -> Iterator[tuple[Key, Key, Any]]:
    """(key in the file, key in the sections, value)."""
    for key, value in values.items():
        if key == "run" and isinstance(value, str):
            yield (key,), ("run", "algorithm"), value
        elif key == "env" and isinstance(value, str):
            yield (key,), ("env", "id"), value
        elif key == "config" and isinstance(value, dict):
            for inner, v in value.items():
                yield (key, inner), (inner,), v
        elif key in ("general_cfg", "algo_cfg") and isinstance(value, dict):  # a file of JoyRL
            for inner, v in value.items():
                yield (key, inner), _JOYRL.get(inner, (inner,)), v
        elif key == "env_cfg" and isinstance(value, dict):
            for inner, v in value.items():
                yield (key, inner), ("env", "id") if inner == "id" else ("env", "env_config", inner), v
        else:
            yield (key,), (key,), value


@functools.cache
def presets() -> tuple[tuple[str, str, ConfigSource], ...]:
    """(algorithm, environment, settings) of the tuned settings that ship with Bray, read once. An environment may be a
    pattern for a family: ALE/*."""
    found = []
    for file in sorted(resources.files("bray").joinpath("presets").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            with resources.as_file(file) as path:
                source = spread_sections(load_yaml(path))
            source.name = f"preset {Path(file.name).stem}"
            found.append((source.values["run"]["algorithm"], source.values["env"]["id"], source))
    return tuple(found)


def preset(algo: str, env: str) -> ConfigSource | None:
    """The tuned settings for this algorithm and environment, else for its family, if there are any."""
    mine = [(e, source) for a, e, source in presets() if a == algo and fnmatch.fnmatchcase(env, e)]
    return next((copy.deepcopy(source) for e, source in sorted(mine, key=lambda found: found[0] != env)), None)


def other_versions(algo: str, env: str) -> list[str]:
    """Environments with a preset of this algorithm that are another version of this one: CartPole-v1 for
    CartPole-v0."""
    return [e for a, e, _ in presets() if a == algo and e != env and _without_version(e) == _without_version(env)]


def _without_version(env: str) -> str:
    return re.sub(r"-v\d+$", "", env)


def scores() -> list[dict[str, Any]]:
    """What the algorithms were measured to reach, case by case: written by `python -m benchmarks.learning`. Numbers
    `[a, low, high]` are interquartile means over the seeds with their 95 % intervals."""
    return list(json.loads(resources.files("bray").joinpath("presets", "scores.json").read_text()))


def settings(score: Mapping[str, Any]) -> str:
    """`preset`, `defaults, rnd=1.0`: what a score was measured with."""
    changed = (f"{k}={v}" for k, v in score.get("config", {}).items())
    return ", ".join(["preset" if score["preset"] else "defaults", *changed])
