#!/usr/bin/env bash
# One would guess: idist.broadcast gives all ranks the string or path of rank 0, and idist.all_gather the strings of all, as they were.
# pytorch-ignite 0.5.5, torch 2.13.0: the length is counted in characters, the content in UTF-8. With one letter of two bytes, the last byte is
# overwritten by the length, on all ranks and without an error; the ranks write into another folder than was meant. With one of three bytes, it
# raises. Numbers go through float32, in broadcast even integers.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.2 pytorch-ignite==0.5.5
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: broadcast 'modèles/\n'; all_gather ['naïv\x06', 'naïv\x06']; three bytes: RuntimeError; 16777216.0 of 16777217
rank 1: broadcast 'modèles/\n'; all_gather ['naïv\x06', 'naïv\x06']; three bytes: RuntimeError; 16777216.0 of 16777217
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import ignite.distributed as idist
import torch.distributed as dist


def gather_three_bytes():
    try:
        return idist.all_gather("5 €")
    except RuntimeError as error:
        return type(error).__name__


def main(rank):
    folder = idist.broadcast("modèles/1" if rank == 0 else "", src=0)
    words = idist.all_gather("naïve")
    number = idist.broadcast(2**24 + 1 if rank == 0 else 0, src=0)
    return f"broadcast {folder!r}; all_gather {words}; three bytes: {gather_three_bytes()}; {number} of {2**24 + 1}"


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
