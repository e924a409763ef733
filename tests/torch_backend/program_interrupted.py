"""Run under torchrun by test_failures.py: a rank that waits for ever in a collective, or is in the middle of many.

The last that an interrupted one does is to say how long it took to end.
"""

from __future__ import annotations

import atexit
import signal
import sys

from asyncdist.testing.stopwatch import Stopwatch

interrupted: list[Stopwatch] = []


def say(what: str) -> None:
    sys.stdout.write(f"{what}\n")  # in one piece: others write to the same pipe
    sys.stdout.flush()


def note_and_interrupt(number, frame):
    interrupted.append(Stopwatch())
    signal.default_int_handler(number, frame)


# What is registered first is called last.
atexit.register(lambda: say(f"ended after {interrupted[0].seconds():.2f} s" if interrupted else "ended by itself"))
signal.signal(signal.SIGINT, note_and_interrupt)

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
