"""Keys of ``asyncdist://`` worlds and torchrun agents at a daemon: deleted when the last process leaves or is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncdist.base.background_loop import background_loop
from asyncdist.store import StoreServer, TCPStore
from asyncdist.store.protocol import operations

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).parent / "program_at_daemon.py"


@pytest.fixture
def daemon():
    server = background_loop().run(StoreServer.start("127.0.0.1", 0, stays=True))
    yield server
    background_loop().run(server.close())


def waited_for(lease):
    return {"ASYNCDIST_STORE_LEASE": lease, "ASYNCDIST_STORE_RECONNECT": lease}


def test_keys_are_deleted_after_the_last_rank_is_killed(daemon, nursery, until):
    with TCPStore("127.0.0.1", daemon.port) as store:
        store.set("job of others", b"")
        url = f"asyncdist://127.0.0.1:{daemon.port}/job"
        short = waited_for("0.3")
        ranks = [nursery.start(PROGRAM, "stay", url, rank, 2, environment=short) for rank in range(2)]
        assert [rank.hear() for rank in ranks] == ["there"] * 2
        ranks[0].kill()
        # The session of the killed rank expires; the other rank still keeps the lease.
        until(lambda: store.request(operations.status())["clients"] == 2)
        assert any(key.startswith("job/") for key in store.list_keys())
        ranks[1].kill()
        until(lambda: store.list_keys() == ["job of others"])
        for rank in ranks:
            rank.wait()
            rank.close()


def test_keys_are_deleted_after_the_last_rank_leaves(daemon, nursery, until):
    url = f"asyncdist://127.0.0.1:{daemon.port}/job"
    ranks = [nursery.start(PROGRAM, "meet", url, rank, 2, ("gloo", "asyncdist")) for rank in range(2)]
    for rank in ranks:
        assert [rank.hear() for _ in range(2)] == [("gloo", 2.0), ("asyncdist", 2.0)]
        assert rank.wait() == 0
        rank.close()
    with TCPStore("127.0.0.1", daemon.port) as store:
        until(lambda: store.num_keys() == 0)


THERE = [b"there", b"there"]


def start_agents(nursery, daemon, run_id, lease="30"):
    endpoint, waiting = f"127.0.0.1:{daemon.port}", waited_for(lease)
    agents = [nursery.start(PROGRAM, "agent", endpoint, run_id, 2, environment=waiting) for _ in range(2)]
    assert [agent.hear() for agent in agents] == [THERE] * 2
    return agents


def test_keys_of_agents_are_deleted_with_the_last_agent_of_the_job(daemon, nursery, until, shut_down):
    with TCPStore("127.0.0.1", daemon.port) as store:
        first = start_agents(nursery, daemon, "a")
        other = start_agents(nursery, daemon, "a/b")
        shut_down(first[0])
        assert any(key.startswith("torchrun/a/") for key in store.list_keys())
        shut_down(first[1])
        until(lambda: not any(key.startswith("torchrun/a/") for key in store.list_keys()))
        assert any(key.startswith("torchrun/a%2Fb/") for key in store.list_keys())
        shut_down(*other)
        until(lambda: store.num_keys() == 0)


def test_killed_job_runs_again_and_its_keys_are_deleted_after_that(daemon, nursery, until, shut_down):
    with TCPStore("127.0.0.1", daemon.port) as store:
        killed = start_agents(nursery, daemon, "job", lease="0.3")
        for agent in killed:
            agent.kill()
            agent.wait()
            agent.close()
        again = start_agents(nursery, daemon, "job")
        # The sessions of the killed agents expire.
        until(lambda: len(daemon.state.contents().shared["torchrun/job/"]) == 2)
        assert any(key.startswith("torchrun/job/") for key in store.list_keys())
        shut_down(*again)
        until(lambda: store.num_keys() == 0)


def test_keys_of_a_killed_job_are_deleted_with_its_leases(daemon, nursery, until):
    with TCPStore("127.0.0.1", daemon.port) as store:
        for agent in start_agents(nursery, daemon, "job", lease="0.3"):
            agent.kill()
            agent.wait()
            agent.close()
        until(lambda: store.num_keys() == 0)
