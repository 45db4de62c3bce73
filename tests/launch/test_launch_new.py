"""`bray new`: a project of one's own, from a checkout and from an installed wheel."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bray.cli.main import main
from bray.launch.graph import load
from bray.launch.modules import check_modules

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_the_project_is_the_template_under_another_name(here, capsys):
    assert main(["new", "spacegame"]) == 0
    out = capsys.readouterr().out
    assert "bray launch --config spacegame/rl.yaml --check" in out
    copied = {p.relative_to(here / "spacegame") for p in (here / "spacegame").rglob("*") if p.is_file()}
    assert {Path("__init__.py"), Path("rl.yaml"), Path("sl.yaml"), Path("sl_rl.yaml")} <= copied
    assert not any("__pycache__" in p.parts for p in copied)
    for file in copied:
        try:
            text = (here / "spacegame" / file).read_text()
        except UnicodeDecodeError:
            continue
        assert not re.search(r"\btemplate[./]\w|(from|import) template\b|^project: template\b", text, re.M), file


@pytest.mark.parametrize("name", ["rl.yaml", "sl.yaml", "sl_rl.yaml"])
def test_the_copys_launch_files_are_right(name, here):
    project = f"copied_{name.partition('.')[0]}_{os.getpid()}"
    assert main(["new", project]) == 0
    for mode in ("train", "deploy"):
        graph = load(here / project / name, mode=mode)
        check_modules(graph)
        assert graph.notes == ()
    assert sys.modules[f"{project}"].__file__.startswith(str(here))


def test_words_stay_and_names_change(here):
    (here / "mine").mkdir()
    (here / "mine" / "__init__.py").write_text("")
    (here / "mine" / "x.yaml").write_text(
        "project: mine  # a gold mine\nm: {kind: model, module: mine.models.m, env: 'mine.games:Grid'}\nother: "
        "determine.x undermine/y\n"
    )
    (here / "mine" / "a.py").write_text(
        "import mine\nfrom mine import b\nfrom mine.c import d  # this mine is mine. Yes\n"
    )
    (here / "mine" / "README.md").write_text(
        "Run `python -m mine.game` or bray launch --config mine/x.yaml --project runs/mine. A mine.\n"
    )
    (here / "mine" / "t.proto").write_text("package mine;\n")
    (here / "mine" / "picture.png").write_bytes(b"\x89PNG\xffmine.x")
    (here / "mine" / "trial1").mkdir()
    (here / "mine" / "trial1" / "bray.log").write_text("what a run left")
    assert main(["new", "yours", "--template", "mine"]) == 0
    assert {p.name for p in (here / "yours").iterdir()} == {
        "__init__.py", "x.yaml", "a.py", "README.md", "t.proto", "picture.png",
    }  # fmt: skip
    assert (here / "yours" / "x.yaml").read_text() == (
        "project: yours  # a gold mine\nm: {kind: model, module: yours.models.m, env: 'yours.games:Grid'}\nother: "
        "determine.x undermine/y\n"
    )
    assert (here / "yours" / "a.py").read_text() == (
        "import yours\nfrom yours import b\nfrom yours.c import d  # this mine is mine. Yes\n"
    )
    assert (here / "yours" / "README.md").read_text() == (
        "Run `python -m yours.game` or bray launch --config yours/x.yaml --project runs/yours. A mine.\n"
    )
    assert (here / "yours" / "t.proto").read_text() == "package yours;\n"
    assert (here / "yours" / "picture.png").read_bytes() == b"\x89PNG\xffmine.x"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-game", "'my-game' cannot be the name of a Python package: letters, digits and '_', like 'my_game'"),
        ("3d", "'3d' cannot be the name of a Python package"),
        ("class", "'class' cannot be the name of a Python package"),
        ("../up", "'../up' cannot be the name of a Python package"),
        ("json", "'json' is a Python package that is there already"),
        ("numpy", "'numpy' is a Python package that is there already"),
        ("bray", "'bray' is a Python package that is there already"),
        ("there", "there: there is such a directory here already; choose another name"),
        ("file", "file: there is such a file here already"),
    ],
)
def test_a_name_that_cannot_be(name, said, here, capsys):
    (here / "there").mkdir()
    (here / "file").write_text("")
    before = sorted(here.iterdir())
    assert main(["new", name]) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
    assert sorted(here.iterdir()) == before


def test_a_template_that_is_none(here, capsys):
    (here / "empty").mkdir()
    assert main(["new", "x", "--template", "empty"]) == 2
    assert (
        "--template: expected the directory of a project (a Python package), empty has no __init__.py"
        in capsys.readouterr().err
    )


def test_an_installed_bray_has_the_template(here):
    """A wheel is built from a copy of the checkout, and used without it."""
    source = here / "checkout"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    skipped = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "bray", source / "bray", symlinks=True, ignore=skipped)
    shutil.copytree(ROOT / "template", source / "template", ignore=skipped)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = source.glob("*.whl")
    shutil.unpack_archive(wheel, here / "installed", "zip")
    assert not (here / "installed" / "template").exists()  # a package of that name is the user's
    run = (
        "import sys, bray; assert bray.__file__.startswith(sys.argv[1]); from bray.cli.main import main; "
        "sys.exit(main(['new', 'mine']))"
    )
    env = {**os.environ, "PYTHONPATH": str(here / "installed")}
    subprocess.run(
        [sys.executable, "-c", run, str(here / "installed")], cwd=here, env=env, check=True, capture_output=True
    )
    checked = {p.relative_to(ROOT / "template") for p in (ROOT / "template").rglob("*.py")}
    assert {p.relative_to(here / "mine") for p in (here / "mine").rglob("*.py")} == checked
    assert (here / "mine" / "rl.yaml").is_file()
