"""The ranks of the benchmark of idle ranks. Each measures itself, as Linux tells in ``/proc/self``."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

_SELF = Path("/proc/self")
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)")
_NBYTES = re.compile(r"(Rss|Private_Dirty|Shared_Dirty): +(\d+) kB")


class _Footprint(NamedTuple):
    """Descriptors and threads by kind, bytes of memory by mapping, and the names of the imported modules."""

    descriptors: Counter[str]
    threads: Counter[str]
    memory: dict[str, Counter[str]]
    modules: frozenset[str]


def be_idle(test: Connection, contender: str, where: str, rank: int, size: int) -> None:
    """Join a world, and send what that has added: by its import, and by the world.

    Args:
        contender: ``gloo``, or transports of asyncdist.
    """
    import torch.distributed

    torch.set_num_threads(1)
    before = _footprint()
    if contender == "gloo":
        import torch.distributed as dist

        options: dict[str, Any] = {"backend": "gloo"}
    else:
        import asyncdist.sync as dist  # type: ignore[no-redef]

        options = {}
    imported = _footprint()
    dist.init_process_group(init_method=where, rank=rank, world_size=size, **options)
    dist.barrier()
    test.send("idle")
    test.recv()
    test.send((_difference(before, imported), _difference(imported, _footprint())))
    test.recv()
    dist.destroy_process_group()


def _footprint() -> _Footprint:
    descriptors: Counter[str] = Counter()
    for name in os.listdir(_SELF / "fd"):
        try:
            target = os.readlink(_SELF / "fd" / name)
        except FileNotFoundError:  # the descriptor of this listing
            continue
        descriptors[re.sub(r"\d+|[:\[\]]|anon_inode|\(deleted\)", "", target).strip()] += 1
    threads = Counter(each.joinpath("comm").read_text().strip() for each in (_SELF / "task").iterdir())
    memory: dict[str, Counter[str]] = {}
    name = ""
    for line in (_SELF / "smaps").read_text().splitlines():
        if found := _MAPPING.fullmatch(line):
            name = os.path.basename(found[1]).strip("[]") or "anonymous"
        elif found := _NBYTES.match(line):
            memory.setdefault(name, Counter())[found[1]] += 1024 * int(found[2])
    return _Footprint(descriptors, threads, memory, frozenset(sys.modules))


def _difference(before: _Footprint, after: _Footprint) -> dict[str, Any]:
    """Return what has been added, as plain data. The descriptors and threads are all that the process has."""
    memory = {
        name: {kind: nbytes - before.memory.get(name, Counter())[kind] for kind, nbytes in kinds.items()}
        for name, kinds in after.memory.items()
    }
    return {
        "descriptors": dict(after.descriptors),
        "threads": dict(after.threads),
        "memory": {name: nbytes for name, nbytes in memory.items() if nbytes["Rss"] > 0},
        "modules": sorted(after.modules - before.modules),
        **{kind: sum(nbytes[kind] for nbytes in memory.values()) for kind in ("Rss", "Private_Dirty", "Shared_Dirty")},
    }
