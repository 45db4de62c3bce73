"""What can be typed. Nothing heavy is imported before a command runs: `bray --help` answers at once.

`main` turns errors into one message and an exit code: 0 done, 1 not done (or the user's own code raised), 2 a mistake of the
user, 130 and 143 ended by a signal before the end was reached.
"""

from __future__ import annotations

import difflib
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bray.errors import BrayError, ConfigError, did_you_mean

NOT_YET = ("tune", "dashboard")
"""Commands that are planned and are not there."""

_EXTRAS = {
    **dict.fromkeys(("torch", "gymnasium", "tensorboard", "matplotlib", "imageio", "PIL", "onnxscript"), "train"),
    **dict.fromkeys(("httptools", "onnxruntime", "onnx", "numba"), "serve"),
}
"""Packages that `pip install bray` leaves out, and the extra that brings them."""

app = typer.Typer(
    name="bray",
    help="Train a game agent, look at it, and serve it to live games.",
    epilog="Start with: bray train --run PPO --env CartPole-v1",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_debug = False  # set by --debug, read by main


def _set_debug(value: bool) -> bool:
    global _debug
    _debug = _debug or value
    return value


def _version(value: bool) -> None:
    if value:
        from bray._version import __version__

        typer.echo(f"bray {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it and end.")
    ] = False,
) -> None:
    pass


Debug = Annotated[bool, typer.Option("--debug", callback=_set_debug, help="Show the traceback of errors.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory, as `bray train` names it.")]
Which = Annotated[str, typer.Option("--checkpoint", metavar="latest|best|STEP", help="Which checkpoint.")]
Act = Annotated[
    Literal["greedy", "sample"] | None,
    typer.Option(
        "--act",
        help="How actions are chosen: greedy = the best one, sample = drawn as in training.",
        show_default="greedy",
    ),
]
Explore = Annotated[bool, typer.Option("--explore", help="The old name of --act sample.", hidden=True)]


def _acting(act: str | None, old: bool, flag: str) -> str | None:
    """What --act says; `old` is the flag that it replaces, for one release."""
    if not old:
        return act
    typer.echo(f"{flag} is now --act sample; {flag} goes with the next release", err=True)
    if act == "greedy":
        raise ConfigError(f"--act greedy and {flag} contradict each other: leave out {flag}")
    return "sample"


Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Other episodes than in every evaluation.")]
Steps = Annotated[
    int | None,
    typer.Option("--steps", metavar="N", min=1, help="Instead: exactly so many env steps, the last episode cut."),
]
Keys = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="lr=1e-3 model.layer_norm=true", show_default=False)
]
_WHAT, _ENDS, _HOW, _SHOW = "What runs", "Where it begins and ends", "How it runs", "What is shown"
_LIVE = "Live games, in place of an environment"


def _opt(panel: str, names: str, metavar: str | None, help: str) -> Any:
    return typer.Option(*names.split(","), metavar=metavar, help=help, rich_help_panel=panel)


