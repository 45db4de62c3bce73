"""RemoteTrainer on a real Ray: ranks that Ray Train places, names and starts again."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bray
from bray.cluster import session as sessions
from bray.errors import ConfigError, ResourceError
from bray.remote.trainer.worker import trainer_path
from bray.rundir import RunDir, write_atomic
from bray.train.driver import Hook
from tests.ray_for_tests import ray_session  # noqa: F401
from tests.trainer_for_tests import Regression, batch_of, net

pytestmark = pytest.mark.usefixtures("ray_session")

SAMPLE = {k: v[0] for k, v in batch_of(0).items()}


@pytest.fixture(scope="module")
def parts(ray_session):  # noqa: F811
    """A model, and a buffer that fills itself."""
    remote = bray.RemoteModel("m", net(), (np.zeros(3, np.float32),))
    fake = bray.fake.FakeBuffer("b", SAMPLE, size=16, batch_size=4, num_workers=1)
    yield remote
    fake.close()


def train_function(model, buffer, batch_size, weights_publish_interval, num_steps):
    """As in the README, with torch's own DistributedDataParallel over the process group that is there."""
    assert isinstance(model, str)
    remote = bray.RemoteModel(name=model)
    module = torch.nn.parallel.DistributedDataParallel(remote.get_model())
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    batches = bray.TorchTensorBuffer(bray.BatchBuffer(bray.RemoteBuffer(name=buffer), batch_size, kind="concate"))
    equal = []
    for step in range(num_steps):
        batch = next(batches)
        loss = (module(batch["x"]) - batch["y"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(others, flat)
        equal.append(all(torch.equal(flat, o) for o in others))
        if dist.get_rank() == 0 and step % weights_publish_interval == 0:
            remote.publish_weights(bray.get_torch_model_weights(module))
        bray.merge("steps", 1, {"sum": "steps of all ranks"})
    return {"equal": equal, "pid": os.getpid(), "backend": dist.get_backend(), "rows": len(batch["x"])}


@pytest.mark.slow
def test_a_function_runs_on_two_ranks(parts):
    before = parts.step
    end = bray.RemoteTrainer("f", use_gpu=False, num_workers=2).train(
        train=train_function, model="m", buffer="b", batch_size=2, weights_publish_interval=1, num_steps=20
    )
    out = end.result(240)
    assert out["equal"] == [True] * 20
    assert out["pid"] != os.getpid()
    assert out["backend"] == "gloo"
    assert out["rows"] == 8
    assert parts.step >= before + 1
    deadline = time.monotonic() + 10
    while bray.query("steps", "sum") < 40 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert bray.query("steps", "sum") == 40


def gpu_left(_model):
    """In a rank: what Ray has not given away, and what it has given to this one."""
    import ray

    return ray.available_resources().get("GPU", 0.0), ray.get_runtime_context().get_accelerator_ids()["GPU"]


@pytest.mark.slow
def test_ranks_and_model_workers_share_one_gpu(parts):
    """As Ray counts it: two workers of a quarter and a rank of half, and nobody else."""
    shared = bray.RemoteModel("quarter", net(), (np.zeros(3, np.float32),), num_workers=2, gpus_per_worker=0.25)
    assert shared(np.zeros(3, np.float32)) is not None
    rank = bray.RemoteTrainer("half", use_gpu=True, gpus_per_worker=0.5, num_workers=1)
    left, ids = rank.train(train=gpu_left, _model="quarter").result(240)
    assert left == 0
    assert ids == ["0"]
    with pytest.raises(ResourceError, match="GPU"):
        bray.RemoteModel("too-much", net(), (np.zeros(3, np.float32),), num_workers=1, gpus_per_worker=0.75)


class Slow(Regression):
    def loss(self, replay, step):
        if step >= self.config[self.name].get("fails", step + 1) and dist.get_rank() == 1:
            raise KeyError("no advantage in this replay")
        time.sleep(0.01)
        return super().loss(replay, step)


def write_pid(drive):
    path = sessions.session().path / f"pid-{drive.ranks.rank}"
    if drive.steps % 5 == 0:
        write_atomic(path, str(os.getpid()).encode())  # whoever reads it finds all of it


def pids(session):
    return {rank: int((session.path / f"pid-{rank}").read_text()) for rank in (0, 1)}


@pytest.mark.slow
def test_a_trainer_is_driven_on_two_ranks_and_its_errors_are_not_tried_again(parts, ray_session):  # noqa: F811
    first = parts.step
    steps = {"trainer": Slow, "model": "m", "buffers": ["b"]}
    summary = bray.RemoteTrainer("t1", num_workers=2).train(**steps, num_steps=15).result(240)
    assert summary["steps"] == 15
    assert summary["ranks"] == 2
    assert summary["samples"] == 2 * 4 * 15
    assert parts.step == first + 15
    assert RunDir.open(trainer_path(ray_session.path, "t1")).load_checkpoint().step == first + 15

    # the same trainer goes on, and meets an error of the user's code
    config = {"t1": {"fails": first + 20}}
    trainer = bray.RemoteTrainer("t1", num_workers=2)
    end = trainer.train(**steps, num_steps=10_000, config=config)
    with pytest.raises(ConfigError, match="trainer 't1' is training already"):
        trainer.train(**steps)
    with pytest.raises(KeyError, match="no advantage in this replay") as caught:
        end.result(240)
    note = "\n".join(caught.value.__notes__)
    assert "trainer t1, rank 1 of 2 (pid" in note
    assert 'raise KeyError("no advantage in this replay")' in note
    assert parts.step == first + 20
    ray_session.watched.clear()  # others of this module go on


def test_what_does_not_fit_fails_at_once():
    begin = time.monotonic()
    with pytest.raises(
        ResourceError, match=r"trainer big asks for 40 x 1 CPUs, and there is room for 16: there are node"
    ):
        bray.RemoteTrainer("big", num_workers=40).train(train=print)
    with pytest.raises(ResourceError, match=r"asks for 1 x 1 CPUs, 2 GPUs, and there is room for 0"):
        bray.RemoteTrainer("gpu", use_gpu=True, gpus_per_worker=2).train(train=print)
    assert time.monotonic() - begin < 5


def test_what_others_hold_is_named(monkeypatch):
    class Idle:
        def ask(self):
            return 1

    held = sessions.session().cluster.start("idle", Idle, cpus=14)
    try:
        assert held.call("ask").result() == 1
        monkeypatch.setattr("bray.cluster.ray.BUSY_TIMEOUT", 0.5)
        with pytest.raises(ResourceError, match="asks for 4 x 1 CPUs, and others hold what there is: free are"):
            bray.RemoteTrainer("many", num_workers=4).train(train=print).result(30)
    finally:
        sessions.session().cluster.stop("idle")


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_training_goes_on(parts, ray_session):  # noqa: F811
    start = parts.step
    end = bray.RemoteTrainer("t", num_workers=2).train(
        trainer=Slow,
        model="m",
        buffers=["b"],
        checkpoint_interval=10,
        num_steps=100_000,
        hooks=[Hook("after_step", write_pid)],
    )
    run_path = trainer_path(ray_session.path, "t")

    def wait_for(step, seconds):
        begin = time.monotonic()
        while parts.step < step:
            assert not end.done(), end.exception()
            assert time.monotonic() - begin < seconds, f"the model is at step {parts.step}, not {step}"
            time.sleep(0.02)
        return time.monotonic() - begin

    wait_for(start + 40, 240)
    for rank in (1, 0):
        before = pids(ray_session)
        saved = RunDir.open(run_path).load_checkpoint().step
        os.kill(before[rank], signal.SIGKILL)
        at = parts.step
        took = wait_for(at + 15, 240)
        print(f"rank {rank} killed at step {at}: training goes on after {took:.1f} s")
        after = RunDir.open(run_path)
        assert after.load_checkpoint().step >= saved
        now = pids(ray_session)
        assert now[0] != before[0]
        assert now[1] != before[1]
    assert not end.done()  # it goes on until the session ends


PRINTS = """
import sys, bray

def train():
    print("printed by the rank")
    bray.logger.info("said by the rank")
    bray.logger.warning("warned by the rank")

if __name__ == "__main__":
    bray.init("project", "trial", num_cpus=4, object_store_memory=100 << 20)
    bray.RemoteTrainer().train(train=train).result(300)
    bray.shutdown()
"""


@pytest.mark.slow
def test_what_a_rank_prints_is_shown_once(tmp_path):
    (tmp_path / "prints.py").write_text(PRINTS)
    env = {**os.environ, "RAY_ADDRESS": "local", "RAY_DEDUP_LOGS": "0"}
    made = subprocess.run(
        [sys.executable, "prints.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=True
    )
    shown = made.stdout + made.stderr
    assert shown.count("printed by the rank") == 1, shown
    assert shown.count("warned by the rank") == 1, shown
    assert "said by the rank" not in shown
    assert "said by the rank" in (tmp_path / "project" / "trial" / "bray.log").read_text()
