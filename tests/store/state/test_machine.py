"""The state machine: single promises, and random requests whose replies are compared with those of a simple model."""

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from asyncdist.store.protocol import operations
from asyncdist.store.protocol.operations import Op, OperationKind, Reason, Reply
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.model import SizeLimits

INT64_MAX = (1 << 63) - 1


class Asker:
    """A client that numbers its requests and keeps the replies."""

    def __init__(self, state: StoreState, name: str, log: dict[tuple[str, int], list[Reply]]) -> None:
        self.state, self.name, self.log, self.last = state, name, log, 0

    def ask(self, op: Op, *args: Any) -> int:
        self.last += 1
        self._take(self.state.execute(self.name, self.last, op, args))
        return self.last

    def leave(self) -> None:
        self._take(self.state.leave(self.name))

    def cancel(self, request: int) -> None:
        self._take(self.state.execute(self.name, 0, Op.CANCEL, (request,)))

    def confirm(self, request: int) -> None:
        self._take(self.state.execute(self.name, 0, Op.CONFIRM, (request,)))

    def _take(self, replies: list[Reply]) -> None:
        for reply in replies:
            self.log.setdefault((reply.client, reply.request), []).append(reply)

    def answer(self, request: int) -> Any:
        """Return the single result of a request; fails without one."""
        (reply,) = self.log[self.name, request]
        assert reply.kind is OperationKind.RESULT, reply
        return reply.value

    def blocked(self, request: int) -> bool:
        return (self.name, request) not in self.log

    def refused(self, request: int) -> Reason:
        (reply,) = self.log[self.name, request]
        assert reply.kind is OperationKind.REFUSED
        assert isinstance(reply.value[1], str)
        return Reason(reply.value[0])

    def published(self, request: int) -> list[Any]:
        return [reply.value for reply in self.log[self.name, request] if reply.kind is OperationKind.PUBLISHED]

    def do(self, op: Op, *args: Any) -> Any:
        return self.answer(self.ask(op, *args))


@pytest.fixture
def askers() -> tuple[Asker, Asker, Asker]:
    state, log = StoreState(SizeLimits(max_value_nbytes=100)), {}
    return Asker(state, "a", log), Asker(state, "b", log), Asker(state, "c", log)


a = pytest.fixture(lambda askers: askers[0])
b = pytest.fixture(lambda askers: askers[1])
c = pytest.fixture(lambda askers: askers[2])


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (Op.SET, ("k", b"1")),
        (Op.ADD, ("k", 1)),
        (Op.APPEND, ("k", b"1")),
        (Op.COMPARE_SET, ("k", b"", b"1")),
        (Op.MULTI_SET, (["l", "k"], [b"2", b"1"])),
        (Op.BARRIER, ("k", 1)),
    ],
)
def test_every_operation_that_stores_resolves_waiting_requests(a, b, op, args):
    getting, waiting, getting_twice = a.ask(Op.GET, "k"), a.ask(Op.WAIT, ["k"]), a.ask(Op.MULTI_GET, ["k", "k"])
    b.do(op, *args)
    assert a.answer(getting) == b"1"
    assert a.answer(waiting) is None
    assert a.answer(getting_twice) == [b"1", b"1"]


@pytest.mark.parametrize("value", [b"forty-two", b"1_000", b"_1", b"", b"7 8", b"7\0", b"0x10", b"1e3"])
def test_add_to_a_text_is_refused_and_changes_nothing(a, value):
    a.do(Op.SET, "n", value)
    assert a.refused(a.ask(Op.ADD, "n", 1)) is Reason.INVALID
    assert a.do(Op.GET, "n") == value


def test_add_beyond_64_bits_is_refused(a):
    assert a.do(Op.ADD, "n", INT64_MAX) == INT64_MAX
    assert a.refused(a.ask(Op.ADD, "n", 1)) is Reason.INVALID
    assert a.do(Op.ADD, "n", 0) == INT64_MAX


def test_wait_counts_a_key_that_was_deleted_again(a, b):
    waiting = a.ask(Op.WAIT, ["x", "y"])
    b.do(Op.SET, "x", b"")
    b.do(Op.DELETE_KEY, "x")
    b.do(Op.SET, "y", b"")
    assert a.answer(waiting) is None


