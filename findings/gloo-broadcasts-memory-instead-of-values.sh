#!/usr/bin/env bash
# One would guess: after a broadcast, all ranks hold the values of the source, whatever the strides of their tensors.
# torch 2.13.0, gloo: the bytes are taken in the order of memory on both sides. A matrix that is transposed on the receiving rank only
# holds the right numbers in wrong places, without an error.
. "$(dirname "$0")/common"
install torch==2.13.0
expect <<'OUT'
rank 0: [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
rank 1: [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
OUT
run_ranks <<'PY'
import torch
import torch.distributed as dist


def main(rank):
    matrix = torch.arange(6.0).reshape(2, 3) if rank == 0 else torch.zeros(3, 2).t()
    dist.broadcast(matrix, src=0)
    return matrix.tolist()
PY