@app.command()
def train(
    run: Annotated[str | None, _opt(_WHAT, "--run", "ALGO", "PPO, DQN, ... or module:Name")] = None,
    env: Annotated[str | None, _opt(_WHAT, "--env", "ENV", "CartPole-v1, ... or module:Class")] = None,
    file: Annotated[Path | None, _opt(_WHAT, "-f,--yaml", "FILE", "A run as YAML, JSON or Python.")] = None,
    config: Annotated[str | None, _opt(_WHAT, "--config", "JSON", "'{\"lr\": 1e-3}'")] = None,
    keys: Keys = None,
    no_preset: Annotated[bool, _opt(_WHAT, "--no-preset", None, "Leave out the settings that ship with Bray.")] = False,
    seeds: Annotated[list[int] | None, _opt(_WHAT, "--seed", "N", "Several times: several runs, one curve.")] = None,
    stop: Annotated[str | None, _opt(_ENDS, "--stop", "JSON", "'{\"episode_return_mean\": 475}': any of them.")] = None,
    steps: Annotated[
        int | None, _opt(_ENDS, "--steps", "N", "Env steps: the same as --stop '{\"env_steps_total\": N}'.")
    ] = None,
    project: Annotated[Path | None, _opt(_ENDS, "--project", "P", "The run directory is P/T.")] = None,
    trial: Annotated[str | None, _opt(_ENDS, "--trial", "T", "The run directory is P/T.")] = None,
    resume: Annotated[Path | None, _opt(_ENDS, "--resume", "RUN_DIR", "Go on exactly where a run stopped.")] = None,
    init_from: Annotated[Path | None, _opt(_ENDS, "--init-from", "RUN_DIR", "Start with a run's weights.")] = None,
    checkpoint_freq: Annotated[
        int | None, _opt(_ENDS, "--checkpoint-freq", "N", "Iterations between checkpoints.")
    ] = None,
    keep_checkpoints: Annotated[
        int | None, _opt(_ENDS, "--keep-checkpoints", "N", "Newest kept, and the best.")
    ] = None,
    checkpoint_score: Annotated[
        str | None, _opt(_ENDS, "--checkpoint-score", "KEY", "What the best goes by; -KEY: lower is better.")
    ] = None,
    live: Annotated[bool, _opt(_LIVE, "--live", None, "Learn from the games that call.")] = False,
    port: Annotated[int | None, _opt(_LIVE, "--port", "N", "Where they call; default 8000.")] = None,
    host: Annotated[
        str | None, _opt(_LIVE, "--host", "H", "0.0.0.0 = every network; default this machine alone.")
    ] = None,
    obs: Annotated[str | None, _opt(_LIVE, "--obs", "SPACE", "What they send: 'float32[6]', 'uint8[4,84,84]'.")] = None,
    actions: Annotated[
        str | None, _opt(_LIVE, "--actions", "SPACE", "What they want: 3, '3,2', 'float32[2] -1..1'.")
    ] = None,
    spec: Annotated[Path | None, _opt(_LIVE, "--spec", "FILE", "Or both as JSON; or --env, for its spaces.")] = None,
    data: Annotated[
        str | None, _opt(_WHAT, "--data", "FILES", "Learn from files: a directory, 'DIR/*.episodes'.")
    ] = None,
    device: Annotated[str | None, _opt(_HOW, "--device", "D", "cpu, cuda, cuda:N or auto")] = None,
    num_workers: Annotated[int | None, _opt(_HOW, "--num-workers", "N", "Rollout processes; 0 = this one.")] = None,
    num_envs: Annotated[int | None, _opt(_HOW, "--num-envs-per-worker", "N", "Stepped together: env.num_envs.")] = None,
    eval_freq: Annotated[int | None, _opt(_HOW, "--eval-freq", "N", "Iterations between evaluations.")] = None,
    eval_episodes: Annotated[int | None, _opt(_HOW, "--eval-episodes", "N", "Greedy episodes of each.")] = None,
    print_config: Annotated[bool, _opt(_SHOW, "--print-config", None, "Every value and its origin; ends.")] = False,
    render: Annotated[bool, _opt(_SHOW, "--render", None, "Evaluate at the end and write a video.")] = False,
    log_level: Annotated[str, _opt(_SHOW, "--log-level", "LEVEL", "debug, info, warning or error")] = "warning",
    quiet: Annotated[bool, _opt(_SHOW, "--quiet", None, "No progress; the last line alone.")] = False,
    debug: Debug = False,
) -> int:
    """Train an agent in this process. Without stop conditions it runs until Ctrl-C.

    Later ones win: preset, file, --config, flags and key=value.
    """
    given = {k: v for k, v in locals().items() if k != "debug"}
    from bray.cli import train as command

    return command.train(command.Options(**given))


