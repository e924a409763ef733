"""Bounds on the number of Python frames that one small blocking call enters in the calling thread."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import asyncdist.sync as dist
from tests.support.frames import frames_of

CALLS = 100


def fewest_frames(backend, path, rank, counts):
    """Return the fewest frames of all-reduces of ``counts`` elements; calls that wait for the peer enter more.

    Over shared memory they include the signal that wakes the peer: two threads of one process do not poll at the same time.
    """
    with dist.process_group(backend, f"file://{path}", world_size=2, rank=rank) as group:
        group.all_reduce(torch.ones(1), background=False)
        tensors = [torch.ones(count) for count in counts]
        fewest = min(frames_of(partial(group.all_reduce, tensor, background=False)) for tensor in tensors)
        group.barrier(background=False)
        return fewest


REPEATED = [1] * CALLS
FIRST = range(2, 2 + CALLS)


@pytest.mark.parametrize(
    ("backend", "counts", "bound"),
    [("shm", REPEATED, 17), ("shm", FIRST, 79), ("tcp", REPEATED, 27)],
    ids=["shm repeated", "shm first", "tcp repeated"],
)
def test_all_reduce_enters_few_frames(backend, counts, bound, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        fewest = list(pool.map(lambda rank: fewest_frames(backend, tmp_path / "store", rank, counts), range(2)))
    assert min(fewest) <= bound


def frames_over_links(path, rank):
    """Return the fewest frames of each collective on one element of each of two ranks, which repeats over tcp."""
    with dist.process_group("tcp", f"file://{path}", world_size=2, rank=rank) as group:
        one, two, row, blocks = torch.ones(1), torch.ones(2), [torch.ones(1)] * 2, list(torch.zeros(2).split(1))
        at_root = rank == 0
        calls = {
            "broadcast": partial(group.broadcast, one, 0, background=False),
            "reduce": partial(group.reduce, one, 0, background=False),
            "all_gather": partial(group.all_gather, blocks, one, background=False),
            "all_gather_single": partial(group.all_gather_single, two, one, background=False),
            "gather": partial(group.gather, one, blocks if at_root else None, 0, background=False),
            "scatter": partial(group.scatter, one, row if at_root else None, 0, background=False),
            "reduce_scatter": partial(group.reduce_scatter, one, row, background=False),
            "all_to_all": partial(group.all_to_all, blocks, row, background=False),
            "all_to_all_single": partial(group.all_to_all_single, two, torch.ones(2), background=False),
            "barrier": partial(group.barrier, background=False),
        }
        fewest = {name: min(frames_of(call) for _ in range(CALLS)) for name, call in calls.items()}
        group.barrier(background=False)
        return fewest


def test_small_collectives_over_links_enter_few_frames(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: frames_over_links(tmp_path / "store", rank), range(2)))
    fewest = {name: min(frames[name] for frames in ranks) for name in ranks[0]}
    assert {name: frames for name, frames in fewest.items() if frames > 27} == {}
