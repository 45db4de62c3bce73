"""benchmarks/trace_files.py, same_weights.py, rl_functions.py and scale/peers.py see what they say they see."""

import argparse
import json
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks import connect_four, launched, live_league, rl_functions, same_weights, search, slimevolley, trace_files
from benchmarks.learning.foes import Foes
from benchmarks.peers import async_cases
from benchmarks.same_weights import Trained, difference
from benchmarks.scale import peers
from bray import Experiment, tree
from bray.cli.main import main
from bray.data.rows import Decoder
from bray.envs.agent_games import ConnectFour
from bray.envs.many_games import OneOfMany
from bray.league import IN_RUN, League, Outcome, ResultLog, make_players, read_league


def test_the_lines_of_ppo_are_counted(capsys):
    total = trace_files.count_ppo()
    assert f"ppo: {total} lines" in capsys.readouterr().out
    assert total > 200


def test_a_tick_is_traced_from_the_socket_on(capsys):
    files = trace_files.trace_tick(ticks=3, warm_up=5, idle=0.3, engine="torch")
    assert files[0].startswith("bray/serving/")
    assert len(files) == len(set(files)) > 3
    assert not [f for f in files if f.startswith(("bray/cli/", "bray/envs/"))]
    assert f"{len(files)} files of bray/" in capsys.readouterr().out
    assert sys.getprofile() is None
    assert threading.getprofile() is None


def test_a_trace_ends_with_the_update_and_leaves_out_what_runs_idle(capsys):
    tracer, names = trace_files.Tracer(), {}
    learner = "class Learner:\n    def update(self): tick()"
    sources = {**{f: f"def {f}(): pass" for f in ("tick", "timer", "late")}, "learner": learner}
    for file, source in sources.items():
        exec(compile(source, f"{trace_files.PACKAGE}{file}.py", "exec"), names)
    with tracer:
        tracer.start(tracer.idle)
        names["timer"]()
        tracer.start(tracer.calls, until_update=True)
        names["timer"]()
        names["Learner"]().update()
        names["late"]()
    assert tracer.report("x") == ["bray/learner.py", "bray/tick.py"]
    assert tracer.updates == 1
    assert "runs also while no game plays: bray/timer.py" in capsys.readouterr().out


def test_a_difference_is_found_and_the_time_is_none():
    row = {"env_steps_total": 8, "loss/kl": 0.5, "eval/return_mean": float("nan"), "time_total_s": 1.0, "perf/env": 0.1}
    row |= {"date": "2026-11-18 13:12:42", "pid": 7, "hostname": "here"}
    ours = Trained(1.0, "abc", (row, row))
    elsewhere = {"time_total_s": 2.0, "perf/env": 0.2, "date": "2026-11-19 01:02:03", "pid": 8, "hostname": "there"}
    later = replace(ours, rows=(row, {**row, **elsewhere, "env_steps_per_second": 7.0}))
    assert difference(ours, later) == ""
    assert difference(ours, replace(ours, rows=(row, {**row, "loss/new": 1.0}))) == ""
    assert "row 2: loss/kl is 0.5" in difference(ours, replace(ours, rows=(row, {**row, "loss/kl": 0.25})))
    assert "weights" in difference(ours, replace(ours, weights="abd"))
    assert "rows" in difference(ours, replace(ours, rows=(row,)))
    assert "out of memory" in difference(ours, Trained(1.0, error="out of memory"))


@pytest.mark.parametrize("case", same_weights.CASES)
def test_a_case_is_commands_that_end_in_one_run_directory(case, tmp_path, capsys, monkeypatch):
    job = same_weights.Job(steps=1000, seed=3, folder=tmp_path, data=tmp_path / "data")
    commands = same_weights.CASES[case](job)
    assert len(commands) == 1 + ("resume" in case)
    for words in commands:
        if words[0] == "launch":
            monkeypatch.syspath_prepend(tmp_path)  # where the file's module is
            assert main([*words, "--check"]) == 0
            assert f"{tmp_path}/run" in capsys.readouterr().out
        elif "--resume" in words:
            assert words[words.index("--resume") + 1] == str(tmp_path / "run")
        else:
            assert main([*words, "--print-config"]) == 0
            assert "CartPole-v1" in (out := capsys.readouterr().out) or "Pendulum-v1" in out or "files" in out
            assert [words[words.index(k) + 1] for k in ("--project", "--trial")] == [str(tmp_path), "run"]


