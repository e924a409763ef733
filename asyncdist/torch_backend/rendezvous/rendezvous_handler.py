"""``torchrun --rdzv-backend=asyncdist --rdzv-endpoint=host:port``: rendezvous at an ``asyncdist store`` daemon.

Implements `torch.distributed.elastic.rendezvous.RendezvousHandler`. The workers of every round, after a restart or a
change of nodes, get a new empty store, which ends with the round. The daemon deletes the keys of a job's agents when the
last agent has ended or been killed.
"""

from __future__ import annotations

import logging
import secrets
from urllib.parse import quote

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from asyncdist.store import TCPStore
from asyncdist.store.client.connect import accepts_c10d_clients
from asyncdist.store.protocol import operations
from asyncdist.store.protocol.operations import Op, command
from asyncdist.torch_backend.rendezvous.url_handler import leased_store
from asyncdist.torch_backend.torch_store import Store

log = logging.getLogger("asyncdist")

DEFAULT_PORT = 29500
_PROBE_TIMEOUT = 5.0


def make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return a handler that uses the daemon at ``parameters.endpoint``; StoreConnectionError if no daemon answers."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    # Quoted, slashes included, so that no job's prefix contains another job's keys.
    name = f"torchrun/{quote(parameters.run_id, safe='')}"
    # The keys of an earlier run of this job are deleted before the lease is granted, unless one of its agents is there.
    store, daemon = leased_store(host, port, name, parameters.get_as_int("read_timeout", 60))
    agents = create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)
    return DaemonHandler(agents, daemon, store, f"{name}/rounds/{secrets.token_hex(8)}/")


class DaemonHandler(RendezvousHandler):
    """Agents run torch's own rendezvous protocol at the daemon; the workers of each round get an empty store there.

    Workers know only a host and a port. The first agent of a round therefore opens a scoped store: an extra port of the
    daemon with an empty store. It ends with the agent's lease on ``round_prefix``, which the agent releases after the
    round.
    """

    def __init__(self, agents: DynamicRendezvousHandler, daemon: TCPStore, store: Store, round_prefix: str) -> None:
        self._agents, self._daemon, self._store, self._round_prefix = agents, daemon, store, round_prefix
        self._probed = False
        # Without these two attributes torch's handler starts a store server, without authentication, in the first agent.
        agents._bootstrap_store_info = RendezvousStoreInfo(daemon.host, daemon.port)
        agents._shared_tcp_store_server = store

    def get_backend(self) -> str:
        return "asyncdist"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._daemon.request(operations.release_lease(self._round_prefix))
        joined = self._agents.next_rendezvous()
        if joined.rank == 0:
            self._daemon.request(operations.acquire_lease(self._round_prefix))
            port = self._daemon.request(command(Op.OPEN_SCOPED_STORE, self._round_prefix))
            joined.store.set("port", str(port))
        workers = RendezvousStoreInfo(self._daemon.host, int(joined.store.get("port")))
        if not self._probed:
            self._probed = True
            _warn_if_refused(workers)
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
        self._store.close()
        self._daemon.close()
        return ended


def _warn_if_refused(workers: RendezvousStoreInfo) -> None:
    """Warn if the daemon refuses workers that use only torch.distributed: their own errors do not name the cause."""
    if not accepts_c10d_clients(workers.master_addr, workers.master_port, _PROBE_TIMEOUT):
        log.warning(
            "the daemon at %s accepts no clients of torch's TCPStore from this host: workers that call "
            "torch.distributed.init_process_group without init_method='asyncdist://…' will fail; workers that call "
            "asyncdist.init_process_group will not. Start the daemon with --c10d loopback if all workers run on its "
            "machine and every user there is trusted, or with --c10d any in a trusted network",
            workers.master_addr,
        )
