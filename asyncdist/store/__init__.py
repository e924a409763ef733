"""The key-value store over which ranks find and wait for each other. Nothing in this folder imports torch.

Read in this order: `protocol.operations` (the commands), `state.machine` (their effects), `protocol.codec` (the wire
format), `protocol.client_protocol` (a client's session), `server`; then `base` (the methods of every store) and the
clients: `client.aio`, `client.pending`, `client.blocking`, `client.local`, `client.file`, and `prefix`.
"""

from asyncdist.store.base import AsyncStoreBase, AsyncSubscription, Store, Subscription
from asyncdist.store.client.aio import AsyncStore
from asyncdist.store.client.file import FileStore
from asyncdist.store.client.local import HashStore
from asyncdist.store.client.tcp_store import TCPStore
from asyncdist.store.prefix import AsyncPrefixStore, PrefixStore
from asyncdist.store.server.daemon import serve
from asyncdist.store.server.server import StoreServer

__all__ = [
    "AsyncPrefixStore",
    "AsyncStore",
    "AsyncStoreBase",
    "AsyncSubscription",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "StoreServer",
    "Subscription",
    "TCPStore",
    "serve",
]
