"""`bray algos`: the list, what one is, which fit an environment; and what is said where one does not fit."""

import re

import gymnasium as gym
import pytest
from envs_for_tests import Scripted

from bray.algos import ALGORITHMS, get_algo, make_policy, takers
from bray.cli import advise
from bray.cli.algos import ACTIONS, PROBE, action_spaces, papers
from bray.cli.main import main
from bray.config.runfile import presets, scores, settings
from bray.diagnosis.advise import SUITED, Advice, Facts, rank
from bray.envs.agent_games import Matrix
from bray.errors import BrayError, ConfigError
from bray.experiment import Experiment
from bray.nn.catalog import ModelConfig
from bray.spec import EnvSpec, Space

CARTPOLE = EnvSpec("CartPole-v1", PROBE.observation, ACTIONS["discrete"])
OTHER = EnvSpec("Other-v0", PROBE.observation, ACTIONS["discrete"])


def test_algos_lists_presets_with_how_many_seeds_reach_their_score(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["algos"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}
    assert set(ALGORITHMS) <= lines.keys()
    for s in scores():
        if settings(s) == "preset" and s["must"] == "reach":
            assert f"{s['env']} {s['passed']}/{s['seeds']}" in lines[s["run"]]
    for name, env, _ in presets():
        assert env in lines[name]


def test_algos_explains_one(capsys):
    assert main(["algos", "dqn"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("DQN · learns from replay · discrete")
    assert re.search(r"papers +Mnih 2015; van Hasselt 2016; Wang 2016; Schaul 2016\npresets +CartPole-v1", out)
    score = next(s for s in scores() if s["case"] == "dqn-cartpole")
    steps = re.escape("{:,.0f} [{:,.0f}, {:,.0f}]".format(*score["steps"]))
    assert re.search(rf"CartPole-v1 +preset +475 +{score['passed']} of {score['seeds']} +{steps} ", out)
    assert re.search(r"target_period +250 ", out)
    assert main(["algos", "test_cli_algos:Unmeasured"]) == 0
    assert re.search(r"presets +none\nscores +not measured\n", capsys.readouterr().out)


class Unmeasured:
    """Somebody's own."""

    Config, make_model, Policy, Learner = (
        getattr(get_algo("PPO"), n) for n in ("Config", "make_model", "Policy", "Learner")
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_names_its_paper(name):
    assert re.search(r"\d{4}", papers(get_algo(name)))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_space_that_the_policy_takes_is_taken_by_model_and_learner(name):
    """The Policy alone is asked; the others must agree with it."""
    algo, config = get_algo(name), get_algo(name).Config()
    model = ModelConfig(**{**getattr(algo, "DEFAULTS", {}).get("model", {}), "fcnet_hiddens": (4,)})
    taken = action_spaces(algo)
    assert taken
    for kind, space in ACTIONS.items():
        spec = EnvSpec("probe", PROBE.observation, space)
        if name == "MAPPO":  # its critic sees a global state
            seen = Space("dict", parts=(PROBE.observation,), names=("obs",))
            spec = EnvSpec("probe", seen, space, global_state=PROBE.observation)
        elif name == "AlphaZero":  # it searches from the moves of a game
            moves = Space("box", (9,), "int16", -1, 8)
            seen = Space("dict", parts=(PROBE.observation, moves), names=("obs", "moves"))
            spec = EnvSpec("probe", seen, space)
        try:
            algo.Learner(config, spec, algo.make_model(config, spec, model), model, seed=0, record=False)
        except BrayError:
            assert kind not in taken


# --- spaces that do not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ACTIONS)
def test_whoever_does_not_take_a_space_names_those_that_do(kind):
    spec = EnvSpec("Game-v0", PROBE.observation, ACTIONS[kind])
    fitting = takers(spec)
    assert fitting == [name for name in ALGORITHMS if kind in action_spaces(get_algo(name))]
    for name in set(ALGORITHMS) - set(fitting):
        algo = get_algo(name)
        with pytest.raises(
            ConfigError, match=rf"Game-v0 has .*\. Algorithms that take these spaces: {re.escape(', '.join(fitting))}$"
        ):
            make_policy(algo, algo.Config(), spec)


def test_training_says_it_at_construction(capsys):
    assert main(["train", "--run", "SAC", "--env", "CartPole-v1", "--steps", "10"]) == 2
    err = capsys.readouterr().err
    assert "needs a Box action space, CartPole-v1 has discrete" in err
    assert "take these spaces: PPO, A2C, " in err
    assert "Traceback" not in err


def test_a_preset_for_another_version_is_said(caplog):
    Experiment("DQN", "CartPole-v0")
    (said,) = [r.message for r in caplog.records]
    assert (
        said
        == "DQN has no preset for CartPole-v0, only for CartPole-v1, which is another environment: training with the "
        "defaults"
    )
    caplog.clear()
    Experiment("DQN", "CartPole-v1")
    Experiment("DQN", "CartPole-v0", use_preset=False)
    Experiment("DQN", "Acrobot-v1")
    assert not caplog.records


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"init_map": {"core": "core"}}, r"run\.init_map=.* has no effect without run\.init_from"),
        ({"init_partial": True}, r"run\.init_partial=true \(python\) has no effect without run\.init_from"),
        (
            {"recurrent": "gru"},
            r"model\.recurrent='gru' \(python\) has no effect without model\.use_lstm: set that too",
        ),
        ({"num_gpus_per_worker": 0.5, "num_workers": 2}, r"run\.num_gpus_per_worker=0\.5 .*is for workers on a Ray"),
        ({"num_cpus_per_worker": 2}, r"run\.num_cpus_per_worker=2\.0 .*is for workers on a Ray cluster"),
        ({"object_store_mb": 100}, r"run\.object_store_mb=100 \(python\) is for workers on a Ray cluster"),
        (
            {"object_store_mb": 100, "address": "10.0.0.1:6379", "num_workers": 1},
            r"run\.object_store_mb=100 .* and run\.address='10\.0\.0\.1:6379' .*exclude each other",
        ),
        *(
            ({"step_timeout": 3, "vector": form}, rf"env\.step_timeout=3\.0 .*env\.vector={form} .*vector=subprocess")
            for form in ("inprocess", "native", "envpool")
        ),
    ],
)
def test_options_that_would_do_nothing_are_named_with_what_they_belong_to(keys, said):
    with pytest.raises(ConfigError, match=said):
        Experiment("PPO", "CartPole-v1", **keys)
    Experiment("PPO", "CartPole-v1", use_lstm=True, recurrent="gru")
    Experiment("R2D2", "CartPole-v1", recurrent="gru")  # it has a memory by itself
    Experiment("PPO", "CartPole-v1", num_cpus_per_worker=0.5, object_store_mb=100, cluster="ray", num_workers=1)
    Experiment("PPO", "CartPole-v1", step_timeout=3.0)


