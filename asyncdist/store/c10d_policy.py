"""The policy that decides which clients of torch's TCPStore a store accepts. Their format has no authentication.

Each such client can read and write every key. A store with a token or TLS therefore refuses them by default, and so does a
store that a rank serves, because ranks use asyncdist's own format.
"""

from __future__ import annotations

from enum import StrEnum

from asyncdist.config import Config


class C10d(StrEnum):
    """The addresses from which a store accepts clients that use torch's c10d format."""

    OFF = "off"
    LOOPBACK = "loopback"
    ANY = "any"


def policy(config: Config, token: str | None) -> C10d:
    """Return the policy of ``ASYNCDIST_STORE_C10D``, or for ``auto`` the default of a store with this token and config.

    Raises:
        ValueError: The setting is neither ``auto`` nor a member of `C10d`.
    """
    if config.store_c10d != "auto":
        return C10d(config.store_c10d)
    return C10d.OFF if token or config.tls_cert else C10d.LOOPBACK


def for_ranks(config: Config) -> Config:
    """Return the config of a store that a rank serves: the default is `C10d.OFF`."""
    return config.with_(store_c10d=C10d.OFF) if config.store_c10d == "auto" else config
