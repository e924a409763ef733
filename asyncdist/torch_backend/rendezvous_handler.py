"""``torchrun --rdzv-backend=asyncdist --rdzv-endpoint=host:port``: agents and workers meet at a store daemon of ours.

Every round is a generation of its own, whether workers were restarted or nodes came and went: its workers get an empty
store, which ends with it. What the agents of a job keep at the daemon goes when the last of them has ended or been killed.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from urllib.parse import quote

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from asyncdist.errors import AsyncdistError, StoreConnectionError
from asyncdist.store import PrefixStore, TCPStore
from asyncdist.store.client.c10d_probe import accepts_c10d_clients
from asyncdist.store.protocol import operations
from asyncdist.torch_backend.lease_keep_alive import LeaseKeepAlive, connect_with_long_lease
from asyncdist.torch_backend.torch_store import Store

log = logging.getLogger("asyncdist")

DEFAULT_PORT = 29500
_PAUSE = 0.1
_ASKED_FOR = 5.0


def make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return a handler at the daemon that ``parameters.endpoint`` names; raises StoreConnectionError if none answers."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    daemon = connect_with_long_lease(host, port, parameters.get_as_int("read_timeout", 60))
    name = f"torchrun/{quote(parameters.run_id, safe='')}"  # without a slash: no job's keys lie among another's
    # Before anything of the job is read: from now on nothing of it goes before we do.
    lodger = LeaseKeepAlive(daemon, f"{name}/", secrets.token_hex(8))
    job = PrefixStore(name, daemon)
    generation, membership = _join_generation(job)
    membership.start()
    lodger.start()
    store = Store(PrefixStore(generation, job))
    agents = create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)
    return DaemonHandler(agents, daemon, store, membership)


def _join_generation(job: PrefixStore) -> tuple[str, _Membership]:
    """Become one of the job's agents, of a new generation if nobody is left of the last; return its name.

    So one may run a job again under its name, and what the last generation left in the store is not taken for news.
    """
    while True:
        last = job.get("generation").decode() if job.check(["generation"]) else ""
        if last and job.publish(f"agents/{last}", b""):
            return last, _Membership(job, last)
        if last and job.list_keys(f"agents/{last}/"):
            time.sleep(_PAUSE)  # until one of them is back, or all their leases are over
            continue
        own = secrets.token_hex(8)
        membership = _Membership(job, own)  # before anybody can hear of it, and find it deserted
        if job.compare_set("generation", last, own).decode() == own:
            for key in job.list_keys(f"{last}/") if last else ():
                job.delete_key(key)
            return own, membership
        membership.leave()


class _Membership(threading.Thread):
    """An agent's place in a generation, over all its connections: start it when the generation is the job's.

    Agents are subscribed to their generation's channel: whom a message reaches is there. A subscription ends with its
    connection, so each has a key too, which outlives that for a lease: whose key is there may be back in a moment. This
    thread sees that the subscription has ended while its agent waits for something else, and begins another.
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
        with contextlib.suppress(AsyncdistError):  # the agent's own connection is over: it will hear that itself
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
        """Be no member any more."""
        self._left = True
        self._messages.close()
        with contextlib.suppress(StoreConnectionError):
            self._job.delete_key(self._key)


class DaemonHandler(RendezvousHandler):
    """Agents meet at the daemon by torch's own protocol; each round's workers get an empty store of their own there.

    Workers are torch's and know a host and a port only: the first agent of a round opens a *door*, a port of the
    daemon's behind which there is nothing but that round. A door goes with the connection that it was opened over, so
    each has one of its own: the agent's is made again when it breaks.
    """

    def __init__(
        self, agents: DynamicRendezvousHandler, daemon: TCPStore, store: Store, membership: _Membership
    ) -> None:
        self._agents = agents
        # torch's handler would serve the workers from the first agent, with a server that lets in everybody: it is told
        # that it does so already.
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
        """Say what will keep workers that know torch.distributed alone from meeting: they would hardly say it."""
        if not accepts_c10d_clients(workers.master_addr, workers.master_port, _ASKED_FOR):
            log.warning(
                "the daemon at %s takes no clients of torch's TCPStore from here: workers here that call "
                "asyncdist's init_process_group meet, and those that call torch.distributed's do not, unless they give it "
                "init_method='asyncdist://…'; start the daemon with --c10d loopback where every user of its machine is "
                "trusted and all workers run there, or with --c10d any in a network that you trust",
                workers.master_addr,
            )

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()
