"""The `run`, `live` and `data` sections of a config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval

from bray.config.check import check_fields
from bray.config.declare import Amount, Count, Excludes, Flag, Needs, Positive, Secret, Share, Whole, values_of
from bray.errors import ConfigError
from bray.serving.config import LearnConfig, ServiceConfig, ServiceSettings


def parse_map(given: list[str]) -> dict[str, str]:
    """`NEW=OLD` as typed, several times."""
    wrong = [text for text in given if "=" not in text]
    if wrong:
        raise ConfigError(f"--init-map {wrong[0]}: expected NEW=OLD, names or beginnings of names of weights")
    return {new: old for new, _, old in (text.partition("=") for text in given)}


def parse_count(given: str) -> Any:
    """A number as typed; else the word itself, which is checked with everything else."""
    return int(given) if given.removeprefix("-").isdecimal() else given


def parse_policies(given: list[str]) -> dict[str, str]:
    """`NAME=ALGO,NAME=ALGO` as typed, once or several times."""
    named = [text for several in given for text in several.split(",")]
    wrong = [text for text in named if not all(text.partition("="))]
    if wrong:
        raise ConfigError(f"--policies {wrong[0]}: expected NAME=ALGO, such as first=PPO,second=DQN")
    out: dict[str, str] = {}
    for name, _, algorithm in (text.partition("=") for text in named):
        if name in out:
            raise ConfigError(f"--policies: two policies are called {name} ({out[name]} and {algorithm}): rename one")
        out[name] = algorithm
    return out


def parse_mapping(given: str) -> Any:
    """`AGENT=POLICY,AGENT=POLICY` as typed, or `module:function`."""
    if ":" in given and "=" not in given:
        return given
    named = given.split(",")
    wrong = [text for text in named if not all(text.partition("="))]
    if wrong:
        raise ConfigError(
            f"--policy-mapping {wrong[0]}: expected AGENT=POLICY, such as a=first,'b*'=second, or module:function"
        )
    return {agent: policy for agent, _, policy in (text.partition("=") for text in named)}


@dataclass(frozen=True)
class SelfPlayConfig:
    """Whom a policy plays that learns a game of several agents from games against itself; in a league, defaults of all
    kinds of players that have these keys."""

    pool: Count = 20
    """Newest snapshots that are its opponents."""
    newest: Share = 0.5
    """Share of the games against itself as it is now; the others are against snapshots."""
    snapshot_every: Count = 20_000
    """Environment steps between two snapshots; the first one is what it begins with."""
    weighting: Literal["squared", "variance", "linear", "uniform"] = "squared"
    """Which snapshots it meets more often: squared, linear = those that it loses to; variance = those of its own
    strength; uniform = all alike."""
    opponents: list[str] = field(default_factory=lambda: ["random", "first"])
    """Whom an evaluation plays `eval_episodes` games each: random, first (the first snapshot), mcts (a tree search in
    games that can be cloned: `mcts(simulations=500)`), `module:function` with `function(obs, rng) -> action`,
    openspiel:BOT (`openspiel:mcts(max_simulations=500)`), another run directory, or an exported model.onnx."""

    def __post_init__(self) -> None:
        check_fields(self, "run.self_play")


@dataclass(frozen=True)
class RunConfig:
    """How long, where and how carefully a run goes."""

    algorithm: str = "PPO"
    """A known algorithm's name, or `module:Name` of your own."""
    seed: Whole = 0
    """Seed of everything random in the run."""
    stop: dict[str, float] = field(default_factory=dict)
    """The run ends when any of these metrics is reached, e.g. {episode_return_mean: 475, env_steps_total: 200000}; -1
    for a count is no limit. It ends with the iteration, but for episodes_total: without rollout workers that one is
    exact (episodes that end in the same step beyond it are not counted, and an on-policy algorithm does not learn from
    the rollout that was cut short)."""
    init_from: Annotated[str | None, Flag(metavar="RUN_OR_CHECKPOINT")] = None
    """Start with the weights of another run: its directory, or one of its checkpoints. They must fit, but for what
    `init_map` and `init_partial` say.
    A resumed run does not look at it again."""
    init_map: Annotated[dict[str, str], Flag(metavar="NEW=OLD", parse=parse_map), Needs("init_from")] = field(
        default_factory=dict
    )
    """Take over a part only: weights whose names begin with NEW here are those that begin with OLD there. Everything
    else starts as without `init_from`."""
    init_partial: Annotated[bool, Flag(), Needs("init_from")] = False
    """Of the weights of `init_from`, take those that fit; what was left, and why, is said."""
    policies: Annotated[dict[str, Any], Flag(metavar="NAME=ALGO", parse=parse_policies), Secret(inside=True)] = field(
        default_factory=dict
    )
    """Several policies in one run, by name: {first: PPO, second: {run: DQN, config: {lr: 1e-3}}}. What one does not say
    (run, config, model, env, init_from) is as the rest of the config says. With `self_play` they are a league, each a
    `player`: a kind (main, main_exploiter, league_exploiter, self_play, module:Class), or {kind: ..., KEY: ...}. In a
    game of several agents they play with each other (`policy_mapping`); in an environment of one agent each plays in
    environments of its own."""
    policy_mapping: Annotated[Any, Flag(metavar="AGENT=POLICY", parse=parse_mapping), Needs("policies")] = None
    """In a game of several agents, which policy decides for whom: {agent: policy}, where an agent may be a pattern such
    as "b*", or module:function with `function(agent, game)`, asked when a game begins. null = agents by the names of
    the policies, or all one policy."""
    policies_to_train: Annotated[list[str] | None, Flag(metavar="NAME"), Needs("policies")] = None
    """Those that learn; the others play with the weights that they start with. null = all."""
    self_play: SelfPlayConfig | None = None
    """In a game of several agents: play against itself as it is now and as it was, snapshots of its weights; several
    `policies` are a league, whose players meet each other (docs/league.md). {} = with these defaults. null = all agents
    play by the newest weights."""
    device: Annotated[str, Flag(metavar="D")] = "auto"
    """Where the learner computes: cpu, cuda, cuda:N. auto = a GPU where there is one and the network is large enough to
    be faster there (docs/scaling.md)."""
    threads: Literal["auto"] | Count | None = "auto"
    """Threads of PyTorch; auto (or null) = one for vector observations (more are slower there), all cores for pictures,
    at most four where a GPU computes."""
    record: bool | Literal["compiled"] = True
    """Record updates and forwards once and replay them without Python (`bray.capture`); compiled: updates go through
    torch.compile besides, which takes up to a minute and needs a C++ compiler; false runs them eagerly."""
    num_learners: Annotated[Count, Flag(metavar="K")] = 1
    """Processes that learn the same weights together, each with its own `env.num_envs` environments, workers and batch:
    an update is that of one learner with all their rows (docs/scaling.md)."""
    num_workers: Annotated[Literal["auto"] | Whole, Flag(metavar="N", parse=parse_count)] = "auto"
    """Processes that play beside the one that learns, each with `env.num_envs` environments; 0 = it plays itself. auto
    = the environments that were asked for are dealt out, for algorithms that learn while workers play on; the others
    play here (docs/scaling.md)."""
    inference: Annotated[Literal["auto", "worker", "central"], Flag()] = "auto"
    """Who computes the Model for workers: each for itself, or central: the process that learns, on `device`, one
    forward for all who have asked. auto = central for pictures on a GPU."""
    lockstep: bool = False
    """Workers of an algorithm that replays play in rounds, one round ahead of what is learnt from: that goes by counts
    and not by the clock, so that runs repeat and resume exactly. Without it they play on at their own pace. Set where
    num_workers=auto chooses a worker for such an algorithm."""
    env_groups: Count | None = None
    """Groups of the environments of a worker that play in turn: while one waits for its actions, the next one steps.
    null = 2 with central inference, else 1."""
    worker_timeout_s: Positive | None = None
    """Seconds after which a worker that does not answer is replaced; null = ten times as long as its longest piece
    took, and at least 60."""
    max_worker_restarts: Whole = 100
    """Workers that may be replaced before the run ends with an error."""
    cluster: Annotated[Literal["local", "ray"] | None, Flag()] = None
    """Where workers run. local: processes of this machine. ray: processes on any node of the Ray cluster at `address`,
    else of the one that runs here, else of one that is started here and ends with the run. null = ray where an address
    is given, else local."""
    address: Annotated[str | None, Flag(metavar="HOST:PORT")] = None
    """Address of the Ray cluster on which workers run, as `ray start --head` shows it."""
    exchange: Annotated[
        str | None,
        Flag(metavar="DIR"),
        Needs("num_workers"),
        Excludes("cluster"),
        Excludes("address"),
        Excludes("output"),
    ] = None
    """A directory that machines share: workers are started by others (`bray work DIR`), join and leave while the run is
    at work, and send what they play as files there. `num_workers` is how many of them there may be at once."""
    exchange_workers: Annotated[Whole, Needs("exchange")] = 0
    """Of these, workers that the run starts itself on this machine; one that dies is replaced."""
    num_cpus_per_worker: Positive = 1.0
    """CPUs that Ray reserves for each worker; parts of one too."""
    num_gpus_per_worker: Amount = 0.0
    """GPUs that Ray reserves for each worker, for environments that use one; with 0.25, four workers share a GPU."""
    object_store_mb: Annotated[Count | None, Excludes("address")] = None
    """Shared memory for weights and rows in a Ray that the run starts, in MB; null = as Ray decides, a third of the
    memory."""
    output: Annotated[str | None, Flag(metavar="DIR")] = None
    """Write the episodes that are played while training there, as `bray collect` does: files of each worker, with
    rewards as the environment gave them, to learn from with --data."""
    output_file_mb: Count = 64
    """Size at which a file of `output` is finished and the next one begins. What is in one that is not finished is lost
    if its process is killed."""
    iteration_steps: Whole | None = None
    """Environment steps of an iteration, at least: one result row, and what `eval_freq` and `checkpoint_freq` count.
    PPO and its like end it with the rollout that passes them; 0 = each rollout is an iteration, or each step of all
    environments where an algorithm replays. null = 1,000."""
    eval_freq: Annotated[Whole, Flag()] = 0
    """Iterations between two evaluations; 0 = none while training."""
    eval_episodes: Annotated[Count, Flag()] = 10
    """Greedy episodes per evaluation, on seeds that are the same in every run."""
    eval_parallel: Annotated[bool, Flag()] = False
    """Evaluate in a process of its own, while training goes on with the next iterations. The result is in the row after
    it is known, and `eval/env_steps` says of which weights it is; these are saved first, so that the best checkpoint is
    what was evaluated."""
    video_freq: Annotated[Whole, Flag()] = 0
    """Iterations between two films of a greedy episode, to RUN_DIR/videos/steps-N.mp4; 0 = none while training."""
    checkpoint_freq: Annotated[Whole, Flag()] = 0
    """Iterations between two checkpoints; 0 = by time alone, and at the end."""
    checkpoint_updates: Whole = 0
    """Gradient steps between two checkpoints, looked at after each iteration; 0 = not by them."""
    checkpoint_every_s: Amount = 60.0
    """Seconds between two checkpoints, looked at after each iteration; 0 = not by time."""
    keep_checkpoints: Annotated[Count | None, Flag()] = 5
    """Newest checkpoints kept, beside the best (`keep_best`); null = all."""
    keep_best: Annotated[Count, Flag()] = 1
    """Best checkpoints kept beside the newest ones, by `checkpoint_score`."""
    checkpoint_score: Annotated[str | None, Flag(metavar="KEY")] = None
    """The best checkpoint goes by this key of the result rows, with a '-' before it where lower is better. Examples:
    episode_return_max, -loss/value_loss; null = eval/return_mean where there are evaluations, game_return_median
    for live games, else episode_return_mean."""
    checkpoint_replay: Literal["auto", "always", "never"] = "auto"
    """Whether checkpoints hold the replay's rows: auto = where it takes up to 2 GiB when full. Without them a resumed
    run starts with an empty replay."""
    export_graph_after_s: Amount | None = 20.0
    """Seconds of training after which graph.onnx is written, once and in a process of its own: what serving elsewhere
    needs beside the weights; null = not while training (`bray export` writes it too)."""
    callbacks: Annotated[list[Any], Flag(metavar="MODULE:CLASS"), Secret(inside=True)] = field(default_factory=list)
    """Code of your own at the events of a training: names `module:Class` of `bray.Callbacks`, dicts {name,
    arguments...}, functions, or dicts of functions by event; ours is EarlyStopping."""
    track: Annotated[list[str], Flag(metavar="NAME")] = field(default_factory=list)
    """Services that result rows go to, beside the files of the run: wandb, mlflow."""
    log_level: Annotated[str, Flag(metavar="LEVEL")] = "warning"
    """What is said on the terminal: debug, info, warning (or warn), error."""
    save_figure: bool = True
    """Whether the learning curve is drawn to figures/learning_curve.png at the end."""
    show_figure: bool = False
    """Whether it is shown in a window at the end; the run ends when that is closed."""

    @property
    def workers(self) -> int:
        """How many there are; none as long as nobody has chosen (`bray.train.settle`)."""
        return 0 if isinstance(self.num_workers, str) else self.num_workers


