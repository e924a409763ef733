"""Every collective with inputs and expected outputs, for conformance tests of groups over any transport.

A *drill* is one operation with inputs for all ranks and the result that torch computes for them without communication.
A test that holds the groups starts the drill on each of them, waits in the way under test, and checks the outcome:

    for drill in drills(size=4, count=1000, dtype=torch.float32):
        await asyncio.gather(*(work for group in groups for work in drill.start(group)))
        drill.check()

Values are integers small enough that every order of additions gives the same bits, so all comparisons are exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from asyncdist.base.ops import ReduceOp, Reduction
from asyncdist.engine.work import Work
from asyncdist.groups.group import Group
from asyncdist.testing.arithmetic import UNREDUCED, noise, numbers, reduced, same

T = TypeVar("T")


@dataclass(frozen=True)
class CollectiveCase:
    """One operation: ``start(group, **how)`` on every rank, then ``check()``, which raises AssertionError.

    ``how`` goes to the group's methods.
    """

    name: str
    start: Callable[..., list[Work]]
    check: Callable[[], None]


def _check(what: str, ours: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(ours) == len(expected), f"{what}: {len(ours)} tensors instead of {len(expected)}"
    for place, (mine, wanted) in enumerate(zip(ours, expected, strict=True)):
        if not same(mine, wanted):
            raise AssertionError(f"{what}, tensor {place}: {mine} instead of {wanted}")


def _on(rank: int, root: int, value: Any) -> Any:
    return value if rank == root else None


def _flat(rows: Iterable[Iterable[T]]) -> list[T]:
    return [item for row in rows for item in row]


# -- reducing ---------------------------------------------------------------------------------------


def reducing(size: int, count: int, dtype: torch.dtype, op: Reduction = ReduceOp.SUM) -> Iterator[CollectiveCase]:
    """Yield a drill of every reduction, for every root; ``count`` elements per rank and block."""
    inputs = [numbers(count, dtype, seed=rank) for rank in range(size)]
    yield _all_reduce(inputs, op)
    for root in range(size):
        yield _reduce(inputs, op, root)
    yield _coalesced_all_reduce(size, count, dtype, op)
    yield _reduce_scatter(size, [count] * size, dtype, op)
    yield _reduce_scatter(size, [count + 3 * rank for rank in range(size)], dtype, op)
    yield _reduce_scatter_single(size, count, dtype, op)


def _all_reduce(inputs: list[torch.Tensor], op: Reduction) -> CollectiveCase:
    tensors = [tensor.clone() for tensor in inputs]
    name = f"all_reduce({op.name}) of {len(inputs[0])} x {inputs[0].dtype}"
    return CollectiveCase(
        name,
        lambda group, **how: [group.all_reduce(tensors[group.rank()], op, **how)],
        lambda: _check(name, tensors, [reduced(inputs, op)] * len(inputs)),
    )


def _reduce(inputs: list[torch.Tensor], op: Reduction, root: int) -> CollectiveCase:
    tensors = [tensor.clone() for tensor in inputs]
    name = f"reduce({op.name}) of {len(inputs[0])} x {inputs[0].dtype} to {root}"
    expected = [reduced(inputs, op) if rank == root else tensor for rank, tensor in enumerate(inputs)]
    return CollectiveCase(
        name,
        lambda group, **how: [group.reduce(tensors[group.rank()], root, op, **how)],
        lambda: _check(name, tensors, expected),
    )


def _coalesced_all_reduce(size: int, count: int, dtype: torch.dtype, op: Reduction) -> CollectiveCase:
    counts = [count, 1, 0, count + 1]
    inputs = [[numbers(n, dtype, seed=7 * rank + n) for n in counts] for rank in range(size)]
    tensors = [[tensor.clone() for tensor in row] for row in inputs]
    expected = [reduced([row[place] for row in inputs], op) for place in range(len(counts))]
    name = f"all_reduce_coalesced({op.name}) of {counts} x {dtype}"
    return CollectiveCase(
        name,
        lambda group, **how: [group.all_reduce_coalesced(tensors[group.rank()], op, **how)],
        lambda: _check(name, _flat(tensors), expected * size),
    )


def _reduce_scatter(size: int, counts: list[int], dtype: torch.dtype, op: Reduction) -> CollectiveCase:
    inputs = [[numbers(n, dtype, seed=11 * rank + to) for to, n in enumerate(counts)] for rank in range(size)]
    kept = [[tensor.clone() for tensor in row] for row in inputs]
    outputs = [torch.zeros(n).to(dtype) for n in counts]
    name = f"reduce_scatter({op.name}) of {counts} x {dtype}"

    def check() -> None:
        _check(name, outputs, [reduced([row[rank] for row in kept], op) for rank in range(size)])
        _check(f"the input of {name}", _flat(inputs), _flat(kept))

    return CollectiveCase(
        name,
        lambda group, **how: [group.reduce_scatter(outputs[group.rank()], inputs[group.rank()], op, **how)],
        check,
    )


def _reduce_scatter_single(size: int, count: int, dtype: torch.dtype, op: Reduction) -> CollectiveCase:
    inputs = [numbers(count * size, dtype, seed=13 * rank) for rank in range(size)]
    kept = [tensor.clone() for tensor in inputs]
    outputs = [torch.zeros(count).to(dtype) for _ in range(size)]
    name = f"reduce_scatter_single({op.name}) of {count} x {dtype} a rank"

    def check() -> None:
        whole = reduced(kept, op)
        _check(name, outputs, _cut(whole, size))
        _check(f"the input of {name}", inputs, kept)

    return CollectiveCase(
        name,
        lambda group, **how: [group.reduce_scatter_single(outputs[group.rank()], inputs[group.rank()], op, **how)],
        check,
    )


# -- moving -----------------------------------------------------------------------------------------


def moving(size: int, count: int, dtype: torch.dtype) -> Iterator[CollectiveCase]:
    """Yield a drill of every operation that copies tensors, for every root; ``count`` elements per block."""
    even, uneven = [count] * size, [(count + 5 * rank) % (2 * count + 1) for rank in range(size)]
    for root in range(size):
        yield _broadcast(size, count, dtype, root)
        yield _gather(size, count, dtype, root)
        yield _gather_single(size, count, dtype, root)
        yield _scatter(size, count, dtype, root)
    yield _all_gather(size, even, dtype)
    yield _all_gather(size, uneven, dtype)
    yield _all_gather_single(size, count, dtype)
    yield _coalesced_all_gather(size, count, dtype)
    yield _all_to_all(size, count, dtype)
    yield _all_to_all_single(size, count, dtype, uneven=False)
    yield _all_to_all_single(size, count, dtype, uneven=True)


def _row(size: int, counts: Sequence[int], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    return [noise(counts[place], dtype, seed=seed + 101 * place) for place in range(size)]


def _room(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype) for tensor in tensors]


def _broadcast(size: int, count: int, dtype: torch.dtype, root: int) -> CollectiveCase:
    tensors = _row(size, [count] * size, dtype, seed=root)
    expected = tensors[root].clone()
    name = f"broadcast of {count} x {dtype} from {root}"
    return CollectiveCase(
        name,
        lambda group, **how: [group.broadcast(tensors[group.rank()], root, **how)],
        lambda: _check(name, tensors, [expected] * size),
    )


def _gather(size: int, count: int, dtype: torch.dtype, root: int) -> CollectiveCase:
    inputs = _row(size, [count] * size, dtype, seed=root)
    outputs = _room(inputs)
    name = f"gather of {count} x {dtype} to {root}"

    def start(group: Group, **how: Any) -> list[Work]:
        rank = group.rank()
        return [group.gather(inputs[rank], _on(rank, root, outputs), root, **how)]

    return CollectiveCase(name, start, lambda: _check(name, outputs, inputs))


def _gather_single(size: int, count: int, dtype: torch.dtype, root: int) -> CollectiveCase:
    inputs = _row(size, [count] * size, dtype, seed=root)
    (output,) = _room([noise(count * size, dtype, seed=0)])
    name = f"gather_single of {count} x {dtype} to {root}"

    def start(group: Group, **how: Any) -> list[Work]:
        rank = group.rank()
        return [group.gather_single(inputs[rank], _on(rank, root, output), root, **how)]

    return CollectiveCase(name, start, lambda: _check(name, _cut(output, size), inputs))


def _scatter(size: int, count: int, dtype: torch.dtype, root: int) -> CollectiveCase:
    inputs = _row(size, [count] * size, dtype, seed=root)
    outputs = _room(inputs)
    name = f"scatter of {count} x {dtype} from {root}"

    def start(group: Group, **how: Any) -> list[Work]:
        rank = group.rank()
        return [group.scatter(outputs[rank], _on(rank, root, inputs), root, **how)]

    return CollectiveCase(name, start, lambda: _check(name, outputs, inputs))


def _all_gather(size: int, counts: list[int], dtype: torch.dtype) -> CollectiveCase:
    inputs = _row(size, counts, dtype, seed=1)
    outputs = [_room(inputs) for _ in range(size)]
    name = f"all_gather of {counts} x {dtype}"
    return CollectiveCase(
        name,
        lambda group, **how: [group.all_gather(outputs[group.rank()], inputs[group.rank()], **how)],
        lambda: _check(name, _flat(outputs), inputs * size),
    )


def _all_gather_single(size: int, count: int, dtype: torch.dtype) -> CollectiveCase:
    inputs = _row(size, [count] * size, dtype, seed=2)
    outputs = _room([noise(count * size, dtype, seed=0)] * size)
    name = f"all_gather_single of {count} x {dtype}"

    def check() -> None:
        for output in outputs:
            _check(name, _cut(output, size), inputs)

    return CollectiveCase(
        name,
        lambda group, **how: [group.all_gather_single(outputs[group.rank()], inputs[group.rank()], **how)],
        check,
    )


def _coalesced_all_gather(size: int, count: int, dtype: torch.dtype) -> CollectiveCase:
    counts = [count, 1, 0, count + 1]
    inputs = [_row(len(counts), counts, dtype, seed=1000 * rank) for rank in range(size)]
    outputs = [[_room(row) for row in inputs] for _ in range(size)]
    name = f"all_gather_coalesced of {counts} x {dtype}"
    return CollectiveCase(
        name,
        lambda group, **how: [group.all_gather_coalesced(outputs[group.rank()], inputs[group.rank()], **how)],
        lambda: _check(name, _flat(map(_flat, outputs)), _flat(inputs) * size),
    )


def _all_to_all(size: int, count: int, dtype: torch.dtype) -> CollectiveCase:
    sizes = [[(count + 3 * sender + 5 * taker) % (2 * count + 1) for taker in range(size)] for sender in range(size)]
    inputs = [_row(size, sizes[rank], dtype, seed=1000 * rank) for rank in range(size)]
    expected = [[inputs[sender][rank] for sender in range(size)] for rank in range(size)]
    outputs = [_room(row) for row in expected]
    name = f"all_to_all of {sizes} x {dtype}"
    return CollectiveCase(
        name,
        lambda group, **how: [group.all_to_all(outputs[group.rank()], inputs[group.rank()], **how)],
        lambda: _check(name, _flat(outputs), _flat(expected)),
    )


def _all_to_all_single(size: int, count: int, dtype: torch.dtype, *, uneven: bool) -> CollectiveCase:
    """Return a drill of rows of two elements; each rank sends each rank ``count`` rows, or different numbers."""
    ranks = range(size)
    rows = [[(count + mine * theirs) % (count + 2) if uneven else count for theirs in ranks] for mine in ranks]
    incoming = [[rows[sender][rank] for sender in range(size)] for rank in range(size)]
    inputs = [noise(2 * sum(row), dtype, seed=17 * rank).view(-1, 2) for rank, row in enumerate(rows)]
    parts = [tensor.split(row) for tensor, row in zip(inputs, rows, strict=True)]
    expected = [_joined([parts[sender][rank] for sender in range(size)]) for rank in range(size)]
    outputs = [_room([tensor])[0] for tensor in expected]
    name = f"all_to_all_single of {rows} rows of 2 x {dtype}"

    def start(group: Group, **how: Any) -> list[Work]:
        rank = group.rank()
        splits = (incoming[rank], rows[rank]) if uneven else (None, None)
        return [group.all_to_all_single(outputs[rank], inputs[rank], *splits, **how)]

    return CollectiveCase(name, start, lambda: _check(name, outputs, expected))


def _cut(whole: torch.Tensor, size: int) -> list[torch.Tensor]:
    count = len(whole) // size
    return [whole[rank * count : (rank + 1) * count] for rank in range(size)]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate rows as bytes, because torch cannot concatenate every dtype."""
    raw = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    return raw.view(tensors[0].dtype).view(-1, 2)


