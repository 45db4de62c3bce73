"""Several policies in one run: each trains as it would in a run of its own, is saved, comes back, is used by name."""

import json
import os
import re
import signal
import sys
import time

import numpy as np
import pytest
from sources_for_tests import count, make_piece

import bray
from bray import tree
from bray.algos import dqn, ppo
from bray.cli.main import main
from bray.data import Replay, Rollouts
from bray.errors import BrayError, UnknownName
from bray.experiment import Experiment
from bray.figures import read_results
from bray.rundir import RunDir
from bray.train.driver import Driver
from bray.train.source import Source
from tests import forked
from tests.data.test_experience import make_side

QUIET = {"save_figure": False, "export_graph_after_s": None, "checkpoint_every_s": 0.0}
SMALL = {"num_envs": 2, "fcnet_hiddens": [8], "iteration_steps": 64}
PPO = {"rollout_length": 32, "minibatches": 2, "epochs": 2}
DQN = {"learning_starts": 32, "batch_size": 16, "train_every": 4, "replay_size": 1000}
BOTH = {"first": {"run": "PPO", "config": PPO}, "second": {"run": "DQN", "config": DQN, "env": {"num_envs": 3}}}


def several(path, policies=BOTH, **more):
    return Experiment(env="CartPole-v1", policies=policies, path=path, use_preset=False, **{**QUIET, **SMALL, **more})


def finish(exp, iterations):
    rows = list(exp.train({"training_iteration": iterations}))
    exp.close()
    return rows


def weights(path, which="latest"):
    return RunDir.open(path).load_checkpoint(which).weights


def same(a, b):
    assert a.keys() == b.keys()
    return all(np.array_equal(a[k], b[k]) for k in a)


@pytest.fixture
def bray_cli(capsys):
    def call(*words):
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


# --- one driver -------------------------------------------------------------------------------------------------------


class Game(Source):
    """Games that two sides play in: what each did comes as its own pieces."""

    def __init__(self, seed=0, names=("a", "b")):
        self.rng, self.names, self.told = np.random.default_rng(seed), names, []
        self.ticks = dict.fromkeys(names, 0)

    def gather(self, timeout=0.0):
        pieces = []
        for i, name in enumerate(self.names):
            length = int(self.rng.integers(4, 9))
            piece = make_piece(self.rng, length, i, start=self.ticks[name], ends=(2,))
            piece.side = name
            self.ticks[name] += length
            pieces.append(piece)
        return pieces, count(pieces[0])

    def publish(self, side, weights, clock):
        self.told.append((side, clock, {k: v.copy() for k, v in weights().items()}))

    def get_state(self, midway=False):
        return {"arrays": {}, "json": {"rng": self.rng.bit_generator.state, "ticks": self.ticks}}

    def set_state(self, state, clock):
        self.rng.bit_generator.state, self.ticks = state["json"]["rng"], dict(state["json"]["ticks"])
        return True


def two_sides(a_learns=True):
    a = make_side(ppo, Rollouts(8, columns=2), minibatches=2, epochs=1)
    b = make_side(dqn, Replay(200, 8, learning_starts=16, train_every=4))
    a.name, b.name, a.experience.iteration_steps = "a", "b", 400
    if not a_learns:
        a.learner = None
    return Driver([a, b], [Game()])


def test_each_side_of_a_driver_has_its_own_version_weights_and_numbers():
    driver = two_sides()
    rows = [driver.iterate() for _ in range(2)]
    a, b = driver.sides["a"], driver.sides["b"]
    assert 0 < a.learner.steps != b.learner.steps > 0
    told = driver.sources[0].told
    assert {side for side, _, _ in told} == {"a", "b"}
    for side in (a, b):
        mine = [(clock, weights) for name, clock, weights in told if name == side.name]
        assert [clock.version for clock, _ in mine] == sorted({clock.version for clock, _ in mine})
        assert mine[-1][0].version == side.version
        assert same(mine[-1][1], side.weights())
    assert {"side/a/loss/policy_loss", "side/b/loss/loss", "side/b/replay/size"} <= rows[-1].keys()
    assert not any(key.startswith(("loss/", "replay/")) for key in rows[-1])
    assert rows[-1]["learner_steps_total"] == a.version + b.version
    assert rows[-1]["side/a/learner_steps_total"] == a.version


