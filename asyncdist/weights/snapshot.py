"""Copies the tensors of a publisher into the memory of a version, block by block, in threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.weights.content.digest import digest
from asyncdist.weights.content.layout import Block, WeightsLayout
from asyncdist.weights.content.selection import flat_range

_SHARE_NBYTES = 8 << 20
"""Bytes that a thread copies before it takes the next share: one that another process holds up leaves more to the rest."""


async def take_snapshot(
    tensors: Mapping[str, torch.Tensor], layout: WeightsLayout, memory: torch.Tensor, threads: DaemonThreadPool
) -> NDArray[np.uint64]:
    """Copy tensors into the memory of a version, and return the digests of its blocks.

    When this function returns or raises, no thread reads the tensors any more. A caller that is cancelled waits until the
    threads have finished the blocks at which they are.
    """
    blocks = layout.blocks
    digests = np.zeros(len(blocks), dtype=np.uint64)
    stop = threading.Event()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = _shares(blocks, tensors)
    copying = [
        threads.submit(_copy, tensors, blocks, shares, memory, digests, stop) for _ in range(min(2, cores, len(shares)))
    ]
    futures = [asyncio.wrap_future(each) for each in copying]
    if not futures:
        return digests
    try:
        await asyncio.wait(futures)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait(futures)
        raise
    for future in futures:
        future.result()
    return digests


def _shares(blocks: Sequence[Block], tensors: Mapping[str, torch.Tensor]) -> deque[range]:
    """Return the numbers of all blocks in ranges of about `_SHARE_NBYTES`; a tensor to be converted is not divided."""
    shares, first, nbytes = deque[range](), 0, 0
    for number, block in enumerate(blocks):
        nbytes += block.nbytes
        following = blocks[number + 1 : number + 2]
        is_inside = bool(following) and following[0].place is block.place
        if nbytes >= _SHARE_NBYTES and not (is_inside and _needs_conversion(tensors[block.place.name])):
            shares.append(range(first, number + 1))
            first, nbytes = number + 1, 0
    if first < len(blocks):
        shares.append(range(first, len(blocks)))
    return shares


def _copy(
    tensors: Mapping[str, torch.Tensor],
    blocks: Sequence[Block],
    shares: deque[range],
    memory: torch.Tensor,
    digests: NDArray[np.uint64],
    stop: threading.Event,
) -> None:
    name, source = "", memory
    as_array = memory.numpy()
    while shares:
        try:
            numbers = shares.popleft()
        except IndexError:  # The other thread has taken the last share.
            return
        for number in numbers:
            if stop.is_set():
                return
            block = blocks[number]
            place = block.place
            if place.name != name:
                name, source = place.name, _source(tensors[place.name])
            itemsize = place.dtype.itemsize
            first = (block.offset - place.offset) // itemsize
            part = flat_range(source, first, first + block.nbytes // itemsize)
            # Bytes, because torch has no copy kernel for some dtypes.
            memory[block.offset : block.offset + block.nbytes].copy_(part.view(torch.uint8))
            digests[number] = digest(as_array[block.offset : block.offset + block.nbytes])


def _needs_conversion(tensor: torch.Tensor) -> bool:
    return not tensor.is_cpu or tensor.is_conj() or tensor.is_neg()


def _source(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without conjugation and negation; one of a device is copied to the host as a whole."""
    return tensor.detach().resolve_conj().resolve_neg().cpu()
