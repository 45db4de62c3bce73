"""Numbers, pictures and shared values of a session: said in any process, kept by one."""

from bray.remote.master.handle import (
    Metric,
    add_graph,
    add_histogram,
    add_image,
    add_scalar,
    add_video,
    flush,
    get,
    log,
    logger,
    merge,
    numbers,
    query,
    register,
    set,
    set_tensorboard_step,
)

__all__ = [
    "Metric",
    "add_graph",
    "add_histogram",
    "add_image",
    "add_scalar",
    "add_video",
    "flush",
    "get",
    "log",
    "logger",
    "merge",
    "numbers",
    "query",
    "register",
    "set",
    "set_tensorboard_step",
]
