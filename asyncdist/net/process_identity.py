"""Identifies a process of a host for other processes of that host, which can then tell what it does and that it has ended.

The end of a connection proves no death: a peer, a firewall or a proxy may have closed it. The host's process table does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from asyncdist.net.network import boot_id

_ENDED = (b"Z", b"X", b"x")
"""The states of a process that has ended, and whose parent has not asked for its status yet."""


class ProcessState(NamedTuple):
    """What a process does at the moment; ``text`` is a clause of an error message."""

    is_working: bool = False
    """Whether a thread of it runs, waits for a processor, or waits for a disk."""
    is_traced: bool = False
    """Whether a debugger holds it."""
    text: str = ""


_ACTIVITIES = {
    b"t": ProcessState(is_traced=True, text="a debugger holds its process"),
    b"T": ProcessState(text="its process is stopped"),
    b"D": ProcessState(is_working=True, text="its process waits for a disk or for memory"),
    b"R": ProcessState(is_working=True, text="a call in it keeps the interpreter busy"),
}
"""What a process does by the state of one of its threads; the first of them counts."""


def process_identity(host_name: str | None = None) -> dict[str, Any] | None:
    """Return the identity of this process as plain data for its peers; None where the system does not provide it.

    Processes whose ``host_name`` differs (ASYNCDIST_HOST) are on different hosts, and do not look at each other.
    """
    try:
        started = _stat(os.getpid())[1]
        host = f"{boot_id()} {host_name or ''}"
        return {"host": host, "pids": os.readlink("/proc/self/ns/pid"), "pid": os.getpid(), "started": started}
    except (OSError, IndexError, ValueError):
        return None


def has_ended(identity: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> bool:
    """Return whether a process has ended; False also if this process, of identity ``own``, cannot see it."""
    if not is_visible(identity, own):
        return False
    assert identity is not None
    try:
        state, started = _stat(identity["pid"])
    except FileNotFoundError:
        return True
    except (OSError, IndexError, ValueError):
        # ESRCH: the process has ended between opening and reading.
        return not os.path.exists(f"/proc/{identity['pid']}")
    # Another process may have the number now.
    return state in _ENDED or started != identity["started"]


def process_state(identity: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> ProcessState | None:
    """Return what another process does; None if this process, of identity ``own``, cannot see it."""
    if identity == own or not is_visible(identity, own):
        return None
    assert identity is not None
    folder, states = f"/proc/{identity['pid']}/task", set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(folder):
            # The thread may have ended.
            with contextlib.suppress(OSError), open(f"{folder}/{thread}/stat", "rb") as stat:
                states.add(stat.read().rpartition(b") ")[2][:1])
    idle = ProcessState(text="a call in it holds the interpreter") if states else None
    return next((activity for state, activity in _ACTIVITIES.items() if state in states), idle)


def last_core(identity: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the core on which the main thread of a visible process runs or has run, and whether the thread sleeps.

    The core is -1 if the process has ended.
    """
    try:
        fields = _fields(identity["pid"])
        return int(fields[36]), fields[0] != b"R"
    except (OSError, IndexError, ValueError):
        return -1, True


def is_visible(identity: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> bool:
    """Return whether two processes are in one process table."""
    return (
        identity is not None and own is not None and (identity["host"], identity["pids"]) == (own["host"], own["pids"])
    )


class Neighbours(dict[int, Mapping[str, Any] | None]):
    """The identities of the processes of a machine by rank, as the process of the rank ``own`` sees them."""

    def __init__(self, own: int, identities: Mapping[int, Mapping[str, Any] | None] | None = None) -> None:
        super().__init__(identities or {})
        self._own = own

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank has ended; False also if it cannot be seen."""
        return has_ended(self.get(rank), self.get(self._own))

    def state_of(self, rank: int) -> ProcessState | None:
        """Return what the process of another rank does; None if it cannot be seen."""
        return process_state(self.get(rank), self.get(self._own))

    def look_at(self, rank: int) -> str:
        """Return what the process of a rank does, as a clause; empty if it cannot be seen. Any thread may call it."""
        if self.has_ended(rank):
            return "its process has ended"
        state = self.state_of(rank)
        return "" if state is None else state.text

    def pid_of(self, rank: int) -> int | None:
        """Return the id of the process of a rank on its host; None if it is not known."""
        identity = self.get(rank)
        return None if identity is None else identity["pid"]

    def visible(self) -> dict[int, Mapping[str, Any]]:
        """Return the identities of the processes that can be seen, with the own one."""
        own = self.get(self._own)
        return {rank: each for rank, each in self.items() if each is not None and is_visible(each, own)}


def pids_of_machine(identities: Mapping[int, Mapping[str, Any] | None], rank: int) -> list[int] | None:
    """Return the processes of all ranks on the machine of ``rank``, whatever the names of their hosts.

    None if some are not visible from there, or may be on it.
    """
    own, all_known = identities[rank], list(identities.values())
    if own is None or None in all_known:
        return None
    here = [each for each in all_known if each is not None and _machine(each) == _machine(own)]
    return [each["pid"] for each in here] if all(each["pids"] == own["pids"] for each in here) else None


def _machine(identity: Mapping[str, Any]) -> str:
    return str(identity["host"]).partition(" ")[0]


def _stat(pid: int) -> tuple[bytes, int]:
    fields = _fields(pid)
    return fields[0], int(fields[19])


def processor_ticks(pid: int) -> int:
    """Return the processor time of a process in ticks of the kernel. Raises OSError, IndexError and ValueError."""
    fields = _fields(pid)
    return int(fields[11]) + int(fields[12])


def _fields(pid: int) -> list[bytes]:
    """Return what the system says of a process, from its state on."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        # The name before the state may contain any character.
        return stat.read().rpartition(b") ")[2].split()
