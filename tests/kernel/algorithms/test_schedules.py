"""Every schedule, in lock step and against the adversary: right results, equal bits, and the promised cost."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdist.kernel.algorithms import pairwise, recursive_doubling, ring, tree
from asyncdist.kernel.algorithms.cost import Cost
from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.algorithms.selection import DEFAULT, candidates
from tests.support.simulator import Array, ArrayBlocks, adversary, lock_step

SIZES = range(1, 17)


def counts(size: int) -> list[int]:
    """Elements around the splits."""
    return sorted({0, 1, size - 1, size, size + 1, 2 * size + 1, 37, 16 * size})


def mixed(first: Array, second: Array) -> Array:
    """Combine without commuting or associating: equal results mean the same order of operands and operations."""
    return np.uint64(31) * first + np.uint64(7) * second


@dataclass
class Trial:
    """The schedules of one collective, its results, the expected results, and its cost for a number of elements."""

    schedules: list[Schedule]
    results: list[Array]
    expected: list[Array]
    cost: Callable[[int], Cost]
    # The cost is exact if the number of blocks divides the number of elements.
    blocks: int = 1
    untouched: list[tuple[Array, Array]] = field(default_factory=list)


Maker = Callable[[list[Array], int], Trial]


def total(inputs: list[Array]) -> Array:
    return np.add.reduce(inputs)


def priced(schedule: str, inputs: list[Array]) -> Callable[[int], Cost]:
    """Return the cost, by the number of elements, of the candidate ``collective.name``."""
    collective, name = schedule.split(".")
    (cost,) = (each.cost for each in candidates(collective) if each.name == name)
    return lambda count: cost(len(inputs), count * inputs[0].itemsize, DEFAULT)


def reducing(
    schedule: Callable[[int, int, Array], Schedule],
    cost: str,
    blocks: Callable[[int], int] = lambda size: 1,
) -> Callable[[list[Array], int], Trial]:
    """All-reduce in place."""

    def make(inputs: list[Array], root: int) -> Trial:
        size, data = len(inputs), [each.copy() for each in inputs]
        schedules = [schedule(rank, size, data[rank]) for rank in range(size)]
        return Trial(schedules, data, [total(inputs)] * size, priced(cost, inputs), blocks(size))

    return make


def ring_all_reduce(rank: int, size: int, data: Array) -> Schedule:
    return ring.all_reduce(rank, size, ArrayBlocks(data, size))


def doubling_all_reduce(rank: int, size: int, data: Array) -> Schedule:
    return recursive_doubling.all_reduce(rank, size, data, np.zeros_like(data))


def halving_all_reduce(rank: int, size: int, data: Array) -> Schedule:
    blocks = ArrayBlocks(data, recursive_doubling.floor_power_of_two(size))
    return recursive_doubling.halving_all_reduce(rank, size, blocks)


def ring_reduce_scatter(inputs: list[Array], root: int) -> Trial:
    size, data = len(inputs), [each.copy() for each in inputs]
    blocks = [ArrayBlocks(each, size) for each in data]
    whole = ArrayBlocks(total(inputs), size)
    return Trial(
        [ring.reduce_scatter(rank, size, blocks[rank]) for rank in range(size)],
        [blocks[rank][rank] for rank in range(size)],
        [whole[rank] for rank in range(size)],
        priced("reduce_scatter.pairwise", inputs),
        size,
    )


def pairwise_reduce_scatter(inputs: list[Array], root: int) -> Trial:
    size, data = len(inputs), [each.copy() for each in inputs]
    blocks = [ArrayBlocks(each, size) for each in data]
    own = [blocks[rank][rank].copy() for rank in range(size)]
    whole = ArrayBlocks(total(inputs), size)
    return Trial(
        [pairwise.reduce_scatter(rank, size, blocks[rank], own[rank]) for rank in range(size)],
        own,
        [whole[rank] for rank in range(size)],
        priced("reduce_scatter.pairwise", inputs),
        size,
        untouched=list(zip(data, inputs, strict=True)),
    )


def gathering(schedule: Callable[[int, int, ArrayBlocks], Schedule], cost: str) -> Callable[[list[Array], int], Trial]:
    """All-gather: each rank begins with its own block of the whole, and garbage in the others."""

    def make(inputs: list[Array], root: int) -> Trial:
        size, whole = len(inputs), inputs[0]
        data = [np.full_like(whole, 99) for _ in range(size)]
        for rank in range(size):
            ArrayBlocks(data[rank], size)[rank][...] = ArrayBlocks(whole, size)[rank]
        schedules = [schedule(rank, size, ArrayBlocks(data[rank], size)) for rank in range(size)]
        return Trial(schedules, data, [whole] * size, priced(cost, inputs), size)

    return make


def broadcasting(
    schedule: Callable[[int, int, int, Array], Schedule], cost: str
) -> Callable[[list[Array], int], Trial]:
    def make(inputs: list[Array], root: int) -> Trial:
        size, data = len(inputs), [each.copy() for each in inputs]
        schedules = [schedule(rank, size, root, data[rank]) for rank in range(size)]
        return Trial(schedules, data, [inputs[root]] * size, priced(cost, inputs))

    return make


def tree_reduce(inputs: list[Array], root: int) -> Trial:
    size, data = len(inputs), [each.copy() for each in inputs]
    schedules = [tree.reduce(rank, size, root, data[rank]) for rank in range(size)]
    return Trial(schedules, [data[root]], [total(inputs)], priced("reduce.tree", inputs))


def gather(inputs: list[Array], root: int) -> Trial:
    size, whole = len(inputs), inputs[root]
    own = [ArrayBlocks(whole, size)[rank].copy() for rank in range(size)]
    result = np.full_like(whole, 99)
    ArrayBlocks(result, size)[root][...] = own[root]
    schedules = [
        pairwise.gather(rank, size, root, own[rank], ArrayBlocks(result if rank == root else whole, size))
        for rank in range(size)
    ]
    return Trial(schedules, [result], [whole], priced("gather.star", inputs), size)


def scatter(inputs: list[Array], root: int) -> Trial:
    size, whole = len(inputs), inputs[root]
    parts = ArrayBlocks(whole, size)
    own = [parts[rank].copy() if rank == root else np.full_like(parts[rank], 99) for rank in range(size)]
    schedules = [pairwise.scatter(rank, size, root, own[rank], parts) for rank in range(size)]
    return Trial(schedules, own, [parts[rank] for rank in range(size)], priced("scatter.star", inputs), size)


def all_to_all(inputs: list[Array], root: int) -> Trial:
    size = len(inputs)
    outgoing = [ArrayBlocks(each, size) for each in inputs]
    expected = [np.concatenate([outgoing[peer][rank] for peer in range(size)]) for rank in range(size)]
    incoming, schedules = [np.full_like(each, 99) for each in expected], []
    for rank in range(size):
        length = outgoing[rank][rank].size
        blocks = ArrayBlocks(incoming[rank], size, [peer * length for peer in range(size + 1)])
        blocks[rank][...] = outgoing[rank][rank]
        schedules.append(pairwise.all_to_all(rank, size, outgoing[rank], blocks))
    return Trial(schedules, incoming, expected, priced("all_to_all.pairwise", inputs), size)


ALL_REDUCES: dict[str, Maker] = {
    "ring.all_reduce": reducing(ring_all_reduce, "all_reduce.ring", lambda size: size),
    "doubling.all_reduce": reducing(doubling_all_reduce, "all_reduce.doubling"),
    "doubling.halving_all_reduce": reducing(
        halving_all_reduce, "all_reduce.halving", recursive_doubling.floor_power_of_two
    ),
    "tree.all_reduce": reducing(tree.all_reduce, "all_reduce.tree"),
}
ANY_SIZE: dict[str, Maker] = {
    **ALL_REDUCES,
    "ring.reduce_scatter": ring_reduce_scatter,
    "ring.all_gather": gathering(ring.all_gather, "all_gather.ring"),
    "pairwise.reduce_scatter": pairwise_reduce_scatter,
    "pairwise.all_gather": gathering(pairwise.all_gather, "all_gather.direct"),
    "pairwise.all_to_all": all_to_all,
}
ROOTED: dict[str, Maker] = {
    "tree.broadcast": broadcasting(tree.broadcast, "broadcast.tree"),
    "tree.chain_broadcast": broadcasting(tree.chain_broadcast, "broadcast.chain"),
    "tree.reduce": tree_reduce,
    "pairwise.gather": gather,
    "pairwise.scatter": scatter,
}
POWERS_OF_TWO: dict[str, Maker] = {
    "doubling.all_gather": gathering(recursive_doubling.all_gather, "all_gather.doubling")
}
MAKERS = {**ANY_SIZE, **ROOTED, **POWERS_OF_TWO}


WORLDS = [(name, size) for name in MAKERS for size in SIZES if name not in POWERS_OF_TWO or size.bit_count() == 1]


def numbers(size: int, count: int, seed: int = 0) -> list[Array]:
    chance = np.random.default_rng(seed)
    return [chance.integers(0, 1 << 60, count, np.uint64) for _ in range(size)]


def check(trial: Trial) -> None:
    for rank, (result, expected) in enumerate(zip(trial.results, trial.expected, strict=True)):
        assert np.array_equal(result, expected), f"result {rank}"
    assert all(np.array_equal(now, before) for now, before in trial.untouched)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "size"), WORLDS)
def test_result_and_cost(name: str, size: int) -> None:
    """Rounds and messages equal the cost for every length; bytes equal it for equal blocks, and never exceed it."""
    for count in counts(size):
        for root in {0, size // 2, size - 1} if name in ROOTED else {0}:
            trial = MAKERS[name](
                numbers(size, count if name != "pairwise.all_to_all" else -(-count // size) * size), root
            )
            paid = lock_step(trial.schedules).cost
            check(trial)
            promised = trial.cost(-(-count // trial.blocks) * trial.blocks)
            assert (paid.rounds, paid.messages) == (promised.rounds, promised.messages)
            assert paid.nbytes <= promised.nbytes
            assert paid.reduced <= promised.reduced
            if count % trial.blocks == 0:
                assert paid == promised


@settings(max_examples=150, deadline=None)
@given(world=st.sampled_from(WORLDS), count=st.integers(0, 40), seed=st.integers(0), root=st.integers(0, 15))
def test_result_does_not_depend_on_the_order_of_messages(
    world: tuple[str, int], count: int, seed: int, root: int
) -> None:
    name, size = world
    trial = MAKERS[name](
        numbers(size, count * size if name == "pairwise.all_to_all" else count, seed % 97), root % size
    )
    adversary(trial.schedules, seed=seed)
    check(trial)


# -- equal bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_get_the_same_bits_even_if_order_matters(name: str, size: int) -> None:
    for run in (lock_step, *(partial(adversary, seed=seed) for seed in range(3))):
        trial = ALL_REDUCES[name](numbers(size, 33), 0)
        run(trial.schedules, fold=mixed)
        assert all(np.array_equal(result, trial.results[0]) for result in trial.results)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_recursive_doubling_keeps_the_order_of_ranks(size: int) -> None:
    """For powers of two the operands are in the order of the ranks, so an associative operation need not commute."""
    matrices = [np.random.default_rng(rank).integers(0, 9, (2, 2), np.uint64) for rank in range(size)]
    data = [matrix.copy() for matrix in matrices]
    schedules = [
        recursive_doubling.all_reduce(rank, size, data[rank], np.zeros_like(data[rank])) for rank in range(size)
    ]
    lock_step(schedules, fold=np.matmul)
    product = matrices[0]
    for matrix in matrices[1:]:
        product = product @ matrix
    assert all(np.array_equal(each, product) for each in data)


# -- other promises of the docstrings --------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_ring_sends_equal_bytes_to_neighbours_only(size: int) -> None:
    data = numbers(size, 4 * size)
    for rank in range(size):
        for step in ring.all_reduce(rank, size, ArrayBlocks(data[rank], size)):
            send, receive = step
            assert (send.peer, receive.peer) == ((rank + 1) % size, (rank - 1) % size)
    trial = ALL_REDUCES["ring.all_reduce"](data, 0)
    assert lock_step(trial.schedules).sent_nbytes == [2 * (size - 1) * 4 * 8] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("segments", [1, 2, 5])
def test_segments_of_a_chain_are_pipelined(size: int, segments: int) -> None:
    """With one message in and one out per round, a chain takes P-1 rounds and one more for each further segment."""
    whole = np.arange(segments * 6)
    for root in {0, size - 1}:
        data = [whole.copy() if rank == root else np.zeros_like(whole) for rank in range(size)]
        parts = [ArrayBlocks(each, segments) for each in data]
        schedules = [
            [tree.chain_broadcast(rank, size, root, parts[rank][segment]) for segment in range(segments)]
            for rank in range(size)
        ]
        trace = lock_step(schedules, ports=1)
        assert all(np.array_equal(each, whole) for each in data)
        assert trace.cost == tree.chain_broadcast_cost(size, whole.nbytes, segments)
        assert max(trace.sent_nbytes) == (whole.nbytes if size > 1 else 0)


def test_segment_count() -> None:
    assert [tree.segment_count(nbytes, 10) for nbytes in (0, 1, 10, 11, 100)] == [1, 1, 1, 2, 10]


@pytest.mark.parametrize("barrier", [recursive_doubling.barrier, tree.barrier])
@pytest.mark.parametrize("size", SIZES)
def test_no_rank_leaves_a_barrier_before_all_have_entered(size: int, barrier: Callable[..., Schedule]) -> None:
    entered: set[int] = set()

    def pass_through(rank: int) -> Schedule:
        entered.add(rank)
        yield from barrier(rank, size, np.empty(0), np.empty(0))
        assert len(entered) == size

    cost = lock_step([pass_through(rank) for rank in range(size)]).cost
    if barrier is recursive_doubling.barrier:
        assert cost == candidates("barrier")[0].cost(size, 0, DEFAULT)
    for seed in range(5):
        entered.clear()
        adversary([pass_through(rank) for rank in range(size)], seed=seed)


def test_one_rank_sends_nothing() -> None:
    for make in MAKERS.values():
        (schedule,) = make(numbers(1, 4), 0).schedules
        assert list(schedule) == []
    assert list(recursive_doubling.barrier(0, 1, None, None)) == []


class OptionalBlocks(ArrayBlocks):
    """Blocks of which the empty ones are ``None``."""

    def __getitem__(self, which: int | slice, /) -> Array:
        block = super().__getitem__(which)
        return block if block.size else None  # type: ignore[return-value]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), size=st.integers(1, 9), seed=st.integers(0), blocks=st.sampled_from([ArrayBlocks, OptionalBlocks])
)
def test_all_to_all_with_uneven_splits(data: st.DataObject, size: int, seed: int, blocks: type[ArrayBlocks]) -> None:
    """Each pair of ranks has its own length, often zero; empty places are arrays or None."""
    row = st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=size, max_size=size)
    splits = np.array(data.draw(st.lists(row, min_size=size, max_size=size)), int).reshape(size, size)
    bounds = np.pad(splits.cumsum(axis=1), ((0, 0), (1, 0)))
    outgoing = [rank * 1000 + np.arange(bounds[rank][-1]) for rank in range(size)]
    sent = [ArrayBlocks(outgoing[rank], size, bounds[rank]) for rank in range(size)]
    incoming = [np.full(splits[:, rank].sum(), -1) for rank in range(size)]
    places = [[0, *splits[:, rank].cumsum()] for rank in range(size)]
    for rank in range(size):
        ArrayBlocks(incoming[rank], size, places[rank])[rank][...] = sent[rank][rank]
    schedules = [
        pairwise.all_to_all(
            rank, size, blocks(outgoing[rank], size, bounds[rank]), blocks(incoming[rank], size, places[rank])
        )
        for rank in range(size)
    ]
    if seed % 2:
        adversary(schedules, seed=seed)
    else:
        sent_messages = lock_step(schedules).sent_messages
        if blocks is OptionalBlocks:
            assert sum(sent_messages) == np.count_nonzero(splits) - np.count_nonzero(splits.diagonal())
    for rank in range(size):
        assert np.array_equal(incoming[rank], np.concatenate([sent[peer][rank] for peer in range(size)]))
