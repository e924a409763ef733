#!/usr/bin/env bash
# One would guess: what is no DTensor and differs between ranks (counters, generators' states, plain tensors) is saved for each rank, or all of
# it from one rank, so that the parts of a checkpoint belong together.
# torch 2.13.0: of equal names one rank's value is kept, of another rank for each name, which spreads the writing. Every rank loads a mixture
# that none of them has saved: here rank 0 had 0 everywhere and rank 1 had 1 everywhere.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.2
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: weight 0, bias 1, moment 0, step 1, epoch 1
rank 1: weight 0, bias 1, moment 0, step 1, epoch 1
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def state(value):
    tensors = {name: torch.full((4,), float(value)) for name in ("weight", "bias", "moment")}
    return tensors | {"step": value, "epoch": value}


def main(rank):
    dcp.save(state(rank), checkpoint_id="checkpoint")
    loaded = state(-1)
    dcp.load(loaded, checkpoint_id="checkpoint")
    return ", ".join(f"{name} {value if isinstance(value, int) else int(value[0])}" for name, value in loaded.items())


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
