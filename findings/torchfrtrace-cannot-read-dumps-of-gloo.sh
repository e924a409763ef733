#!/usr/bin/env bash
# One would guess: torchfrtrace, torch's own analyzer, reads the dumps that torch's own recorder makes, or says that it does not know gloo.
# torch 2.13.0, gloo: it ends with a KeyError. The entries name their group '0'; the table of groups in the same dump names it ''. With only
# that name put right in the dumps it ends with status 0.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.2 tabulate==0.9.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
rank 0: entries of group 0, table of groups ['']
rank 1: entries of group 0, table of groups ['']
dumps: KeyError: ('0', 0)
renamed: status 0
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib
import pickle
import subprocess
import sys

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace


def write(folder, rank, dump):
    pathlib.Path(folder).mkdir(exist_ok=True)
    pathlib.Path(folder, f"rank_{rank}").write_bytes(pickle.dumps(dump))


def main(rank):
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    dump = pickle.loads(_dump_fr_trace())
    write("dumps", rank, dump)
    (name,) = {entry["process_group"][0] for entry in dump["entries"]}
    groups = list(dump["pg_config"])
    dump["pg_config"] = {name: dump["pg_config"][""] | {"name": name}}
    write("renamed", rank, dump)
    return f"entries of group {name}, table of groups {groups}"


def analyze(folder):
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder, "-p", "rank_"]
    analyzer = subprocess.run(command, capture_output=True, text=True)
    lines = analyzer.stderr.splitlines() if analyzer.returncode else [f"status {analyzer.returncode}"]
    print(f"{folder}: {lines[-1]}")


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
    analyze("dumps")
    analyze("renamed")
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
