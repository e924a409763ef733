"""The doubles of the tests: ranks in threads, the proxy, and the nursery, which forks ranks with imported modules."""

from __future__ import annotations

import socket
import struct
from multiprocessing.connection import Connection, Pipe

import pytest

from asyncdist.testing.cluster import run_ranks
from benchmarks import processes
from benchmarks.processes import PATIENCE, Nursery
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
    with Nursery(("json",)) as nursery:
        assert nursery.start(program, "run").wait() == 0
    assert limits[:2] == [None, PATIENCE]
