"""The doubles of the tests: ranks in threads, the proxy, and the nursery, which forks ranks with imported modules."""

from __future__ import annotations

import socket
import struct
from multiprocessing.connection import Connection, Pipe

import pytest

from asyncdist.testing.cluster import run_ranks
from benchmarks import processes
from benchmarks.processes import PATIENCE, Nursery, Origin
from tests.support.faults import Proxy


def test_error_of_the_lowest_rank_names_those_of_the_others():
    def program(group):
        raise ValueError(f"mistake {group.rank()}")

    with pytest.raises(ValueError, match="mistake 0") as caught:
        run_ranks(3, program)
    assert sorted(caught.value.__notes__) == [
        "rank 1 raised ValueError: mistake 1",
        "rank 2 raised ValueError: mistake 2",
    ]


def test_reset_connection_does_not_spoil_the_next_one():
    """The proxy's sockets of the second connection get the file descriptors of the first one's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        Proxy(*server.getsockname()) as proxy,
        socket.socket() as client,
        socket.socket() as next_client,
    ):
        client.connect(proxy.address)
        # The server does not close its side, so the proxy's second direction waits for its bytes.
        served, _ = server.accept()
        with served:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            proxy.until(lambda: not proxy.num_connections)
            next_client.settimeout(20)
            next_client.connect(proxy.address)
            answering, _ = server.accept()
            with answering:
                answering.sendall(b"answer")
                assert next_client.recv(6) == b"answer"


@pytest.mark.processes
def test_limit_of_a_start_begins_when_the_modules_are_imported(monkeypatch, tmp_path):
    limits = []

    class Noting(Connection):
        def poll(self, timeout=0.0):
            limits.append(timeout)
            return super().poll(timeout)

    def pipe():
        ours, theirs = Pipe()
        ours.__class__ = Noting
        return ours, theirs

    program = tmp_path / "program.py"
    program.write_text("def run(test): pass")
    monkeypatch.setattr(processes, "Pipe", pipe)
    monkeypatch.delenv(processes.ORIGIN, raising=False)
    with Nursery(("json",)) as nursery:
        assert nursery.start(program, "run").wait() == 0
    assert limits[:2] == [None, PATIENCE]


@pytest.mark.processes
def test_nurseries_of_one_origin_share_its_imports_and_end_with_it(monkeypatch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "def run(test):\n"
        "    test.send(('wave' in sys.modules, 'colorsys' in sys.modules, os.environ.get('COLOUR'), os.getcwd()))\n"
        "    test.recv()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOUR", "red")
    origin = Origin(("wave",))
    monkeypatch.setenv(processes.ORIGIN, origin.address)
    with Nursery(("json",)) as one, Nursery(("colorsys",)) as other:
        monkeypatch.setenv("COLOUR", "blue")
        ranks = [one.start(program, "run"), other.start(program, "run", environment={"COLOUR": "green"})]
        assert [rank.hear() for rank in ranks] == [
            (True, False, "red", str(tmp_path)), (True, True, "green", str(tmp_path))
        ]  # fmt: skip
        ranks[0].say("end")
        assert ranks[0].wait() == 0
        ranks[1].kill()
        assert ranks[1].wait() == -9
    origin.close()
