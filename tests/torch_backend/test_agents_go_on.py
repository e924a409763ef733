"""torchrun's agents, and ranks of ``asyncdist://``, go on when connections to the daemon break or it is started again."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncdist.config import Config
from asyncdist.store import TCPStore
from asyncdist.testing.daemon import started
from asyncdist.testing.faults import Proxy

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).parent / "program_at_daemon.py"


class Place:
    """A store daemon with data; ``endpoint`` is where agents find it, and ``breaks()`` breaks their connections."""

    def __init__(self, stack, how, folder):
        self.daemon = stack.enter_context(started("--port", "0", "--data", folder))
        self.endpoint = f"127.0.0.1:{self.daemon.port}"
        if how == "cut":
            proxy = stack.enter_context(Proxy("127.0.0.1", self.daemon.port))
            self.endpoint = f"127.0.0.1:{proxy.address[1]}"
            self.breaks = proxy.cut
        else:
            self.breaks = self._begin_again
        self._stack, self._folder = stack, folder

    def _begin_again(self):
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.daemon = self._stack.enter_context(started("--port", str(self.daemon.port), "--data", self._folder))


@pytest.fixture(params=["cut", "killed"])
def place(request, tmp_path):
    with ExitStack() as stack:
        yield Place(stack, request.param, str(tmp_path))


def test_the_agent_whose_door_was_lost_opens_another_in_the_next_round(place, nursery, shut_down):
    agent = nursery.start(PROGRAM, "agent", place.endpoint, "job", 1)
    assert agent.hear() == [b"there"]
    place.breaks()
    agent.say("again")
    assert agent.hear() == [b"there"]
    shut_down(agent)


def test_an_agent_that_waits_is_there_for_the_next(place, nursery, until, shut_down):
    """Over a subscription that has ended it could not be found, and the next agent began the job anew."""
    with place.daemon.client() as store:
        first = nursery.start(PROGRAM, "agent", place.endpoint, "job", 2)
        until(lambda: any("torch.rendezvous" in key for key in store.list_keys()))
        generation = store.get("torchrun/job/generation")
    place.breaks()
    with place.daemon.client() as store:
        second = nursery.start(PROGRAM, "agent", place.endpoint, "job", 2)
        assert first.hear() == second.hear() == [b"there"] * 2
        assert store.get("torchrun/job/generation") == generation
        shut_down(first, second)
        until(lambda: store.num_keys() == 0)


def test_what_ranks_keep_is_there_although_they_have_called_nothing_for_longer_than_their_lease(place, nursery, until):
    url, brief = f"asyncdist://{place.endpoint}/job", {"ASYNCDIST_STORE_LEASE": "1"}
    host, port = place.endpoint.split(":")
    with TCPStore(host, int(port), config=Config.from_environment().with_(store_lease=1.5)) as idle:
        idle.set("idle", b"", ephemeral=True)
        ranks = [nursery.start(PROGRAM, "compute", url, rank, 2, environment=brief) for rank in range(2)]
        assert [rank.hear() for rank in ranks] == ["there"] * 2
        place.breaks()
        with place.daemon.client() as store:
            until(lambda: not store.check(["idle"]))  # and so their leases would be over, too
    for rank in ranks:
        rank.say("tell")
    assert [rank.hear() for rank in ranks] == [True] * 2
    for rank in ranks:
        rank.wait()
        rank.close()
