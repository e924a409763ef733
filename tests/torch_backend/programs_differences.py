"""What docs/differences.md says of asyncdist where gloo gives another result; run by the teams of conftest.py.

Each program returns pairs of actual and expected results. The scripts in findings/ show what gloo does."""

import torch
import torch.distributed as dist

nan = float("nan")


def sums_of_bools(rank, world):
    """True stays True, as a byte of 1."""
    flag = torch.ones(1, dtype=torch.bool)
    for _ in range(8):
        dist.all_reduce(flag)
    return [(flag.view(torch.uint8).item(), 1)]


def nan_of_any_rank(rank, world):
    """MAX and MIN keep it, whichever rank has it, in every element."""
    pairs = []
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        for owner in range(world):
            for size in (1, 100_000):
                values = torch.full((size,), nan if rank == owner else 0.0)
                dist.all_reduce(values, op)
                pairs.append((bool(values.isnan().all()), True))
    return pairs


def layouts(rank, world):
    """Values arrive in their places, whatever the strides on either side."""
    whole = torch.zeros(4, 4)
    part = whole[:, :2].fill_(1.0)
    dist.all_reduce(part)
    matrix = torch.arange(6.0).reshape(2, 3) if rank == 0 else torch.zeros(3, 2).t()
    dist.broadcast(matrix, src=0)
    columns = torch.tensor([[world, world, 0.0, 0.0]] * 4)
    return [(whole, columns), (matrix, torch.arange(6.0).reshape(2, 3))]


def negated_view(rank, world):
    """A tensor that torch negates lazily is summed."""
    imaginary = torch.tensor([5 + 1j, 5 + 2j]).conj().imag
    dist.all_reduce(imaginary)
    return [(imaginary, torch.tensor([-1.0, -2.0]) * world)]


def reduce_leaves_the_others(rank, world):
    """Only the destination's tensor changes."""
    pairs = []
    for op, due in ((dist.ReduceOp.SUM, sum(range(1, world + 1))), (dist.ReduceOp.AVG, (world + 1) / 2)):
        values = torch.full((3,), rank + 1.0)
        dist.reduce(values, dst=0, op=op)
        pairs.append((values, torch.full((3,), float(rank + 1 if rank else due))))
    return pairs


def average_of_large_values(rank, world):
    """What fits is averaged without an overflow."""
    value = torch.tensor([40_000.0], dtype=torch.float16)
    dist.all_reduce(value, dist.ReduceOp.AVG)
    return [(value.item(), 40_000.0)]


def complex_and_narrow(rank, world):
    """Complex tensors are gathered on one rank; float8 and 16-bit unsigned integers travel."""
    value = torch.full((2,), complex(rank, 1))
    gathered = [torch.zeros_like(value) for _ in range(world)] if rank == 0 else None
    dist.gather(value, gathered, dst=0)
    narrow = [torch.full((2,), rank + 1).to(dtype) for dtype in (torch.float8_e4m3fn, torch.uint16)]
    for each in narrow:
        dist.broadcast(each, src=0)
    due = [torch.full((2,), complex(peer, 1)) for peer in range(world)]
    return [*zip(gathered or (), due, strict=False), *((each.float(), torch.ones(2)) for each in narrow)]


def success_of_a_pending_work(rank, world):
    """A work is successful when it is complete; the version counters of autograd say that a tensor has changed."""
    value = torch.ones(1)
    if rank:
        dist.recv(torch.zeros(1), src=0)
    version = value._version
    work = dist.all_reduce(value, async_op=True)
    before = work.is_success() if rank == 0 else False
    if rank == 0:
        for peer in range(1, world):
            dist.send(torch.zeros(1), dst=peer)
    work.wait()
    return [(before, False), (work.is_success(), True), (value._version > version, True)]
