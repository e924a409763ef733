"""The simulator detects each violation of the rules. Otherwise the tests of the schedules would prove nothing."""

from collections.abc import Callable

import numpy as np
import pytest

from asyncdist.kernel.algorithms.cost import Cost
from asyncdist.kernel.algorithms.schedule import Action, Combine, Recv, Reduce, Schedule, Send
from tests.support.simulator import (
    ArrayBlocks,
    DeadlockError,
    ScheduleError,
    SizeMismatchError,
    UnsafeStepError,
    adversary,
    lock_step,
)


def steps(*given: Action | tuple[Action, ...]) -> Schedule:
    for step in given:
        yield step if type(step) is tuple else (step,)  # type: ignore[misc]


def run_adversary(schedules: list[Schedule]) -> None:
    adversary(schedules, seed=1)


either = pytest.mark.parametrize("run", [lock_step, run_adversary])


@either
def test_schedule_sends_reduces_and_completes(run: Callable[[list[Schedule]], object]) -> None:
    here, there, spare = np.array([1, 2]), np.array([10, 20]), np.array([0, 0])
    run([
        steps(Send(1, here), (Recv(1, spare),), Combine(spare, here, swapped=False)),
        steps(Reduce(0, there), Send(0, there)),
    ])  # fmt: skip
    assert there.tolist() == [11, 22]
    assert spare.tolist() == [12, 24]


def test_counts_the_busiest_rank_of_each_round() -> None:
    data = [np.zeros(4, np.uint8), np.zeros(4, np.uint8), np.zeros(4, np.uint8)]
    trace = lock_step([
        steps((Send(1, data[0][:1]), Send(2, data[0][1:4])), Reduce(1, data[0])),
        steps(Recv(0, data[1][:1]), Send(0, data[1])),
        steps(Recv(0, data[2][:3])),
    ])  # fmt: skip
    assert trace.cost == Cost(rounds=2, messages=3, nbytes=8, reduced=4)
    assert trace.sent_messages == [2, 1, 0]
    assert trace.sent_nbytes == [4, 4, 0]


def test_ports_limit_messages_per_round() -> None:
    places = [np.zeros(1) for _ in range(6)]

    def star() -> list[Schedule]:
        root = steps(tuple(Send(peer, places[0]) for peer in range(1, 6)))
        return [root, *(steps(Recv(0, places[rank])) for rank in range(1, 6))]

    assert lock_step(star()).cost.rounds == 1
    assert lock_step(star(), ports=1).cost.rounds == 5
    assert lock_step(star(), ports=2).cost.rounds == 3


@either
def test_deadlock_error_names_waiting_ranks(run: Callable[[list[Schedule]], object]) -> None:
    place = [np.zeros(2, np.uint8) for _ in range(3)]
    with pytest.raises(DeadlockError) as caught:
        run([steps(Recv(1, place[0])), steps(Recv(2, place[1]), Send(0, place[1])), steps(Recv(0, place[2]))])
    assert caught.value.waiting == {0: [1], 1: [2], 2: [0]}
    assert "rank 1, step 1: receive 2 bytes from rank 2" in str(caught.value)


def test_schedule_that_needs_buffering_deadlocks_in_lock_step() -> None:
    def head_on() -> list[Schedule]:
        ours, theirs, more, yet_more = (np.zeros(1) for _ in range(4))
        return [steps(Send(1, ours), Recv(1, theirs)), steps(Send(0, more), Recv(0, yet_more))]

    adversary(head_on(), seed=0)
    with pytest.raises(DeadlockError):
        lock_step(head_on())


@either
def test_sizes_must_agree(run: Callable[[list[Schedule]], object]) -> None:
    with pytest.raises(SizeMismatchError, match=r"rank 1, step 1: receive 3 bytes from rank 0, but 2 bytes came"):
        run([steps(Send(1, np.zeros(2, np.uint8))), steps(Recv(0, np.zeros(3, np.uint8)))])


@either
def test_unreceived_message_is_an_error(run: Callable[[list[Schedule]], object]) -> None:
    with pytest.raises(ScheduleError):
        run([steps(Send(1, np.zeros(2))), steps()])