@app.command("eval")
def evaluate(
    path: RunPath,
    episodes: Annotated[int | None, typer.Option("--episodes", metavar="N", min=1, help="Whole episodes [10].")] = None,
    steps: Steps = None,
    checkpoint: Which = "latest",
    act: Act = None,
    explore: Explore = False,
    render: Annotated[
        bool, typer.Option("--render", help="Write RUN_DIR/videos/eval.mp4 and .gif; `--render human` opens a window.")
    ] = False,
    human: Annotated[bool, typer.Option("--render-human", hidden=True)] = False,
    seed: Seed = None,
    debug: Debug = False,
) -> int:
    """Play whole episodes with a checkpoint and say how good it is."""
    from bray.cli import evaluate as command

    return command.evaluate(
        path,
        episodes,
        steps,
        checkpoint,
        _acting(act, explore, "--explore") or "greedy",
        "human" if human else "video" if render else None,
        seed,
    )


@app.command()
def collect(
    path: RunPath,
    episodes: Annotated[
        int | None, typer.Option("--episodes", metavar="N", min=1, help="Whole episodes [100].")
    ] = None,
    steps: Steps = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Instead of RUN_DIR/trajectories.")] = None,
    format: Annotated[
        Literal["bray", "pkl"], typer.Option("--format", help="pkl is for other tools; Bray does not read it.")
    ] = "bray",
    checkpoint: Which = "latest",
    act: Act = None,
    explore: Explore = False,
    seed: Seed = None,
    per_file: Annotated[int, typer.Option("--per-file", metavar="N", min=1, help="Episodes in one file.")] = 1000,
    debug: Debug = False,
) -> int:
    """Play whole episodes and save them, for imitation and offline learning."""
    from bray.cli import collect as command

    return command.collect(
        path, episodes, steps, out, format, checkpoint, _acting(act, explore, "--explore") or "greedy", seed, per_file
    )


_NET, _MODEL = "Where it listens", "What answers"


@app.command()
def serve(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_DIR...", help="Run directories (NAME=RUN_DIR names one), and KEY=VALUE for any setting."
        ),
    ],
    host: Annotated[str | None, _opt(_NET, "--host", "ADDRESS", "[127.0.0.1]; 0.0.0.0 = every network.")] = None,
    port: Annotated[int | None, _opt(_NET, "--port", "N", "[8000]")] = None,
    admin_port: Annotated[
        int | None, _opt(_NET, "--admin-port", "N", "Metrics, health, versions [--port + 1].")
    ] = None,
    tcp: Annotated[bool, _opt(_NET, "--tcp", None, "Answer framed TCP too, on the same port.")] = False,
    workers: Annotated[int | None, _opt(_NET, "--workers", "N", "Processes that share the port [1].")] = None,
    sessions: Annotated[int | None, _opt(_NET, "--sessions", "N", "Sessions of one worker at once [1000].")] = None,
    token: Annotated[
        list[str] | None, _opt(_NET, "--token", "T", "Required of clients; several times: any of them.")
    ] = None,
    tick_timeout: Annotated[float | None, _opt(_NET, "--tick-timeout", "SECONDS", "A tick's deadline [30].")] = None,
    engine: Annotated[
        Literal["onnx", "int8", "torch"] | None,
        _opt(_MODEL, "--engine", None, "What executes the model; onnx if nothing is said."),
    ] = None,
    versions: Annotated[
        list[str] | None,
        _opt(
            _MODEL,
            "--version",
            "LABEL[=SHARE]",
            "latest (if nothing is said), best or a step; several share the sessions.",
        ),
    ] = None,
    act: Act = None,
    sample: Annotated[bool, typer.Option("--sample", help="The old name of --act sample.", hidden=True)] = False,
    follow: Annotated[bool, _opt(_MODEL, "--follow", None, "Go on to new checkpoints while games run.")] = False,
    fallback: Annotated[
        str | None, _opt(_MODEL, "--fallback", "ACTION", "Sent when a tick is late: last, random or an action as JSON.")
    ] = None,
    record: Annotated[Path | None, _opt(_MODEL, "--record", "DIR", "Record every session, for `bray replay`.")] = None,
    debug: Debug = False,
) -> int:
    """Answer live games with trained policies: POST /step with start, tick ..., end. See docs/serving.md."""
    from bray.cli import serve as command

    flags = {
        "host": host,
        "port": port,
        "admin_port": admin_port,
        "use_tcp": tcp or None,
        "workers": workers,
        "actors_per_worker": sessions,
        "tokens": tuple(token) if token else None,
        "tick_timeout_s": tick_timeout,
        "engine": engine,
        "versions": command.parse_versions(versions) if versions else None,
        "act": _acting(act, sample, "--sample"),
        "follow": follow or None,
        "fallback": command.parse_fallback(fallback) if fallback is not None else None,
        "record": str(record) if record is not None else None,
    }
    return command.serve(words, flags)


