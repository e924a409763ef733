"""The judge of random worlds finds what must not happen, and the plans follow from their seeds."""

import math

import pytest

from tests.chaos.judge import MEETING, PATIENCE, Judge, ViolationError
from tests.chaos.plan import HARMLESS, HEARTBEAT, Fault, WorldPlan, operations_of, plan_of


def judged(size=3, *, joins=False, hosts=None, network="shm"):
    """Return a judge, and the processes of a world that has begun at time 0."""
    judge = Judge(WorldPlan(1, network, joins, ("blocking",) * size, hosts or (0,) * size, ()))
    witnesses = [judge.add(slot, f"process {slot}", 0.0) for slot in range(size)]
    members = size if joins else tuple(range(size))
    for slot, witness in enumerate(witnesses):
        judge.hear(witness, ("entered", 0, slot, members, slot, ("world", slot)), 0.0)
    return judge, witnesses


def lost(peer, text="rank was lost (no heartbeat for 1.0 s)"):
    return "failed", "PeerLostError", peer, text


def test_plan_and_operations_follow_from_the_seed():
    for seed in range(300):
        plan = plan_of(seed)
        assert plan == plan_of(seed)
        assert 2 <= plan.size <= 8
        assert all(0 <= victim < plan.size for fault in plan.faults for victim in fault.victims)
        assert operations_of(seed, 1, 2, plan.size) == operations_of(seed, 1, 2, plan.size)
    assert len({plan_of(seed) for seed in range(300)}) == 300


def test_round_that_only_some_have_committed_is_found():
    judge, (first, second, third) = judged()
    judge.hear(first, ("rounds", [(0, 0, True, 0.0), (0, 1, True, 0.0)]), 1.0)
    judge.hear(third, ("rounds", [(0, 0, True, 0.0), (0, 1, None, 0.0)]), 1.0)
    with pytest.raises(ViolationError, match="round 1 of generation 0 is committed on process 0 and not on process 1"):
        judge.hear(second, ("rounds", [(0, 0, True, 0.0), (0, 1, False, 0.0)]), 1.0)


def test_answer_that_died_with_its_process_does_not_count():
    judge, (first, second, _) = judged()
    judge.hear(first, ("rounds", [(0, 0, True, 0.0)]), 1.0)
    judge.killed(first)
    judge.hear(second, ("rounds", [(0, 0, False, 0.0)]), 1.0)


def test_answers_of_a_process_that_has_left_do_not_count():
    """A member that was stopped while the others went on and ended goes on alone."""
    judge, (first, second, _) = judged()
    judge.hear(first, ("entered", 1, 0, (0, 2), 0, ("world", 0)), 1.0)
    judge.hear(first, ("ended",), 1.0)
    judge.hear(second, ("entered", 1, 0, (1,), 1, ("world", 1)), 1.0)


def test_two_parts_that_go_on_are_found():
    judge, (first, second, _) = judged()
    judge.hear(first, ("entered", 1, 0, (0, 2), 0, ("world", 0)), 1.0)
    with pytest.raises(ViolationError, match="generation 1 has two parts"):
        judge.hear(second, ("entered", 1, 0, (1,), 1, ("world", 1)), 1.0)


def test_loss_of_a_rank_that_no_fault_has_touched_is_found():
    judge, (first, _, _) = judged()
    judge.hear(first, lost(1, "it has destroyed its process group"), 1.0)
    judge.check_accusations(math.inf, starved=False)
    judge.hear(first, lost(1), 1.0)
    judge.check_accusations(1.0 + PATIENCE, starved=False)
    with pytest.raises(ViolationError, match="process 0 blames process 1"):
        judge.check_accusations(1.1 + PATIENCE, starved=False)


@pytest.mark.parametrize("kind", ["stop", "cut", *HARMLESS])
def test_victim_of_a_fault_may_be_lost_for_some_time_unless_the_fault_is_harmless(kind):
    judge, (first, *_) = judged()
    judge.harm(Fault(0.0, kind, (1, 2), 1.0), 0.0)
    if kind not in HARMLESS:
        judge.hear(first, lost(1), 1.0 + HEARTBEAT)
        judge.check_accusations(math.inf, starved=False)
    judge.hear(first, lost(1), 1.0 + 5.0 * HEARTBEAT)
    with pytest.raises(ViolationError, match="blames"):
        judge.check_accusations(math.inf, starved=False)


@pytest.mark.parametrize("kind", ["OperationTimeoutError", "MismatchError"])
def test_errors_that_no_fault_explains_are_found(kind):
    judge, (first, *_) = judged()
    with pytest.raises(ViolationError, match=kind):
        judge.hear(first, ("failed", kind, None, "all_reduce"), 1.0)


@pytest.mark.parametrize("joins", [False, True])
def test_process_without_progress_is_found_unless_it_is_stopped(joins):
    judge, (first, second, third) = judged(joins=joins)
    limit = PATIENCE + (MEETING if joins else 0.0)
    for one in (first, second):
        judge.hear(one, ("rounds", []), 1.0)
    judge.stop(third)
    judge.check_progress(limit)
    judge.resume(third, limit)
    judge.check_progress(limit + 1.0)
    judge.hear(first, ("rounds", []), limit + 1.0)
    with pytest.raises(ViolationError, match="process 1 hangs"):
        judge.check_progress(limit + 1.1)


def test_founder_that_is_lost_on_a_machine_without_processors_for_it_need_not_go_on():
    judge, (first, second, _) = judged()
    judge.hear(first, lost(1), 1.0)
    judge.check_accusations(1.1, starved=True)
    judge.check_accusations(math.inf, starved=False)
    judge.hear(second, ("out", "ExcludedError", "the others go on"), 1.0)
    judge.check_survivors(starved=True)
    with pytest.raises(ViolationError, match="process 1 has not gone on"):
        judge.check_survivors()


