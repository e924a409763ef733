#!/usr/bin/env bash
# One would guess: the maximum of values of which one is NaN is NaN, as torch.maximum gives; or at least it does not depend on the rank.
# torch 2.13.0, gloo: a NaN of rank 0 is in the result of MAX and MIN, a NaN of rank 1 is lost. A check for NaN by an all_reduce with
# MAX finds the faults of some ranks only.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: MAX nan, 0.0; MIN nan, 0.0
rank 1: MAX nan, 0.0; MIN nan, 0.0
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import torch
import torch.distributed as dist


def main(rank):
    texts = []
    for name in ("MAX", "MIN"):
        results = []
        for rank_with_nan in (0, 1):
            value = torch.tensor([float("nan") if rank == rank_with_nan else 0.0])
            dist.all_reduce(value, getattr(dist.ReduceOp, name))
            results.append(str(value.item()))
        texts.append(f"{name} {', '.join(results)}")
    return "; ".join(texts)


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
