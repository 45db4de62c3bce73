"""Writes the tables of keys and metrics into the pages: `python docs/tables.py`.

A table of keys stands between `<!-- keys: NAME -->` and `<!-- end -->`; NAME is what `bray schema NAME` takes. Metrics stand after `<!-- metrics -->`.
`tests/test_options.py` fails when a page is stale.
"""

import re
from pathlib import Path

from bray.cli.schema import find_sections
from bray.config.schema import markdown
from bray.serving.metrics import HELP

PAGES = sorted(Path(__file__).parent.rglob("*.md"))


def updated(text: str) -> str:
    """A page with its tables as the code has them."""

    def table(found: re.Match[str]) -> str:
        (section,) = [cls for name, cls in find_sections(found[1]).items() if name == found[1]]
        return f"<!-- keys: {found[1]} -->\n{markdown(section)}\n<!-- end -->"

    metrics = "\n".join(
        ["| metric | meaning |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in HELP.items())]
    )
    text = re.sub(r"(?s)<!-- metrics -->\n.*?<!-- end -->", f"<!-- metrics -->\n{metrics}\n<!-- end -->", text)
    return re.sub(r"(?s)<!-- keys: (\S+) -->\n.*?<!-- end -->", table, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page.read_text()))
