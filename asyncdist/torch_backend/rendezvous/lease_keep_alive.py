"""Keep the lease of a job's keys at the store daemon alive while the process computes.

Called by `url_handler` and `rendezvous_handler`.
"""

from __future__ import annotations

import logging
import math
import threading

from asyncdist.base.deadline import Timeout
from asyncdist.base.error_text import describe_error
from asyncdist.config import Config
from asyncdist.errors import AsyncdistError
from asyncdist.store import PrefixStore, TCPStore
from asyncdist.store.protocol import operations
from asyncdist.torch_backend.torch_store import Store

log = logging.getLogger("asyncdist")


def leased_store(host: str, port: int, prefix: str, timeout: Timeout) -> tuple[Store, TCPStore]:
    """Connect to the daemon; return a store of the keys below ``prefix``, which has a lease, and the connection.

    The lease lasts at least as long as the client tries to reconnect. With a shorter one, all ranks of a job could
    reconnect in time and find the job's keys deleted. ``timeout`` limits each operation on the store, in seconds.
    """
    config = Config.from_environment()
    lease = max(config.store_lease, config.store_reconnect)
    daemon = TCPStore(host, port, timeout=timeout, config=config.with_(store_lease=lease))
    _LeaseKeepAlive(daemon, f"{prefix}/")
    return Store(PrefixStore(prefix, daemon)), daemon


class _LeaseKeepAlive(threading.Thread):
    """Keeps the lease on ``prefix`` while ``daemon`` is open, with the other processes of a job.

    A blocking client notices a broken connection only in its next call, which may come after its lease has expired.
    This thread therefore always has a call pending at the daemon, so that the client reconnects at once. If the store is
    lost for good, it says so in the log: nothing else does, until a rank next needs the store and gets the error.

    If the lease has only disconnected clients, as after a crash of the job, the constructor waits until one of them
    reconnects, or until the lease ends and the keys of the earlier job are deleted.
    """

    def __init__(self, daemon: TCPStore, prefix: str) -> None:
        super().__init__(name="asyncdist-lease", daemon=True)
        self._daemon, self._prefix = daemon, prefix
        daemon.request(operations.acquire_lease(prefix), math.inf)
        self.start()

    def run(self) -> None:
        try:
            self._daemon.wait([f"{self._prefix}\0never"], math.inf)
        except AsyncdistError as error:
            if not self._daemon.connection.is_closed:
                log.error(
                    "this process has lost its job's keys under %r for good: its groups go on, and calls that need the "
                    "store, as new_group and a new rendezvous, raise; save a checkpoint and start the job again at a "
                    "running store: %s",
                    self._prefix,
                    describe_error(error),
                )
