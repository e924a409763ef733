"""Which threads take part in a call; run by the teams of conftest.py.

Each program returns pairs of actual and expected results."""

import re
import threading
from pathlib import Path

import torch
import torch.distributed as dist


def stays_in_its_thread(rank, world):
    """The calling thread drives a blocking call and wakes no other thread."""
    tensor = torch.ones(1000)
    # Threads that earlier programs woke go to sleep.
    for _ in range(20):
        dist.all_reduce(tensor)
    before = _switches()
    for _ in range(200):
        dist.all_reduce(tensor)
    after = _switches()
    others = sum(
        count - before.get(thread, 0) for thread, count in after.items() if thread != threading.get_native_id()
    )
    # A thread that took part would wake up in each call. One thread wakes up regularly to check timers.
    return [(others < 100, True)]


def _switches():
    """Return how often each thread of this process has blocked."""
    switches = {}
    for thread in Path("/proc/self/task").iterdir():
        status = (thread / "status").read_text()
        switches[int(thread.name)] = int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)[1])
    return switches
