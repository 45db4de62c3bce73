"""The gateway of the original's architecture: python relay.py PORT WORKER_PORT ... [--loop uvloop] [--read 65536]

A relay of bytes in asyncio streams: a connection is given to the next worker and stays with it, so a session does as
long as its game keeps the connection. Standard library only (and uvloop if asked for); port 0 takes a free one and the
first line of output says which.
"""

import argparse
import asyncio
import contextlib
import itertools
import socket


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(size):
            writer.write(data)
            await writer.drain()
    writer.close()


async def relay(port: int, workers: list[int], size: int) -> None:
    turns = itertools.cycle(workers)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up, down = await asyncio.open_connection("127.0.0.1", next(turns))
        for stream in (writer, down):
            stream.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(pump(reader, down, size), pump(up, writer, size))

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("workers", type=int, nargs="+")
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    parser.add_argument("--read", type=int, default=4096)
    args = parser.parse_args()
    run = asyncio.run
    if args.loop == "uvloop":
        import uvloop

        run = uvloop.run
    run(relay(args.port, args.workers, args.read))


if __name__ == "__main__":
    main()
