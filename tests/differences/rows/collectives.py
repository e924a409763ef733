"""Rows on collectives."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.differences.rows.row import Side, raised, row

nan = float("nan")

COLLECTIVES = "Collectives over gloo"


@row(COLLECTIVES, "eight sums of `True`")
def sums_of_bools(side: Side) -> str:
    flag = torch.ones(1, dtype=torch.bool)
    for _ in range(8):
        dist.all_reduce(flag, group=side.group)
    return f"`{bool(flag.view(torch.uint8).item())}`"


@row(COLLECTIVES, "MAX of values of which one is NaN")
def nan_of_one_rank(side: Side) -> str:
    found = []
    for owner in range(2):
        value = torch.tensor([nan if side.rank == owner else 0.0])
        dist.all_reduce(value, dist.ReduceOp.MAX, group=side.group)
        found.append("NaN" if value.isnan() else "the other value")
    return found[0] if found[0] == found[1] else f"{found[0]} if rank 0 has it, {found[1]} if rank 1 has it"


@row(COLLECTIVES, "a broadcast into a transposed matrix")
def transposed(side: Side) -> str:
    matrix = torch.arange(6.0).reshape(2, 3) if side.rank == 0 else torch.zeros(3, 2).t()
    dist.broadcast(matrix, src=0, group=side.group)
    if side.rank == 0:
        return ""
    return (
        "the values of the source"
        if torch.equal(matrix, torch.arange(6.0).reshape(2, 3))
        else "numbers in wrong places"
    )


@row(COLLECTIVES, "a sum of a lazily negated view, such as the imaginary part of a conjugate")
def negated_view(side: Side) -> str:
    imaginary = torch.tensor([5 + 1j, 5 + 2j]).conj().imag
    dist.all_reduce(imaginary, group=side.group)
    return "the sum" if torch.equal(imaginary, torch.tensor([-2.0, -4.0])) else "unchanged, without an error"


@row(COLLECTIVES, "a sum into columns of a matrix")
def columns(side: Side) -> str:
    whole = torch.zeros(2, 3)
    part = whole[:, 1:].fill_(side.rank + 1.0)
    dist.all_reduce(part, group=side.group)
    return "the sums" if torch.equal(whole, torch.tensor([[0.0, 3.0, 3.0]] * 2)) else "other numbers"


@row(COLLECTIVES, "`reduce` with AVG, on other ranks than the destination")
def reduce_average(side: Side) -> str:
    values = torch.full((3,), side.rank + 1.0)
    dist.reduce(values, 0, dist.ReduceOp.AVG, group=side.group)
    return (
        "" if side.rank == 0 else "their tensors are unchanged" if values[0] == 2 else "their tensors are divided, too"
    )


@row(COLLECTIVES, "AVG of 40,000 and 40,000 in float16")
def average_of_large_values(side: Side) -> str:
    value = torch.tensor([40_000.0], dtype=torch.float16)
    dist.all_reduce(value, dist.ReduceOp.AVG, group=side.group)
    return f"{value.item():,.0f}"


@row(COLLECTIVES, "AVG of the integers 1 and -4")
def average_of_integers(side: Side) -> str:
    value = torch.tensor([-4 if side.rank else 1])
    words = raised(lambda: dist.all_reduce(value, dist.ReduceOp.AVG, group=side.group))
    return f"{value.item()}: the sum, divided, truncated towards zero, as NCCL" if words == "carried" else words


@row(COLLECTIVES, "complex tensors in `gather`")
def complex_gather(side: Side) -> str:
    value = torch.full((2,), complex(side.rank, 1))
    into = [torch.zeros_like(value) for _ in range(2)] if side.rank == 0 else None
    return raised(lambda: dist.gather(value, into, 0, group=side.group))


@row(COLLECTIVES, "a broadcast of float8")
def narrow_floats(side: Side) -> str:
    return raised(lambda: dist.broadcast(torch.ones(2).to(torch.float8_e4m3fn), 0, group=side.group))


@row(COLLECTIVES, "a sum of 16-bit unsigned integers")
def unsigned_integers(side: Side) -> str:
    return raised(lambda: dist.all_reduce(torch.ones(2, dtype=torch.uint16), group=side.group))


@row(COLLECTIVES, "tensors on `meta`")
def meta_tensor(side: Side) -> str:
    words = raised(lambda: dist.all_reduce(torch.ones(2, device="meta"), group=side.group))
    return "the call returns at once, and sends nothing" if words == "carried" else f"{words} names the device"


@row(COLLECTIVES, "`is_success()` of a pending work")
def success_of_a_pending_work(side: Side) -> str:
    value = torch.ones(1)
    if side.rank == 1:
        dist.recv(torch.zeros(1), src=0, group=side.group)
    work = dist.all_reduce(value, async_op=True, group=side.group)
    found = work.is_success() if side.rank == 0 else None
    if side.rank == 0:
        dist.send(torch.zeros(1), dst=1, group=side.group)
    work.wait()
    return "" if found is None else f"`{found}`"


@row(COLLECTIVES, "an empty `all_reduce`, while the other rank has not called it")
def empty_all_reduce(side: Side) -> str:
    if side.rank == 1:
        dist.recv(torch.zeros(1), src=0, group=side.group)
    work = dist.all_reduce(torch.zeros(0), async_op=True, group=side.group)
    words = ""
    if side.rank == 0:
        until = time.monotonic() + 0.2
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.001)
        words = "is complete" if work.is_completed() else "waits for it"
        dist.send(torch.zeros(1), dst=1, group=side.group)
    work.wait()
    return words


@row(COLLECTIVES, "the version counter of a tensor that a collective has changed")
def version_counter(side: Side) -> str:
    value = torch.ones(1)
    version = value._version
    dist.all_reduce(value, group=side.group)
    return "moves" if value._version > version else "does not move, so autograd does not notice"


@row(COLLECTIVES, "a sum of 448 and 448 in float8_e4m3fn, whose largest value is 448")
def sum_beyond_float8(side: Side) -> str:
    value = torch.tensor([448.0]).to(torch.float8_e4m3fn)
    words = raised(lambda: dist.all_reduce(value, group=side.group))
    return f"{value.item():g}, as torch converts 896" if words == "carried" else words


@row(COLLECTIVES, "one rank has an error for its operation, and goes on with its next `all_reduce`", spoils_ranks=True)
def refused_on_one_rank(side: Side) -> str:
    value = torch.ones(1)
    if side.rank == 1:
        assert raised(lambda: dist.all_reduce(value, dist.ReduceOp.BAND, group=side.group)) != "carried"
        value.fill_(10)
    work = dist.all_reduce(value, group=side.group, async_op=True)
    words = raised(lambda: work.wait(timedelta(seconds=20 if side.ours else 0.5)))
    if words != "carried":
        return "both ranks wait until their timeout"
    return f"the other rank takes that call for this one: both have {value.item():g}"


@row(COLLECTIVES, "`wait(timeout)` that runs out", spoils_ranks=True)
def wait_that_runs_out(side: Side) -> str:
    store = dist.distributed_c10d._get_default_store()
    found = []
    for name in ("collective", "receive"):
        value = torch.full((1,), side.rank + 1.0)
        if side.rank == 0:
            is_receive = name == "receive"
            work = (
                dist.irecv(value, 1, side.group)
                if is_receive
                else dist.all_reduce(value, group=side.group, async_op=True)
            )
            assert raised(lambda work=work: work.wait(timedelta(milliseconds=50))) != "carried"
            store.set(name, "is over")
            words = raised(work.wait)
            found.append(f"a {name} goes on" if words == "carried" else f"a {name} fails for good, with its connection")
        else:
            store.wait([name])
            raised(
                lambda name=name, value=value: (
                    dist.send(value, 0, side.group) if name == "receive" else dist.all_reduce(value, group=side.group)
                )
            )
    return "; ".join(found)


@row(COLLECTIVES, "an `all_reduce` after the process of the other rank was killed", spoils_ranks=True)
def lost_peer(side: Side) -> str:
    if side.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1), group=side.group)
    except Exception as error:
        is_named = "rank 1" in str(error)
        return f"`{type(error).__name__}` {'names the rank' if is_named else 'has a network address, and no rank'}"
    return "no error"