def test_rows_of_a_file_are_those_that_agents_push():
    done = np.arange(5) == 4
    rng = np.random.default_rng(0)
    episode = {"obs": rng.standard_normal((6, launched.OBS)), "action": np.arange(5) % 3, "reward": np.ones(5)}
    rows = list(launched.rows_of(episode | {"terminated": done, "truncated": np.zeros(5, bool)}, stream=2, steps=5))
    (piece,), counts = Decoder().decode(tree.stack(rows))
    assert counts.env_steps == 5
    assert counts.episodes == ((5.0, 5),)
    for name, column in episode.items():
        np.testing.assert_array_equal(getattr(piece, name)[:, 0], column)
    assert piece.terminated[:, 0].tolist() == done.tolist()
    assert piece.extras["logp"].shape == (5, 1)


def test_a_fingerprint_is_of_tensors_not_of_the_header(tmp_path):
    weights = {"a": np.arange(3, dtype=np.float32), "b": np.zeros((2, 2), np.float32)}
    save_file(weights, tmp_path / "1.safetensors")
    save_file(weights, tmp_path / "2.safetensors", metadata={"bray": "0.2"})
    weights["b"][1, 1] = 1e-30
    save_file(weights, tmp_path / "3.safetensors")
    first, same, other = (same_weights.fingerprint(tmp_path / f"{i}.safetensors") for i in (1, 2, 3))
    assert first == same != other


@pytest.mark.skipif(not (same_weights.ROOT / ".git").exists(), reason="these files are not a git repository")
def test_the_tree_of_another_commit_is_removed_also_after_an_error(tmp_path):
    def trees():
        words = ["git", "worktree", "list", "--porcelain"]
        return subprocess.run(words, cwd=same_weights.ROOT, capture_output=True, text=True, check=True).stdout

    def fail():
        with same_weights.other_tree("HEAD", tmp_path) as tree:
            assert (tree / "bray" / "__init__.py").is_file()
            assert str(tree) in trees()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(tmp_path.iterdir())
    assert str(tmp_path) not in trees()


def test_functions_of_rl_are_timed_and_checked(capsys):
    assert rl_functions.main(["--steps", "6", "--batch", "2", "--device", "cpu", "--seconds", "0.001"]) == 0
    out = capsys.readouterr().out
    assert [name for name in rl_functions.FUNCTIONS if out.count(f"{name} ") != 1] == []
    with pytest.raises(SystemExit, match="GAE differs from a float64 loop by"):
        rl_functions.check(np.zeros(2), np.ones(2), "GAE")


def test_the_nearest_foe_that_is_there_counts():
    env = Foes()
    obs, _ = env.reset(seed=0)
    total, done = 0.0, False
    while not done:
        distance = [np.linalg.norm(x) if there else np.inf for x, there in zip(obs["foes"], obs["there"], strict=True)]
        obs, reward, done, _, _ = env.step(int(obs["foes"][int(np.argmin(distance)), 0] < 0))
        total += reward
    assert total == 10.0


def test_a_watch_counts_a_window_or_the_seconds_to_a_return(monkeypatch):
    clock, ends = [0.0], []
    monkeypatch.setattr(async_cases.time, "perf_counter", lambda: clock[0])
    window, race = async_cases.Watch(10.0), async_cases.Watch(60.0, until=150.0)
    results = {5.0: (0, None), 6.0: (100, 20.0), 9.0: (400, 90.0), 14.0: (900, 140.0), 20.0: (1_500, 151.0)}
    for clock[0], (steps, mean) in results.items():
        ends.append((window.tick(steps, 2 * steps, mean), race.tick(steps, None, mean)))
    assert ends == [(False, False)] * 4 + [(True, True)]
    assert window.line()["steps_per_second"] == 1_100 / 11.0, "from the tick 3 s after the first steps on"
    assert window.line()["passes"] == 2.0
    assert race.line() | {"steps_per_second": 0} == {
        "steps_per_second": 0,
        "passes": 0.0,
        "seconds": 20.0,
        "steps": 1_500,
        "return": 151.0,
        "reached": True,
    }


