"""Run under torchrun by test_failures.py: a rank that waits for ever in a collective, or is in the middle of many."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import asyncdist.torch_backend  # noqa: F401

torch.set_num_threads(1)
dist.init_process_group("asyncdist")
dist.barrier()
sys.stdout.write(f"rank {dist.get_rank()} is busy\n")
sys.stdout.flush()
if sys.argv[1] == "waits" and dist.get_rank():
    dist.recv(torch.ones(1), 0)
while True:
    dist.all_reduce(torch.ones(1000))
