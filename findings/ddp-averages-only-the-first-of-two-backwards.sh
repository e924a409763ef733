#!/usr/bin/env bash
# One would guess: two losses of one model, each with its own backward, give averaged gradients whether both forward passes come first
# or each backward follows its own forward.
# torch 2.13.0, gloo: inputs are 1 and 10 on rank 0, 2 and 20 on rank 1, so the average is 1.5 + 15 = 16.5. If both forward passes come
# first, the second backward is not averaged: rank 0 has 1.5 + 10, rank 1 has 1.5 + 20, without an error or a warning.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: in turns 16.5, forwards first 11.5, one backward of the sum 16.5
rank 1: in turns 16.5, forwards first 21.5, one backward of the sum 16.5
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(rank):
    results = []
    for order in ("in turns", "forwards first", "one backward of the sum"):
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))

        def loss(scale, model=model):
            return model(torch.tensor([[scale * (rank + 1.0)]])).sum()

        if order == "in turns":
            loss(1).backward()
            loss(10).backward()
        else:
            first, second = loss(1), loss(10)
            if order == "forwards first":
                first.backward()
                second.backward()
            else:
                (first + second).backward()
        results.append(f"{order} {model.module.weight.grad.item()}")
    return ", ".join(results)


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
