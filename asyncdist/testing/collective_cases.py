"""Every collective with inputs and expected outputs, for conformance tests of groups over any transport.

A *collective case* is one operation with inputs for all ranks and the result that torch computes for them without
communication. A test with the groups of all ranks starts the case on each group, waits, and checks the result::

    for case in collective_cases(size=4, count=1000, dtype=torch.float32):
        await asyncio.gather(*(work for group in groups for work in case.start(group)))
        case.check()

Values are integers small enough that every order of additions gives the same bits, so all comparisons are exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from asyncdist.base.callables import Callback
from asyncdist.base.ops import ReduceOp, Reduction
from asyncdist.groups.group import Group
from asyncdist.kernel.engine.work import Work
from asyncdist.testing.arithmetic import UNREDUCED, noise, numbers, reduced, same

T = TypeVar("T")


@dataclass(frozen=True)
class CollectiveCase:
    """One operation: call ``start(group, **options)`` on every rank, wait, then call ``check()``.

    ``options`` are passed to the group's methods. ``check`` raises AssertionError if a result is wrong.
    """

    name: str
    start: Callable[..., list[Work]]
    check: Callback


def _case(
    method: str,
    what: str,
    arguments: Callable[[int], Sequence[Any]],
    outputs: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor] = (),
) -> CollectiveCase:
    """Return the case of one method of a group. ``arguments`` returns those of a rank. ``inputs`` must not change."""
    name, kept = f"{method} of {what}", [tensor.clone() for tensor in inputs]

    def check() -> None:
        _check(name, outputs, expected)
        _check(f"the input of {name}", inputs, kept)

    def start(group: Group, **options: Any) -> list[Work]:
        return [getattr(group, method)(*arguments(group.rank()), **options)]

    return CollectiveCase(name, start, check)


def _check(what: str, outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(outputs) == len(expected), f"{what}: {len(outputs)} tensors instead of {len(expected)}"
    for place, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if not same(output, wanted):
            raise AssertionError(f"{what}, tensor {place}: {output} instead of {wanted}")


def _flat(rows: Iterable[Iterable[T]]) -> list[T]:
    return [item for row in rows for item in row]


def _parts(whole: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return equal parts of a tensor, as views."""
    count = len(whole) // size
    return [whole[rank * count : (rank + 1) * count] for rank in range(size)]


# -- reductions -------------------------------------------------------------------------------------


def reducing(size: int, count: int, dtype: torch.dtype, op: Reduction = ReduceOp.SUM) -> Iterator[CollectiveCase]:
    """Yield a case of every reduction, for every root; ``count`` elements per rank and block."""
    ranks, of = range(size), f"x {dtype}, {op.name}"
    inputs = [numbers(count, dtype, seed=rank) for rank in ranks]
    total, sums = reduced(inputs, op), _clones(inputs)
    yield _case("all_reduce", f"{count} {of}", lambda rank: (sums[rank], op), sums, [total] * size)
    for root in ranks:
        yield _reduce(inputs, op, root, [*inputs[:root], total, *inputs[root + 1 :]], f"{count} {of}, to {root}")
    counts = [count, 1, 0, count + 1]
    rows = [[numbers(n, dtype, seed=7 * rank + n) for n in counts] for rank in ranks]
    several, whole = [_clones(row) for row in rows], [reduced(column, op) for column in zip(*rows, strict=True)]
    what = f"{counts} {of}"
    yield _case("all_reduce_coalesced", what, lambda rank: (several[rank], op), _flat(several), whole * size)
    for counts in ([count] * size, [count + 3 * rank for rank in ranks]):
        yield _reduce_scatter(size, counts, dtype, op)
    wholes = [numbers(count * size, dtype, seed=13 * rank) for rank in ranks]
    parts, expected = [torch.zeros(count).to(dtype) for _ in ranks], _parts(reduced(wholes, op), size)
    what = f"{count} x {dtype} per rank, {op.name}"
    yield _case("reduce_scatter_single", what, lambda rank: (parts[rank], wholes[rank], op), parts, expected, wholes)


def _reduce(
    inputs: Sequence[torch.Tensor], op: Reduction, root: int, expected: Sequence[torch.Tensor], what: str
) -> CollectiveCase:
    tensors = _clones(inputs)
    return _case("reduce", what, lambda rank: (tensors[rank], root, op), tensors, expected)


