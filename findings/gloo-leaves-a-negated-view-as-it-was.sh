#!/usr/bin/env bash
# One would guess: a tensor that torch negates lazily (the imaginary part of a conjugate is one) is summed, or refused, as gloo refuses
# a lazily conjugated tensor.
# torch 2.13.0, gloo: all_reduce returns without an error, and the tensor holds what it held before, on every rank. A copy with the
# same values is summed.
. "$(dirname "$0")/common"
install torch==2.13.0
expect <<'OUT'
rank 0: before [-1.0, -2.0], after [-1.0, -2.0], a copy [-2.0, -4.0]
rank 1: before [-1.0, -2.0], after [-1.0, -2.0], a copy [-2.0, -4.0]
OUT
run_ranks <<'PY'
import torch
import torch.distributed as dist


def main(rank):
    imaginary = torch.tensor([5 + 1j, 5 + 2j]).conj().imag
    assert imaginary.is_neg()
    copy = imaginary.resolve_neg().contiguous()
    before = imaginary.tolist()
    dist.all_reduce(imaginary)
    dist.all_reduce(copy)
    return f"before {before}, after {imaginary.tolist()}, a copy {copy.tolist()}"
PY
