"""The benchmark's ranks: their sockets, the pacing, plain sockets as a contender, and the rounds."""

from __future__ import annotations

import itertools
import secrets
import socket

import pytest
import torch

from asyncdist import sync
from asyncdist.cli.bench.contenders import plain_sockets
from asyncdist.cli.bench.contenders.contenders import Contender, memory_copy, of_api
from asyncdist.cli.bench.measure import TimedContender, make_entries, measure
from asyncdist.cli.bench.pacing import StartPacer, connect_ranks
from asyncdist.cli.bench.plan import COLLECTIVES, in_turns, rounds
from asyncdist.cli.bench.traffic import Traffic
from asyncdist.cli.page import size
from asyncdist.errors import BenchmarkError


def nothing(*_):
    return None


@pytest.mark.parametrize("nbytes", [4, 300_000], ids=size)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_plain_sockets_compute_every_collective(collective, ranks, nbytes, in_ranks):
    def program(rank, sockets):
        case = Traffic(collective, rank, ranks, nbytes)
        call = plain_sockets.prepare_socket_call(plain_sockets.Sockets(rank, sockets), case)
        case.load()
        call()
        case.check("raw")
        case.prepare_timed_calls()
        for _ in range(2):
            case.restore()
            call()
            case.check_ends("raw")

    in_ranks(ranks, program)


@pytest.mark.parametrize("ranks_per_host", [1, 2, 3])
@pytest.mark.parametrize("collective", ["all_reduce", "barrier"])
def test_plain_sockets_of_several_hosts_compute_small_collectives(collective, ranks_per_host, in_ranks):
    ranks, log = 2 * ranks_per_host, []

    def program(rank, sockets):
        case = Traffic(collective, rank, ranks, 4)
        call = plain_sockets.prepare_socket_call(plain_sockets.Sockets(rank, sockets, ranks_per_host), case)
        case.load()
        log.append("called")
        call()
        log.append("returned")
        case.check("raw")

    in_ranks(ranks, program)
    # No rank returns before all have called.
    assert log.index("returned") == ranks


def test_connection_without_token_is_closed():
    token = secrets.token_bytes(16)
    lower, higher = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    with lower, higher:
        addresses = [sock.getsockname() for sock in (lower, higher)]
        with socket.create_connection(addresses[0]) as stranger:
            stranger.sendall(bytes(16) + (1).to_bytes(4, "big"))
            tables = [connect_ranks(1, higher, addresses, token), connect_ranks(0, lower, addresses, token)]
            assert stranger.recv(1) == b""
        with tables[0][0] as one, tables[1][1] as zero:
            one.send(b"?")
            zero.setblocking(True)
            assert zero.recv(1) == b"?"


def test_one_rank_works_while_the_others_sleep(in_ranks):
    log = []

    def program(rank, table):
        StartPacer(rank, table).alone(lambda: log.append("worked"))
        log.append(rank)

    in_ranks(3, program)
    assert log[0] == "worked"
    assert sorted(log[1:]) == [0, 1, 2]


def test_memory_copy_runs_on_rank_0_only(in_ranks):
    def program(rank, table):
        entry = TimedContender.of(memory_copy(StartPacer(rank, table)), Traffic("all_gather", rank, 2, 4096))
        entry.verify(nothing)
        times = entry.contender.run(entry.case, entry.call, 3, nothing, nothing)
        assert len(times) == 3
        assert all(complete > 0 for _, complete in times) == (rank == 0)

    in_ranks(2, program)
    assert not make_entries([memory_copy(StartPacer(0, [None]))], "barrier", 0, 1, 0)


def test_contenders_share_tensors_of_one_kind():
    made = []

    def empty(count):
        made.append(torch.empty(count))
        return made[-1]

    contenders = [of_api("one", sync), of_api("two", sync, empty=empty), of_api("three", sync)]
    entries = make_entries(contenders, "all_gather", 0, 2, 4096)
    first, second, third = [entry.case for entry in entries]
    assert first is third
    assert [tensor.numel() for tensor in made] == [512, 1024]
    assert (second.input is made[0], second.output is made[1]) == (True, True)


# -- rounds -----------------------------------------------------------------------------------------


def faulty(right):
    """Return a contender that gives some right results, and then does nothing."""

    def prepare(case):
        results = itertools.repeat(case.expected(case.contribution), right)
        return lambda: [case.output.copy_(result) for result in itertools.islice(results, 1)]

    return Contender("faulty", prepare)


@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name != "barrier"])
@pytest.mark.parametrize(("right", "words"), [(0, "faulty: {} .* gave a wrong result"), (1, "faulty: a timed {}")])
def test_wrong_result_ends_the_measurement(collective, right, words):
    receiver = 1 if collective in ("broadcast", "scatter") else 0
    case = Traffic(collective, receiver, 2, 64)
    with pytest.raises(BenchmarkError, match=words.format(collective)):
        measure([TimedContender.of(faulty(right), case)], nothing, 3, 3, paced=False)


def test_order_of_contenders_changes_and_is_equal_on_all_ranks():
    orders = [in_turns("abcde", turn) for turn in range(30)]
    assert orders == [in_turns("abcde", turn) for turn in range(30)]
    assert all(sorted(order) == list("abcde") for order in orders)
    followed = {pair for order in orders for pair in itertools.pairwise(order)}
    assert followed == set(itertools.permutations("abcde", 2))


def test_contenders_take_turns():
    turns = []

    class Noted(Contender):
        def run(self, case, call, calls, before, after):
            turns.append(self.name)
            return [(1.0, 1.0)] * calls

    first, second = Noted("first", nothing), Noted("second", nothing)
    case = Traffic("barrier", 0, 2, 0)
    timings = measure([TimedContender.of(each, case) for each in (first, second)], nothing, 250, 100, paced=False)
    names = [contender.name for contender in (first, second)]
    assert turns == [*names, *(name for turn in range(3) for name in in_turns(names, turn))]  # checked, then timed
    assert {name: timing.calls for name, timing in timings.items()} == {"first": 250, "second": 250}
    assert list(rounds(250, 100)) == [100, 100, 50]
