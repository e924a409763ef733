"""A process that joins a job, and takes part in its steps until a file exists; started by torchrun in test_launch.py."""

import os
import sys
from pathlib import Path

import torch

import asyncdist.sync as dist


def main(job, stop):
    torch.set_num_threads(1)
    with dist.join(job, min_size=1, start_size=2, timeout=60.0) as session:
        for group in session.generations():
            print(f"process {os.getpid()} is one of {group.size()}", flush=True)
            last = torch.zeros(1)
            while not last and not group.changed:
                with group.step() as step:
                    last.fill_(Path(stop).exists())
                    group.all_reduce(last, dist.ReduceOp.MAX).wait()
                last *= step.committed


if __name__ == "__main__":
    main(*sys.argv[1:])
