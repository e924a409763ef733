"""``init_method="asyncdist://host:port/job"``: a job of torch's finds a store daemon of ours (``asyncdist store``).

Every start of a job is a generation of its own: what an earlier one left at the daemon, killed or not, is never read. It
goes with the last rank that has left or been killed. A rank that comes back when it may be gone is told so by an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from asyncdist.base.background_loop import background_loop
from asyncdist.base.deadline import Timeout, seconds
from asyncdist.config import Config
from asyncdist.rendezvous import meet
from asyncdist.store import PrefixStore
from asyncdist.torch_backend.lease_keep_alive import LeaseKeepAlive, connect_with_long_lease
from asyncdist.torch_backend.torch_store import Store

SCHEME = "asyncdist"


def register_url_scheme() -> None:
    """Make ``asyncdist://`` an init method of torch.distributed. Idempotent."""
    handlers: dict[str, Any] = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers.setdefault(SCHEME, rendezvous)


def rendezvous(url: str, timeout: Timeout = None, **ignored: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield the job's store at the daemon, our rank and the world size, as torch asks an init method.

    Rank and world size come from the URL's query (torch puts its arguments there) or from the launcher. Raises what
    `asyncdist.init_process_group` raises: RendezvousTimeoutError that names who is missing, UsageError,
    AuthenticationError, StoreConnectionError.
    """
    rank, world_size, world_id = background_loop().run(_agree(url, timeout))
    parts = urlsplit(url)
    daemon = connect_with_long_lease(
        parts.hostname or "", parts.port or 0, seconds(timeout, Config.from_environment().timeout)
    )
    world = f"{parts.path.strip('/')}/{world_id}"
    LeaseKeepAlive(daemon, f"{world}/", str(rank)).start()
    yield Store(PrefixStore(world, daemon)), rank, world_size
    raise RuntimeError(f"{SCHEME}:// makes one world a call: call init_process_group again")


async def _agree(url: str, timeout: Timeout) -> tuple[int, int, str]:
    """Meet the other ranks of this generation at the daemon; return rank, world size, and the generation's name."""
    meeting = await meet(url, timeout=timeout, name="torch.distributed")
    try:
        await meeting.exchange(b"")
        return meeting.rank, meeting.world_size, meeting.world_id
    finally:
        await meeting.close()
