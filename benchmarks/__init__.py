"""Speed, learning curves and size, measured."""

import argparse
from collections.abc import Callable, Iterable


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """The `type` of an argument that names cases. `choices` would check an empty list of them, too, before Python
    3.12."""

    def known(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(names)}")
        return name

    return known
