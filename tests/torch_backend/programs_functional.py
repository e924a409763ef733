"""Functional collectives, eager and compiled, and those that autograd goes through; run by the teams of conftest.py."""

import functools

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functions
import torch.distributed.nn.functional as differentiable
from toys import numbers, operators


def functional_reductions(rank, world):
    group, results = dist.group.WORLD, []
    for op in ("sum", "avg", "max", "min", "product"):
        tensor = numbers(rank)
        results += [functions.all_reduce(tensor, op, group) * 1, tensor]
    results += [
        functions.reduce_scatter_tensor(numbers(rank, world * 4).view(world * 2, 2), "sum", 0, group) * 1,
        functions.reduce_scatter_tensor(numbers(rank, world * 4).view(2, world * 2), "sum", 1, group) * 1,
    ]
    many = functions.all_reduce_coalesced([numbers(rank), numbers(rank, 3)], "sum", group)
    shares = functions.reduce_scatter_tensor_coalesced(
        [numbers(rank, world * 2), numbers(rank, world * 3)], "sum", [0, 0], group
    )
    return [*results, *(each * 1 for each in (*many, *shares))]


def functional_exchanges(rank, world):
    group = dist.group.WORLD
    sends = [(rank + peer) % 3 for peer in range(world)]
    results = [
        functions.all_gather_tensor(numbers(rank, 6).view(2, 3), 0, group),
        functions.all_gather_tensor(numbers(rank, 6).view(2, 3), 1, group),
        functions.all_gather_tensor(numbers(rank, 6).view(2, 3).t(), 0, group),
        functions.broadcast(numbers(rank), world - 1, group),
        functions.all_to_all_single(numbers(rank, world), None, None, group),
        functions.all_to_all_single(numbers(rank, sum(sends)), sends, sends, group),
        functions.permute_tensor(numbers(rank), [(peer + 1) % world for peer in range(world)], group),
        *functions.all_gather_into_tensor_coalesced([numbers(rank), numbers(rank, 3)], group),
    ]
    return [each * 1 for each in results]


def operators_with_outputs(rank, world):
    """Operators that find the group's methods through the C++ dispatcher."""
    name = dist.group.WORLD.group_name
    output = torch.zeros(world * 5)
    gathered = operators.wait_tensor(operators.all_gather_into_tensor_out(numbers(rank), world, name, out=output))
    in_place = operators.wait_tensor(operators.all_reduce_(numbers(rank), "sum", name))
    announced = operators.wait_tensor(operators.broadcast_(numbers(rank), 1, name))
    return [gathered, output, in_place, announced]


def batches_of_operators(rank, world):
    """Sends and receives in one operator, as in compiled pipelines."""
    name = dist.group.WORLD.group_name
    right, left = (rank + 1) % world, (rank - 1) % world
    received = torch.zeros(5)
    outputs = operators.batch_p2p_ops(["isend", "irecv"], [right, left], [0, 0], [numbers(rank), received], name)
    return [operators.wait_tensor(each) * 1 for each in outputs][1:], received


def differentiable_collectives(rank, world):
    calls = [
        lambda tensor: differentiable.all_reduce(tensor),
        lambda tensor: differentiable.broadcast(tensor, 1),
        lambda tensor: differentiable.reduce(tensor, 0),
        lambda tensor: torch.cat(differentiable.all_gather(tensor)),
        lambda tensor: differentiable.reduce_scatter(torch.zeros(2), list(tensor.view(world, 2).unbind())),
        lambda tensor: differentiable.all_to_all_single(torch.zeros(world * 2), tensor),
        lambda tensor: torch.cat(
            differentiable.all_to_all([torch.zeros(2) for _ in range(world)], list(tensor.view(world, 2).unbind()))
        ),
    ]  # fmt: skip
    results = []
    for number, call in enumerate(calls):
        tensor = numbers(rank, world * 2).requires_grad_()
        output = call(tensor * 1)
        (output * numbers(rank, output.numel())).sum().backward()
        defined = rank == 0 or number != 2  # a reduce leaves the output undefined on other ranks
        results += [output.detach() if defined else None, tensor.grad]
    return results


def _all_functions(tensor, world):
    """Call every functional collective in turn, with few kernels in between, because compiling one takes seconds."""
    group = dist.group.WORLD
    total = functions.all_reduce(tensor * 2, "sum", group)
    gathered = functions.all_gather_tensor(total, 0, group)
    share = functions.reduce_scatter_tensor(gathered, "sum", 0, group)
    exchanged = functions.all_to_all_single(gathered, None, None, group)
    announced = functions.broadcast(share, 1, group)
    largest = functions.all_reduce(announced, "max", group)
    several = functions.all_reduce_coalesced([share, exchanged], "sum", group)
    moved = functions.permute_tensor(tensor, [(peer + 1) % world for peer in range(world)], group)
    return total, gathered, *several, moved, largest + moved


def _compiled(function, rank, world, backend, **options):
    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, **options)
    results = []
    for step in range(2):
        results.append([each * 1 for each in compiled(numbers(rank + step, 4), world)])
        eager = [each * 1 for each in function(numbers(rank + step, 4), world)]
        assert all(torch.allclose(*pair) for pair in zip(results[-1], eager, strict=True)), (results[-1], eager)
    return results


def compiled_ahead_of_time(rank, world):
    return _compiled(_all_functions, rank, world, "aot_eager")


def compiled_by_inductor(rank, world):
    return _compiled(_all_functions, rank, world, "inductor")


def compiled_around_calls(rank, world):
    """The compiler breaks the graph at calls that it cannot rewrite, and does not trace into asyncdist."""
    torch.compiler.reset()
    right, left, group = (rank + 1) % world, (rank - 1) % world, dist.new_group()

    @functools.partial(torch.compile, backend="aot_eager")
    def several(tensor):
        total = tensor + 1
        work = dist.all_reduce(total, async_op=True)
        announced = tensor * 3
        work.wait()
        dist.broadcast(announced, 0, group=group)
        dist.barrier()
        gathered = [torch.zeros_like(tensor) for _ in range(world)]
        dist.all_gather(gathered, announced + rank)
        received = torch.zeros_like(tensor)
        sends = [dist.P2POp(dist.isend, total, right), dist.P2POp(dist.irecv, received, left)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        ranks = [None] * world
        dist.all_gather_object(ranks, rank)
        dist.all_reduce(received, async_op=True).get_future().wait()
        return [total * 2, *gathered, received + sum(ranks)]

    return [several(numbers(rank + step, 4)) for step in range(3)]


def compiled_training(rank, world):
    """Backward of DDP, whose graph is split at its buckets, and of functional collectives."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(3):  # the second forward assigns buckets again
        compiled(numbers(rank, 8).view(2, 4)).square().sum().backward()

    @functools.partial(torch.compile, backend="inductor", fullgraph=True)
    def loss(tensor):
        return functions.all_gather_tensor_autograd(tensor, 0, dist.group.WORLD).sum()

    tensor = numbers(rank, 4).requires_grad_()
    loss(tensor).backward()
    return [parameter.grad for parameter in model.parameters()], tensor.grad
