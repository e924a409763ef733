"""Open the record store that an init_method names: torchrun's agent store, a store daemon, the caller's store, or a file.

`rendezvous.meet` calls it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from asyncdist.base.background_loop import cancel_all
from asyncdist.base.backoff import Backoff
from asyncdist.base.daemon_threads import run_in_daemon_thread
from asyncdist.base.descriptors import ClosingOnError
from asyncdist.base.error_text import describe_error, first_line
from asyncdist.config import Config
from asyncdist.environment import Launch
from asyncdist.errors import (
    AuthenticationError,
    LookUpTimeoutError,
    RendezvousError,
    RendezvousTimeoutError,
    UsageError,
)
from asyncdist.kernel import c10d_private
from asyncdist.net.network import unguarded
from asyncdist.rendezvous.addresses import probe, resolve
from asyncdist.rendezvous.init_method import InitMethod
from asyncdist.rendezvous.record_store import (
    AsyncStoreRecords,
    BlockingCaller,
    BlockingStore,
    BlockingStoreRecords,
    DaemonRecords,
    RecordFile,
    RecordStore,
)
from asyncdist.rendezvous.session import TimeLimit
from asyncdist.store.base import AsyncStoreBase, Store
from asyncdist.store.client.aio import AsyncStore
from asyncdist.store.client.connect import accepts_c10d_clients

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.2
_PROBE_DELAY = 0.25
_AGENT_TIMEOUT = 30.0


async def open_record_store(
    method: InitMethod, store: Any, name: str, config: Config, launch: Launch, limit: TimeLimit
) -> RecordStore:
    """Return the record store of the world ``name``, for any method but ``direct``."""
    key = f"asyncdist/{name}"
    if method.kind == "agent":
        _check_torch_store(method.host, config, launch)
        return await _open_agent_store(method, f"asyncdist/{launch.run_id}/{name}", config, limit)
    if method.kind == "daemon":
        daemon = await AsyncStore.connect(
            method.host, method.port, token=config.token, timeout=limit.deadline.remaining(), config=config
        )
        where = f"the store daemon at {method.host}:{method.port}, job {method.path!r}"
        return DaemonRecords(daemon, f"asyncdist/{quote(method.path, safe='')}/{name}", where)
    if method.kind == "file":
        file = RecordFile(method.path, name)
        return BlockingStoreRecords(file, key, f"file://{file.path}")
    if isinstance(store, AsyncStoreBase):
        return AsyncStoreRecords(store, key, f"store={store!r}", _innermost(store).loop)
    if callable(getattr(store, "compare_set", None)):
        if not isinstance(store, Store):
            _check_torch_store(host_of(method, store), config, launch)
        return BlockingStoreRecords(store, key, f"store={type(store).__name__}")
    raise UsageError(f"store= takes a store of asyncdist or of torch.distributed, not {type(store).__name__}")


def host_of(method: InitMethod, store: Any) -> str | None:
    """Return the host of the record store, None without one."""
    if method.kind in ("agent", "daemon"):
        return method.host
    if store is None:
        return None
    store = _innermost(store)
    if type(store).__name__ == "HashStore":  # asyncdist's or torch's: all ranks are in this process
        return "127.0.0.1"
    host = getattr(store, "host", None)
    return host if isinstance(host, str) and host else None


def torch_store_at(host: str, port: int) -> Any:
    """Return the store of torch's default process group, if that has met at this address; else None."""
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is None or not torch_distributed.is_available() or not torch_distributed.is_initialized():
        return None
    store = c10d_private.get_default_store()
    inner = _innermost(store)
    same = (getattr(inner, "host", None), getattr(inner, "port", None)) == (host, port)
    return store if same and type(inner).__module__.startswith("torch") else None


def check_token(host: str | None, config: Config, why: str) -> None:
    """Raise AuthenticationError, with the reason, if ranks on other hosts would meet at a store without a token.

    A ``host`` of None stands for a store that no network reaches.
    """
    if host is not None and unguarded([host], config.token, config):
        raise AuthenticationError(
            f"{why} (in a network that you trust, ASYNCDIST_ALLOW_UNAUTHENTICATED=1 does without)"
        )


