"""docs/remote.md: its code runs as it stands, one block after the other."""

import re
from pathlib import Path

import numpy as np
import pytest

import bray
from bray.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "remote.md"


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)).replace('cluster="ray"', 'cluster="local"')
    names: dict = {}
    try:
        exec(compile(code, str(PAGE), "exec"), names)
        assert names["batch"]["x"].shape == (32, 3)
        assert names["end"].result()["samples"] == 3200
        seen = []

        class Replayed(names["Replayed"]):
            def loss(self, replay, step):
                seen.append((len(replay["x"]), len(self.kept)))
                return super().loss(replay, step)

        end = bray.RemoteTrainer("r").train(
            trainer=Replayed, model="policy", buffers=["samples"], num_steps=3, prefetch_size=0
        )
        assert end.result(120)["steps"] == 3
        assert seen == [(64, 32), (64, 64), (64, 96)]
        with pytest.raises(ConfigError, match=r"unknown setting 'num_worker'.*Did you mean 'num_workers'"):
            bray.RemoteModel("other", names["net"], (np.zeros(3, np.float32),), num_worker=1)
    finally:
        bray.shutdown()
    settings = re.search(r"- Settings: (.*?):", page, re.DOTALL)[1]
    for name in re.findall(r"`(\w+)`", settings):
        assert hasattr(bray.remote.model.definition.Definition, name), name
