"""Listening sockets of a store: resolves names, binds sockets, and requires a token beyond loopback."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from asyncdist.config import Config
from asyncdist.errors import AddressError, LookUpTimeoutError, UsageError
from asyncdist.net.listening import BACKLOG, listen
from asyncdist.net.network import unguarded
from asyncdist.store.client.connect import NAME_GRACE, addresses_of, unresolved

_PORT_TRIES = 16

Addresses = list[tuple[socket.AddressFamily, str]]


def resolve_listen_address(host: str, port: int) -> Addresses:
    """Return the addresses to listen on for ``host``; an empty one means every interface.

    Raises:
        AddressError: The host does not resolve, or the port is out of range.
        LookUpTimeoutError: No name server has answered in time.
    """
    if not 0 <= port < 1 << 16:
        raise AddressError(f"port {port} is out of range: ports go from 1 to 65535, and 0 picks a free one")
    if not host:
        return [(socket.AF_INET6, "::")] if _has_ipv6() else [(socket.AF_INET, "0.0.0.0")]

    try:
        found = addresses_of(host, NAME_GRACE)
    except LookUpTimeoutError:
        raise
    except (OSError, UnicodeError) as error:
        raise unresolved(host, error) from None
    addresses = [(socket.AF_INET6 if ":" in each else socket.AF_INET, each) for each in found]
    if not _has_ipv6():
        addresses = [each for each in addresses if each[0] is not socket.AF_INET6] or addresses
    return addresses


def check_guarded(hosts: Iterable[str], token: str | None, config: Config) -> None:
    """Raise UsageError if a client on the network could connect without a token."""
    open_to_all = unguarded(hosts, token, config)
    if open_to_all:
        raise UsageError(
            f"the store would listen on {', '.join(open_to_all)} without a token, open to every host that reaches it: set "
            "ASYNCDIST_TOKEN to one secret on every rank and on the store, or listen on 127.0.0.1; in a network that "
            "you trust, ASYNCDIST_ALLOW_UNAUTHENTICATED=1 allows it"
        )


def listening_sockets(host: str, port: int, addresses: Addresses, tries: int = _PORT_TRIES) -> list[socket.socket]:
    """Bind one port on every address and return the sockets. Raises AddressError."""
    try:
        return _bind_all(port, addresses)
    except OSError as error:
        # The port that the kernel picked for the first address may be in use on another one.
        if tries > 1 and port == 0 and len(addresses) > 1 and error.errno == errno.EADDRINUSE:
            return listening_sockets(host, port, addresses, tries - 1)
        raise _explain(host, port, error) from error


def unix_socket(path: Path) -> socket.socket:
    """Listen at a socket file that only this user may open. Raises AddressError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            _remove_stale(path)
        sock.bind(str(path))
        path.chmod(0o600)  # before it listens
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressError(
                f"{path} exists: another store listens at it, or it is not a socket; name another path"
            ) from error
        raise AddressError(f"cannot listen at {path} ({error.strerror or error}): check its folder") from error
    return sock


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a store that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()


def _bind_all(port: int, addresses: Addresses) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for family, address in addresses:
            sockets.append(stack.enter_context(_bind(family, address, port)))
            port = sockets[0].getsockname()[1]
        stack.pop_all()
    return sockets


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    host, _, zone = address.partition("%")
    where = (host, port, 0, socket.if_nametoindex(zone)) if zone else (host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    if os.name == "posix":
        # A restarted store can bind its port at once. Two sockets still cannot listen on it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family is socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address == "::" else 1)
    return listen(sock, where)


def _explain(host: str, port: int, error: OSError) -> AddressError:
    where = f"{host or '*'}:{port}"
    if error.errno == errno.EADDRINUSE:
        return AddressError(
            f"port {port} is in use, so the store cannot listen at {where}: choose another port, or 0 for any free one"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return AddressError(f"{host!r} is not an address of this machine: serve the store on the machine that has it")
    if error.errno == errno.EACCES:
        return AddressError(f"this user may not listen at {where} ({error.strerror}): choose a port from 1024 up")
    return AddressError(f"cannot listen at {where}: {error.strerror or error}")


def _has_ipv6() -> bool:
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
