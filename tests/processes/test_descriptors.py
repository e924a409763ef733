"""The descriptors and threads that an idle rank keeps, and ranks without free descriptors, whose errors name the limit."""

import time

import pytest

pytestmark = pytest.mark.processes


def test_collective_of_a_rank_without_descriptors_names_the_limit(job, face):
    ranks = job.world(2, face)
    limit = ranks[0].do("exhaust_descriptors")
    ranks[0].tell("all_reduce", None, 10)
    # This rank needs no further descriptor.
    if job.transport == "shm" and face != "blocking":
        ranks[1].tell("all_reduce", None, 10)
        assert [told.hear() for told in ranks] == [2.0, 2.0]
        return
    failed = ranks[0].hear()
    assert failed.kind == "GroupError"
    assert failed.text.startswith("all_reduce #1 on group 'world', rank 0")
    assert f"rank 0 has no free file descriptor, the limit is {limit}" in failed.text
    assert "ulimit -n" in failed.text
    ranks[0].do("release_descriptors")
    # Over shared memory rank 0 has contributed already.
    if job.transport == "tcp":
        ranks[1].tell("all_reduce", None, 10)
        told = ranks[1].hear()
        assert (told.kind, told.peer) == ("GroupAbortedError", 0)
        assert f"rank 0 has no free file descriptor, the limit is {limit}" in told.text


def test_rendezvous_of_a_rank_without_descriptors_names_the_limit(job, face, tmp_path):
    (rank,) = job.world(1, face)
    rank.do("destroy")
    limit = rank.do("exhaust_descriptors")
    rank.tell("init", f"file://{tmp_path}/again", 0, 1)
    failed = rank.hear()
    assert failed.kind == "RendezvousError"
    assert f"this process has no free file descriptor, the limit is {limit}; raise the limit" in failed.text
    rank.do("release_descriptors")
    rank.do("init", f"file://{tmp_path}/again", 0, 1)
    assert rank.do("all_reduce", None, 10) == 1.0


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