def test_a_step_of_an_environment_object_cannot_be_timed():
    with pytest.raises(ConfigError, match=r"given as an object stays in this process.*give its class"):
        Experiment("PPO", gym.make("CartPole-v1"), step_timeout=3.0, use_preset=False)


def test_options_that_exclude_each_other_are_both_named():
    with pytest.raises(ConfigError) as e:
        Experiment("DQN", "CartPole-v1", target_period=100)
    assert "algo.tau=0.01 (preset cartpole_dqn:13) and algo.target_period=100 (python) exclude each other" in str(
        e.value
    )
    assert "(tau=null, target_period=250)" in str(e.value)
    assert Experiment("DQN", "CartPole-v1", target_period=100, tau=None).config["algo"].target_period == 100
    with pytest.raises(ConfigError, match=r"algo.adapt_alpha=false \(python\) and algo.target_entropy=-3.0 \(python\)"):
        Experiment("SAC", "Pendulum-v1", adapt_alpha=False, target_entropy=-3.0)


# --- which one --------------------------------------------------------------------------------------------------------


def measured(run, steps, seconds, passed=5):
    score = {
        "run": run,
        "env": "CartPole-v1",
        "must": "reach",
        "preset": True,
        "target": 475,
        "passed": passed,
        "seeds": 5,
        "within": 100_000,
    }
    return score | {"steps": [steps, steps, steps], "seconds": [seconds, seconds, seconds]}


@pytest.fixture
def known(monkeypatch):
    found = [measured("PPO", 20_000.0, 4.0), measured("C51", 16_000.0, 50.0), measured("DQN", 100.0, 1.0, passed=4)]
    monkeypatch.setattr(advise, "scores", lambda: found)


def ranked(spec, speed, returns):
    return rank(Facts(speed, returns), advise.candidates(spec))


def names(*facts):
    return [advice.name for advice in ranked(*facts)]


def test_what_was_measured_comes_first(known):
    fast, slow = (ranked(CARTPOLE, speed, (9.0, 20.0)) for speed in (1e5, 100.0))
    assert fast[0] == Advice("PPO", "measured here: 475 on 5 of 5 seeds, 20,000 steps, 4 s")
    assert slow[0].name == "C51"  # the fewest steps
    assert fast[-1] == Advice("DQN", "measured here: 475 on 4 of 5 seeds only, 100,000 steps")
    assert "SAC" not in names(CARTPOLE, 100.0, ())


