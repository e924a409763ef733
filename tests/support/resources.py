"""What Linux knows of a process: its open files, the shared segments that it has mapped, and its children."""

import contextlib
import os
from pathlib import Path


def open_files() -> list[str]:
    """Return what each descriptor of this process refers to; empty on systems without /proc."""
    found, folder = [], "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            found.append(os.readlink(f"{folder}/{name}"))
    return found


def mapped_segments() -> list[str]:
    """Return the shared segments, of this process and of peers, that this process has mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:asyncdist" in line]


def children(pid: int | str = "self") -> set[int]:
    """Return the process ids of the children of a process."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found.update(map(int, path.read_text().split()))
    return found
