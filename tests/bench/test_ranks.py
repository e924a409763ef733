"""How ranks of a benchmark meet, who competes, and the rounds in which they take turns."""

from __future__ import annotations

import itertools
import secrets
import socket
import threading

import pytest
import torch

import asyncdist
from asyncdist.bench.contenders import plain_sockets
from asyncdist.bench.contenders.contenders import Blocking, Copy, Ours, Raw, Registered
from asyncdist.bench.measure import entered, measure
from asyncdist.bench.pace import StartPacer
from asyncdist.bench.pacing_sockets import connect_ranks, listen_on_loopback
from asyncdist.bench.plan import COLLECTIVES, BenchPlan, in_turns, rounds
from asyncdist.bench.report.table import size
from asyncdist.bench.workloads.collectives import traffic
from asyncdist.errors import BenchmarkError

TOKEN = secrets.token_bytes(16)


def in_ranks(ranks, program):
    """Run ``program(rank, sockets)`` in a thread a rank."""
    servers = [listen_on_loopback() for _ in range(ranks)]
    ports = [server.getsockname()[1] for server in servers]
    failures = []

    def run(rank):
        table = []
        try:
            table = connect_ranks(rank, servers[rank], ports, TOKEN)
            program(rank, table)
        except BaseException as error:
            failures.append(error)
        for sock in (sock for sock in table if sock is not None):
            sock.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for server in servers:
        server.close()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("nbytes", [4, 300_000], ids=size)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_plain_sockets_compute_what_is_asked(collective, ranks, nbytes):
    def program(rank, sockets):
        case = traffic(collective, rank, ranks, nbytes)
        call = plain_sockets.prepare_socket_call(plain_sockets.Sockets(rank, sockets), case)
        case.load()
        call()
        case.check("raw")
        case.settle()
        for _ in range(2):
            case.restore()
            call()
            case.glance("raw")

    in_ranks(ranks, program)


def test_a_stranger_is_turned_away():
    with listen_on_loopback() as lower, listen_on_loopback() as higher:
        ports = [sock.getsockname()[1] for sock in (lower, higher)]
        with socket.create_connection(("127.0.0.1", ports[0])) as stranger:
            stranger.sendall(bytes(16) + (1).to_bytes(4, "big"))
            tables = [connect_ranks(1, higher, ports, TOKEN), connect_ranks(0, lower, ports, TOKEN)]
            assert stranger.recv(1) == b""
        tables[0][0].send(b"?")
        tables[1][1].setblocking(True)
        assert tables[1][1].recv(1) == b"?"
        for sock in (tables[0][0], tables[1][1]):
            sock.close()


def test_one_works_while_the_others_sleep():
    log = []

    def program(rank, table):
        StartPacer(rank, table).alone(lambda: log.append("worked"))
        log.append(rank)

    in_ranks(3, program)
    assert log[0] == "worked"
    assert sorted(log[1:]) == [0, 1, 2]


def test_the_limit_is_a_copy_on_one_rank():
    def program(rank, table):
        copy = Copy(StartPacer(rank, table))
        assert not copy.enters("barrier")
        case = traffic("all_gather", rank, 2, 4096)
        copy.verify(case, lambda: None)
        seconds = copy.run(case, 3, lambda: None, lambda: None)
        assert len(seconds) == 3
        assert all(second > 0 for second in seconds) == (rank == 0)

    in_ranks(2, program)


def test_a_kind_of_tensors_is_shared_by_those_who_move_it(monkeypatch):
    made = []

    def empty(*size, dtype, shared):
        assert (dtype, shared) == (torch.float32, True)
        made.append(torch.empty(*size, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(asyncdist, "empty", empty, raising=False)
    first, second, third = [case for _, case in entered([Ours(), Registered(), Raw(None)], "all_gather", 0, 2, 4096)]
    assert first is third
    assert [tensor.numel() for tensor in made] == [512, 1024]
    assert second.input is made[0]
    assert second.output is made[1]


# -- rounds -----------------------------------------------------------------------------------------


class Idle(Blocking):
    """Does nothing, as fast as can be; from a given call on."""

    name = "idle"

    def __init__(self, honest=0):
        self.honest = honest

    def prepare(self, case):
        def call():
            self.honest -= 1
            if self.honest >= 0:
                case.output.copy_(case.expected([case.contribution(rank) for rank in range(case.ranks)]))

        return call


@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name != "barrier"])
@pytest.mark.parametrize(("honest", "said"), [(0, "gave a wrong result"), (1, "a timed")])
def test_a_wrong_result_is_never_timed(collective, honest, said):
    receives = 1 if collective in ("broadcast", "scatter") else 0
    case = traffic(collective, receives, 2, 64)
    with pytest.raises(BenchmarkError, match=f"idle: {said}" if honest else f"idle: {collective} .* {said}"):
        measure([(Idle(honest), case)], lambda: None, BenchPlan(repeat=3), lambda share: None)


def test_nobody_always_follows_the_same_one_and_all_ranks_agree():
    orders = [in_turns("abcde", turn) for turn in range(30)]
    assert orders == [in_turns("abcde", turn) for turn in range(30)]
    assert all(sorted(order) == list("abcde") for order in orders)
    followed = {pair for order in orders for pair in itertools.pairwise(order)}
    assert followed == set(itertools.permutations("abcde", 2))


def test_all_calls_are_made_in_turns():
    turns = []

    class Noted(Idle):
        def run(self, case, calls, before, after):
            turns.append(self.name)
            return [1.0] * calls

    first, second = Noted(), Noted()
    second.name = "second"
    case = traffic("barrier", 0, 2, 0)
    timings = measure([(first, case), (second, case)], lambda: None, BenchPlan(repeat=250), lambda share: None)
    names = [contender.name for contender in (first, second)]
    assert turns == [*names, *(name for turn in range(3) for name in in_turns(names, turn))]  # checked, and timed
    assert {name: timing.calls for name, timing in timings.items()} == {"idle": 250, "second": 250}
    assert list(rounds(250, 100)) == [100, 100, 50]