def test_multi_get_waits_again_for_a_deleted_value(a, b):
    waiting = a.ask(Op.MULTI_GET, ["x", "y"])
    b.do(Op.SET, "x", b"1")
    b.do(Op.DELETE_KEY, "x")
    b.do(Op.SET, "y", b"2")
    assert a.blocked(waiting)
    b.do(Op.SET, "x", b"3")
    assert a.answer(waiting) == [b"3", b"2"]


def test_offer_keeps_the_first_value_and_returns_optional_keys_that_exist_at_the_end(a, b):
    assert a.do(Op.OFFER, "k", b"first", ["k"], ["none"]) == [b"first", b""]
    waiting = b.ask(Op.OFFER, "k", b"second", ["last", "k"], ["late", "none"])
    a.do(Op.SET, "late", b"1")
    assert b.blocked(waiting)
    a.do(Op.SET, "last", b"2")
    assert b.answer(waiting) == [b"2", b"first", b"1", b""]


def test_empty_list_of_keys_is_present(a):
    assert a.do(Op.WAIT, []) is None
    assert a.do(Op.CHECK, []) is True
    assert a.do(Op.MULTI_GET, []) == []


def test_list_and_num_keys(a):
    a.do(Op.MULTI_SET, ["x/1", "y", "x/2"], [b""] * 3)
    a.do(Op.QUEUE_PUSH, "x/queue", b"")
    assert a.do(Op.LIST_KEYS, "") == ["x/1", "y", "x/2"]
    assert a.do(Op.LIST_KEYS, "x/") == ["x/1", "x/2"]
    assert a.do(Op.NUM_KEYS) == 3


def test_append_stops_at_the_limit(a):
    a.do(Op.APPEND, "k", bytes(60))
    assert a.refused(a.ask(Op.APPEND, "k", bytes(60))) is Reason.TOO_LARGE
    assert a.do(Op.GET, "k") == bytes(60)


def test_append_does_not_change_earlier_replies(a):
    a.do(Op.SET, "k", b"one, ")
    handed_out = [a.do(Op.GET, "k"), memoryview(a.do(Op.GET, "k")), a.do(Op.WATCH, "k")]
    for word in (b"two, ", b"", b"three"):
        a.do(Op.APPEND, "k", word)
        handed_out += a.do(Op.GET, "k"), a.do(Op.COMPARE_SET, "k", b"?", b"?")
    assert handed_out == [b"one, "] * 3 + [b"one, two, "] * 4 + [b"one, two, three"] * 2
    assert len({hash(each) for each in handed_out}) == len(set(handed_out)) == 3


# -- queues ----------------------------------------------------------------------------------------


def test_queue_and_value_of_one_key_are_independent(a):
    a.do(Op.QUEUE_PUSH, "k", b"item")
    assert a.blocked(a.ask(Op.GET, "k"))
    assert a.blocked(a.ask(Op.MULTI_GET, ["k"]))
    assert a.do(Op.DELETE_KEY, "k") is False
    assert a.do(Op.CHECK, ["k"]) is True
    assert a.do(Op.WAIT, ["k"]) is None


def test_a_push_does_not_answer_a_get_after_a_pop(a, b):
    """In torch's server a stale wake-up answers the next get with nothing."""
    taking = a.ask(Op.QUEUE_POP, "q", True)
    b.do(Op.QUEUE_PUSH, "q", b"1")
    a.answer(taking)
    getting = a.ask(Op.GET, "q")
    b.do(Op.QUEUE_PUSH, "q", b"2")
    assert a.blocked(getting)


def test_push_wakes_only_the_first_wait(a, b, c):
    first, second = a.ask(Op.WAIT, ["q"]), b.ask(Op.WAIT, ["q"])
    c.do(Op.QUEUE_PUSH, "q", b"1")
    assert a.answer(first) is None
    assert b.blocked(second)


def test_returned_items_keep_their_order_and_go_to_blocked_pops(a, b, c):
    for item in (b"1", b"2", b"3"):
        c.do(Op.QUEUE_PUSH, "q", item)
    taken = [a.ask(Op.QUEUE_POP, "q", True) for _ in range(3)]
    a.confirm(taken[1])
    waiting = [b.ask(Op.QUEUE_POP, "q", True) for _ in range(3)]
    a.leave()
    assert [b.answer(waiting[0]), b.answer(waiting[1])] == [b"1", b"3"]
    assert b.blocked(waiting[2])


# -- barriers, channels ----------------------------------------------------------------------------


