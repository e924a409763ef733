#!/usr/bin/env bash
# One would guess: a reader that takes a part of what has arrived is called again, on each loop, since add_reader is level-triggered; also on a
# connection that its peer has reset, whose last bytes Linux still hands out.
# uvloop 0.23.0: it is called once more after the reset and never again: the rest and the reset itself stay unnoticed. After an ordinary close
# all is read. asyncio reads all both times.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check uvloop==0.23.0
cat > expected <<'OUT'
asyncio: closed: 12, 34, 56, end; reset: 12, 34, 56, ConnectionResetError
uvloop: closed: 12, 34, 56, end; reset: 12
OUT
cat > program.py <<'PY'
import asyncio
import socket
import struct

import uvloop

RESET = struct.pack("ii", 1, 0)  # a linger time of zero: close sends a reset


async def polls(count):
    """Let the loop poll, which the arrival of a byte shows."""
    loop = asyncio.get_running_loop()
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    for _ in range(count):
        later = asyncio.create_task(loop.sock_recv(receiver, 1))
        await asyncio.sleep(0)
        sender.send(b"1")
        await later


async def read(reset):
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = socket.create_connection(listener.getsockname())
        sender, _ = listener.accept()
    receiver.setblocking(False)
    seen = []

    def reader():
        try:
            seen.append(receiver.recv(2).decode() or "end")
        except ConnectionResetError as error:
            seen.append(type(error).__name__)
        if not seen[-1].isdigit():
            loop.remove_reader(receiver)

    sender.sendall(b"123456")
    if reset:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sender.close()
    loop.add_reader(receiver, reader)
    await polls(20)
    loop.remove_reader(receiver)
    receiver.close()
    return ", ".join(seen)


async def main():
    return f"closed: {await read(reset=False)}; reset: {await read(reset=True)}"


for name, library in {"asyncio": asyncio, "uvloop": uvloop}.items():
    print(f"{name}: {library.run(main())}")
PY
env/bin/python program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
