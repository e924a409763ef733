#!/usr/bin/env bash
# One would guess: HuggingFaceStorageWriter refuses what a safetensors file cannot hold (a number, a string), or leaves it out; and what it
# writes, HuggingFaceStorageReader reads.
# torch 2.13.0, safetensors 0.8.0: with one number beside the tensors the save succeeds. The file is called model-....safetensors, begins with
# torch.save's archive of the number, and neither safetensors nor DCP can read the tensors. A float4 tensor alone is written and read by
# safetensors, but not by DCP, whose reader looks its type up in a table without F4.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 safetensors==0.8.0 numpy==2.4.2
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
a tensor: saved as safetensors, safetensors reads it, DCP reads it
a tensor and a number: saved as zip archive, safetensors raises SafetensorError, DCP raises CheckpointException
a float4 tensor: saved as safetensors, safetensors reads it, DCP raises CheckpointException
OUT
cat > program.py <<'PY'
import copy
import pathlib

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter


def outcome(function):
    try:
        function()
    except BaseException as error:  # CheckpointException is no Exception
        return f"raises {type(error).__name__}"
    return "reads it"


def run(what, state):
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(what))
    file = next(pathlib.Path(what).rglob("*.safetensors"))
    kind = "zip archive" if file.read_bytes().startswith(b"PK\3\4") else "safetensors"
    by_safetensors = outcome(lambda: safetensors.torch.load_file(file))
    by_dcp = outcome(lambda: dcp.load(copy.copy(state), storage_reader=HuggingFaceStorageReader(what)))
    print(f"{what}: saved as {kind}, safetensors {by_safetensors}, DCP {by_dcp}")


run("a tensor", {"weight": torch.ones(4)})
run("a tensor and a number", {"weight": torch.ones(4), "step": 3})
run("a float4 tensor", {"weight": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)})
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
