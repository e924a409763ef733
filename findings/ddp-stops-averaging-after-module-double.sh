#!/usr/bin/env bash
# One would guess: a model whose dtype is changed below DistributedDataParallel goes on averaging its gradients, or raises.
# torch 2.13.0, gloo: after model.module.double() each rank keeps the gradient of its own input (1 and 2; the average is 1.5), without
# an error. The same after a parameter has been replaced.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: untouched 1.5, double 1.0, replaced 1.0
rank 1: untouched 1.5, double 2.0, replaced 2.0
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def gradient(rank, change, dtype=torch.float32):
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    change(model.module)
    model(torch.tensor([[rank + 1.0]], dtype=dtype)).sum().backward()
    return model.module.weight.grad.item()


def replace(linear):
    linear.weight = torch.nn.Parameter(torch.ones(1, 1))


def main(rank):
    untouched = gradient(rank, lambda linear: None)
    double = gradient(rank, lambda linear: linear.double(), torch.float64)
    return f"untouched {untouched}, double {double}, replaced {gradient(rank, replace)}"


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
