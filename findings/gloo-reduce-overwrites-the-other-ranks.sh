#!/usr/bin/env bash
# One would guess: reduce changes the tensor of the destination only, as MPI_Reduce has a send buffer that it does not change.
# torch 2.13.0, gloo: the tensors of the other ranks are used as scratch memory. Afterwards they hold partial sums of some of their
# elements, and with AVG their own values divided by the number of ranks.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: SUM [3.0, 3.0, 3.0], AVG [1.5, 1.5, 1.5]
rank 1: SUM [2.0, 2.0, 3.0], AVG [1.0, 1.0, 1.5]
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import torch
import torch.distributed as dist


def main(rank):
    texts = []
    for name in ("SUM", "AVG"):
        values = torch.full((3,), rank + 1.0)
        dist.reduce(values, dst=0, op=getattr(dist.ReduceOp, name))
        texts.append(f"{name} {values.tolist()}")
    return ", ".join(texts)


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
