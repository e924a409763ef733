"""Keep the lease of a job's keys at the store daemon alive while the process computes.

Called by `url_handler` and `rendezvous_handler`.
"""

from __future__ import annotations

import contextlib
import math
import threading

from asyncdist.base.deadline import Timeout
from asyncdist.config import Config
from asyncdist.errors import AsyncdistError
from asyncdist.store import TCPStore
from asyncdist.store.protocol import operations


def connect_with_long_lease(host: str, port: int, timeout: Timeout) -> TCPStore:
    """Connect to the daemon with a lease that lasts at least as long as the client tries to reconnect.

    With a shorter lease, all ranks of a job could reconnect in time and find the job's keys deleted.

    Args:
        host: Host name or address of the daemon.
        port: Port of the daemon.
        timeout: Seconds after which an operation on the store fails.
    """
    config = Config.from_environment()
    lease = max(config.store_lease, config.store_reconnect)
    return TCPStore(host, port, timeout=timeout, config=config.with_(store_lease=lease))


class LeaseKeepAlive(threading.Thread):
    """Keeps the lease on ``prefix`` while ``daemon`` is open, with the other processes of a job.

    A blocking client notices a broken connection only in its next call, which may come after its lease has expired.
    This thread therefore always has a call pending at the daemon, so that the client reconnects at once.

    If the lease has only disconnected clients, as after a crash of the job, the constructor waits until one of them
    reconnects, or until the lease ends and the keys of the earlier job are deleted.
    """

    def __init__(self, daemon: TCPStore, prefix: str) -> None:
        super().__init__(name="asyncdist-lease", daemon=True)
        self._daemon = daemon
        self._never = f"{prefix}\0never"
        daemon.request(operations.acquire_lease(prefix), math.inf)
        self.start()

    def run(self) -> None:
        # The client was closed or has failed: its next caller gets that error.
        with contextlib.suppress(AsyncdistError):
            self._daemon.wait([self._never], math.inf)
