"""A league in one run: several players that learn, who decides for whom, who starts anew, exact resume."""

import hashlib
import json
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces

import bray
from bray.cli.main import main
from bray.errors import BrayError
from bray.league import IN_RUN, Player, read_league
from bray.rundir import RunDir, trust

NIM = "bray.envs.agent_games:Nim"
SMALL = {"rollout_length": 16, "epochs": 2, "minibatches": 2, "num_envs": 4, "iteration_steps": 200}
LEAGUE = {"snapshot_every": 150, "pool": 3}
THREE = {
    "main": {"player": "main"},
    "hunter": {"player": {"kind": "main_exploiter", "snapshot_every": 100}, "config": {"lr": 1e-3}},
    "naive": {"player": "self_play", "run": "DQN", "config": {"learning_starts": 50, "train_every": 8}},
}


def make(env, path=None, **more):
    return bray.Experiment("PPO", env, path=path, **{**SMALL, "self_play": LEAGUE, "policies": THREE, **more})


def events(path):
    return [json.loads(line) for line in (path / IN_RUN).read_text().splitlines()]


class Watched(bray.MultiAgentEnv):
    """Two act at once, three times. What is paid in all says which game it was, and the game knows who did what."""

    possible_agents = ("ann", "bob")
    observation_spaces = dict.fromkeys(possible_agents, spaces.Box(-1e6, 1e6, (2,), np.float32))
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(3))
    made = 0

    def __init__(self):
        Watched.made += 1
        self.game, self.played = 1000 * Watched.made, []

    def see(self):
        return dict.fromkeys(self.possible_agents, np.array([self.game, self.t], np.float32))

    def reset(self, *, seed=None, options=None):
        self.game, self.t = self.game + 1, 0
        return self.see(), {}

    def step(self, actions):
        self.played += [(self.game, agent, int(action)) for agent, action in actions.items()]
        self.t += 1
        over = self.t == 3
        paid = {"ann": self.game, "bob": -self.game} if over else dict.fromkeys(self.possible_agents, 0.0)
        return self.see(), paid, {"__all__": over}, {"__all__": False}, {}


def always(side, action):
    """Its policy chooses this."""
    with torch.no_grad():
        for x in side.model.parameters():
            if x.shape == (3,):
                x[:] = torch.tensor([100.0 if i == action else 0.0 for i in range(3)])


@pytest.mark.parametrize("workers", [0, 1])
def test_each_seat_is_decided_by_whom_the_job_names(tmp_path, workers):
    """Each player as it is now does something of its own, and as it was something else."""
    players = {"one": {"player": "main"}, "two": {"player": "league_exploiter"}}
    exp = make(Watched, tmp_path / "run", policies=players, num_workers=workers)
    for side in exp.training.sides.values():
        always(side, 0)
    exp.save()
    source, rows = exp.training.sources[0], {"one": [], "two": []}
    source.gather()
    before = {game for log in source.foreach_env(lambda env: env.played) for game, *_ in log}
    always(exp.training.sides["one"], 1)
    always(exp.training.sides["two"], 2)
    for _ in range(6):
        for piece in source.gather()[0]:
            rows[piece.side] += piece.obs[:-1][piece.valid][:, 0].astype(int).tolist()
    played = [one for log in source.foreach_env(lambda env: env.played) for one in log if one[0] not in before]
    chosen = {}
    for game, agent, action in played:
        chosen.setdefault((game, agent), set()).add(action)
    seats = {int(e["returns"]["ann"]): e["seats"] for e in events(tmp_path / "run") if "id" in e}
    met, does = Counter(), {"one": {1}, "two": {2}, "one@0": {0}, "two@0": {0}}
    for (game, agent), actions in chosen.items():
        if game in seats:
            assert actions == does[seats[game][agent]]
            met[seats[game][agent]] += 1
    assert min(met[name] for name in does) > 3
    for name, mine in rows.items():
        for game, count in Counter(game for game in mine if game in seats and game not in before).items():
            seated = list(seats[game].values()).count(name)
            assert seated, "a row of a game in which it does not learn"
            assert count <= 3 * seated
        assert len(mine) > 50
    exp.close()


