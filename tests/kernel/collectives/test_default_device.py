"""Operations of sparse and registered tensors and of objects do not depend on the default device of new tensors."""

from __future__ import annotations

import pytest
import torch

SIZE = 2


def _sparse(rank):
    return torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (4,), device="cpu", check_invariants=False)


# Calls of a group with its rank and the eight numbers that the rank gives, and the result on rank 1.
CALLS = {
    "all_reduce sparse": (
        lambda group, rank, own: group.all_reduce(_sparse(rank)),
        lambda both: _sparse(0) + _sparse(1),
    ),
    "all_gather_object": (lambda group, rank, own: group.all_gather_object([None] * 2, own), lambda both: both),
    "gather_object": (
        lambda group, rank, own: group.gather_object(own, [None] * 2 if rank == 1 else None, 1),
        lambda both: both,
    ),
    "scatter_object_list": (
        lambda group, rank, own: group.scatter_object_list([None], [1, own] if rank == 0 else None, 0),
        lambda both: both[:1],
    ),
    "broadcast_object_list": (lambda group, rank, own: group.broadcast_object_list([own], 0), lambda both: both[:1]),
    "register": (lambda group, rank, own: group.all_reduce(group.register(own)), lambda both: both[0] + both[1]),
}


def _same(found, expected):
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    return torch.equal(found.to_dense(), expected.to_dense())


@pytest.mark.parametrize("name", CALLS)
def test_other_operations_with_another_default_device(together, transport, name):
    call, expected = CALLS[name]
    given = [torch.arange(8.0), torch.arange(8.0) * 10]

    def rank(group):
        own = given[group.rank()].clone()
        with torch.device("meta"):
            work = call(group, group.rank(), own)
            work.wait()
            return work.result()

    assert _same(together(SIZE, rank, transport=transport)[1], expected(given))
