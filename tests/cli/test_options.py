"""Options are declared once: the command line, `bray schema`, JSON Schema and the pages tell the same."""

import dataclasses
import inspect
import json
import re
import runpy
from pathlib import Path

import jsonschema
import pytest

from bray.algos import ALGORITHMS
from bray.cli.flags import load
from bray.cli.main import main
from bray.cli.options import COMMANDS
from bray.cli.schema import SECTIONS, find_sections
from bray.config import options, to_plain
from bray.config.schema import json_schema, rows

DOCS = Path(__file__).parents[2] / "docs"
TABLES = runpy.run_path(str(DOCS / "tables.py"))
NAMES = [*SECTIONS, *ALGORITHMS]


def section(name):
    return find_sections(name)[name]


@pytest.mark.parametrize("page", TABLES["PAGES"], ids=lambda p: p.name)
def test_the_tables_of_the_pages_are_those_of_the_code(page):
    """After a change of an option: `python docs/tables.py`."""
    assert TABLES["updated"](page.read_text()) == page.read_text()


def test_the_pages_explain_every_key_of_every_section():
    told = {name for page in TABLES["PAGES"] for name in re.findall(r"<!-- keys: (\S+) -->", page.read_text())}
    assert told == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_has_a_text(name):
    assert [row.key for row in rows(section(name)) if not row.doc] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_text(command):
    assert COMMANDS[command][0].__doc__


@pytest.mark.parametrize("name", NAMES)
def test_bray_schema_prints_every_key(name, capsys):
    assert main(["schema", name]) == 0
    out = capsys.readouterr().out
    assert "Config(" not in out
    assert all(re.search(rf"(?m)^{re.escape(row.key)}\b", out) for row in rows(section(name)))


@pytest.mark.parametrize("name", ["run", "env", "model", "live", "serve.service", "serve.model", *ALGORITHMS])
def test_the_defaults_fit_the_json_schema(name, capsys):
    assert main(["schema", name, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    made = made.get(name, made)  # several sections have the name `model`
    jsonschema.Draft202012Validator.check_schema(made)
    jsonschema.validate(to_plain(section(name)()), made)
    assert set(made["properties"]) == set(options(section(name)))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"no_such_key": 1}, made)


def test_a_part_of_a_name_finds_all_that_have_it(capsys):
    assert list(find_sections("serve")) == ["serve.service", "serve.model"]
    assert list(find_sections("model")) == ["model", "serve.model", "launch.model"]
    assert main(["schema", "ppo"]) == 0
    assert capsys.readouterr().out.startswith("PPO: ")
    assert main(["schema", "bufer"]) == 2
    assert "Did you mean 'buffer'?" in capsys.readouterr().err


def test_limits_and_nested_keys_are_told():
    @dataclasses.dataclass
    class Empty: ...

    told = {row.key: row for row in rows(section("env"))}
    assert told["num_envs"][1:3] == ("a whole number > 0", "1")
    assert told["atari.frame_skip"].default == "4"
    assert json_schema(Empty)["properties"] == {}


@pytest.mark.parametrize(
    ("handle", "declared"),
    [
        ("bray.remote.model.handle:RemoteModel", "bray.remote.model.options:ModelOptions"),
        ("bray.remote.buffer.handle:RemoteBuffer", "bray.remote.buffer.options:BufferOptions"),
        ("bray.remote.actor.handle:RemoteActor", "bray.remote.actor.options:ActorOptions"),
        ("bray.remote.trainer.handle:RemoteTrainer", "bray.remote.trainer.options:RankOptions"),
    ],
)
def test_python_and_launch_files_have_the_same_defaults(handle, declared):
    """A handle that spells out its arguments has the defaults of its launch keys."""
    parameters = inspect.signature(load(handle)).parameters
    for name, option in options(load(declared)).items():
        if name in parameters:
            assert parameters[name].default == option.default, name
        else:
            assert any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()), name
