#!/usr/bin/env bash
# One would guess: a checkpoint holds the values that the tensor shows, or the writer refuses the tensor, as it refuses strides.
# torch 2.13.0, safetensors 0.8.0: tensor.conj() only marks the tensor. safetensors writes the memory below the mark, so 1-2j is stored as
# 1+2j, without an error; so does the safetensors format of torch's distributed checkpoints. torch.save and DCP's own format store 1-2j.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 safetensors==0.8.0 numpy==2.4.2
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
the tensor: (1-2j)
torch.save: (1-2j)
safetensors: (1+2j)
DCP: (1-2j)
DCP in the format safetensors: (1+2j)
OUT
cat > program.py <<'PY'
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

tensor = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
print("the tensor:", tensor.item())
torch.save(tensor, "tensor.pt")
print("torch.save:", torch.load("tensor.pt").item())
safetensors.torch.save_file({"tensor": tensor}, "tensor.safetensors")
print("safetensors:", safetensors.torch.load_file("tensor.safetensors")["tensor"].item())
loaded = {"tensor": torch.zeros(1, dtype=torch.complex64)}
dcp.save({"tensor": tensor}, checkpoint_id="own")
dcp.load(loaded, checkpoint_id="own")
print("DCP:", loaded["tensor"].item())
dcp.save({"tensor": tensor}, storage_writer=HuggingFaceStorageWriter("other"))
dcp.load(loaded, storage_reader=HuggingFaceStorageReader("other"))
print("DCP in the format safetensors:", loaded["tensor"].item())
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
