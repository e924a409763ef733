"""Process groups whose members the program changes: torch's ``_reconfigure``, from torch 2.14 on, and ``shrink_group``."""

import random
import time
from pathlib import Path

import pytest

from asyncdist.torch_backend.torch_group import HAS_PYTHON_BACKENDS

pytestmark = pytest.mark.processes
reconfigures = pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="torch before 2.14 does not reconfigure groups")
PROGRAM = Path(__file__).parent / "program_reconfigured.py"


@pytest.fixture(params=["shm", "tcp"])
def transport(request):
    return request.param


class Members:
    """Processes that obey commands: all of them, or some by their numbers."""

    def __init__(self, start):
        self.start = start
        self.processes, self.killed = [], []

    def add(self, number, *arguments, uuid=None):
        """Start processes that open a process group without members; with a ``uuid`` they make it that of all of them."""
        new = list(range(len(self.processes), len(self.processes) + number))
        self.processes += [self.start() for _ in new]
        assert self("open", *arguments, among=new) == [None] * number
        if uuid is not None:
            self.reconfigure(uuid, new)

    def meet(self, number, meeting):
        """Start processes that meet in the usual way."""
        self.processes = [self.start() for _ in range(number)]
        for rank in range(number):
            self.tell("open", rank, number, meeting, False, among=[rank])
        self.answers(range(number))

    def tell(self, command, *arguments, among):
        for each in among:
            self.processes[each].say((command, *arguments))

    def answers(self, among):
        """Return the results of commands; fail if one raised."""
        heard = [self.processes[each].hear() for each in among]
        assert all(outcome == "done" for outcome, _ in heard), heard
        return [answer for _, answer in heard]

    def failures(self, among, kind, *words, of=()):
        """Check that commands, or those that this tells, raise errors of this kind with these words."""
        if of:
            self.tell(*of, among=among)
        heard = [self.processes[each].hear() for each in among]
        assert all(kind in outcome and all(word in text for word in words) for outcome, text in heard), heard

    def __call__(self, command, *arguments, among):
        self.tell(command, *arguments, among=among)
        return self.answers(among)

    def reconfigure(self, uuid, among):
        """Exchange handles, and make the group of these members in this order."""
        handles = self("handle", among=among)
        ranks = self("reconfigure", uuid, handles, among=among)
        assert ranks == [(rank, len(among)) for rank in range(len(among))]

    def kill(self, number):
        self.killed.append(self.processes[number])
        self.killed[-1].kill()
        self.killed[-1].wait()

    def end(self):
        """End those that have not been killed."""
        left = [each for each in self.processes if each not in self.killed]
        for each in left:
            each.say(None)
        for each in left:
            assert each.wait() == 0, each.output()


@pytest.fixture
def settings(transport):
    """Variables of the members' environment."""
    return {"ASYNCDIST_TRANSPORT": transport}


@pytest.fixture
def members(nursery, settings):
    members = Members(lambda: nursery.start(PROGRAM, "serve", environment=settings))
    yield members
    members.end()


def sum_of(size):
    return size * (size + 1) / 2


# -- torch.distributed._reconfigure ----------------------------------------------------------------------


@reconfigures
def test_killed_member_is_replaced_by_a_process_that_was_never_in_a_world_with_the_others(members):
    members.add(3, uuid=1)
    assert members("total", among=[0, 1, 2]) == [6.0] * 3
    members.tell("total", among=[0, 2])
    members.kill(1)
    members.failures([0, 2], "PeerLostError", "rank 1 was lost")
    members.add(1)
    members.reconfigure(2, [2, 3, 0])
    assert members("total", among=[2, 3, 0]) == [6.0] * 3
    assert members("mean", among=[2, 3, 0]) == [1.0] * 3
    assert members("around", among=[2, 3, 0]) == [(2, 0, 3), (0, 1, 3), (1, 2, 3)]
    assert members("error", among=[2, 3, 0]) == ["SUCCESS"] * 3


@reconfigures
def test_survivors_keep_their_connections(members):
    members.add(4, uuid=1)
    (world,) = set(members("world", among=[0, 1, 2, 3]))
    members.tell("total", among=[0, 1, 3])
    members.kill(2)
    members.failures([0, 1, 3], "PeerLostError")
    members.reconfigure(2, [3, 0, 1])
    assert set(members("world", among=[0, 1, 3])) == {world}
    assert members("total", among=[0, 1, 3]) == [6.0] * 3
    # Ranks of further groups are those of the reconfigured group.
    assert members("part", "pair", [0, 2], among=[3, 0, 1]) == [True, False, True]
    assert members("total", "pair", among=[3, 1]) == [3.0] * 2


