"""Opening a session: `bray.init`."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from bray.cluster.local import LocalCluster
from bray.cluster.protocol import Cluster
from bray.cluster.ray_get import let_ray_get_take_ours
from bray.cluster.ray_start import start_ray
from bray.cluster.session import ClusterSession, SessionInfo, current, enter, shutdown
from bray.errors import ConfigError, UnknownName
from bray.log_format import log_format
from bray.remote.master.handle import start_master
from bray.rundir import RunDir, log_to

logger = logging.getLogger("bray.remote")


def init(
    project: str = "./runs/default",
    trial: str = "default",
    cluster: str = "ray",
    metrics_port: int = 0,
    numbers_in: str = "",
    shared: bool = False,
    **ray_kwargs: Any,
) -> ClusterSession:
    """Open the session of a project's trial; its run directory is `project/trial`. An existing trial is resumed.

    cluster       "ray": components are processes of a Ray cluster, the one that runs here (or at RAY_ADDRESS), else one
                  that is started on this machine (RAY_ADDRESS=local always starts one); "local": they are objects of
                  this process
    metrics_port  of the session's Prometheus page on this machine; 0 = any free one (bray.log says which)
    numbers_in    folder of the run directory for rows (result.jsonl, progress.csv), TensorBoard's events and bray.log,
                  created where it is missing; '' = the run directory itself
    shared        only `numbers_in` is written to, so that a session that serves may run while another one trains in the
                  same run directory
    ray_kwargs    go to `ray.init`
    """
    if (opened := current()) is not None:
        here = opened.info
        if (here.project, here.trial, opened.cluster.kind) == (str(project), str(trial), cluster):
            return opened
        raise ConfigError(
            f"this process is in the session {here.project}/{here.trial} already: bray.shutdown() ends it"
        )
    if cluster not in ("ray", "local"):
        raise UnknownName("cluster", str(cluster), ("ray", "local"))
    if cluster == "local" and ray_kwargs:
        raise ConfigError(f"cluster='local' has no Ray to give these to: {', '.join(ray_kwargs)}")
    path = Path(os.path.abspath(Path(project) / trial))
    resumed = (path / "checkpoints").exists()
    if shared:
        (path / numbers_in).mkdir(parents=True, exist_ok=True)
        run = RunDir(path / numbers_in)
        run.lock("serving")
    else:
        run = RunDir.create(path, resume=resumed)
    try:
        info = SessionInfo(
            str(project),
            str(trial),
            str(path),
            numbers=str(path / numbers_in),
            token=secrets.token_bytes(16),
            one_machine=True,
            modules=tuple(os.path.abspath(p) for p in sys.path),
            log_format=log_format(),
        )
        info, made = _make_cluster(cluster, info, ray_kwargs)
        let_ray_get_take_ours()
        opened = enter(ClusterSession(info, made, run=run, log=log_to(Path(info.numbers) / "bray.log")))
    except BaseException:
        run.close()
        raise
    if resumed:
        logger.info("resuming %s", path)
    try:
        start_master(opened, metrics_port)
    except BaseException:
        shutdown()
        raise
    return opened


def _make_cluster(kind: str, info: SessionInfo, ray_kwargs: dict[str, Any]) -> tuple[SessionInfo, Cluster]:
    if kind == "local":
        return info, LocalCluster()
    connected, started = start_ray(info.namespace, ray_kwargs)
    from bray.cluster.ray import RayCluster  # it imports Ray

    info = info._replace(one_machine=started)
    return info, RayCluster(info, connected)
