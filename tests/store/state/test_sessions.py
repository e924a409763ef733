"""Client sessions: their leases, and the replies that the server keeps for them."""

from asyncdist.store.protocol.operations import OperationKind, Reply
from asyncdist.store.state.change_log import ChangeLog, replay
from asyncdist.store.state.model import KEPT_ANSWERS, Contents
from asyncdist.store.state.sessions import SessionTable


def test_lease_runs_from_the_loss_of_the_connection():
    sessions = SessionTable()
    session, known, _ = sessions.open(b"a", 10.0, "first")
    assert not known
    assert sessions.expire(1e9) == []
    sessions.disconnect(session, "first", 100.0)
    assert sessions.next_end() == 110.0
    assert sessions.expire(109.9) == []
    assert sessions.open(b"a", 10.0, "second") == (session, True, None)
    assert sessions.expire(110.0) == []  # the client has returned in time
    sessions.disconnect(session, "first", 120.0)  # an older connection
    assert sessions.expire(1e9) == []
    sessions.disconnect(session, "second", 130.0)
    assert sessions.expire(140.0) == [session]
    assert len(sessions) == 0
    assert sessions.open(b"a", 10.0, "third")[1] is False


def test_lease_of_the_latest_connection_counts():
    sessions = SessionTable()
    session, _, _ = sessions.open(b"a", 10.0, "first")
    sessions.open(b"a", 20.0, "second")
    sessions.disconnect(session, "second", 100.0)
    assert sessions.next_end() == 120.0


def test_restarted_leases_run_anew_for_clients_that_are_away():
    sessions = SessionTable()
    here, _, _ = sessions.open(b"here", 10.0, "one")
    away, _, _ = sessions.open(b"away", 10.0, "two")
    sessions.disconnect(away, "two", 100.0)
    sessions.restart_leases(500.0)
    assert sessions.expire(509.9) == []
    assert sessions.expire(510.0) == [away]
    assert sessions.get(b"here") is here


def test_restored_lease_runs_from_the_start_of_the_server():
    sessions = SessionTable()
    sessions.restore({b"a": (10.0, {7: (OperationKind.RESULT, 1)}, 0)}, 100.0)
    assert sessions.expire(109.9) == []
    (session,) = sessions.expire(110.0)
    assert session.answer_to(7) == Reply(None, 7, OperationKind.RESULT, 1)


def test_answers_are_kept_until_they_are_acknowledged():
    session, _, _ = SessionTable().open(b"a", 10.0, "connection")
    for request in range(1, 6):
        session.remember(Reply("connection", request, OperationKind.RESULT, request))
    session.received(3)
    assert [session.answer_to(request) for request in (1, 2)] == [None, None]
    assert session.answer_to(3) == Reply(None, 3, OperationKind.RESULT, 3)  # the connection is not kept
    for request in range(10, 10 + KEPT_ANSWERS):
        session.remember(Reply("connection", request, OperationKind.RESULT, request))
    assert session.answer_to(5) is None
    assert session.answer_to(10) is not None


def test_change_log_holds_acknowledgements_and_closed_sessions():
    log, contents = ChangeLog(), Contents()
    log.start(lambda: None)
    sessions = SessionTable(log=log)
    stays, leaves = [sessions.open(identity, 10.0, "connection")[0] for identity in (b"a", b"b")]
    for request in range(1, 6):
        stays.remember(Reply("connection", request, OperationKind.RESULT, request))
    stays.received(4)
    sessions.close(leaves)
    replay(b"".join(log.take()), contents)
    assert contents.members == sessions.gather()() == {b"a": (10.0, {4: (0, 4), 5: (0, 5)}, 0)}
