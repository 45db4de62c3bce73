"""What can be typed: one dataclass per command. Its docstring is the command's help, a field is a flag, the text under
it the flag's help.

Nothing heavy is imported here: `bray --help` answers at once. `SECTIONS` adds the flags that set keys of a config.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from bray.config.declare import Amount, Count, Flag, Port, Positive, Share, Whole
from bray.log_format import LogFormat

RunDirectory = Annotated[Path, Flag(metavar="RUN_DIR", argument=True)]
LaunchFile = Annotated[Path, Flag("--config", "FILE")]
Keys = Annotated[list[str] | None, Flag(metavar="KEY=VALUE", argument=True)]
ComponentKeys = Annotated[list[str] | None, Flag(metavar="COMPONENT.KEY=VALUE", argument=True)]
Seconds = Annotated[Amount, Flag(metavar="SECONDS")]
Checkpoint = Annotated[str, Flag(metavar="latest|best|STEP")]
Address = Annotated[str, Flag(metavar="ADDRESS")]
Text = Annotated[str, Flag(metavar="TEXT")]
Engine = Literal["onnx", "int8", "torch"]
Cluster = Literal["ray", "local"]
Hidden = Annotated[bool, Flag(hidden=True)]

WHAT, HOW, SHOWN = "What runs", "How it runs", "What is shown"
LIVE = "Live games, in place of an environment"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every command has."""

    debug: bool = False
    """Show the traceback of errors."""


@dataclass(frozen=True, kw_only=True)
class Reading(Options):
    """What reads a run directory that may come from elsewhere."""

    trust: bool = False
    """Allow what the run directory asks for: code that is not part of Bray, a Ray cluster, a port. See
    docs/security.md."""


@dataclass(frozen=True, kw_only=True)
class Acting(Reading):
    """How a trained policy acts."""

    act: Literal["greedy", "sample"] | None = None
    """How actions are chosen: greedy = the best one (the default), sample = drawn as in training."""
    explore: Hidden = False
    """The old name of --act sample."""


@dataclass(frozen=True, kw_only=True)
class Train(Reading):
    """Train an agent in this process. Without stop conditions it runs until Ctrl-C.

    Later ones win: preset, file, --config, flags and key=value. `bray schema run` (env, model, live, PPO, ...) lists
    the keys.
    """

    keys: Keys = None
    """lr=1e-3 model.layer_norm=true"""
    run: Annotated[str | None, Flag(metavar="ALGO", panel=WHAT)] = None
    """PPO, DQN, ... or module:Name"""
    env: Annotated[str | None, Flag(metavar="ENV")] = None
    """CartPole-v1, ... or module:Class"""
    file: Annotated[Path | None, Flag("-f,--yaml", "FILE")] = None
    """A run as YAML, JSON or Python."""
    config: Annotated[str | None, Flag(metavar="JSON")] = None
    """'{"lr": 1e-3}'"""
    self_play: bool = False
    """Play against itself and its past selves; keys: self_play.pool=20, ..."""
    no_preset: bool = False
    """Leave out the settings that ship with Bray."""
    seeds: Annotated[list[int] | None, Flag("--seed")] = None
    """Several times: several runs, one curve."""
    stop: Annotated[str | None, Flag(metavar="JSON", panel="Where it begins and ends")] = None
    """'{"episode_return_mean": 475}': any of them."""
    steps: int | None = None
    """Env steps: the same as --stop '{"env_steps_total": N}'."""
    project: Annotated[Path | None, Flag(metavar="P")] = None
    """The run directory is P/T."""
    trial: Annotated[str | None, Flag(metavar="T")] = None
    """The run directory is P/T."""
    resume: Annotated[Path | None, Flag(metavar="RUN_DIR")] = None
    """Go on exactly where a run stopped."""
    print_config: Annotated[bool, Flag(panel=SHOWN)] = False
    """Show every value and where it came from, then end."""
    render: bool = False
    """Evaluate at the end and write a video."""
    quiet: bool = False
    """No progress; the last line alone."""
    live: Annotated[bool, Flag(panel=LIVE)] = False
    """Learn from the games that call."""


