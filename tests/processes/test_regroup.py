"""Survivors of killed ranks agree on who is left, and go on in a new group over the connections that they have."""

import pytest

from benchmarks.processes import RankEndedError

pytestmark = pytest.mark.processes


def outcome(told):
    """Return the answer of a rank; None if it was killed."""
    try:
        return told.hear()
    except RankEndedError:
        assert told.process.wait() == -9
        return None


@pytest.mark.parametrize("dead", [(1,), (0, 1, 3), pytest.param((0,), marks=pytest.mark.exhaustive)], ids=str)
def test_survivors_of_kills_regroup_and_go_on(job, all_do, face, dead):
    """On one host any number of survivors goes on, because they see that the processes of the others have ended."""
    ranks = job.world(4, face)
    all_do(ranks, "all_reduce", None, 10)
    survivors = [told for number, told in enumerate(ranks) if number not in dead]
    ids = tuple(number for number in range(4) if number not in dead)
    for number in dead:
        ranks[number].process.kill()
    assert {answer.kind for answer in all_do(survivors, "all_reduce", None, 10)} == {"PeerLostError"}
    assert all_do(survivors, "regroup") == [(rank, ids, 1) for rank in range(len(ids))]
    for count in (10, 1_000_000):
        assert all_do(survivors, "all_reduce", None, count) == [float(len(ids))] * len(ids)
    assert [told.do("describe_world") for told in survivors] == [
        f"rank {rank} of {len(ids)}" for rank in range(len(ids))
    ]


_MOMENTS = [0, 3, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in (1, 2, 4, 5, 6))]


@pytest.mark.parametrize("doomed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("moment", _MOMENTS)
def test_second_death_in_the_middle_of_the_agreement_is_absorbed(job, all_do, face, doomed, moment):
    ranks = job.world(4, face)
    all_do(ranks, "all_reduce", None, 10)
    ranks[doomed].do("die_in_agreement", moment)
    ranks[3].process.kill()
    for told in ranks[:3]:
        told.tell("survive", 1000)
    answers = [outcome(told) for told in ranks[:3]]
    ids = tuple(number for number in range(3) if answers[number] is not None)
    assert len(ids) >= 2
    assert [answer for answer in answers if answer is not None] == [(ids, float(len(ids)))] * len(ids)


@pytest.mark.parametrize("doomed", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("moment", _MOMENTS)
def test_death_in_the_middle_of_agree_leaves_one_answer(job, all_do, face, doomed, moment):
    ranks = job.world(4, face)
    all_do(ranks, "all_reduce", None, 10)
    ranks[doomed].do("die_in_agreement", moment)
    for told in ranks:
        told.tell("agree", True)
    answers = [outcome(told) for told in ranks]
    survivors = [told for told, answer in zip(ranks, answers, strict=True) if answer is not None]
    agreed = {answer for answer in answers if answer is not None}
    assert agreed in ({(True, ())}, {(True, (doomed,))})
    if len(survivors) == 4:
        survivors.remove(ranks[doomed])
        ranks[doomed].process.kill()
    assert all_do(survivors, "agree", False) == [(False, (doomed,))] * 3
    assert all_do(survivors, "regroup")[0][1:] == (tuple(number for number in range(4) if number != doomed), 1)


_RELAYS = [
    {4: 0},  # a relay of two blocks, before it sends anything
    {4: 1},
    {2: 1},
    {0: 2},  # the coordinator
    {0: 4},
    {0: 0, 1: 1},
    {0: 3, 4: 1},  # the coordinator and a relay
]


@pytest.mark.parametrize("doomed", _RELAYS, ids=str)
def test_death_of_relays_and_coordinators_in_the_middle_of_a_regroup_is_absorbed(job, all_do, face, doomed):
    """Of eight members in blocks of two, members 0, 2, 4 and 6 pass on what the others say, and 0 and 4 what these say."""
    # A busy machine must not make a living rank silent; the ends of connections tell of the others.
    ranks = job.world(8, face, ASYNCDIST_HEARTBEAT="60")
    all_do(ranks, "pass_on_messages_in_blocks_of", 2)
    all_do(ranks, "all_reduce", None, 10)
    for number, moment in doomed.items():
        ranks[number].do("die_in_agreement", moment)
    ranks[5].process.kill()
    alive = ranks[:5] + ranks[6:]
    for told in alive:
        told.tell("survive", 1000)
    answers = {ranks.index(told): outcome(told) for told in alive}
    ids = tuple(number for number, answer in answers.items() if answer is not None)
    assert set(range(8)) - set(ids) == {5, *doomed}
    assert [answers[number] for number in ids] == [(ids, float(len(ids)))] * len(ids)


@pytest.mark.exhaustive
@pytest.mark.parametrize("silent", [(4,), (0, 4)], ids=str)
def test_stopped_relays_and_coordinators_are_left_out(job, all_do, face, silent):
    ranks = job.world(8, face, ASYNCDIST_HEARTBEAT="0.5")
    all_do(ranks, "pass_on_messages_in_blocks_of", 2)
    all_do(ranks, "all_reduce", None, 10)
    for number in silent:
        ranks[number].process.stop()
    going = [number for number in range(8) if number not in silent]
    answers = all_do([ranks[number] for number in going], "survive", 1000)
    assert answers == [(tuple(going), float(len(going)))] * len(going)


def test_agreement_names_only_the_late_member_although_it_is_a_relay(job, all_do, face):
    ranks = job.world(6, face)
    all_do(ranks, "pass_on_messages_in_blocks_of", 2)
    others = [told for number, told in enumerate(ranks) if number != 2]
    answers = all_do(others, "agree", True, 2.0)
    assert {answer.kind for answer in answers} <= {"OperationTimeoutError", "NoQuorumError"}
    assert answers[0].peers == (2,)


def test_memory_of_dead_ranks_is_unmapped_after_regrouping(job, all_do, until, face):
    if job.transport != "shm":
        pytest.skip("maps no memory of peers")
    ranks = job.world(4, face)
    all_do(ranks, "all_reduce", None, 1_000_000)
    assert all_do(ranks, "mapped_segments") == [4] * 4
    for number in (1, 3):
        ranks[number].process.kill()
    survivors = [ranks[0], ranks[2]]
    all_do(survivors, "survive", 1_000_000)
    until(lambda: all_do(survivors, "mapped_segments") == [2] * 2)
    assert all_do(survivors, "all_reduce", None, 1_000_000) == [2.0] * 2


@pytest.mark.exhaustive
def test_stopped_rank_is_left_out_and_does_not_go_on_alone_when_it_continues(job, all_do, face):
    ranks = job.world(4, face, ASYNCDIST_HEARTBEAT="0.5")
    all_do(ranks, "all_reduce", None, 10)
    stopped, others = ranks[2], [ranks[0], ranks[1], ranks[3]]
    stopped.process.stop()
    assert all_do(others, "survive", 1000) == [((0, 1, 3), 3.0)] * 3
    stopped.process.resume()
    stopped.tell("regroup", 1, 20.0)
    assert stopped.hear().kind in ("NoQuorumError", "ExcludedError")
    assert all_do(others, "all_reduce", None, 10) == [3.0] * 3
