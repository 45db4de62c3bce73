"""benchmarks/code_size.py counts what a reader reads, and finds imports that go in a circle."""

from pathlib import Path

import pytest

from benchmarks.code_size import count_file, find_cycles, import_graph

SOURCE = '''"""Two words."""

x = f(1)  # why so

class A:
    """A doc."""

    field: int = 3
    """What it is."""
'''


def test_comments_and_docstrings_are_documentation_the_rest_are_tokens():
    tokens, words = count_file(SOURCE)
    assert tokens == 14, "x = f(1), class A:, field: int = 3"
    assert words == 2 + 2 + 2 + 3


def test_a_string_that_is_a_value_is_code():
    assert count_file('x = "three words here"\n') == (3, 0)


@pytest.mark.parametrize(
    "inner",
    [
        "from bray import b",
        "import bray.b",
        "def f():\n    from bray.b import g",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from bray.b import B",
    ],
    ids=["from the package", "plain", "inside a function", "for types only"],
)
def test_every_kind_of_import_counts_for_a_cycle(tmp_path: Path, inner: str):
    package = tmp_path / "bray"
    package.mkdir()
    for name, text in {"__init__": "", "a": inner, "b": "import bray.c", "c": "from bray import a, d", "d": ""}.items():
        (package / f"{name}.py").write_text(text)
    assert find_cycles(import_graph(tmp_path)) == [["bray.a", "bray.b", "bray.c"]]
    (package / "c.py").write_text("import json")
    assert find_cycles(import_graph(tmp_path)) == []
