"""``torchrun --rdzv-backend=asyncdist --rdzv-endpoint=host:port``: agents and workers meet at a store daemon of ours.

Every round is a generation of its own, whether workers were restarted or nodes came and went: its workers get an empty
store, which ends with it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from asyncdist.store import PrefixStore, TCPStore, operations
from asyncdist.torch_backend.store import Store

DEFAULT_PORT = 29500


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes torchrun's rendezvous handler: the entry point ``asyncdist`` of ``torchrun.handlers``."""
    return _make


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    daemon = TCPStore(host, port, timeout=parameters.get_as_int("read_timeout", 60))
    store = Store(PrefixStore(f"torchrun/{parameters.run_id}", daemon))
    agents = create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)
    return DaemonHandler(agents, daemon, store)


class DaemonHandler(RendezvousHandler):
    """Agents meet at the daemon by torch's own protocol; each round's workers get an empty store of their own there.

    Workers are torch's and know a host and a port only: the first agent of a round opens a *door*, a port of the
    daemon's behind which there is nothing but that round.
    """

    def __init__(self, agents: DynamicRendezvousHandler, daemon: TCPStore, store: Store) -> None:
        self._agents = agents
        # torch's handler would serve the workers itself, from the first agent, with a server that lets in everybody.
        agents._create_tcp_store_server = lambda *_: SimpleNamespace(port=daemon.port)  # type: ignore
        self._daemon = daemon
        self._store = store
        self._door: int | None = None

    def get_backend(self) -> str:
        return "asyncdist"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._close_door()
        joined = self._agents.next_rendezvous()
        if joined.rank == 0:
            self._door = self._daemon.request(operations.open_door())
            joined.store.set("door", str(self._door))
        workers = RendezvousStoreInfo(self._daemon.host, int(joined.store.get("door")))
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
        self._store.close()
        self._daemon.close()
        return ended

    def _close_door(self) -> None:
        door, self._door = self._door, None
        if door is not None:
            self._daemon.request(operations.close_door(door))
