"""Staying at a store daemon while a process computes: what its job keeps there is not to go meanwhile."""

from __future__ import annotations

import contextlib
import math
import threading

from asyncdist.base.deadline import Timeout
from asyncdist.config import Config
from asyncdist.errors import AsyncdistError
from asyncdist.store import TCPStore
from asyncdist.store.state.ownership import lodging


def connect_with_long_lease(host: str, port: int, timeout: Timeout) -> TCPStore:
    """Connect to a daemon to stay there: it waits for us as long as we try to come back to it.

    Waited for less long, all of a job could be back in time and find nothing of what it kept.
    """
    config = Config.from_environment()
    lease = max(config.store_lease, config.store_reconnect)
    return TCPStore(host, port, timeout=timeout, config=config.with_(store_lease=lease))


class LeaseKeepAlive(threading.Thread):
    """Stays under ``prefix`` from now on; once started, over every connection of ``daemon`` (`connect_with_long_lease`) until that is closed.

    A blocking client notices only in its next call that its connection is broken, and that may come long after its lease
    has run out. So this thread always waits at the daemon, and takes part in making the next connection at once.
    """

    def __init__(self, daemon: TCPStore, prefix: str, name: str) -> None:
        super().__init__(name="asyncdist-lodger", daemon=True)
        self._daemon = daemon
        self._never = f"{prefix}\0never"
        daemon.set(lodging(prefix, name), b"", ephemeral=True)

    def run(self) -> None:
        with contextlib.suppress(AsyncdistError):  # it was closed, or is over: whoever needs it will hear that
            self._daemon.wait([self._never], math.inf)