def test_a_barrier_opens_for_all_at_once_and_stays_open(a, b, c):
    first = a.ask(Op.BARRIER, "x", 2)
    assert a.blocked(first)
    second = b.ask(Op.BARRIER, "x", 2)
    assert a.answer(first) is None
    assert b.answer(second) is None
    assert c.do(Op.BARRIER, "x", 2) is None
    assert c.do(Op.GET, "x") == b"2"
    c.do(Op.DELETE_KEY, "x")
    assert c.blocked(c.ask(Op.BARRIER, "x", 2))


def test_publish_reaches_present_subscriptions(a, b, c):
    assert c.do(Op.PUBLISH, "x", b"before") == 0
    listening = a.ask(Op.SUBSCRIBE, "x"), a.ask(Op.SUBSCRIBE, "x"), b.ask(Op.SUBSCRIBE, "y")
    assert c.do(Op.PUBLISH, "x", b"1") == 2
    a.cancel(listening[0])
    assert c.do(Op.PUBLISH, "x", b"2") == 1
    a.leave()
    assert c.do(Op.PUBLISH, "x", b"3") == 0
    messages = [a.published(n) for n in listening[:2]]
    assert messages == [[b"1"], [b"1", b"2"]]


def test_message_has_at_most_the_length_of_a_value(a, b):
    listening = a.ask(Op.SUBSCRIBE, "x")
    assert b.do(Op.PUBLISH, "x", bytes(100)) == 1
    assert b.refused(b.ask(Op.PUBLISH, "x", bytes(101))) is Reason.TOO_LARGE
    assert a.published(listening) == [bytes(100)]


def test_watches_share_one_message(a, b, c):
    """The bytes exist once: a value may be large, and it may have many watches."""
    watching = [(each, each.ask(Op.WATCH, "key")) for each in (a, b)]
    surveying = [(each, each.ask(Op.WATCH_KEYS, prefix)) for each, prefix in ((a, ""), (b, "k"), (c, "other"))]
    value = bytes(100)
    c.do(Op.SET, "key", value)
    (first,), (second,) = (each.published(number) for each, number in watching)
    assert first is second
    assert operations.watched(first) == value
    (first,), (second,), none = (each.published(number) for each, number in surveying)
    assert first is second
    assert operations.watched_key(first) == ("key", value)
    assert none == []


class Compared(str):
    """A key that counts how often it is compared with a prefix."""

    __slots__ = ()
    count = 0

    def startswith(self, *args):
        Compared.count += 1
        return super().startswith(*args)


def test_change_is_not_compared_with_every_watched_prefix(a, b, c):
    others = [a.ask(Op.WATCH_KEYS, f"job{number:04}/") for number in range(1000)]
    watching = [
        (each, each.ask(Op.WATCH_KEYS, prefix)) for each in (a, b) for prefix in ("", "job0042/k", "job0042/key/")
    ]
    Compared.count = 0
    c.do(Op.SET, Compared("job0042/key"), b"v")
    c.do(Op.DELETE_KEY, Compared("job0042/key"))
    assert Compared.count < 10
    assert [len(a.published(each)) for each in others] == [2 if number == 42 else 0 for number in range(1000)]
    assert [len(each.published(number)) for each, number in watching] == [2, 2, 0] * 2
    for number in [*others, *(number for each, number in watching if each is a)]:
        a.cancel(number)
    b.leave()
    _assert_nothing_waits(a.state)
    c.do(Op.SET, "job0042/key", b"again")
    assert len(a.published(others[42])) == 2


def test_end_of_a_lease_does_not_look_at_every_queue(a, b):
    a.ask(Op.ACQUIRE_LEASE, "job/")
    mine, others = [f"job/{number}" for number in range(100)], [f"other/{number}" for number in range(1000)]
    for key in mine + others:
        b.do(Op.QUEUE_PUSH, Compared(key), b"item")
    for key in mine[:99] + others[:99]:  # these are empty once, and some filled again
        b.confirm(b.ask(Op.QUEUE_POP, Compared(key), True))
    b.do(Op.QUEUE_PUSH, mine[0], b"item")
    b.do(Op.QUEUE_PUSH, mine[98], b"item")
    b.do(Op.QUEUE_PUSH, others[98], b"item")
    Compared.count = 0
    a.ask(Op.RELEASE_LEASE, "job/")
    assert Compared.count < 200
    assert [b.do(Op.QUEUE_LEN, key) for key in mine] == [0] * 100
    assert [b.do(Op.QUEUE_LEN, key) for key in others] == [0] * 98 + [1] * 902


