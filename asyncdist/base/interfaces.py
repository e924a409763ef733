"""This host: its name, its network interfaces and their addresses, with the standard library alone.

Linux: one ioctl an interface for IPv4, ``/proc/net/if_inet6`` for IPv6. Elsewhere (macOS) the same ioctl by its BSD
number, and what the host's own name resolves to for IPv6; an interface that cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from asyncdist.base.topology import InterfaceAddress

_LINUX = sys.platform.startswith("linux")
_GET_ADDRESS = 0x8915 if _LINUX else 0xC0206921  # SIOCGIFADDR
_GET_FLAGS = 0x8913 if _LINUX else 0xC0206911  # SIOCGIFFLAGS
_UP = 0x1
_REQUEST = struct.Struct("16s240x")  # struct ifreq: the name, then room for every answer
_NAME_NBYTES = 15
_IF_INET6 = Path("/proc/net/if_inet6")


def machine_name() -> str:
    """Return what names this machine as long as it runs."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return socket.gethostname()


def interface_addresses() -> list[InterfaceAddress]:
    """Return the addresses of all interfaces that are up, IPv4 before IPv6, in the system's order of interfaces."""
    return [*_ipv4(), *(_ipv6_of_proc(_IF_INET6) if _LINUX else _ipv6_of_hostname())]


def _ipv4() -> Iterator[InterfaceAddress]:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = _REQUEST.pack(name.encode()[:_NAME_NBYTES])
            try:
                (flags,) = struct.unpack_from("=H", fcntl.ioctl(probe, _GET_FLAGS, request), 16)
                if not flags & _UP:
                    continue
                answer = fcntl.ioctl(probe, _GET_ADDRESS, request)
            except OSError:  # it has no IPv4 address, or has just gone
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


def address_towards(host: str) -> str | None:
    """Return the local address that packets to ``host`` (an address) leave from; None where there is no way.

    Connecting a datagram socket looks the route up and sends nothing.
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
    """Say whether ``host`` (an address) belongs to this machine, so that one can listen on it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
