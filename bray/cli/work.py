"""`bray work`: a worker of a training that exchanges files in a shared directory."""

from __future__ import annotations

import signal
from typing import Any

from bray.cli.options import Work
from bray.cli.show import log_shown, say, trusting
from bray.errors import StoppedBySignal
from bray.train.exchange_worker import ExchangeWorker


@log_shown("info")
def work(options: Work) -> int:
    """Play until the training ends; returns the exit code."""

    def leave(number: int, frame: Any) -> None:
        raise StoppedBySignal(128 + number)

    signal.signal(signal.SIGTERM, leave)  # as Ctrl-C: the seat is free at once
    worker = ExchangeWorker(options.path, trusting(options), options.wait_s)
    worker.run()
    say(f"the training has ended; {worker.pieces:,} pieces were played for it")
    return 0