# -- cancelled requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "leave"])
@pytest.mark.parametrize(
    ("op", "args"),
    [
        (Op.GET, ("k",)),
        (Op.WAIT, (["k", "l"],)),
        (Op.MULTI_GET, (["k", "l"],)),
        (Op.OFFER, ("m", b"1", ["k", "l"], ["n"])),
        (Op.QUEUE_POP, ("k", True)),
        (Op.BARRIER, ("k", 2)),
        (Op.SUBSCRIBE, ("k",)),
    ],
)
def test_cancelled_request_leaves_no_entries(a, b, op, args, how):
    request = a.ask(op, *args)
    answered = len(a.log.get(("a", request), []))
    a.cancel(request) if how == "cancel" else a.leave()
    b.do(Op.MULTI_SET, ["k", "l"], [b"2", b"2"])
    b.do(Op.QUEUE_PUSH, "k", b"1")
    b.do(Op.PUBLISH, "k", b"1")
    assert len(a.log.get(("a", request), [])) == answered
    assert b.do(Op.QUEUE_LEN, "k") == 1
    _assert_nothing_waits(a.state)


def test_cancel_of_an_unknown_request_has_no_effect(a):
    a.cancel(17)
    a.confirm(17)
    a.leave()
    assert a.log == {}


def test_a_request_id_in_use_is_refused(a):
    a.state.execute("a", 1, Op.GET, ("k",))
    (reply,) = a.state.execute("a", 1, Op.GET, ("l",))
    assert reply.kind is OperationKind.REFUSED
    a.leave()
    _assert_nothing_waits(a.state)


def _assert_nothing_waits(state: StoreState) -> None:
    """Once all keys and items are deleted, the parts of the state hold nothing."""
    assert state.num_open == 0
    for key in state.keys.list_keys(""):
        state.keys.delete(key)
    state.queues.clear("")
    parts = [part for part in vars(state).values() if hasattr(part, "__dict__")]
    held = {
        (type(part).__name__, name): kept
        for part in parts
        for name, kept in vars(part).items()
        if isinstance(kept, dict)
    }
    assert len(held) >= 8
    assert {where: kept for where, kept in held.items() if kept} == {}


# -- against a model -------------------------------------------------------------------------------

KEYS = st.sampled_from(["k", "l", "m"])
CLIENTS = st.sampled_from(["a", "b", "c"])
VALUES = st.binary(max_size=3)
NUMBERS = st.integers(-3, 3)


