"""Two hosts for tests, and ranks on them."""

from pathlib import Path

import pytest

from asyncdist.testing.hosts import Hosts


@pytest.fixture
def hosts():
    """Two hosts."""
    with Hosts() as hosts:
        yield hosts


class Job:
    """Ranks in the networks of two hosts; by default four, of which 0 and 1 are on the first host.

    Without ``named`` the ranks do not know that these are two hosts.
    """

    def __init__(self, hosts, nursery, where, placed=(0, 0, 1, 1), *, named=True, folders=None, **settings):
        settings["ASYNCDIST_TOKEN"] = "for this test only"
        self.ranks = []
        for rank, host in enumerate(placed):
            arguments = (hosts.namespaces[host], where, rank, len(placed), str(folders[host]) if folders else ".")
            environment = settings | ({"ASYNCDIST_HOST": f"host{host}"} if named else {})
            self.ranks.append(
                nursery.start(
                    Path(__file__).parent / "program_on_host.py", "on_host", *arguments, environment=environment
                )
            )
        self.all_hear()

    def all_say(self, *order):
        for rank in self.ranks:
            rank.say(order)

    def all_hear(self):
        return [rank.hear() for rank in self.ranks]

    def all_do(self, *order):
        self.all_say(*order)
        return self.all_hear()

    def end(self):
        self.all_say("end")
        assert [rank.wait() for rank in self.ranks] == [0] * len(self.ranks)
