"""From where a store takes clients of torch's TCPStore, whose format has no authentication.

Whoever may speak that format reads and writes every key. So a store that wants a token, or speaks TLS, takes no such client
unless it is told to, and a store that ranks serve for themselves takes none either: the ranks speak our format.
"""

from __future__ import annotations

from enum import StrEnum

from asyncdist.config import Config


class C10d(StrEnum):
    """From where clients that speak torch's c10d format are taken."""

    OFF = "off"
    LOOPBACK = "loopback"
    ANY = "any"


def policy(config: Config, token: str | None) -> C10d:
    """Return what ``ASYNCDIST_STORE_C10D`` says, or for ``auto`` the default of a store with this token and config.

    Raises:
        ValueError: The setting is neither ``auto`` nor a member of `C10d`.
    """
    if config.store_c10d != "auto":
        return C10d(config.store_c10d)
    return C10d.OFF if token or config.tls_cert else C10d.LOOPBACK


def for_ranks(config: Config) -> Config:
    """Return the config of a store that a rank serves: torch's format is off unless the setting names it."""
    return config.with_(store_c10d=C10d.OFF) if config.store_c10d == "auto" else config
