"""This host's name, network interfaces and addresses, and the rules that choose among addresses.

`rendezvous` and the transports call it to find the address on which a rank listens and which it advertises to its
peers. It uses the standard library alone.

On Linux it reads IPv4 addresses with one ioctl per interface and IPv6 addresses from ``/proc/net/if_inet6``. On other
systems (macOS) it uses the same ioctl by its BSD number, and resolves the host's own name for IPv6. It leaves out an
interface that it cannot read.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_LINUX = sys.platform.startswith("linux")
_SIOCGIFADDR = 0x8915 if _LINUX else 0xC0206921
_SIOCGIFFLAGS = 0x8913 if _LINUX else 0xC0206911
_IFF_UP = 0x1
_IFREQ = struct.Struct("16s240x")
"""``struct ifreq``: the interface's name, then room for the answer."""
_NAME_NBYTES = 15
_IF_INET6 = Path("/proc/net/if_inet6")


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """One address of one network interface."""

    interface: str
    host: str

    def __str__(self) -> str:
        return f"{self.interface} ({self.host})"


# -- rules over addresses ------------------------------------------------------------------------


def is_address(host: str) -> bool:
    """Return whether ``host`` is an IPv4 address or an IPv6 address without brackets, rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is loopback by its spelling alone: ``localhost``, ``127.*``, ``::1``. Resolves nothing."""
    if is_address(host):
        address = ipaddress.ip_address(host)
        # A dual-stack socket shows an IPv4 peer as ::ffff:127.0.0.1.
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    name = host.rstrip(".").lower()
    return name in ("localhost", "localhost.localdomain", "ip6-localhost") or name.endswith(".localhost")


def is_link_local(host: str) -> bool:
    """Return whether an address is valid on one link only (169.254.*, fe80::)."""
    return is_address(host) and ipaddress.ip_address(host).is_link_local


def same_family(one: str, other: str) -> bool:
    """Return whether two addresses are both IPv4 or both IPv6."""
    return (":" in one) == (":" in other)


def addresses_of_interface(candidates: Iterable[InterfaceAddress], rule: str) -> list[InterfaceAddress]:
    """Return the candidates whose interface matches a rule.

    Args:
        candidates: Addresses to choose from.
        rule: ``eth,ib`` matches names with these prefixes, ``=eth0,eth1`` exactly these names, ``^lo,docker`` and
            ``^=lo`` all other names.

    Raises:
        ValueError: The rule names no interface.
    """
    excluding = rule.startswith("^")
    rest = rule.removeprefix("^")
    exact = rest.startswith("=")
    words = [word.strip() for word in rest.removeprefix("=").split(",") if word.strip()]
    if not words:
        raise ValueError(f"the interface rule {rule!r} names no interface; write a prefix, =name or ^prefix")

    def matches(name: str) -> bool:
        return name in words if exact else any(name.startswith(word) for word in words)

    return [candidate for candidate in candidates if matches(candidate.interface) != excluding]


def choose_address(candidates: Sequence[InterfaceAddress], route: str | None = None) -> str | None:
    """Return the address to advertise: ``route`` if it is a candidate, else the candidate that most peers can reach.

    Args:
        candidates: Addresses to choose from.
        route: The local address of the route to the store. Its family is the one that peers can be expected to reach.

    Returns:
        An address, or None without a usable candidate. A loopback address is the last choice. A link-local address is
        never chosen.
    """

    def reluctance(candidate: InterfaceAddress) -> tuple[bool, bool, bool, bool]:
        host = candidate.host
        other_family = route is not None and not same_family(host, route)
        return host != route, is_loopback(host), other_family, ":" in host

    usable = [candidate for candidate in candidates if not is_link_local(candidate.host)]
    return min(usable, key=reluctance).host if usable else None


# -- this host -----------------------------------------------------------------------------------


def machine_name() -> str:
    """Return a name that identifies this machine until it reboots."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return socket.gethostname()


def interface_addresses() -> list[InterfaceAddress]:
    """Return the addresses of all interfaces that are up, IPv4 before IPv6, in the system's order of interfaces."""
    return [*_ipv4(), *(_ipv6_of_proc(_IF_INET6) if _LINUX else _ipv6_of_hostname())]


def address_towards(host: str) -> str | None:
    """Return the local address from which packets to ``host`` (an address) leave; None without a route.

    Connecting a datagram socket looks up the route and sends nothing.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
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


def _ipv4() -> Iterator[InterfaceAddress]:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = _IFREQ.pack(name.encode()[:_NAME_NBYTES])
            try:
                (flags,) = struct.unpack_from("=H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)
                if not flags & _IFF_UP:
                    continue
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # no IPv4 address, or the interface is gone
                continue
            yield InterfaceAddress(name, socket.inet_ntop(socket.AF_INET, answer[20:24]))


def _ipv6_of_proc(table: Path) -> Iterator[InterfaceAddress]:
    """Read lines of: address in 32 hex digits, index, prefix length, scope, flags, name."""
    try:
        lines = table.read_text().splitlines()
    except OSError:  # IPv6 is switched off
        return
    for line in lines:
        digits, *_, name = line.split()
        yield InterfaceAddress(name, str(ipaddress.IPv6Address(int(digits, 16))))


def _ipv6_of_hostname() -> Iterator[InterfaceAddress]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET6, socket.SOCK_DGRAM)
    except OSError:
        return
    for *_, address in found:
        host = str(address[0]).partition("%")[0]
        yield InterfaceAddress("lo0" if host == "::1" else "(by host name)", host)
