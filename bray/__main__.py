"""`python -m bray` is `bray`."""

import sys

from bray.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
