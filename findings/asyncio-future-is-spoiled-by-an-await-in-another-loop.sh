#!/usr/bin/env bash
# One would guess: a task of another loop that awaits a future is refused with "attached to a different loop", and that is all: the loop
# that owns the future awaits it as before.
# CPython 3.11 to 3.14 (uvloop 0.23.0 to 3.13): the refused await leaves its mark on the future. From then until it is done, its own
# loop cannot await it either ("await wasn't used with future"): one mistake of one thread breaks the tasks of the other.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check uvloop==0.23.0
cat > expected <<'OUT'
asyncio, future: other loop refused, own loop await wasn't used with future, own loop once it is done 7
asyncio, task: other loop refused, own loop await wasn't used with future, own loop once it is done 7
uvloop, future: other loop refused, own loop await wasn't used with future, own loop once it is done 7
uvloop, task: other loop refused, own loop await wasn't used with future, own loop once it is done 7
OUT
cat > program.py <<'PY'
import asyncio

import uvloop


async def outcome(awaitable):
    try:
        return await awaitable
    except RuntimeError as error:
        return "refused" if "attached to a different loop" in str(error) else error


async def main(kind):
    loop = asyncio.get_running_loop()
    source = loop.create_future()
    shared = asyncio.ensure_future(outcome(source)) if kind == "task" else source
    in_other_loop = await asyncio.to_thread(asyncio.run, outcome(shared))
    loop.call_soon(source.set_result, 7)
    in_own_loop = await outcome(shared)
    await asyncio.wait([shared])
    return f"other loop {in_other_loop}, own loop {in_own_loop}, own loop once it is done {await outcome(shared)}"


for name, library in {"asyncio": asyncio, "uvloop": uvloop}.items():
    for kind in ("future", "task"):
        print(f"{name}, {kind}: {library.run(main(kind))}")
PY
env/bin/python program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
