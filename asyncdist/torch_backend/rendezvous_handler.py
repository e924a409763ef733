"""``torchrun --rdzv-backend=asyncdist --rdzv-endpoint=host:port``: rendezvous at an ``asyncdist store`` daemon.

Implements `torch.distributed.elastic.rendezvous.RendezvousHandler`. The workers of every round, after a restart or a
change of nodes, get a new empty store, which ends with the round. The daemon deletes the keys of a job's agents when the
last agent has ended or been killed.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from urllib.parse import quote

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from asyncdist.base.backoff import Backoff
from asyncdist.errors import AsyncdistError, StoreConnectionError
from asyncdist.store import PrefixStore, TCPStore
from asyncdist.store.client.c10d_probe import accepts_c10d_clients
from asyncdist.store.protocol import operations
from asyncdist.torch_backend.lease_keep_alive import LeaseKeepAlive, connect_with_long_lease
from asyncdist.torch_backend.torch_store import Store

log = logging.getLogger("asyncdist")

DEFAULT_PORT = 29500
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_ASKED_FOR = 5.0


def make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return a handler that uses the daemon at ``parameters.endpoint``; StoreConnectionError if no daemon answers."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    daemon = connect_with_long_lease(host, port, parameters.get_as_int("read_timeout", 60))
    # Quoted, slashes included, so that no job's prefix contains another job's keys.
    name = f"torchrun/{quote(parameters.run_id, safe='')}"
    # Created before the first read: from here on the job's keys last at least as long as this agent.
    lease = LeaseKeepAlive(daemon, f"{name}/", secrets.token_hex(8))
    job = PrefixStore(name, daemon)
    generation, membership = _join_generation(job)
    membership.start()
    lease.start()
    store = Store(PrefixStore(generation, job))
    agents = create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)
    return DaemonHandler(agents, daemon, store, membership)


def _join_generation(job: PrefixStore) -> tuple[str, _Membership]:
    """Join the job's agents, in a new generation if the last one has no agent left; return its name and membership.

    A job can therefore run again under the same name, without reading keys of an earlier generation.
    """
    for _ in Backoff(_FIRST_PAUSE, _LONGEST_PAUSE):
        last = job.get("generation").decode() if job.check(["generation"]) else ""
        if last and job.publish(f"agents/{last}", b""):
            return last, _Membership(job, last)
        if last and job.list_keys(f"agents/{last}/"):
            # An agent of that generation may still reconnect, until its lease expires.
            continue
        own = secrets.token_hex(8)
        # Joined before the generation is published, so that no agent finds it empty.
        membership = _Membership(job, own)
        if job.compare_set("generation", last, own).decode() == own:
            for key in job.list_keys(f"{last}/") if last else ():
                job.delete_key(key)
            return own, membership
        membership.leave()
    raise AssertionError("the attempts have no deadline")


class _Membership(threading.Thread):
    """An agent's membership in a generation, across reconnects. Start it when the generation is the job's current one.

    Every agent subscribes to its generation's channel; an agent that a message reaches is present. A subscription ends
    with its connection, so each agent also owns a key, which outlives the connection by a lease: the agent may still
    reconnect. This thread renews the subscription when it ends while the agent waits for something else.
    """

    def __init__(self, job: PrefixStore, generation: str) -> None:
        super().__init__(name="asyncdist-agent", daemon=True)
        self._job = job
        self._channel = f"agents/{generation}"
        self._key = f"{self._channel}/{secrets.token_hex(8)}"
        self._left = False
        job.set(self._key, b"", ephemeral=True)
        self._messages = job.subscribe(self._channel)

    def run(self) -> None:
        # The agent's client is closed or has failed: the agent's own next call raises that error.
        with contextlib.suppress(AsyncdistError):
            self._listen()
            while not self._left:
                self._job.set(self._key, b"", ephemeral=True)
                with contextlib.suppress(StoreConnectionError):
                    self._messages = self._job.subscribe(self._channel)
                self._listen()

    def _listen(self) -> None:
        with contextlib.suppress(StoreConnectionError), self._messages as messages:
            while not self._left:
                messages.get()

    def leave(self) -> None:
        """End the membership."""
        self._left = True
        self._messages.close()
        with contextlib.suppress(StoreConnectionError):
            self._job.delete_key(self._key)


class DaemonHandler(RendezvousHandler):
    """Agents run torch's own rendezvous protocol at the daemon; the workers of each round get an empty store there.

    Workers know only a host and a port. The first agent of a round therefore opens a scoped store: an extra port of the
    daemon with an empty store. A scoped store ends with the connection that opened it, so it has a connection of its
    own, which does not reconnect.
    """

    def __init__(
        self, agents: DynamicRendezvousHandler, daemon: TCPStore, store: Store, membership: _Membership
    ) -> None:
        self._agents = agents
        # torch's handler would start an unauthenticated store server in the first agent. These two attributes make it
        # believe that it already has.
        agents._bootstrap_store_info = RendezvousStoreInfo(daemon.host, daemon.port)
        agents._shared_tcp_store_server = store
        self._daemon = daemon
        self._store = store
        self._membership = membership
        self._door: TCPStore | None = None
        self._looked = False

    def get_backend(self) -> str:
        return "asyncdist"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._close_door()
        joined = self._agents.next_rendezvous()
        if joined.rank == 0:
            self._door = TCPStore(self._daemon.host, self._daemon.port, timeout=self._daemon.timeout)
            joined.store.set("door", str(self._door.request(operations.open_scoped_store())))
        workers = RendezvousStoreInfo(self._daemon.host, int(joined.store.get("door")))
        if not self._looked:
            self._looked = True
            self._look_at(workers)
        return RendezvousInfo(joined.store, joined.rank, joined.world_size, workers)

    def is_closed(self) -> bool:
        return self._agents.is_closed()

    def set_closed(self) -> None:
        self._agents.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._agents.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._agents.get_run_id()

    def shutdown(self) -> bool:
        ended = self._agents.shutdown()
        self._close_door()
        self._membership.leave()
        self._store.close()
        self._daemon.close()
        return ended

    @staticmethod
    def _look_at(workers: RendezvousStoreInfo) -> None:
        """Warn if the daemon refuses workers that use only torch.distributed: their own errors would not name the cause."""
        if not accepts_c10d_clients(workers.master_addr, workers.master_port, _ASKED_FOR):
            log.warning(
                "the daemon at %s accepts no clients of torch's TCPStore from this host: workers that call "
                "torch.distributed.init_process_group without init_method='asyncdist://…' will fail; workers that call "
                "asyncdist.init_process_group will not. Start the daemon with --c10d loopback if all workers run on its "
                "machine and every user there is trusted, or with --c10d any in a trusted network",
                workers.master_addr,
            )

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()