@dataclass(frozen=True, kw_only=True)
class Tune(Options):
    """Search over settings: many runs with other values of some keys, and the best of them as a preset.

    A KEY=VALUE with a range (lr=1e-5..1e-2:log) or several values (gamma=0.95,0.99) is searched, and so is
    {grid_search: [0.95, 0.99]} in a file; every other one holds for all runs. The same command goes on with a study
    that was interrupted. See docs/tuning.md.
    """

    keys: Keys = None
    """lr=1e-5..1e-2:log gamma=0.95,0.99 num_envs=8"""
    run: Annotated[str | None, Flag(metavar="ALGO", panel=WHAT)] = None
    """PPO, DQN, ... or module:Name"""
    env: Annotated[str | None, Flag(metavar="ENV")] = None
    """CartPole-v1, ... or module:Class"""
    file: Annotated[Path | None, Flag("-f,--yaml", "FILE")] = None
    """A run as YAML, JSON or Python."""
    config: Annotated[str | None, Flag(metavar="JSON")] = None
    """'{"lr": {"grid_search": [1e-3, 1e-4]}}'"""
    no_preset: bool = False
    """Leave out the settings that ship with Bray."""
    name: Annotated[str, Flag(metavar="STUDY")]
    """The study is P/STUDY: a name of its own for each question."""
    project: Annotated[Path, Flag(metavar="P")] = Path("runs")
    """Where studies are."""
    trials: Annotated[Count | None, Flag(panel="How it is searched")] = None
    """Settings to try; none is needed where all have a list of values."""
    num_seeds: Count = 1
    """Runs of each trial, which is judged by their interquartile mean."""
    steps: Count | None = None
    """Env steps of a run; without it, those of the preset or file."""
    stop: Annotated[str | None, Flag(metavar="JSON")] = None
    """'{"time_total_s": 60}': when a run is over, as for bray train."""
    scheduler: Annotated[str | None, Flag(metavar="asha|median|pbt")] = None
    """End poor trials early; pbt: let them go on from copies of good ones."""
    sampler: Annotated[str, Flag(metavar="tpe|random")] = "tpe"
    """What proposes values of ranges."""
    seed: Whole = 0
    """The first seed of each trial, and that of what is proposed."""
    fresh_seeds: Whole = 4
    """At the end, runs of the best settings and of those before, on other seeds."""
    storage: Annotated[str | None, Flag(metavar="URL")] = None
    """A database for the study (sqlite:///FILE, postgresql://...), in place of a file in its directory."""
    parallel: Annotated[Count | None, Flag(panel="Where it runs")] = None
    """Runs at once; without it, as many as there is room for."""
    cpus_per_trial: Annotated[float, Flag(metavar="X")] = 1.0
    """CPUs of one run; with 0.5 two share a core."""
    gpus_per_trial: Annotated[float, Flag(metavar="X")] = 0.0
    """GPUs of one run; with 0.25 four share one."""
    cluster: Cluster = "local"
    """ray: the runs are on a Ray cluster, P on a disk that all of it shares."""
    address: Annotated[str | None, Flag(metavar="HOST:PORT")] = None
    """Of the Ray cluster."""
    quiet: Annotated[bool, Flag(panel=SHOWN)] = False
    """The last lines alone."""


