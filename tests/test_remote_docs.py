"""docs/remote.md: its code runs as it stands, one block after the other."""

import re
from pathlib import Path

import numpy as np
import pytest

import bray
from bray.errors import ConfigError

PAGE = Path(__file__).parent.parent / "docs" / "remote.md"


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)).replace('cluster="ray"', 'cluster="local"')
    names: dict = {}
    try:
        exec(compile(code, str(PAGE), "exec"), names)
        assert names["batch"]["x"].shape == (32, 3)
        assert names["end"].result()["samples"] == 3200
        replay = bray.RemoteBuffer("replay", size=64, batch_size=4, store="prioritized")
        replay.push_batch({"x": np.zeros((50, 3), np.float32)}).result(30)
        batch = replay.pop(timeout=30)
        assert set(batch) == {"x", "id", "weight"}  # as the page calls them
        replay.update_priorities(batch["id"], np.ones(4))
        with pytest.raises(ConfigError, match=r"unknown setting 'num_worker'.*Did you mean 'num_workers'"):
            bray.RemoteModel("other", names["net"], (np.zeros(3, np.float32),), num_worker=1)
    finally:
        bray.shutdown()
    settings = re.search(r"- Settings: (.*?):", page, re.DOTALL)[1]
    for name in re.findall(r"`(\w+)`", settings):
        assert hasattr(bray.remote.model.definition.Definition, name), name
