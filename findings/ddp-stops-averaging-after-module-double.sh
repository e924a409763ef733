#!/usr/bin/env bash
# One would guess: a model whose dtype is changed below DistributedDataParallel goes on averaging its gradients, or raises.
# torch 2.13.0, gloo: after model.module.double() each rank keeps the gradient of its own input (1 and 2; the average is 1.5), without
# an error. The same after a parameter has been replaced.
. "$(dirname "$0")/common"
install torch==2.13.0
expect <<'OUT'
rank 0: untouched 1.5, double 1.0, replaced 1.0
rank 1: untouched 1.5, double 2.0, replaced 2.0
OUT
run_ranks <<'PY'
import torch
from torch.nn.parallel import DistributedDataParallel


def gradient(rank, change, dtype=torch.float32):
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    change(model.module)
    model(torch.tensor([[rank + 1.0]], dtype=dtype)).sum().backward()
    return model.module.weight.grad.item()


def replace(linear):
    linear.weight = torch.nn.Parameter(torch.ones(1, 1))


def main(rank):
    untouched = gradient(rank, lambda linear: None)
    double = gradient(rank, lambda linear: linear.double(), torch.float64)
    return f"untouched {untouched}, double {double}, replaced {gradient(rank, replace)}"
PY