@dataclass(frozen=True, kw_only=True)
class Submit(Options):
    """Write a job for a scheduler: `bray submit slurm --nodes 2 -- train --run PPO ... --cluster ray`.

    Inside of it each task finds its rank and the first one's address in the scheduler's variables. See docs/tuning.md.
    """

    kind: Annotated[Literal["slurm", "k8s", "local", "here"], Flag(metavar="slurm|k8s|local", argument=True)]
    """For whom."""
    words: Annotated[list[str], Flag(metavar="-- COMMAND...", argument=True)]
    """train, tune, launch, ... with its own flags."""
    nodes: Count = 1
    """More than one are a Ray cluster for the command."""
    cpus: Count = 1
    """Of each node."""
    gpus: Whole = 0
    """Of each node."""
    memory: Annotated[str | None, Flag(metavar="16G")] = None
    """Of each node, as the scheduler writes it."""
    time: Annotated[str | None, Flag(metavar="HH:MM:SS")] = None
    """After which it is ended."""
    partition: Annotated[str | None, Flag(metavar="NAME")] = None
    """slurm: where it queues."""
    image: Annotated[str, Flag(metavar="IMAGE")] = "bray-train"
    """k8s: what docker/train.Dockerfile makes, in your registry."""
    volume: Annotated[str | None, Flag(metavar="CLAIM")] = None
    """k8s: a volume claim for runs/."""
    name: Annotated[str | None, Flag(metavar="NAME")] = None
    """Of the job; without it, bray-COMMAND."""
    out: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Write it here; without it, NAME.sbatch, .yaml or .sh."""
    start: bool = False
    """Hand it to the scheduler: sbatch, kubectl apply or bash."""


@dataclass(frozen=True, kw_only=True)
class Work(Reading):
    """Play for a training that exchanges files in a shared directory (`bray train --exchange DIR`).

    Any number of them may come and go, before the training begins and while it is at work. See docs/scaling.md.
    """

    path: Annotated[Path, Flag(metavar="DIR", argument=True)]
    """The directory."""
    wait_s: Positive = 600.0
    """Seconds without a training, or with one that takes nothing, after which it ends."""


@dataclass(frozen=True, kw_only=True)
class Eval(Acting):
    """Play whole episodes with a checkpoint and say how good it is."""

    path: RunDirectory
    """A run directory, as `bray train` names it."""
    episodes: Count | None = None
    """Whole episodes [10]."""
    steps: Count | None = None
    """Instead: exactly this many env steps, the last episode cut."""
    checkpoint: Checkpoint = "latest"
    """Which checkpoint."""
    render: bool = False
    """Write RUN_DIR/videos/eval.mp4 and .gif; `--render human` opens a window."""
    render_human: Hidden = False
    seed: Whole | None = None
    """Other episodes than in every evaluation."""
    simulations: Whole | None = None
    """Steps of the search for each decision, where the policy searches (AlphaZero); 0 = its network alone [as in
    training]."""
    follow: Annotated[Positive | None, Flag(metavar="SECONDS")] = None
    """Wait for the run and evaluate each new checkpoint, until none has come for so long."""
    target_return: Annotated[float | None, Flag(metavar="R")] = None
    """Play for this return, with a policy that is asked for one (DT)."""


@dataclass(frozen=True, kw_only=True)
class Exploitability(Reading):
    """Say how much a best response gains on the policies of a game of several: NashConv where open_spiel can compute
    it, else by training one."""

    path: RunDirectory
    """A run directory, as `bray train` names it."""
    checkpoint: Checkpoint = "latest"
    """Which checkpoint."""
    act: Literal["sample", "greedy"] = "sample"
    """How its policies choose: sample = drawn as in training."""
    steps: Count | None = None
    """Train a best response for this many env steps, for each agent in turn."""
    run: Annotated[str, Flag(metavar="ALGO")] = "PPO"
    """What learns the best response."""
    episodes: Count = 2000
    """Games by which a trained best response is judged."""
    seed: Whole = 0
    """Of its training."""


@dataclass(frozen=True, kw_only=True)
class Collect(Acting):
    """Play whole episodes and save them, for imitation and offline learning."""

    path: RunDirectory
    """A run directory, as `bray train` names it."""
    episodes: Count | None = None
    """Whole episodes [100]."""
    steps: Count | None = None
    """Instead: exactly this many env steps, the last episode cut."""
    out: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Instead of RUN_DIR/trajectories."""
    format: Literal["bray", "minari", "pkl"] = "bray"
    """minari needs h5py; pkl is for other tools, and Bray does not read it."""
    noise: Share = 0.0
    """Other actions than the policy's: this share of the choices at random, or numbers with normal noise of this part
    of half their range."""
    checkpoint: Checkpoint = "latest"
    """Which checkpoint."""
    seed: Whole | None = None
    """Other episodes than in every evaluation."""
    per_file: Count = 1000
    """Episodes in one file."""


