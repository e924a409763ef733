"""Find the addresses on which a rank listens, which it dials, and which it advertises to its peers.

`rendezvous` and `join` call it. A rank advertises a loopback address only if the meeting point is spelled as loopback. A
host name that resolves to loopback (Debian's ``127.0.1.1``) means "this host": rank 0 and the other ranks on that host
use the host's outward address instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from asyncdist.base.deadline import Deadline
from asyncdist.config import Config
from asyncdist.errors import AddressError
from asyncdist.net.network import (
    address_towards,
    addresses_of_interface,
    choose_address,
    interface_addresses,
    is_address,
    is_local,
    is_loopback,
    look_up,
)
from asyncdist.store.client.connect import ConnectRetry, look_up_overdue, resolution_error, unresolved

_OUTSIDE = ("198.51.100.1", "2001:db8::1")
"""Documentation addresses (RFC 5737, RFC 3849): only the route to them is looked up."""


async def resolve(host: str, deadline: Deadline) -> list[str]:
    """Return the addresses of a host, IPv4 first; every host with the same name server gets the same list.

    A scheduler may start a worker before its name resolves, so an unknown name is retried for some seconds.

    Raises:
        AddressError: The name does not resolve.
        LookUpTimeoutError: The deadline passed before the name server answered.
    """
    if is_address(host):
        return [host]
    if is_loopback(host):
        return ["127.0.0.1"] if is_local("127.0.0.1") else ["::1"]
    retry = ConnectRetry(host, 0, deadline.remaining())
    failure: socket.gaierror | None = None
    async for _ in retry:
        try:
            async with asyncio.timeout(deadline.remaining_or_none()) as limit:
                return sorted(await _look_up(host), key=lambda address: ":" in address)
        except (OSError, UnicodeError) as error:
            if limit.expired() and failure is not None:
                raise unresolved(host, failure) from None
            if limit.expired():
                raise look_up_overdue(host) from None
            failure = resolution_error(error)
            retry.failed(failure)
    raise retry.overdue()


async def _look_up(name: str) -> list[str]:
    return list(dict.fromkeys(address.partition("%")[0] for address in await look_up(name)))


async def probe(host: str, port: int, timeout: float | None) -> None:
    """Connect once, and close the connection. Raises OSError if nothing listens there; there is no retry."""
    async with asyncio.timeout(timeout):
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def reachable(host: str, config: Config, deadline: Deadline) -> list[str]:
    """Return the addresses at which other hosts can dial ``host``."""
    return _from_outside(host, await resolve(host, deadline), config)


def _from_outside(host: str, resolved: list[str], config: Config) -> list[str]:
    if is_loopback(host):
        return resolved
    return list(dict.fromkeys(outward(config) if is_loopback(one) else one for one in resolved))


async def to_listen_on(host: str, config: Config, deadline: Deadline) -> tuple[str, bool]:
    """Return the address of this host to which ``host`` refers, and whether it is a guess.

    It is a guess if the name only means "this host" and the user has chosen no interface: on other hosts the name may
    resolve to another address of this host. Raises AddressError if ``host`` refers to another host.
    """
    resolved = await resolve(host, deadline)
    found = _from_outside(host, resolved, config)
    local = [one for one in found if is_local(one)]
    if not local:
        resolution = "" if found == [host] else f" ({', '.join(found)})"
        raise AddressError(
            f"rank 0 cannot serve the store at {host}{resolution}, which is not an address of this host: it has "
            f"{_listed()}; start rank 0 on that host, or name this one"
        )
    return local[0], local[0] not in resolved and config.interface is None


def outward(config: Config) -> str:
    """Return this host's outward address; loopback only if it has no other."""
    if config.interface is not None:
        return by_interface(config.interface, None)
    for outside in _OUTSIDE:
        local = address_towards(outside)
        if local is not None and not is_loopback(local):
            return local
    return choose_address(interface_addresses()) or "127.0.0.1"


def by_interface(rule: str, route: str | None) -> str:
    """Return an address of the interfaces that match the user's rule. Raises AddressError, which lists the interfaces."""
    every = interface_addresses()
    try:
        chosen = choose_address(addresses_of_interface(every, rule), route)
    except ValueError as error:
        raise AddressError(f"ASYNCDIST_SOCKET_IFNAME: {error}") from None
    if chosen is None:
        raise AddressError(
            f"ASYNCDIST_SOCKET_IFNAME={rule!r} matches no usable interface of this host, which has {_listed()}"
        )
    return chosen


def advertised(store_host: str, config: Config) -> str:
    """Return the address that this rank advertises, given the address at which it reaches the store."""
    route = address_towards(store_host)
    if config.interface is not None:
        return by_interface(config.interface, route)
    if route is not None and (is_loopback(store_host) or not is_loopback(route)):
        return route
    return outward(config)


async def own_host(store_host: str | None, config: Config, deadline: Deadline) -> str:
    """Return the address at which this process listens for others: the one from which it reaches their store, if any."""
    if store_host is None:
        return outward(config)
    return advertised((await reachable(store_host, config, deadline))[0], config)


def _listed() -> str:
    return ", ".join(map(str, interface_addresses())) or "no interface that is up"