@pytest.mark.parametrize(
    ("what", "until", "mine", "good"),
    [
        ("rllib", None, 310.0, True),
        ("rllib", None, 290.0, False),
        ("sample-factory", None, 101.0, True),
        ("rllib", 150.0, 99.0, True),
        ("rllib", 150.0, 101.0, False),
    ],
)
def test_both_sides_are_asked_the_same_by_turns(what, until, mine, good, monkeypatch, capsys):
    asked = []

    def line(who, value):
        def measure(*given):
            asked.append((who, *given[-4:]))
            return {"steps_per_second": value, "seconds": value, "passes": 1.0, "reached": True}

        return measure

    monkeypatch.setattr(peers, "ours", line("ours", mine))
    monkeypatch.setattr(peers, "theirs", line("theirs", 100.0))
    args = argparse.Namespace(
        what=what, cases=["appo-cartpole"], until=until, seconds=9.0, repeat=2, seed=7, peer="python"
    )
    assert peers.compare(args) is good
    given = [("appo-cartpole", 9.0, until, seed) for seed in (7, 7, 8, 8)]
    assert [a[1:] for a in asked] == given
    assert [a[0] for a in asked] == ["ours", "theirs", "theirs", "ours"]
    assert f"{100 / mine if until else mine / 100:.2f} times" in capsys.readouterr().out


@pytest.mark.parametrize("case", async_cases.CASES.values(), ids=async_cases.CASES)
def test_bray_has_the_settings_that_the_peers_have(case):
    exp = Experiment(case.run, case.env, use_preset=False, config=peers.config_of(case))
    run, env, algo = (exp.config[section] for section in ("run", "env", "algo"))
    exp.close()
    assert run.num_workers * env.num_envs * algo.rollout_length == async_cases.WORKERS * case.batch
    assert (algo.lr, algo.gamma, algo.max_grad_norm) == (case.lr, async_cases.GAMMA, async_cases.MAX_GRAD_NORM)


def test_the_player_of_one_ply_wins_and_blocks():
    game = OneOfMany(connect_four.Anywhere())

    def column(*moves):
        seen, _ = game.reset(seed=0)
        for move in moves:
            seen, *_ = game.step(dict.fromkeys(seen, move))
        ((_, one),) = seen.items()
        return connect_four.one_ply(one, np.random.default_rng(0))

    assert column(0, 1, 0, 1, 0, 1) == 0, "wins upwards, and does not block"
    assert column(6, 0, 1, 0, 1, 0, 1) == 0, "the second player too"
    assert column(0, 1, 0, 1, 0) == 0, "blocks"
    assert column(2, 2, 3, 3, 5, 5) == 4, "wins in a gap"
    assert column(0, 1, 1, 2, 2, 3, 2, 3, 3, 6) == 3, "wins on a diagonal"
    assert column(6, 5, 5, 4, 4, 3, 4, 3, 3, 0) == 3, "on the other one"
    assert column(3, 3, 3, 3, 3, 3) != 3, "a full column"


def test_training_games_of_connect_four_begin_anywhere_and_follow_its_rules():
    ours, known = connect_four.Anywhere(200, random_moves=12), ConnectFour()
    for i in range(200):
        ours.begin(i, i)
    planes, turn = ours.obs["obs"], ours.acts.argmax(1)
    placed = planes[:, 0, [0, 2]].sum((1, 2, 3)).astype(int)
    assert sorted(set(placed)) == list(range(13))
    np.testing.assert_array_equal(turn, placed % 2)
    assert (planes.sum(2) == 1).all(), "a cell is empty, mine or the other's"
    np.testing.assert_array_equal(planes[:, 0], planes[:, 1, ::-1])
    one, rng = OneOfMany(connect_four.Anywhere()), np.random.default_rng(0)
    for game in range(30):
        mine, theirs, over = one.reset(seed=game)[0], known.reset()[0], False
        while not over:
            assert mine.keys() == theirs.keys()
            for agent, seen in theirs.items():
                for key, value in seen.items():
                    np.testing.assert_array_equal(mine[agent][key], value)
            ((agent, seen),) = theirs.items()
            action = {agent: int(rng.choice(np.flatnonzero(seen["action_mask"])))}
            (mine, *came), (theirs, *due) = one.step(action), known.step(action)
            over = due[1]["__all__"]
            assert came[1]["__all__"] == over
            assert {a: came[0][a] for a in due[0]} == due[0]


