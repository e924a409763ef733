"""The client's session as a state machine: answers, cancellations, and the requests after a reconnect."""

import math
from unittest.mock import ANY

import pytest

from asyncdist.errors import QueueEmptyError, StoreConnectionError, StoreError, UsageError
from asyncdist.store.protocol import operations
from asyncdist.store.protocol.client_protocol import ClientProtocol
from asyncdist.store.protocol.codec import Request, decode_request, hello, messages_in
from asyncdist.store.protocol.operations import Command, Op, OperationKind, Reason
from tests.support.received_messages import frame_of

LIMIT = 1 << 20


class Handler:
    """Records the answers to a request."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.answers: list[object] = []

    def resolve(self, value: object) -> None:
        self.answers.append(value)

    reject = publish = resolve


@pytest.fixture
def protocol() -> ClientProtocol:
    """A client with a new session."""
    protocol = ClientProtocol()
    reconnect(protocol, known=False)
    return protocol


def sent_by(protocol: ClientProtocol) -> list[Request]:
    """Return the requests that the client sends now."""
    return [decode_request(message) for sent in protocol.data_to_send() for message in messages_in(sent)]


def reconnect(protocol: ClientProtocol, *, known: bool, limit: int = LIMIT) -> list[Request]:
    """Connect a client again to a server that knows its session or not, and return the requests that it sends."""
    protocol.interrupted()
    protocol.receive(hello(limit))
    (resume,) = messages_in(protocol.introduce())
    protocol.receive(frame_of(resume[0], OperationKind.RESULT, ("lineage", known, False)))
    return sent_by(protocol)


def set_ephemeral(protocol: ClientProtocol, key: str, value: bytes = b"1") -> None:
    request, _ = protocol.ask(Handler(operations.command(operations.Op.SET_EPHEMERAL, key, value)))
    protocol.receive(frame_of(request, OperationKind.RESULT, None))


def test_replies_reach_their_requests_in_any_order(protocol):
    first, second = Handler(operations.get("a")), Handler(operations.get("b"))
    (one, _), (two, _) = protocol.ask(first), protocol.ask(second)
    protocol.receive(frame_of(two, OperationKind.RESULT, b"2") + frame_of(one, OperationKind.RESULT, b"1"))
    assert (first.answers, second.answers) == ([b"1"], [b"2"])
    assert not protocol.open_requests()


@pytest.mark.parametrize(
    ("reason", "kind"), [(Reason.EMPTY, QueueEmptyError), (Reason.INVALID, StoreError), (99, StoreError)]
)
def test_refusals_become_typed_errors(protocol, reason, kind):
    handler = Handler(operations.command(operations.Op.QUEUE_POP, "q", False))
    request, _ = protocol.ask(handler)
    protocol.receive(frame_of(request, OperationKind.REFUSED, (reason, "why")))
    (error,) = handler.answers
    assert type(error) is kind
    assert error.summary == "why"


def test_reply_that_crosses_its_cancel_is_dropped(protocol):
    handler = Handler(operations.get("a"))
    request, _ = protocol.ask(handler)
    assert decode_request(messages_in(protocol.give_up(request))[0]) == (0, Op.CANCEL, (request,))
    protocol.receive(frame_of(request, OperationKind.RESULT, b"late"))
    assert handler.answers == []


def test_withdrawn_request_that_never_blocks_sends_no_cancel(protocol):
    request, _ = protocol.ask(Handler(operations.set_("a", b"")))
    assert protocol.give_up(request) == b""


def test_end_rejects_each_request_with_its_own_error(protocol):
    handlers = [Handler(operations.get("a")), Handler(operations.get("a"))]
    for handler in handlers:
        protocol.ask(handler)
    protocol.end(StoreConnectionError("over"))
    one, other = (error for handler in handlers for error in handler.answers)
    assert type(one) is type(other) is StoreConnectionError
    assert one is not other


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (operations.set_("k", bytes(LIMIT)), "ASYNCDIST_STORE_MAX_VALUE_NBYTES"),
        (Command(Op.SET, ("\udc80", b"")), "store set"),
    ],
)
def test_message_that_cannot_be_sent_is_refused(protocol, command, error):
    with pytest.raises(UsageError, match=error):
        protocol.ask(Handler(command))
    assert not protocol.open_requests()


def test_lease_without_a_limit_is_sent_as_a_long_time():
    protocol = ClientProtocol(lease=math.inf)
    protocol.receive(hello(LIMIT))
    ((_, _, _, lease_ms),) = messages_in(protocol.introduce())
    assert lease_ms > 86400e3


def test_keys_are_restored_although_the_next_connection_breaks_before_the_answer(protocol):
    set_ephemeral(protocol, "k")
    requests = [reconnect(protocol, known=known) for known in (False, True)]
    assert requests[0] == requests[1] == [(requests[0][0].id, Op.RESTORE_EPHEMERAL, ("k", b"1"))]
    protocol.receive(frame_of(requests[0][0].id, OperationKind.RESULT, True))
    assert reconnect(protocol, known=True) == []


@pytest.mark.parametrize("sent", [True, False])
def test_key_whose_deletion_was_cancelled_is_restored_only_if_that_was_never_sent(protocol, sent):
    set_ephemeral(protocol, "k")
    if not sent:
        protocol.interrupted()
    request, _ = protocol.ask(Handler(operations.command(operations.Op.DELETE_KEY, "k")))
    protocol.give_up(request)
    restored = [each.args for each in reconnect(protocol, known=False)]
    assert restored == ([] if sent else [("k", b"1")])


def test_requests_wait_until_all_keys_are_restored(protocol):
    for key in ("k", "l"):
        set_ephemeral(protocol, key)
    checking, _ = protocol.ask(Handler(operations.command(operations.Op.CHECK, ["k"])))
    first, second = reconnect(protocol, known=False)
    deleting, message = protocol.ask(Handler(operations.command(operations.Op.DELETE_KEY, "k")))
    assert message == b""
    protocol.receive(frame_of(first.id, OperationKind.RESULT, True))
    assert not protocol.output
    protocol.receive(frame_of(second.id, OperationKind.RESULT, True))
    requests = sent_by(protocol)
    assert [(each.id, each.op) for each in requests] == [(checking, Op.CHECK), (deleting, Op.DELETE_KEY)]
    assert reconnect(protocol, known=True) == requests


def test_change_of_unknown_outcome_is_not_repeated_while_keys_are_restored(protocol):
    set_ephemeral(protocol, "k")
    adding = Handler(operations.add("n", 1))
    protocol.ask(adding)
    (restore,) = reconnect(protocol, known=False)
    assert reconnect(protocol, known=True) == [restore]
    protocol.receive(frame_of(restore.id, OperationKind.RESULT, True))
    assert not protocol.output
    assert [type(error) for error in adding.answers] == [StoreConnectionError]


def test_client_continues_without_a_key_that_a_smaller_store_refuses_to_restore(protocol, caplog):
    for key, nbytes in {"small": 1, "too much for a value": 1000, "too much for a message": 100_000}.items():
        set_ephemeral(protocol, key, bytes(nbytes))
    checking, _ = protocol.ask(Handler(operations.command(operations.Op.CHECK, ["other"])))
    first, second = reconnect(protocol, known=False, limit=70_000)
    protocol.receive(frame_of(first.id, OperationKind.RESULT, True))
    protocol.receive(frame_of(second.id, OperationKind.REFUSED, (int(Reason.TOO_LARGE), "as said by a test")))
    assert [each.id for each in sent_by(protocol)] == [checking]
    assert [record.args[1:] for record in caplog.records] == [
        ("'too much for a message'", ANY), ("'too much for a value'", "as said by a test"),
    ]  # fmt: skip
    assert [each.args[0] for each in reconnect(protocol, known=False) if each.id != checking] == ["small"]