def _check_torch_store(host: str | None, config: Config, launch: Launch) -> None:
    """Raise AuthenticationError if the token would be stored in a store of torch's that other hosts can read."""
    if not launch.on_one_host:
        why = f"torch's store at {host} authenticates no client, so a token cannot be passed through it to other hosts"
        check_token(host, config, why)


def _innermost(store: Any) -> Any:
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


async def _open_agent_store(method: InitMethod, key: str, config: Config, limit: TimeLimit) -> RecordStore:
    """Connect to the store of torchrun's agent once it listens.

    A store of torch's is accessed by torch's own client, in a thread. An asyncdist daemon on another host accepts no
    client of torch's, and is accessed by asyncdist's client.
    """
    where = f"torchrun's store at {method.host}:{method.port}"
    await wait_until_listening(method, where, limit)
    try:
        native = await connect_natively(method, config, limit) if config.token or config.allow_unauthenticated else None
        if native is not None:
            return DaemonRecords(native, key, where)
        left = min(limit.deadline.remaining(), _AGENT_TIMEOUT)
        if not await run_in_daemon_thread(lambda: accepts_c10d_clients(method.host, method.port, left)):
            raise RendezvousError(
                f"{where} closed the connection of a torch TCPStore client: if an asyncdist store is served there, set "
                "ASYNCDIST_TOKEN on this rank to the store's, or start the store with --c10d loopback; if it is not a "
                "torchrun agent, unset TORCHELASTIC_USE_AGENT_STORE"
            )
        caller = BlockingCaller()
        with ClosingOnError(caller):
            store = await caller(torch_client, method.host, method.port, limit.deadline.remaining())
    except AuthenticationError:
        raise
    except (RuntimeError, OSError) as error:  # torch's network errors are RuntimeErrors
        raise RendezvousError(
            f"{where} cannot be used: {first_line(error)}; if it is not a torchrun agent, unset "
            "TORCHELASTIC_USE_AGENT_STORE"
        ) from error
    return BlockingStoreRecords(store, key, where, caller)


async def connect_natively(method: InitMethod, config: Config, limit: TimeLimit) -> AsyncStore | None:
    """Connect with asyncdist's client; return None if the server accepts torch's client and did not answer asyncdist's.

    Torch's server does not answer an unknown protocol, so this function also probes in torch's protocol. The probe comes
    second, because an asyncdist store that refuses torch's clients logs each of them.
    """
    timeout = min(limit.deadline.remaining(), _AGENT_TIMEOUT)
    connecting = asyncio.ensure_future(
        AsyncStore.connect(method.host, method.port, token=config.token, timeout=timeout, config=config)
    )

    def connected() -> bool:
        return connecting.done() and connecting.exception() is None

    try:
        await asyncio.wait([connecting], timeout=_PROBE_DELAY)
        accepts_torch = not connected() and await run_in_daemon_thread(
            lambda: accepts_c10d_clients(method.host, method.port, timeout)
        )
        return await connecting if connected() or not accepts_torch else None
    finally:
        await cancel_all(connecting)


async def wait_until_listening(method: InitMethod, where: str, limit: TimeLimit) -> None:
    """Wait until a server listens there. Torch's client could wait too, but not be cancelled."""
    seen = ""
    async for _ in Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, limit.deadline):
        try:
            hosts = await resolve(method.host, limit.deadline)
        except LookUpTimeoutError as late:
            hosts, seen = [], seen or str(late)
        for host in hosts:
            try:
                await probe(host, method.port, limit.deadline.remaining_or_none())
            except OSError as error:
                why = os.strerror(error.errno) if error.errno else describe_error(error)
                # The last attempt may be cut short, which says nothing about the server.
                if not seen or not isinstance(error, TimeoutError):
                    seen = f"the agent's store does not answer: {why}"
            else:
                return
    raise RendezvousTimeoutError((method.rank,), (0,), limit.timeout, where, method.world_size, seen)


def torch_client(host: str, port: int, timeout: float) -> BlockingStore:
    """Return a client of torch's TCPStore. Raises RuntimeError if it cannot connect within ``timeout`` seconds."""
    import torch.distributed as torch_distributed

    limit = timedelta(seconds=min(max(timeout, 1.0), _AGENT_TIMEOUT))
    client: Any = torch_distributed.TCPStore  # type: ignore[attr-defined]  # not in __all__
    store: BlockingStore = client(host, port, is_master=False, timeout=limit, wait_for_workers=False)
    return store
