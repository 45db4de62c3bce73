"""`bray gateway`: an HAProxy configuration for services on several machines."""

from __future__ import annotations

from bray.cli.options import Gateway
from bray.cli.show import facts, say
from bray.errors import ConfigError

HAPROXY = """\
# Written by `bray gateway`: one address for the game services of several machines.
# A session's requests go to the same machine: the `session` header is hashed, consistently, so that a machine that is
# added or lost moves only its own share of the sessions. Inside a machine Bray's workers forward to the owner.
global
    maxconn {maxconn}
defaults
    mode http
    timeout connect 5s
    timeout client {timeout}s
    timeout server {timeout}s
    timeout http-keep-alive {timeout}s
    option http-keep-alive
    # the service's limits per client address: serve with trusted_proxies=ADDRESS_OF_THIS_PROXY
    option forwardfor
    option redispatch 0
frontend games
    bind {bind}
    # older clients say game_id
    acl old_client req.hdr(game_id) -m found
    http-request set-header session %[req.hdr(game_id)] if !{{ req.hdr(session) -m found }} old_client
    use_backend stateless if !{{ req.hdr(session) -m found }}
    default_backend sessions
backend sessions
    balance hdr(session)
    hash-type consistent
    option httpchk GET /readyz
{servers}
backend stateless
    balance leastconn
    option httpchk GET /readyz
{servers}
"""


def gateway(options: Gateway) -> int:
    """Write an HAProxy configuration for services on several machines."""
    lines = []
    for i, server in enumerate(options.servers):
        address, _, admin = server.partition(",")
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdigit() or (admin and not admin.isdigit()):
            raise ConfigError(f"expected HOST:PORT or HOST:PORT,ADMIN_PORT, got {server!r}")
        check = admin or str(int(port) + 1)
        lines.append(f"    server bray{i} {host}:{port} check port {check} inter 1s fall 2 rise 1")
    bind, out = options.bind, options.config
    if not bind.rpartition(":")[2].isdigit():
        raise ConfigError(f"--bind: expected *:PORT or HOST:PORT, got {bind!r}")
    listed, timeout = "\n".join(lines), f"{options.timeout:g}"
    text = HAPROXY.format(bind=bind, servers=listed, maxconn=options.maxconn, timeout=timeout)
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)
        facts([("written", out)])
        say(f"check it: haproxy -c -f {out}    run it: haproxy -f {out}", "dim")
    return 0