def _reduce_scatter(size: int, counts: list[int], dtype: torch.dtype, op: Reduction) -> CollectiveCase:
    inputs = [[numbers(n, dtype, seed=11 * rank + to) for to, n in enumerate(counts)] for rank in range(size)]
    outputs = [torch.zeros(n).to(dtype) for n in counts]
    expected = [reduced(column, op) for column in zip(*inputs, strict=True)]
    what = f"{counts} x {dtype}, {op.name}"
    return _case(
        "reduce_scatter", what, lambda rank: (outputs[rank], inputs[rank], op), outputs, expected, _flat(inputs)
    )


def _clones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


# -- copies -----------------------------------------------------------------------------------------


def moving(size: int, count: int, dtype: torch.dtype) -> Iterator[CollectiveCase]:
    """Yield a case of every operation that copies tensors, for every root; ``count`` elements per block."""
    ranks = range(size)
    for root in ranks:
        yield from _rooted(size, count, dtype, root)
    for counts in ([count] * size, [(count + 5 * rank) % (2 * count + 1) for rank in ranks]):
        yield _all_gather(size, counts, dtype)
    own = _row(size, [count] * size, dtype, seed=2)
    joined = _zeros_like([noise(count * size, dtype, seed=0)] * size)
    what = f"{count} x {dtype}"
    yield _case("all_gather_single", what, lambda rank: (joined[rank], own[rank]), joined, [_joined(own)] * size)
    counts = [count, 1, 0, count + 1]
    rows = [_row(len(counts), counts, dtype, seed=1000 * rank) for rank in ranks]
    found = [[_zeros_like(row) for row in rows] for _ in ranks]
    outputs, expected, what = _flat(map(_flat, found)), _flat(rows) * size, f"{counts} x {dtype}"
    yield _case("all_gather_coalesced", what, lambda rank: (found[rank], rows[rank]), outputs, expected)
    sizes = [[(count + 3 * sender + 5 * taker) % (2 * count + 1) for taker in ranks] for sender in ranks]
    sent = [_row(size, sizes[rank], dtype, seed=1000 * rank) for rank in ranks]
    wanted = [[sent[sender][rank] for sender in ranks] for rank in ranks]
    came, what = [_zeros_like(row) for row in wanted], f"{sizes} x {dtype}"
    yield _case("all_to_all", what, lambda rank: (came[rank], sent[rank]), _flat(came), _flat(wanted))
    yield _all_to_all_single(size, count, dtype, uneven=False)
    yield _all_to_all_single(size, count, dtype, uneven=True)


