"""Choose, among the addresses a host has, the one that its peers are told.

Pure rules over plain words; `interfaces` lists what a host has, and `rendezvous` knows the way to the store.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """One address of one network interface."""

    interface: str
    host: str

    def __str__(self) -> str:
        return f"{self.interface} ({self.host})"


def is_address(host: str) -> bool:
    """Say whether ``host`` is written as an address (IPv4, or IPv6 without brackets) and not as a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Say whether ``host`` means this very machine by its spelling alone: ``localhost``, ``127.*``, ``::1``."""
    if is_address(host):
        address = ipaddress.ip_address(host)
        # Who comes over IPv4 to a socket that listens for both is shown as ::ffff:127.0.0.1.
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    name = host.rstrip(".").lower()
    return name in ("localhost", "localhost.localdomain", "ip6-localhost") or name.endswith(".localhost")


def is_link_local(host: str) -> bool:
    """Say whether an address is good on one cable only (169.254.*, fe80::)."""
    return is_address(host) and ipaddress.ip_address(host).is_link_local


def same_family(one: str, other: str) -> bool:
    """Say whether two addresses are both IPv4 or both IPv6."""
    return (":" in one) == (":" in other)


def addresses_of_interface(candidates: Iterable[InterfaceAddress], rule: str) -> list[InterfaceAddress]:
    """Return the candidates whose interface a rule lets through.

    ``eth,ib`` lets through names that begin so, ``=eth0,eth1`` exactly these, ``^lo,docker`` and ``^=lo`` all others.
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
    """Return the address to advertise: ``route`` if it is among the candidates, else the most reachable; None of none.

    ``route`` is the local end of the way to the store; it also says which family peers can be expected to reach.
    Loopback is the last resort; an address that is good on one cable only is never taken.
    """

    def reluctance(candidate: InterfaceAddress) -> tuple[bool, bool, bool, bool]:
        host = candidate.host
        other_family = route is not None and not same_family(host, route)
        return host != route, is_loopback(host), other_family, ":" in host

    usable = [candidate for candidate in candidates if not is_link_local(candidate.host)]
    return min(usable, key=reluctance).host if usable else None
