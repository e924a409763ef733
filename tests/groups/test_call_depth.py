"""Bounds on the number of Python frames that one blocking all-reduce enters in the calling thread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import asyncdist.sync as dist

CALLS = 100


def frames_of(call: Callable[[], object]) -> int:
    """Return how many Python functions ``call`` enters in this thread."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def fewest_frames(backend: str, path: Path, rank: int) -> int:
    """Return the fewest frames of a repeated 4-byte all-reduce; calls that wait for the peer enter more."""
    with dist.process_group(backend, f"file://{path}", world_size=2, rank=rank) as group:
        tensor = torch.ones(1)

        def call() -> None:
            group.all_reduce(tensor, background=False)

        call()
        fewest = min(frames_of(call) for _ in range(CALLS))
        group.barrier(background=False)
        return fewest


@pytest.mark.parametrize(("backend", "bound"), [("shm", 19), ("tcp", 121)])
def test_repeated_all_reduce_enters_few_frames(backend: str, bound: int, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(lambda rank: fewest_frames(backend, tmp_path / "store", rank), range(2)))
    assert min(counts) <= bound