@dataclass(frozen=True, kw_only=True)
class Data(Acting):
    """Say what files of episodes hold: returns, ends, coverage of actions, what is broken or there twice. With --out,
    write them again, filtered, joined or in another form; with --evaluate, estimate a policy by them. See docs/data.md.
    """

    files: Annotated[list[str], Flag(metavar="FILES...", argument=True)]
    """Directories, files or patterns; several are joined."""
    obs: Annotated[str | None, Flag(metavar="SPACE")] = None
    """The observation, where the files do not say it: 'float32[6]'."""
    actions: Annotated[str | None, Flag(metavar="SPACE")] = None
    """The action, where the files do not say it: 3, or 'float32[2] -1..1'."""
    plot: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Draw histograms of returns, lengths and actions to this picture."""
    out: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Write the episodes there."""
    convert: Annotated[Literal["bray", "minari"] | None, Flag(metavar="bray|minari")] = None
    """The form in which they are written [bray]."""
    filter: Annotated[str | None, Flag(metavar="TEXT")] = None
    """Write those alone for which this holds: 'return > 100 and length <= 500'."""
    evaluate: Annotated[Path | None, Flag(metavar="RUN_DIR")] = None
    """Estimate what the policy of this run would get, without an environment."""
    checkpoint: Checkpoint = "latest"
    """Which checkpoint of it."""
    gamma: Annotated[Share | None, Flag(metavar="X")] = None
    """Discount of its return [that of the run]."""
    skip_broken: bool = False
    """Leave out broken episodes instead of stopping at the first."""


@dataclass(frozen=True, kw_only=True)
class Logging(Options):
    """What runs for days and is watched by programs."""

    log_format: Annotated[LogFormat, Flag(metavar="text|json")] = "text"
    """json: a JSON object per line of the log, with time, level, logger, process, message and exception."""


@dataclass(frozen=True, kw_only=True)
class Serve(Logging):
    """Answer live games with trained policies: POST /step with start, tick ..., end. See docs/serving.md.

    `bray schema serve` lists every KEY.
    """

    words: Annotated[list[str], Flag(metavar="RUN_DIR...", argument=True)]
    """Run directories (NAME=RUN_DIR names one), and KEY=VALUE for any setting."""
    player: Annotated[str | None, Flag(metavar="NAME")] = None
    """Of a run that plays itself: this player, such as default@400 (`bray league RUN_DIR` lists them)."""
    rating: float | None = None
    """Of a run that plays itself: the player whose rating is nearest to this."""
    sample: Hidden = False
    """The old name of --act sample."""


