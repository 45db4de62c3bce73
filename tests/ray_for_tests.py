"""Sessions for tests: a real Ray of our own, small, or everything in this process."""

import contextlib
import os

import pytest

import bray

RAY = {"address": "local", "num_cpus": 16, "object_store_memory": 300 << 20, "include_dashboard": False}


@contextlib.contextmanager
def opened(path, kind="ray", **kwargs):
    """A session of its own under `path`, ended however the block ends."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # Ray's workers start three times as fast with byte code
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    made = bray.init(str(path / "project"), "trial", cluster=kind, **({**RAY, **kwargs} if kind == "ray" else kwargs))
    try:
        yield made
    finally:
        bray.shutdown()


@pytest.fixture(scope="module")
def ray_session(tmp_path_factory):
    """One Ray for all tests of a module."""
    with opened(tmp_path_factory.mktemp("ray")) as made:
        yield made


@pytest.fixture
def local_session(tmp_path):
    with opened(tmp_path, "local") as made:
        yield made