def _row(size: int, counts: Sequence[int], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    return [noise(counts[place], dtype, seed=seed + 101 * place) for place in range(size)]


def _zeros_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return zeros with the shapes and dtypes of the tensors."""
    return [torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype) for tensor in tensors]


def _rooted(size: int, count: int, dtype: torch.dtype, root: int) -> Iterator[CollectiveCase]:
    inputs, what = _row(size, [count] * size, dtype, seed=root), f"{count} x {dtype}, root {root}"
    tensors = [tensor.clone() for tensor in inputs]
    yield _case("broadcast", what, lambda rank: (tensors[rank], root), tensors, [inputs[root]] * size)
    gathered, scattered = _zeros_like(inputs), _zeros_like(inputs)
    (single,) = _zeros_like([noise(count * size, dtype, seed=0)])

    def on_root(rank: int, value: T) -> T | None:
        return value if rank == root else None

    yield _case("gather", what, lambda rank: (inputs[rank], on_root(rank, gathered), root), gathered, inputs)
    joined = [_joined(inputs)]
    yield _case("gather_single", what, lambda rank: (inputs[rank], on_root(rank, single), root), [single], joined)
    yield _case("scatter", what, lambda rank: (scattered[rank], on_root(rank, inputs), root), scattered, inputs)


def _all_gather(size: int, counts: list[int], dtype: torch.dtype) -> CollectiveCase:
    inputs = _row(size, counts, dtype, seed=1)
    outputs = [_zeros_like(inputs) for _ in range(size)]
    what = f"{counts} x {dtype}"
    return _case("all_gather", what, lambda rank: (outputs[rank], inputs[rank]), _flat(outputs), inputs * size)


def _all_to_all_single(size: int, count: int, dtype: torch.dtype, *, uneven: bool) -> CollectiveCase:
    """Return a case of rows of two elements; each rank sends each rank ``count`` rows, or different numbers."""
    ranks = range(size)
    rows = [[(count + mine * theirs) % (count + 2) if uneven else count for theirs in ranks] for mine in ranks]
    incoming = [[rows[sender][rank] for sender in ranks] for rank in ranks]
    inputs = [noise(2 * sum(row), dtype, seed=17 * rank).view(-1, 2) for rank, row in enumerate(rows)]
    parts = [tensor.split(row) for tensor, row in zip(inputs, rows, strict=True)]
    expected = [_joined([parts[sender][rank] for sender in ranks]).view(-1, 2) for rank in ranks]
    outputs = [_zeros_like([tensor])[0] for tensor in expected]

    def arguments(rank: int) -> tuple[Any, ...]:
        return outputs[rank], inputs[rank], *((incoming[rank], rows[rank]) if uneven else ())

    return _case("all_to_all_single", f"{rows} rows of 2 x {dtype}", arguments, outputs, expected)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors in one dimension, as bytes, because torch cannot concatenate every dtype."""
    raw = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    return raw.view(tensors[0].dtype)


# -- between two ranks ------------------------------------------------------------------------------


_tag_numbers = itertools.count(1)


def between_two(size: int, count: int, dtype: torch.dtype) -> Iterator[CollectiveCase]:
    """Yield cases of send and recv: around a ring with one and three messages per tag and with two tags; from any rank."""
    if size > 1:
        yield _ring(size, dtype, [count], [next(_tag_numbers)], "")
        yield _ring(size, dtype, [count] * 3, [next(_tag_numbers)] * 3, ", with one tag")
        yield _ring(size, dtype, [count] * 2, [next(_tag_numbers), next(_tag_numbers)], ", with two tags")
        yield _from_any(size, count, dtype)


def _ring(size: int, dtype: torch.dtype, counts: list[int], tags: list[int], how: str) -> CollectiveCase:
    """Each rank sends messages to the next rank, which receives them in the reverse order of the tags.

    The sender overwrites the memory of a message as soon as its send has completed.
    """
    inputs = [_row(len(counts), counts, dtype, seed=5000 * (rank + 1)) for rank in range(size)]
    kept = [[tensor.clone() for tensor in row] for row in inputs]
    outputs = [_zeros_like(row) for row in inputs]
    name = f"{len(counts)} messages of {counts[0]} x {dtype} around a ring{how}"

    def send(group: Group, tensor: torch.Tensor, tag: int, options: dict[str, Any]) -> Work:
        work = group.send(tensor, (group.rank() + 1) % size, tag, **options)
        work.add_done_callback(lambda _: tensor.view(torch.uint8).fill_(0xA5))
        return work

    def start(group: Group, **options: Any) -> list[Work]:
        rank = group.rank()
        order = sorted(range(len(tags)), key=lambda place: -tags[place])
        received = [group.recv(outputs[rank][place], (rank - 1) % size, tags[place]) for place in order]
        return [*(send(group, *each, options) for each in zip(inputs[rank], tags, strict=True)), *received]

    return CollectiveCase(name, start, lambda: _check(name, _flat(outputs), kept[-1] + _flat(kept[:-1])))


def _from_any(size: int, count: int, dtype: torch.dtype) -> CollectiveCase:
    inputs = _row(size, [count] * size, dtype, seed=4)
    outputs = _zeros_like(inputs[1:])
    receipts: list[Work] = []
    global_ranks: list[int] = []
    tag, name = next(_tag_numbers), f"{size - 1} x {count} x {dtype} from any rank"

    def start(group: Group, **options: Any) -> list[Work]:
        if group.rank() != 0:
            return [group.send(inputs[group.rank()], 0, tag, **options)]
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
    """Yield a case of `barrier` and one of `monitored_barrier`."""
    for method in ("barrier", "monitored_barrier"):
        yield _case(method, f"{size} ranks", lambda rank: (), (), ())


def collective_cases(size: int, count: int, dtype: torch.dtype) -> Iterator[CollectiveCase]:
    """Yield every case for ``size`` ranks that is defined for a dtype. Reductions are sums."""
    if dtype not in UNREDUCED:
        yield from reducing(size, count, dtype)
    yield from moving(size, count, dtype)
    yield from between_two(size, count, dtype)
    yield from barriers(size)
