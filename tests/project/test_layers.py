"""The picture of docs/architecture.md as data: who may import whom, and what `import bray` may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.code_size import find_cycles, import_graph

PACKAGE = Path(__file__).parents[2] / "bray"

# Each layer may import the layers before it (and modules of its own subpackage).
LAYERS = [
    {
        "_version",
        "after_import",
        "compiled",
        "errors",
        "http_server",
        "limited_log",
        "log_format",
        "named",
        "tree",
        "spec",
        "schedules",
    },
    {"config", "metrics", "rundir", "capture", "optim", "target", "diagnosis", "distributions", "figures", "video"},
    {"act", "rl", "nn", "envs", "data", "inference", "serving", "client", "league"},
    {"algos"},
    {"train"},
    {"cluster"},
    {"remote"},
    {"service"},
    {"experiment", "fake"},
    {"launch", "search", "web"},
    {"cli", "compat"},
    {"__main__"},
]
# Within the first two layers and among the siblings of the third: who may use whom.
WITHIN = {
    "errors": {"_version"},
    "http_server": {"errors"},
    "tree": {"errors"},
    "spec": {"errors"},
    "named": {"errors"},
    "schedules": {"errors"},
    "rundir": {"metrics"},
    "diagnosis": {"metrics"},
    "figures": {"rundir", "metrics"},
    "metrics": {"rundir"},
    "inference": {"capture"},
    "nn": {"rl"},
    "serving": {"act", "inference"},
    "target": {"optim"},
}
ONLY_IN = {
    "ray": {"cluster"},
    "onnxruntime": {"inference"},
    "matplotlib": {"figures"},
    "typer": {"cli"},
    "optuna": {"search"},
    "httptools": {"serving"},
    "uvloop": {"serving", "cluster"},
}
RAY_TRAIN = PACKAGE / "remote" / "trainer" / "handle.py"
"""The only file outside of `cluster` that imports Ray: it hands its ranks to Ray Train."""
NO_TORCH = {
    "act",
    "diagnosis",
    "distributions",
    "data",
    "league",
    "serving",
    "client",
    "service",
    "fake",
    "rundir",
    "spec",
    "tree",
    "config",
    "errors",
}
"""Units that a service without torch is made of."""


def files():
    return sorted(p for p in PACKAGE.rglob("*.py"))


def unit(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield (f"{node.module}.{alias.name}" if node.module == "bray" else node.module), node.lineno


def level(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    mine = unit(path)
    if mine == "__init__":
        return
    for name, line in imports(path):
        root, *rest = name.split(".")
        if root == "bray" and rest:
            other = rest[0]
            assert any(other in layer for layer in LAYERS), f"{path.name}:{line}: bray.{other} has no layer"
            allowed = other == mine or level(other) < level(mine) or other in WITHIN.get(mine, ())
            assert allowed, f"{path.relative_to(PACKAGE)}:{line} imports bray.{other}, which is not below bray.{mine}"
        assert mine != "client" or root != "bray" or rest[:1] == ["client"], (
            f"{path.name}:{line}: the client imports bray"
        )
        assert mine not in NO_TORCH or root != "torch", f"{path.name}:{line}: bray.{mine} works without torch"
        if root in ONLY_IN and (root, path) != ("ray", RAY_TRAIN):
            assert mine in ONLY_IN[root], (
                f"{path.relative_to(PACKAGE)}:{line}: {root} is used in {ONLY_IN[root] or 'no layer yet'} only"
            )


def test_no_two_files_import_each_other():
    """Neither at the top nor inside a function nor for type checking."""
    assert find_cycles(import_graph(PACKAGE.parent)) == []


def test_import_bray_stays_light():
    code = (
        "import sys, bray; print([m for m in ('torch', 'ray', 'onnxruntime', 'matplotlib', 'gymnasium', 'numba') if m "
        "in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_public_names_exist():
    import bray

    for name in bray.__all__:
        assert getattr(bray, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = bray.nothing


# --- tests ask the public surface -------------------------------------------------------------------------------------

NOT_OURS = {"_exit", "_C", "_replace", "_log_destroy_pending", "_repr_png_", "_repr_html_"}
NOT_OURS |= {"_config", "_resource_tracker", "_fd", "_shutdown", "_run_exitfuncs"}
"""Names of os, torch, namedtuple, asyncio and IPython that are public in spite of the underscore, or have no public
twin; those of multiprocessing, threading and atexit make a forked process (tests/forked.py) end as any other."""
FOR_OLDER_CODE = {"_tick"}
"""Client._tick, which programs written for an earlier client call."""
PATCHES = {"setattr", "delattr", "getattr", "hasattr"}


def is_private(name: object) -> bool:
    """Also of "bray.module._name", as monkeypatch takes it."""
    last = name.rpartition(".")[2] if isinstance(name, str) else ""
    return last.startswith("_") and not last.startswith("__") and last not in NOT_OURS | FOR_OLDER_CODE


def private_uses(source: str) -> list[int]:
    """Lines that read or write a private name of another object. A test class's own (`self._x`, `super()._x`) are its
    own affair."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of = node.value
            own = isinstance(of, ast.Name) and of.id in ("self", "cls")
            own |= isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"
            if not own:
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("bray", "tests"):
            lines += [node.lineno for alias in node.names if is_private(alias.name)]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in PATCHES:
            lines += [a.lineno for a in node.args if isinstance(a, ast.Constant) and is_private(a.value)]
    return lines


@pytest.mark.parametrize(
    "line",
    [
        "server._sessions",
        "server.sessions()._closed = True",
        "from bray.serving.http import _seen",
        "monkeypatch.setattr(module, '_WAIT', 1)",
        "monkeypatch.setattr('bray.data.ring._SEGMENT', 1)",
        "getattr(replay, '_tree')",
    ],
)
def test_a_look_at_a_private_name_is_found(line):
    assert private_uses(line) == [1]


@pytest.mark.parametrize("line", ["self._x = 1", "super()._x()", "a.__name__", "os._exit(1)", "server.sessions"])
def test_other_names_are_not(line):
    assert private_uses(line) == []


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].rglob("*.py")), ids=lambda p: p.name)
def test_tests_ask_the_public_surface(path):
    assert private_uses(path.read_text()) == [], (
        f"{path.name} touches private names in these lines: see what a user sees, or make the name public with a "
        "docstring"
    )
