"""Ranks that leave: orderly, during an operation, without notice, twice, and with a later return."""

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("order", "status", "reason"),
    [
        (("destroy",), None, "it has destroyed its process group"),
        (("exit", 7), 7, "its process has ended"),
        (("fail", "on purpose"), 1, "its process has ended"),
        (("leave_suddenly", 9), 9, "onnection"),
    ],
)
def test_rank_that_waits_for_a_leaving_rank_gets_an_error(job, face, order, status, reason):
    """Any rank may leave, also rank 0, which serves the store; its exit status is kept.

    The connection of a rank that leaves suddenly is closed, or reset if it had not read all messages.
    """
    for leaver in (0, 1):
        ranks = job.met(3, face)
        others = [told for told in ranks if told is not ranks[leaver]]
        for told in others:
            told.tell("all_reduce", "world", 10)
        ranks[leaver].tell(*order)
        for told in others:
            answer = told.hear()
            assert (answer.kind, answer.peer) == ("PeerLostError", leaver), answer.text
            assert reason in answer.text
        if status is not None:
            assert ranks[leaver].process.wait() == status
            assert ("RuntimeError: on purpose" in ranks[leaver].process.output()) == (order[0] == "fail")


def test_messages_sent_before_leaving_arrive(job, face):
    for count in (10, 20_000, 100_000):
        receiver, leaver = job.met(2, face)
        leaver.tell("send_and_destroy", count, 0)
        # Messages that fit into the kernel's buffers are sent before anyone receives: the leaver exits first.
        if count < 100_000:
            assert leaver.hear() is None
        assert receiver.do("receive", "world", 1, count) == count
        receiver.tell("receive", "world", 1, count)
        late = receiver.hear()
        assert (late.kind, late.peer) == ("PeerLostError", 1)


def test_leaving_right_after_the_last_collective_is_clean(job, face):
    ranks = job.start(4, face)
    for count in (1, 1000, 300_000, 5, 70_000):
        job.meet(ranks)
        for told in ranks:
            told.tell("all_reduce", "world", count, 3)
            told.tell("destroy")
        assert [told.hear() for told in ranks] == [64.0] * 4
        assert [told.hear() for told in ranks] == [None] * 4


def test_calls_after_destroy_raise_until_the_next_init(job, all_do, face):
    ranks = job.world(2, face)
    all_do(ranks, "new_group", "both", [0, 1])
    assert all_do(ranks, "destroy") == [None, None]
    for order in (("destroy",), ("all_reduce", "world", 1), ("barrier", "world"), ("new_group", "more", [0, 1])):
        for answer in all_do(ranks, *order):
            assert answer.kind == "NotInitializedError", answer
    assert all_do(ranks, "is_initialized") == [False, False]
    for _ in range(2):
        job.meet(ranks)
        ranks[0].tell("init", "env://", 0, 2)
        assert ranks[0].hear().kind == "AlreadyInitializedError"
        assert all_do(ranks, "all_reduce", "world", 1) == [2.0, 2.0]
        assert all_do(ranks, "destroy") == [None, None]


def test_abort_reaches_every_rank_with_its_reason_and_no_other_group(job, all_do, face):
    ranks = job.world(4, face)
    all_do(ranks, "new_group", "three", [0, 1, 2])
    all_do(ranks, "new_group", "four", [3, 2, 1, 0])
    all_do(ranks, "barrier", "world")
    ranks[0].tell("all_reduce", "three", 100_000)
    ranks[1].do("pend", "three", 100_000)
    ranks[1].tell("settle")
    ranks[2].do("abort", "three", "the loss is not a number")
    answers = [ranks[0].hear(), *ranks[1].hear()]
    for answer in answers:
        answer = answer if isinstance(answer, dict) else vars(answer)
        assert (answer["kind"], answer["peer"]) == ("GroupAbortedError", 2)
        assert "rank 2 aborted: the loss is not a number" in answer["text"]
    for answer in all_do(ranks[:3], "all_reduce", "three", 10):
        assert answer.kind == "GroupAbortedError"
    assert all_do(ranks, "all_reduce", "four", 10) == [4.0] * 4
    ranks[3].do("abort", "world", "enough")
    assert {answer.kind for answer in all_do(ranks, "all_reduce", "world", 10)} == {"GroupAbortedError"}
    assert all_do(ranks, "all_reduce", "four", 10) == [4.0] * 4


def test_rank_that_crashes_after_a_death_does_not_hide_it(job, face):
    ranks = job.world(4, face)
    ranks[3].do("die_at", 5)
    # Rank 3 gets its command first: once armed, it may die as soon as the others send.
    for told in reversed(ranks):
        told.tell("all_reduce_or_crash", 100_000, 50)
    for told in ranks[:3]:
        assert told.process.wait() == 1
        assert "PeerLostError" in told.process.output()
        assert "rank 3 was lost" in told.process.output()