def test_the_sides_of_a_driver_go_on_exactly(tmp_path):
    whole, cut = two_sides(), two_sides()
    for _ in range(2):
        whole.iterate()
        cut.iterate()
    state, kept = cut.get_state(tmp_path), cut.weights()
    resumed = two_sides()
    assert resumed.set_state(state, kept, tmp_path)
    rows = [driver.iterate() for driver in (whole, resumed)]
    for name in ("a", "b"):
        assert same(whole.sides[name].weights(), resumed.sides[name].weights())
        assert whole.sides[name].version == resumed.sides[name].version
    losses = [{k: v for k, v in row.items() if "loss/" in k} for row in rows]
    assert losses[0] == losses[1]


def test_a_side_without_a_learner_plays_and_stays_as_it_is():
    driver = two_sides(a_learns=False)
    before = driver.sides["a"].weights()
    row = driver.iterate()
    assert same(before, driver.sides["a"].weights())
    assert driver.sides["b"].version > 0
    assert not any(key.startswith("side/a/loss") for key in row)
    assert driver.sides["a"].experience.wait_reason() == "no game has sent a row to learn from yet"


# --- one run ----------------------------------------------------------------------------------------------------------


def test_two_policies_have_the_weights_of_two_runs(tmp_path):
    rows = finish(several(tmp_path / "both"), 4)
    for name, algorithm, config in (("first", "PPO", PPO), ("second", "DQN", {**DQN, "num_envs": 3})):
        alone = {**QUIET, **SMALL, **config}
        exp = Experiment(algorithm, "CartPole-v1", path=tmp_path / name, use_preset=False, **alone)
        own = finish(exp, 4)
        of_both = tmp_path / "both" / "models" / name
        assert same(weights(tmp_path / name), weights(of_both))
        told = [k for k in own[-1] if k.startswith(("loss/", "replay/", "episode_return", "env_steps_total"))]
        assert len(told) > 5
        assert [[row[k] for k in told] for row in own] == [[row[f"side/{name}/{k}"] for k in told] for row in rows]
        assert RunDir.open(tmp_path / name).steps()[-1] == RunDir.open(of_both).steps()[-1]
    meta = json.loads((tmp_path / "both" / "checkpoints" / "4" / "meta.json").read_text())
    assert meta["steps"] == meta["meta"]["steps"] == {k: rows[-1][f"side/{k}/learner_steps_total"] for k in BOTH}
    assert rows[-1]["env_steps_total"] == sum(rows[-1][f"side/{k}/env_steps_total"] for k in BOTH)
    for name in BOTH:
        assert {"spec.json", "policy.json", "config.yaml"} <= set(os.listdir(tmp_path / "both" / "models" / name))
    assert not (tmp_path / "both" / "spec.json").exists()


def test_policies_that_play_alone_may_share_an_encoder(tmp_path):
    """Named before its owner, too."""
    shared = {"second": {**BOTH["second"], "share_encoder": "first"}, "first": BOTH["first"]}
    finish(several(tmp_path / "r", shared, fcnet_activation="relu"), 3)
    first, second = (weights(tmp_path / "r" / "models" / name) for name in ("first", "second"))
    encoder = {k: x for k, x in second.items() if k.startswith("core.")}
    assert len(encoder) >= 2
    for k, x in encoder.items():
        assert np.array_equal(x, first[k.replace("core.", "core.encoders.0.", 1)])


def test_a_goal_of_steps_is_shared_out(tmp_path):
    exp = several(tmp_path / "r", stop={"env_steps_total": 500})
    rows = list(exp.train())
    exp.close()
    assert rows[-1]["env_steps_total"] >= 500
    assert all(250 <= rows[-1][f"side/{name}/env_steps_total"] < 350 for name in BOTH)


