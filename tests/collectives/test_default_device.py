"""Tensors in the host's memory are carried also where the program's new tensors are made elsewhere by default."""

from __future__ import annotations

import pytest
import torch

SIZE = 2


def _sparse(rank):
    return torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (4,), device="cpu", check_invariants=False)


# What is called with (group, its rank, what the rank gives: eight numbers), and what rank 1 has then.
CALLS = {
    "all_reduce": (lambda group, rank, own: group.all_reduce(own), lambda both: both[0] + both[1]),
    "all_reduce_coalesced": (
        lambda group, rank, own: group.all_reduce_coalesced([own]),
        lambda both: [both[0] + both[1]],
    ),
    "all_reduce bfloat16": (
        lambda group, rank, own: group.all_reduce(own.bfloat16()),
        lambda both: (both[0] + both[1]).bfloat16(),
    ),
    "all_reduce of much": (
        lambda group, rank, own: group.all_reduce(own.repeat(100_000)),
        lambda both: (both[0] + both[1]).repeat(100_000),
    ),
    "all_reduce sparse": (
        lambda group, rank, own: group.all_reduce(_sparse(rank)),
        lambda both: _sparse(0) + _sparse(1),
    ),
    "reduce": (lambda group, rank, own: group.reduce(own, 1), lambda both: both[0] + both[1]),
    "reduce_scatter": (
        lambda group, rank, own: group.reduce_scatter_single(own.new_empty(4), own),
        lambda both: (both[0] + both[1])[4:],
    ),
    "broadcast": (lambda group, rank, own: group.broadcast(own, 0), lambda both: both[0]),
    "all_gather": (
        lambda group, rank, own: group.all_gather_single(own.new_empty(16), own),
        lambda both: torch.cat(both),
    ),
    "all_to_all": (
        lambda group, rank, own: group.all_to_all_single(own.new_empty(8), own),
        lambda both: torch.cat((both[0][4:], both[1][4:])),
    ),
    "all_gather_object": (
        lambda group, rank, own: group.all_gather_object([None, None], own),
        lambda both: both,
    ),
    "gather_object": (
        lambda group, rank, own: group.gather_object(own, [None, None] if rank == 1 else None, 1),
        lambda both: both,
    ),
    "scatter_object_list": (
        lambda group, rank, own: group.scatter_object_list([None], [1, own] if rank == 0 else None, 0),
        lambda both: [both[0]],
    ),
    "broadcast_object_list": (
        lambda group, rank, own: group.broadcast_object_list([own, own[:0]], 0),
        lambda both: [both[0], both[0][:0]],
    ),
    "registered": (
        lambda group, rank, own: group.all_reduce(group.register(own)),
        lambda both: both[0] + both[1],
    ),
}


def _same(found, expected):
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    return torch.equal(found.to_dense(), expected.to_dense())


@pytest.mark.parametrize("name", CALLS)
def test_collectives_with_another_default_device(together, transport, name):
    call, expected = CALLS[name]
    given = [torch.arange(8.0), torch.arange(8.0) * 10]

    def rank(group):
        own = given[group.rank()].clone()
        with torch.device("meta"):
            call(group, group.rank(), own.clone()).wait()
            again = call(group, group.rank(), own)
            again.wait()
            return again.result()

    assert _same(together(SIZE, rank, transport=transport)[1], expected(given))
