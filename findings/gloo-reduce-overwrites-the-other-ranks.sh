#!/usr/bin/env bash
# One would guess: reduce changes the tensor of the destination only, as MPI_Reduce has a send buffer that it does not change.
# torch 2.13.0, gloo: the tensors of the other ranks are used as scratch memory. Afterwards they hold partial sums of some of their
# elements, and with AVG their own values divided by the number of ranks.
. "$(dirname "$0")/common"
install torch==2.13.0
expect <<'OUT'
rank 0: SUM [3.0, 3.0, 3.0], AVG [1.5, 1.5, 1.5]
rank 1: SUM [2.0, 2.0, 3.0], AVG [1.0, 1.0, 1.5]
OUT
run_ranks <<'PY'
import torch
import torch.distributed as dist


def main(rank):
    texts = []
    for name in ("SUM", "AVG"):
        values = torch.full((3,), rank + 1.0)
        dist.reduce(values, dst=0, op=getattr(dist.ReduceOp, name))
        texts.append(f"{name} {values.tolist()}")
    return ", ".join(texts)
PY
