#!/usr/bin/env bash
# One would guess: async_save has copied the tensors when it returns, so each checkpoint holds the values of its own call, also with one stager
# for all saves.
# torch 2.13.0: a stager keeps the copy of a tensor's memory and fills it again at the next save, without waiting for the save that still
# writes it. The first checkpoint, which is written after the second call here, holds 2. With a stager for each save (the default) it holds 1.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.2
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
a stager for each save: first 1.0, second 2.0
one stager: first 2.0, second 2.0
OUT
cat > program.py <<'PY'
import threading

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class LateWriter(FileSystemWriter):
    """Writes once both saves have been called, as on a slow disk."""

    def __init__(self, path, gate):
        super().__init__(path)
        self.gate = gate

    def write_data(self, plan, planner):
        self.gate.wait()
        return super().write_data(plan, planner)


def new_stager():
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )


def run(way, stagers):
    gate = threading.Event()
    weight = torch.zeros(4)
    saves = []
    for value, stager in enumerate(stagers, 1):
        weight.fill_(value)
        writer = LateWriter(f"{way}/{value}", gate)
        saves.append(dcp.async_save({"weight": weight}, storage_writer=writer, async_stager=stager))
    gate.set()
    seen = []
    for value, save in enumerate(saves, 1):
        save.result()
        loaded = {"weight": torch.zeros(4)}
        dcp.load(loaded, checkpoint_id=f"{way}/{value}")
        seen.append(loaded["weight"][0].item())
    print(f"{way}: first {seen[0]}, second {seen[1]}")


run("a stager for each save", [new_stager(), new_stager()])
run("one stager", [new_stager()] * 2)
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
