"""One width for all printed tables, one thread per test process (two processes share two cores), and a place of its own for what is trusted."""

import atexit
import os
import shutil
import tempfile

os.environ["COLUMNS"] = "160"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # no Ray but those that tests start

if "BRAY_TESTS_STATE" not in os.environ:  # the processes that tests start inherit it
    os.environ["XDG_STATE_HOME"] = os.environ["BRAY_TESTS_STATE"] = tempfile.mkdtemp(prefix="bray-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
