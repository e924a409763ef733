#!/usr/bin/env bash
# One would guess: a back end that gathers complex tensors on all ranks gathers them on one, too.
# torch 2.13.0, gloo: all_gather, all_reduce and broadcast carry complex64; gather refuses it with "Invalid scalar type".
. "$(dirname "$0")/common"
install torch==2.13.0
expect <<'OUT'
rank 0: all_reduce done, broadcast done, all_gather done, gather Invalid scalar type
rank 1: all_reduce done, broadcast done, all_gather done, gather Invalid scalar type
OUT
run_ranks <<'PY'
import torch
import torch.distributed as dist


def main(rank):
    value = torch.ones(2, dtype=torch.complex64)
    both = [torch.zeros_like(value) for _ in range(2)]
    calls = {
        "all_reduce": lambda: dist.all_reduce(value),
        "broadcast": lambda: dist.broadcast(value, src=0),
        "all_gather": lambda: dist.all_gather(both, value),
        "gather": lambda: dist.gather(value, both if rank == 0 else None, dst=0),
    }
    outcomes = []
    for name, call in calls.items():
        try:
            call()
            outcomes.append(f"{name} done")
        except RuntimeError as error:
            outcomes.append(f"{name} {error}")
    return ", ".join(outcomes)
PY
