"""`python -m bray.launch` is `bray launch`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "launch")
    runpy.run_module("bray", run_name="__main__", alter_sys=True)
