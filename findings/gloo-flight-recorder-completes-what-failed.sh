#!/usr/bin/env bash
# One would guess: the flight recorder tells a collective that succeeded from one that timed out, by its entry's state or by the group's last
# completed collective, and records sends as it does with NCCL.
# torch 2.13.0, gloo: both entries say "scheduled" and are listed as active, and the one that timed out counts as the group's last completed
# collective. A send leaves no entry and is counted, so that this is number 3 while the entry has number 2.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.2
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: all_reduce succeeded, send succeeded, all_reduce failed; active: all_reduce 1 scheduled, all_reduce 2 scheduled; last completed: 3 of 3
rank 1: all_reduce succeeded, recv succeeded; active: all_reduce 1 scheduled; last completed: 1 of 1
OUT
cat > program.py <<'PY'
import datetime
import multiprocessing
import pathlib
import pickle

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace


def main(rank):
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    dist.all_reduce(torch.ones(1), group=group)
    calls = ["all_reduce succeeded"]
    if rank == 0:
        dist.send(torch.ones(1), dst=1, group=group)
        calls.append("send succeeded")
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError:
            calls.append("all_reduce failed")
    else:
        dist.recv(torch.ones(1), src=0, group=group)
        calls.append("recv succeeded")
    for _ in range(10_000):  # the group's thread notes the end after the call has returned
        dump = pickle.loads(_dump_fr_trace(onlyActive=True))
        (status,) = dump["pg_status"].values()
        if status["last_completed_collective"] == status["last_enqueued_collective"]:
            break
    names = [(e["profiling_name"].removeprefix("gloo:"), e["collective_seq_id"], e["state"]) for e in dump["entries"]]
    active = ", ".join(f"{name} {number} {state}" for name, number, state in names)
    completed = f"{status['last_completed_collective']} of {status['last_enqueued_collective']}"
    return f"{', '.join(calls)}; active: {active}; last completed: {completed}"


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
