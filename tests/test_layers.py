"""The table of docs/architecture.md as data: who may import whom, and what `import bray` may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.code_size import find_cycles, import_graph

PACKAGE = Path(__file__).parent.parent / "bray"

# Each layer may import the layers before it (and modules of its own subpackage).
LAYERS = [
    {"_version", "errors", "limited_log", "log_format", "tree", "spec", "schedules", "compiled"},
    {"config", "metrics", "rundir", "capture", "optim", "target", "distributions", "figures", "video"},
    {"act", "rl", "nn", "envs", "data", "inference", "serving", "client"},
    {"algos"},
    {"train"},
    {"cluster"},
    {"remote"},
    {"service"},
    {"experiment", "fake"},
    {"launch", "web"},
    {"cli"},
    {"__main__"},
]
# Within the first two layers and among the siblings of the third: who may use whom.
WITHIN = {
    "errors": {"_version"},
    "tree": {"errors"},
    "spec": {"errors"},
    "schedules": {"errors"},
    "rundir": {"metrics"},
    "figures": {"rundir", "metrics"},
    "metrics": {"rundir"},
    "inference": {"capture"},
    "serving": {"act", "inference"},
    "target": {"optim"},
}
ONLY_IN = {
    "ray": {"cluster"},
    "onnxruntime": {"inference"},
    "matplotlib": {"figures"},
    "typer": {"cli"},
    "httptools": {"serving"},
    "uvloop": {"serving", "cluster"},
}
RAY_TRAIN = PACKAGE / "remote" / "trainer" / "handle.py"
"""The only file outside of `cluster` that imports Ray: it hands its ranks to Ray Train."""
NO_TORCH = {
    "act",
    "distributions",
    "data",
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
    code = "import sys, bray; print([m for m in ('torch', 'ray', 'onnxruntime', 'matplotlib', 'gymnasium', 'numba') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_public_names_exist():
    import bray

    for name in bray.__all__:
        assert getattr(bray, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = bray.nothing
