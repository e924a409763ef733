#!/usr/bin/env bash
# One would guess: Work.is_success() is False, or an error, while the collective is under way.
# torch 2.13.0, gloo: it is True from the start. Only together with is_completed() does it say anything.
. "$(dirname "$0")/common"
install torch==2.13.0
expect <<'OUT'
rank 0: completed False, success True
rank 1: -
OUT
run_ranks <<'PY'
import torch
import torch.distributed as dist


def main(rank):
    value = torch.ones(1)
    if rank == 0:
        work = dist.all_reduce(value, async_op=True)  # cannot complete: rank 1 waits for the message below
        text = f"completed {work.is_completed()}, success {work.is_success()}"
        dist.send(torch.zeros(1), dst=1)
        work.wait()
        return text
    dist.recv(torch.zeros(1), src=0)
    dist.all_reduce(value)
    return "-"
PY
