"""A session on one machine is reached from that machine alone: where its processes listen."""

import os
from pathlib import Path

import bray
from tests.ray_for_tests import opened
from tests.remote_actor_for_tests import Who

LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def family(pid):
    """A process and all that it has started."""
    out, parents = {pid}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    while new := {p for p, parent in parents.items() if parent in out} - out:
        out |= new
    return out


def inodes(pid):
    for fd in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]


def listening(pids):
    """(process name, address, port) of every TCP socket on which these processes listen."""
    owner = {inode: pid for pid in pids for inode in inodes(pid)}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in owner:
                address, port = fields[1].split(":")
                yield Path(f"/proc/{owner[fields[9]]}/comm").read_text().strip(), address, int(port, 16)


def test_all_processes_of_a_session_listen_on_loopback(tmp_path):
    with opened(tmp_path):
        actor = bray.RemoteActor(port=0, num_workers=1, actors_per_worker=2)
        actor.serve(Who)
        found = sorted(set(listening(family(os.getpid()))))
        assert len({name for name, *_ in found}) >= 3, found  # Ray's own, and ours
        assert [row for row in found if row[1] not in LOOPBACK] == []
