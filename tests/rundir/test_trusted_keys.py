"""Every key of a run's config is harmless or under trust, and what is under trust does not happen without it."""

import re
import shutil
import typing

import pytest

from bray.algos import ALGORITHMS, get_algo
from bray.config.declare import all_keys, choices, members
from bray.envs.config import EnvConfig
from bray.errors import UnknownName
from bray.experiment import Experiment
from bray.experiment.places import home_of
from bray.nn.config import ModelConfig
from bray.rundir import UntrustedRun
from bray.rundir.trust import ASKS, HARMLESS, named
from bray.train.config import DataConfig, LiveConfig, RunConfig

SECTIONS = {"run": RunConfig, "env": EnvConfig, "model": ModelConfig, "live": LiveConfig, "data": DataConfig}
LIVE = {"obs": "float32[2]", "actions": 2, "rollout_length": 16, "minibatches": 1, "epochs": 1, "rows": 64}


def keys(cls):
    """The names of a section; those of a nested dataclass after it."""
    return {".".join(path) for path, _ in all_keys(cls)}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_a_config_is_harmless_or_under_trust(section):
    asks = {key.partition(".")[2] for key in ASKS if key.startswith(f"{section}.")}
    harmless = set(HARMLESS[section].split())
    declared = {key.partition(".")[0] for key in keys(SECTIONS[section])}
    assert asks | harmless == declared, (
        "a key that makes a process connect, listen, import, or read and write elsewhere belongs in ASKS of "
        "bray/rundir/trust.py, any other one in HARMLESS"
    )
    assert not asks & harmless


def is_number(hint):
    """Whether values are numbers, booleans, fixed words, lists of them, or schedules (`bray.schedules`)."""
    for kind in members(hint):
        origin, inner = typing.get_origin(kind), [a for a in typing.get_args(kind) if a is not ...]
        lists = origin in (tuple, list) and all(is_number(a) for a in inner)
        if not (kind in (int, float, bool) or choices(kind) or lists or kind == dict[str, typing.Any]):
            return False
    return True


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_have_numbers_alone(name):
    """So that no key of theirs can name anything, but for those under trust."""
    for path, option in all_keys(get_algo(name).Config):
        if f"algo.{'.'.join(path)}" in ASKS:
            continue
        assert is_number(option.hint), f"algo.{'.'.join(path)} may hold a text: classify it in bray/rundir/trust.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "run"
    exp = Experiment(run="PPO", env="CartPole-v1", path=path, use_preset=False, num_envs=2, rollout_length=8, epochs=2)
    exp.save()
    exp.close()
    return path


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    exp = Experiment(run="PPO", live=True, path=tmp_path_factory.mktemp("live") / "run", port=0, **LIVE)
    exp.save()
    exp.close()
    return exp.path


def foreign(run, tmp_path, **changed):
    """A copy of a run, as if it came from elsewhere, with other values of some keys."""
    path = shutil.copytree(run, tmp_path / "foreign", symlinks=True)
    text = re.sub(r" +#.*", "", (path / "config.yaml").read_text())
    for key, value in changed.items():
        text, n = re.subn(rf"(?m)^  {key}: .*$", f"  {key}: {value}", text)
        assert n == 1, key
    (path / "config.yaml").write_text(text)
    return path


CONNECTS = {
    "run.address": {"address": '"10.9.8.7:6379"', "num_workers": 1},
    "run.cluster": {"cluster": "ray", "num_workers": 1},
    "run.track": {"track": "[wandb]"},
    "env.env_config": {"env_config": '{xml_file: "/etc/passwd"}'},
}


@pytest.mark.parametrize("key", CONNECTS)
def test_a_foreign_run_connects_to_nothing_by_itself(key, made, tmp_path, monkeypatch):
    path = foreign(made, tmp_path, **CONNECTS[key])
    monkeypatch.setattr("bray.experiment.experiment.home_of", lambda run: pytest.fail("it is about to connect"))
    with pytest.raises(UntrustedRun, match=re.escape(key)):
        Experiment.resume(path)
    if key != "env.env_config":
        exp = Experiment.load(path)  # to be looked at, as by `bray eval`
        with pytest.raises(UntrustedRun, match=re.escape(key)):
            exp.fit({"env_steps_total": 10}, progress=False)


def test_trust_lets_it_connect(made, tmp_path, monkeypatch):
    path = foreign(made, tmp_path, **CONNECTS["run.address"])

    def connect(run):
        raise ConnectionError(f"to {run.address}")

    monkeypatch.setattr("bray.experiment.experiment.home_of", connect)
    with pytest.raises(ConnectionError, match=r"to 10\.9\.8\.7:6379"):
        Experiment.resume(path, trust=True)
    other = shutil.copytree(path, tmp_path / "other", symlinks=True)
    with pytest.raises(UntrustedRun, match=r"run\.address"):  # what was allowed was this directory's
        Experiment.resume(other)


def test_a_foreign_live_run_listens_nowhere_by_itself(live, tmp_path):
    for changed in ({}, {"host": "0.0.0.0"}, {"admin_names": "[evil.example]"}, {"token": "known-to-others"}):
        path = foreign(live, tmp_path, **changed)
        with pytest.raises(UntrustedRun, match=rf"live\.{next(iter(changed), 'host')}") as e:
            Experiment.resume(path)
        assert "known-to-others" not in str(e.value)
        shutil.rmtree(path)


def test_a_run_of_ones_own_goes_on(live):
    exp = Experiment.resume(live)
    assert exp.training.source.port
    exp.close()


def test_what_names_nothing_is_asked_for_nothing(made):
    exp = Experiment.load(made)
    assert named(exp.config.to_dict(), made) == []
    assert home_of(exp.config["run"]) is None


def test_callbacks_by_event_are_code_too():
    asked = named({"run": {"callbacks": [{"on_train_result": "evil:f"}, {"name": "evil:C", "x": 1}, "EarlyStopping"]}})
    assert [name for _, name, _ in asked] == ["evil:f", "evil:C"]


def test_a_section_that_is_no_section_is_refused(made, tmp_path):
    path = shutil.copytree(made, tmp_path / "run", symlinks=True)
    (path / "config.yaml").write_text("nothing: {a: 1}\n" + (path / "config.yaml").read_text())
    with pytest.raises(UnknownName):
        Experiment.resume(path)
