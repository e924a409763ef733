#!/usr/bin/env bash
# One would guess: after a broadcast, all ranks hold the values of the source, whatever the strides of their tensors.
# torch 2.13.0, gloo: the bytes are taken in the order of memory on both sides. A matrix that is transposed on the receiving rank only
# holds the right numbers in wrong places, without an error.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
rank 1: [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import torch
import torch.distributed as dist


def main(rank):
    matrix = torch.arange(6.0).reshape(2, 3) if rank == 0 else torch.zeros(3, 2).t()
    dist.broadcast(matrix, src=0)
    return matrix.tolist()


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
