"""docs/games.md: its examples play against a live training, and mean what the page says."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from bray.client import Client
from bray.data.experience import Counts
from bray.experiment import Experiment
from bray.launch.graph import load
from bray.train.fair import add_up

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "games.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def live(tmp_path):
    """A live training with the spaces of the page, over HTTP and TCP."""
    settings = {"rollout_length": 16, "minibatches": 1, "epochs": 1, "rows": 64, "use_tcp": True, "fair": False}
    exp = Experiment(
        run="PPO", live=True, port=0, obs="float32[2]", actions=2, path=str(tmp_path / "run"), save_figure=False,
        **settings
    )  # fmt: skip
    try:
        yield exp.training.source
    finally:
        exp.close()


def gathered(source):
    """All that has come: a batch at a time."""
    rows, counts = 0, Counts()
    while (came := source.gather())[0]:
        rows += sum(int(piece.valid.sum()) for piece in came[0])
        counts = add_up(counts, came[1])
    return rows, counts


def test_the_python_games_of_the_page_are_learnt_from(live):
    http, tcp, skip = blocks("python")
    names = {}
    for code in (http, tcp):
        exec(code.replace("8000", str(live.port)), names)
        rows, counts = gathered(live)
        assert (rows, counts.env_steps) == (60, 60)  # three episodes of 20 decisions, in 63 ticks
        assert [length for _, length in counts.episodes] == [20, 20, 20]

    class Game:
        """Ten frames, each worth 1."""

        def first(self):
            self.frames = 0
            return [0.0, 0.0]

        def frame(self, action):
            self.frames += 1
            return [0.0, self.frames / 10], 1.0, self.frames == 10

    exec(skip, names)
    with Client("127.0.0.1", live.port) as client:
        client.start()
        names["decide_every"](client, Game())
    _, counts = gathered(live)
    assert counts.episodes == ((10.0, 2),)  # two decisions, and not a frame's reward is lost


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_commands_of_the_page_are_an_episode(live):
    (script,) = [code for code in blocks("bash") if "curl" in code]
    played = subprocess.run(
        ["bash", "-e", "-c", script.replace("8000", str(live.port))], capture_output=True, text=True, timeout=60
    )
    assert re.fullmatch(r'Game Started(\{"action":\d,"version":\d+\}){3}Game Stopped', played.stdout)
    rows, counts = gathered(live)
    assert rows == 2
    assert counts.episodes == ((1.0, 2),)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("body", [["-d", "{}"], ["-d", ""], ["-X", "POST"]])
def test_a_start_with_nothing_to_say_arrives_on_a_used_connection(live, body):
    """One curl, one connection: start, tick and end, with `{}`, an empty body, and no body at all."""

    def words(kind, *more):
        return [f"http://127.0.0.1:{live.port}/step", "-H", "session: g", "-H", f"step_kind: {kind}", "-s", *more]

    tick = ["-d", '{"obs": [0, 0]}']
    games = [words("start", *body), words("tick", *tick), words("end", *body), words("start", *body)]
    command = ["curl", *games[0], *(w for game in games[1:] for w in ("--next", *game))]
    said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    assert said.startswith("Game Started{")
    assert said.endswith("Game StoppedGame Started")


def test_the_launch_keys_of_the_page_are_keys(tmp_path):
    (text,) = blocks("yaml")
    more = {"project": "p", "trial": "t", "agent1": {"kind": "agent", "module": "a", "class": "A"}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({**more, **yaml.safe_load(text)}))
    actor = load(tmp_path / "x.yaml").components["actor1"]
    assert actor.extra == {}
    assert (actor.settings.idle_timeout_s, actor.settings.disconnect_timeout_s) == (60.0, 5.0)


def test_the_page_is_linked_and_its_links_lead_somewhere():
    template = (DOCS.parent / "template" / "README.md").read_text()
    assert "(games.md" in (DOCS / "serving.md").read_text()
    assert "docs/games.md" in template
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (DOCS / target).exists(), target
