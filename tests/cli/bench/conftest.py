"""Fixtures of the benchmark's tests: timings, and ranks as threads with sockets between them."""

from __future__ import annotations

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncdist.cli.bench.pacing import connect_ranks
from asyncdist.cli.bench.result import Timing
from asyncdist.cli.machine import machine


@pytest.fixture
def unknown_machine():
    """A description of a machine with "?" for each value."""
    return dict.fromkeys(machine(), "?")


@pytest.fixture
def timing():
    """Return a timing of 5 calls: ``timing(milliseconds)``."""

    def timing(milliseconds):
        seconds = milliseconds * 1e-3
        return Timing(seconds, 2 * seconds, 0.9 * seconds, 5, seconds)

    return timing


@pytest.fixture
def in_ranks():
    """Run ``program(rank, sockets)`` in a thread per rank: ``in_ranks(ranks, program)``."""
    token = secrets.token_bytes(16)

    def in_ranks(ranks, program):
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
        addresses = [server.getsockname() for server in servers]

        def run(rank):
            table = connect_ranks(rank, servers[rank], addresses, token)
            try:
                program(rank, table)
            finally:
                for sock in (sock for sock in table if sock is not None):
                    sock.close()

        with ThreadPoolExecutor(ranks) as threads:
            outcomes = [threads.submit(run, rank) for rank in range(ranks)]
        for server in servers:
            server.close()
        for outcome in outcomes:
            outcome.result()

    return in_ranks