@app.command()
def replay(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Recordings of `bray serve --record`.")],
    against: Annotated[
        str, typer.Option("--against", metavar="latest|best|STEP", help="The version to ask.")
    ] = "latest",
    run: Annotated[
        Path | None, typer.Option("--run", metavar="RUN_DIR", help="Another run than the recorded one.")
    ] = None,
    engine: Annotated[Literal["onnx", "int8", "torch"], typer.Option("--engine", help="What executes it.")] = "onnx",
    show: Annotated[int, typer.Option("--show", metavar="N", help="Differences to print.")] = 5,
    debug: Debug = False,
) -> int:
    """Play recorded sessions again, byte for byte, and compare the actions tick by tick."""
    from bray.cli import serve as command

    return command.replay(files, against, run, engine, show)


@app.command()
def gateway(
    servers: Annotated[list[str], typer.Argument(metavar="HOST:PORT[,ADMIN_PORT]...", help="The services behind it.")],
    bind: Annotated[str, typer.Option("--bind", metavar="HOST:PORT", help="Where the gateway listens.")] = "*:8000",
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Write here instead of stdout.")
    ] = None,
    maxconn: Annotated[int, typer.Option("--maxconn", metavar="N", min=1, help="Connections at once.")] = 8000,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Of clients and services.")] = 300.0,
    debug: Debug = False,
) -> int:
    """Write an HAProxy configuration: one address for services on several machines, sessions kept together."""
    from bray.cli import serve as command

    return command.gateway(servers, bind, config, maxconn, timeout)


@app.command()
def export(
    path: RunPath,
    quantize: Annotated[
        bool, typer.Option("--quantize", help="Also in int8, calibrated on recorded observations.")
    ] = False,
    checkpoint: Which = "latest",
    min_agreement: Annotated[
        float,
        typer.Option(
            "--min-agreement",
            metavar="PART",
            min=0.0,
            max=1.0,
            help="int8 is refused when fewer greedy actions than this are those of the Model. A continuous action is the same when it "
            "is off by at most 1 % of its range, on average over its numbers.",
        ),
    ] = 0.99,
    debug: Debug = False,
) -> int:
    """Write a checkpoint's Model as ONNX files, check them against torch and time them.

    RUN_DIR/models/default gets model.onnx, graph.onnx (its weights are inputs, so that it fits every checkpoint), model.int8.onnx and
    samples.tree (inputs and outputs to check a port against).
    """
    from bray.cli import export as command

    return command.export(path, quantize, checkpoint, min_agreement)


@app.command()
def launch(
    config: Annotated[Path, _opt(_WHAT, "--config", "FILE", "The launch file (YAML). `bray new` makes some.")],
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMPONENT.KEY=VALUE", help="model1.max_batch_size=8", show_default=False),
    ] = None,
    mode: Annotated[str | None, _opt(_WHAT, "--mode", "train|deploy", "Instead of the file's.")] = None,
    project: Annotated[str | None, _opt(_WHAT, "--project", "P", "Instead of the file's.")] = None,
    trial: Annotated[
        str | None, _opt(_WHAT, "--trial", "T", "Instead of the file's. The run directory is P/T.")
    ] = None,
    cluster: Annotated[
        Literal["ray", "local"],
        _opt(
            _HOW, "--cluster", None, "ray: processes, of the Ray that runs or of one of its own; local: this process."
        ),
    ] = "ray",
    check: Annotated[
        bool, _opt(_SHOW, "--check", None, "Say what would start, with resources; start nothing.")
    ] = False,
    graph: Annotated[Path | None, _opt(_SHOW, "--graph", "FILE.svg", "Draw the graph; start nothing.")] = None,
    log_level: Annotated[str, _opt(_SHOW, "--log-level", "LEVEL", "debug, info, warning or error")] = "warning",
    quiet: Annotated[bool, _opt(_SHOW, "--quiet", None, "No progress.")] = False,
    debug: Debug = False,
) -> int:
    """Start the components of a launch file: models, buffers, agents, trainers. Ctrl-C ends it. `bray schema KIND` lists keys; see
    docs/launch.md."""
    given = {k: v for k, v in locals().items() if k not in ("debug", "keys")}
    from bray.cli import launch as command

    return command.launch(command.Options(**given, keys=keys or ()))


