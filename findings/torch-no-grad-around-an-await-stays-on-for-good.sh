#!/usr/bin/env bash
# One would guess: torch.no_grad() in one task of an event loop concerns that task, as a context variable does; at the least all is as
# before once every block has been left.
# torch 2.13.0: the switch belongs to the thread. Another task's tensors are without gradients while one task awaits in its block. Where
# two blocks overlap, the first to leave switches gradients on inside the other, and the other leaves them off for the rest of the thread.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
no_grad: other task False, inside the other's block True, after both blocks False, backward refused
inference_mode: other task False, inside the other's block True, after both blocks False, backward refused
OUT
cat > program.py <<'PY'
import asyncio

import torch


def tracked():
    return (torch.nn.Linear(1, 1)(torch.ones(1))).requires_grad


async def main(block):
    seen = []
    entered, leave, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def first():
        with block():
            entered.set()
            await leave.wait()
        left.set()

    async def second():
        await entered.wait()
        seen.append(f"other task {tracked()}")
        with block():
            leave.set()
            await left.wait()
            seen.append(f"inside the other's block {tracked()}")

    await asyncio.gather(first(), second())
    seen.append(f"after both blocks {tracked()}")
    try:
        torch.nn.Linear(1, 1)(torch.ones(1)).sum().backward()
    except RuntimeError:
        seen.append("backward refused")
    return ", ".join(seen)


for block in (torch.no_grad, torch.inference_mode):
    print(f"{block.__name__}: {asyncio.run(main(block))}")
    torch.set_grad_enabled(True)
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
