"""torchrun agents and ``asyncdist://`` ranks reconnect after a broken connection to the store daemon or its restart."""

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from asyncdist.base.background_loop import background_loop
from asyncdist.errors import StoreConnectionError
from asyncdist.store import StoreServer, TCPStore
from asyncdist.store.protocol.operations import Op, command
from asyncdist.torch_backend.rendezvous import url_handler
from asyncdist.torchrun import handler
from tests.support.daemon import started
from tests.support.faults import Proxy

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).parent / "program_at_daemon.py"


class Daemon:
    """A store daemon with a data folder. Clients connect to ``endpoint``; ``break_connections()`` cuts them off."""

    def __init__(self, stack, how, folder):
        self.server = stack.enter_context(started("--port", "0", "--data", folder))
        self.endpoint = f"127.0.0.1:{self.server.port}"
        if how == "cut":
            proxy = stack.enter_context(Proxy("127.0.0.1", self.server.port))
            self.endpoint = f"127.0.0.1:{proxy.address[1]}"
            self.break_connections = proxy.cut
        else:
            self.break_connections = self._restart
        self._stack, self._folder = stack, folder

    def _restart(self):
        self.server.process.kill()
        self.server.process.wait()
        self.server = self._stack.enter_context(started("--port", str(self.server.port), "--data", self._folder))


@pytest.fixture(params=["cut", "killed"])
def daemon(request, tmp_path):
    with ExitStack() as stack:
        yield Daemon(stack, request.param, str(tmp_path))


@pytest.mark.exhaustive
def test_agent_reopens_its_lost_endpoint_in_the_next_round(daemon, nursery, shut_down):
    agent = nursery.start(PROGRAM, "agent", daemon.endpoint, "job", 1)
    assert agent.hear() == [b"there"]
    daemon.break_connections()
    agent.say("again")
    assert agent.hear() == [b"there"]
    shut_down(agent)


@pytest.mark.exhaustive
def test_waiting_agent_is_found_by_the_next_agent_after_reconnect(daemon, nursery, until, shut_down):
    """The second agent waits for the first one to reconnect; otherwise it would delete the keys of the job."""
    with daemon.server.client() as store:
        first = nursery.start(PROGRAM, "agent", daemon.endpoint, "job", 2)
        until(lambda: any("torch.rendezvous" in key for key in store.list_keys()))
    daemon.break_connections()
    with daemon.server.client() as store:
        second = nursery.start(PROGRAM, "agent", daemon.endpoint, "job", 2)
        assert first.hear() == second.hear() == [b"there"] * 2
        shut_down(first, second)
        until(lambda: store.num_keys() == 0)


def test_idle_ranks_reconnect_and_keep_their_ephemeral_keys(daemon, nursery, until, ended):
    """The daemon deletes the ephemeral keys of a session that does not reconnect within its lease."""
    url = f"asyncdist://{daemon.endpoint}/job"
    ranks = [nursery.start(PROGRAM, "compute", url, rank, 2) for rank in range(2)]
    assert [rank.hear() for rank in ranks] == ["there"] * 2
    with daemon.server.client() as store:
        before = store.request(command(Op.STATUS))
    daemon.break_connections()
    with daemon.server.client() as store:
        taken = before["connections_total"] if store.request(command(Op.STATUS))["pid"] == before["pid"] else 0
        until(lambda: store.request(command(Op.STATUS))["connections_total"] >= taken + 1 + len(ranks))
    for rank in ranks:
        rank.say("tell")
    assert [rank.hear() for rank in ranks] == [True] * 2
    ended(*ranks)


def as_a_rank(endpoint, monkeypatch):
    daemons = []

    def leased_store(*args):
        store, daemon = real(*args)
        daemons.append(daemon)
        return store, daemon

    real = url_handler.leased_store
    monkeypatch.setattr(url_handler, "leased_store", leased_store)
    store, _, _ = next(url_handler.rendezvous(f"asyncdist://{endpoint}/job?rank=0&world_size=1"))

    def leave():
        store.close()
        daemons[0].close()

    return store, leave


def as_an_agent(endpoint, monkeypatch):
    agent = handler()(RendezvousParameters("asyncdist", endpoint, "job", 1, 1))
    return agent._store, agent.shutdown


@pytest.mark.parametrize("stay", [as_a_rank, as_an_agent])
def test_keys_of_a_job_survive_while_it_reconnects(stay, monkeypatch, until):
    monkeypatch.setenv("ASYNCDIST_STORE_LEASE", "0")
    server = background_loop().run(StoreServer.start("127.0.0.1", 0))
    with Proxy("127.0.0.1", server.port) as proxy, TCPStore(*proxy.address) as other:
        host, port = proxy.address
        store, leave = stay(f"{host}:{port}", monkeypatch)
        store.set("step", "41")
        other.set("of another", "", ephemeral=True)
        proxy.clog()
        proxy.cut()
        # The lease of a session without a job has expired by now, and its key is deleted.
        until(lambda: server.state.keys.peek("of another") is None)
        proxy.unclog()
        assert store.add("step", 1) == 42
        leave()
    until(lambda: not len(server.state.keys))
    background_loop().run(server.close())


@pytest.mark.parametrize("stay", [as_a_rank, as_an_agent])
def test_lost_store_is_told_once(stay, monkeypatch, until, caplog):
    monkeypatch.setenv("ASYNCDIST_STORE_RECONNECT", "0.1")
    server = background_loop().run(StoreServer.start("127.0.0.1", 0))
    store, leave = stay(f"127.0.0.1:{server.port}", monkeypatch)
    background_loop().run(server.close())
    until(lambda: "start the job again" in caplog.text)
    assert "torchrun/job/" in caplog.text or "'job/" in caplog.text
    with pytest.raises(StoreConnectionError):
        store.set("step", "41")
    leave()
    assert caplog.text.count("start the job again") == 1


def test_store_that_its_rank_closes_is_not_told(monkeypatch, until, caplog):
    server = background_loop().run(StoreServer.start("127.0.0.1", 0))
    _, leave = as_a_rank(f"127.0.0.1:{server.port}", monkeypatch)
    (keeper,) = (thread for thread in threading.enumerate() if thread.name == "asyncdist-lease")
    leave()
    keeper.join()
    background_loop().run(server.close())
    assert not caplog.text
