"""`bray league`, and serving a player of a run that plays itself."""

import json
import re
import shutil

import numpy as np
import pytest

import bray
from bray.cli.main import main
from bray.client import ClientError
from bray.config import to_plain
from bray.envs.agent_games import Nim
from bray.inference.torch_engine import load_weights
from bray.league import IN_RUN, OUTSIDE, League, ResultLog, make_players, read_league
from bray.rundir import RunDir

NIM = "bray.envs.agent_games:Nim"
SMALL = {"rollout_length": 16, "epochs": 2, "minibatches": 2, "num_envs": 4, "iteration_steps": 100}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("league") / "run"
    with bray.Experiment("PPO", NIM, path=path, self_play={"snapshot_every": 150}, eval_freq=4, **SMALL) as exp:
        exp.fit({"env_steps_total": 1500}, progress=False)
    return path


@pytest.fixture(scope="module")
def carts(tmp_path_factory):
    """A run of another environment, and beside it the file that was exported from it."""
    path = tmp_path_factory.mktemp("carts") / "carts"
    with bray.Experiment("PPO", "CartPole-v1", path=path, fcnet_hiddens=[8], **SMALL) as exp:
        exp.save()
    assert main(["export", str(path)]) == 0
    shutil.copy(path / "models" / "default" / "model.onnx", f"{path}.onnx")
    return path


def test_the_ranking_the_payoff_and_the_lineage(run, capsys):
    assert main(["league", str(run), "--top", "4"]) == 0
    out, found = capsys.readouterr().out, read_league(run / IN_RUN)
    ranks = found.ranking()
    assert [rank.rating.elo for rank in ranks] == sorted((rank.rating.elo for rank in ranks), reverse=True)
    results = [json.loads(line) for line in (run / IN_RUN).read_text().splitlines()]
    met = [set(e["seats"].values()) for e in results if len(set(e.get("seats", {}).values())) == 2]
    assert sum(rank.games for rank in ranks) == 2 * len(met)
    lines = out.splitlines()
    for rank in ranks[:4]:
        row = next(line for line in lines if line.split()[:1] == [str(rank.ref)])
        assert f"{rank.rating.elo:,.0f}" in row
        assert f"{rank.games:,}" in row
    assert f"... {len(ranks) - 4} more" in out
    assert "snapshots of default" in out
    assert f"{found.opponents['random'].elo:,.0f} ± {found.opponents['random'].half:,.0f}, by evaluations" in out
    assert "@0 \N{RIGHTWARDS ARROW} " in out
    name = next(str(ref) for ref in found.refs if ref.step and found.record(found.find("default"), ref).games)
    record = found.record(found.find("default"), found.find(name))
    assert f"{100 * (record.wins + record.draws / 2) / sum(record[:3]):.0f}" in out


def test_pictures(run, capsys):
    assert main(["league", str(run), "--plot"]) == 0
    assert "payoff.png" in capsys.readouterr().out
    for name in ("ratings.png", "payoff.png", "opponents.png"):
        assert (run / "figures" / name).stat().st_size > 10_000


def test_two_players_play(run, capsys):
    assert main(["league", str(run), "--play", "default", "default@0", "--games", "20"]) == 0
    assert "of 20 games, seats in turn" in capsys.readouterr().out
    assert main(["league", str(run), "--play", "default@0", str(run), "--games", "4"]) == 0
    assert main(["league", str(run), "--play", "random", "random", "--games", "400"]) == 0
    share = float(capsys.readouterr().out.rpartition("turn: ")[2].partition("%")[0])
    assert share == pytest.approx(50, abs=10)