def test_a_player_that_starts_anew_has_the_weights_that_it_began_with(tmp_path):
    seen = {}
    exp = make(NIM, tmp_path / "run")

    def look(exp, row):
        directory, anew = RunDir.open(tmp_path / "run"), [e for e in events(tmp_path / "run") if e.get("anew")]
        for event in anew:
            if event["snapshot"] not in seen:
                side, _, step = event["snapshot"].partition("@")
                frozen = directory.load_weights(int(step), side)
                seen[event["snapshot"]] = frozen, exp.training.sides[side].weights()

    with exp:
        first = {name: side.weights() for name, side in exp.training.sides.items()}
        row = exp.fit({"env_steps_total": 1600}, progress=False, callbacks={"on_train_result": look})
        main_now = exp.training.sides["main"].weights()
    assert seen
    assert all(name.startswith("hunter@") for name in seen), "the only one that starts anew"
    begun = first["hunter"]
    for frozen, _ in seen.values():
        assert not all(np.array_equal(begun[k], frozen[k]) for k in begun)
    assert not all(np.array_equal(first["main"][k], main_now[k]) for k in main_now)
    after = [(frozen, now) for frozen, now in seen.values()]
    distance = [[sum(np.abs(x[k] - begun[k]).sum() for k in begun) for x in pair] for pair in after]
    assert all(now < frozen for frozen, now in distance), "it goes on from where it began, not from where it was"
    for name in THREE:
        assert row[f"side/{name}/league/snapshots"] > 1
        assert row[f"side/{name}/league/win"] + row[f"side/{name}/league/loss"] == pytest.approx(1.0)


def hashes(path):
    return {
        p.relative_to(path): hashlib.sha256(p.read_bytes()).hexdigest() for p in path.glob("models/*/*.safetensors")
    }


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_league_is_resumed_exactly_and_shown(tmp_path, capsys, workers):
    played_by = {"num_workers": workers, "num_envs": 4 // max(1, workers)}
    with make(NIM, tmp_path / "whole", **played_by) as exp:
        exp.fit({"env_steps_total": 1600}, progress=False)
        whole = {name: side.weights() for name, side in exp.training.sides.items()}
    with make(NIM, tmp_path / "parts", keep_checkpoints=1, checkpoint_freq=1, **played_by) as exp:
        for row in exp.train({"env_steps_total": 1600}):
            if row["env_steps_total"] > 700:
                break
    log, before = tmp_path / "parts" / IN_RUN, hashes(tmp_path / "parts")
    frozen = [e["snapshot"].split("@") for e in events(tmp_path / "parts") if "snapshot" in e]
    result = {"id": 900, "seats": dict.fromkeys(["first", "second"], "main"), "returns": {"first": 1, "second": -1}}
    with open(log, "a") as file:  # of games after the checkpoint, which are played again; the last line is torn
        file.write(json.dumps(result) + '\n{"id": 901, "seats"')
    with bray.Experiment.resume(tmp_path / "parts") as exp:
        assert exp.exact
        exp.fit({"env_steps_total": 1600}, progress=False)
        parts = {name: side.weights() for name, side in exp.training.sides.items()}
    assert all(np.array_equal(whole[name][k], parts[name][k]) for name in whole for k in whole[name])
    assert log.read_bytes() == (tmp_path / "whole" / IN_RUN).read_bytes()
    after = hashes(tmp_path / "parts")
    names = [Path("models", side, f"{step}.safetensors") for side, step in frozen]
    assert [after[name] for name in names] == [before[name] for name in names]
    ids = [e["id"] for e in events(tmp_path / "parts") if "id" in e]
    assert len(ids) == len(set(ids)) > 100
    assert {ref.side for ref in read_league(log).refs} == set(THREE)
    assert main(["league", str(tmp_path / "parts"), "--top", "100"]) == 0
    out = capsys.readouterr().out
    assert all(f"snapshots of {name}" in " ".join(out.split()) for name in THREE)
    assert main(["league", str(tmp_path / "parts"), "--play", "hunter", "main@0", "--games", "6"]) == 0
    assert "of 6 games" in capsys.readouterr().out


@pytest.mark.parametrize("algo", ["PPO", pytest.param("APPO", marks=pytest.mark.slow)])
def test_matches_of_lost_workers_are_played_by_others_and_every_result_counts_once(tmp_path, monkeypatch, algo):
    """In rounds, and where workers play on while the learner learns. Few of the snapshots are kept in a worker."""
    monkeypatch.setattr("bray.train.self_play.KEPT", 2)
    players = {"main": {"player": "main"}, "second": {"player": "league_exploiter"}}
    more = {"num_workers": 2, "num_envs": 2, "policies": players, "checkpoint_freq": 1}
    small = SMALL if algo == "PPO" else {"rollout_length": 16, "iteration_steps": 200}
    exp = bray.Experiment(algo, NIM, path=tmp_path / "run", self_play=LEAGUE, **{**small, **more})
    drawn = exp.training.league.league
    with exp:
        for row in exp.train({"env_steps_total": 1000}):
            if row["training_iteration"] in (2, 4):
                os.kill(exp.training.sources[0].process_ids[row["training_iteration"] % 2], signal.SIGKILL)
        ended, open_ = row["episodes_total"], json.loads(drawn.get_state()["open"])
    assert row["workers/restarts"] == 2
    ids = [e["id"] for e in events(tmp_path / "run") if "id" in e]
    assert len(ids) == len(set(ids)) == ended > 40, "each game that ended is in the log once"
    assert not drawn.refused
    assert len(open_) < 60, "what was given back is not under way any more"
    assert min(len(drawn.past(name)) for name in players) > 2
    before = hashes(tmp_path / "run")
    with bray.Experiment.resume(tmp_path / "run", num_workers=3) as exp:  # dealt to others
        exp.fit({"env_steps_total": 1200}, progress=False)
    after = [e["id"] for e in events(tmp_path / "run") if "id" in e]
    assert after[: len(ids)] == ids
    assert len(after) == len(set(after)) > len(ids)
    frozen = [Path("models", *str(ref).split("@")).with_suffix(".safetensors") for ref in drawn.past()]
    assert [hashes(tmp_path / "run")[name] for name in frozen] == [before[name] for name in frozen]


class Coin(bray.MultiAgentEnv):
    """Over after one step, until it takes longer: how many matches a worker comes to the end of is not known."""

    possible_agents = ("ann", "bob")
    observation_spaces = dict.fromkeys(possible_agents, spaces.Box(0, 1, (1,), np.float32))
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(2))
    games = 0

    def reset(self, *, seed=None, options=None):
        Coin.games += 1
        self.left = 1 if Coin.games > 20 else 12
        return dict.fromkeys(self.possible_agents, np.ones(1, np.float32)), {}

    def step(self, actions):
        self.left -= 1
        won = float(actions["ann"] == actions["bob"])
        seen = dict.fromkeys(self.possible_agents, np.ones(1, np.float32))
        return seen, {"ann": won, "bob": 1 - won}, {"__all__": self.left == 0}, {"__all__": False}, {}


