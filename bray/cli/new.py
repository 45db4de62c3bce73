"""`bray new NAME`: a project of one's own, copied from the template."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import sys
from importlib import resources
from pathlib import Path

from bray.cli.options import New
from bray.cli.show import say
from bray.errors import ConfigError

_RUN_MARKS = ("bray.log", "result.jsonl", "master.state")
"""A directory with one of these is what a run left, not a part of a template."""
_SKIPPED = ("__pycache__", ".git", ".pytest_cache", ".ruff_cache", ".mypy_cache")


def new(options: New) -> int:
    """Copy the template to ./NAME; the names of its modules become the project's own."""
    name, template = options.name, options.template
    target = Path.cwd() / name
    _check_name(name, target)
    source = shipped() if template is None else template.resolve()
    if not (source / "__init__.py").is_file():
        raise ConfigError(
            f"--template: expected the directory of a project (a Python package), {template} has no __init__.py"
        )
    old = "template" if template is None else source.name
    try:
        shutil.copytree(source, target, ignore=_left_out)
        for file in target.rglob("*"):
            if file.is_file():
                _rename(file, old, name)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    files = sorted(p.name for p in target.glob("*.yaml"))
    say(f"made {name}/ with {', '.join(files) or 'no launch file'}", "bold")
    if files:
        first = "rl.yaml" if "rl.yaml" in files else files[0]
        say(f"look at it:   bray launch --config {name}/{first} --check")
        say(f"train:        bray launch --config {name}/{first}")
    if (target / "gamecore.py").is_file():
        say(f"play:         python -m {name}.gamecore --help")
    if (target / "README.md").is_file():
        say(f"what is what: {name}/README.md", "dim")
    return 0


def shipped() -> Path:
    """The template: in a checkout a link to `template/`, in an installed Bray a copy of it."""
    return Path(str(resources.files("bray"))) / "_template"


def _check_name(name: str, target: Path) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        better = re.sub(r"\W", "_", name).strip("_")
        hint = f", like {better!r}" if better.isidentifier() and not keyword.iskeyword(better) else ""
        raise ConfigError(f"{name!r} cannot be the name of a Python package: letters, digits and '_'{hint}")
    if target.exists():
        what = "directory" if target.is_dir() else "file"
        raise ConfigError(f"{name}: there is such a {what} here already; choose another name")
    if name in sys.stdlib_module_names or name in sys.modules or importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"{name!r} is a Python package that is there already, and imports would mix the two up; choose another name"
        )


def _left_out(directory: str, names: list[str]) -> list[str]:
    """What does not belong into a project: caches, and what runs left."""
    runs = [n for n in names if any((Path(directory) / n / mark).exists() for mark in _RUN_MARKS)]
    return [*runs, *(n for n in names if n in _SKIPPED or n.endswith(".pyc"))]


def _rename(file: Path, old: str, new: str) -> None:
    """Module paths, imports, file paths and the project's name; the word in a sentence stays."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    name = re.escape(old)
    # template.models.model1, template/rl.yaml, runs/template
    changed = re.sub(rf"(?<![\w.-]){name}(?=[./:]\w)|(?<=\w/){name}(?![\w-])", new, text)
    changed = re.sub(rf"(?m)((?:^|[>\s`])(?:from|import|package|-m)\s+){name}(?=[\s.;`]|$)", rf"\g<1>{new}", changed)
    changed = re.sub(rf"(?m)^(project:\s*(?:\S*/)?){name}(?![\w-])", rf"\g<1>{new}", changed)
    if changed != text:
        file.write_text(changed, encoding="utf-8")
