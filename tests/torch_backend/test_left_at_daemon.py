"""What worlds of ``asyncdist://`` keep at a daemon: it goes when the last rank has left or been killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncdist.runtime import runtime
from asyncdist.store import StoreServer, TCPStore

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).parent / "program_at_daemon.py"


@pytest.fixture
def daemon():
    server = runtime().run(StoreServer.start("127.0.0.1", 0))
    server.stays = True
    yield server
    runtime().run(server.close())


def test_keys_go_when_the_last_rank_has_been_killed(daemon, nursery, until):
    with TCPStore("127.0.0.1", daemon.port) as store:
        store.set("job of others", b"")
        url = f"asyncdist://127.0.0.1:{daemon.port}/job"
        short = {"ASYNCDIST_STORE_LEASE": "0.3"}
        ranks = [nursery.start(PROGRAM, "stay", url, rank, 2, environment=short) for rank in range(2)]
        assert [rank.hear() for rank in ranks] == ["there"] * 2
        held = store.num_keys()
        ranks[0].kill()
        until(lambda: store.num_keys() < held)  # its lease is over
        assert any(key.startswith("job/") for key in store.list_keys())
        ranks[1].kill()
        until(lambda: store.list_keys() == ["job of others"])
        for rank in ranks:
            rank.wait()
            rank.close()


def test_keys_go_when_the_last_rank_has_left(daemon, nursery, until):
    url = f"asyncdist://127.0.0.1:{daemon.port}/job"
    ranks = [nursery.start(PROGRAM, "meet", url, rank, 2, ("gloo", "asyncdist")) for rank in range(2)]
    for rank in ranks:
        assert [rank.hear() for _ in range(2)] == [("gloo", 2.0), ("asyncdist", 2.0)]
        assert rank.wait() == 0
        rank.close()
    with TCPStore("127.0.0.1", daemon.port) as store:
        until(lambda: store.num_keys() == 0)
