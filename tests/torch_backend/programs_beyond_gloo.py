"""Operations that asyncdist supports and gloo refuses; run by the teams of conftest.py.

Each program returns pairs of actual and expected results."""

import asyncio
from datetime import timedelta

import torch
import torch.distributed as dist
from toys import numbers, operators


def stacked_outputs(rank, world):
    """Gathered and scattered tensors may have an extra dimension for the ranks."""
    gathered, scattered = torch.zeros(world, 5), torch.zeros(5)
    dist.all_gather_into_tensor(gathered, numbers(rank))
    dist.reduce_scatter_tensor(scattered, numbers(rank, world * 5).view(world, 5))
    total = sum(numbers(peer, world * 5) for peer in range(world))
    return [
        (gathered, torch.stack([numbers(peer) for peer in range(world)])),
        (scattered, total[rank * 5 : rank * 5 + 5]),
    ]


def scaled_sums(rank, world):
    """``PREMUL_SUM``, which FSDP requests from NCCL."""
    tensor = numbers(rank)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    return [(tensor, sum(numbers(peer) for peer in range(world)) * 0.5)]


def together_with_gloo(rank, world):
    """Groups over gloo in the same process, with operators whose kernels this package registers."""
    theirs = dist.new_group(backend="gloo")
    ours, tensor, gathered = numbers(rank), numbers(rank), torch.zeros(world * 5)
    dist.all_reduce(ours)
    dist.all_reduce(tensor, group=theirs)
    dist.all_gather_into_tensor(gathered, tensor, group=theirs)
    dist.monitored_barrier(theirs)
    name = theirs.group_name
    functional = operators.wait_tensor(operators.all_gather_into_tensor(numbers(rank), world, name))
    output, received = torch.zeros(world * 5), torch.zeros(5)
    operators.wait_tensor(operators.all_gather_into_tensor_out(numbers(rank), world, name, out=output))
    peers = [(rank + 1) % world, (rank - 1) % world]
    for each in operators.batch_p2p_ops(["isend", "irecv"], peers, [0, 0], [numbers(rank), received], name):
        operators.wait_tensor(each)
    total = sum(numbers(peer) for peer in range(world))
    return [
        (ours, total),
        (tensor, total),
        (gathered, torch.cat([total] * world)),
        *((each, torch.cat([numbers(peer) for peer in range(world)])) for each in (functional, output)),
        (received, numbers((rank - 1) % world)),
        (dist.get_backend(theirs), "gloo"),
        (dist.get_backend(), "asyncdist"),
    ]


def after_a_group_made_locally(rank, world):
    """A group is created by ranks that created different numbers of groups before; over gloo this hangs."""
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    group, tensor = dist.new_group(), numbers(rank)
    dist.all_reduce(tensor, group=group)
    # Afterwards every rank has created the same number of groups, which groups over gloo require.
    if rank:
        dist.new_group([rank], use_local_synchronization=True)
    return [(tensor, sum(numbers(peer) for peer in range(world)))]


def callbacks_that_block(rank, world):
    """Each callback blocks on a collective of a group of its own, all at the same time."""
    groups = [dist.new_group() for _ in range(6)]

    def reduces_again(number):
        def callback(future):
            tensor = future.value()[0].clone()
            dist.all_reduce(tensor, group=groups[number])
            return tensor

        return callback

    works = [dist.all_reduce(numbers(rank + number, 2000), async_op=True) for number in range(6)]
    futures = [work.get_future().then(reduces_again(number)) for number, work in enumerate(works)]
    due = [sum(numbers(peer + number, 2000) for peer in range(world)) * world for number in range(6)]
    return list(zip([future.wait() for future in futures], due, strict=True))


def _reduces_more(number):
    """Return a callback that blocks on a collective whose size only callbacks with the same number have."""

    def callback(future):
        tensor = torch.cat([future.value()[0], torch.full((number,), 1.0)])
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    return callback


def callbacks_in_order(rank, world):
    """Callbacks call collectives of their group. Some ranks attach them before, some after their works are complete.

    The program's collectives and those of callbacks take turns in another order on each rank.
    """
    numbered, futures = range(12), []
    for number in numbered:
        work = dist.all_reduce(numbers(rank + number), async_op=True)
        if (rank + number) % 2:
            work.wait()
        futures.append(work.get_future().then(_reduces_more(number)).then(lambda future: future.wait() * 2))
        if number % 3 == 0:
            (torch.futures.collect_all(futures) if rank else futures[-1]).wait()
    due = [sum(numbers(peer + number) for peer in range(world)) * world for number in numbered]
    due = [
        torch.cat([each, torch.full((number,), float(world))]) * 2 for number, each in zip(numbered, due, strict=True)
    ]
    return list(zip([future.wait() for future in futures], due, strict=True))


def callbacks_within_callbacks(rank, world):
    """A callback attaches a callback to the work that it has issued; both reduce again."""

    def reduces_twice(future):
        work = dist.all_reduce(future.value()[0].clone(), async_op=True)
        if rank:
            work.wait()
        return work.get_future().then(_reduces_more(2)).wait()

    futures = [dist.all_reduce(numbers(rank), async_op=True).get_future().then(reduces_twice) for _ in range(3)]
    due = torch.cat([sum(numbers(peer) for peer in range(world)) * world**2, torch.full((2,), float(world))])
    return [(future.wait(), due) for future in futures]


