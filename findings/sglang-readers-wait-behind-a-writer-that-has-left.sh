#!/usr/bin/env bash
# One would guess: a weight update that waits for the requests in flight keeps new requests back; if it is cancelled (the trainer has gone), these
# go on at once.
# sglang 0.5.23: the lock around requests and weight updates wakes nobody when a waiting writer is cancelled. Who waits behind it stays until the
# last request in flight ends, while requests that come later pass.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
cat > expected <<'OUT'
update waits: request in flight, request behind it waits
update cancelled: request in flight, request behind it waits, later request done
first request has ended: request done, request behind it done, later request done
OUT
cat > program.py <<'PY'
import asyncio
import pathlib
import runpy
import sysconfig

# The file alone, since the package imports a whole server.
lock_of_requests = pathlib.Path(sysconfig.get_path("purelib"), "sglang/srt/utils/aio_rwlock.py")
RWLock = runpy.run_path(str(lock_of_requests))["RWLock"]


async def settle():
    """Let every task go on until it waits for something."""
    for _ in range(100):
        await asyncio.sleep(0)


async def main():
    lock = RWLock()
    first_may_end = asyncio.Event()

    async def first_request():
        async with lock.reader_lock:
            await first_may_end.wait()

    async def request():
        async with lock.reader_lock:
            pass

    async def update_weights():
        async with lock.writer_lock:
            pass

    def state(task, pending="waits"):
        return "done" if task.done() else pending

    first = asyncio.create_task(first_request())
    await settle()
    update = asyncio.create_task(update_weights())
    await settle()
    behind = asyncio.create_task(request())
    await settle()
    print(f"update waits: request {state(first, 'in flight')}, request behind it {state(behind)}")
    update.cancel()
    await settle()
    later = asyncio.create_task(request())
    await settle()
    states = f"request {state(first, 'in flight')}, request behind it {state(behind)}, later request {state(later)}"
    print(f"update {'cancelled' if update.cancelled() else 'done'}: {states}")
    first_may_end.set()
    await settle()
    print(f"first request has ended: request {state(first)}, request behind it {state(behind)}, later request {state(later)}")


asyncio.run(main())
PY
env/bin/python program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
