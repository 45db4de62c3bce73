"""RemoteModel: a model that can be asked and published to from anywhere in a session.

Two kinds of process are behind it. The keeper (`model/NAME`) holds the newest weights and the files; workers
(`model/NAME/0`, ...) answer forwards, unless who asks does so itself (`num_workers=0` or `local_mode`).
"""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bray import tree
from bray.cluster import io
from bray.cluster.session import session
from bray.errors import ConfigError, DataError, MissingComponent, Unreachable
from bray.inference.host import Promise
from bray.remote.master.handle import add_graph, logger, set_tensorboard_step
from bray.remote.model.client import Client, ModelWorker, client_of
from bray.remote.model.definition import Definition, check_settings, find_example
from bray.remote.model.keeper import Keeper
from bray.remote.model.weights import get_torch_model_weights, set_torch_model_weights
from bray.rundir import RunDir

_LOADING_S = 120.0  # a model that has not answered by then will not
_AGAIN_S = 0.2


class RemoteModel:
    """A handle: cheap, and may be sent anywhere in the session.

    With a `model` it defines the model of that name; with a name alone it finds the one that exists.

    name                 also of its directory in the run directory: models/NAME
    model                a torch module; the processes that need it get copies
    forward_args         an example of what the module takes, numpy or torch, with a batch dimension or without: running
                         the module shows which. `forward_kwargs` likewise
    settings             max_batch_size=32, num_workers=2, use_onnx="train", ...: the fields of
                         `bray.remote.model.options.ModelOptions`
    """

    def __init__(
        self,
        name: str,
        model: Any = None,
        forward_args: tuple[Any, ...] = (),
        forward_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ):
        self.name = name
        self._client: Client | None = None
        check_settings(name, settings)
        if model is None:
            self._known()
        elif settings.get("override_model", True) or not _exists(name):
            example = find_example(model, tuple(forward_args), forward_kwargs or {})
            _start(Definition(name, example, **settings), model, get_torch_model_weights(model), 0)
        if settings.get("tensorboard_graph") and model is not None:
            try:
                add_graph(model, self.get_torch_forward_args())
            except DataError as e:
                logger.warning("model %s is not in TensorBoard: %s", name, e)
        if settings.get("tensorboard_step"):
            set_tensorboard_step(name)

    _noise: Any = None

    def exploring(self, policy: Any) -> RemoteModel:
        """A handle for agents of this process that explore with this Policy: noisy layers have noise."""
        handle = _found(self.name)
        handle._noise = policy
        return handle

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, (self.name,)

    def __repr__(self) -> str:
        return f"RemoteModel({self.name!r})"

    # --- asking -------------------------------------------------------------------------------------------------------

    async def forward(
        self, *args: Any, batch: bool = False, step: int | None = None, with_step: bool = False, **kwargs: Any
    ) -> Any:
        """One sample (trees of arrays without batch dimension) -> its outputs, numpy without batch dimension.

        batch      the arguments are batches `[B, ...]`, and so are the outputs
        step       ask this version: one of the pool, or any that the run directory has; without it, the current one
        with_step  give `(outputs, step)`: the version that produced them
        """
        client = self._client
        if client is None or not client.is_open:
            client = self._known()
            await asyncio.shield(asyncio.wrap_future(client.opening()))
        if kwargs or client.has_kwargs:
            args = client.definition.engine_args(args, kwargs)
        try:
            out = await client.ask(args, batch, step, with_step)
        except Unreachable:
            if client.has_answered:
                raise
            out = await _ask_until_it_answers(client, args, batch, step, with_step)
        except Exception as e:
            client.definition.explain(e, args, batch)
            raise
        client.has_answered = True
        return out

    def run_now(self, args: tuple[Any, ...], rows: int) -> tuple[Any, int] | None:
        """`(outputs, step)` of a batch of arrays, if this process does its forwards itself and they are quick; else
        None: await `forward`."""
        client = self._client
        if client is None or not client.is_open or client.served is None or client.has_kwargs:
            return None
        try:
            return client.served.run_now(args, rows)
        except Exception as e:
            client.definition.explain(e, args, True)
            raise

    @property
    def num_workers(self) -> int:
        """Processes that do forwards for this one; 0 = it does them itself, or has not asked yet."""
        client = self._client
        return 0 if client is None or client.served is not None or not client.is_open else client.definition.num_workers

    def __call__(
        self, *args: Any, batch: bool = False, step: int | None = None, with_step: bool = False, **kwargs: Any
    ) -> Any:
        """`forward` for plain code: waits for the outputs."""
        client = self._client
        if client is None or not client.is_open:
            client = self._known()
            if io.is_loop():
                raise ConfigError(
                    f"model {self.name!r} was called where an event loop runs: write `await model.forward(...)` there"
                )
            client.opening().result()
        if client.served is None or step is not None:
            return io.run(self.forward(*args, batch=batch, step=step, with_step=with_step, **kwargs))
        args = client.definition.engine_args(args, kwargs)
        try:
            return client.served(*args, batch=batch, with_step=with_step)
        except Exception as e:
            client.definition.explain(e, args, batch)
            raise

    # --- weights ------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The newest version that this process knows of; each publish increases it."""
        return self._known().clock.version

    @property
    def env_steps(self) -> int:
        """Environment steps behind the newest version, where its trainer said so: exploration schedules read them."""
        return self._known().clock.env_steps

    def publish_weights(self, weights: Mapping[str, Any], step: int | None = None, env_steps: int = 0) -> Promise:
        """Make these weights (by name; numpy or torch) the newest version, for all who ask. `step` is the last one + 1
        by default.

        It does not wait; the Promise gives the step. The arrays are copied before it returns. Where publications come
        faster than they travel, the newest stands for those before it."""
        return self._known().publish(weights, step, env_steps)

    def get_weights(self) -> tuple[dict[str, np.ndarray], int]:
        """(weights of the newest version by name, its step). They are read only."""
        ref, step = self._ask_keeper("weights")
        return session().cluster.get(ref), step

    def get_model(self) -> Any:
        """A torch module of your own, with the newest weights."""
        about = self._ask_keeper("about")
        module = copy.deepcopy(session().cluster.get(about.module))
        set_torch_model_weights(module, self.get_weights()[0])
        return module

    def get_torch_forward_args(self) -> tuple[Any, ...]:
        """The example of the definition as torch tensors, with a batch dimension."""
        import torch

        example = self._known().definition.example
        return () if example is None else tree.map(lambda x: torch.from_numpy(np.array(x)), example[0])

    # --- versions -----------------------------------------------------------------------------------------------------

    def clone(self, step: int = -1, name: str | None = None) -> RemoteModel:
        """An independent model that starts from a version of this one: -1 = the newest, else the newest at or below
        `step` that the run directory has, which then keeps it for good. The clone is called NAME-STEP by default, after
        the version that it got; an existing one is found."""
        about = self._ask_keeper("about")
        ref, step = self._ask_keeper("freeze", step)
        name = name or f"{self.name}-{step}"
        if not _exists(name):
            cluster = session().cluster
            _start(about.definition.frozen(name), cluster.get(about.module), cluster.get(ref), step)
        return RemoteModel(name)

    def add_to_pool(self, step: int = -1) -> int:
        """Keep a version (as `clone` finds it) to play against; returns its step. The run directory keeps it for
        good."""
        return self._ask_keeper("add_to_pool", step)

    @property
    def pool(self) -> list[int]:
        """The steps of the versions to play against, oldest first."""
        return self._ask_keeper("pool")

    def sample_pool(self, weights: Sequence[float] | None = None) -> int:
        """Draw a version of the pool: `forward(..., step=model.sample_pool())`. All are equally likely, or as `weights`
        say, in the order of `pool`."""
        pool = self.pool
        if not pool:
            raise ConfigError(
                f"the pool of model {self.name!r} is empty: add_to_pool() puts the newest version into it"
            )
        if weights is not None and len(weights) != len(pool):
            raise ConfigError(f"expected a weight for each of the {len(pool)} versions {pool}, got {len(weights)}")
        return random.choices(pool, weights)[0]

    @property
    def definition(self) -> Definition:
        return self._known().definition

    def _ask_keeper(self, method: str, *args: Any) -> Any:
        return self._known().keeper.call(method, *args, retry=True).result()

    def _known(self) -> Client:
        """The client of this process, open or not."""
        if self._client is None or self._client.ended:
            self._client = client_of(self.name, self._noise)
        return self._client


