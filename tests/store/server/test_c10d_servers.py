"""The c10d protocol at torch's TCPStore server and at the asyncdist server: equal replies, except for known bugs of torch.

The tests assert the bugs of torch's server as well, so that they fail when a later torch fixes one.
"""

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as torch_dist
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdist.base.background_loop import background_loop
from asyncdist.config import Config
from asyncdist.store import StoreServer, TCPStore
from asyncdist.store.protocol.c10d import Code
from tests.support.c10d_peer import Peer
from tests.support.ports import free_port

OURS, TORCHS = "asyncdist", "torch"


@contextlib.contextmanager
def our_server() -> Iterator[int]:
    server = background_loop().run(StoreServer.start("127.0.0.1", 0))
    try:
        yield server.port
    finally:
        background_loop().run(server.close())
        assert server.state.num_open == 0


@contextlib.contextmanager
def torchs_server() -> Iterator[int]:
    server = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    """Start torch's first server, whose pipes stay open for the life of the process."""
    with torchs_server():
        pass


@pytest.fixture(params=[OURS, TORCHS])
def whose(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connect(whose: str) -> Iterator[Callable[[], Peer]]:
    with (our_server if whose == OURS else torchs_server)() as port, contextlib.ExitStack() as peers:
        yield lambda: peers.enter_context(Peer(port))


def noticed(peer: Peer) -> None:
    """Send three requests; the server handles pending events of other connections before it answers the third."""
    for _ in range(3):
        peer.settle()


# -- bugs of torch's server ------------------------------------------------------------------------


def test_push_after_a_served_pop_wakes_no_wait_for_another_key(whose, connect):
    popping, pushing = connect(), connect()
    popping.send(Code.WAIT, [b"/q"])
    assert popping.settle() == 0
    pushing.ask(Code.QUEUE_PUSH, b"/q", b"1")
    assert popping.settle() == 1
    assert popping.ask(Code.QUEUE_POP, b"/q") == (1, b"1")
    popping.send(Code.WAIT, [b"/never set"])
    assert popping.settle() == 0
    pushing.ask(Code.QUEUE_PUSH, b"/q", b"2")
    assert popping.settle() == {OURS: 0, TORCHS: 1}[whose]


def test_failed_compare_set_wakes_no_wait(whose, connect):
    waiting, comparing = connect(), connect()
    waiting.send(Code.WAIT, [b"/k"])
    assert waiting.settle() == 0
    assert comparing.ask(Code.COMPARE_SET, b"/k", b"expected", b"desired") == b"expected"
    assert comparing.ask(Code.CHECK, [b"/k"]) == 1
    assert waiting.settle() == {OURS: 0, TORCHS: 1}[whose]


def test_wait_for_a_filled_queue_and_a_missing_key(whose, connect):
    waiting, setting = connect(), connect()
    setting.ask(Code.QUEUE_PUSH, b"/q", b"1")
    waiting.send(Code.WAIT, [b"/q", b"/missing"])
    assert waiting.settle() == 0
    setting.ask(Code.SET, b"/missing", b"")
    assert waiting.settle() == {OURS: 1, TORCHS: 0}[whose]


@pytest.mark.parametrize("how", ["dies before its pop", "cancels while its release is in flight"])
def test_next_waiter_is_woken_when_the_first_gives_up(whose, connect, how):
    first, second, pushing = connect(), connect(), connect()
    for peer in (first, second):
        peer.send(Code.WAIT, [b"/q"])
        assert peer.settle() == 0
    pushing.ask(Code.QUEUE_PUSH, b"/q", b"1")
    if how == "dies before its pop":
        assert first.settle() == 1
        first.close()
        noticed(pushing)
    else:
        first.send(Code.CANCEL_WAIT)
        assert first.exactly(2) == b"\x00\x01"
    assert second.settle() == {OURS: 1, TORCHS: 0}[whose]
    assert second.ask(Code.QUEUE_POP, b"/q") == (1, b"1")


def test_barrier_does_not_count_a_dead_client(whose, connect):
    dying, one, other = connect(), connect(), connect()
    dying.send(Code.BARRIER, b"/b", 2)
    assert dying.settle() == 0
    dying.close()
    noticed(one)
    one.send(Code.BARRIER, b"/b", 2)
    assert one.settle() == {OURS: 0, TORCHS: 1}[whose]
    other.send(Code.BARRIER, b"/b", 2)
    assert other.settle() == 1
    assert one.settle() == {OURS: 1, TORCHS: 0}[whose]


def test_barrier_counts_a_client_that_timed_out_and_returned_once(whose, connect):
    one, other = connect(), connect()
    one.send(Code.BARRIER, b"/b", 2)
    assert one.settle() == 0
    assert one.ask(Code.CANCEL_WAIT) == 1
    one.send(Code.BARRIER, b"/b", 2)
    assert one.settle() == {OURS: 0, TORCHS: 1}[whose]
    other.send(Code.BARRIER, b"/b", 2)
    assert other.settle() == 1


def test_value_of_more_than_8_MiB(whose, connect):
    setting, getting = connect(), connect()
    value = bytes(range(256)) * (32 << 10) + b"and one more"
    if whose == OURS:
        setting.ask(Code.SET, b"/k", value)
        assert getting.ask(Code.GET, b"/k") == value
    else:
        with pytest.raises(ConnectionError):
            setting.ask(Code.SET, b"/k", value)


@pytest.mark.parametrize("value", [b"1_000", b"1.5", b"1e3", b"1,000"])
def test_add_to_a_value_with_a_numeric_prefix(whose, connect, value):
    adding = connect()
    adding.ask(Code.SET, b"/n", value)
    if whose == OURS:
        with pytest.raises(ConnectionError):
            adding.ask(Code.ADD, b"/n", 1)
        assert connect().ask(Code.GET, b"/n") == value
    else:
        assert adding.ask(Code.ADD, b"/n", 1) == 2


PROGRAMS = {
    OURS: "from asyncdist.cli import main; main(['store', '--port', input(), '--data', sys.argv[1]])",
    TORCHS: "from torch.distributed import TCPStore\n"
    "server = TCPStore('127.0.0.1', int(input()), is_master=True, wait_for_workers=False)\n"
    "print(f'ready at :{server.port} ', flush=True); sys.stdin.read()",
}


class Process:
    """A server in a process of its own that waits for a port after its imports."""

    def __init__(self, whose: str, folder: Path) -> None:
        command = [sys.executable, "-c", f"import sys; {PROGRAMS[whose]}", str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def begin(self, port: int) -> int:
        """Serve; return the port, which is any free one for 0."""
        self._process.stdin.write(b"%d\n" % port)
        self._process.stdin.flush()
        found = re.search(rb":(\d+) ", self._process.stdout.readline())
        assert found
        return int(found[1])

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.processes
@pytest.mark.parametrize("whose", [OURS, pytest.param(TORCHS, marks=pytest.mark.exhaustive)])
def test_server_is_killed_and_restarted(whose, tmp_path):
    """asyncdist's server has all keys, and its client reconnects. torch's client reconnects to neither server."""
    with contextlib.ExitStack() as stack:
        first, second = Process(whose, tmp_path), Process(whose, tmp_path)
        stack.callback(first.kill)
        stack.callback(second.kill)
        port = first.begin(free_port())
        theirs = torch_dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        ours = TCPStore("127.0.0.1", port, timeout=20.0, config=Config()) if whose == OURS else None
        theirs.set("k", "v")
        assert theirs.get("k") == b"v"
        assert ours is None or ours.add("n", 1) == 1
        first.kill()
        assert second.begin(port) == port
        for _ in range(2):
            with pytest.raises(RuntimeError):
                theirs.get("k")
        with Peer(port) as later:
            assert later.ask(Code.CHECK, [b"/k"]) == {OURS: 0, TORCHS: 1}[whose]
        if ours is not None:
            assert ours.get("k") == b"v"
            assert ours.add("n", 1) == 2
            ours.close()


# -- where they agree ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b" 7 ", b"\t7\n", b"+7", b"007"])
def test_add_accepts_every_spelling_of_an_integer(connect, value):
    adding = connect()
    adding.ask(Code.SET, b"/n", value)
    assert adding.ask(Code.ADD, b"/n", 1) == 8
    assert adding.ask(Code.GET, b"/n") == b"8"


KEYS = [b"/a", b"/b", b"/prefix/c", b"/n"]
QUEUES = [b"/q", b"/r"]
SILENT = {Code.SET, Code.APPEND, Code.MULTI_SET, Code.QUEUE_PUSH}

keys = st.sampled_from(KEYS)
values = st.sampled_from([b"", b"v", b"w", b"12", bytes(2000)])
steps = st.one_of(
    st.tuples(st.just(Code.SET), keys, values),
    st.tuples(st.just(Code.GET), keys),
    st.tuples(st.just(Code.ADD), st.sampled_from([b"/counter", b"/other"]), st.integers(-(1 << 40), 1 << 40)),
    st.tuples(st.just(Code.COMPARE_SET), keys, values, values),
    st.tuples(st.just(Code.CHECK), st.lists(st.sampled_from([*KEYS, *QUEUES]), max_size=3)),
    st.tuples(st.just(Code.WAIT), st.lists(keys, max_size=3)),
    st.tuples(st.just(Code.GETNUMKEYS)),
    st.tuples(st.just(Code.DELETE_KEY), st.sampled_from([*KEYS, *QUEUES, b"/counter"])),
    st.tuples(st.just(Code.APPEND), keys, values),
    st.tuples(st.just(Code.MULTI_GET), st.lists(keys, max_size=3)),
    st.tuples(st.just(Code.MULTI_SET), st.dictionaries(keys, values, max_size=3)),
    st.tuples(st.just(Code.CANCEL_WAIT)),
    st.tuples(st.just(Code.QUEUE_PUSH), st.sampled_from(QUEUES), values),
    st.tuples(st.just(Code.QUEUE_POP), st.sampled_from(QUEUES)),
    st.tuples(st.just(Code.QUEUE_LEN), st.sampled_from(QUEUES)),
    st.tuples(st.just(Code.LIST_KEYS)),
    st.tuples(st.just(Code.BARRIER), st.sampled_from([b"/barrier", b"/gate"]), st.just(1)),
    st.tuples(st.just(Code.BARRIER), st.sampled_from([b"/of two", b"/of both"]), st.just(2)),
)
programs = st.lists(st.tuples(st.integers(0, 2), steps), max_size=30)


Program = list[tuple[int, Any]]
POPS = 2
"""The peer that pops and never waits. The other peers wait and never pop."""


def spared(program: Program) -> Program:
    """Remove the steps that trigger the known bugs of torch's server and those that its clients never take.

    A client has one wait at a time, and sends no request with a reply while it waits. A client in a barrier of two stays
    there until another arrives; at the end of the program that is the peer that pops.
    """
    steps: Program = []
    standing: dict[bytes, int] = {}
    waits: set[int] = set()
    waited_for: set[bytes] = set()
    for who, (code, *arguments) in program:
        if code == Code.COMPARE_SET and arguments[0] in waited_for:
            continue
        if code in (Code.LIST_KEYS, Code.GETNUMKEYS) and standing:  # a barrier is a key to torch's server
            continue
        if code in (Code.WAIT, Code.BARRIER, Code.CANCEL_WAIT):
            who %= POPS
            if who in standing.values():
                continue
        if code == Code.BARRIER and arguments[1] == 2 and standing.pop(arguments[0], None) is None:
            standing[arguments[0]] = who
        if code in (Code.WAIT, Code.BARRIER):
            if who in waits:
                steps.append((who, (Code.CANCEL_WAIT,)))
            waits.add(who)
            waited_for.update(arguments[0] if code == Code.WAIT else ())
        elif code == Code.QUEUE_POP:
            who = POPS
        steps.append((who, (code, *arguments)))
    return steps + [(POPS, (Code.BARRIER, key, 2)) for key in standing]


def run(port: int, program: Program) -> list[Any]:
    """Execute a program; return the reply of each step and the number of waits it released by peer."""
    seen: list[Any] = []
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(port)) for _ in range(3)]
        for who, (code, *arguments) in program:
            peers[who].send(code, *arguments)
            waits = code in (Code.WAIT, Code.BARRIER)
            reply = None if waits or code in SILENT else peers[who].reply(code, *arguments)
            seen.append((Code(code).name, reply, [peer.settle() for peer in peers]))
    return seen


def sweep(port: int) -> None:
    """Delete all keys of a server; starting another torch server takes half a second."""
    with Peer(port) as peer:
        for key in peer.ask(Code.LIST_KEYS):
            peer.ask(Code.DELETE_KEY, key)
        for queue in QUEUES:
            while peer.ask(Code.QUEUE_POP, queue)[0]:
                pass


@pytest.mark.parametrize("max_examples", [10, pytest.param(60, marks=pytest.mark.exhaustive)])
def test_both_servers_give_equal_replies_to_random_programs(max_examples):
    with our_server() as ours, torchs_server() as theirs:

        @settings(max_examples=max_examples, deadline=None)
        @given(programs)
        def alike(program):
            program = spared(program)
            assert run(ours, program) == run(theirs, program)
            sweep(ours)
            sweep(theirs)

        alike()