@dataclass(frozen=True, kw_only=True)
class Record(Logging):
    """Record games that people play: ticks that carry the action that the player chose become files to learn from. See
    docs/data.md."""

    obs: Annotated[str, Flag(metavar="SPACE")]
    """The observation that games send: 'float32[6]', or JSON of a dict of such."""
    actions: Annotated[str, Flag(metavar="SPACE")]
    """The action that players choose: 3, '3,2' or 'float32[2] -1..1'."""
    out: Annotated[Path, Flag(metavar="DIR")]
    """Where the files go."""
    port: Port = 8000
    """0 = any free one."""
    host: Address = "127.0.0.1"
    """0.0.0.0 = every network."""
    sessions: Count = 100
    """Games at once."""
    token_file: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Tokens, one per line; a request must carry one of them."""


@dataclass(frozen=True, kw_only=True)
class Replay(Reading):
    """Play recorded sessions again, byte for byte, and compare the actions tick by tick."""

    files: Annotated[list[Path], Flag(metavar="FILE...", argument=True)]
    """Recordings of `bray serve --record`."""
    against: Checkpoint = "latest"
    """The version to ask."""
    run: Annotated[Path | None, Flag(metavar="RUN_DIR")] = None
    """Another run than the recorded one."""
    engine: Engine = "onnx"
    """What executes it."""
    show: int = 5
    """Differences to print."""


@dataclass(frozen=True, kw_only=True)
class Gateway(Options):
    """Write an HAProxy configuration: one address for services on several machines, sessions kept together."""

    servers: Annotated[list[str], Flag(metavar="HOST:PORT[,ADMIN_PORT]...", argument=True)]
    """The services behind it."""
    bind: Annotated[str, Flag(metavar="HOST:PORT")] = "*:8000"
    """Where the gateway listens."""
    config: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Write here instead of stdout."""
    maxconn: Count = 8000
    """Connections at once."""
    timeout: Seconds = 300.0
    """Of clients and services."""


@dataclass(frozen=True, kw_only=True)
class Export(Reading):
    """Write a checkpoint's Model as ONNX files, check them against torch and time them.

    RUN_DIR/models/default gets model.onnx, graph.onnx (its weights are inputs, so that it fits every checkpoint),
    model.int8.onnx, and their proof: samples.tree (inputs, and the outputs that every machine has to answer) with
    graph.weights (the weights it was exported with).
    """

    path: RunDirectory
    """A run directory, as `bray train` names it."""
    quantize: bool = False
    """Also in int8, calibrated on recorded observations."""
    checkpoint: Checkpoint = "latest"
    """Which checkpoint."""
    min_agreement: Annotated[Share, Flag(metavar="PART")] = 0.99
    """int8 is refused when fewer greedy actions than this are those of the Model; continuous actions agree within 1 %
    of their range on average."""


@dataclass(frozen=True, kw_only=True)
class Launch(Logging, Reading):
    """Start the components of a launch file: models, buffers, agents, trainers. Ctrl-C ends it.

    `bray schema KIND` lists the keys of a component; see docs/launch.md.
    """

    keys: ComponentKeys = None
    """model1.max_batch_size=8"""
    config: Annotated[LaunchFile, Flag("--config", "FILE", panel=WHAT)]
    """The launch file (YAML). `bray new` makes some."""
    mode: Annotated[str | None, Flag(metavar="train|deploy")] = None
    """Instead of the file's."""
    project: Annotated[str | None, Flag(metavar="P")] = None
    """Instead of the file's."""
    trial: Annotated[str | None, Flag(metavar="T")] = None
    """Instead of the file's. The run directory is P/T."""
    cluster: Annotated[Cluster, Flag(panel=HOW)] = "ray"
    """ray: processes, in the Ray cluster that is running or in a new one; local: all in this process."""
    check: Annotated[bool, Flag(panel=SHOWN)] = False
    """Say what would start, with resources; start nothing."""
    graph: Annotated[Path | None, Flag(metavar="FILE.svg")] = None
    """Draw the graph; start nothing."""
    log_level: Annotated[str, Flag(metavar="LEVEL")] = "warning"
    """debug, info, warning or error"""
    quiet: bool = False
    """No progress."""


@dataclass(frozen=True, kw_only=True)
class Schema(Options):
    """Every key that can be set, with its type, default and meaning.

    Without a NAME: the JSON Schema of launch files, for editors.
    """

    name: Annotated[str | None, Flag(metavar="[NAME]", argument=True)] = None
    """run, env, model, live, serve, launch, PPO or another algorithm, or a kind of component: buffer, agent, actor,
    trainer, ..."""
    json: bool = False
    """As JSON Schema."""


