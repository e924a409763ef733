#!/usr/bin/env bash
# One would guess: optimizer.state_dict() goes through a distributed checkpoint as through torch.save; what cannot be restored raises.
# torch 2.13.0: after three steps Adam is saved, restored, and makes a fourth. Loaded into the state_dict of a new optimizer, whose "state" is
# still empty, the checkpoint leaves it empty. Converted by dcp_to_torch_save, the keys 0, 1, ... of "state" are strings, which
# load_state_dict accepts and ignores. get_optimizer_state_dict restores all, unless parameters have gradients when it is called. All these
# ways Adam counts from 1 again and has lost its moments, without an error.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.2
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
torch.save: step 4
dcp.load into a new state_dict: step 1
dcp_to_torch_save: step 1
get_optimizer_state_dict: step 4
get_optimizer_state_dict, with gradients: step 1
OUT
cat > program.py <<'PY'
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

model = torch.nn.Linear(2, 1)


def new_optimizer():
    return torch.optim.Adam(model.parameters())


def step(optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def show(way, optimizer):
    step(optimizer)
    print(f"{way}: step {int(optimizer.state[model.weight]['step'])}")


saved = new_optimizer()
for _ in range(3):
    step(saved)
torch.save({"adam": saved.state_dict()}, "saved.pt")
dcp.save({"adam": saved.state_dict()}, checkpoint_id="by_number")
dcp.save({"adam": get_optimizer_state_dict(model, saved)}, checkpoint_id="by_name")

optimizer = new_optimizer()
optimizer.load_state_dict(torch.load("saved.pt")["adam"])
show("torch.save", optimizer)

optimizer = new_optimizer()
state = {"adam": optimizer.state_dict()}
dcp.load(state, checkpoint_id="by_number")
optimizer.load_state_dict(state["adam"])
show("dcp.load into a new state_dict", optimizer)

optimizer = new_optimizer()
dcp_to_torch_save("by_number", "converted.pt")
optimizer.load_state_dict(torch.load("converted.pt")["adam"])
show("dcp_to_torch_save", optimizer)

for way in ("get_optimizer_state_dict", "get_optimizer_state_dict, with gradients"):
    if way == "get_optimizer_state_dict":
        model.zero_grad()
    optimizer = new_optimizer()
    state = {"adam": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id="by_name")
    set_optimizer_state_dict(model, optimizer, state["adam"])
    show(way, optimizer)
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
