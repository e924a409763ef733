"""Run twice by test_processes.py, with its rank and a file to meet in: rank 1 dies in the middle of a backward."""

import os
import sys

import torch
from torch import nn

import asyncdist.sync as dist
from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import GradientError, GroupError, PeerLostError

rank, meeting_place = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group(init_method=f"file://{meeting_place}", rank=rank, world_size=2, timeout=30)
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.001)
for step in range(3):
    output = model(torch.ones(2, 64))
    if step == 2 and rank == 1:
        model.module[1].weight.register_post_accumulate_grad_hook(lambda _: os._exit(7))
    try:
        output.sum().backward()
    except PeerLostError as error:
        sys.stdout.write(f"backward {step} on rank {rank} lost rank {error.peer}\n")
try:
    model(torch.ones(2, 64))
except GradientError:
    sys.stdout.write("the next forward refuses\n")
try:
    dist.barrier()
except GroupError:
    sys.stdout.write("the group says so too\n")
dist.destroy_process_group()
