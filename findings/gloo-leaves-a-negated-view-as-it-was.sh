#!/usr/bin/env bash
# One would guess: a tensor that torch negates lazily (the imaginary part of a conjugate is one) is summed, or refused, as gloo refuses
# a lazily conjugated tensor.
# torch 2.13.0, gloo: all_reduce returns without an error, and the tensor holds what it held before, on every rank. A copy with the
# same values is summed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: before [-1.0, -2.0], after [-1.0, -2.0], a copy [-2.0, -4.0]
rank 1: before [-1.0, -2.0], after [-1.0, -2.0], a copy [-2.0, -4.0]
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import torch
import torch.distributed as dist


def main(rank):
    imaginary = torch.tensor([5 + 1j, 5 + 2j]).conj().imag
    assert imaginary.is_neg()
    copy = imaginary.resolve_neg().contiguous()
    before = imaginary.tolist()
    dist.all_reduce(imaginary)
    dist.all_reduce(copy)
    return f"before {before}, after {imaginary.tolist()}, a copy {copy.tolist()}"


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