@dataclass(frozen=True, kw_only=True)
class LiveGames:
    """What the games of a live training send, and how they are learnt from."""

    obs: Annotated[Any, Flag(metavar="SPACE")] = None
    """The observation that games send: 'float32[6]', 'uint8[4,84,84]', or a dict of such."""
    actions: Annotated[Any, Flag(metavar="SPACE")] = None
    """The action that games want: 3 (choices), '3,2' (two choices), or 'float32[2] -1..1'."""
    spec: Annotated[str | None, Flag(metavar="FILE")] = None
    """Instead of both: a JSON file {"obs": ..., "actions": ...}, or a run's spec.json. (Or --env, for its spaces.)"""
    agents: tuple[str, ...] = ()
    """Of a league (self_play): the names of the game's agents, each of which has a session of its own. (Or --env of an
    environment of several.)"""
    rows: Count | None = None
    """Rows of a rollout; null = rollout_length x 8, or x env.num_envs where that is more."""
    wait_s: Annotated[float, Interval(ge=0, le=6)] = 0.0
    """Seconds that a game may be made to wait for the learner. 0 = never, and old rows are dropped: right for real
    games. Simulated ones learn more from each tick if they wait."""
    fair: bool = True
    """Bound one game's share of what is learnt, and the size of its rewards, by what the other games send; false: all
    rows count alike, for games that are all your own."""
    max_games: Count = 1000
    """Sessions at once."""
    host: Annotated[str, Flag(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 = every network of this machine."""
    token: Annotated[str | None, Secret()] = None
    """When given, every request must carry it. On a command line other users can see it: use `token_file` or
    BRAY_TOKEN."""


@dataclass(frozen=True, kw_only=True)
class LiveConfig(LearnConfig, ServiceSettings, LiveGames):
    """Where games call, and what they send; with all settings of a game service, and of how ticks are answered."""

    tokens: Annotated[tuple[str, ...], Secret()] = ()
    """As `token`, several."""

    def service(self) -> ServiceConfig:
        """The game service of these settings."""
        same = values_of(self, ServiceSettings)
        if self.port == 0 and self.admin_port is None:
            same["admin_port"] = 0
        if self.token is not None:
            same["tokens"] = (self.token, *self.tokens)
        return ServiceConfig(**same, host=self.host, actors_per_worker=self.max_games)


@dataclass(frozen=True)
class DataConfig:
    """Files of episodes to learn from, in place of an environment."""

    files: Annotated[str, Flag("--data", metavar="FILES")] = ""
    """Learn from files of episodes: a directory, a file, or a pattern such as 'runs/*/trajectories/*.episodes'. Ours,
    npz, HDF5 of Minari or D4RL, RLlib's JSON lines (docs/data.md)."""
    epochs: Count = 10
    """How often every transition is learnt from."""
    obs: Any = None
    """The observation in files that do not say theirs: 'float32[6]', or a dict of such; on the command line --obs."""
    actions: Any = None
    """The action in files that do not say theirs: 3 (choices) or 'float32[2] -1..1'; on the command line --actions."""
    skip_broken: Annotated[bool, Flag()] = False
    """Leave out episodes of files that are damaged or do not fit the spaces, and count them (`data/broken`); else the
    first one ends the run."""
    share: Annotated[Share | None, Flag("--data-share")] = None
    """Play too, in the environment or live games, and take this share of the rows of every batch from the files; for
    algorithms that replay single transitions. null = learn from the files alone."""
    pretrain: Annotated[Whole, Needs("share")] = 0
    """Batches of the files alone that are learnt from before games are played: gradient steps that cost no step of the
    environment. For algorithms that replay."""
    memory_mb: Count = 2048
    """Memory for transitions of files, in MB. Where they need more, each epoch reads the files in parts, of episodes
    that are drawn anew."""
