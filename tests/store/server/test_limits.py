"""The limits of values, keys and memory hold to the byte for each operation."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncdist.config import Config
from asyncdist.errors import StoreError
from asyncdist.store import AsyncStore, StoreServer, TCPStore
from asyncdist.store.protocol import client_protocol
from asyncdist.store.protocol.operations import Op, OperationKind, Reason, Reply
from asyncdist.store.state.change_log import ChangeLog, replay
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.model import Contents, MemoryQuota, RequestRefused, SizeLimits
from asyncdist.store.state.sessions import SessionTable

LONGEST = 100


class Store:
    """A state machine with a memory quota, and numbered requests."""

    def __init__(self, max_nbytes: int = 0) -> None:
        self.quota = MemoryQuota(max_nbytes)
        self.state = StoreState(SizeLimits(LONGEST, LONGEST), self.quota)
        self._number = 0

    def ask(self, client, op, *args):
        """Return what the reply says: a result, or why it was refused."""
        self._number += 1
        (*_, reply) = self.state.execute(client, self._number, op, args)
        return Reason(reply.value[0]) if reply.kind else reply.value

    @property
    def held_nbytes(self) -> int:
        """What a store counts that restores the contents at once."""
        quota = MemoryQuota()
        StoreState(quota=quota).restore(self.state.gather()())
        return quota.nbytes


def requests(key: str, value: bytes) -> list[tuple[object, ...]]:
    return [
        (Op.SET, key, value),
        (Op.SET_EPHEMERAL, key, value),
        (Op.COMPARE_SET, key, b"", value),
        (Op.APPEND, key, value),
        (Op.MULTI_SET, ["other", key], [b"", value]),
        (Op.QUEUE_PUSH, key, value),
    ]


@pytest.mark.parametrize("which", range(6))
def test_longest_value_and_key_are_accepted_and_longer_ones_refused(which):
    assert Store().ask("a", *requests("k" * LONGEST, bytes(LONGEST))[which]) is not Reason.TOO_LARGE
    assert Store().ask("a", *requests("é" * (LONGEST // 2), b"")[which]) is not Reason.TOO_LARGE
    for key, value in (("k", bytes(LONGEST + 1)), ("k" * (LONGEST + 1), b""), ("é" * (LONGEST // 2 + 1), b"")):
        store = Store()
        assert store.ask("a", *requests(key, value)[which]) is Reason.TOO_LARGE
        assert store.held_nbytes == store.quota.nbytes == len(store.state.keys) == 0


async def test_longest_value_with_the_longest_key_outlives_a_restart_with_lower_limits(tmp_path):
    key, value = "k" * (1 << 20), bytes(1 << 20)
    config = Config(store_max_value_nbytes=len(value), store_max_key_nbytes=len(key), store_reconnect=0.0)
    async with (
        await StoreServer.start("127.0.0.1", 0, config=config, data=tmp_path) as server,
        await AsyncStore.connect("127.0.0.1", server.port, timeout=60.0, config=config) as store,
        store.watch_keys() as changes,
    ):
        await store.set(key, value)
        assert await anext(changes) == (key, value)
    smaller = config.with_(store_max_value_nbytes=1, store_max_key_nbytes=1)
    async with (
        await StoreServer.start("127.0.0.1", 0, config=smaller, data=tmp_path) as server,
        await AsyncStore.connect("127.0.0.1", server.port, timeout=60.0, config=smaller) as store,
    ):
        assert await store.list_keys() == [key]
        assert await store.get(key) == value


@pytest.mark.parametrize("request_of", [lambda key: (Op.ADD, key, 1), lambda key: (Op.BARRIER, key, 1)])
def test_add_and_barrier_refuse_a_longer_key(request_of):
    assert Store().ask("a", *request_of("k" * LONGEST)) in (1, None)
    store = Store()
    assert store.ask("a", *request_of("k" * (LONGEST + 1))) is Reason.TOO_LARGE
    assert len(store.state.keys) == store.state.num_open == 0


def test_memory_limit_holds_to_the_byte():
    for request in requests("k", bytes(49)):
        measured = Store()
        measured.ask("a", *request)
        for less, expected in ((0, measured.held_nbytes), (1, 0)):
            store = Store(max_nbytes=measured.held_nbytes - less)
            assert (store.ask("a", *request) is Reason.FULL) is bool(less)
            assert store.quota.nbytes == store.held_nbytes == expected


def test_multi_set_at_the_memory_limit_sets_all_keys_or_none():
    keys, values = ["more", "less", "new", "new"], [bytes(60), b"", bytes(LONGEST), b"n"]
    for less, expected in ((0, [bytes(60), b"", b"n"]), (1, [b"", bytes(60)])):
        store = Store(max_nbytes=372 - less)
        store.ask("a", Op.MULTI_SET, keys[:2], [b"", bytes(60)])
        assert (store.ask("a", Op.MULTI_SET, keys, values) is Reason.FULL) is bool(less)
        assert list(store.state.gather()().values.values()) == expected
        assert store.quota.nbytes == store.held_nbytes == 372 - 104 * less


def test_arriving_chunks_count_against_the_memory_limit():
    store = Store(max_nbytes=1000)
    store.quota.reserve(950)
    with pytest.raises(RequestRefused):
        store.quota.reserve(51)
    assert store.ask("a", Op.SET, "k", bytes(60)) is Reason.FULL
    store.quota.arriving_nbytes -= 950
    assert store.ask("a", Op.SET, "k", bytes(60)) is None


def counted(contents: Contents) -> int:
    quota = MemoryQuota()
    SessionTable(quota).restore(contents.members, 0.0)
    return quota.nbytes


def test_kept_answers_count_until_received_or_their_client_closes():
    quota, later_quota = MemoryQuota(), MemoryQuota()
    members, later = SessionTable(quota), SessionTable(later_quota)
    one, other = (members.open(name, 10.0, "connection")[0] for name in (b"one", b"other"))
    for request, (kind, value) in enumerate(ANSWERS, 1):
        one.remember(Reply("connection", request, kind, value))
        other.remember(Reply("connection", request, kind, value))
    later.restore(members.gather()(), 0.0)
    for these, counter in ((members, quota), (later, later_quota)):
        assert counter.nbytes == counted(Contents(members=these.gather()())) > 2 * LONGEST
        these.get(b"one").received(3)
        assert counter.nbytes == counted(Contents(members=these.gather()()))
        these.close(these.get(b"one"))
        assert counter.nbytes == counted(Contents(members=these.gather()())) > LONGEST
        these.get(b"other").received(len(ANSWERS) + 1)
        assert counter.nbytes == 0


ANSWERS = [
    (OperationKind.RESULT, None),
    (OperationKind.RESULT, 5),
    (OperationKind.RESULT, bytes(LONGEST)),
    (OperationKind.REFUSED, (1, "because")),
]


def test_kept_answers_are_limited_except_for_the_last(monkeypatch):
    monkeypatch.setattr("asyncdist.store.state.sessions.KEPT_NBYTES", 5 * LONGEST)
    log, quota, contents = ChangeLog(), MemoryQuota(), Contents()
    log.start(lambda: None)
    members = SessionTable(quota, log)
    member, _, _ = members.open(b"one", 10.0, "connection")
    for request in range(1, 10):
        member.remember(Reply("connection", request, OperationKind.RESULT, bytes(LONGEST)))
    assert member.answer_to(9) is not None
    assert member.answer_to(1) is None
    assert 0 < member.nbytes == quota.nbytes <= 5 * LONGEST
    member.remember(Reply("connection", 10, OperationKind.RESULT, bytes(6 * LONGEST)))
    assert member.answer_to(9) is None
    assert member.answer_to(10) is not None
    replay(b"".join(log.take()), contents)
    assert contents.members == members.gather()()


@pytest.mark.parametrize("config", [Config(store_max_nbytes=1 << 20)])
async def test_answers_that_a_client_never_confirms_fill_the_server(store, monkeypatch):
    monkeypatch.setattr(client_protocol, "_ACKNOWLEDGE_AFTER_NBYTES", 1 << 60)
    value = bytes(10_000)
    for number in range(110):
        await store.compare_set("k", value if number else b"", value)  # nothing more is held by that
    with pytest.raises(StoreError, match="--max-memory"):
        await store.set("other", b"")


@pytest.mark.parametrize("kind", [AsyncStore, TCPStore])
@pytest.mark.parametrize("config", [Config(store_max_nbytes=8 << 20)])
async def test_client_confirms_long_answers_with_its_next_request(server, connect, kind):
    store, value = await connect(kind=kind), bytes(3 << 20)
    await store.compare_set("k", b"", value)
    assert server.quota.nbytes > 2 * len(value)
    await store.set("other", value)
    await store.delete_key("k")
    await store.compare_set("k", b"", value[1:])
    await store.num_keys()
    assert 2 * len(value) < server.quota.nbytes < 3 * len(value)


KEYS, VALUES = st.sampled_from(["a", "b", "long"]), st.binary(max_size=5)
REQUESTS = st.one_of(
    st.tuples(st.sampled_from([Op.SET, Op.SET_EPHEMERAL, Op.APPEND, Op.QUEUE_PUSH]), KEYS, VALUES),
    st.tuples(st.just(Op.DELETE_KEY), KEYS),
    st.tuples(st.just(Op.MULTI_SET), st.just(["a", "b", "a"]), st.tuples(VALUES, VALUES, VALUES).map(list)),
    st.tuples(st.just(Op.QUEUE_POP), KEYS, st.just(False)),
    st.tuples(st.just(Op.CONFIRM), st.just(0)),
    st.tuples(st.just(Op.LEAVE)),
)


@given(
    st.lists(st.tuples(st.sampled_from(["one", "two"]), REQUESTS), max_size=40), st.sampled_from([250, 350, 1 << 30])
)
@example([("one", (Op.SET, "a", b"lasting")), ("two", (Op.SET_EPHEMERAL, "a", b"1")), ("two", (Op.LEAVE,))], 1 << 30)
def test_counted_bytes_equal_held_bytes_and_stay_below_the_limit(asked, most):
    store, popped = Store(most), {"one": 0, "two": 0}
    for number, (client, (op, *args)) in enumerate(asked, 1):
        if op is Op.QUEUE_POP:
            popped[client] = number
        elif op is Op.CONFIRM:
            args = [popped[client]]
        store.state.bind(client, client.encode())
        store.state.execute(client, number, op, tuple(args))
        if op is Op.LEAVE:
            store.state.expire(client.encode())
        assert store.quota.nbytes == store.held_nbytes <= most