@reconfigures
@pytest.mark.parametrize("victim", [0, 2])
def test_death_of_a_member_that_the_others_wait_for_is_reported_at_once(members, victim):
    members.add(3)
    handles = members("handle", among=[0, 1, 2])
    others = [each for each in range(3) if each != victim]
    members.tell("reconfigure", 1, handles, 1e6, among=others)
    members.kill(victim)
    members.failures(others, "RendezvousError", f"rank {victim} ", "has ended")
    # torchft asks for it before the next attempt.
    assert members("error", among=others) == ["SUCCESS"] * 2
    # The group of the processes that are there.
    members.reconfigure(2, others)
    assert members("total", among=others) == [3.0] * 2


@reconfigures
@pytest.mark.parametrize("seed", range(3))
def test_members_killed_at_any_time_leave_the_group_to_all_survivors_or_to_none(members, seed):
    chance = random.Random(seed)
    members.add(4)
    present = [0, 1, 2, 3]
    members.reconfigure(1, present)
    for turn in range(2):
        # In the first turn all are connected, in the second one is new.
        handles = members("handle", among=present)
        members.tell("reconfigure", 10 * turn + 2, handles, among=present)
        victim = chance.choice(present)
        present.remove(victim)
        # Any time during the call.
        time.sleep(chance.uniform(0, 0.2))
        members.kill(victim)
        outcomes = [members.processes[each].hear() for each in present]
        assert len({outcome == "done" for outcome, _ in outcomes}) == 1, outcomes
        members.add(1)
        present.insert(chance.randrange(4), len(members.processes) - 1)
        members.reconfigure(10 * turn + 3, present)
        assert members("total", among=present) == [10.0] * 4


@reconfigures
def test_member_that_is_killed_among_connected_members_fails_all_of_them(members):
    members.add(3, uuid=1)
    handles = members("handle", among=[0, 1, 2])
    members.kill(2)
    members.failures(
        [0, 1], "RendezvousError", "rank 2", "was lost before the group was complete", of=("reconfigure", 2, handles)
    )
    # They dial each other again, and the group before has not changed.
    assert members("rank", among=[0, 1]) == [(0, 3), (1, 3)]
    members.reconfigure(3, [0, 1])
    assert members("total", among=[0, 1]) == [3.0] * 2


@reconfigures
def test_stopped_member_joins_again_when_it_continues(members, settings):
    settings["ASYNCDIST_HEARTBEAT"] = "0.5"
    members.add(3, uuid=1)
    members.processes[1].stop()
    members.failures([0, 2], "PeerLostError", "no heartbeat", of=("total",))
    members.reconfigure(2, [0, 2])
    members.processes[1].resume()
    members.reconfigure(3, [0, 1, 2])
    assert members("total", among=[0, 1, 2]) == [6.0] * 3


@reconfigures
def test_excluded_member_gets_an_error_and_goes_on_with_others(members):
    members.add(4, uuid=1)
    assert members("start", "all_reduce", among=[2, 3]) == [1, 1]
    handles = members("handle", among=[0, 1])
    members("reconfigure", 2, handles, among=[0, 1])
    members.failures([2, 3], "GroupAbortedError", "goes on in another group", of=("wait",))
    members.reconfigure(3, [3, 2])
    assert members("total", among=[0, 1, 2, 3]) == [3.0] * 4
    # All of them meet again.
    members.reconfigure(4, [3, 0, 2, 1])
    assert members("total", among=[0, 1, 2, 3]) == [10.0] * 4


@reconfigures
def test_group_is_reconfigured_after_an_abort(members):
    members.add(2, uuid=1)
    assert members("start", "all_reduce", among=[0]) == [1]
    # The hook is called by both aborts.
    for hooks, error in members("abort", among=[0, 1]):
        assert (hooks[:1], error) == (["called"], "SUCCESS")
    members.failures([0], "GroupAbortedError", of=("wait",))
    members.reconfigure(2, [0, 1])
    assert members("total", among=[0, 1]) == [3.0] * 2
    assert members("timeout", among=[0, 1]) == [60.0] * 2


@reconfigures
def test_set_of_handles_assigns_the_same_ranks_on_all_members(members):
    members.add(3)
    handles = set(members("handle", among=[0, 1, 2]))
    ranks = members("reconfigure", 1, handles, among=[0, 1, 2])
    assert sorted(ranks) == [(0, 3), (1, 3), (2, 3)]
    assert members("total", among=[0, 1, 2]) == [6.0] * 3
    handles = members("handle", among=[1, 0])
    assert members("reconfigure and await", 2, handles, among=[0, 1]) == [2.0] * 2


