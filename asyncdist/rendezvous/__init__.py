"""Rendezvous: how the ranks of a world find each other. `groups` calls `meet` with the arguments of init_process_group.

Read the modules in this order: `init_method` (parses the arguments), `record_store` and `sources` (where rank 0 publishes
an address), `addresses` (which address), `host_store` (rank 0's store), `join` (how a rank joins), `session` (the result).
Processes in no common group find each other by names: `directory` and `search`.
"""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.base.descriptors import ClosingOnError
from asyncdist.config import Config
from asyncdist.environment import Launch
from asyncdist.rendezvous.addresses import outward, own_host, probe, to_listen_on
from asyncdist.rendezvous.directory import JobDirectory, PeerRecord, RecordChange
from asyncdist.rendezvous.host_store import ServerHandle
from asyncdist.rendezvous.init_method import InitMethod, daemon_address, url_of
from asyncdist.rendezvous.join import WorldSpec, by_address, by_record, host_world, join_world
from asyncdist.rendezvous.search import JobSearch
from asyncdist.rendezvous.session import BLOCK, Listed, RendezvousSession, Summary, TimeLimit
from asyncdist.rendezvous.sources import check_token, host_of, open_record_store, torch_store_at

__all__ = [
    "BLOCK",
    "InitMethod",
    "JobDirectory",
    "JobSearch",
    "Listed",
    "OwnStore",
    "PeerRecord",
    "RecordChange",
    "RendezvousSession",
    "Summary",
    "TimeLimit",
    "daemon_address",
    "meet",
    "outward",
    "probe",
    "serve_own_store",
    "url_of",
]


async def meet(
    init_method: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    store: Any = None,
    timeout: Timeout = None,
    name: str = "",
    config: Config | None = None,
    launch: Launch | None = None,
) -> RendezvousSession:
    """Meet the other ranks of the world ``name``; rank 0 serves the store that all of them share.

    Returns when this rank has claimed its place; `RendezvousSession.exchange` waits for the other ranks. Close the session
    in the end, also after a failed exchange. A call that fails or is cancelled leaves nothing open and may be repeated.

    Args:
        init_method: A URL, or None for ``env://``; see `asyncdist.rendezvous.init_method`. If torch's default process group
            has met at the same address, the ranks meet in its store.
        rank: Rank of this process; by default from the URL or the launcher.
        world_size: Number of ranks; by default from the URL or the launcher.
        store: A store that every rank has, instead of ``init_method``.
        timeout: Seconds for this call and the first exchange; by default ASYNCDIST_TIMEOUT.
        name: Name of the world; worlds with different names do not meet.
        config: The settings; by default from the environment.
        launch: The launcher's variables; by default from the environment.

    Raises:
        UsageError: Arguments are missing or wrong.
        AddressError: A host does not resolve, a port is in use, or an interface is unknown.
        AuthenticationError: Tokens differ, or a token is required.
        RendezvousTimeoutError: Rank 0 was not found in time.
        RendezvousError: The rank is taken, or the world has another size.
    """
    config = Config.from_environment() if config is None else config
    launch = Launch.from_environment() if launch is None else launch
    allowed = seconds(timeout, config.timeout)
    limit = TimeLimit(allowed, Deadline.after(allowed))
    method = InitMethod.read(init_method, rank=rank, world_size=world_size, has_store=store is not None, launch=launch)
    if method.kind == "direct" and (shared := torch_store_at(method.host, method.port)) is not None:
        # Rank 0 of torch's process group serves a store at this port.
        store, method = shared, replace(method, kind="store")
    world = WorldSpec(name, method.rank, method.world_size, config, limit)
    async with AsyncExitStack() as stack:
        if method.kind == "direct":
            return await _meet_directly(stack, method, world)
        records = await open_record_store(method, store, name, config, launch, limit)
        stack.push_async_callback(records.close)
        if method.rank != 0:
            return await join_world(stack, world, partial(by_record, world, records), records.where)
        host = await own_host(host_of(method, store), config, limit.deadline)
        token = config.token or secrets.token_hex(16)
        return await host_world(stack, world, host, 0, token=token, records=records, known_as=host)


async def _meet_directly(stack: AsyncExitStack, method: InitMethod, world: WorldSpec) -> RendezvousSession:
    """Meet in rank 0's store at an address that every rank was given."""
    token = world.config.token
    where = url_of(method.host, method.port)
    why = f"{where} is not a loopback address, and rank 0 cannot pass a generated token to the other ranks there"
    check_token(method.host, world.config, why)
    if method.rank != 0:
        return await join_world(stack, world, partial(by_address, world, method.host, method.port, token), where)
    host, guessed = await to_listen_on(method.host, world.config, world.limit.deadline)
    note = f" (served at {host}; ASYNCDIST_SOCKET_IFNAME chooses another)" if guessed else ""
    return await host_world(stack, world, host, method.port, token=token, records=None, known_as=method.host, note=note)


@dataclass(frozen=True, slots=True)
class OwnStore:
    """A store that this process serves on its background loop. Worlds that it hosts at that address use it too.

    Other processes must be told the token if it ``is_generated``.
    """

    host: str
    port: int
    token: str
    is_generated: bool
    server: ServerHandle

    async def close(self) -> None:
        """Stop to serve it. Worlds that use it keep it."""
        await self.server.close()


async def serve_own_store(store: Any, *, timeout: float, config: Config, launch: Launch) -> OwnStore:
    """Serve a store, at the address from which this process reaches ``store``, which the processes of the job share.

    The look-up of its address takes at most ``timeout`` seconds, and raises AddressError if that fails. Without a token, a
    ``store`` in which other hosts can read what processes tell each other is an AuthenticationError.
    """
    master = host_of(InitMethod("store", 0, 1), store)
    if not launch.on_one_host:
        check_token(master, config, f"a generated token cannot be passed to other hosts through the store at {master}")
    host = await own_host(master, config, Deadline.after(timeout))
    server, token = ServerHandle(), config.token or secrets.token_hex(16)
    async with ClosingOnError(server):
        served = await server.open(host, 0, token=token, config=config)
    return OwnStore(host, served.port, token, config.token is None, server)
