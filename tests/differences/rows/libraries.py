"""Rows on what stands above and beside the collectives: DTensor, the flight recorder, remote calls."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Shard, distribute_tensor

from asyncdist.kernel.tracing.recorder import recorders
from asyncdist.rpc import blocking
from tests.differences.rows.row import Side, raised, row
from tests.support.ports import free_port

TENSORS = "DTensor"


def _mesh(side: Side) -> DeviceMesh:
    return DeviceMesh.from_group(side.group, "cpu")


@row(TENSORS, "`item()` of the sum of a sharded tensor")
def item_of_a_sum(side: Side) -> str:
    total = distribute_tensor(torch.tensor([1.0, 2.0]), _mesh(side), [Shard(0)]).sum()
    assert total.full_tensor().item() == 3
    return "each rank's own part" if total.item() == side.rank + 1 else "the sum"


@row(TENSORS, 'the integers 1 and -4 with the placement `Partial("avg")`, as a full tensor')
def average_of_integers_in_parts(side: Side) -> str:
    part = DTensor.from_local(torch.tensor([-4 if side.rank else 1]), _mesh(side), [Partial("avg")])
    found: list[torch.Tensor] = []
    words = raised(lambda: found.append(part.full_tensor()))
    return f"{found[0].item()}: the sum, divided, truncated towards zero" if words == "carried" else words


@row(TENSORS, "`max()` of a sharded tensor with a NaN")
def nan_of_one_shard(side: Side) -> str:
    found = []
    for owner in range(2):
        values = torch.zeros(2)
        values[owner] = float("nan")
        greatest = distribute_tensor(values, _mesh(side), [Shard(0)]).max().full_tensor()
        found.append("NaN" if greatest.isnan() else "the other value")
    return found[0] if found[0] == found[1] else f"{found[0]} if rank 0 has it, {found[1]} if rank 1 has it"


RECORDER = "Flight recorder"


@row(RECORDER, "the state of a complete `all_reduce`")
def state_in_the_recorder(side: Side) -> str:
    dist.all_reduce(torch.ones(7), group=side.group)
    if side.ours:
        newest = max((entry for each in recorders() for entry in each), key=lambda entry: entry.issued)
        return f"`{newest.state}`"
    entries = pickle.loads(_dump_fr_trace())["entries"]
    return f"`{next(entry['state'] for entry in reversed(entries) if entry['input_sizes'] == [[7]])}`"


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
