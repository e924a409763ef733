"""Run under torchrun by test_failures.py: a rank that waits in a collective, or runs many, until it is interrupted."""

import atexit
import sys


def say(what: str) -> None:
    # One write, because both ranks write to the same pipe.
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


# Exit hooks run in reverse order, so this one runs after those of the package.
atexit.register(say, "ended")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import asyncdist.torch_backend  # noqa: E402, F401

torch.set_num_threads(1)
dist.init_process_group("asyncdist")
dist.barrier()
say(f"rank {dist.get_rank()} is busy")
if sys.argv[1] == "waits" and dist.get_rank():
    dist.recv(torch.ones(1), 0)
while True:
    dist.all_reduce(torch.ones(1000))
