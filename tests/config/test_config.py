"""Configs: where values come from, which are refused, and what the messages say."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings, strategies as st
from pydantic import Field

from bray import config
from bray.config import ConfigSource, load_config, load_yaml, options, parse_assignments, parse_json, resolve
from bray.errors import ConfigError, UnknownName


class Mode(enum.Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True)
class Cnn:
    filters: tuple[int, ...] = (16, 32)
    """Filters per layer."""
    activation: Literal["relu", "tanh"] = "relu"


@dataclass(frozen=True)
class Model:
    fcnet_hiddens: tuple[int, ...] = (64, 64)
    """Widths of the layers."""
    cnn: Cnn = Cnn((8,))
    head: Cnn | None = None
    custom_options: dict[str, Any] = field(default_factory=lambda: {"depth": 2})
    name: str = "default"


@dataclass(frozen=True)
class Env:
    id: str = "CartPole-v1"
    env_config: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    video: Path | None = None
    mode: Mode = Mode.SAFE


@dataclass(frozen=True)
class Algo:
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Step size.

    Of the optimizer."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.99
    steps: Annotated[int, Field(ge=1)] = 128
    epsilon: float | dict[str, Any] = 0.1
    clip: float | None = 0.2
    dueling: bool = False
    name: str = "PPO"

    def check(self) -> None:
        if self.steps == 13:
            raise ConfigError("steps: expected a lucky number, got 13")


SECTIONS = {"env": Env, "model": Model, "algo": Algo}


def resolved(*sources: ConfigSource) -> config.Resolved:
    return resolve(SECTIONS, sources)


def args(*items: str) -> ConfigSource:
    return parse_assignments(items)


def message(*sources: ConfigSource) -> str:
    with pytest.raises(ConfigError) as e:
        resolved(*sources)
    return str(e.value)


# --- sources


def test_defaults_alone():
    r = resolved()
    assert r["algo"] == Algo()
    assert r["model"] == Model()
    assert set(r.provenance.values()) == {"default"}


def test_yaml_values_and_lines(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "# a run\nlr: 1e-3\nenv:\n  id: Acrobot-v1\n  env_config:\n    level: 3\nmodel:\n  fcnet_hiddens:\n    - "
        "32\n    - 32\n"
    )
    r = resolved(load_yaml(path))
    assert r["algo"].lr == 0.001  # PyYAML alone reads the text '1e-3'
    assert r["env"] == Env("Acrobot-v1", {"level": 3})
    assert r["model"].fcnet_hiddens == (32, 32)
    assert r.provenance["algo.lr"] == f"{path}:2"
    assert r.provenance["env.env_config.level"] == f"{path}:6"
    assert r.provenance["model.fcnet_hiddens"] == f"{path}:8"
    assert r.provenance["algo.gamma"] == "default"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E6", 1e6),
        ("-.5", -0.5),
        ("2.", 2.0),
        ("1_000", 1000),
        ("010", 10),
        ("0x10", 16),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("no", "no"),
        ("null", None),
        ("~", None),
        ("e3", "e3"),
        ("1e", "1e"),
        ("ALE/Pong-v5", "ALE/Pong-v5"),
        ("my.module:Env", "my.module:Env"),
        ("[1, 2.5, x]", [1, 2.5, "x"]),
        ("{a: 1, b: [2]}", {"a": 1, "b": [2]}),
        ("'64'", "64"),
        ("*.png", "*.png"),
        ("a=b", "a=b"),
    ],
)
def test_values_on_the_command_line(text, value):
    got = parse_assignments([f"key={text}"]).values["key"]
    assert got == value
    assert type(got) is type(value)


def test_later_sources_win_and_say_so(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("algo: {lr: 0.1, gamma: 0.5, steps: 7}\n")
    preset = ConfigSource("preset cartpole_ppo", {"algo": {"steps": 5, "clip": 0.3}})
    r = resolved(
        preset, load_yaml(path), parse_json('{"lr": 0.2}'), args("lr=0.3"), ConfigSource("python", {"dueling": True})
    )
    assert r["algo"] == Algo(lr=0.3, gamma=0.5, steps=7, clip=0.3, dueling=True)
    assert r.provenance["algo.lr"] == "lr=0.3 on the command line"
    assert r.provenance["algo.gamma"] == f"{path}:1"
    assert r.provenance["algo.clip"] == "preset cartpole_ppo"
    assert r.provenance["algo.dueling"] == "python"


def test_dotted_keys_work_in_every_source(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("algo.lr: 0.5\nmodel:\n  cnn.activation: tanh\n")
    r = resolved(load_yaml(path), parse_json('{"env.env_config": {"level": 1}}'), args("env.env_config.speed.max=2"))
    assert r["algo"].lr == 0.5
    assert r["model"].cnn.activation == "tanh"
    assert r["env"].env_config == {"level": 1, "speed": {"max": 2}}
    assert r.provenance["algo.lr"] == f"{path}:1"
    assert r.provenance["model.cnn.activation"] == f"{path}:3"
    assert r.provenance["env.env_config.level"] == "--config"


def test_dict_fields_merge_deeply_over_their_default():
    r = resolved(
        ConfigSource("python", {"model": {"custom_options": {"a": {"b": 1, "c": 2}}}}),
        args("custom_options.a.b=9", "custom_options.z=[1]"),
    )
    assert r["model"].custom_options == {"depth": 2, "a": {"b": 9, "c": 2}, "z": [1]}
    assert r.provenance["model.custom_options.depth"] == "default"
    assert r.provenance["model.custom_options.a.b"] == "custom_options.a.b=9 on the command line"
    assert r.provenance["model.custom_options.a.c"] == "python"


def test_a_number_or_dict_is_replaced_by_a_dict_and_changed_by_a_dotted_key():
    linear = {"kind": "linear", "start": 1.0, "end": 0.1, "steps": 90}
    exp = {"kind": "exp", "start": 0.9, "end": 0.1, "decay": 100}
    assert (
        resolved(ConfigSource("python", {"epsilon": linear}), ConfigSource("python", {"epsilon": exp}))["algo"].epsilon
        == exp
    )
    r = resolved(ConfigSource("python", {"epsilon": linear}), args("epsilon.steps=50"))
    assert r["algo"].epsilon == linear | {"steps": 50}
    assert resolved(ConfigSource("python", {"epsilon": linear}), args("epsilon=0.5"))["algo"].epsilon == 0.5


def test_nested_dataclasses_start_from_the_default_of_their_field():
    r = resolved(args("cnn.activation=tanh", "head.filters=[1]"))
    assert r["model"].cnn == Cnn((8,), "tanh")
    assert r["model"].head == Cnn((1,), "relu")
    assert resolved(args("head=null"))["model"].head is None


def test_sources_are_not_changed_by_resolving():
    values = {"env": {"env_config": {"a": [1]}}}
    r = resolved(ConfigSource("python", values), args("env.env_config.b=2"))
    r["env"].env_config["a"].append(2)
    assert values == {"env": {"env_config": {"a": [1]}}}


def test_kinds_that_stand_for_others():
    r = resolved(args("steps=1e3", "lr=1", "video=out/a.mp4", "mode=fast", "id=007", "clip=null"))
    assert r["algo"].steps == 1000
    assert type(r["algo"].steps) is int
    assert type(r["algo"].lr) is float
    assert r["env"].video == Path("out/a.mp4")
    assert r["env"].mode is Mode.FAST
    assert r["env"].id == "007"  # typed on the command line for a text field
    assert r["algo"].clip is None
    assert resolved(ConfigSource("python", {"lr": np.float32(0.5), "steps": np.int64(3)}))["algo"] == Algo(
        lr=0.5, steps=3
    )


def test_config_files_by_suffix(tmp_path):
    (tmp_path / "c.json").write_text('{"lr": 0.5}')
    (tmp_path / "c.py").write_text("base = 0.25\nconfig = {'lr': base * 2}\n")
    (tmp_path / "c.yml").write_text("lr: 0.5\n")
    (tmp_path / "d.py").write_text("x = 1\n")
    for name in ("c.json", "c.py", "c.yml"):
        assert resolved(load_config(tmp_path / name))["algo"].lr == 0.5
    with pytest.raises(ConfigError, match="expected a dict named 'config'"):
        load_config(tmp_path / "d.py")
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(tmp_path / "e.yaml")
    with pytest.raises(ConfigError, match=r"expected a \.yaml, \.json or \.py file"):
        load_config(tmp_path / "e.toml")


# --- refusals


def test_unknown_keys_are_answered_the_same_everywhere(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("algo:\n  lr: 0.1\n  gama: 0.9\n")
    for source, place, key in [
        (load_yaml(path), f"{path}:3", "algo.gama"),
        (parse_json('{"algo": {"gama": 0.9}}'), "--config", "algo.gama"),
        (args("algo.gama=0.9"), "algo.gama=0.9 on the command line", "algo.gama"),
        (args("gama=0.9"), "gama=0.9 on the command line", "gama"),
        (ConfigSource("python", {"gama": 0.9}), "python", "gama"),
    ]:
        with pytest.raises(UnknownName) as e:
            resolved(source)
        assert str(e.value).startswith(f"unknown key {key!r} ({place}). Did you mean ")
        assert key.replace("gama", "gamma") in str(e.value)


def test_unknown_keys_of_nested_and_of_other_sections():
    assert "Did you mean 'model.cnn.filters'" in message(args("model.cnn.filter=[1]"))
    assert "model.cnn.filters" in message(args("filters=[1]"))
    assert "Did you mean 'model.cnn.activation'" in message(args("mdl.cnn.activation=relu"))
    assert "'algo.steps'" in message(args("model.steps=3"))
    assert "Known: " in message(args("zzzzzzzz=1"))


def test_a_bare_key_of_two_sections_is_ambiguous():
    text = message(args("name=x"))
    assert (
        text == "name (name=x on the command line): model and algo both have such a key; write model.name or algo.name"
    )


def test_a_key_given_in_two_spellings_is_refused():
    assert message(args("lr=1", "algo.lr=2")) == (
        "algo.lr (lr=1 on the command line): given twice, also at algo.lr=2 on the command line"
    )
    assert resolved(args("lr=1", "lr=2"))["algo"].lr == 2  # the same spelling: the last one, as in any shell


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("lr=abc", "algo.lr ({}): expected a number > 0, got 'abc'"),
        ("lr='1e-3'", "algo.lr ({}): expected a number > 0, got '1e-3'"),
        ("lr=-1", "algo.lr ({}): expected a number > 0, got -1"),
        ("lr=true", "algo.lr ({}): expected a number > 0, got true"),
        ("lr=.nan", "algo.lr ({}): expected a finite number, got nan"),
        ("lr=.inf", "algo.lr ({}): expected a finite number, got inf"),
        ("lr=null", "algo.lr ({}): expected a number > 0, got null"),
        ("lr=[1]", "algo.lr ({}): expected a number > 0, got [1]"),
        ("gamma=1.5", "algo.gamma ({}): expected a number >= 0 and <= 1, got 1.5"),
        ("steps='64'", "algo.steps ({}): expected a whole number >= 1, got '64'"),
        ("steps=true", "algo.steps ({}): expected a whole number >= 1, got true"),
        ("steps=6.5", "algo.steps ({}): expected a whole number >= 1, got 6.5"),
        ("dueling=1", "algo.dueling ({}): expected true or false, got 1"),
        ("dueling=yes", "algo.dueling ({}): expected true or false, got 'yes'"),
        ("epsilon=x", "algo.epsilon ({}): expected a number or keys and values, got 'x'"),
        ("clip=x", "algo.clip ({}): expected a number or null, got 'x'"),
        ("fcnet_hiddens=64", "model.fcnet_hiddens ({}): expected a list of whole numbers, got 64"),
        ("fcnet_hiddens=[64,a]", "model.fcnet_hiddens[1] ({}): expected a whole number, got 'a'"),
        (
            "cnn.activation=relus",
            "model.cnn.activation ({}): expected 'relu' or 'tanh', got 'relus'. Did you mean 'relu'?",
        ),
        ("cnn=3", "model.cnn ({}): expected keys and values, got 3"),
        ("mode=quick", "env.mode ({}): expected 'fast' or 'safe', got 'quick'"),
        ("env_config=3", "env.env_config ({}): expected keys and values, got 3"),
        ("video=3", "env.video ({}): expected a path or null, got 3"),
        ("model=3", "model ({}): model is a section: expected keys and values, got 3"),
    ],
)
def test_wrong_values_say_expected_and_got(item, expected):
    place = f"{item} on the command line"
    assert message(args(item)) == expected.format(place)


def test_wrong_values_in_a_file_name_the_line(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("algo:\n  gamma: 0.9\n  lr: abc\n")
    assert message(load_yaml(path)) == f"algo.lr ({path}:3): expected a number > 0, got 'abc'"


def test_all_mistakes_are_reported_together():
    text = message(args("lr=abc", "gama=1", "steps=0", "name=x"), parse_json('{"dueling": 3}'))
    assert text.startswith("5 mistakes in the config:\n")
    for part in ("algo.lr (", "'gama'", "algo.steps (", "name (", "algo.dueling (--config)"):
        assert part in text


def test_checks_of_the_dataclass_are_reported_with_their_section():
    assert message(args("steps=13")) == "algo: steps: expected a lucky number, got 13"


def test_a_field_without_default_must_be_given():
    @dataclass
    class Needs:
        size: int

    Needs.__annotations__["size"] = int
    with pytest.raises(ConfigError, match=r"needs\.size: expected a whole number, none was given"):
        resolve({"needs": Needs}, [])
    assert resolve({"needs": Needs}, [args("size=3")])["needs"].size == 3


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("lr: 1\nlr: 2\n", ":2: the key 'lr' is given twice"),
        ("lr: [1\n", ": not YAML: "),
        ("- 1\n", "expected keys and values, got [1]"),
        ("a: !!python/object/apply:os.system ['true']\n", ":1: expected plain data"),
        ("a: !!python/name:os.system\n", ":1: expected plain data"),
        ("a: !!set {x}\n", ":1: expected plain data"),
        ("? [1]\n: 2\n", "expected a key that is text"),
        ("a: &x [*x]\n", "nested 64 deep"),
        ("a: &x\n  <<: *x\n", "nested without end"),
        ("x: *nothing\n", "undefined alias"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        ("a: '\x00'\n", "not YAML"),
        ("<<: 3\n", "expected a mapping"),
    ],
)
def test_broken_yaml_is_refused(tmp_path, text, error):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as e:
        load_yaml(path)
    assert error in str(e.value)
    assert str(e.value).startswith(str(path))


def test_yaml_that_unfolds_without_end_is_refused(tmp_path):
    path = tmp_path / "laughs.yaml"
    path.write_text(
        "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    )
    with pytest.raises(ConfigError, match="a config may hold 100000 values"):
        load_yaml(path)


def test_yaml_merge_keys(tmp_path):
    path = tmp_path / "merge.yaml"
    path.write_text("model: &m\n  fcnet_hiddens: [1]\n  name: a\nalgo:\n  <<: {gamma: 0.5, lr: 0.5}\n  lr: 0.25\n")
    r = resolved(load_yaml(path))
    assert (r["algo"].gamma, r["algo"].lr) == (0.5, 0.25)
    assert r.provenance["algo.lr"] == f"{path}:6"


def test_not_utf8_and_directories_are_refused(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "x.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_yaml(path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"lr": }', "not JSON: Expecting value at line 1, column 8"),
        ("[1]", "expected keys and values, got [1]"),
        ('{"lr": 1, "lr": 2}', "the key 'lr' is given twice"),
        ('{"lr": NaN}', "has no NaN"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_broken_json_is_refused(text, error):
    with pytest.raises(ConfigError) as e:
        parse_json(text)
    assert error in str(e.value)
    assert str(e.value).startswith("--config: ")


@pytest.mark.parametrize("item", ["lr", "=3", "a..b=3", ".a=3", "key=[1", "key={a"])
def test_broken_assignments_are_refused(item):
    with pytest.raises(ConfigError) as e:
        parse_assignments([item])
    assert item in str(e.value)


def test_an_assignment_below_a_plain_value_is_refused():
    with pytest.raises(ConfigError, match=r"'epsilon' was set to 0\.5 before, it has no keys"):
        parse_assignments(["epsilon=0.5", "epsilon.steps=3"])


def test_an_unknown_section_of_a_resolved_config():
    with pytest.raises(UnknownName, match="Did you mean 'model'"):
        resolved()["modl"]


# --- what comes out


def test_to_yaml_says_where_each_value_came_from_and_loads_back(tmp_path):
    r = resolved(args("lr=1e-5", "env_config.level=3", "env.id=ALE/Pong-v5", "model.name='1e-3'", "video=a b.mp4"))
    text = r.to_yaml()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "lr: 1e-05 # lr=1e-5 on the command line" in lines
    assert "gamma: 0.99 # default" in lines
    assert "level: 3 # env_config.level=3 on the command line" in lines
    assert "id: ALE/Pong-v5 # env.id=ALE/Pong-v5 on the command line" in lines
    path = tmp_path / "config.yaml"
    path.write_text(text)
    again = resolved(load_yaml(path))
    assert again.sections == r.sections
    assert again["model"].name == "1e-3"  # text that looks like a number stays text


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), plain, max_size=3))
@example({"A\n": None, "b": "c\n"})
def test_any_env_config_survives_config_yaml(values):
    r = resolved(ConfigSource("python", {"env": {"env_config": values}}))
    data, _ = config.read_yaml(r.to_yaml(), "config.yaml")
    assert resolved(ConfigSource("config.yaml", data))["env"].env_config == values


def test_to_dict_is_json_and_keeps_what_cannot_be_json_as_names():
    r = resolved(ConfigSource("python", {"env_config": {"make": Cnn, "size": np.int64(3), "grid": np.eye(2)}}))
    data = json.loads(json.dumps(r.to_dict()))
    assert data["env"]["env_config"] == {"make": f"{__name__}:Cnn", "size": 3, "grid": [[1, 0], [0, 1]]}
    assert data["env"]["mode"] == "safe"
    assert data["model"]["cnn"] == {"filters": [8], "activation": "relu"}


def test_table_has_every_value_and_its_source():
    from rich.console import Console

    r = resolved(args("lr=1e-3"))
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(r.table())
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["algo.lr", "0.001", "lr=1e-3", "on", "the", "command", "line"] in rows
    assert ["algo.gamma", "0.99", "default"] in rows
    assert len(rows) == len(r.rows()) + 1


def docs_of(cls):
    return {name: option.doc for name, option in options(cls).items() if option.doc}


def test_the_text_of_a_key_is_the_docstring_under_its_field():
    assert docs_of(Algo) == {"lr": "Step size. Of the optimizer."}
    assert docs_of(Cnn) == {"filters": "Filters per layer."}

    @dataclass(frozen=True)
    class More(Cnn):
        width: int = 3
        """How wide."""

    More.__annotations__["width"] = int
    assert docs_of(More) == {"filters": "Filters per layer.", "width": "How wide."}


def test_our_yaml_reads_what_pyyaml_writes():
    data = {"a": [1, 2.5, 1e-7, -1e30, None, True, "x", "1e-3", "2024-01-01", ""], "b": {"c": "yes: no"}}
    read, _ = config.read_yaml(yaml.safe_dump(data), "x")
    assert read["a"][:7] == data["a"][:7]
    assert read["b"] == data["b"]


def test_import_is_light():
    code = (
        "import sys, bray.config, bray.metrics, bray.rundir, bray.figures, bray.video; print([m for m in ('torch', "
        "'matplotlib', 'tensorboard', 'imageio') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_long_number_is_read_in_linear_time():
    """The pattern of a number took quadratic time to find that it is none: hours for a file of a megabyte."""
    text = "1" * 500_000
    assert config.read_yaml(f"a: {text}x\nb: {text}.{text}y\nc: 1_0.5e3", "test")[0] == {
        "a": f"{text}x",
        "b": f"{text}.{text}y",
        "c": 10_500.0,
    }