@dataclass(frozen=True, kw_only=True)
class New(Options):
    """Copy the project template to ./NAME: launch files, models, agents, sources, trainers, a game."""

    name: Annotated[str, Flag(metavar="NAME", argument=True)]
    """Directory and Python package of the project."""
    template: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Copy this project instead of Bray's template."""


@dataclass(frozen=True, kw_only=True)
class Render(Options):
    """Show saved episodes as pictures in a web page, and make videos of them. See docs/render.md."""

    config: LaunchFile | None = None
    """A launch file: its project, trial and renderers."""
    project: Annotated[Path | None, Flag(metavar="P")] = None
    """Instead of the file's."""
    trial: Annotated[str | None, Flag(metavar="T")] = None
    """Shown first; the page can change it."""
    host: Address = "127.0.0.1"
    """0.0.0.0 = every network."""
    port: Port = 0
    """0 = any free one."""
    open_page: Annotated[bool, Flag("--open/--no-open")] = True
    """Open the page in a browser."""
    seconds: Seconds | None = None
    """End after this time."""


@dataclass(frozen=True, kw_only=True)
class Plot(Options):
    """Draw the learning curves of runs on one picture: one curve for each algorithm, environment and setting, its seeds
    as mean and band."""

    runs: Annotated[list[Path], Flag(metavar="RUN...", argument=True)]
    """Run directories, or directories with runs in them."""
    out: Annotated[Path | None, Flag(metavar="FILE")] = None
    """The picture: .png, .svg or .pdf; without it, learning_curves.png, or figures/learning_curve.png of the one
    run."""
    threshold: float | None = None
    """Draw a line at this return."""
    quiet: bool = False
    """Say the name of the file alone."""


@dataclass(frozen=True, kw_only=True)
class League(Reading):
    """Rank the players of a run that plays itself: ratings, who beats whom, when each was frozen.

    A player is `default` (the newest weights), `default@STEP` (a snapshot), random, openspiel:BOT, module:function,
    another run directory, or an exported model.onnx.
    """

    path: RunDirectory
    """A run directory of `bray train --self-play`."""
    players: Annotated[list[str] | None, Flag(metavar="A B", argument=True)] = None
    """With --play: who."""
    play: bool = False
    """Play two players against each other, both drawing their actions: bray league RUN_DIR --play A B"""
    add: Annotated[str | None, Flag(metavar="RUN_DIR|FILE.onnx")] = None
    """Enter another run's newest checkpoint, or an exported model.onnx, as a player: it plays up to eight players of
    this run, and is ranked among them from then on."""
    name: Annotated[str | None, Flag(metavar="NAME")] = None
    """Of the player that is added; without it, that of its run directory or file."""
    games: Count = 200
    """So many games, seats in turn; with --add against each."""
    seed: Whole = 0
    """Of these games."""
    top: Count = 10
    """Players in the ranking."""
    plot: bool = False
    """Draw RUN_DIR/figures/ratings.png, payoff.png, and opponents.png of its evaluations."""


@dataclass(frozen=True, kw_only=True)
class Runs(Options):
    """A table of the runs below a directory: algorithm, environment, steps, best return, and when."""

    path: Annotated[Path, Flag(metavar="[DIR]", argument=True)] = Path("runs")
    """Where to look; without it, runs/."""


@dataclass(frozen=True, kw_only=True)
class Algos(Options):
    """The algorithms, what one of them is, or which fit an environment."""

    name: Annotated[str | None, Flag(metavar="[ALGO]", argument=True)] = None
    """Explain this one: papers, spaces, presets, scores, config keys."""
    for_env: Annotated[str | None, Flag("--for", "ENV")] = None
    """Play this environment at random for a moment, and say which algorithms fit it and which to try first."""


