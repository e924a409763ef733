#!/usr/bin/env bash
# One would guess: a collective over an empty tensor still meets the other ranks; one would use it as a barrier, or to keep step with them.
# torch 2.13.0, gloo: all_reduce of an empty tensor returns on rank 0 while rank 1 has not called it (it waits for a message that rank 0
# sends afterwards). all_reduce of one element would wait for ever in this program.
. "$(dirname "$0")/common"
install torch==2.13.0
expect <<'OUT'
rank 0: returned before rank 1 has called
rank 1: called after the message
OUT
run_ranks <<'PY'
import torch
import torch.distributed as dist


def main(rank):
    if rank == 0:
        dist.all_reduce(torch.empty(0))
        dist.send(torch.zeros(1), dst=1)
        return "returned before rank 1 has called"
    dist.recv(torch.zeros(1), src=0)
    dist.all_reduce(torch.empty(0))
    return "called after the message"
PY