def test_a_player_from_outside_is_ranked_among_those_of_the_run(run, tmp_path, capsys):
    """Another run, and a file that was exported from one: by their own results, which change nobody's rating and
    outlast a resume."""
    home, other = tmp_path / "home", tmp_path / "other"
    shutil.copytree(run, home, symlinks=True)
    with bray.Experiment("DQN", NIM, path=other, seed=3, num_envs=4, replay_size=500, fcnet_hiddens=[8]) as exp:
        exp.fit({"env_steps_total": 200}, progress=False)
    assert main(["export", str(home)]) == 0
    exported = shutil.copy(home / "models" / "default" / "model.onnx", tmp_path / "pupil.onnx")
    capsys.readouterr()
    for name in (home, exported):  # the file answers as its run does
        assert main(["league", str(home), "--play", str(name), "random", "--games", "40"]) == 0
    one, two = (line.partition(": ")[2] for line in capsys.readouterr().out.splitlines())
    assert one == two

    before = read_league(home / IN_RUN)
    assert main(["league", str(home), "--add", str(other), "--games", "6"]) == 0
    assert main(["league", str(home), "--add", str(exported), "--name", "copied", "--games", "6"]) == 0
    found = read_league(home / IN_RUN, outside=True)
    outside = [ref for ref in found.refs if ref.side in ("other", "copied")]
    versions = [RunDir.open(path).pointer("latest") for path in (other, home)]
    assert [str(ref) for ref in outside] == [f"other@{versions[0]}", f"copied@{versions[1]}"]
    for ref in outside:
        met = [found.record(ref, one) for one in before.refs]
        assert sum(record.games > 0 for record in met) == 8
        assert found.record(ref, found.find("default")).games > 0
        assert found.rating(ref).half < 300
    assert [found.rating(ref) for ref in before.refs] == [before.rating(ref) for ref in before.refs]
    assert read_league(home / IN_RUN).refs == before.refs  # whom a service may be asked for
    with bray.Experiment.load(home) as exp:
        exp.fit({"env_steps_total": 1700}, progress=False)
    capsys.readouterr()
    assert main(["league", str(home), "--top", "30"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == [str(outside[0])])
    assert "from outside" in row
    assert " 48 " in row


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--add", "nowhere"], "expected a run directory"),
        (["--add", "random"], "expected a run directory"),
        (["--add", "missing.onnx"], "missing.onnx is missing"),
        (["--add", "HERE", "--name", "default"], "is a player of"),
        (["--add", "HERE", "--name", "a@b"], "without @"),
        (["--add", "CARTS"], "other spaces"),
        (["--add", "CARTS.onnx"], "other spaces"),
        (["--add", "HERE", "--play", "default", "random"], "give one of them"),
    ],
)
def test_who_cannot_be_added(run, carts, words, message, capsys):
    words = [w.replace("HERE", str(run)).replace("CARTS", str(carts)) for w in words]
    assert main(["league", str(run), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (run / IN_RUN).with_name(OUTSIDE).exists()


def test_a_player_plays_one_who_searches(run, capsys):
    """Nim is won by whoever looks to its end."""
    assert main(["league", str(run), "--play", "random", "mcts(simulations=60)", "--games", "8"]) == 0
    said = re.search(r"random against mcts\S+: (\d+) won, 0 drawn, (\d+) lost of 8 games", capsys.readouterr().out)
    assert int(said[2]) >= 6
    assert main(["league", str(run), "--play", "default@0", "mcts(simulations=0)"]) == 2
    assert "numbers above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--play", "default"], "two players"),
        (["default", "random"], "two players"),
        (["--play", "default", "default@7"], "7.safetensors is missing"),
        (["--play", "default", "nobody"], "Known: default, random"),
    ],
)
def test_wrong_players_are_named(run, words, message, capsys):
    assert main(["league", str(run), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_does_not_play_itself(tmp_path, capsys):
    with bray.Experiment("PPO", Nim, path=tmp_path / "run", **SMALL) as exp:
        exp.save()
    assert main(["league", str(tmp_path / "run")]) == 2
    assert "--self-play" in capsys.readouterr().err


def test_a_player_is_served(run, monkeypatch, capsys):
    served = []
    monkeypatch.setattr(
        "bray.cli.serve.serve_runs", lambda runs, service, model, *_: served.append(model.versions) or 0
    )
    found = read_league(run / IN_RUN)
    weakest = min(found.refs, key=lambda ref: found.rating(ref).elo)
    assert main(["serve", str(run), "--player", "default@0"]) == 0
    assert main(["serve", str(run), "--player", "default"]) == 0
    assert main(["serve", str(run), "--rating", "-3000"]) == 0
    assert served == [{"0": 1.0}, {"latest": 1.0}, {"latest" if weakest.step is None else str(weakest.step): 1.0}]
    assert f"{weakest}, rating" in capsys.readouterr().out
    assert main(["serve", str(run), "--player", "default@1"]) == 2
    assert main(["serve", str(run), "--player", "default", "--version", "best"]) == 2


def test_a_player_of_a_league_of_several_is_served(tmp_path, monkeypatch):
    served = []
    monkeypatch.setattr(
        "bray.cli.serve.serve_runs", lambda runs, service, model, *_: served.append((runs, model.versions)) or 0
    )
    league = League(
        make_players({"main": "main", "hunter": "main_exploiter"}), ["x", "o"], ResultLog(tmp_path / IN_RUN)
    )
    for name in league.players:
        league.trained(name, 0, 4)
    assert main(["serve", str(tmp_path), "--player", "hunter@4"]) == 0
    assert main(["serve", str(tmp_path), "--player", "main"]) == 0
    name = tmp_path.name
    assert served == [
        ({name: tmp_path / "models" / "hunter"}, {"4": 1.0}),
        ({name: tmp_path / "models" / "main"}, {"latest": 1.0}),
    ]


def test_a_snapshot_answers_as_its_weights_do(run):
    """Any one, of a checkpoint or not."""
    with bray.Experiment.load(run) as exp:
        steps = [ref.step for ref in read_league(run / IN_RUN).past()]
        assert not set(steps) <= set(RunDir.open(run).steps())
        seen = [exp.served.spec.observation.sample(np.random.default_rng(i)) for i in range(6)]
        asked = {"port": 0, "admin_port": 0, "block": False, "engine": "torch"}
        for step in (steps[0], steps[-2]):
            load_weights(exp.served.model, RunDir.open(run).load_weights(step))
            expected = [int(exp.policy(obs)) for obs in seen]
            with exp.serve(**asked, versions={str(step): 1.0}) as server, bray.Client(port=server.port) as client:
                client.start()
                assert [client.tick(to_plain(obs))["action"] for obs in seen] == expected


def test_a_session_asks_for_a_rating(run):
    """It is answered by the weights of the player nearest to it, as long as it lasts, and others are not."""
    found = read_league(run / IN_RUN)
    with bray.Experiment.load(run) as exp:
        seen = [exp.served.spec.observation.sample(np.random.default_rng(i)) for i in range(6)]
        usual = [int(exp.policy(obs)) for obs in seen]
        asked = {"port": 0, "admin_port": 0, "block": False, "engine": "torch", "follow_every_s": 0.01}
        with exp.serve(**asked) as server, bray.Client(port=server.port) as other:
            other.start()
            for ref in [found.past()[0], found.past()[-2]]:
                rating = found.rating(ref).elo
                load_weights(exp.served.model, RunDir.open(run).load_weights(ref.step))
                expected = [int(exp.policy(obs)) for obs in seen]
                with bray.Client(port=server.port) as client:
                    reply = client.start(data={"rating": rating + 1e-6})
                    assert reply == {"model": "run", "version": ref.step, "rating": rating}
                    for _ in range(10):  # longer than a version stays that nobody is given any more
                        assert [client.tick(to_plain(obs))["action"] for obs in seen] == expected
            assert [other.tick(to_plain(obs))["action"] for obs in seen] == usual
            strongest = max(found.rating(ref).elo for ref in found.refs)
            with bray.Client(port=server.port) as client:
                assert client.start(data={"rating": 9999})["rating"] == strongest
            for wrong, why in (({"rating": "x"}, "rating"), ({"rating": 1200, "version": 0}, "a version or a rating")):
                with bray.Client(port=server.port) as client, pytest.raises(ClientError, match=why) as refused:
                    client.start(data=wrong)
                assert refused.value.status == 400


def test_a_session_of_a_league_of_several_is_answered_by_the_nearest_of_all_players(tmp_path):
    players = {"main": {"player": "main"}, "hunter": {"player": "main_exploiter"}}
    made = {"self_play": {"snapshot_every": 150}, "policies": players, **SMALL}
    with bray.Experiment("PPO", NIM, path=tmp_path / "run", **made) as exp:
        exp.fit({"env_steps_total": 900}, progress=False)
    found, directory = read_league(tmp_path / "run" / IN_RUN), RunDir.open(tmp_path / "run")
    ratings = {ref: found.rating(ref).elo for ref in found.refs}
    apart = [ref for ref in found.refs if list(ratings.values()).count(ratings[ref]) == 1]
    assert {ref.side for ref in apart} == set(players)
    with bray.Experiment.load(tmp_path / "run") as exp:
        seen = [exp.policy_named("main").spec.observation.sample(np.random.default_rng(i)) for i in range(6)]
        latest = {name: RunDir.open(tmp_path / "run" / "models" / name).pointer("latest") for name in players}
        with exp.serve(port=0, admin_port=0, block=False, engine="torch") as server:
            for ref in apart:
                served, step = exp.policy_named(ref.side), latest[ref.side] if ref.step is None else ref.step
                load_weights(served.model, directory.load_weights(step, ref.side))
                expected = [int(served(obs)) for obs in seen]
                with bray.Client(port=server.port) as client:
                    said = client.start(data={"rating": ratings[ref]})
                    assert said == {"model": ref.side, "version": step, "rating": ratings[ref]}
                    assert [client.tick(to_plain(obs))["action"] for obs in seen] == expected
            for opening, model in ((None, "main"), ({"model": "hunter"}, "hunter")):
                with bray.Client(port=server.port) as client:
                    said = client.start(data=opening) if opening else json.loads(client.start())
                    assert said == {"model": model, "version": latest[model]}
            mine = min((x for ref, x in ratings.items() if ref.side == "hunter"), key=lambda x: abs(x - 3000))
            with bray.Client(port=server.port) as client:
                assert client.start(data={"model": "hunter", "rating": 3000})["rating"] == mine


def test_a_rating_of_a_run_that_does_not_play_itself_is_refused(tmp_path):
    with bray.Experiment("PPO", "CartPole-v1", path=tmp_path / "run", **SMALL) as exp:
        exp.save()
        asked = {"port": 0, "admin_port": 0, "block": False, "engine": "torch"}
        with exp.serve(**asked) as server, bray.Client(port=server.port) as client:
            with pytest.raises(ClientError, match="no players with a rating"):
                client.start(data={"rating": 1200})
            assert json.loads(client.start()) == {"model": "run", "version": 0}
