#!/usr/bin/env bash
# One would guess: item() of a DTensor gives the value of the DTensor, the same on every rank; comparing it does give the same.
# torch 2.13.0: the sum of a sharded tensor is a pending partial sum, and item() and float() return each rank's own part: a loss that is
# logged, or a threshold that is tested with it, differs between ranks. `sum > 5` and full_tensor() use the whole sum, 6.
. "$(dirname "$0")/common"
install torch==2.13.0 numpy==2.4.2
expect <<'OUT'
rank 0: item 1.0, float 1.0, > 5 True, full_tensor 6.0
rank 1: item 5.0, float 5.0, > 5 True, full_tensor 6.0
OUT
run_ranks <<'PY'
import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def main(rank):
    total = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)]).sum()
    return f"item {total.item()}, float {float(total)}, > 5 {bool(total > 5)}, full_tensor {total.full_tensor().item()}"
PY
