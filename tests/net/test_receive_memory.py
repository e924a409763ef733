"""The pool of memory for long messages."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from asyncdist.net.connection.receive_memory import ReceiveMemory

LONG = 1 << 20


def address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def test_memory_is_used_again_when_its_last_user_has_gone():
    pool = ReceiveMemory()
    view = pool.take(LONG)
    tensor = torch.frombuffer(view, dtype=torch.float32)
    first = address(view)
    del view
    other = pool.take(LONG)
    assert address(other) != first
    part = tensor[5:7]
    del tensor
    gc.collect()
    assert pool.kept_nbytes == 0
    del part
    gc.collect()
    assert pool.kept_nbytes == LONG
    assert address(pool.take(LONG - 5)) == first


def test_pool_keeps_no_more_than_its_limit_and_nothing_small():
    pool = ReceiveMemory(most_kept_nbytes=3 * LONG)
    views = [pool.take(LONG) for _ in range(5)] + [pool.take(10)]
    assert views[-1].nbytes == 10
    del views
    gc.collect()
    assert pool.kept_nbytes == 3 * LONG


def test_threads_share_the_pool(monkeypatch):
    """The loops of several threads receive at the same time."""
    pool = ReceiveMemory(most_kept_nbytes=4 * LONG)
    interval = sys.getswitchinterval()

    def take_and_write(number: int) -> bool:
        whole = True
        for turn in range(800):
            sizes = [(number + turn + part) % 5 * (LONG // 8) + LONG for part in range(3)]
            views = [pool.take(nbytes) for nbytes in sizes]
            for view in views:
                view[:8] = view[-8:] = number.to_bytes(8, "little")
            whole = whole and all(
                len(view) == nbytes and view[:8] == view[-8:] == number.to_bytes(8, "little")
                for view, nbytes in zip(views, sizes, strict=True)
            )
        return whole

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(take_and_write, range(4)))
    finally:
        sys.setswitchinterval(interval)
