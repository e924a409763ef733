"""``init_method="asyncdist://host:port/job"``: rendezvous of torch.distributed at an ``asyncdist store`` daemon.

`leased_store` keeps the lease of a job's keys at the daemon alive while the process computes, also for torchrun's agents.

Registered as a handler in `torch.distributed.rendezvous`. Every start of a job is a new generation and never reads keys
of an earlier one. The daemon deletes a generation's keys after its last rank has left or been killed. A rank that
reconnects too late for its keys gets an error.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from asyncdist.base.background_loop import background_loop
from asyncdist.base.deadline import Timeout, seconds
from asyncdist.base.error_text import describe_error
from asyncdist.config import Config
from asyncdist.errors import AsyncdistError
from asyncdist.kernel import c10d_private
from asyncdist.rendezvous import meet
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


SCHEME = "asyncdist"


def register_url_scheme() -> None:
    """Register ``asyncdist://`` as an init method of torch.distributed. Idempotent."""
    c10d_private.rendezvous_handlers.setdefault(SCHEME, rendezvous)


def rendezvous(url: str, timeout: Timeout = None, **ignored: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield the job's store at the daemon, this process's rank and the world size.

    Rank and world size come from the URL's query, where torch puts its arguments, or from the launcher.

    Raises:
        RendezvousTimeoutError: Ranks are missing; the error names them.
        UsageError: The URL, rank or world size is invalid.
        AuthenticationError: The daemon refuses the token.
        StoreConnectionError: The daemon does not answer.
    """
    rank, world_size, world_id = background_loop().run(_agree(url, timeout))
    parts = urlsplit(url)
    world = f"{quote(unquote(parts.path.strip('/')), safe='')}/{world_id}"
    limit = seconds(timeout, Config.from_environment().timeout)
    store, _ = leased_store(parts.hostname or "", parts.port or 0, world, limit)
    yield store, rank, world_size
    raise RuntimeError(f"{SCHEME}:// creates one world per call: call init_process_group again")


async def _agree(url: str, timeout: Timeout) -> tuple[int, int, str]:
    """Rendezvous with the other ranks of this generation; return rank, world size and the generation's name."""
    meeting = await meet(url, timeout=timeout, name="torch.distributed")
    try:
        await meeting.exchange(b"")
        return meeting.rank, meeting.world_size, meeting.world_id
    finally:
        await meeting.close()
