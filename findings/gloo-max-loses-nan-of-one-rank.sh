#!/usr/bin/env bash
# One would guess: the maximum of values of which one is NaN is NaN, as torch.maximum gives; or at least it does not depend on the rank.
# torch 2.13.0, gloo: a NaN of rank 0 is in the result of MAX and MIN, a NaN of rank 1 is lost. A check for NaN by an all_reduce with
# MAX finds the faults of some ranks only.
. "$(dirname "$0")/common"
install torch==2.13.0
expect <<'OUT'
rank 0: MAX nan, 0.0; MIN nan, 0.0
rank 1: MAX nan, 0.0; MIN nan, 0.0
OUT
run_ranks <<'PY'
import torch
import torch.distributed as dist


def main(rank):
    texts = []
    for name in ("MAX", "MIN"):
        results = []
        for rank_with_nan in (0, 1):
            value = torch.tensor([float("nan") if rank == rank_with_nan else 0.0])
            dist.all_reduce(value, getattr(dist.ReduceOp, name))
            results.append(str(value.item()))
        texts.append(f"{name} {', '.join(results)}")
    return "; ".join(texts)
PY
