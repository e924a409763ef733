#!/usr/bin/env bash
# One would guess: a reader that was forgotten on a closed socket concerns nobody, or add_reader on a new socket of that number raises; a
# reconnecting program that awaits sock_recv on its new connection gets the data.
# CPython 3.11 to 3.14: closing a socket while sock_recv waits leaves asyncio's table as it was. If the next socket gets the same number,
# sock_recv on it waits for data that is there, without an error. uvloop 0.23.0 keeps the closed socket's descriptor open: the number is
# not reused and the data arrives, but the old peer does not see the end of the connection.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check uvloop==0.23.0
cat > expected <<'OUT'
asyncio: same number True, old peer sees the end True, data on the new connection not delivered
uvloop: same number False, old peer sees the end False, data on the new connection delivered
OUT
cat > program.py <<'PY'
import asyncio
import socket

import uvloop


def connected():
    sockets = socket.socketpair()
    for end in sockets:
        end.setblocking(False)
    return sockets


def sees_end(end):
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False


async def receive(end):
    return await asyncio.get_running_loop().sock_recv(end, 1)


async def main():
    old, old_peer = connected()
    forgotten = asyncio.create_task(receive(old))
    await asyncio.sleep(0)
    number = old.fileno()
    old.close()
    new, new_peer = connected()
    waiting = asyncio.create_task(receive(new))
    await asyncio.sleep(0)
    new_peer.send(b"1")
    # What comes later on a third connection shows that the loop has polled since.
    third, third_peer = connected()
    for _ in range(10):
        later = asyncio.create_task(receive(third))
        await asyncio.sleep(0)
        third_peer.send(b"1")
        await later
    delivered = "delivered" if waiting.done() else "not delivered"
    result = f"same number {new.fileno() == number}, old peer sees the end {sees_end(old_peer)}"
    forgotten.cancel()
    waiting.cancel()
    await asyncio.wait([forgotten, waiting])
    return f"{result}, data on the new connection {delivered}"


for name, library in {"asyncio": asyncio, "uvloop": uvloop}.items():
    print(f"{name}: {library.run(main())}")
PY
env/bin/python program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
