"""How ranks find each other: `meet`, given what init_process_group was given.

Read in this order: `method` (what the caller said), `place` (where an address can be left), `address` (which one),
`serving` (rank 0's store), `joining` (how a rank comes in), `meeting` (what it then has).
"""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack
from typing import Any

from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.config import Config, Launch
from asyncdist.rendezvous.addresses import advertised, outward, reachable, to_listen_on
from asyncdist.rendezvous.init_method import InitMethod, url_of
from asyncdist.rendezvous.join import WorldSpec, by_address, by_record, host_world, join_world
from asyncdist.rendezvous.session import RendezvousSession, TimeLimit
from asyncdist.rendezvous.sources import check_token, host_of, open_place

__all__ = ["RendezvousSession", "meet"]


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
    """Come together with the other ranks of the world ``name``; rank 0 serves the store that all of them share.

    ``timeout`` (seconds; None: the configured one) is for this and for the first `RendezvousSession.exchange`. Returns when this
    rank has its place: `RendezvousSession.exchange` waits for the others. Close the meeting in the end, also after a failed
    exchange. A call that fails or is cancelled leaves nothing behind, and may be made again.

    Raises UsageError for arguments that do not suffice, AddressError for a host that does not resolve, a port in use or
    an unknown interface, AuthenticationError where tokens differ or one is needed, RendezvousTimeoutError when rank 0
    is not found in time, and RendezvousError where this rank is taken or the world has another size.
    """
    config = Config.from_environment() if config is None else config
    launch = Launch.from_environment() if launch is None else launch
    allowed = seconds(timeout, config.timeout)
    limit = TimeLimit(allowed, Deadline.after(allowed))
    method = InitMethod.read(init_method, rank=rank, world_size=world_size, has_store=store is not None, launch=launch)
    world = WorldSpec(name, method.rank, method.world_size, config, limit)
    async with AsyncExitStack() as stack:
        if method.kind == "direct":
            return await _meet_directly(stack, method, world)
        place = await open_place(method, store, name, config, launch, limit)
        stack.push_async_callback(place.close)
        if method.rank != 0:
            return await join_world(stack, world, by_record(world, place), place.where)
        host = await _own_host(host_of(method, store), config, limit.deadline)
        token = config.token or secrets.token_hex(16)
        return await host_world(stack, world, host, 0, token=token, place=place, known_as=host)


async def _meet_directly(stack: AsyncExitStack, method: InitMethod, world: WorldSpec) -> RendezvousSession:
    """Meet in rank 0's store at an address that every rank was told."""
    token = world.config.token
    where = url_of(method.host, method.port)
    why = f"{where} is no loopback address, and nothing can pass a token on from rank 0 to the others there"
    check_token(method.host, world.config, why)
    if method.rank != 0:
        return await join_world(stack, world, by_address(world, method.host, method.port, token), where)
    host, guessed = await to_listen_on(method.host, world.config, world.limit.deadline)
    note = f" (served at {host}; ASYNCDIST_SOCKET_IFNAME chooses another)" if guessed else ""
    return await host_world(stack, world, host, method.port, token=token, place=None, known_as=method.host, note=note)


async def _own_host(master: str | None, config: Config, deadline: Deadline) -> str:
    """Return the address at which rank 0 serves the store: the one from which it reaches the meeting place."""
    if master is None:
        return outward(config)
    return advertised((await reachable(master, config, deadline))[0], config)