# -- between two ranks ------------------------------------------------------------------------------


_tag_numbers = itertools.count(1)


def between_two(size: int, count: int, dtype: torch.dtype) -> Iterator[CollectiveCase]:
    """Yield drills of send and recv: around a ring, one and three per tag; two tags in reverse order; from any rank."""
    if size > 1:
        yield _circle(size, count, dtype)
        yield _in_a_row(size, count, dtype)
        yield _tags(size, count, dtype)
        yield _from_any(size, count, dtype)


def _circle(size: int, count: int, dtype: torch.dtype) -> CollectiveCase:
    inputs = _row(size, [count] * size, dtype, seed=3)
    outputs = _room(inputs)
    tag, name = next(_tag_numbers), f"a circle of {count} x {dtype}"

    def start(group: Group, **how: Any) -> list[Work]:
        rank = group.rank()
        received = group.recv(outputs[rank], (rank - 1) % size, tag)
        return [group.send(inputs[rank], (rank + 1) % size, tag, **how), received]

    return CollectiveCase(name, start, lambda: _check(name, outputs, [inputs[rank - 1] for rank in range(size)]))


def _in_a_row(size: int, count: int, dtype: torch.dtype) -> CollectiveCase:
    """Three messages with one tag, whose memory is overwritten as soon as their sends have completed."""
    inputs = [_row(3, [count] * 3, dtype, seed=5000 * (rank + 1)) for rank in range(size)]
    kept = [[tensor.clone() for tensor in row] for row in inputs]
    outputs = [_room(row) for row in inputs]
    tag, name = next(_tag_numbers), f"three in a row around a circle of {count} x {dtype}"

    def send(group: Group, tensor: torch.Tensor, how: dict[str, Any]) -> Work:
        work = group.send(tensor, (group.rank() + 1) % size, tag, **how)
        work.add_done_callback(lambda _: tensor.view(torch.uint8).fill_(0xA5))
        return work

    def start(group: Group, **how: Any) -> list[Work]:
        rank = group.rank()
        received = [group.recv(output, (rank - 1) % size, tag) for output in outputs[rank]]
        return [*(send(group, tensor, how) for tensor in inputs[rank]), *received]

    return CollectiveCase(name, start, lambda: _check(name, _flat(outputs), kept[-1] + _flat(kept[:-1])))


