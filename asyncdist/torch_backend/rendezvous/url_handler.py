"""``init_method="asyncdist://host:port/job"``: rendezvous of torch.distributed at an ``asyncdist store`` daemon.

Registered as a handler in `torch.distributed.rendezvous`. Every start of a job is a new generation and never reads keys
of an earlier one. The daemon deletes a generation's keys after its last rank has left or been killed. A rank that
reconnects too late for its keys gets an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from asyncdist.base.background_loop import background_loop
from asyncdist.base.deadline import Timeout, seconds
from asyncdist.config import Config
from asyncdist.kernel import c10d_private
from asyncdist.rendezvous import meet
from asyncdist.torch_backend.rendezvous.lease_keep_alive import leased_store
from asyncdist.torch_backend.torch_store import Store

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
