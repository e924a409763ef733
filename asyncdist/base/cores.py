"""The processor cores: whether enough are free, how many threads share one, and how long this process waits for one.

The drivers of the engine, the calibration of groups, `ddp` and `torch_backend` choose by it how to wait and to send.
"""

from __future__ import annotations

import os

_RUN_DELAYS = "/proc/thread-self/schedstat"
_LOAD = "/proc/loadavg"


def run_delay() -> tuple[float, int] | None:
    """Return the seconds for which the calling thread has been ready to run without a core, and its time slices.

    None if the system does not say.
    """
    try:
        # A file that stays open would save 2 us in each ms of waiting, and cost every idle thread a descriptor.
        descriptor = os.open(_RUN_DELAYS, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _, delay, slices = os.read(descriptor, 64).split()
        finally:
            os.close(descriptor)
    # Not Linux, a sandbox without this file, or no descriptor is left.
    except (OSError, ValueError):
        return None
    return int(delay) * 1e-9, int(slices)


def threads_per_core() -> float | None:
    """Return how many threads of the machine can run now, the calling one among them, for each of its cores.

    None if the system does not say.
    """
    try:
        with open(_LOAD, "rb", buffering=0) as file:
            runnable, _, _ = file.read(128).split()[3].partition(b"/")
        return int(runnable) / (os.cpu_count() or 1)
    # Not Linux, a sandbox without this file, or no descriptor is left.
    except (OSError, ValueError, IndexError):
        return None


def allowed_cores() -> int:
    """Return on how many cores this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_free_cores(ranks: int, threads: int) -> bool:
    """Return whether a core stays idle on this machine while its ranks compute, each with some threads.

    An all-reduce over shared memory runs on the processor. Without a free core it competes with the backward pass, and
    overlapping the two gains nothing.
    """
    return allowed_cores() > ranks * threads
