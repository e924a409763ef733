"""This host's name, network interfaces and addresses, and the rules that choose among addresses.

On Linux, IPv4 addresses come from one ioctl per interface and IPv6 addresses from ``/proc/net/if_inet6``. On other systems
(macOS) the ioctl has its BSD number, and IPv6 addresses come from resolving the host's own name. An interface that cannot
be read is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from asyncdist.base.daemon_threads import start_daemon_thread
from asyncdist.config import Config

_LINUX = sys.platform.startswith("linux")
_SIOCGIFADDR = 0x8915 if _LINUX else 0xC0206921
_SIOCGIFFLAGS = 0x8913 if _LINUX else 0xC0206911
_IFF_UP = 0x1
_IFREQ = struct.Struct("16s240x")
"""``struct ifreq``: the interface's name in 16 bytes, then space for the kernel's answer."""
_INTERFACE_NAME_NBYTES = 15
"""The longest name of an interface: ``IFNAMSIZ`` without its NUL."""
_IF_INET6 = Path("/proc/net/if_inet6")


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """An IPv4 or IPv6 address, without brackets and scope, of an interface, ``(by host name)`` if its name is unknown."""

    interface: str
    host: str

    def __str__(self) -> str:
        return f"{self.interface} ({self.host})"


def peer_name(sock: socket.socket) -> str:
    """Return the address of a socket's peer as text; a Unix socket usually has none."""
    try:
        address = sock.getpeername()
    # It is connected no more.
    except OSError:
        return "a connection"
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address or "a local client")


def namespace(kind: str) -> int:
    """Return a namespace of this process, such as ``"net"``, to which abstract Unix addresses belong; 0 if unknown."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    return 0


# -- rules over addresses ------------------------------------------------------------------------


def is_address(host: str) -> bool:
    """Return whether ``host`` is an IPv4 address or an IPv6 address without brackets, rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def begin_look_up(name: str) -> Future[list[str]]:
    """Look up the addresses of a host name, each once, in the order of the resolver. Fails with OSError or UnicodeError.

    A name server that does not answer holds the thread of the look-up for long, so the process does not wait for it.
    """

    def find() -> list[str]:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    return start_daemon_thread(find, "asyncdist-look-up", awaited_at_exit=False)


async def look_up(name: str) -> list[str]:
    return await asyncio.wrap_future(begin_look_up(name))


def unguarded(hosts: Iterable[str], token: str | None, config: Config) -> list[str]:
    """Return the hosts that are open to the network without a token and without an explicit permission."""
    if token or config.allow_unauthenticated:
        return []
    return [host for host in hosts if not is_loopback(host)]


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is loopback by its spelling: ``localhost``, ``127.*``, ``::1``. Names are not resolved."""
    if is_address(host):
        address = ipaddress.ip_address(host)
        # A dual-stack socket shows an IPv4 peer as ::ffff:127.0.0.1.
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    name = host.rstrip(".").lower()
    return name in ("localhost", "localhost.localdomain", "ip6-localhost") or name.endswith(".localhost")


def is_link_local(host: str) -> bool:
    """Return whether an address is valid on one link only (169.254.*, fe80::)."""
    return is_address(host) and ipaddress.ip_address(host).is_link_local


def addresses_of_interface(candidates: Iterable[InterfaceAddress], rule: str) -> list[InterfaceAddress]:
    """Return the candidates whose interface matches a rule. Raises ValueError if the rule names no interface.

    ``eth,ib`` matches names with these prefixes, ``=eth0,eth1`` exactly these names, ``^lo,docker`` and ``^=lo`` all other
    names.
    """
    excluding = rule.startswith("^")
    pattern = rule.removeprefix("^")
    exact = pattern.startswith("=")
    words = [word.strip() for word in pattern.removeprefix("=").split(",") if word.strip()]
    if not words:
        raise ValueError(f"the interface rule {rule!r} names no interface; write a prefix, =name or ^prefix")

    def matches(name: str) -> bool:
        return name in words if exact else any(name.startswith(word) for word in words)

    return [candidate for candidate in candidates if matches(candidate.interface) != excluding]


def choose_address(candidates: Sequence[InterfaceAddress], route: str | None = None) -> str | None:
    """Return the address to advertise: ``route`` if it is a candidate, else the candidate that most peers can reach.

    ``route`` is the local address of the route to the store: peers reach the store too, probably by the same family. A
    loopback address is the last choice. A link-local address is never chosen; None if no other is left.
    """

    def sort_key(candidate: InterfaceAddress) -> tuple[bool, bool, bool, bool]:
        # False sorts before True; the earlier tests outweigh the later ones.
        host, is_ipv6 = candidate.host, ":" in candidate.host
        other_family = route is not None and is_ipv6 != (":" in route)
        return host != route, is_loopback(host), other_family, is_ipv6

    usable = [candidate for candidate in candidates if not is_link_local(candidate.host)]
    return min(usable, key=sort_key).host if usable else None


# -- this host -----------------------------------------------------------------------------------


def machine_name() -> str:
    """Return a name that identifies this machine until it reboots; all containers of a Linux machine share it."""
    try:
        return boot_id()
    except OSError:
        return socket.gethostname()


@functools.cache
def boot_id() -> str:
    """Return what Linux names this boot of the machine. Raises OSError where the system has no such name."""
    # Each further codec is a module to import.
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        return file.read().strip()


def interface_addresses() -> list[InterfaceAddress]:
    """Return the addresses of all interfaces that are up, IPv4 before IPv6, in the system's order of interfaces."""
    return [*_ipv4_addresses(), *(_ipv6_addresses_in(_IF_INET6) if _LINUX else _ipv6_addresses_of_hostname())]


def address_towards(host: str) -> str | None:
    """Return the local address from which packets to ``host`` (an address) leave; None without a route.

    Connecting a datagram socket looks up the route and sends nothing.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Any port has the same route; 9 is the discard port.
            probe.connect((host, 9))
            local = str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return None
    return None if ipaddress.ip_address(local).is_unspecified else local


def is_local(host: str) -> bool:
    """Return whether ``host`` (an address) belongs to this machine, so that a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def _ipv4_addresses() -> Iterator[InterfaceAddress]:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = _IFREQ.pack(name.encode()[:_INTERFACE_NAME_NBYTES])
            try:
                # The answer begins behind the name: the flags, or a sockaddr_in with the address at its byte 4.
                (flags,) = struct.unpack_from("=H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)
                if not flags & _IFF_UP:
                    continue
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                # It has no IPv4 address, or has been removed.
                continue
            yield InterfaceAddress(name, socket.inet_ntop(socket.AF_INET, answer[20:24]))


def _ipv6_addresses_in(table: Path) -> Iterator[InterfaceAddress]:
    """Read the kernel's table. A line has the address in 32 hex digits, index, prefix length, scope, flags and name."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        # IPv6 is disabled.
        return
    for line in lines:
        digits, *_, name = line.split()
        yield InterfaceAddress(name, str(ipaddress.IPv6Address(int(digits, 16))))


def _ipv6_addresses_of_hostname() -> Iterator[InterfaceAddress]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET6, socket.SOCK_DGRAM)
    except OSError:
        return
    for *_, address in found:
        host = str(address[0]).partition("%")[0]
        yield InterfaceAddress("lo0" if host == "::1" else "(by host name)", host)
