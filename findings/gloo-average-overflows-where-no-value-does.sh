#!/usr/bin/env bash
# One would guess: the average of two equal numbers is that number.
# torch 2.13.0, gloo: AVG sums in the dtype of the tensor and divides afterwards. The average of 40,000 and 40,000 in float16 is inf,
# although each value and the result fit into it (the largest is 65,504).
. "$(dirname "$0")/common"
install torch==2.13.0
expect <<'OUT'
rank 0: inf
rank 1: inf
OUT
run_ranks <<'PY'
import torch
import torch.distributed as dist


def main(rank):
    value = torch.tensor([40_000.0], dtype=torch.float16)
    dist.all_reduce(value, dist.ReduceOp.AVG)
    return value.item()
PY
