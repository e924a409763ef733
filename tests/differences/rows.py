"""The rows of docs/differences.md: one program each, which says in a few words what came out on asyncdist or on another.

A row runs on two ranks, and each returns its words. `record.py` keeps them, and `page.py` writes the page.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import asyncdist.sync
from asyncdist import store
from asyncdist.rpc import blocking
from tests.support.ports import free_port

nan = float("nan")


@dataclass(frozen=True)
class Side:
    """One rank of two, on asyncdist or on another."""

    ours: bool
    rank: int
    group: Any
    own_group: Any = None

    @property
    def stores(self) -> Any:
        return store if self.ours else dist

    def ddp(self, model: torch.nn.Module) -> Any:
        """Wrap a model in the class of this side."""
        if self.ours:
            return asyncdist.sync.DistributedDataParallel(model, process_group=self.own_group)
        return DistributedDataParallel(model, process_group=self.group)


@dataclass(frozen=True)
class Row:
    """A row of the page. ``program`` returns the words of a rank."""

    area: str
    given: str
    program: Callable[[Side], str]

    @property
    def name(self) -> str:
        return self.program.__name__


ROWS: dict[str, Row] = {}


def row(area: str, given: str) -> Callable[[Callable[[Side], str]], Callable[[Side], str]]:
    """Add a row to a table of the page."""

    def add(program: Callable[[Side], str]) -> Callable[[Side], str]:
        ROWS[program.__name__] = Row(area, given, program)
        return program

    return add


def run(name: str, side: Side) -> str:
    """Return the words of a rank."""
    return ROWS[name].program(side)


def _raised(call: Callable[[], Any]) -> str:
    """Return what a call has raised, in words; "carried" if nothing."""
    try:
        call()
    except Exception as error:
        return f"`{type(error).__name__}`"
    return "carried"


# -- collectives ------------------------------------------------------------------------------------------

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
    words = _raised(lambda: dist.all_reduce(value, dist.ReduceOp.AVG, group=side.group))
    return f"{value.item()}: the sum, divided, truncated towards zero, as NCCL" if words == "carried" else words


@row(COLLECTIVES, "complex tensors in `gather`")
def complex_gather(side: Side) -> str:
    value = torch.full((2,), complex(side.rank, 1))
    into = [torch.zeros_like(value) for _ in range(2)] if side.rank == 0 else None
    return _raised(lambda: dist.gather(value, into, 0, group=side.group))


@row(COLLECTIVES, "a broadcast of float8")
def narrow_floats(side: Side) -> str:
    return _raised(lambda: dist.broadcast(torch.ones(2).to(torch.float8_e4m3fn), 0, group=side.group))


@row(COLLECTIVES, "a sum of 16-bit unsigned integers")
def unsigned_integers(side: Side) -> str:
    return _raised(lambda: dist.all_reduce(torch.ones(2, dtype=torch.uint16), group=side.group))


@row(COLLECTIVES, "tensors on `meta`")
def meta_tensor(side: Side) -> str:
    words = _raised(lambda: dist.all_reduce(torch.ones(2, device="meta"), group=side.group))
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


# -- stores -----------------------------------------------------------------------------------------------

STORES = "Stores"


def _tcp_store(side: Side) -> Any:
    limit = timedelta(seconds=10)
    if side.ours:
        return store.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)


def _closed(client: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.closing(client) if hasattr(client, "close") else contextlib.nullcontext(client)


@row(STORES, "`HashStore.wait` for an absent key with a negative timeout")
def negative_timeout(side: Side) -> str:
    with _closed(side.stores.HashStore()) as client:
        words = _raised(lambda: client.wait(["absent"], timedelta(seconds=-1)))
    return words if side.ours else f"looks once: {words}"


@row(STORES, "`TCPStore.compare_set` of an absent key with an expected value")
def compare_set_of_an_absent_key(side: Side) -> str:
    with _closed(_tcp_store(side)) as client:
        answer = client.compare_set("absent", "old", "new")
        stored = "and stores nothing" if not client.check(["absent"]) else "and stores it"
        return f"returns `{bytes(answer)!r}`, {stored}"


@row(STORES, "`set_timeout` of a store below a `PrefixStore` that was made before")
def timeout_of_a_prefix(side: Side) -> str:
    with _closed(side.stores.HashStore()) as client:
        prefixed = side.stores.PrefixStore("prefix", client)
        before = prefixed.timeout
        client.set_timeout(timedelta(seconds=17))
        return "does not change it: it has its own" if prefixed.timeout == before else "changes both"


@row(STORES, "`HashStore.add` to an empty text")
def add_to_a_text(side: Side) -> str:
    with _closed(side.stores.HashStore()) as client:
        client.set("text", "")
        words = _raised(lambda: client.add("text", 2))
        return f"counts it as 0: `{client.get('text')!r}`" if words == "carried" else f"{words}; the text stays"


@row(STORES, "`TCPStore.set` of 9 MiB")
def large_value(side: Side) -> str:
    with _closed(_tcp_store(side)) as client:
        words = _raised(lambda: (client.set("large", "v" * (9 << 20)), client.get("large")))
        return "stores it" if words == "carried" else f"drops the connection: {words}"


@row(STORES, "`FileStore.delete_key` of an absent key")
def delete_of_an_absent_key(side: Side) -> str:
    with tempfile.TemporaryDirectory() as folder, _closed(side.stores.FileStore(f"{folder}/store", 1)) as client:
        return f"`{client.delete_key('absent')}`"


# -- data-parallel training -------------------------------------------------------------------------------

TRAINING = "Data-parallel training"


def _linear() -> torch.nn.Linear:
    linear = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(linear.weight)
    return linear


def _averaged(side: Side, gradient: torch.Tensor, average: float) -> str:
    return "averages" if abs(gradient.item() - average) < 1e-6 else "each rank keeps its own gradient"


@row(TRAINING, "`model.module.double()` after wrapping")
def double_after_wrapping(side: Side) -> str:
    model = side.ddp(_linear())
    model.module.double()
    model(torch.tensor([[side.rank + 1.0]], dtype=torch.float64)).sum().backward()
    return _averaged(side, model.module.weight.grad, 1.5)


@row(TRAINING, "a parameter replaced after wrapping")
def replaced_parameter(side: Side) -> str:
    model = side.ddp(_linear())
    model.module.weight = torch.nn.Parameter(torch.ones(1, 1))
    words = _raised(lambda: model(torch.tensor([[side.rank + 1.0]])).sum().backward())
    return _averaged(side, model.module.weight.grad, 1.5) if words == "carried" else f"{words} names the parameter"


@row(TRAINING, "two forwards, then two backwards")
def two_forwards(side: Side) -> str:
    model = side.ddp(_linear())
    losses = [model(torch.tensor([[side.rank + 1.0 + number]])).sum() for number in range(2)]
    found = []
    for loss in losses:
        model.module.weight.grad = None
        loss.backward()
        found.append(model.module.weight.grad.item())
    return "averages both" if found == [1.5, 2.5] else "the second backward is not averaged"


# -- remote calls -----------------------------------------------------------------------------------------

CALLS = "Remote calls"


def _fails() -> None:
    raise KeyError("key")


@row(CALLS, "a remote function raises `KeyError`; `except KeyError` around `rpc_sync`")
def key_error(side: Side) -> str:
    """The rank calls itself, so that both sides need no second process."""
    if side.rank:
        return ""
    if side.ours:
        options: Any = blocking.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{free_port()}", rpc_timeout=60.0
        )
        api: Any = blocking
    else:
        import torch.distributed.rpc as api

        options = api.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}", rpc_timeout=60.0)
    api.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        api.rpc_sync("alone", _fails)
    except KeyError:
        return "catches it"
    except Exception as error:
        return f"does not catch it: `{type(error).__name__}`"
    finally:
        api.shutdown()
    return "no error"