def test_after_kill_minus_nine_a_run_goes_on_exactly(tmp_path):
    policies = {**BOTH, "second": {**BOTH["second"], "config": {**DQN, "prioritized": True}}}
    finish(several(tmp_path / "whole", policies), 12)
    told = {**QUIET, **SMALL, "checkpoint_freq": 1, "policies": policies}
    words = ["--env", "CartPole-v1", "--no-preset", "--config", json.dumps(told), "--quiet"]
    words += ["--project", str(tmp_path), "--trial", "r", "--stop", '{"time_total_s": 1000}']
    process = forked.Popen([sys.executable, "-m", "bray", "train", *words], start_new_session=True)
    until = time.monotonic() + 120
    while len(RunDir(tmp_path / "r").steps()) < 4 and time.monotonic() < until:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    exp = Experiment.resume(tmp_path / "r")
    assert exp.exact
    assert exp.training.iteration > 0
    last = max(12, exp.training.iteration + 2)
    finish(exp, last)
    if last > 12:  # it was fast
        finish(Experiment.resume(tmp_path / "whole"), last)
    for name in BOTH:
        assert same(weights(tmp_path / "r" / "models" / name), weights(tmp_path / "whole" / "models" / name))
    a, b = (read_results(tmp_path / name) for name in ("r", "whole"))
    for key in ("env_steps_total", "side/second/loss/loss", "side/first/episode_return_mean"):
        assert [row.get(key) for row in a] == [row.get(key) for row in b]


def test_policies_that_do_not_train_stay_as_they_are(tmp_path):
    """And start with the weights of another run; the same file is the version of all checkpoints."""
    finish(several(tmp_path / "old"), 2)
    old = tmp_path / "old" / "models" / "second"
    policies = {"first": BOTH["first"], "second": {**BOTH["second"], "init_from": str(old)}}
    exp = several(tmp_path / "new", policies, policies_to_train=["first"], checkpoint_freq=1, keep_checkpoints=2)
    rows = finish(exp, 4)
    new = tmp_path / "new" / "models"
    assert same(weights(new / "second"), weights(old))
    assert RunDir.open(new / "first").load_checkpoint().step > 0
    assert sorted(p.name for p in (new / "second").glob("*.safetensors")) == ["0.safetensors"]
    assert len(list((new / "first").glob("*.safetensors"))) <= 3  # latest, the one before, best
    assert not any(key.startswith("side/second/loss") for key in rows[-1])
    assert rows[-1]["side/second/env_steps_total"] > 0
    finish(Experiment.resume(tmp_path / "new"), 6)
    assert same(weights(new / "second"), weights(old))


def test_each_policy_is_used_by_its_directory(tmp_path, bray_cli):
    code, out = bray_cli(
        "train", "--env", "CartPole-v1", "--policies", "first=PPO,second=DQN", "--steps", 1500, "--no-preset",
        "--project", tmp_path, "--trial", "r", "--eval-freq", 1, "--eval-episodes", 2,
        "--config", json.dumps({**QUIET, **SMALL}),
    )  # fmt: skip
    assert code == 0, out
    assert "first PPO, second DQN on CartPole-v1" in out
    run, one = tmp_path / "r", tmp_path / "r" / "models" / "second"
    row = read_results(run)[-1]
    assert row["eval/return_mean"] == np.mean([row[f"side/{name}/eval/return_mean"] for name in BOTH])
    code, out = bray_cli("eval", one, "--episodes", 2)
    assert code == 0, out
    assert "DQN on CartPole-v1" in out
    exp = Experiment.load(one)
    assert f"{exp.evaluate(2)['eval/return_mean']:g}" == f"{row['side/second/eval/return_mean']:g}"
    code, out = bray_cli("export", run / "models" / "first")
    assert code == 0, out
    assert (run / "models" / "first" / "graph.onnx").exists()
    with exp.serve(port=0, admin_port=0, block=False) as server, bray.Client(port=server.port) as client:
        client.start()
        obs = np.zeros(4, np.float32)
        assert client.tick({"obs": obs.tolist()})["action"] == exp.policy(obs)
    for words in (["eval", run], ["serve", run], ["export", run], ["collect", run], ["train", "--init-from", run]):
        more = ["--run", "PPO", "--env", "CartPole-v1"] if words[0] == "train" else []
        code, out = bray_cli(*words, *more)
        assert code != 0
        said = re.sub(r"\s+", "", out)
        assert f"hasseveralpolicies,saywhichone:{run}/models/firstor{run}/models/second" in said, out
    code, out = bray_cli("doctor", run)
    assert "first PPO, second DQN" in out


def refused(match, **options):
    with pytest.raises(BrayError, match=match):
        _ = Experiment(env="CartPole-v1", **{**QUIET, **options}).training


