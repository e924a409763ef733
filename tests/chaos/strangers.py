"""Strangers that hold connections open at all ports of the processes of a world, without the token.

They say nothing, half of a greeting, or a greeting and no proof. The world must go on as without them.
"""

import contextlib
import os
import re
import socket
from pathlib import Path

from asyncdist.net.security.auth import MAGIC, NONCE_NBYTES

_SAY = (b"", MAGIC[:5], MAGIC + bytes(NONCE_NBYTES))
_EACH = 2
"""The number of strangers of each kind at a port."""
_LISTENS, _ACCEPTS = "0A", 0x10000


class Strangers:
    """The strangers of one world, whose processes are in the network namespace of the runner."""

    def __init__(self):
        self._held = []
        self._visited = set()

    @property
    def num_ports(self):
        """The number of ports at which there are strangers, or were."""
        return len(self._visited)

    def visit(self, pids):
        """Connect to the ports at which some processes listen, and at which no stranger was before."""
        for pid in pids:
            for port in _ports_of(pid) - self._visited:
                self._visited.add(port)
                for says in _SAY * _EACH:
                    self._connect(*port, says)

    def _connect(self, family, kind, address, says):
        sock = socket.socket(family, kind)
        self._held.append(sock)
        sock.setblocking(False)
        # A process may have ended; the connection of one that is stopped waits in its backlog.
        with contextlib.suppress(OSError):
            sock.connect_ex(address)
            sock.send(says)

    def close(self):
        """Leave."""
        for sock in self._held:
            sock.close()


def _ports_of(pid):
    """Return family, type and address of the listening sockets of a process; an empty set if it has ended."""
    ports = set()
    with contextlib.suppress(OSError):
        inodes = set()
        for name in os.listdir(f"/proc/{pid}/fd"):
            # It may have been closed.
            with contextlib.suppress(FileNotFoundError):
                if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}")):
                    inodes.add(found[1])
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENS and inode in inodes:
                ports.add((socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", int(local.rpartition(":")[2], 16))))
        for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
            _, _, _, flags, kind, _, inode, *path = line.split()
            if int(flags, 16) & _ACCEPTS and inode in inodes and path and path[0].startswith("@"):
                ports.add((socket.AF_UNIX, int(kind, 16), f"\0{path[0][1:]}"))
    return ports