@pytest.mark.slow
def test_a_worker_that_has_played_all_of_its_matches_plays_its_last_ones_again(tmp_path):
    players = {"one": {"player": "main"}, "two": {"player": "self_play"}}
    with make(Coin, tmp_path / "run", policies=players, num_workers=1) as exp:
        row = exp.fit({"env_steps_total": 600}, progress=False)
    seats = [tuple(e["seats"].values()) for e in events(tmp_path / "run") if "id" in e]
    ids = [e["id"] for e in events(tmp_path / "run") if "id" in e]
    assert len(set(ids)) == len(ids) == row["episodes_total"] > 200
    assert len(set(seats)) > 6


def test_a_league_file(tmp_path, capsys):
    file = {"run": "PPO", "env": NIM, "self_play": LEAGUE, "policies": THREE, **SMALL, "eval_freq": 1}
    file |= {"eval_episodes": 4, "stop": {"env_steps_total": 200}}
    (tmp_path / "league.yaml").write_text(yaml.safe_dump(file, sort_keys=False))
    assert main(["train", "-f", str(tmp_path / "league.yaml"), "--project", str(tmp_path), "--trial", "run"]) == 0
    row = json.loads((tmp_path / "run" / "result.jsonl").read_text().splitlines()[-1])
    assert row["eval/return_mean"] == row["side/main/eval/return_mean"]
    for name in THREE:
        assert sum(row[f"side/{name}/eval/random/{how}"] for how in ("win", "draw", "loss")) == pytest.approx(1.0)


class Shy(Player):
    """Plays nobody but a stranger."""

    def opponent(self, league, rng):
        return type(self.me)("stranger")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"policies": {"one": {"player": "mian"}, "two": {}}}, "mian.*Did you mean.*main"),
        ({"policies": {"one": {"player": {"kind": "main", "snapshots": 3}}, "two": {}}}, "snapshot_every"),
        ({"policies": {"one": {"player": {"branches": {"pfsp": 0.5, "self_play": 0.4}}}, "two": {}}}, "sum to 1"),
        ({"policies": {"one": {"player": f"{__name__}:Shy"}, "two": {}}}, "chose the opponent stranger"),
        ({"policies": {"one": {"player": 3}, "two": {}}}, "player one: expected a kind"),
        ({"policies": {"one": {"player": "main_exploiter"}, "two": {"player": "self_play"}}}, "there is none: add one"),
        ({"policies": {"one": {}}}, "leave policies out"),
        ({"policies": {"one": {}, "two": {"share_encoder": "one"}}}, "leave share_encoder out"),
        ({"policies_to_train": ["main"]}, "leave policies_to_train out"),
        ({"policy_mapping": {"first": "main", "second": "hunter"}}, "leave policy_mapping out"),
        ({"self_play": None}, "player is for a league: set self_play"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, more, message):
    with pytest.raises(BrayError, match=message), make(NIM, tmp_path / "run", **more) as exp:
        exp.fit({"env_steps_total": 50}, progress=False)


def test_a_kind_of_a_strangers_run_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for player in ("theirs:Kind", {"kind": "theirs:Kind"}):
        asked = trust.named({"run": {"policies": {"one": {"player": player}, "two": {}}}})
        with pytest.raises(trust.UntrustedRun, match="'theirs:Kind'"):
            trust.check(tmp_path, asked)