def test_the_speed_of_steps_decides_without_a_measurement():
    fast, slow = (ranked(OTHER, speed, (1.0, 2.0)) for speed in (1e5, 100.0))
    cheap, dear = "uses each step once; they are cheap (100,000 a second)", "uses each step many times; they are slow"
    assert fast[0] == Advice("PPO", f"forgiving of its settings, a good first try; {cheap}")
    assert slow[0] == Advice("DQN", f"action values by replay; {dear} (100 a second)")
    assert len({a.why for a in fast}) == len(fast)  # each has a reason of its own
    assert set(SUITED) == set(ALGORITHMS)
    box = EnvSpec("Arm-v0", PROBE.observation, Space("box", (2,), "float32", -1.0, 1.0))
    assert names(box, 100.0, ())[0] == "SAC"
    lander = EnvSpec("LunarLander-v3", PROBE.observation, ACTIONS["discrete"])
    best = [[a.name for a in ranked(lander, speed, ())[:2]] for speed in (1e5, 100.0)]
    assert best == [
        ["PPO", "Rainbow"],
        ["Rainbow", "PPO"],
    ]  # both were measured: the one in less time, the other in fewer steps


def test_exploration_comes_first_where_chance_makes_no_difference():
    told = ranked(OTHER, 1e5, (-200.0,) * 8)
    exploring = [a for a in told if "explores with " in a.why]
    assert exploring == told[: len(exploring)]
    others = told[len(exploring) :]
    assert "PQN" in [a.name for a in others]
    assert all(a.why.startswith("no option that explores, and chance finds nothing here; ") for a in others)
    assert not [a for a in ranked(OTHER, 1e5, (-200.0, -100.0) * 4) if "chance finds nothing" in a.why]
    dqn, rainbow = (next(a for a in told if a.name == name) for name in ("DQN", "Rainbow"))
    assert dqn in exploring
    assert dqn.options in ("noisy=true", "rnd=1")
    assert rainbow.options == "" or "noisy" not in rainbow.why  # its layers are noisy already


def test_settings_that_were_measured_are_told_to_be_set():
    car = EnvSpec("MountainCar-v0", PROBE.observation, ACTIONS["discrete"])
    first = ranked(car, 1e5, (-200.0,) * 8)[0]
    assert first.name == "PPO"
    assert re.match(r"measured here: -110 on 3 of 3 seeds, [\d,]+ steps, [\d,]+ s, with .*rnd=3.0", first.why)
    assert "rnd=3.0" in first.options


def test_an_environment_is_looked_at(capsys):
    assert main(["algos", "--for", "CartPole-v1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"observations +box \[4\]\nactions +discrete \(2\)\nspeed +[\d,]+ steps a second", out)
    assert re.search(r"^first +\w+ +measured here: 475", out, re.M)
    assert re.search(r"^Do not fit: SAC\b", out, re.M)
    assert re.search(r"^bray train --run \w+ --env CartPole-v1$", out, re.M)


def test_a_random_play_that_changes_nothing_is_sparse(capsys):
    assert main(["algos", "--for", "test_cli_algos:Same"]) == 0
    out = capsys.readouterr().out
    assert "random returns  6 ... 6: nothing that chance did made a difference" in out
    assert re.search(r"--env test_cli_algos:Same (noisy=true|rnd=1)$", out, re.M)


class Same(Scripted):
    """Three steps, whatever is done."""

    def __init__(self):
        super().__init__(terminate_at=3)


def test_a_name_and_an_environment_are_one_too_many(capsys):
    assert main(["algos", "PPO", "--for", "CartPole-v1"]) == 2
    assert "takes a name (PPO) or --for CartPole-v1, not both" in capsys.readouterr().err


def test_what_fits_a_game_of_several_agents_is_said_of_one_of_them(capsys):
    assert main(["algos", "--for", "bray.envs.agent_games:Nim"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "of several agents; below what one of them sees and does" in out
    assert "first PPO" in out
    assert "chance finds nothing" not in out  # what one wins the other loses
    assert "MAPPO" not in out.partition("Do not fit")[0]  # its critic needs a global state
    assert "bray train --run PPO --env bray.envs.agent_games:Nim" in out


def test_agents_that_differ_are_told_apart(capsys):
    assert main(["algos", "--for", "test_cli_algos:Uneven"]) == 0
    row, column = (" ".join(x.split()) for x in capsys.readouterr().out.split("\ncolumn\n"))
    assert "actions discrete (2)" in row
    assert "random returns -1 ... 0" in row  # what one wins the other loses
    assert "actions discrete (3)" in column
    assert "random returns 0 ... 1" in column
    learn = r"--policies row=[\w-]+,column=[\w-]+ --policy-mapping row=row,column=column"
    assert re.search(f"bray train --env test_cli_algos:Uneven {learn}", column)
    assert "--run" not in row


class Uneven(Matrix):
    """The column player has a choice more."""

    def __init__(self):
        super().__init__([[[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]]])
