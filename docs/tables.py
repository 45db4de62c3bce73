"""Writes the tables of keys, metrics and scores into the pages: `python docs/tables.py`.

A table of keys stands between `<!-- keys: NAME -->` and `<!-- end -->`; NAME is what `bray schema NAME` takes. Metrics
stand after `<!-- metrics -->`, what was measured of an algorithm (`bray/presets/scores.json`) after
`<!-- scores: NAME -->`.
`tests/cli/test_options.py` fails when a page is stale.
"""

import re
from pathlib import Path
from typing import Any

from bray.cli.schema import find_sections
from bray.config.runfile import scores, settings
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
    text = re.sub(
        r"(?s)<!-- scores: (\S+) -->\n.*?<!-- end -->",
        lambda found: f"<!-- scores: {found[1]} -->\n{score_table(found[1])}\n<!-- end -->",
        text,
    )
    return re.sub(r"(?s)<!-- keys: (\S+) -->\n.*?<!-- end -->", table, text)


def score_table(algo: str) -> str:
    """What `python -m benchmarks.learning` recorded of an algorithm."""
    rows = [s for s in scores() if s["run"] == algo]
    if not rows:
        return "Not measured yet."
    lines = [f"| {' | '.join(score_cells(s))} |" for s in rows]
    head = "| case | environment, settings | score | reached | steps | seconds, one core | date |"
    return "\n".join([SCORES_TEXT, "", head, "|---|---|---|---|---|---|---|", *lines])


SCORES_TEXT = """`python -m benchmarks.learning CASE` makes a row; the curves are in \
[benchmarks/learning](../../benchmarks/learning/README.md). Score: mean of 10 greedy evaluation episodes (Taxi-v4: 100).
Steps and seconds to it: interquartile mean over the seeds [95 % bootstrap interval]."""


def score_cells(s: dict[str, Any]) -> list[str]:
    """One case as the cells of a row."""
    sign = "<" if s["must"].endswith("below") else ">="
    unfinished = f", {s['unfinished']} unfinished" if s["unfinished"] else ""
    return [
        f"`{s['case']}`",
        f"{s['env']}, {settings(s)}",
        f"{sign} {s['target']} within {s['within']:,}",
        f"{s['passed']} of {s['seeds']}{unfinished}",
        *(f"{a:,.0f} [{low:,.0f}, {high:,.0f}]" for a, low, high in (s["steps"], s["seconds"])),
        s["date"],
    ]


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page.read_text()))
