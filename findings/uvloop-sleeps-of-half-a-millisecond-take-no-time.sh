#!/usr/bin/env bash
# One would guess: asyncio.sleep lasts at least as long as it is told, so that a task that asks every 0.5 ms whether something is done leaves the
# processor to others; and a timeout of 0.5 ms lets the loop look at its sockets once.
# CPython 3.11, 3.13 and 3.14 do so. uvloop 0.23.0 on 3.11 rounds to whole milliseconds, and a half to zero: sleep only goes once round the loop, so that such a
# task takes a whole core, and a timeout ends what awaits data before the loop has looked at its sockets.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check uvloop==0.23.0
cat > expected <<'OUT'
asyncio: 200 sleeps of 0.5 ms last 100 ms: True; sock_recv with a timeout of 0.5 ms: received
uvloop: 200 sleeps of 0.5 ms last 100 ms: False; sock_recv with a timeout of 0.5 ms: TimeoutError
OUT
cat > program.py <<'PY'
import asyncio
import socket
import time

import uvloop


async def sleeps():
    start = time.monotonic()
    for _ in range(200):
        await asyncio.sleep(0.0005)
    return time.monotonic() - start >= 0.1


async def receive():
    """Receive what comes between the start of sock_recv and the next time that the loop looks at its sockets."""
    loop = asyncio.get_running_loop()
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    loop.call_soon(sender.send, b"1")
    try:
        async with asyncio.timeout(0.0005):
            await loop.sock_recv(receiver, 1)
        return "received"
    except TimeoutError as error:
        return type(error).__name__


async def main():
    return f"200 sleeps of 0.5 ms last 100 ms: {await sleeps()}; sock_recv with a timeout of 0.5 ms: {await receive()}"


for name, library in {"asyncio": asyncio, "uvloop": uvloop}.items():
    print(f"{name}: {library.run(main())}")
PY
env/bin/python program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
