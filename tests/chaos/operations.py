"""The operations of a round: each member starts them, and checks every element of their results."""

from typing import NamedTuple

import torch

SCRIBBLE = -77
"""What a member writes into the memory of operations that are over."""


class Started(NamedTuple):
    """An operation that has begun: its works, the tensors that it uses, its result and what the result must be."""

    name: str
    works: list
    tensors: list
    result: object
    expected: object

    def problem(self):
        """Return what is wrong with the result; None if nothing is."""
        right = (
            torch.equal(self.result, self.expected)
            if isinstance(self.expected, torch.Tensor)
            else self.result == self.expected
        )
        return None if right else f"{self.name} returned {self.result}, expected {self.expected}"


def values(operation, rank, count):
    """The contribution of a rank."""
    return (torch.arange(count) % 7 + rank + operation.salt).to(getattr(torch, operation.dtype))


def total(operation, size, count):
    """The sum of the contributions of all ranks."""
    return ((torch.arange(count) % 7 + operation.salt) * size + size * (size - 1) // 2).to(
        getattr(torch, operation.dtype)
    )


def start(group, operation, number, *, background=True):
    """Start an operation; the works of a blocking call are complete."""
    rank, size = group.rank(), group.size()
    return globals()[f"_{operation.name}"](group, operation, number, rank, size, {"background": background})


def _all_reduce(group, operation, number, rank, size, options):
    tensor = values(operation, rank, operation.count)
    work = group.all_reduce(tensor, **options)
    return Started("all_reduce", [work], [tensor], tensor, total(operation, size, operation.count))


def _broadcast(group, operation, number, rank, size, options):
    tensor = values(operation, rank, operation.count)
    work = group.broadcast(tensor, operation.root, **options)
    return Started("broadcast", [work], [tensor], tensor, values(operation, operation.root, operation.count))


def _all_gather(group, operation, number, rank, size, options):
    count = operation.count // size + 1
    own = values(operation, rank, count)
    output = torch.zeros(count * size, dtype=own.dtype)
    work = group.all_gather_single(output, own, **options)
    return Started(
        "all_gather", [work], [own, output], output, torch.cat([values(operation, peer, count) for peer in range(size)])
    )


def _reduce_scatter(group, operation, number, rank, size, options):
    count = operation.count // size + 1
    whole = values(operation, rank, count * size)
    output = torch.zeros(count, dtype=whole.dtype)
    work = group.reduce_scatter_single(output, whole, **options)
    expected = total(operation, size, count * size)[rank * count : (rank + 1) * count]
    return Started("reduce_scatter", [work], [whole, output], output, expected)


def _all_to_all(group, operation, number, rank, size, options):
    count = operation.count // size + 1
    own = values(operation, rank, count * size)
    output = torch.zeros_like(own)
    work = group.all_to_all_single(output, own, **options)
    expected = [values(operation, peer, count * size)[rank * count : (rank + 1) * count] for peer in range(size)]
    return Started("all_to_all", [work], [own, output], output, torch.cat(expected))


def _ring(group, operation, number, rank, size, options):
    own = values(operation, rank, operation.count)
    before = (rank - 1) % size
    if size == 1:
        return Started("ring", [], [own], own, own)
    tensor = torch.zeros_like(own)
    receiving = group.recv(tensor, before, tag=number % 1000)
    sending = group.send(own, (rank + 1) % size, tag=number % 1000)
    return Started("ring", [receiving, sending], [own, tensor], tensor, values(operation, before, operation.count))


def _objects(group, operation, number, rank, size, options):
    output = [None] * size
    work = group.all_gather_object(output, [rank, operation.salt], **options)
    return Started("objects", [work], [], output, [[peer, operation.salt] for peer in range(size)])


def _barrier(group, operation, number, rank, size, options):
    return Started("barrier", [group.barrier(**options)], [], None, None)