def test_untouched_founder_that_does_not_go_on_is_found():
    judge, (first, second, third) = judged()
    judge.harm(Fault(0.0, "kill", (0,)), 0.0)
    judge.killed(first)
    judge.check_survivors()
    judge.hear(second, ("out", "NoQuorumError", "too few"), 1.0)
    with pytest.raises(ViolationError, match="process 1 has not gone on"):
        judge.check_survivors()
    assert third.state == "member"


def test_half_without_the_first_rank_need_not_go_on_if_the_others_may_live():
    judge, (first, second) = judged(2)
    judge.harm(Fault(0.0, "stop", (0,), 2.0), 0.0)
    judge.hear(second, ("out", "NoQuorumError", "too few"), 1.0)
    judge.check_survivors()
    judge.hear(first, ("out", "NoQuorumError", "too few"), 1.0)
    judge.check_survivors()


def test_separation_after_which_nobody_goes_on_is_found():
    judge, witnesses = judged(3, hosts=(0, 1, 1), network="hosts")
    judge.harm(Fault(0.0, "unplug", (0,), 2.0), 0.0)
    judge.hear(witnesses[0], ("out", "NoQuorumError", "too few"), 1.0)
    judge.check_survivors()
    judge.hear(witnesses[1], ("out", "NoQuorumError", "too few"), 1.0)
    with pytest.raises(ViolationError, match="fewer than half"):
        judge.check_survivors()


def test_what_a_process_has_seen_itself_is_passed_on():
    judge, (first, *_) = judged()
    with pytest.raises(ViolationError, match="process 0 has seen a wrong result"):
        judge.hear(first, ("violation", "a wrong result"), 1.0)


def test_members_of_a_job_have_settled_once_all_are_in_one_generation():
    judge, witnesses = judged(joins=True)
    judge.settle()
    newcomer = judge.add(3, "process 3", 1.0)
    for one in witnesses:
        judge.hear(one, ("rounds", [(0, number, True, 0.0) for number in range(3)]), 1.0)
    assert not judge.has_settled
    for slot, one in enumerate([*witnesses, newcomer]):
        judge.hear(one, ("entered", 1, slot, 4, slot, ("next", slot)), 2.0)
        judge.hear(one, ("rounds", [(1, number, True, 0.0) for number in range(3)]), 2.0)
        one.pid = 100 + slot
        judge.hear(one, ("called", [100, 101, 102, 103], 0), 2.0)
        judge.hear(one, ("read", 100_001), 2.0)
    assert judge.has_settled


@pytest.mark.parametrize("missing", [("called", [100, 102], 1), ("read", 100_001)], ids=["a call", "a version"])
def test_members_of_a_job_have_not_settled_without_calls_and_versions(missing):
    judge, witnesses = judged(joins=True)
    judge.settle()
    for slot, one in enumerate(witnesses):
        one.pid = 100 + slot
        judge.hear(one, ("entered", 1, slot, 3, slot, ("next", slot)), 2.0)
        judge.hear(one, ("rounds", [(1, number, True, 0.0) for number in range(3)]), 2.0)
        for report in (("called", [100, 101, 102], 0), ("read", 100_001)):
            if slot != 1 or report[0] != missing[0]:
                judge.hear(one, report, 2.0)
    judge.hear(witnesses[1], missing if missing[0] == "called" else ("called", [100, 101, 102], 0), 2.0)
    assert not judge.has_settled
    judge.hear(witnesses[1], ("called", [101], 0), 2.0)
    judge.hear(witnesses[1], ("read", 100_002), 2.0)
    assert judge.has_settled


def test_job_that_nobody_continues_after_one_rank_was_stopped_is_found():
    judge, witnesses = judged(3)
    judge.harm(Fault(0.0, "stop", (0,), 2.0), 0.0)
    for one in witnesses[:2]:
        judge.hear(one, ("out", "ExcludedError", "it is lost"), 1.0)
    judge.check_survivors()
    judge.hear(witnesses[2], ("out", "NoQuorumError", "too few"), 1.0)
    with pytest.raises(ViolationError, match="nobody has gone on"):
        judge.check_survivors()


def test_part_that_goes_on_after_another_one_has_committed_is_found():
    judge, (first, second, newcomer) = judged(joins=True)
    for one in (first, second):
        judge.hear(one, ("rounds", [(0, 0, True, 1.0), (0, 1, True, 2.0)]), 2.0)
    judge.hear(newcomer, ("entered", 1, 0, 1, 7, ("next", 0)), 2.5)
    judge.hear(newcomer, ("rounds", [(1, 0, True, 3.0)]), 3.0)
    # It was stopped after its step.
    judge.hear(first, ("rounds", [(0, 2, True, 3.5)]), 3.5)
    with pytest.raises(ViolationError, match="process 0 has committed two rounds of generation 0"):
        judge.hear(first, ("rounds", [(0, 3, True, 3.6)]), 3.6)


def test_commit_of_a_newer_generation_that_is_heard_late_counts():
    judge, (first, _, newcomer) = judged(joins=True)
    judge.hear(first, ("rounds", [(0, 0, True, 3.5), (0, 1, True, 3.6)]), 4.0)
    judge.hear(newcomer, ("entered", 1, 0, 1, 7, ("next", 0)), 4.0)
    with pytest.raises(ViolationError, match="two parts commit"):
        judge.hear(newcomer, ("rounds", [(1, 0, True, 3.0)]), 4.0)
