"""Which threads take part in a call; run by the teams of conftest.py.

Each program returns pairs of what came and what should have.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

import torch
import torch.distributed as dist


def stays_in_its_thread(rank, world):
    """A blocking call is driven by the thread that makes it, and wakes no other one."""
    tensor = torch.ones(1000)
    for _ in range(20):  # threads that something before has woken go to sleep
        dist.all_reduce(tensor)
    before = _switches()
    for _ in range(200):
        dist.all_reduce(tensor)
    after = _switches()
    others = sum(
        count - before.get(thread, 0) for thread, count in after.items() if thread != threading.get_native_id()
    )
    return [(others < 20, True)]  # one wakes up now and then to look at the time


def _switches():
    """Return how often each thread of this process has begun or stopped to run."""
    switches = {}
    for thread in Path("/proc/self/task").iterdir():
        status = (thread / "status").read_text()
        switches[int(thread.name)] = sum(map(int, re.findall(r"ctxt_switches:\s+(\d+)", status)))
    return switches
