"""The processor cores that this process may use."""

from __future__ import annotations

import os


def has_free_cores(ranks: int, threads: int) -> bool:
    """Return whether a core stays idle on this machine while all of its ranks compute.

    An all-reduce over shared memory runs on the processor. Without a free core it competes with the backward pass, and
    overlapping the two gains nothing.

    Args:
        ranks: Number of ranks on this machine.
        threads: Number of threads with which each rank computes, as `torch.get_num_threads` returns it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > ranks * threads