def callbacks_of_collected_futures(rank, world):
    """Callbacks of two works together call collectives; some ranks complete the works before, in another order."""

    def reduces_both(number):
        def callback(both):
            tensor = torch.cat([each.value()[0] for each in both.value()] + [torch.full((number,), 1.0)])
            return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

        return callback

    numbered, results = range(12), []
    for number in numbered:
        works = [dist.all_reduce(numbers(rank + number), async_op=True) for _ in range(2)]
        if (rank + number) % 2:
            works[1].wait()
        both = torch.futures.collect_all([work.get_future() for work in works])
        results.append(both.then(reduces_both(number)))
    due = [sum(numbers(peer + number) for peer in range(world)) * world for number in numbered]
    due = [
        torch.cat([each, each, torch.full((number,), float(world))]) for number, each in zip(numbered, due, strict=True)
    ]
    return list(zip([each.wait() for each in results], due, strict=True))


def more_callbacks_than_threads(rank, world):
    """Sixty callbacks are due at the same time, and each blocks on a collective."""
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    works = [dist.all_reduce(numbers(rank), async_op=True) for _ in range(60)]
    futures = [work.get_future().then(_reduces_more(1)) for work in works]
    if rank == 0:
        dist.send(torch.ones(1), 1)
    due = torch.cat([sum(numbers(peer) for peer in range(world)) * world, torch.full((1,), float(world))])
    return [(future.wait(), due) for future in futures]


def callback_that_waits_for_a_later_one(rank, world):
    """It would never return."""
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    reduced = dist.all_reduce(numbers(rank), async_op=True).get_future()
    if rank:
        reduced.wait()
        return [(True, True)]
    later = []
    first = reduced.then(lambda _: later[0].wait())
    later.append(reduced.then(lambda future: future.value()[0]))
    dist.send(torch.ones(1), 1)
    try:
        first.wait()
    except RuntimeError as error:
        return [("runs after it" in str(error), True)]
    return [("no error", "an error")]


def future_of_a_completed_work(rank, world):
    """The future is done as soon as the program learns that the work is."""
    dones = []
    for number in range(60):
        work = dist.all_reduce(numbers(rank), async_op=True)
        future = work.get_future() if number % 2 else None
        if number % 3:
            work.wait()
        else:
            while not work.is_completed():
                pass
        dones.append((future or work.get_future()).done())
    return [(all(dones), True), (len(dones), 60)]


def second_interface(rank, world):
    """Groups that `torch.distributed._dist2` makes, where torch has it."""
    try:
        from torch.distributed import _dist2
    except ImportError:
        return [(True, True)]
    pairs, store = [], dist.distributed_c10d._get_default_store()
    for _ in range(2):
        group = _dist2._BACKENDS["asyncdist"](store, rank, world, timedelta(seconds=20), torch.device("cpu"))
        tensor = numbers(rank)
        with _dist2.process_group(group):
            _dist2.current_process_group().allreduce(tensor, dist.ReduceOp.MAX).wait()
        pairs.append((tensor, torch.stack([numbers(peer) for peer in range(world)]).amax(0)))
        group.shutdown()
    return pairs


def methods_of_the_group(rank, world):
    """Call methods of the group itself, without options."""
    group, mine = dist.group.WORLD, numbers(rank)
    every = torch.cat([numbers(peer) for peer in range(world)])
    total = sum(numbers(peer, 5 * world) for peer in range(world))
    share = total[5 * rank : 5 * rank + 5]
    dealt = torch.stack([numbers(peer, world)[rank] for peer in range(world)])
    group.all_gather_single(gathered := torch.zeros(5 * world), mine).wait()
    group.reduce_scatter_single(scattered := torch.zeros(5), numbers(rank, 5 * world)).wait()
    group.all_to_all_single(exchanged := torch.zeros(world), numbers(rank, world), [], []).wait()
    outputs = [torch.zeros(5 * world), torch.zeros(5 * world)]
    group.all_gather_single_coalesced(outputs, [mine, mine]).wait()
    group.reduce_scatter_single_coalesced([coalesced := torch.zeros(5)], [numbers(rank, 5 * world)]).wait()
    group.allreduce(bare := numbers(rank)).wait()  # as DDP passes it: neither listed nor with options
    return [
        *((gathered_by_all, every) for gathered_by_all in (gathered, *outputs)),
        *((part, share) for part in (scattered, coalesced)),
        (exchanged, dealt),
        (bare, sum(numbers(peer) for peer in range(world))),
    ]


def awaited(rank, world):
    """Asynchronous operations are awaited in coroutines."""

    async def several():
        tensors = [numbers(rank + number, 3000) for number in range(4)]
        await asyncio.gather(*[_awaited(dist.all_reduce(tensor, async_op=True)) for tensor in tensors])
        received = torch.zeros(5)
        sending = dist.isend(numbers(rank), (rank + 1) % world)
        await dist.irecv(received, (rank - 1) % world)
        await sending
        more = [dist.all_reduce(numbers(rank), async_op=True) for _ in range(2)]
        assert await asyncio.wait(more) == (set(more), set())
        for when in (asyncio.FIRST_COMPLETED, asyncio.FIRST_EXCEPTION):
            late = dist.irecv(received, (rank - 1) % world)
            assert await asyncio.wait([late], timeout=0.001) == (set(), {late})
            await dist.barrier(async_op=True)
            sending = dist.isend(numbers(rank), (rank + 1) % world)
            assert await asyncio.wait([late], return_when=when) == ({late}, set())
            await sending
        return [*tensors, received]

    came = asyncio.run(several())
    due = [sum(numbers(peer + number, 3000) for peer in range(world)) for number in range(4)]
    return list(zip(came, [*due, numbers((rank - 1) % world)], strict=True))


async def _awaited(work):
    return await work
