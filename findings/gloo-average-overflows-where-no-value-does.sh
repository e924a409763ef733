#!/usr/bin/env bash
# One would guess: the average of two equal numbers is that number.
# torch 2.13.0, gloo: AVG sums in the dtype of the tensor and divides afterwards. The average of 40,000 and 40,000 in float16 is inf,
# although each value and the result fit into it (the largest is 65,504).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: inf
rank 1: inf
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import torch
import torch.distributed as dist


def main(rank):
    value = torch.tensor([40_000.0], dtype=torch.float16)
    dist.all_reduce(value, dist.ReduceOp.AVG)
    return value.item()


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
