"""The store: a key-value machine that ranks find each other in, and wait for each other at.

Read in this order: `operations` (what can be asked), `state` (what happens then), `messages` (how it travels),
`conversation` (a client's side of it), `server`; then the clients: `faces` (their methods), `client` (awaited), `desk`,
`blocking`, `local`, `files` (by torch's names), `prefix`. Nothing here imports torch.
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