@dataclass(frozen=True, kw_only=True)
class Envs(Options):
    """The environments that can be named, which have a native vector form, and presets."""

    pattern: Annotated[str | None, Flag(metavar="[PATTERN]", argument=True)] = None
    """Part of a name, or with * and ?."""


@dataclass(frozen=True, kw_only=True)
class CheckEnv(Options):
    """Play an environment at random and say what is wrong with it and what to do."""

    env: Annotated[str, Flag(metavar="ENV", argument=True)]
    """A name or module:Class."""
    keys: Keys = None
    """Its env_config; env.KEY=VALUE for the env section."""
    steps: Count = 200
    """Random steps to play, twice."""
    seed: Whole = 0


@dataclass(frozen=True, kw_only=True)
class Doctor(Options):
    """Look at this machine and this installation; names no user and no path, so it can be shared. With a run: where its
    time goes, and what to change."""

    path: Annotated[Path | None, Flag(metavar="[RUN_DIR]", argument=True)] = None
    """A run, finished or not: say where its time goes instead."""
    json: bool = False
    """For a machine."""


@dataclass(frozen=True, kw_only=True)
class Calibrate(Options):
    """Try the ways to place a training on this machine, for some seconds each, and write the fastest down. Later runs
    of this algorithm on this environment go by it where their settings say auto."""

    env: Annotated[str, Flag(metavar="ENV", argument=True)]
    """CartPole-v1, ... or module:Class"""
    keys: Annotated[list[str] | None, Flag(metavar="KEY=VALUE", argument=True)] = None
    """num_envs=64 model.fcnet_hiddens=[256,256]"""
    run: Annotated[str, Flag(metavar="ALGO")] = "PPO"
    """PPO, DQN, ... or module:Name"""
    seconds: Seconds = 5.0
    """Of each placement, after it has started."""
    out: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Write a run file here, for `bray train -f FILE`, and not what later runs go by."""


@dataclass(frozen=True, kw_only=True)
class FakeActor(Options):
    """A game service with fixed replies, to connect a game before there is an agent."""

    port: Port = 8000
    """0 = any free one."""
    host: Address = "127.0.0.1"
    tcp: Annotated[bool, Flag(hidden=True)] = True
    """Nothing: HTTP and framed TCP are both answered, on the same port."""
    workers: Count = 1
    sessions: Count = 1000
    """Sessions of one worker at once."""
    start: Text = "fake_actor_start_return"
    """The reply to a start."""
    tick: Text = "fake_actor_tick_return"
    """The reply to a tick."""
    end: Text = "fake_actor_end_return"
    """The reply to an end."""
    echo: bool = False
    """Answer a tick with its own body."""


@dataclass(frozen=True, kw_only=True)
class FakeBuffer(Options):
    """Run the trainers of a launch file on made-up samples, without games and sources: to develop a trainer alone."""

    keys: ComponentKeys = None
    """As for bray launch."""
    config: LaunchFile
    """The launch file whose trainers are to run."""
    sample: Annotated[str | None, Flag(metavar="MODULE:NAME")] = None
    """A sample to imitate, or a function of a random generator that makes one; without it, what the algorithm, else the
    model takes."""
    rate: Annotated[Amount | None, Flag(metavar="HZ")] = None
    """Samples per second; without it, as many as are taken."""
    seconds: Seconds | None = None
    """End after this time; without it, until it is stopped."""
    trial: Annotated[str | None, Flag(metavar="T")] = None
    """Name of the trial; without it, the file's with -fake after it."""
    cluster: Cluster = "local"
    """local: all in this process."""


