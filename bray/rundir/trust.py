"""What a run directory may cause. A directory from elsewhere is data: what it asks to import, to connect to, to listen
on, to read or to write elsewhere happens only where the user allows it.

`ASKS` and `HARMLESS` together have every key of a run's config: a new key belongs in one of them.

What this user's own runs asked for (when they were written), or what was allowed once, is remembered in
`$XDG_STATE_HOME/bray/trusted` (`~/.local/state/bray/trusted`), a line each: code by a checksum of the name and the
arguments it is called with, anything else by one of the value and the run directory. What a name means is decided by
the import path of the process, never by the directory.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bray.errors import CheckpointError
from bray.rundir.log import logger

Asked = tuple[str, str, Any]
"""(the key that names it, its name, its arguments)"""
Answer = bool | Callable[[str], bool]
"""Whether to import what is not trusted yet, or who is asked that."""
_WRITES_FILES = ("RecordVideo",)  # a wrapper of Gymnasium, to a directory of its arguments


class UntrustedRun(CheckpointError):
    """A run directory that names code nobody has allowed."""


class When(enum.Enum):
    """When a key of a run's config takes effect."""

    MADE = "whenever its policy is made"
    PLAYS = "where it plays in its environment"
    TRAINS = "where it trains"


class Ask(NamedTuple):
    """What a key of a run's config asks for."""

    to: str
    """In words, before the value."""
    when: When
    find: Callable[[Any, Mapping[str, Any]], Iterator[tuple[Any, Any]]]
    """(name, arguments) of everything that a value asks for; it gets the section too."""


def _is_path(name: Any) -> bool:
    return isinstance(name, str) and ":" in name


def _code(value: Any, section: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    if _is_path(value):
        yield value, None


def _network(value: Any, section: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    if _is_path(value):
        yield value, section.get("custom_options")


def _each_code(value: Any, section: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    return ((name, None) for name in value if _is_path(name))


def _environment(value: Any, section: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    if _is_path(value) or str(value).startswith("GymV"):  # adapters of old gym import what their arguments name
        others = [section["eval_env_config"]] if section.get("eval_env_config") else []
        yield value, [section.get("env_config"), section.get("per_env"), *others]


def _environment_files(value: Any, section: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Paths and addresses that a registered environment is given; those of another one belong to its name."""
    if not any(_environment(section.get("id"), section)):
        yield from ((text, None) for text in _texts(value) if re.search(r"[/\\]|^~|^\.\.", text))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _wrappers(value: Any, section: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    for wrapper in value:
        name = wrapper.get("name") if isinstance(wrapper, Mapping) else wrapper
        if _is_path(name) or name in _WRITES_FILES:
            yield name, wrapper


def _opponents(value: Any, section: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    return _each_code(value.get("opponents") or (), section)


def _players(value: Any, section: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The kinds of players of a league."""
    for policy in value.values():
        player = policy.get("player") if isinstance(policy, Mapping) else None
        kind = player.get("kind") if isinstance(player, Mapping) else player
        if _is_path(kind):
            yield kind, player


def _callbacks(value: Any, section: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    for callback in value:
        if isinstance(callback, Mapping) and "name" not in callback:  # {event: function}
            yield from ((name, None) for name in callback.values() if _is_path(name))
        else:
            name = callback.get("name") if isinstance(callback, Mapping) else callback
            if _is_path(name):
                yield name, callback


def _given(value: Any, section: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The value itself, or each of several."""
    for one in value if isinstance(value, (list, tuple)) else [value]:
        yield str(one), None


def _ray(value: Any, section: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    if value == "ray":
        yield "Ray", None


def _not_here(value: Any, section: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    if value != "127.0.0.1":
        yield str(value), None


_IMPORT, _LISTEN = "import and run", "listen on"
ASKS: dict[str, Ask] = {
    "run.algorithm": Ask(_IMPORT, When.MADE, _code),
    "run.callbacks": Ask(_IMPORT, When.MADE, _callbacks),
    "run.policy_mapping": Ask(_IMPORT, When.PLAYS, _code),
    "run.policies": Ask(_IMPORT, When.TRAINS, _players),  # all else of a policy is in a config.yaml of its own
    "run.self_play": Ask(_IMPORT, When.TRAINS, _opponents),
    "env.id": Ask(_IMPORT, When.PLAYS, _environment),
    "env.env_config": Ask("hand to its environment", When.PLAYS, _environment_files),
    "env.eval_env_config": Ask("hand to its environment", When.PLAYS, _environment_files),
    "env.per_env": Ask("hand to its environment", When.PLAYS, _environment_files),
    "env.import_modules": Ask(_IMPORT, When.PLAYS, _given),
    "env.wrappers": Ask(_IMPORT, When.PLAYS, _wrappers),
    "model.custom_model": Ask(_IMPORT, When.MADE, _network),
    "model.custom_preprocessor": Ask(_IMPORT, When.MADE, _network),
    "model.loss_terms": Ask(_IMPORT, When.MADE, _each_code),
    "run.cluster": Ask("start, or connect to,", When.TRAINS, _ray),
    "run.address": Ask("connect to Ray at", When.TRAINS, _given),
    "run.exchange": Ask("exchange files with workers in", When.TRAINS, _given),
    "run.output": Ask("write to", When.TRAINS, _given),
    "run.track": Ask("send results to", When.TRAINS, _given),
    "live.host": Ask(_LISTEN, When.TRAINS, _given),
    "live.port": Ask("listen on port", When.TRAINS, _given),
    "live.admin_host": Ask(_LISTEN, When.TRAINS, _not_here),
    "live.admin_port": Ask("listen on port", When.TRAINS, _given),
    "live.admin_names": Ask("answer at the admin port to the name", When.TRAINS, _given),
    "live.trusted_proxies": Ask("believe the proxy", When.TRAINS, _given),
    "live.token": Ask("let in whoever has", When.TRAINS, _given),
    "live.tokens": Ask("let in whoever has", When.TRAINS, _given),
    "live.admin_tokens": Ask("let change the service whoever has", When.TRAINS, _given),
    "live.token_file": Ask("read", When.TRAINS, _given),
    "live.admin_token_file": Ask("read", When.TRAINS, _given),
    "live.tls_cert": Ask("read", When.TRAINS, _given),
    "live.tls_key": Ask("read", When.TRAINS, _given),
    "live.spec": Ask("read", When.TRAINS, _given),
    "data.files": Ask("read", When.TRAINS, _given),
    "algo.expert": Ask("import, read or connect to its expert,", When.TRAINS, _given),
}
"""Keys of a run's config that make a process import, connect, listen, or read and write elsewhere."""
HARMLESS = {
    "run": """
        policies_to_train seed stop init_from init_map init_partial device threads record
        num_learners num_workers exchange_workers lockstep inference env_groups
        worker_timeout_s max_worker_restarts num_cpus_per_worker num_gpus_per_worker object_store_mb output_file_mb
        iteration_steps
        eval_freq eval_episodes eval_parallel video_freq checkpoint_freq checkpoint_updates checkpoint_every_s
        keep_checkpoints keep_best checkpoint_score checkpoint_replay export_graph_after_s log_level save_figure
        show_figure
    """,  # init_from: of a run that begins; one that was written never looks at it again
    "env": """
        vector num_envs num_processes step_ms teams moves drop_obs max_episode_steps frame_stack flatten_obs atari
        action_bounds clip_rewards normalize_rewards check max_restarts step_timeout wait_num step_wait_timeout
    """,
    "model": """
        fcnet_hiddens fcnet_activation conv_filters conv_activation conv_features dim zero_mean free_log_std
        log_std_init vf_share_layers use_lstm recurrent lstm_cell_size attention_window attention_layers
        attention_heads entities entity_width merge embedding_dim recurrent_norm max_seq_len normalize_observations
        layer_norm init layers custom_options
    """,  # custom_options: the arguments of a network, and trusted with its name
    "live": """
        obs actions agents rows wait_s fair reward_range obs_range max_games
        session_secrets max_connections_per_address max_sessions_per_address
        max_requests_per_address use_tcp use_gateway tick_timeout_s idle_timeout_s disconnect_timeout_s
        request_timeout_s keep_alive_s drain_timeout_s first_request_s max_body max_bodies max_header max_connections
        max_pending max_pending_per_session blocked_after_s check_obs fallback max_wait_s max_queue max_json
    """,
    "data": "epochs obs actions skip_broken share pretrain memory_mb",
}
"""All other keys, by section: numbers, choices and names that Bray looks up in its own tables. The `algo` section has
no texts but those of `ASKS`: a test looks."""


def named(config: Mapping[str, Any], path: str | Path = "", when: frozenset[When] = frozenset(When)) -> list[Asked]:
    """What a config, as plain data by section, asks for beside the installed algorithms and environments. `path`: its
    run directory."""
    found = []
    for key, ask in ASKS.items():
        section, _, name = key.partition(".")
        values = config.get(section) or {}
        if ask.when in when and values.get(name) not in (None, "", [], (), {}):
            found += [(key, one, arguments) for one, arguments in ask.find(values[name], values)]
    here = os.path.realpath(path)
    return [
        (key, one, arguments if ASKS[key].to == _IMPORT else here)
        for key, one, arguments in found
        if isinstance(one, str)
    ]


def named_by_launch(launch: Mapping[str, Any]) -> list[Asked]:
    """What `launch.json` asks to import: the module of the model's network, which gets the whole launch file."""
    return [("launch.json", module_of(launch), launch)]


def module_of(launch: Mapping[str, Any]) -> str:
    """The module that makes the network of a launched run."""
    try:
        module = launch["config"][launch["model"]]["module"]
    except (KeyError, TypeError):
        module = None
    if not isinstance(module, str):
        raise CheckpointError("launch.json: expected the launch file of this run, with the module of its model")
    return module


def check(path: Path, asked: list[Asked], answer: Answer = False) -> None:
    """Raise UntrustedRun unless everything that is asked for is trusted; `answer` decides on what is not, and is
    remembered."""
    known = _remembered() if asked else set()
    new = [item for item in asked if _checksum(item) not in known]
    if not new:
        return
    what = _in_words(new)
    yes = answer(f"{path} asks to {what}, on this machine, as you.") if callable(answer) else answer
    if not yes:
        raise UntrustedRun(
            f"{path} asks to {what}. It was not made here by you, so nothing was imported or started: look at what it "
            "is, and allow it with --trust (in Python: trust=True)"
        )
    remember(new)


def _in_words(asked: list[Asked]) -> str:
    """`import and run 'a:B' (env.id), 'c' (env.wrappers), connect to Ray at '10.0.0.1:6379' (run.address)`."""
    said: dict[str, list[str]] = {}
    for key, name, _ in asked:
        to = ASKS[key].to if key in ASKS else _IMPORT
        said.setdefault(to, []).append(f"{name!r} ({key})")
    return ", ".join(f"{to} {', '.join(dict.fromkeys(names))}" for to, names in said.items())


def remember(asked: list[Asked]) -> None:
    """Trust this from now on, also in later processes. Where that cannot be written down, it holds for this process."""
    known = _remembered() if asked else set()
    new = {_checksum(item): item for item in asked if _checksum(item) not in known}
    if not new:
        return
    _HERE.update(new)
    try:
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lines = "".join(f"{digest} {json.dumps([key, name])}\n" for digest, (key, name, _) in new.items())
        with open(file, "a", opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW, 0o600)) as f:
            f.write(lines)
    except (OSError, RuntimeError) as e:  # RuntimeError: a user without a home
        logger.debug("what is trusted could not be written down: %s", e)


_HERE: set[str] = set()  # trusted in this process


def user_state() -> Path:
    """Where Bray keeps what it remembers for this user."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "bray"


def _file() -> Path:
    return user_state() / "trusted"


def _remembered() -> set[str]:
    try:
        with open(_file(), "rb") as f:
            about = os.fstat(f.fileno())
            if about.st_uid != os.getuid() or about.st_mode & stat.S_IWOTH:
                return _HERE  # somebody else may have written it
            return _HERE | {line[:64].decode("ascii", "replace") for line in f}
    except (OSError, RuntimeError):
        return _HERE


def _checksum(item: Asked) -> str:
    return hashlib.sha256(json.dumps(item, sort_keys=True, default=str).encode()).hexdigest()
