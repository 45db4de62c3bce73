"""`bray fake actor | gamecore`: a service without an agent, games without a game, and a load table."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Any

import numpy as np

from bray import tree
from bray.cli.options import FakeActor as FakeActorOptions, FakeGamecore as GamecoreOptions
from bray.cli.show import log_shown, plain_table, put, say
from bray.errors import ConfigError
from bray.fake.actor import FakeActor, Replies
from bray.fake.gamecore import FakeGamecore, Load
from bray.rundir import RunDir
from bray.serving.access import TOKEN, Tokens
from bray.serving.config import ServiceConfig
from bray.serving.values import plain
from bray.serving.workers import serve
from bray.spec import ACTION_MASK, EnvSpec


@log_shown("info")
def actor(options: FakeActorOptions) -> int:
    """Serve fixed replies until a signal."""
    replies = Replies(options.start.encode(), options.tick.encode(), options.end.encode(), options.echo)
    config = ServiceConfig(
        host=options.host,
        port=options.port,
        use_tcp=True,
        workers=options.workers,
        actors_per_worker=options.sessions,
    )

    def ready(port: int, admin_port: int) -> None:
        where = f"{config.host}:{port} (admin {admin_port})"
        say(f"a fake actor answers HTTP and TCP on {where}; Ctrl-C ends it", "bold")
        say(f"try: bray fake gamecore --port {port} --sessions 8 --seconds 5", "dim")

    return serve(partial(FakeActor, replies), config, on_ready=ready)


@log_shown()
def gamecore(options: GamecoreOptions) -> int:
    """Play, then the table; 0 when every session could be started and every tick was answered."""
    o = options
    tls = True if o.tls == "system" else o.tls or False
    load = Load(
        o.host, o.port, o.tcp, o.sessions, o.rate, o.seconds, o.connections, bodies(o), token(o), tls, o.admin_port
    )  # fmt: skip
    result = FakeGamecore(load).play()
    numbers = result.to_json()
    if options.json:
        print(json.dumps(numbers))
        return 0 if result.requests and not result.errors else 1
    table = plain_table(
        ">sessions", ">requests/s", ">p50 ms", ">p90 ms", ">p99 ms", ">max ms", ">server CPU", ">us/request", ">RSS MB"
    )
    cpu = numbers.get("server_cpu")
    table.add_row(
        f"{result.started:,}",
        f"{numbers['per_second'] or 0:,.0f}",
        *[_short(numbers[f"{q}_ms"]) for q in ("p50", "p90", "p99", "max")],
        "–" if cpu is None else f"{100 * cpu:.0f} %",
        _short(numbers.get("server_cpu_us_per_request")),
        _short(numbers.get("server_rss_mb")),
    )
    put(table)
    if result.errors:
        for name, n in result.errors.most_common():
            say(f"{n:,} x {name}", "yellow")
        if load.tcp and not result.started and "connection lost" in result.errors:
            say("does this service answer framed TCP? `bray serve --tcp` does", "dim")
        if o.run is None and o.config is None and any(name.endswith("malformed") for name in result.errors):
            say("give --run RUN_DIR (of `bray launch`: --config FILE), so that observations fit", "dim")
    else:
        say(f"{result.requests:,} ticks in {result.seconds:.1f} s, no errors", "bold")
    return 0 if result.requests and not result.errors else 1


def token(options: GamecoreOptions) -> str:
    """What the games send: the first of a token file, of --token, of the environment."""
    file = None if options.token_file is None else str(options.token_file)
    given = Tokens([], file, "--token-file").valid
    return given[0].decode() if given else options.token or next(iter(os.environ.get(TOKEN, "").split()), "")


def _short(x: Any) -> str:
    return "–" if x is None else f"{x:.3g}" if x < 100 else f"{x:,.0f}"


def bodies(options: GamecoreOptions) -> tuple[bytes, ...]:
    """The body of a tick: a file's bytes, a random observation of a run or launch file as JSON, or filler of a given
    size."""
    file, run, config = options.body, options.run, options.config
    if sum(x is not None for x in (file, run, config)) > 1:
        raise ConfigError("give one of --body FILE, --run RUN_DIR and --config FILE")
    if file is not None:
        try:
            return (file.read_bytes(),)
        except OSError as e:
            raise ConfigError(f"--body: {file} cannot be read ({e.strerror})") from None
    if run is not None:
        return _ticks(EnvSpec.from_json(RunDir.open(run).read_json("spec.json")))
    if config is not None:
        from bray.launch.graph import load
        from bray.launch.hints import spec_of_games

        return _ticks(spec_of_games(load(config), options.port))
    return (b"x" * options.size,)


def _ticks(spec: EnvSpec, length: int = 64) -> tuple[bytes, ...]:
    """An episode of random observations. Rewards are for a service that learns; others ignore them."""
    rng = np.random.default_rng(0)
    ticks = []
    for i in range(length):
        obs = spec.observation.sample(rng)
        if isinstance(obs, dict) and ACTION_MASK in obs:
            obs[ACTION_MASK] = tree.map(np.ones_like, obs[ACTION_MASK])
        ends = {"terminated": i == length - 1, "truncated": False}
        ticks.append(json.dumps({"obs": plain(obs), "reward": 0.0, **ends}).encode())
    return tuple(ticks)
