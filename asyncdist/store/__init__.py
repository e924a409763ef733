"""The key-value store over which ranks find and wait for each other. Nothing in this folder imports torch.

Read in this order: `protocol.operations` (the commands), `state.machine` (their effects), `protocol.codec` (the wire
format), `protocol.client_protocol` (a client's session), `server`; then `base` (the methods of every store) and the
clients: `client.aio`, `client.pending`, `client.blocking`, `client.local`, `client.file`, and `prefix`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from asyncdist.store.base import AsyncStoreBase, AsyncSubscription, Store, Subscription
from asyncdist.store.client.aio import AsyncStore
from asyncdist.store.prefix import AsyncPrefixStore, PrefixStore

if TYPE_CHECKING:
    from asyncdist.store.client.file import FileStore as FileStore
    from asyncdist.store.client.local import HashStore as HashStore
    from asyncdist.store.client.tcp_store import TCPStore as TCPStore
    from asyncdist.store.server.daemon import serve as serve
    from asyncdist.store.server.server import StoreServer as StoreServer

_LAZY = {
    "FileStore": "client.file",
    "HashStore": "client.local",
    "StoreServer": "server.server",
    "TCPStore": "client.tcp_store",
    "serve": "server.daemon",
}


def __getattr__(name: str) -> Any:
    # A rank that only asks the store of another needs neither the server nor the blocking clients.
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value


__all__ = [
    "AsyncPrefixStore", "AsyncStore", "AsyncStoreBase", "AsyncSubscription", "FileStore", "HashStore", "PrefixStore",
    "Store", "StoreServer", "Subscription", "TCPStore", "serve",
]  # fmt: skip