class Model(RuleBasedStateMachine):
    """The model is a list of pending requests, searched from the start after each change until no reply is due."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.state = StoreState()
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.pending: list[dict[str, Any]] = []
        self.held: dict[tuple[str, int], tuple[str, bytes]] = {}
        self.last = 0

    def execute(self, client: str, op: Op, *args: Any) -> tuple[tuple[str, int], list[Reply]]:
        self.last += 1
        return (client, self.last), self.state.execute(client, self.last, op, args)

    def settle(self) -> list[tuple[str, int, Any]]:
        """Return the replies that are due in the model."""
        due = []
        moved = True
        while moved:
            moved = False
            for entry in self.pending:
                value = self._try(entry)
                if value is not None:
                    due.append((*entry["place"], value[0]))
                    self.pending.remove(entry)
                    moved = True
                    break
        return due

    def _try(self, entry: dict[str, Any]) -> tuple[Any] | None:
        op, keys = entry["op"], entry["keys"]
        if op is Op.QUEUE_POP:
            if self.queues.get(keys[0]):
                item = self.queues[keys[0]].popleft()
                self.held[entry["place"]] = keys[0], item
                return (item,)
            return None
        if not all(key in self.values for key in keys):
            return None
        got = [self.values[key] for key in keys]
        return (got[0] if op is Op.GET else got,)

    def compare(self, replies: list[Reply], due: list[tuple[str, int, Any]]) -> None:
        assert sorted((r.client, r.request, repr(r.value)) for r in replies) == sorted(
            (client, request, repr(value)) for client, request, value in due
        )
        assert all(r.kind is OperationKind.RESULT for r in replies)

    @rule(client=CLIENTS, key=KEYS, value=VALUES)
    def set(self, client, key, value):
        place, replies = self.execute(client, Op.SET, key, value)
        self.values[key] = value
        self.compare(replies, [(*place, None), *self.settle()])

    @rule(client=CLIENTS, key=KEYS, value=VALUES)
    def append(self, client, key, value):
        place, replies = self.execute(client, Op.APPEND, key, value)
        self.values[key] = self.values.get(key, b"") + value
        self.compare(replies, [(*place, None), *self.settle()])

    @rule(client=CLIENTS, key=st.sampled_from(["m", "n"]), number=NUMBERS)
    def add(self, client, key, number):
        place, replies = self.execute(client, Op.ADD, key, number)
        try:
            total = int(self.values.get(key, b"0")) + number
        except ValueError:
            assert [r.kind for r in replies] == [OperationKind.REFUSED]
            return
        self.values[key] = str(total).encode()
        self.compare(replies, [(*place, total), *self.settle()])

    @rule(client=CLIENTS, key=KEYS, expected=VALUES, desired=VALUES)
    def compare_set(self, client, key, expected, desired):
        place, replies = self.execute(client, Op.COMPARE_SET, key, expected, desired)
        answer = self.values.get(key, expected)
        if answer == expected and (key in self.values or not expected):
            answer = self.values[key] = desired
        self.compare(replies, [(*place, answer), *self.settle()])

    @rule(client=CLIENTS, key=KEYS)
    def delete(self, client, key):
        place, replies = self.execute(client, Op.DELETE_KEY, key)
        self.compare(replies, [(*place, self.values.pop(key, None) is not None)])

    @rule(client=CLIENTS, key=KEYS, item=VALUES)
    def push(self, client, key, item):
        place, replies = self.execute(client, Op.QUEUE_PUSH, key, item)
        self.queues.setdefault(key, deque()).append(item)
        self.compare(replies, [(*place, None), *self.settle()])

    @rule(client=CLIENTS, keys=st.lists(KEYS, min_size=1, max_size=3), target=requests)
    def multi_get(self, client, keys):
        return self._blocking(client, Op.MULTI_GET, keys, [keys])

    @rule(client=CLIENTS, key=KEYS, value=VALUES, keys=st.lists(KEYS, min_size=1, max_size=3), target=requests)
    def offer(self, client, key, value, keys):
        self.values[key] = self.values.get(key) or value
        return self._blocking(client, Op.OFFER, keys, [key, value, keys, []])

    @rule(client=CLIENTS, key=KEYS, target=requests)
    def get(self, client, key):
        return self._blocking(client, Op.GET, [key], [key])

    @rule(client=CLIENTS, key=KEYS, target=requests)
    def pop(self, client, key):
        return self._blocking(client, Op.QUEUE_POP, [key], [key, True])

    def _blocking(self, client, op, keys, args):
        place, replies = self.execute(client, op, *args)
        self.pending.append({"place": place, "op": op, "keys": keys})
        self.compare(replies, self.settle())
        return place

    @rule(place=consumes(requests))
    def cancel(self, place):
        replies = self.state.execute(place[0], 0, Op.CANCEL, (place[1],))
        self.pending = [entry for entry in self.pending if entry["place"] != place]
        if place in self.held:
            key, item = self.held.pop(place)
            self.queues[key].appendleft(item)
        self.compare(replies, self.settle())

    @rule(place=consumes(requests))
    def confirm(self, place):
        assert self.state.execute(place[0], 0, Op.CONFIRM, (place[1],)) == []
        self.held.pop(place, None)

    @rule(client=CLIENTS)
    def leave(self, client):
        replies = self.state.leave(client)
        self.pending = [entry for entry in self.pending if entry["place"][0] != client]
        mine = [place for place in self.held if place[0] == client]
        for place in sorted(mine, key=list(self.held).index, reverse=True):
            key, item = self.held.pop(place)
            self.queues[key].appendleft(item)
        self.compare(replies, self.settle())

    @rule(client=CLIENTS)
    def look(self, client):
        assert self.execute(client, Op.NUM_KEYS)[1][0].value == len(self.values)
        assert sorted(self.execute(client, Op.LIST_KEYS, "")[1][0].value) == sorted(self.values)
        for key in ("k", "l", "m"):
            present = key in self.values or bool(self.queues.get(key))
            assert self.execute(client, Op.CHECK, [key])[1][0].value is present
            assert self.execute(client, Op.QUEUE_LEN, key)[1][0].value == len(self.queues.get(key, ()))

    @invariant()
    def as_much_is_open(self):
        assert self.state.num_open == len(self.pending) + len(self.held)

    def teardown(self):
        for client in ("a", "b", "c"):
            self.state.leave(client)
        _assert_nothing_waits(self.state)


Model.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase
