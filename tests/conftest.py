"""One width for all printed tables, and one thread per test process: two processes share two cores."""

import os

os.environ["COLUMNS"] = "160"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # no Ray but those that tests start
