#!/usr/bin/env bash
# One would guess: a SUM of booleans is a logical or, so what is True on every rank stays True.
# torch 2.13.0, gloo: the bytes are added. A tensor that holds True on both ranks holds a byte of 2 after one all_reduce, and still
# reads as True; after eight of them the byte has overflowed to 0, and the tensor reads False. No error is raised.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: [2, 4, 8, 16, 32, 64, 128, 0] False
rank 1: [2, 4, 8, 16, 32, 64, 128, 0] False
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import torch
import torch.distributed as dist


def main(rank):
    flag = torch.ones(1, dtype=torch.bool)
    stored = []
    for _ in range(8):
        dist.all_reduce(flag)
        stored.append(flag.view(torch.uint8).item())
    return f"{stored} {flag.item()}"


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
