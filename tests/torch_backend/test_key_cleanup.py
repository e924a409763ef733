"""Keys of ``asyncdist://`` worlds and torchrun agents at a daemon: deleted when the last process leaves or is killed."""

from pathlib import Path

import pytest

from asyncdist.base.background_loop import background_loop
from asyncdist.store import StoreServer, TCPStore
from asyncdist.store.protocol import operations

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).parent / "program_at_daemon.py"


@pytest.fixture
def server():
    server = background_loop().run(StoreServer.start("127.0.0.1", 0, stays=True))
    yield server
    background_loop().run(server.close())


SHORT_LEASE = {"ASYNCDIST_STORE_LEASE": "0.3", "ASYNCDIST_STORE_RECONNECT": "0.3"}


def kill(*processes):
    for process in processes:
        process.kill()
        process.wait()


def test_keys_are_deleted_after_the_last_rank_is_killed(server, nursery, until):
    with TCPStore("127.0.0.1", server.port) as store:
        store.set("job of others", b"")
        url = f"asyncdist://127.0.0.1:{server.port}/job"
        ranks = [nursery.start(PROGRAM, "stay", url, rank, 2, environment=SHORT_LEASE) for rank in range(2)]
        assert [rank.hear() for rank in ranks] == ["there"] * 2
        kill(ranks[0])
        # The session of the killed rank expires; the other rank still keeps the lease.
        until(lambda: store.request(operations.command(operations.Op.STATUS))["clients"] == 2)
        assert any(key.startswith("job/") for key in store.list_keys())
        kill(ranks[1])
        until(lambda: store.list_keys() == ["job of others"])


THERE = [b"there", b"there"]


def start_agents(nursery, server, run_id):
    endpoint = f"127.0.0.1:{server.port}"
    agents = [nursery.start(PROGRAM, "agent", endpoint, run_id, 2, environment=SHORT_LEASE) for _ in range(2)]
    assert [agent.hear() for agent in agents] == [THERE] * 2
    return agents


def test_keys_of_agents_are_deleted_with_the_last_agent_of_the_job(server, nursery, until, shut_down):
    with TCPStore("127.0.0.1", server.port) as store:
        first = start_agents(nursery, server, "a")
        other = start_agents(nursery, server, "a/b")
        shut_down(first[0])
        assert any(key.startswith("torchrun/a/") for key in store.list_keys())
        shut_down(first[1])
        until(lambda: not any(key.startswith("torchrun/a/") for key in store.list_keys()))
        assert any(key.startswith("torchrun/a%2Fb/") for key in store.list_keys())
        shut_down(*other)
        until(lambda: store.num_keys() == 0)


def test_killed_job_runs_again_and_its_keys_are_deleted_with_its_leases(server, nursery, until):
    with TCPStore("127.0.0.1", server.port) as store:
        kill(*start_agents(nursery, server, "job"))
        again = start_agents(nursery, server, "job")
        # The sessions of the killed agents expire.
        until(lambda: len(server.state.gather()().shared["torchrun/job/"]) == 2)
        assert any(key.startswith("torchrun/job/") for key in store.list_keys())
        kill(*again)
        until(lambda: store.num_keys() == 0)
