"""Sends, receives and groups of torch.distributed; run by the teams of conftest.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from toys import numbers

# -- point to point ----------------------------------------------------------------------------------


def send_and_receive(rank, world):
    """Around the ring, blocking and asynchronous, with several dtypes, sizes and layouts."""
    right, left, results = (rank + 1) % world, (rank - 1) % world, []
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64):
        for count in (0, 1, 70_000):
            received = torch.zeros(count, dtype=dtype)
            sending = dist.isend(numbers(rank, count, dtype), right)
            assert dist.recv(received, left) == left
            sending.wait()
            results.append(received)
    return results


def tags(rank, world):
    """A receive takes the message of its tag, whatever the order of the sends."""
    if rank == 0:
        sends = [dist.isend(numbers(tag), 1, tag=tag) for tag in (7, 3, 2**20)]
        for send in sends:
            send.wait()
    received = [torch.zeros(5) for _ in range(3)]
    if rank == 1:
        for tensor, tag in zip(received, (3, 2**20, 7), strict=True):
            dist.recv(tensor, 0, tag=tag)
    return received


def from_any_source(rank, world):
    """Rank 0 receives from any source and learns the sender."""
    if rank:
        dist.send(numbers(rank), 0, tag=4)
        return "sent"
    by_source = {}
    for _ in range(world - 1):
        received = torch.zeros(5)
        source = dist.recv(received, tag=4)
        by_source[source] = received
    assert sorted(by_source) == list(range(1, world))
    return [by_source[source] for source in sorted(by_source)]


def from_any_source_in_a_group(rank, world):
    """The sender is reported as a global rank, as in every public function."""
    members = list(range(world))[::-1][:-1] or [0]
    group = dist.new_group(members)
    if rank not in members or len(members) == 1:
        return "not in it"
    receiver = members[-1]
    if rank != receiver:
        dist.send(numbers(rank), receiver, group=group)
        return "sent"
    sources = [dist.recv(torch.zeros(5), group=group) for _ in members[1:]]
    return sorted(sources)


def batches(rank, world):
    right, left = (rank + 1) % world, (rank - 1) % world
    received = [torch.zeros(5), torch.zeros(2, 3)]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, numbers(rank), right),
            dist.P2POp(dist.irecv, received[0], left),
            dist.P2POp(dist.irecv, received[1], left, tag=1),
            dist.P2POp(dist.isend, numbers(10 * rank, 6).view(2, 3), right, tag=1),
        ]
    )
    for work in works:
        work.wait()
    return received


def by_group_rank(rank, world):
    """``group_src`` and ``group_dst`` are ranks in the group."""
    members = sorted({0, world - 1})
    group = dist.new_group(members)
    results = {"rank": dist.get_rank(group), "size": dist.get_world_size(group)}
    if rank in members:
        mine, received = dist.get_rank(group), torch.zeros(5)
        if mine == 0:
            dist.send(numbers(rank), group=group, group_dst=1)
        else:
            results["source"] = dist.recv(received, group=group, group_src=0)
        announced = numbers(rank)
        dist.broadcast(announced, group=group, group_src=1)
        results |= {
            "received": received,
            "announced": announced,
            "ranks": [dist.get_global_rank(group, 1), dist.get_group_rank(group, world - 1)],
            "members": dist.get_process_group_ranks(group),
        }
    return results


# -- groups ------------------------------------------------------------------------------------------


def _everything(group, members, rank):
    """Return the results of several collectives in a group."""
    size, mine = len(members), dist.get_rank(group)
    total = numbers(rank)
    dist.all_reduce(total, group=group)
    gathered = torch.zeros(size * 5)
    dist.all_gather_into_tensor(gathered, numbers(rank), group=group)
    share = torch.zeros(2)
    dist.reduce_scatter_tensor(share, numbers(rank, 2 * size), group=group)
    exchanged = torch.zeros(size)
    dist.all_to_all_single(exchanged, numbers(rank, size), group=group)
    announced = numbers(rank)
    dist.broadcast(announced, members[-1], group=group)
    reduced = numbers(rank)
    dist.reduce(reduced, members[0], group=group)
    objects = [None] * size
    dist.all_gather_object(objects, f"global {rank} is {mine}", group=group)
    dist.barrier(group=group)
    dist.monitored_barrier(group=group)
    return [mine, total, gathered, share, exchanged, announced, reduced if mine == 0 else None, objects]


def in_groups(rank, world):
    """Groups of all ranks, of one rank, of every second rank, and of the last two ranks."""
    results = []
    for members in (list(range(world)), [1], list(range(0, world, 2)), [world - 2, world - 1]):
        group = dist.new_group(members)
        if rank in members:
            assert dist.get_backend(group) == dist.get_backend()
            results.append(_everything(group, members, rank))
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            results.append([dist.get_rank(group), dist.get_world_size(group)])
    return results


def outside_a_group(rank, world):
    """Collectives of a group do nothing on other ranks, except for a warning."""
    group = dist.new_group([0])
    tensor = numbers(rank)
    if rank:
        assert dist.all_reduce(tensor, group=group) is None
        assert dist.all_gather([torch.zeros(5)], tensor, group=group) is None
    return tensor


def subgroups(rank, world):
    mine, made = dist.new_subgroups(2)
    first = _everything(mine, dist.get_process_group_ranks(mine), rank)
    crossed, _ = dist.new_subgroups_by_enumeration([[0, world - 1], list(range(1, world - 1))][: 1 + (world > 2)])
    return len(made), first, _everything(crossed, dist.get_process_group_ranks(crossed), rank)


def groups_made_locally(rank, world):
    """Only members create the group. torch 2.15 names groups by the number of groups that a rank created."""
    members = [world - 2, world - 1] if rank >= world - 2 else [rank]
    group = dist.new_group(members, use_local_synchronization=True)
    return _everything(group, members, rank)


def destroyed_in_any_order(rank, world):
    """Each rank destroys its groups in another order; the remaining groups stay usable."""
    groups = [dist.new_group() for _ in range(3)]
    _everything(groups[0], list(range(world)), rank)
    for number in range(2) if rank % 2 else reversed(range(2)):
        dist.destroy_process_group(groups[number])
    errors = []
    for _ in range(2):
        try:
            dist.destroy_process_group(groups[0])
        except ValueError as error:
            errors.append(str(error))
    return errors, _everything(groups[2], list(range(world)), rank), _everything(None, list(range(world)), rank)


def names(rank, world):
    group = dist.new_group(group_desc="weights")
    return {
        "description": group.group_desc,
        "default": dist.group.WORLD.group_desc,
        "ranks": [dist.group.WORLD.rank(), group.rank()],
        "sizes": [dist.group.WORLD.size(), group.size()],
        "distinct": group.group_name != dist.group.WORLD.group_name,
        "known": dist.distributed_c10d._resolve_process_group(group.group_name) is group,
    }


def sequence_numbers(rank, world):
    """A group counts its own collectives."""
    group, counts = dist.new_group(), []
    for _ in range(3):
        dist.all_reduce(numbers(rank), group=group)
        counts.append(group._get_sequence_number_for_group())
    other = dist.new_group()
    dist.barrier(group=other)
    return [*counts, other._get_sequence_number_for_group() > 0]
