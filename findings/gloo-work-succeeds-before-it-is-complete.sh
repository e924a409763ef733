#!/usr/bin/env bash
# One would guess: Work.is_success() is False, or an error, while the collective is under way.
# torch 2.13.0, gloo: it is True from the start. Only together with is_completed() does it say anything.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: completed False, success True
rank 1: -
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import torch
import torch.distributed as dist


def main(rank):
    value = torch.ones(1)
    if rank == 0:
        work = dist.all_reduce(value, async_op=True)  # cannot complete: rank 1 waits for the message below
        text = f"completed {work.is_completed()}, success {work.is_success()}"
        dist.send(torch.zeros(1), dst=1)
        work.wait()
        return text
    dist.recv(torch.zeros(1), src=0)
    dist.all_reduce(value)
    return "-"


WORLD_SIZE = 2


def start(rank):
    store = pathlib.Path("store").absolute().as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE)
    result = main(rank)
    dist.barrier()
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(WORLD_SIZE) as pool:
        for rank, result in enumerate(pool.map(start, range(WORLD_SIZE), chunksize=1)):
            print(f"rank {rank}: {result}")
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
