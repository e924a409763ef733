#!/usr/bin/env bash
# One would guess: item() of a DTensor gives the value of the DTensor, the same on every rank; comparing it does give the same.
# torch 2.13.0: the sum of a sharded tensor is a pending partial sum, and item() and float() return each rank's own part: a loss that is
# logged, or a threshold that is tested with it, differs between ranks. `sum > 5` and full_tensor() use the whole sum, 6.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.2
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: item 1.0, float 1.0, > 5 True, full_tensor 6.0
rank 1: item 5.0, float 5.0, > 5 True, full_tensor 6.0
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def main(rank):
    total = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)]).sum()
    return f"item {total.item()}, float {float(total)}, > 5 {bool(total > 5)}, full_tensor {total.full_tensor().item()}"


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
