"""Bounds on the number of Python frames that one blocking all-reduce enters in the calling thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

import asyncdist.sync as dist
from tests.support.frames import frames_of

CALLS = 100


def fewest_frames(backend: str, path: Path, rank: int, counts: Sequence[int]) -> int:
    """Return the fewest frames of all-reduces of ``counts`` elements; calls that wait for the peer enter more."""
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
    [("shm", REPEATED, 16), ("shm", FIRST, 66), ("tcp", REPEATED, 31)],
    ids=["shm repeated", "shm first", "tcp repeated"],
)
def test_all_reduce_enters_few_frames(backend: str, counts: Sequence[int], bound: int, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        fewest = list(pool.map(lambda rank: fewest_frames(backend, tmp_path / "store", rank, counts), range(2)))
    assert min(fewest) <= bound