@dataclass(frozen=True, kw_only=True)
class FakeGamecore(Options):
    """Games that tick at a service, and a table of how fast and how well it answers."""

    sessions: Count = 8
    """Games at once."""
    rate: Annotated[Amount, Flag(metavar="R")] = 0.0
    """Ticks/s of each; 0 = as fast as it answers."""
    seconds: Annotated[float, Ge(0.1), Flag(metavar="SECONDS")] = 5.0
    """How long they play."""
    tcp: Annotated[bool, Flag("--tcp/--http")] = False
    """Which protocol."""
    body: Annotated[Path | None, Flag(metavar="FILE")] = None
    """The body of every tick."""
    run: Annotated[Path | None, Flag(metavar="RUN_DIR")] = None
    """Random observations of this run, for `bray serve`."""
    config: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Random observations of the games of this launch file, for `bray launch`."""
    size: Annotated[Whole, Flag("--bytes")] = 1024
    """The body is N bytes, if nothing else is given."""
    connections: Count = 32
    """At most."""
    host: Address = "127.0.0.1"
    port: Port = 8000
    admin_port: Port | None = None
    """Admin port of the service, for its CPU and memory [--port + 1]."""
    token_file: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Its first line is the token [BRAY_TOKEN]."""
    token: Annotated[str, Flag(metavar="T", hidden=True)] = ""
    """The old way: other users of this machine see it."""
    tls: Annotated[str | None, Flag(metavar="system|CA_FILE")] = None
    """Connect with TLS; trust what the system trusts, or this certificate."""
    json: bool = False
    """For a machine."""


COMMANDS: dict[str, tuple[type[Options], str]] = {
    "train": (Train, "bray.cli.train:train"),
    "tune": (Tune, "bray.cli.tune:tune"),
    "submit": (Submit, "bray.cli.submit:submit"),
    "work": (Work, "bray.cli.work:work"),
    "eval": (Eval, "bray.cli.evaluate:evaluate"),
    "exploitability": (Exploitability, "bray.cli.exploitability:exploitability"),
    "collect": (Collect, "bray.cli.collect:collect"),
    "data": (Data, "bray.cli.data:data"),
    "serve": (Serve, "bray.cli.serve:serve"),
    "record": (Record, "bray.cli.record:record"),
    "replay": (Replay, "bray.cli.serve:replay"),
    "gateway": (Gateway, "bray.cli.gateway:gateway"),
    "export": (Export, "bray.cli.export:export"),
    "launch": (Launch, "bray.cli.launch:launch"),
    "schema": (Schema, "bray.cli.schema:schema"),
    "new": (New, "bray.cli.new:new"),
    "render": (Render, "bray.cli.render:render"),
    "runs": (Runs, "bray.cli.runs:runs"),
    "plot": (Plot, "bray.cli.plot:plot"),
    "league": (League, "bray.cli.league:league"),
    "algos": (Algos, "bray.cli.algos:algos"),
    "envs": (Envs, "bray.cli.listing:envs"),
    "check-env": (CheckEnv, "bray.cli.listing:check_env"),
    "doctor": (Doctor, "bray.cli.doctor:doctor"),
    "calibrate": (Calibrate, "bray.cli.calibrate:calibrate"),
    "fake actor": (FakeActor, "bray.cli.fake:actor"),
    "fake buffer": (FakeBuffer, "bray.cli.fake_buffer:buffer"),
    "fake gamecore": (FakeGamecore, "bray.cli.fake:gamecore"),
}
"""Command -> its options, and the function that gets them and returns the exit code."""

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "train": {
        "live": ("bray.train.config:LiveConfig", LIVE),
        "data": ("bray.train.config:DataConfig", "Files, in place of an environment"),
        "run": ("bray.train.config:RunConfig", HOW),
        "env": ("bray.envs.config:EnvConfig", HOW),
    },
    "serve": {
        "service": ("bray.serving.config:ServiceConfig", "Where it listens"),
        "model": ("bray.serving.config:ServedModelConfig", "What answers"),
    },
}
"""Command -> section -> (dataclass, title in the help): its fields with a `Flag` are flags of the command, and come as
a ConfigSource after the options."""
