"""Invalid arguments raise an error before any message is sent, and the group stays usable."""

from __future__ import annotations

import asyncio
import pickle
import re

import numpy as np
import pytest
import torch

import asyncdist
from asyncdist import sync
from asyncdist.errors import LoopThreadError, NotInitializedError, UnsupportedError, UsageError
from asyncdist.testing.cluster import world_of


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


class Unknown:
    """A class that is neither plain data nor a tensor."""


BIG_ENDIAN = np.ones(3, dtype=np.dtype(">f4"))
BACKWARDS = np.arange(4)[::-1]

# Calls on rank 0 of a group of two, and patterns of the messages.
WRONG_TENSORS = {
    "a number": (lambda g: g.all_reduce(1.0), "a tensor or numpy array is needed here, not float"),
    "a list": (lambda g: g.all_reduce([ones(1)]), "a tensor or numpy array is needed here, not list"),
    "None": (lambda g: g.broadcast(None, 0), "not NoneType"),
    "a numpy scalar": (lambda g: g.all_reduce(np.float32(1)), "not float32"),
    "on another device": (lambda g: g.all_reduce(torch.ones(3, device="meta")), "on meta: it has no values"),
    "sparse": (lambda g: g.broadcast(ones(3).to_sparse(), 0), r"call \.to_dense"),
    "the largest of sparse ones": (
        lambda g: g.all_reduce(ones(3).to_sparse(), "max"),
        "with SUM and AVG only, not MAX",
    ),
    "of bits": (lambda g: g.all_reduce(torch.empty(2, dtype=torch.bits8)), "tensors of torch.bits8"),
    "expanded": (lambda g: g.all_reduce(ones(1).expand(4)), r"expanded.*pass \.clone\(\)"),
    "expanded rows": (lambda g: g.recv(ones(3).expand(2, 3), 1), "expanded"),
    "unfolded": (lambda g: g.all_reduce(ones(6).unfold(0, 3, 2)), r"unfolded.*pass \.clone\(\)"),
    "unfolded, and each row twice": (lambda g: g.all_reduce(ones(6).as_strided((2, 2, 3), (0, 2, 1))), "unfolded"),
    "expanded in a list": (lambda g: g.all_gather([ones(3), ones(1).expand(3)], ones(3)), "expanded"),
    "big-endian": (lambda g: g.all_reduce(BIG_ENDIAN), "this numpy array cannot be communicated"),
    "strings": (lambda g: g.send(np.array(["a"]), 1), "cannot be communicated"),
    "backwards": (lambda g: g.send(BACKWARDS, 1), "cannot be communicated"),
}
WRONG_RANKS = {
    "dst": (lambda g: g.reduce(ones(3), 2), "dst=2 is not a rank of the group"),
    "negative": (lambda g: g.broadcast(ones(3), -1), "src=-1 is not a rank"),
    "scatter": (lambda g: g.scatter(ones(3), None, 7), "src=7"),
    "gather": (lambda g: g.gather(ones(3), None, 7), "dst=7"),
    "send": (lambda g: g.send(ones(3), 2), "dst=2"),
    "recv": (lambda g: g.recv(ones(3), -2), "src=-2"),
    "objects": (lambda g: g.broadcast_object_list([1], 2), "src=2"),
    "to oneself": (lambda g: g.send(ones(3), 0), "dst=0 is this rank itself"),
    "from oneself": (lambda g: g.recv(ones(3), 0), "src=0 is this rank itself"),
    "objects to oneself": (lambda g: g.send_object_list([1], 0), "itself"),
    "negative tag": (lambda g: g.send(ones(3), 1, tag=-1), "a tag is a number from 0 to"),
    "large tag": (lambda g: g.recv(ones(3), 1, tag=1 << 32), "a tag is a number"),
}
WRONG_LISTS = {
    "too short": (lambda g: g.all_gather([ones(2)], ones(2)), "tensor_list has 1 entries: it needs one for each of the 2"),
    "too long": (lambda g: g.all_to_all([ones(1)] * 3, [ones(1)] * 2), "output_tensor_list has 3 entries"),
    "missing": (lambda g: g.all_gather(None, ones(2)), "tensor_list is missing"),
    "of another input": (lambda g: g.all_to_all([ones(1)] * 2, [ones(1)]), "input_tensor_list has 1"),
    "missing at the root": (lambda g: g.gather(ones(2), None, 0), "gather_list on the destination rank is missing"),
    "missing at the source": (lambda g: g.scatter(ones(2), None, 0), "scatter_list on the source rank is missing"),
    "on another rank than the root": (lambda g: g.gather(ones(2), [ones(2)] * 2, 1), "belongs to the destination, rank 1"),
    "on another rank than the source": (lambda g: g.scatter(ones(2), [ones(2)] * 2, 1), "belongs to the source, rank 1"),
    "of other sizes": (lambda g: g.gather(ones(2), [ones(2), ones(3)], 0), r"gather_list\[1\] has 3 x torch.float32"),
    "to scatter of other sizes": (lambda g: g.scatter(ones(2), [ones(2), ones(3)], 0), r"scatter_list\[1\] has 3"),
    "of mixed dtypes": (lambda g: g.all_gather([ones(2), ones(2, dtype=torch.int8)], ones(2)), "use one dtype"),
    "of another dtype": (lambda g: g.all_gather([ones(2, dtype=torch.int8)] * 2, ones(2)), "this rank gives 2 x"),
    "own place of another size": (lambda g: g.all_gather([ones(3), ones(2)], ones(2)), "this rank gives 2 x"),
    "reduced to another size": (lambda g: g.reduce_scatter(ones(3), [ones(2)] * 2), "the output has 3 x"),
    "reduced to another dtype": (lambda g: g.reduce_scatter(ones(2, dtype=torch.float64), [ones(2)] * 2), "the output"),
    "coalesced of none": (lambda g: g.all_reduce_coalesced([]), "at least one tensor"),
    "coalesced of mixed dtypes": (lambda g: g.all_reduce_coalesced([ones(1), ones(1, dtype=torch.int32)]), "one dtype"),
    "coalesced rows": (lambda g: g.all_gather_coalesced([[ones(1)], []], [ones(1)]), "needs 1 tensors"),
    "coalesced columns": (lambda g: g.all_gather_coalesced([[ones(1)]], [ones(1)]), "has 1 entries"),
    "objects": (lambda g: g.all_gather_object([None], 1), "the output list has 1"),
    "objects at the root": (lambda g: g.gather_object(1, None, 0), "object_gather_list on the destination rank is missing"),
    "objects at the source": (lambda g: g.scatter_object_list([None], [1], 0), "input_list on the source rank has 1"),
    "no room for an object": (lambda g: g.scatter_object_list([], [1, 2], 0), "needs room for one object"),
}  # fmt: skip
WRONG_SPLITS = {
    "output not shared equally": (lambda g: g.all_gather_single(ones(3), ones(1)), "2 ranks cannot share equally"),
    "one output missing": (lambda g: g.gather_single(ones(2), None, 0), "gather_tensor on the destination rank"),
    "one output of another size": (lambda g: g.gather_single(ones(2), ones(6), 0), r"gather_tensor\[0\] has 3 x"),
    "output of another size": (lambda g: g.all_gather_single(ones(4), ones(3)), "this rank gives 3 x"),
    "input not shared equally": (lambda g: g.reduce_scatter_single(ones(1), ones(3)), "cannot share equally"),
    "input of another size": (lambda g: g.reduce_scatter_single(ones(1), ones(4)), "the output has 1 x"),
    "rows not shared equally": (lambda g: g.all_to_all_single(ones(4), ones(3)), "the input has 3 rows|pass split sizes"),
    "sum of output sizes": (lambda g: g.all_to_all_single(ones(4), ones(4), [1, 2], [2, 2]), "do not add up to the 4"),
    "sum of input sizes": (lambda g: g.all_to_all_single(ones(4), ones(4), [2, 2], [1, 2]), "input_split_sizes"),
    "number of sizes": (lambda g: g.all_to_all_single(ones(4), ones(4), [4], [2, 2]), "output_split_sizes has 1 entries"),
    "negative size": (lambda g: g.all_to_all_single(ones(4), ones(4), [5, -1], [2, 2]), "has a negative number"),
    "own part": (lambda g: g.all_to_all_single(ones(4), ones(4), [2, 2], [3, 1]), "this rank sends itself 3"),
}  # fmt: skip
WRONG_OTHERS = {
    "op": (lambda g: g.all_reduce(ones(3), "median"), "is not a reduction; use one of SUM"),
    "several ops": (lambda g: g.all_reduce(ones(3), ["sum"]), "is not a reduction"),
    "timeout": (lambda g: g.barrier(timeout=-1), "a timeout is a number of seconds"),
    "object": (lambda g: g.all_gather_object([None] * 2, Unknown()), "of type .*Unknown cannot be sent as plain data"),
}
ALL = {
    f"{kind}: {name}": case
    for kind, cases in (
        ("tensor", WRONG_TENSORS),
        ("rank", WRONG_RANKS),
        ("list", WRONG_LISTS),
        ("split", WRONG_SPLITS),
        ("other", WRONG_OTHERS),
    )
    for name, case in cases.items()
}


