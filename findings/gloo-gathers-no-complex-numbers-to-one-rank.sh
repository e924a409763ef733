#!/usr/bin/env bash
# One would guess: a back end that gathers complex tensors on all ranks gathers them on one, too.
# torch 2.13.0, gloo: all_gather, all_reduce and broadcast carry complex64; gather refuses it with "Invalid scalar type".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: all_reduce done, broadcast done, all_gather done, gather Invalid scalar type
rank 1: all_reduce done, broadcast done, all_gather done, gather Invalid scalar type
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import torch
import torch.distributed as dist


def main(rank):
    value = torch.ones(2, dtype=torch.complex64)
    both = [torch.zeros_like(value) for _ in range(2)]
    calls = {
        "all_reduce": lambda: dist.all_reduce(value),
        "broadcast": lambda: dist.broadcast(value, src=0),
        "all_gather": lambda: dist.all_gather(both, value),
        "gather": lambda: dist.gather(value, both if rank == 0 else None, dst=0),
    }
    outcomes = []
    for name, call in calls.items():
        try:
            call()
            outcomes.append(f"{name} done")
        except RuntimeError as error:
            outcomes.append(f"{name} {error}")
    return ", ".join(outcomes)


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