@app.command()
def schema(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND]",
            help="top, model, source, buffer, agent, actor, render, trainer or config: a table of its keys.",
        ),
    ] = None,
    debug: Debug = False,
) -> int:
    """The JSON Schema of launch files, for editors; or all keys of one kind of component."""
    from bray.cli import launch as command

    return command.schema(kind)


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Directory and Python package of the project.")],
    template: Annotated[
        Path | None, typer.Option("--template", metavar="DIR", help="Copy this project instead of Bray's template.")
    ] = None,
    debug: Debug = False,
) -> int:
    """Copy the project template to ./NAME: launch files, models, agents, sources, trainers, a game."""
    from bray.cli import new as command

    return command.new(name, template)


@app.command()
def render(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A launch file: its project, trial and renderers.")
    ] = None,
    project: Annotated[Path | None, typer.Option("--project", metavar="P", help="Instead of the file's.")] = None,
    trial: Annotated[
        str | None, typer.Option("--trial", metavar="T", help="Shown first; the page can change it.")
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="0.0.0.0 = every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 = any free one.")] = 0,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    seconds: Annotated[float | None, typer.Option("--seconds", metavar="S", min=0, help="End after so long.")] = None,
    debug: Debug = False,
) -> int:
    """Show saved episodes as pictures in a web page, and make videos of them. See docs/render.md."""
    from bray.cli import render as command

    return command.render(config, project, trial, host, port, open_page, seconds)


@app.command()
def algos(
    name: Annotated[str | None, typer.Argument(metavar="[ALGO]", help="Show the config keys of this one.")] = None,
    debug: Debug = False,
) -> int:
    """The algorithms, or all config keys of one."""
    from bray.cli import listing

    return listing.algos(name)


@app.command()
def envs(
    pattern: Annotated[str | None, typer.Argument(metavar="[PATTERN]", help="Part of a name, or with * and ?.")] = None,
    debug: Debug = False,
) -> int:
    """The environments that can be named, which have a native vector form, and presets."""
    from bray.cli import listing

    return listing.envs(pattern)


@app.command("check-env")
def check_env(
    env: Annotated[str, typer.Argument(metavar="ENV", help="A name or module:Class.")],
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Its env_config; env.KEY=VALUE for the env section.", show_default=False
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Random steps to play, twice.")] = 200,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    debug: Debug = False,
) -> int:
    """Play an environment at random and say what is wrong with it and what to do."""
    from bray.cli import listing

    return listing.check(env, keys or [], steps, seed)


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="For a machine.")] = False,
    debug: Debug = False,
) -> int:
    """Look at this machine and this installation; names no user and no path, so it can be shared."""
    from bray.cli import doctor as command

    return command.doctor(json)


fake = typer.Typer(
    no_args_is_help=True, help="Partners to develop against: a service without an agent, games without a game."
)
app.add_typer(fake, name="fake")


