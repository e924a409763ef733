#!/usr/bin/env bash
# One would guess: DeviceMesh.abort(), which exists so that ranks do not hang when another has left, ends the collectives of the mesh's groups.
# torch 2.15.0, gloo: the all_reduce of rank 0 is pending when rank 0 aborts the mesh. It goes on and succeeds when rank 1 joins it later. Only
# the mesh is lost: its groups cannot be found any more, and a second abort raises.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.4.2
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: pending after the abort, then 2.0; get_group raises RuntimeError; abort raises RuntimeError
rank 1: joined after the abort, 2.0
rank 2: not in the mesh
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def outcome(name, function):
    try:
        function()
    except RuntimeError as error:
        return f"{name} raises {type(error).__name__}"
    return f"{name} returns"


def main(rank):
    mesh = DeviceMesh("cpu", [0, 1])
    if rank == 2:
        return "not in the mesh"
    group = mesh.get_group()
    value = torch.ones(1)
    if rank == 1:
        dist.recv(torch.zeros(1), src=0)
        dist.all_reduce(value, group=group)
        return f"joined after the abort, {value.item()}"
    work = dist.all_reduce(value, group=group, async_op=True)
    mesh.abort()
    state = "ended" if work.is_completed() else "pending"
    dist.send(torch.zeros(1), dst=1)
    work.wait()
    calls = [outcome("get_group", mesh.get_group), outcome("abort", mesh.abort)]
    return f"{state} after the abort, then {value.item()}; {'; '.join(calls)}"


WORLD_SIZE = 3


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