NAMES_OF_OPERATIONS = {
    "all_gather_single": "all_gather_into_tensor",
    "gather_single": "gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


class Recording:
    """A group that records the name of the operation that was called."""

    def __init__(self, group):
        self._group = group

    def __getattr__(self, name):
        self.op = NAMES_OF_OPERATIONS.get(name, name)
        return getattr(self._group, name)


async def test_invalid_arguments_are_refused_and_group_stays_usable():
    async with world_of(2) as (zero, one):
        for name, (call, message) in ALL.items():
            recording = Recording(zero)
            with pytest.raises(UsageError) as refused:
                call(recording)
            again = pickle.loads(pickle.dumps(refused.value))
            for error in (refused.value, again):
                assert re.search(message, str(error)), name
                assert str(error).startswith(f"{recording.op} on group 'world', rank 0: "), name
                assert (error.op, error.group, error.rank) == (recording.op, "world", 0)
            async with asyncio.timeout(60):
                total = await asyncio.gather(zero.all_reduce(ones(2)), one.all_reduce(ones(2)))
            assert all(tensor.eq(2).all() for tensor in total), name


WRONG_RANKS_OF_APIS = {
    "reduce": lambda api, g: api.reduce(ones(3), 4, group=g),
    "gather_into_tensor": lambda api, g: api.gather_single(ones(3), None, 4, group=g),
    "recv": lambda api, g: api.irecv(ones(3), 1, group=g, group_src=1),
    "send": lambda api, g: api.isend(ones(3), group=g),
    "isend": lambda api, g: api.P2POp(api.isend, ones(3), 4, g),
    "broadcast_object_list": lambda api, g: api.broadcast_object_list([1], 4, g),
}


@pytest.mark.parametrize("op", WRONG_RANKS_OF_APIS)
@pytest.mark.parametrize("api", [asyncdist, sync], ids=["awaited", "blocking"])
async def test_error_of_an_invalid_rank_names_the_calling_rank(api, op):
    async with world_of(2) as (_, one):
        with pytest.raises(UsageError, match=rf"^{op} on group 'world', rank 1: "):
            WRONG_RANKS_OF_APIS[op](api, one)


async def test_repeated_invalid_call_is_refused_like_the_first(transport):
    """The call is prepared only once."""
    async with world_of(2, transport=transport) as groups:
        await asyncio.gather(*(group.all_reduce(ones(2)) for group in groups))
        with pytest.raises(UsageError, match=r"^all_reduce on group 'world', rank 1: a timeout is"):
            groups[1].all_reduce(ones(2), timeout=-1)
        with pytest.raises(LoopThreadError, match=r"^all_reduce on group 'world', rank 1: wait"):
            groups[1].all_reduce(ones(2), background=False)
        groups[1].close()
        with pytest.raises(NotInitializedError, match=r"^all_reduce on group 'world', rank 1: the group was destroyed"):
            groups[1].all_reduce(ones(2))


async def test_unsupported_tensors_raise_unsupported_error():
    async with world_of(2) as (group, _):
        for name in ("on another device", "sparse", "of bits", "big-endian", "strings", "backwards"):
            with pytest.raises(UnsupportedError):
                WRONG_TENSORS[name][0](group)


async def test_refused_call_does_not_write_tensors():
    async with world_of(2) as (zero, _):
        outputs, row = [torch.zeros(2), torch.zeros(3)], torch.ones(2)
        with pytest.raises(UsageError):
            zero.gather(row, outputs, 0)
        with pytest.raises(UsageError):
            zero.all_reduce(row, "BAND")
        assert row.eq(1).all()
        assert all(output.eq(0).all() for output in outputs)
