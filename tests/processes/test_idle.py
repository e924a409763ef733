"""What an idle rank of four on one host keeps: descriptors and threads."""

import time

import pytest

pytestmark = pytest.mark.processes

# The most descriptors of rank 0, which serves the store, and of each other rank. Those of the process before the world do
# not count: 3, and for the awaited API those of its loop.
MOST = {"shm,tcp": (21, 16), "tcp": (26, 21)}
MOST_THREADS = 3


def test_idle_rank_keeps_few_descriptors_and_threads(job, face):
    transports = "shm,tcp" if job.transport == "shm" else "tcp"
    first, others = MOST[transports]
    ranks = job.met(4, face, ASYNCDIST_TRANSPORT=transports)
    for rank, told in enumerate(ranks):
        give_up = time.monotonic() + 60.0
        # A thread that had something to do a moment ago ends.
        while (kept := told.do("kept"))[1] > MOST_THREADS and time.monotonic() < give_up:
            time.sleep(0.05)
        descriptors, threads = kept
        assert descriptors <= (others if rank else first)
        assert threads <= MOST_THREADS
