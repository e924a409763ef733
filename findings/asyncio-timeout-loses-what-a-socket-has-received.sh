#!/usr/bin/env bash
# One would guess: a timeout around sock_recv either gives the data or leaves them in the socket, where the next sock_recv finds them; so does
# one around sock_accept with a connection.
# CPython 3.11, 3.13, 3.14, and uvloop 0.23.0 on 3.11: if the loop was busy until both the data and the timer were due, the loop reads first and cancels then.
# The task gets TimeoutError, and the data are lost. The connection is lost, too, and its client sees the end. StreamReader keeps its data.
# wait_for does the same in 3.13 and 3.14; that of 3.11 gives the data.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check uvloop==0.23.0
cat > expected <<'OUT'
asyncio: sock_recv: TimeoutError, then b'2'; StreamReader: TimeoutError, then b'12'; sock_accept: TimeoutError, then the end for its client
uvloop: sock_recv: TimeoutError, then b'2'; StreamReader: TimeoutError, then b'12'; sock_accept: TimeoutError, then the end for its client
OUT
cat > program.py <<'PY'
import asyncio
import gc
import socket
import time

import uvloop


async def busy_until_both(event, limited):
    """Await with a timeout of 5 ms, while a callback lets the event come and holds the loop until the timer is due, too."""

    def callback():
        event()
        time.sleep(0.1)

    try:
        async with asyncio.timeout(0.005):
            asyncio.get_running_loop().call_soon(callback)
            return await limited
    except TimeoutError as error:
        return type(error).__name__
    finally:
        gc.collect()


async def main():
    loop = asyncio.get_running_loop()
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    outcome = await busy_until_both(lambda: sender.send(b"1"), loop.sock_recv(receiver, 100))
    sender.send(b"2")
    seen = [f"sock_recv: {outcome}, then {await loop.sock_recv(receiver, 100)}"]

    receiver, sender = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=receiver)
    outcome = await busy_until_both(lambda: sender.send(b"1"), reader.read(100))
    sender.send(b"2")
    seen.append(f"StreamReader: {outcome}, then {await reader.readexactly(2)}")
    writer.close()

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        listener.setblocking(False)
        outcome = await busy_until_both(lambda: client.connect(listener.getsockname()), loop.sock_accept(listener))
        client.setblocking(False)
        after = "the end" if await loop.sock_recv(client, 1) == b"" else "data"
        seen.append(f"sock_accept: {outcome}, then {after} for its client")
    return "; ".join(seen)


for name, library in {"asyncio": asyncio, "uvloop": uvloop}.items():
    print(f"{name}: {library.run(main())}")
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
