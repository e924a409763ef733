#!/usr/bin/env bash
# One would guess: whatever an endpoint raises reaches its caller, and the actor goes on; so also the CancelledError of a background task that
# the endpoint has cancelled and then awaits, as asyncio programs do.
# Monarch 0.7.0: a ValueError does so. A CancelledError ends the actor's message loop without a word: neither this call nor any later one is
# answered, no supervisor hears of it, and the actors beside it in the same process answer as before.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torchmonarch==0.7.0 numpy==2.4.2
export OMP_NUM_THREADS=1
cat > expected <<'OUT'
ValueError: the caller sees ActorError, the next call pong
CancelledError: the caller sees no answer, the next call no answer, the actor beside it pong
OUT
cat > actors.py <<'PY'
import asyncio

from monarch.actor import Actor, endpoint


class Worker(Actor):
    @endpoint
    async def start(self):
        self.task = asyncio.create_task(asyncio.Event().wait())

    @endpoint
    async def pause(self):
        self.task.cancel()
        await self.task

    @endpoint
    async def fail(self):
        raise ValueError("a wrong value")

    @endpoint
    async def ping(self):
        return "pong"
PY
cat > program.py <<'PY'
import asyncio

from actors import Worker
from monarch.actor import this_host

LONG_S, SHORT_S = 120, 3


async def seen(call, timeout_s=LONG_S):
    async def answer():
        return await call

    try:
        return await asyncio.wait_for(answer(), timeout_s)
    except TimeoutError:
        return "no answer"
    except Exception as error:
        return type(error).__name__


async def main():
    processes = this_host().spawn_procs()
    worker, beside = processes.spawn("worker", Worker), processes.spawn("beside", Worker)
    await worker.start.call_one()
    await beside.start.call_one()
    outcomes = [f"the caller sees {await seen(worker.fail.call_one())}", f"the next call {await seen(worker.ping.call_one())}"]
    print(f"ValueError: {', '.join(outcomes)}")
    outcomes = [
        f"the caller sees {await seen(worker.pause.call_one(), SHORT_S)}",
        f"the next call {await seen(worker.ping.call_one(), SHORT_S)}",
        f"the actor beside it {await seen(beside.ping.call_one())}",
    ]
    print(f"CancelledError: {', '.join(outcomes)}")


if __name__ == "__main__":
    asyncio.run(main())
PY
env/bin/python -W ignore program.py 2> errors | grep -v "^Monarch internal logs" > seen || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