@fake.command("actor")
def fake_actor(
    port: Annotated[int, typer.Option("--port", metavar="N", help="0 = any free one.")] = 8000,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS")] = "127.0.0.1",
    tcp: Annotated[bool, typer.Option("--tcp", help="Answer framed TCP too, on the same port.")] = False,
    workers: Annotated[int, typer.Option("--workers", metavar="N", min=1)] = 1,
    sessions: Annotated[int, typer.Option("--sessions", metavar="N", min=1, help="Of one worker at once.")] = 1000,
    start: Annotated[str, typer.Option("--start", metavar="TEXT", help="The reply to a start.")] = "",
    tick: Annotated[
        str, typer.Option("--tick", metavar="TEXT", help="The reply to a tick.")
    ] = "fake_actor_tick_return",
    end: Annotated[str, typer.Option("--end", metavar="TEXT", help="The reply to an end.")] = "fake_actor_end_return",
    echo: Annotated[bool, typer.Option("--echo", help="Answer a tick with its own body.")] = False,
    debug: Debug = False,
) -> int:
    """A game service with fixed replies, to connect a game before there is an agent."""
    from bray.cli import fake as command
    from bray.fake.actor import Replies
    from bray.serving.config import ServiceConfig

    replies = Replies(start.encode(), tick.encode(), end.encode(), echo)
    config = ServiceConfig(host=host, port=port, use_tcp=tcp, workers=workers, actors_per_worker=sessions)
    return command.actor(replies, config)


@fake.command("buffer")
def fake_buffer(
    config: Annotated[
        Path, typer.Option("--config", metavar="FILE", help="The launch file whose trainers are to run.")
    ],
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="COMPONENT.KEY=VALUE", help="As for bray launch.", show_default=False)
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            metavar="MODULE:NAME",
            help="A sample to imitate, or a function of a random generator that makes one. Without it: what the algorithm, else the model takes.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="HZ", min=0.0, help="Samples per second. [default: as many as are taken]"),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", metavar="S", min=0.0, help="[default: until it is stopped]")
    ] = None,
    trial: Annotated[
        str | None, typer.Option("--trial", metavar="T", help="[default: the file's, with -fake after it]")
    ] = None,
    cluster: Annotated[
        Literal["ray", "local"], typer.Option("--cluster", help="local: all in this process.")
    ] = "local",
    debug: Debug = False,
) -> int:
    """Run the trainers of a launch file on made-up samples, without games and sources: to develop a trainer alone."""
    from bray.cli import fake as command

    return command.buffer(config, keys or [], sample, rate, seconds, trial, cluster)


@fake.command("gamecore")
def fake_gamecore(
    sessions: Annotated[int, typer.Option("--sessions", metavar="N", min=1, help="Games at once.")] = 8,
    rate: Annotated[
        float, typer.Option("--rate", metavar="R", min=0, help="Ticks/s of each; 0 = as fast as it answers.")
    ] = 0.0,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", min=0.1)] = 5.0,
    tcp: Annotated[bool, typer.Option("--tcp/--http", help="Which protocol.")] = False,
    body: Annotated[Path | None, typer.Option("--body", metavar="FILE", help="The body of every tick.")] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="RUN_DIR", help="Random observations of this run, for `bray serve`.")
    ] = None,
    size: Annotated[
        int, typer.Option("--bytes", metavar="N", min=0, help="The body is N bytes, if nothing else is said.")
    ] = 1024,
    connections: Annotated[int, typer.Option("--connections", metavar="N", min=1, help="At most.")] = 32,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N")] = 8000,
    admin_port: Annotated[
        int | None,
        typer.Option("--admin-port", metavar="N", help="Of the service, for its CPU and memory [--port + 1]."),
    ] = None,
    token: Annotated[str, typer.Option("--token", metavar="T")] = "",
    json: Annotated[bool, typer.Option("--json", help="For a machine.")] = False,
    debug: Debug = False,
) -> int:
    """Games that tick at a service, and a table of how fast and how well it answers."""
    from bray.cli import fake as command
    from bray.fake.gamecore import Load

    load = Load(
        host, port, tcp, sessions, rate, seconds, connections, command.bodies(body, run, size), token, admin_port
    )
    return command.gamecore(load, json)


