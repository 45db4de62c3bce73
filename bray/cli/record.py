"""`bray record`: what a person plays becomes files to learn from."""

from __future__ import annotations

from functools import partial

from bray.cli.data import make_place
from bray.cli.options import Record
from bray.cli.show import log_shown, say
from bray.data.files import EpisodeWriter
from bray.data.sources import given_spec
from bray.experiment.record import RecordActor
from bray.rundir import RunDir
from bray.serving.config import ServiceConfig
from bray.serving.workers import serve

_PER_FILE = 1  # a demonstration is worth more than a file: it is on disk when it has ended


@log_shown("info")
def record(options: Record) -> int:
    """Take games until a signal; returns the exit code."""
    spec = given_spec(options.obs, options.actions)
    config = ServiceConfig(
        host=options.host,
        port=options.port,
        use_tcp=True,
        workers=1,
        actors_per_worker=options.sessions,
        token_file=None if options.token_file is None else str(options.token_file),
    )
    make_place(options.out, spec)
    RunDir(options.out).write_spec(spec)

    def ready(port: int, admin_port: int) -> None:
        say(f"games that people play are recorded on {config.host}:{port}, to {options.out}; Ctrl-C ends it", "bold")

    with EpisodeWriter(options.out / "episodes", _PER_FILE) as writer:
        code = serve(partial(RecordActor, spec, writer), config, on_ready=ready)
    count = len(writer.paths)
    learn = f". Learn from {'it' if count == 1 else 'them'}: bray train --run BC --data {options.out}" if count else ""
    say(f"{count:,} episode{'' if count == 1 else 's'} recorded{learn}")
    return code