@reconfigures
def test_group_that_met_as_usual_is_reconfigured_with_a_newcomer(members, tmp_path):
    members.meet(2, f"file://{tmp_path}/meeting")
    assert members("supports", among=[0, 1]) == [True] * 2
    assert members("total", among=[0, 1]) == [3.0] * 2
    members.add(1, 0, 1, f"file://{tmp_path}/other")
    members.reconfigure(1, [2, 1, 0])
    assert members("total", among=[0, 1, 2]) == [6.0] * 3


@reconfigures
def test_mistakes_are_refused_and_change_nothing(members):
    members.add(2)
    for command in ("total", "world"):
        members.failures(
            [0], "NotInitializedError", "call torch.distributed._reconfigure() on every member", of=(command,)
        )
    assert members("rank", among=[0]) == [(0, 1)]
    mine, other = members("handle", among=[0, 1])
    mistakes = [
        (1, ["gloo:0:1:2:"], "is not a handle of asyncdist"),
        (1, [], "none of the 0 handles is of this process"),
        (1, [other], "none of the 1 handles is of this process"),
        (1, [mine, mine], "two of the handles are of one process"),
    ]
    for uuid, handles, message in mistakes:
        members.failures([0], "UsageError", message, of=("reconfigure", uuid, handles))
    members.reconfigure(1, [0])
    members.failures([0], "UsageError", "the uuid 1 was already used by this process", of=("reconfigure", 1, [mine]))
    alone = members("handle", among=[0])
    members.reconfigure(2, [0, 1])
    members.failures([0], "UsageError", "exchange the handles again", of=("reconfigure", 3, alone))
    assert members("total", among=[0, 1]) == [3.0] * 2


@reconfigures
def test_member_that_does_not_call_is_named_after_the_timeout(members):
    members.add(2)
    handles = members("handle", among=[0, 1])
    members.failures([0], "RendezvousTimeoutError", "missing 1", of=("reconfigure", 1, handles, 0.5))
    members.reconfigure(2, [0, 1])
    handles = members("handle", among=[0, 1])
    members.failures([1], "OperationTimeoutError", "rank", of=("reconfigure", 3, handles, 0.5))


# -- torch.distributed.shrink_group ----------------------------------------------------------------------


@pytest.fixture
def world(members, tmp_path):
    """Four members that have met in the usual way."""
    members.meet(4, f"file://{tmp_path}/meeting")
    return members


def test_default_group_shrinks_to_the_survivors_on_their_connections(world):
    (before,) = set(world("world", among=[0, 1, 2, 3]))
    world.tell("total", among=[0, 2, 3])
    world.kill(1)
    world.failures([0, 2, 3], "PeerLostError")
    shrunk = world("shrink", [1], among=[0, 2, 3])
    assert shrunk == [("ProcessGroup", rank, 3, True) for rank in range(3)]
    assert set(world("world", among=[0, 2, 3])) == {before}
    assert world("total", among=[0, 2, 3]) == [6.0] * 3
    assert world("mean", among=[0, 2, 3]) == [1.0] * 3
    assert world("part", "pair", [0, 2], among=[0, 2, 3]) == [True, False, True]
    assert world("total", "pair", among=[0, 3]) == [3.0] * 2
    # A second time, and to one rank.
    assert world("shrink", [0, 1], among=[3]) == [("ProcessGroup", 0, 1, True)]
    assert world("total", among=[3]) == [1.0]


@pytest.mark.exhaustive
def test_living_rank_is_excluded_and_pending_operations_are_aborted(world):
    assert world("start", "all_reduce", among=[0, 1, 2]) == [1] * 3
    assert world("shrink", [2, 3], 1, among=[0, 1]) == [("ProcessGroup", rank, 2, True) for rank in range(2)]
    world.failures([0, 1, 2], "GroupAbortedError", "SHRINK_ABORT", of=("wait",))
    assert world("total", among=[0, 1]) == [3.0] * 2


@pytest.mark.exhaustive
def test_subgroup_shrinks_and_the_default_group_stays(world):
    assert world("part", "most", [0, 1, 3], among=[0, 1, 2, 3]) == [True, True, False, True]
    assert world("shrink", [1], 0, "most", among=[0, 3]) == [("ProcessGroup", rank, 2, False) for rank in range(2)]
    assert world("total", "most", among=[0, 3]) == [3.0] * 2
    assert world("total", among=[0, 1, 2, 3]) == [10.0] * 4


@pytest.mark.exhaustive
def test_lost_rank_that_is_not_excluded_is_named_on_all_others(world):
    world.kill(3)
    world.failures([0, 2], "RendezvousError", "rank 2 (3) was lost", of=("shrink", [1]))
    assert world("shrink", [1, 3], among=[0, 2]) == [("ProcessGroup", rank, 2, True) for rank in range(2)]
    assert world("total", among=[0, 2]) == [3.0] * 2