_handles: dict[str, RemoteModel] = {}


async def forward(model: str, *args: Any, **kwargs: Any) -> Any:
    """`await bray.forward("m", obs)`: `RemoteModel("m").forward(obs)`, from anywhere in the session."""
    handle = _handles.get(model)
    if handle is None:
        handle = _handles[model] = _found(model)
    return await handle.forward(*args, **kwargs)


async def _ask_until_it_answers(client: Client, *asked: Any) -> Any:
    """A model whose workers have not answered yet may still be loading: ask again, as long as whoever waits (a tick has
    its deadline) does."""
    until = time.monotonic() + _LOADING_S
    while True:
        await asyncio.sleep(_AGAIN_S)
        try:
            return await client.ask(*asked)
        except Unreachable:
            if time.monotonic() > until:
                raise


def _found(name: str) -> RemoteModel:
    """A handle that looks for its model when it is used."""
    handle = RemoteModel.__new__(RemoteModel)
    handle.name, handle._client = name, None
    return handle


def _exists(name: str) -> bool:
    try:
        session().cluster.find(f"model/{name}")
    except MissingComponent:
        return False
    return True


def _start(definition: Definition, module: Any, weights: Mapping[str, np.ndarray], step: int) -> None:
    """Start the keeper and the workers of a model, in place of existing ones."""
    cluster, name = session().cluster, definition.name
    RunDir(session().path).weights_path(0, name)  # refuses a name that cannot be a directory's
    _stop(name)
    try:
        ref = cluster.put(module)
    except Exception as e:
        why = e.__cause__ or e
        raise ConfigError(
            f"model {name!r} cannot be sent to other processes: {type(module).__name__} could not be pickled "
            f"({str(why).splitlines()[0]}). A module holds tensors, modules and plain data; make files, locks and the "
            "like in forward"
        ) from e
    head = next((node.id for node in cluster.nodes() if node.head), None)
    try:
        cluster.start(f"model/{name}", Keeper, definition, ref, cluster.put(dict(weights)), step, node=head)
        if definition.is_local or cluster.kind == "local":
            if definition.gpus_per_worker:
                local = "local_mode is set" if definition.local_mode else "num_workers is 0"
                logger.warning(
                    "model %s: gpus_per_worker=%g has no effect: %s, so the process that asks does the forwards "
                    "itself, on its CPU",
                    name, definition.gpus_per_worker, local if definition.is_local else "there is no Ray cluster",
                )  # fmt: skip
            return
        with ThreadPoolExecutor(definition.num_workers) as pool:
            list(pool.map(lambda i: _start_worker(definition, i), range(definition.num_workers)))
    except BaseException:
        _stop(name)
        raise


def _start_worker(definition: Definition, index: int) -> None:
    session().cluster.start(
        f"model/{definition.name}/{index}",
        ModelWorker,
        definition.name,
        index,
        cpus=definition.cpus_per_worker,
        gpus=definition.gpus_per_worker,
        memory=definition.memory_per_worker,
    )


def _stop(name: str) -> None:
    cluster = session().cluster
    session().disown("model", name)  # the next one of the name is another
    for member in [*cluster.names(f"model/{name}/"), f"model/{name}"]:
        cluster.stop(member)