# --- errors -----------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    global _debug
    argv = list(sys.argv[1:] if argv is None else argv)
    _debug = False
    if "" not in sys.path and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # `--env mygame:Env` means the file beside the user
    try:
        _refuse_unknown_command(argv)
        code = app(_optional_value(argv), prog_name="bray", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except BrayError as e:
        if _debug:
            traceback.print_exc()
        return _complain(str(e), 2)
    except KeyboardInterrupt:
        return _complain("stopped by Ctrl-C", 130)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1
    except BrokenPipeError:  # `bray envs | head`
        sys.stdout = None
        return 1
    except ModuleNotFoundError as e:
        if _debug or e.name not in _EXTRAS:
            traceback.print_exception(_without_ours(e))
            return 1
        return _complain(
            f"this command needs {e.name}, which is not installed: pip install 'bray[{_EXTRAS[e.name]}]'", 2
        )
    except Exception as e:
        if hasattr(e, "format_message"):  # how Typer says that an option is wrong
            return _usage(e)
        traceback.print_exception(_without_ours(e))
        return 1


def _complain(message: str, code: int) -> int:
    """`error: ...` on stderr. A user's traceback inside a message comes before it."""
    if message.startswith("Traceback"):
        trace, _, message = message.rpartition("\n")
        print(trace, file=sys.stderr)
    print(f"error: {message}", file=sys.stderr)
    return code


def _without_ours(e: Exception) -> Exception:
    """The exception without the frames of the command line itself."""
    frame = e.__traceback__
    while frame is not None and frame.tb_next is not None:
        name = frame.tb_frame.f_globals.get("__name__", "")
        if not name.startswith(("typer", "click", "bray.cli.main")):
            break
        frame = frame.tb_next
    return e.with_traceback(frame)


def _refuse_unknown_command(argv: list[str]) -> None:
    name = next((a for a in argv if not a.startswith("-")), None)
    known = [c.name or (c.callback.__name__ if c.callback else "") for c in app.registered_commands]
    known += [g.name for g in app.registered_groups if g.name]
    if name is None or name in known:
        return
    if name in NOT_YET:
        raise BrayError(f"`bray {name}` is not there yet. There are: {', '.join(sorted(known))}.")
    near = difflib.get_close_matches(name.lower(), [*known, *NOT_YET], n=1, cutoff=0.6)
    if near and near[0] in NOT_YET:
        raise BrayError(f"unknown command {name!r}; `bray {near[0]}` is not there yet either.")
    raise BrayError(f"unknown command {name!r}.{did_you_mean(name, known)} `bray --help` lists all.")


def _optional_value(argv: list[str]) -> list[str]:
    """`eval ... --render human` (or `--render=human`) as a flag of its own: Typer's options take a value or do not."""
    out: list[str] = []
    for i, word in enumerate(argv):
        if argv[0] == "eval" and (
            word == "--render=human" or (word == "--render" and argv[i + 1 : i + 2] == ["human"])
        ):
            out.append("--render-human")
        elif not (argv[0] == "eval" and word == "human" and argv[i - 1] == "--render"):
            out.append(word)
    return out


def _usage(e: Any) -> int:
    """A wrong option, in the same voice as our own errors."""
    context = getattr(e, "ctx", None)
    command = context.command_path if context is not None else "bray"
    option = getattr(e, "option_name", None)
    if option and not option.startswith("--"):
        option = None  # Typer names the parameter there when a value is missing
    if option and context is not None and "value" not in str(e):
        known = [o for p in context.command.params for o in p.opts if o.startswith("--")]
        near = difflib.get_close_matches(option, known, n=1, cutoff=0.75)
        message = f"unknown option {option!r}." + (f" Did you mean {near[0]!r}?" if near else "")
        if command == "bray train" and not near:
            message += f" Config keys are written without dashes: {option.lstrip('-').replace('-', '_')}=VALUE."
    else:
        message = str(e.format_message()).rstrip(".")
        message += "" if message.endswith("?") else "."
        message = message[:1].lower() + message[1:]
    return _complain(f"{message} `{command} --help` lists all options.", 2)


if __name__ == "__main__":
    sys.exit(main())