MEMORY = np.zeros(8)
OVERLAPS: dict[str, tuple[Action, ...]] = {
    "send and receive": (Send(1, MEMORY[:5]), Recv(1, MEMORY[4:])),
    "two receives": (Recv(1, MEMORY[:5]), Recv(1, MEMORY[4:])),
    "send and reduce": (Reduce(1, MEMORY[2:3]), Send(1, MEMORY)),
    "combine with itself": (Combine(MEMORY, MEMORY, swapped=False),),
    "combine what is being received": (Recv(1, MEMORY[:2]), Combine(MEMORY[4:6], MEMORY[1:3], swapped=True)),
}


@pytest.mark.parametrize("step", OVERLAPS.values(), ids=OVERLAPS.keys())
def test_places_of_a_step_must_not_overlap(step: tuple[Action, ...]) -> None:
    with pytest.raises(UnsafeStepError, match="overlaps the memory"):
        lock_step([steps(step), steps()])


def test_schedules_of_one_rank_must_not_overlap_either() -> None:
    with pytest.raises(UnsafeStepError):
        lock_step([[steps(Recv(1, MEMORY[:5])), steps(Recv(1, MEMORY[4:]))], steps()])


def test_sends_may_share_memory_and_adjacent_places_are_allowed() -> None:
    spare = np.zeros(16)
    lock_step([
        steps((Send(1, MEMORY[:4]), Send(1, MEMORY[:4]), Recv(1, MEMORY[4:]))),
        steps((Recv(0, spare[:4]), Recv(0, spare[4:8]), Send(0, spare[8:12]))),
    ])  # fmt: skip


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_peer_must_be_another_rank_of_the_world(peer: int) -> None:
    with pytest.raises(UnsafeStepError, match="not a peer among 2 ranks"):
        lock_step([steps(Send(peer, MEMORY)), steps()])


@either
def test_step_may_repeat_an_action(run: Callable[[list[Schedule]], object]) -> None:
    twice, spare = (Send(1, np.ones(1)),) * 2, np.zeros(2)
    run([steps(twice), steps(Recv(0, spare[:1]), Recv(0, spare[1:]))])
    assert spare.tolist() == [1, 1]


def test_empty_step_is_refused() -> None:
    with pytest.raises(UnsafeStepError, match="step 1 is empty"):
        lock_step([steps(())])


def test_adversary_overwrites_posted_receive_memory() -> None:
    """A schedule that reads this memory without an action, which the rules cannot detect, gets a wrong result."""

    def read(seed: int) -> float:
        incoming, found = np.zeros(1), np.zeros(1)

        def peek() -> Schedule:
            yield (Send(1, np.zeros(1)),)
            found[...] = incoming

        adversary(
            [[steps(Recv(1, incoming)), peek()], [steps(Send(0, np.zeros(1))), steps(Recv(0, np.zeros(1)))]], seed=seed
        )
        assert incoming == 0
        return float(found[0])

    assert any(read(seed) != 0 for seed in range(20))


def test_adversary_reduces_in_either_order() -> None:
    def folded(seed: int) -> int:
        place = np.array([1])
        adversary([steps(Reduce(1, place)), steps(Send(0, np.array([2])))], seed=seed, fold=lambda first, second: first)
        return int(place[0])

    assert {folded(seed) for seed in range(20)} == {1, 2}


def test_order_of_the_adversary_depends_only_on_its_seed() -> None:
    def order(seed: int) -> list[int]:
        finished: list[int] = []

        def exchange(rank: int) -> Schedule:
            peer = (rank + 1) % 8
            yield Send(peer, np.zeros(1)), Recv((rank - 1) % 8, np.zeros(1))
            finished.append(rank)

        adversary([exchange(rank) for rank in range(8)], seed=seed)
        return finished

    assert order(3) == order(3)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_blocks_and_slices_of_blocks_are_views() -> None:
    array = np.arange(7)
    blocks = ArrayBlocks(array, 3)
    assert [blocks[i].tolist() for i in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert blocks[1:3].tolist() == [2, 3, 4, 5, 6]
    blocks[0][...] = 9
    assert array[:2].tolist() == [9, 9]
    assert ArrayBlocks(array, 2, bounds=[0, 0, 7])[0].size == 0
    with pytest.raises(ValueError, match="2 blocks have 3 bounds"):
        ArrayBlocks(array, 2, bounds=[0, 7])
    for which in (3, -1, slice(2, 4)):
        with pytest.raises(IndexError):
            blocks[which]