def test_the_bot_of_openspiel_is_told_what_has_been_played():
    pytest.importorskip("pyspiel")
    for played, best in (([3, 0, 3, 0, 3, 6], 3), ([0, 3, 0, 3, 6, 3], 3), ([5, 2, 5, 2, 5], 5)):
        moves = np.array([*played, *[-1] * (42 - len(played))], np.int16)
        assert search.spiel_mcts({"moves": moves}, np.random.default_rng(0)) == best  # wins, blocks, blocks


def test_ratings_that_fall_are_seen(tmp_path):
    for name, outcomes in (("rises", [1] * 60), ("falls", [-1] * 60)):
        log = ResultLog(tmp_path / name / IN_RUN)
        league = League(make_players({"default": "self_play"}), ["a", "b"], log)
        for step in (0, 1):
            league.trained("default", 10**6 * step, step)
            for by in outcomes:
                job = league.job(np.random.default_rng(step))
                while len(set(job.seats.values())) == 1:
                    job = league.job(np.random.default_rng(len(league.refs) + job.id))
                sign = {agent: by if ref.step is None else -by for agent, ref in job.seats.items()}
                league.finish(Outcome(job.id, sign))
        league.trained("default", 10**7, 2)
        assert connect_four.rises(tmp_path / name) == (name == "rises")


def test_slime_volleyball_is_a_game_of_two_that_the_baseline_plays():
    assert main(["check-env", "benchmarks.slime_game:SlimeVolley"]) == 0
    slimevolleygym = pytest.importorskip("slimevolleygym")
    assert slimevolley.check(games=2) > 1000
    with Experiment("PPO", slimevolley.SlimeVolley, fcnet_hiddens=[8], num_envs=2) as exp:
        (player,) = exp.players(exp.spec_of()).values()
        assert slimevolley.against_baseline(player, 3, "sample")["mean"] < -3.0
    one, ours, rng = slimevolleygym.BaselinePolicy(), slimevolley.Baseline(1), np.random.default_rng(0)
    for seen in rng.normal(size=(50, 12)):  # it remembers
        forward, backward, jump = one.predict(seen)
        pressed = [int(forward and not backward), int(backward and not forward), int(jump)]
        assert slimevolley.ACTIONS[ours.act(seen[None])[0]] == pressed


MATCH = {"seats": {"first": "main", "second": "naive"}, "returns": {"first": 1.0, "second": -1.0}}


@pytest.mark.parametrize(
    ("logged", "told", "says"),
    [
        ([0, 1], [(0, True), (1, True)], []),
        ([0, 1], [(0, True), (2, False)], []),
        ([0, 0], [(0, True)], ["1 results are there twice", "played 2 games"]),
        ([0], [(0, True), (1, True)], ["1 results that games were told count are not in the log"]),
        ([0, 1], [(0, True), (1, False)], ["1 results count that games were told do not"]),
    ],
)
def test_a_lost_result_of_a_league_is_found(tmp_path, logged, told, says):
    log = tmp_path / "league" / "results.jsonl"
    log.parent.mkdir()
    log.write_text("".join(json.dumps({"id": id, **MATCH}) + "\n" for id in set(logged)))
    results = [{"id": id, **MATCH} for id in logged]
    wrong = live_league.differences(results, [{"id": id, "counts": yes, **MATCH} for id, yes in told], read_league(log))
    assert len(wrong) == len(says)
    assert all(part in whole for part, whole in zip(says, wrong, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("where", [["--games", "8"], ["--workers", "2"]])
def test_random_kills_of_a_league_lose_no_result(where):
    words = [*where, "--seconds", "60", "--kills", "6", "--any-rating"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.live_league", *words], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