def _tags(size: int, count: int, dtype: torch.dtype) -> CollectiveCase:
    inputs = [_row(2, [count, count], dtype, seed=rank) for rank in range(size)]
    outputs = [_room(row) for row in inputs]
    tags, name = (next(_tag_numbers), next(_tag_numbers)), f"two tags of {count} x {dtype}"

    def start(group: Group, **how: Any) -> list[Work]:
        rank = group.rank()
        left, right = (rank - 1) % size, (rank + 1) % size
        received = [group.recv(outputs[rank][which], left, tags[which]) for which in (1, 0)]
        return [*(group.send(inputs[rank][which], right, tags[which], **how) for which in (0, 1)), *received]

    return CollectiveCase(name, start, lambda: _check(name, _flat(outputs), inputs[-1] + _flat(inputs[:-1])))


def _from_any(size: int, count: int, dtype: torch.dtype) -> CollectiveCase:
    inputs = _row(size, [count] * size, dtype, seed=4)
    outputs = _room(inputs[1:])
    receipts: list[Work] = []
    global_ranks: list[int] = []
    tag, name = next(_tag_numbers), f"{size - 1} x {count} x {dtype} from any rank"

    def start(group: Group, **how: Any) -> list[Work]:
        if group.rank() != 0:
            return [group.send(inputs[group.rank()], 0, tag, **how)]
        global_ranks.extend(group.ranks)
        receipts.extend(group.recv(output, None, tag) for output in outputs)
        return receipts

    def check() -> None:
        senders = [global_ranks.index(work.result()) for work in receipts]
        assert sorted(senders) == list(range(1, size)), f"{name} came from {senders}"
        _check(name, outputs, [inputs[sender] for sender in senders])

    return CollectiveCase(name, start, check)


# -- all together -----------------------------------------------------------------------------------


def barriers(size: int) -> Iterator[CollectiveCase]:
    """Yield both kinds of barrier."""
    yield CollectiveCase("barrier", lambda group, **how: [group.barrier(**how)], lambda: None)
    yield CollectiveCase("monitored_barrier", lambda group, **how: [group.monitored_barrier(**how)], lambda: None)


def collective_cases(size: int, count: int, dtype: torch.dtype) -> Iterator[CollectiveCase]:
    """Yield every drill for ``size`` ranks that a dtype allows, reductions by sums."""
    if dtype not in UNREDUCED:
        yield from reducing(size, count, dtype)
    yield from moving(size, count, dtype)
    yield from between_two(size, count, dtype)
    yield from barriers(size)