def test_mistakes_are_told_in_one_line(tmp_path, bray_cli):
    refused("'frist' .run.policies_to_train.*'first'", policies=BOTH, policies_to_train=["frist"])
    refused("'confg' .run.policies.first.*'config'", policies={"first": {"run": "PPO", "confg": {}}})
    refused("'PPOO'", policies={"first": "PPOO"})
    refused("policy second: .*train_every|algo.rollout_length", policies={"second": {"run": "DQN", "config": PPO}})
    refused("an algorithm's name, or a dict", policies={"first": 3}, run="PPO")
    refused("letters, digits", policies={"../up": "PPO"})
    refused("`default`", policies={"default": "PPO"})
    refused("eval_parallel is for a run with one policy", policies=BOTH, eval_freq=1, eval_parallel=True)
    refused("not from files", policies={"first": "PPO"}, data="nowhere")
    refused("policies_to_train", run="PPO", policies_to_train=["first"])
    exp = several(tmp_path / "r")
    finish(exp, 1)
    for call in (lambda: exp.policy(np.zeros(4)), lambda: exp.evaluate(1), lambda: exp.serve(block=False)):
        with pytest.raises(BrayError, match=r"several policies, say which one: .*models/first"):
            call()
    with pytest.raises(BrayError, match="keeps its policies"):
        Experiment.resume(tmp_path / "r", policies={"third": "PPO"})
    with pytest.raises(BrayError, match="one policy of a run"):
        Experiment.resume(tmp_path / "r" / "models" / "first")
    code, out = bray_cli("train", "--env", "CartPole-v1", "--policies", "PPO", "--steps", 10)
    assert code != 0
    assert "expected NAME=ALGO, such as first=PPO,second=DQN" in " ".join(out.split())
    code, out = bray_cli("train", "--env", "CartPole-v1", "--policies", "first=PPO,first=DQN")
    assert code != 0
    assert "two policies are called first (PPO and DQN): rename one" in " ".join(out.split())


def test_what_a_policy_of_a_foreign_run_names_is_imported_with_trust_alone(tmp_path, monkeypatch):
    finish(several(tmp_path / "r"), 1)
    file = tmp_path / "r" / "models" / "first" / "config.yaml"
    text = file.read_text()
    file.write_text(re.sub(r"custom_model: null.*", "custom_model: nowhere_at_all:Net", text))
    assert file.read_text() != text
    for call in (Experiment.resume, lambda path: Experiment.load(path / "models" / "first")):
        with pytest.raises(BrayError, match="asks to import and run 'nowhere_at_all:Net'"):
            call(tmp_path / "r")


def test_leaves_of_states_are_by_policy(tmp_path):
    finish(several(tmp_path / "r"), 1)
    one = RunDir.open(tmp_path / "r" / "models" / "second").load_checkpoint()
    assert tree.length(one.state["arrays"]["observations"]["obs"]) > 0
    assert one.name == "second"


def test_an_unknown_algorithm_is_told_with_the_policy_that_has_it(tmp_path):
    for run in (None, "PPO"):
        with pytest.raises(UnknownName, match=r"unknown algorithm 'DQNN' \(of policy second; .*Did you mean 'DQN'"):
            Experiment(run=run, env="CartPole-v1", policies={"first": "PPO", "second": "DQNN"}, path=tmp_path / "r")


def test_policies_of_a_file_and_of_the_command_line_are_not_mixed(tmp_path, bray_cli):
    """A policy's own settings in the file would be gone without a word."""
    file = tmp_path / "two.yaml"
    file.write_text("env: CartPole-v1\npolicies: {first: PPO, second: {run: DQN, config: {lr: 0.1}}}\n")
    words = ["train", "-f", file, "--print-config"]
    code, said = bray_cli(*words, "--policies", "second=DQN")
    assert code == 2
    assert f"--policies and {file} both say which policies there are (the latter first, second)" in said
    code, said = bray_cli(*words, "policies.second.run=C51")
    assert code == 0
    assert re.search(r"run.policies.second.run +C51", said)
    assert re.search(r"run.policies.second.config.lr +0.1", said)
    assert bray_cli("train", "--env", "CartPole-v1", "--policies", "a=PPO,b=DQN", "--print-config")[0] == 0
