"""RemoteTrainer: trains on one or more ranks, placed and restarted by Ray Train; or in a thread of this process."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from bray.cluster import io
from bray.cluster.session import ClusterSession, session
from bray.errors import BrayError, ConfigError, ResourceError, UnknownName, Unreachable
from bray.inference.host import Promise
from bray.remote.trainer.options import gpus_of_rank
from bray.serving.link import Link, Listener

if TYPE_CHECKING:
    from bray.remote.trainer.drive import RankDriver
    from bray.remote.trainer.worker import TrainPlan

logger = logging.getLogger("bray.remote")

_EVAL = ("buffer", "interval", "steps")  # keys of `eval`
_END_PATIENCE = 15.0  # seconds in which a training may save itself at the end of the session
_DEATHS, _DEATHS_IN = 5, 300.0  # give up after 5 deaths of ranks in 300 s


class RemoteTrainer:
    """Trains a model on `num_workers` ranks.

        trainer = bray.RemoteTrainer(num_workers=2)
        # a function of your own
        trainer.train(train=train_atari, model="atari_model", buffer="atari_buffer", num_steps=100000)
        # a bray.Trainer, or a Learner
        trainer.train(trainer=MyTrainer, model="atari_model", buffers=["atari_buffer"], num_steps=100000)

    name             of its section in `config`, and of its checkpoints where the run has those of another trainer
                     already (`trainers/NAME`)
    use_gpu, ...     where the ranks run: `bray.remote.trainer.options.RankOptions` explains each
    """

    def __init__(
        self,
        name: str | None = None,
        use_gpu: bool | None = None,
        num_workers: int | None = None,
        cpus_per_worker: float | None = None,
        gpus_per_worker: float | None = None,
    ):
        self.name = name or "default"
        self.use_gpu = bool(use_gpu)
        self.gpus_per_worker = gpus_of_rank(self.use_gpu, gpus_per_worker)
        self.num_workers = 1 if num_workers is None else num_workers
        self.cpus_per_worker = 1.0 if cpus_per_worker is None else float(cpus_per_worker)
        if self.num_workers < 1 or self.cpus_per_worker < 0:
            raise ConfigError(
                f"RemoteTrainer {self.name!r}: expected num_workers >= 1 and cpus_per_worker >= 0, got {num_workers} "
                f"and {cpus_per_worker}"
            )

    def train(self, train: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Promise:
        """Start to train, and return a Promise of its end. An error in a rank is the Promise's, and ends
        `bray.run_until_asked_to_stop`.

        With a function: `train(*args, **kwargs)` is called on every rank, inside torch's process group (gloo, or nccl
        on GPUs) and inside the session. Arguments arrive as they are: a name stays a name, and `bray.RemoteModel(name)`
        finds the model. When the process of a rank dies, all ranks are started again and call the function anew; what
        it should go on from, it saves itself. The Promise is what the first rank returns (None where that cannot be
        sent).

        Without one, these keywords say what is trained, and the Promise is a summary:

        trainer                   a `bray.Trainer`, a Learner, or either as "module:Class"; may be left out where
                                  config[name] has `algo`
        model, buffers            names or handles; the model that is trained, and where its batches come from
        eval                      None, or {buffer, interval, steps}: every `interval` steps, `steps` batches of that
                                  buffer go to `Trainer.eval`
        num_steps, batch_size, ...  the fields of `bray.remote.trainer.options.TrainOptions`, each explained there
        config, name              what the Trainer is made with
        hooks                     more `Hook`s of the loop
        """
        from bray.remote.trainer.worker import TrainPlan

        if train is None:
            plan = self._driven(*args, **kwargs)
        elif callable(train):
            plan = TrainPlan(self.name, train, args, kwargs)
        else:
            raise ConfigError(f"train: expected a function, got {train!r}; a class is given as trainer=")
        opened = session()
        key = (opened.namespace, plan.name)
        if plan.train is None and key in _running and not _running[key].done():
            raise ConfigError(f"trainer {plan.name!r} is training already: give the second one another name")
        run = _LocalRanks(opened, plan, self) if opened.cluster.kind == "local" else _RayRanks(opened, plan, self)
        if plan.train is None:
            _running[key] = run.promise
        opened.watch(f"trainer {plan.name}", run.promise)
        opened.stop_hooks.append(run.end)
        run.start()
        return run.promise

    def _driven(
        self,
        *,
        name: str | None = None,
        model: Any = None,
        buffers: Any = (),
        eval: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        trainer: Any = None,
        seed: int = 0,
        **settings: Any,
    ) -> TrainPlan:
        """The TrainPlan of a training without a function."""
        from bray.remote.trainer.drive import Settings
        from bray.remote.trainer.worker import TrainPlan

        name = name or self.name
        known = [f.name for f in fields(Settings) if not f.name.startswith("eval_")]
        known += ["name", "model", "buffers", "eval", "config", "trainer", "seed"]
        for key in settings:
            if key not in known:
                raise UnknownName("argument", key, known, "RemoteTrainer.train without a function")
        if model is None or not buffers:
            raise ConfigError(f"trainer {name!r}: expected train=FUNCTION, or trainer=CLASS with model= and buffers=")
        if isinstance(buffers, str):
            raise ConfigError(f"trainer {name!r}: expected buffers=[{buffers!r}], a list, got {buffers!r}")
        for key in (evaluation := dict(eval or {})):
            if key not in _EVAL:
                raise UnknownName("key", key, _EVAL, f"eval of trainer {name}")
        eval_buffer = evaluation.pop("buffer", None)
        if eval is not None and eval_buffer is None:
            raise ConfigError(f"trainer {name!r}: eval needs the name of a buffer: eval={{'buffer': 'eval_buffer'}}")
        settings |= {f"eval_{k}": v for k, v in evaluation.items()}
        if settings.get("batch_size", 1) is None:
            del settings["batch_size"]
        return TrainPlan(
            name,
            trainer=trainer,
            model=model,
            buffers=tuple(buffers),
            eval_buffer=eval_buffer,
            config=config or {name: {}},
            seed=seed,
            settings=Settings(**settings),
        )


_running: dict[tuple[str, str], Promise] = {}  # those that write checkpoints


class _Ranks:
    """A training under way."""

    def __init__(self, opened: ClusterSession, plan: TrainPlan, trainer: RemoteTrainer):
        self.session, self.plan, self.trainer = opened, plan, trainer
        self.promise = Promise()

    def start(self) -> None:
        threading.Thread(target=self._main, name=f"bray-trainer-{self.plan.name}", daemon=True).start()

    def _main(self) -> None:
        try:
            self.promise.settle(self.run())
        except BaseException as e:
            self.promise.settle(error=e)

    def run(self) -> Any:
        raise NotImplementedError

    def end(self) -> None:
        """At the end of the session."""
        raise NotImplementedError

    def wait(self) -> None:
        """Give a driven training time to save itself."""
        with contextlib.suppress(BaseException):
            self.promise.result(_END_PATIENCE if self.plan.train is None else 0.0)


class _LocalRanks(_Ranks):
    """One rank, in a thread of this process."""

    def __init__(self, opened: ClusterSession, plan: TrainPlan, trainer: RemoteTrainer):
        super().__init__(opened, plan, trainer)
        self._drive: RankDriver | None = None
        self._over = False
        if trainer.num_workers > 1:
            logger.warning("trainer %s: cluster='local' has one rank, not %d", plan.name, trainer.num_workers)
        import torch

        if trainer.use_gpu and not torch.cuda.is_available():
            raise ResourceError(f"trainer {plan.name} asks for a GPU, and this machine has none that PyTorch can use")

    def run(self) -> Any:
        import torch

        from bray.remote.trainer.worker import execute

        _group_of_one(self.session)
        device = torch.device("cuda" if self.trainer.use_gpu else "cpu")
        try:
            return execute(self.plan, device, self._started)
        except BaseException as e:
            e.add_note(f"raised in trainer {self.plan.name} (a thread of this process)")
            raise

    def _started(self, drive: RankDriver) -> None:
        self._drive = drive
        if self._over:
            drive.stop()

    def end(self) -> None:
        self._over = True
        if self._drive is not None:
            self._drive.stop()
        self.wait()


def _group_of_one(opened: ClusterSession) -> None:
    import torch.distributed as dist

    with _making:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            opened.close_hooks.append(_end_group)


def _end_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


_making = threading.Lock()


class _RayRanks(_Ranks):
    """Ranks in processes of Ray Train, which starts all of them again when one dies."""

    def __init__(self, opened: ClusterSession, plan: TrainPlan, trainer: RemoteTrainer):
        super().__init__(opened, plan, trainer)
        ranks = opened.cluster
        from bray.cluster.ray import RayCluster

        assert isinstance(ranks, RayCluster)
        self._cluster = ranks
        cpus = max(trainer.cpus_per_worker, 0.001)  # Ray places nothing that asks for nothing
        self._resources = {"CPU": cpus, **({"GPU": trainer.gpus_per_worker} if trainer.use_gpu else {})}
        self._over = False
        ranks.check_group(*self._wants())
        try:
            self._made = ranks.put(plan)  # kept here: a restart needs it
        except Exception as e:
            raise ConfigError(
                f"trainer {plan.name}: its function, class or arguments cannot be sent to other processes "
                f"({type(e).__name__}: {e})"
            ) from e
        self._listener: Listener = io.run(opened.listen(f"trainer-{plan.name}", self._heard))

    def _wants(self) -> tuple[str, int, float, float]:
        return (
            f"trainer {self.plan.name}",
            self.trainer.num_workers,
            self._resources["CPU"],
            self._resources.get("GPU", 0.0),
        )

    def run(self) -> Any:
        from bray.remote.trainer.worker import Failed, rank_main

        for key, value in _RAY_TRAIN.items():
            os.environ.setdefault(key, value)
        import ray.train
        import ray.train.torch

        rt: Any = ray.train

        self._cluster.wait_group(*self._wants())
        store = tempfile.mkdtemp(prefix="bray-train-")  # Ray Train wants one; our checkpoints are in the run directory

        class Fit(rt.torch.TorchTrainer):
            def _create_default_callbacks(self) -> list[Any]:
                """Without the detached process that removes placement groups: they end with the controller that made
                them."""
                made = super()._create_default_callbacks()
                return [c for c in made if type(c).__name__ != "PlacementGroupCleanerCallback"]

        fit = Fit(
            partial(
                rank_main, self.session.info, self.plan.name, self._listener.address, [self._made], self.trainer.use_gpu
            ),
            # NCCL refuses ranks that share a GPU
            torch_config=rt.torch.TorchConfig(
                timeout_s=1800, backend="gloo" if self.trainer.gpus_per_worker % 1 else None
            ),
            scaling_config=rt.ScalingConfig(
                num_workers=self.trainer.num_workers, use_gpu=self.trainer.use_gpu, resources_per_worker=self._resources
            ),
            run_config=rt.RunConfig(
                name=secrets.token_hex(4),
                storage_path=store,
                failure_config=rt.FailureConfig(max_failures=-1),
                callbacks=[_make_verdict(self.plan.name)],
                logging_config=rt.LoggingConfig(log_level="CRITICAL"),
            ),
        )
        try:
            return pickle.loads(fit.fit().return_value)  # our own ranks' bytes, through Ray
        except rt.ControllerError as e:
            why = e.controller_failure
            raise why.failure().for_caller() if isinstance(why, Failed) else Unreachable(str(why)) from None
        except BaseException:
            if self._over:
                raise Unreachable(f"trainer {self.plan.name}: the session ended before the training did") from None
            raise
        finally:
            shutil.rmtree(store, ignore_errors=True)
            io.run(self._listener.close())

    def _heard(self, link: Link, kind: int, number: int, body: memoryview) -> None:
        from bray.remote.trainer.worker import DONE

        if kind == DONE:
            self.promise.settle(msgspec.json.decode(body))
            link.reply(number)

    def end(self) -> None:
        from bray.remote.trainer.worker import STOP

        self._over = True

        async def stop() -> None:
            for link in list(self._listener.links):
                with contextlib.suppress(Unreachable):
                    link.post(STOP)

        if not self.promise.done() and self._listener.links:
            io.run(stop())
            self.wait()
        io.run(self._listener.close())  # ranks that are just starting find nobody, and end


_RAY_TRAIN = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # how soon a dead rank is noticed
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # what a rank prints is shown by Ray already; this would show it again
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process more; a node that goes is noticed by its ranks' deaths
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of the user's code mean what they mean elsewhere
}


def _make_verdict(name: str) -> Any:
    from ray.train import UserCallback

    class Verdict(UserCallback):
        """In Ray Train's controller: what is not worth another try ends the run."""

        def __init__(self) -> None:
            self.deaths: deque[float] = deque(maxlen=_DEATHS)

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            from bray.remote.trainer.worker import Failed

            for error in worker_exceptions.values():
                if isinstance(error, Failed):
                    raise error
            now = time.monotonic()
            self.deaths.append(now)
            if len(self.deaths) == _DEATHS and now - self.deaths[0] < _DEATHS_IN:
                last = "; ".join(f"rank {r}: {str(e).strip()[-600:]}" for r, e in worker_exceptions.items())
                raise BrayError(
                    f"trainer {name}: its ranks died {_DEATHS} times in {now - self.deaths[0]:.0f} s, and are not "
                    f"started again. The last: {last}"
                )

    return Verdict()
