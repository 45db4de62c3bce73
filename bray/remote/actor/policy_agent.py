"""PolicyAgent in a launched graph: its Policy, model and buffer by their names in the launch file."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from bray.act import GREEDY, MODES, SAMPLE, Clock
from bray.config.declare import options
from bray.data.experience import Counts
from bray.data.piece import Piece
from bray.data.rows import to_samples
from bray.errors import ConfigError, Overloaded, UnknownName
from bray.serving.config import LearnConfig
from bray.serving.model import ServedModel
from bray.serving.policy_actor import BasePolicyAgent
from bray.train.agent import ActingModel, SessionRows

if TYPE_CHECKING:  # it imports torch and the environment, which a model that is deployed from files does not need
    from bray.remote.algo import AlgoSetup

_AGAIN_S = 0.05
_MOST_WAIT_S = 6.0  # the end of a session waits for up to four pieces, and is answered in time: a tick has 30 s


class PolicyAgent(BasePolicyAgent):
    """Plays with the Policy of an algorithm and the newest weights of a model; in training, what happens goes to a
    buffer.

    Its section: `algo` names the `kind: config` section that describes the algorithm, `model` the model, `buffer` (if
    there is one) where rows go, `wait_s` how long a game may wait for room there (0: never, old rows are dropped: right
    for live games, while simulated ones learn more from each tick if they wait), `act` how it chooses without a buffer
    and in `mode: deploy` (greedy, or sample: as in training), and `explore: false` makes it play so and learn nothing.
    `model` and `buffer` may also be the objects themselves. A model with a method `served()` is deployed from the
    files of a run, and then no `algo` is needed.
    """

    @classmethod
    def before_sessions(cls, name: str, config: Any) -> Any:
        return cls.find_model(name, config) if cls.find_model is PolicyAgent.find_model else None

    @staticmethod
    def find_model(name: str, config: Any) -> ActingModel | ServedModel:
        deployed = getattr(config[name].get("model"), "served", None)
        if deployed is not None:
            return deployed()
        model = _in_use.get((id(config), name))
        if model is None:
            model = _in_use[id(config), name] = make_model(name, config)
            model.config = config  # no other one has its id as long as this model is there
        return model

    def make_rows(self) -> SessionRows:
        served = isinstance(self.model, ServedModel)
        return SessionRows(partial(_merge_counts, self.name)) if served else self.model.make_rows()


_in_use: WeakValueDictionary[tuple[int, str], ActingModel] = WeakValueDictionary()


def stop_waiting() -> None:
    """Of all agents of this process."""
    for model in list(_in_use.values()):
        if isinstance(model.sink, BufferSink):
            model.sink.stop_waiting()


def make_model(name: str, config: Any) -> ActingModel:
    """What the agents of one name share in this process, by their section of the file."""
    from bray.envs.rewards import RewardTransform
    from bray.remote.algo import exploring_model, named_setup
    from bray.remote.buffer.handle import RemoteBuffer
    from bray.remote.model.handle import RemoteModel
    from bray.rl.draws import use_compiled_draws

    use_compiled_draws()
    section = config[name]
    setup = named_setup(config, name)
    model = section.get("model")
    if model is None:
        raise ConfigError(f"{name}: expected model: NAME, the model to play with; got none")
    model = RemoteModel(model) if isinstance(model, str) else model
    wait_s = _seconds(name, section.get("wait_s", 0.0))
    act = section.get("act", GREEDY)
    if act not in MODES:
        raise UnknownName("way to act", str(act), MODES, f"{name}.act")
    learns = section.get("explore", True) and config.get("mode", "train") != "deploy"
    sink = None
    if section.get("buffer") is not None and learns:
        _refuse(name, setup)
        model = exploring_model(setup, model, config)
        buffer = section["buffer"]
        sink = BufferSink(name, RemoteBuffer(buffer) if isinstance(buffer, str) else buffer, wait_s, model)
    experience = setup.make_experience()
    rewards = RewardTransform(setup.env_config, 1, setup.config.gamma)
    return ActingModel(
        setup.spec,
        setup.make_policy(),
        model,
        sink=sink,
        mode=SAMPLE if sink is not None else act,
        initial_state=setup.initial_state,
        state_every=experience.state_every if setup.initial_state is not None else 1,
        rewards=rewards if rewards.active else None,
        clock=None if sink is None else sink.clock,
        count=partial(_merge_counts, name),
        options=_answers(name, config),
    )


def _answers(name: str, config: Any) -> LearnConfig:
    """How the actor of this agent answers, by its section of the file."""
    for section in config.values():
        if isinstance(section, Mapping) and name in (section.get("agents") or ()):
            given = {k: section[k] for k in options(LearnConfig) if section.get(k) is not None and k != "max_json"}
            return LearnConfig(**given)
    return LearnConfig()


def _refuse(name: str, setup: AlgoSetup) -> None:
    from bray.remote.algo import refuse_memory

    if setup.env_config.normalize_rewards:
        raise ConfigError(
            f"{name}: normalize_rewards needs the games side by side; divide the rewards in the game, or use "
            "clip_rewards"
        )
    if setup.initial_state is not None:
        refuse_memory(setup, name)


class BufferSink:
    """Pieces into a RemoteBuffer."""

    def __init__(self, name: str, buffer: Any, wait_s: float, model: Any):
        self.name, self.buffer, self.wait_s, self._model = name, buffer, wait_s, model
        self._origin, self._steps = secrets.randbits(62), 0
        self._deadlines: set[asyncio.Timeout] = set()  # of games that wait

    def clock(self) -> Clock:
        """Of the weights that act, as the trainer published them."""
        return Clock(getattr(self._model, "env_steps", 0), self._model.step)

    async def push(self, piece: Piece, counts: Counts, session: str = "") -> None:
        from bray.remote.master import merge

        self._steps += counts.env_steps
        await self._hand_over(to_samples(piece, self._origin, self._steps, counts.episodes))
        merge("staleness", self._model.step - float(np.mean(piece.version)), agent=self.name)

    def end(self, stream: int) -> None:
        """A buffer knows no sessions."""

    async def _hand_over(self, samples: dict[str, Any]) -> None:
        from bray.remote.master import merge

        if not self.wait_s:
            self.buffer.push_batch(samples)
            return
        taken = False
        try:
            async with asyncio.timeout(self.wait_s) as deadline:
                self._deadlines.add(deadline)
                while not taken:
                    try:
                        pushed = self.buffer.push_batch(samples, drop=False)
                        taken = True
                    except Overloaded:  # so many wait here already
                        await asyncio.sleep(_AGAIN_S)
                await pushed
        except TimeoutError:  # the game goes on, and its samples are on their way, if they were taken
            if not taken:
                merge("samples_dropped", len(samples["reward"]), agent=self.name)
        finally:
            self._deadlines.discard(deadline)

    def stop_waiting(self) -> None:
        """The service ends, and the trainer may be gone already: no game waits for it any more. Called in the service's
        loop."""
        self.wait_s = 0.0
        for deadline in self._deadlines:
            deadline.reschedule(asyncio.get_running_loop().time())


def _merge_counts(name: str, counts: Counts) -> None:
    from bray.remote.master import merge

    for return_, length in counts.episodes:
        merge("episode_return", return_, agent=name)
        merge("episode_length", length, agent=name)
    if counts.env_steps:
        merge("env_steps", counts.env_steps, agent=name)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST_WAIT_S:
        raise ConfigError(f"{name}: expected wait_s to be seconds, from 0 to {_MOST_WAIT_S:g}, got {value!r}")
    return float(value)
