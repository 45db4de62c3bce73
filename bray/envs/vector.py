"""VecEnv: many environments stepped at once, under one autoreset rule. Every row of Bray follows it.

**Next step.** When an episode ends at step t, the observation that this step returns is the episode's *final* one. The
environment is then `dead`: its next action is ignored, and the step after returns the first observation of the next
episode with reward 0. So column b of a trajectory reads

    row   obs                            reward   terminated, truncated   valid
    t     last decision of the episode   r        one of them True        True
    t+1   its final observation          0        False                   False: a dead row, its action did nothing
    t+2   first of the next episode      ...                              True

`obs[t+1]` is therefore always the successor of `obs[t]` where `valid[t]`: GAE bootstraps from the value of the next
row, a replay stores every observation once, and nobody keeps a list of final observations. Dead rows have weight 0 in
every loss and are not counted as environment steps. `terminated` (no future) and `truncated` (a future that is not
seen) stay apart to the end: a discount is 0 only where terminated.

**Rows that wait.** With `env.wait_num` a step returns when so many environments are ready, and `waiting[b]` says whose
result has not come. Column b then has a row for each step of the others, and its transition is in the row in which the
result comes:

    row   obs                  action                                reward   valid
    t     what it decided on   a                                     0        False: under way
    t+1   the same             a (what the policy says is ignored)   r        True: the result has come
    t+2   the next             ...

Action, log probability and the other extras of row t+1 are those of row t, so a valid row is still an observation, the
action that was taken, its reward, and the successor in the next row. `dead` stays True while the next episode is waited
for. GAE's sum goes through rows that wait; what takes neighbouring rows for neighbouring steps (`n_step` above 1,
Models with memory) is refused. These rows take room in rollouts and in a replay, and are never sampled or counted. Such
a run depends on timing: `exact` is False, and a resumed one begins new episodes. Evaluation always waits for all.

**Seeds.** Episode k of environment i starts with `reset(seed=episode_seed(seed, i, k))`: three numbers and its actions
play it again, which is how a resume restores environments that cannot save their state.

Rewards are raw: clipping and normalising happen in the rollout, so that metrics stay raw. Observations are trees of
arrays `[B, ...]` that the caller may keep; they are never overwritten.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from bray.envs.spaces import BatchCheck
from bray.errors import CheckpointError, ConfigError, EnvError
from bray.spec import EnvSpec
from bray.tree import NestedArray

log = logging.getLogger("bray.envs")

Infos = list[dict[str, Any]] | None
StepResult = tuple[NestedArray, np.ndarray, np.ndarray, np.ndarray, Infos]

LIFE_LOST = "life_lost"
"""An info key: `terminated` is meant for the learner only, the episode goes on and is not reset."""

_WORD = (1 << 64) - 1


def episode_seed(seed: int, env: int, episode: int) -> int:
    """The seed of episode `episode` of environment `env`: a pure function, so that an episode can be played again."""
    x = 0
    for part in (seed, env, episode):  # splitmix64 of each in turn; numpy's SeedSequence would cost 20 times as much
        x = (x + part + 0x9E3779B97F4A7C15) & _WORD
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
        x ^= x >> 31
    return x >> 32


class VecEnv(ABC):
    """`num_envs` environments, one step at a time.

    After a step with terminated or truncated (a lost life aside) `dead` is True: the observation just returned is the
    episode's last, the next action of that environment is ignored, and that next step returns the first observation of
    a new episode with reward 0.

    Where `waits`, a step may return before every environment is ready. The result of one that is `waiting` has not
    come: its row repeats its last observation with reward 0 and no flags, and its next action is ignored, for the last
    one is still under way. The step in which the result comes returns it. An environment whose next episode has not
    begun yet stays `dead`.
    """

    num_envs: int
    spec: EnvSpec
    dead: np.ndarray
    """bool[B]: the next action is ignored. A new array after each step."""
    exact: bool = True
    """Whether the last `set_state` restored everything (before one: whether it can)."""
    restarts: int = 0
    """Environments rebuilt because they raised, died or hung."""
    waits: bool = False
    """Whether `waiting` may ever be True."""
    form: str
    """Which kind of state `get_state` makes."""
    _check: BatchCheck | None = None
    _max_restarts: int = 0

    @property
    def waiting(self) -> np.ndarray:
        """bool[B]: the result of the last action has not come. A new array after each step."""
        return np.zeros(self.num_envs, bool)

    @abstractmethod
    def reset(self, seed: int | None = None) -> NestedArray:
        """The first observations. With a seed: episode 0 of that seed; without: the next episodes."""

    @abstractmethod
    def step(self, actions: NestedArray) -> StepResult:
        """obs, reward float32[B], terminated bool[B], truncated bool[B], infos (a list of dicts, or None when all are
        empty)."""

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """{"arrays": tree of arrays, "json": plain data}: all that `set_state` needs to go on exactly."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> NestedArray:
        """Go on from `get_state`; returns the current observations and sets `exact`."""

    def render(self) -> np.ndarray | None:
        """A picture of the first environment, where it can draw itself."""
        return None

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """`fn(env)` for every environment, and what it returned. One that is rebuilt later is given to the last such
        `fn` too."""
        raise ConfigError(
            f"{self.spec.id}: its environments are one piece of compiled code here; set env.vector=inprocess (or "
            "subprocess) to reach each of them"
        )

    def users_env(self, i: int) -> Any:
        """Environment i, without our wrappers."""
        raise ConfigError(
            f"{self.spec.id}: its environments are not objects of this process; set env.vector=inprocess, or use "
            "foreach_env"
        )

    def close(self) -> None:  # noqa: B027  native forms may hold nothing
        """Free windows, processes and memory."""

    def __enter__(self) -> VecEnv:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what the forms share -----------------------------------------------------------------------------------------

    def _where(self, i: int) -> str:
        """Which environment, episode and step, for messages."""
        return f"{self.spec.id}, environment {i}"

    def _bad(self, i: int, what: str) -> EnvError:
        return EnvError(
            f"{self._where(i)}: {what}. Correct the environment, or set env.check=false to go on regardless."
        )

    def _check_values(self, obs: NestedArray, reward: np.ndarray | None = None, dead: Any = None) -> None:
        """Refuse observations and rewards that are not finite or outside their space, and masks without a legal choice
        but at an episode's end."""
        if self._check is None:
            return
        found = self._check.first_bad(obs) or self._check.first_blocked(obs, dead)
        if found is None and reward is not None and not math.isfinite(reward.dot(reward)):
            bad = np.flatnonzero(~np.isfinite(reward))
            if bad.size:  # else the squares alone overflowed
                found = int(bad[0]), f"the reward is {reward[bad[0]]}"
        if found is not None:
            raise self._bad(*found)

    def _count_restart(self, report: str) -> None:
        """An environment (or its process) failed and is rebuilt; too many failures end the run, the user's traceback
        first."""
        self.restarts += 1
        if self.restarts > self._max_restarts:
            raise EnvError(
                f"{report}. env.max_restarts={self._max_restarts} rebuilds are used up: correct the environment, or "
                "allow more."
            )
        log.warning("%s. Rebuilt (%d of at most %d).", report, self.restarts, self._max_restarts)

    def _read_state(self, state: Any) -> tuple[NestedArray, dict[str, Any]]:
        """The two halves of a state, once it is clear that it belongs to this form and number of environments."""
        try:
            arrays, json = state["arrays"], state["json"]
            form, num_envs = json["form"], json["num_envs"]
        except (KeyError, TypeError) as e:
            raise CheckpointError(f"not the state of environments: {type(e).__name__}: {e}") from None
        if (form, num_envs) != (self.form, self.num_envs):
            raise CheckpointError(
                f"the state is of {num_envs} environments in the form {form!r}, these are {self.num_envs} in the form "
                f"{self.form!r}: resume with the same env.vector and env.num_envs"
            )
        return arrays, json
