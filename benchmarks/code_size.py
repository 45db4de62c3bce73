"""python -m benchmarks.code_size [--against fdd0939]: how much there is to read in bray/, and which files import each
other in a circle.

tokens         of the code, without comments and docstrings, so that neither long lines nor short documentation change
               the number
documentation  words of docstrings, comments and docs/*.md
cycles         groups of files that import each other, directly or through others; imports inside functions and under
               TYPE_CHECKING count
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.same_weights import BASE, ROOT, other_tree

_LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Size:
    files: int
    lines: int
    tokens: int
    documentation: int
    longest: int
    p90: int
    cycles: list[list[str]]


def measure(root: Path) -> Size:
    """The size of the package under `root`."""
    paths = source_files(root)
    lengths = [len(path.read_text().splitlines()) for path in paths]
    counts = [count_file(path.read_text()) for path in paths]
    pages = sum(len(page.read_text().split()) for page in (root / "docs").glob("*.md"))
    return Size(
        files=len(paths),
        lines=sum(lengths),
        tokens=sum(tokens for tokens, _ in counts),
        documentation=pages + sum(words for _, words in counts),
        longest=max(lengths),
        p90=round(statistics.quantiles(lengths, n=10)[-1]),
        cycles=find_cycles(import_graph(root)),
    )


def source_files(root: Path) -> list[Path]:
    """The template is a link to another folder and is not part of the package's code."""
    return sorted(path for path in (root / "bray").rglob("*.py") if "_template" not in path.parts)


def count_file(source: str) -> tuple[int, int]:
    """Code tokens, and words of docstrings and comments."""
    docstrings = {(node.lineno, node.col_offset) for node in _docstrings(ast.parse(source))}
    tokens = words = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.start in docstrings):
            words += len(token.string.strip("#\"' ").split())
        elif token.type not in _LAYOUT:
            tokens += 1
    return tokens, words


def _docstrings(module: ast.Module) -> Iterator[ast.expr]:
    """Strings that stand alone as a statement: under a def, a class, a module, or a field of a dataclass."""
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def import_graph(root: Path) -> dict[str, set[str]]:
    """For each file (`bray.envs.make`) those of the package that it imports."""
    names = {_module_name(path, root): path for path in source_files(root)}
    return {name: {found for found in _imports(path, names) if found != name} for name, path in names.items()}


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, names: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from bray.envs import make` asks the file make.py where there is one, otherwise the package.
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (
                name if name in names else node.module for name in inner if name in names or node.module in names
            )


def find_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of files each of which reaches all others of its group, the largest first."""
    reached = {name: _reachable(graph, name) for name in graph}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted((sorted(group) for group in groups if group), key=lambda group: (-len(group), group))


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


def show(sizes: dict[str, Size]) -> None:
    print("| | " + " | ".join(sizes) + " |\n|---|" + "--:|" * len(sizes))
    for field in ("files", "lines", "tokens", "documentation", "longest", "p90"):
        print(f"| {field} | " + " | ".join(f"{getattr(size, field):,}" for size in sizes.values()) + " |")
    print("| cycles | " + " | ".join(str(len(size.cycles)) for size in sizes.values()) + " |")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default=BASE, metavar="REV")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, other_tree(args.against, Path(folder)) as tree:
        sizes = {args.against: measure(tree), "here": measure(ROOT)}
    show(sizes)
    ours, theirs = sizes["here"], sizes[args.against]
    ratios = f"tokens {ours.tokens / theirs.tokens:.3f}, documentation {ours.documentation / theirs.documentation:.3f}"
    print(f"\nhere against {args.against}: {ratios}")
    for cycle in ours.cycles:
        print(f"cycle of {len(cycle)}: {', '.join(cycle)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
