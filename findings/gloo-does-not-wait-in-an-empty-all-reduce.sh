#!/usr/bin/env bash
# One would guess: a collective over an empty tensor still meets the other ranks; one would use it as a barrier, or to keep step with them.
# torch 2.13.0, gloo: all_reduce of an empty tensor returns on rank 0 while rank 1 has not called it (it waits for a message that rank 0
# sends afterwards). all_reduce of one element would wait for ever in this program.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: returned before rank 1 has called
rank 1: called after the message
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import torch
import torch.distributed as dist


def main(rank):
    if rank == 0:
        dist.all_reduce(torch.empty(0))
        dist.send(torch.zeros(1), dst=1)
        return "returned before rank 1 has called"
    dist.recv(torch.zeros(1), src=0)
    dist.all_reduce(torch.empty(0))
    return "called after the message"


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
