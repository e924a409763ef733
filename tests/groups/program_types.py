"""A program for type checkers, which never runs: what they know about the results, and which calls they reject.

mypy checks it with the product, and reports each ``type: ignore`` of a line that has no error.
"""

from __future__ import annotations

import asyncio
from typing import Any, assert_type

import numpy as np
import torch
from torch.nn import Parameter

import asyncdist as dist
import asyncdist.sync as blocking
from asyncdist import Group, Work

Tensors = list[torch.Tensor]


async def awaited(tensor: torch.Tensor, tensors: Tensors, parameter: Parameter, array: np.ndarray[Any, Any]) -> None:
    assert_type(dist.all_reduce(tensor), Work[torch.Tensor])
    assert_type(await dist.all_reduce(tensor), torch.Tensor)
    assert_type(await dist.all_reduce(parameter, dist.ReduceOp.AVG), Parameter)
    assert_type(await dist.all_reduce(array), np.ndarray[Any, Any])
    assert_type(await dist.all_reduce_coalesced(tensors), Tensors)
    assert_type(await dist.reduce(tensor, 0), torch.Tensor)
    assert_type(await dist.broadcast(tensor, src=0), torch.Tensor)
    assert_type(await dist.all_gather(tensors, tensor), Tensors)
    assert_type(await dist.all_gather_into_tensor(tensor, array), torch.Tensor)
    assert_type(await dist.all_gather_coalesced([tensors], tensors), list[Tensors])
    assert_type(await dist.gather(tensor, tensors, 0), Tensors | None)
    assert_type(await dist.gather_into_tensor(tensor, tensor, 0), torch.Tensor | None)
    assert_type(await dist.scatter(tensor, tensors), torch.Tensor)
    assert_type(await dist.reduce_scatter(tensor, tensors), torch.Tensor)
    assert_type(await dist.reduce_scatter_tensor(tensor, tensor), torch.Tensor)
    assert_type(await dist.all_to_all(tensors, tensors), Tensors)
    assert_type(await dist.all_to_all_single(tensor, tensor), torch.Tensor)
    assert_type(await dist.all_gather_object([None], "object"), list[Any])
    assert_type(dist.barrier(), Work[None])
    assert_type(dist.isend(tensor, 1), Work[None])
    assert_type(await dist.recv(tensor), int)
    assert_type(dist.irecv(tensor).result(), int)
    assert_type(dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)]), list[Work[Any]])


async def in_tasks(tensor: torch.Tensor) -> None:
    assert_type(await asyncio.create_task(dist.all_reduce(tensor)), torch.Tensor)
    async with asyncio.TaskGroup() as tasks:
        assert_type(tasks.create_task(dist.recv(tensor)), asyncio.Task[int])
    assert_type(await asyncio.gather(dist.barrier(), dist.all_reduce(tensor)), tuple[None, torch.Tensor])


async def reduced(group: Group, tensor: torch.Tensor, tensors: Tensors, op: dist.ReduceOp) -> None:
    await dist.all_reduce(tensor, op)
    await dist.all_reduce(tensor, "avg")
    await dist.all_reduce(tensor, dist.premul_sum(0.5))
    await dist.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    await dist.reduce(tensor, 0, torch.distributed.ReduceOp.SUM)
    await dist.reduce_scatter(tensor, tensors, "MIN")
    await group.all_reduce(tensor, torch.distributed.ReduceOp.AVG)
    await group.reduce_scatter_single(tensor, tensor, "sum")
    blocking.all_reduce(tensor, torch.distributed.ReduceOp.BAND)
    blocking.reduce_scatter_tensor(tensor, tensor, "bxor")
    assert_type(blocking.all_reduce_coalesced(tensors, "max", async_op=True), Work[Tensors])


async def of_a_group(group: Group, tensor: torch.Tensor, tensors: Tensors) -> None:
    assert_type(await group.all_reduce(tensor), torch.Tensor)
    assert_type(group.all_gather(tensors, tensor, timeout=1.0).result(), Tensors)
    assert_type(group.all_reduce(tensor).get_future(), torch.futures.Future[torch.Tensor])
    assert_type(await group.recv_object_list([None]), int)
    of_any_value: Work = group.broadcast(tensor, 0)
    of_tensors: Work[torch.Tensor] = group.broadcast(Parameter(tensor), 0)
    await of_any_value
    await of_tensors


async def of_groups(group: Group, tensor: torch.Tensor) -> None:
    assert_type(dist.group.WORLD, Group)
    assert_type(dist.new_group(), Group)
    assert_type(group.new_group(), Group)
    assert_type(dist.new_group([0]), Group | dist.NonMember)
    assert_type(group.new_group([0]), Group | dist.NonMember)
    assert_type(dist.new_subgroups(2), tuple[Group, list[Group | dist.NonMember]])
    assert_type(group.split_group([[0]]), Group | None)
    mine = blocking.new_group([0, 1], group_desc="first")
    await dist.all_reduce(tensor, group=mine)
    if mine is not dist.GroupMember.NON_GROUP_MEMBER:
        await mine.all_reduce(tensor)
    other, _ = group.new_subgroups_by_enumeration([[0], [1]])
    if isinstance(other, Group):
        await other.all_reduce(tensor)
    await mine.all_reduce(tensor)  # type: ignore[union-attr]


def blocked(tensor: torch.Tensor, tensors: Tensors, flag: bool) -> None:
    blocking.all_reduce(tensor)
    blocking.barrier()
    assert_type(blocking.all_reduce(tensor, async_op=True), Work[torch.Tensor])
    assert_type(blocking.all_reduce(tensor, async_op=flag), Work[torch.Tensor] | None)
    assert_type(blocking.all_gather(tensors, tensor, async_op=True), Work[Tensors])
    assert_type(blocking.reduce_scatter_tensor(tensor, tensor, async_op=True).result(), torch.Tensor)
    assert_type(blocking.isend(tensor, 1), Work[None])
    assert_type(blocking.recv(tensor), int)


async def wrong(group: Group, tensor: torch.Tensor, tensors: Tensors) -> None:
    await dist.all_reduce(tensors)  # type: ignore[type-var]
    await dist.all_reduce(1.0)  # type: ignore[type-var]
    await dist.all_gather(tensor, tensor)  # type: ignore[type-var]
    await dist.broadcast(tensor, src="0")  # type: ignore[arg-type]
    await dist.all_reduce(tensor, "mean")  # type: ignore[arg-type]
    await dist.all_reduce(tensor, 1)  # type: ignore[arg-type]
    await dist.reduce(tensor, 0, torch.distributed.ReduceOp)  # type: ignore[arg-type]
    await group.reduce_scatter(tensor, tensors, None)  # type: ignore[arg-type]
    await dist.all_reduce(tensor, axis=0)  # type: ignore[call-arg]
    await group.all_reduce(tensors)  # type: ignore[type-var]
    await group.all_reduce(tensor, timeout="soon")  # type: ignore[arg-type]
    blocking.all_reduce(tensors)  # type: ignore[call-overload]
    blocking.all_reduce(tensor, "mean")  # type: ignore[call-overload]
    number: int = await dist.all_reduce(tensor)  # type: ignore[assignment]
    work: Work[torch.Tensor] = blocking.all_reduce(tensor)  # type: ignore[assignment]
    print(number, work)
