"""Sessions for tests: on one small Ray that all modules of a test process share, or everything in this process."""

import contextlib
import os

import pytest

import bray
import bray.remote.init
from bray.cluster.ray_start import start_ray

# The GPU is one that Ray counts, and nothing else.
RAY = {"address": "local", "num_cpus": 16, "num_gpus": 1, "object_store_memory": 300 << 20, "include_dashboard": False}


def start_shared_ray():
    """From now on every session of this process uses this Ray, as if it had started it: starting one takes seconds."""
    import ray

    if not ray.is_initialized():
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # Ray's workers start three times as fast with byte code
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        start_ray("tests", RAY)
        bray.remote.init.start_ray = lambda *_: (False, True)  # we did not connect; it is a Ray of this machine alone


def stop_shared_ray():
    """For tests that need a Ray of their own."""
    if bray.remote.init.start_ray is not start_ray:
        import ray

        ray.shutdown()
        bray.remote.init.start_ray = start_ray


@contextlib.contextmanager
def opened(path, kind="ray", **kwargs):
    """A session of its own under `path`, ended however the block ends."""
    if kind == "ray":
        start_shared_ray()
    made = bray.init(str(path / "project"), "trial", cluster=kind, **kwargs)
    try:
        yield made
    finally:
        bray.shutdown()


@pytest.fixture(scope="module")
def ray_session(tmp_path_factory):
    """One session for all tests of a module."""
    with opened(tmp_path_factory.mktemp("ray")) as made:
        yield made


@pytest.fixture
def local_session(tmp_path):
    with opened(tmp_path, "local") as made:
        yield made
