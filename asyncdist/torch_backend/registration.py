"""Registration with ``torch.distributed.Backend.register_backend``, the factory that torch then calls, and two operators.

The package registers the back end when it is imported. torch calls `make_backend` in ``init_process_group`` and
``new_group``. `asyncdist.cli.bench.contenders.null_backend` registers a second back end here.

Below torch 2.14, the kernels of two operators of ``_c10d_functional`` require a back end written in C++. Those here serve
process groups of every back end, because torch selects a kernel by the tensor's device.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as torch_distributed

from asyncdist.base.callables import AnyFunction
from asyncdist.base.deadline import seconds
from asyncdist.environment import TorchHooks
from asyncdist.groups import Group, World
from asyncdist.kernel import c10d_private
from asyncdist.kernel.tracing.recorder import recorders
from asyncdist.torch_backend.backend import Backend, open_through
from asyncdist.torch_backend.process_group import ObservedProcessGroup, ProcessGroup, group_of
from asyncdist.torch_backend.torch_group import HAS_PYTHON_BACKENDS, NAME, NoGroupYet, TorchGroup

_numbers_alone = itertools.count()
_names: set[str] = set()
"""The back ends that are registered here."""
_dumped: list[int] = []
"""The rank of this process, once it has written torch's flight recorder into a file."""


def register_backend() -> None:
    """Make ``"asyncdist"`` a back end of torch.distributed. Idempotent."""
    add_backend(NAME, make_backend, ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"])
    # ``torch.distributed._dist2``, which some releases of torch have.
    second = c10d_private.dist2
    if second is not None and NAME not in second._BACKENDS:
        second.register_backend(NAME, _make_alone)


def add_backend(name: str, maker: AnyFunction, devices: Sequence[str]) -> None:
    """Register ``maker``, a function like `make_backend`, as the factory of the back end ``name``. Idempotent."""
    backends: Any = torch_distributed.Backend
    _names.add(name)
    if name.upper() not in backends._plugins:
        backends.register_backend(name, maker, extended_api=True, devices=list(devices))


def _make_alone(store: Any, rank: int, world_size: int, timeout: Any, device: torch.device) -> ProcessGroup:
    """Create a process group in addition to the default one. All members create such groups in the same order."""
    own_store = c10d_private.distributed_c10d.PrefixStore(f"{NAME} {next(_numbers_alone)}", store)
    world = open_through(own_store, rank, world_size, timeout)
    return ProcessGroup(world.group, world, own_store)


def serve_recorders() -> None:
    """Let torch's debug server answer, on each rank, with the flight recorders of this process. Idempotent."""
    if NAME not in c10d_private.get_handler_names():
        c10d_private.register_handler(NAME, _answer)


def _answer(request: Any, response: Any) -> None:
    """Answer a request of the debug server; its parameter ``calls`` limits the number of completed calls."""
    calls = request.get_param("calls")
    contents = [each.content("the debug server", int(calls) if calls else None) for each in recorders()]
    response.set_content(json.dumps(contents), "application/json")
    response.set_status(200)


# torch drops its last reference after the interpreter has ended. The function's reference to itself keeps it from being
# deallocated then, which would crash.
_answer.__dict__["itself"] = _answer


def make_backend(opts: Any, pg_options: object = None) -> TorchGroup:
    """Create a process group, or a back end for some devices of one. torch calls this on every member.

    Members create the groups that they share in one order.

    If the default group is asyncdist's, a further group uses the connections of its world and needs no communication.
    Otherwise the ranks of the group perform a rendezvous through the store that torch passes.

    Args:
        opts: torch's ``_DistributedBackendOptions``: store, ranks and timeout. With ``enable_reconfigure``, a process group
            that asyncdist serves as a whole has no members before its first ``reconfigure``, and no ranks meet here.
        pg_options: Ignored.
    """
    if getattr(opts, "enable_reconfigure", False) and _is_whole(opts.process_group):
        return _wrapped(NoGroupYet(opts.group_rank, opts.group_size, seconds(opts.timeout)), None, opts)
    world, own_world = _default_world(), None
    if world is not None and opts.global_ranks_in_group:
        # torch's group name is not used. It is a count that each rank keeps for itself, and the counts differ after some
        # ranks have created a group without the others.
        group = world.new_group(opts.global_ranks_in_group, timeout=opts.timeout)
        assert group is not None, "torch calls make_backend on members only"
    else:
        own_world = open_through(opts.store, opts.group_rank, opts.group_size, opts.timeout)
        group = own_world.group
    return _wrapped(group, own_world, opts)


def _wrapped(group: Group | NoGroupYet, own_world: World | None, opts: Any) -> TorchGroup:
    """Return the object for torch that serves a group."""
    if not HAS_PYTHON_BACKENDS:
        return ProcessGroup(group, own_world, opts.store)
    hooks = TorchHooks.from_environment()
    _choose_recorder(hooks.flight_recorder)
    if not _is_whole(opts.process_group):
        return Backend(group, own_world)
    kind = ObservedProcessGroup if hooks.observe else ProcessGroup
    made = kind(group, own_world, opts.process_group.get_group_store())
    if hooks.flight_recorder and hooks.dumps and isinstance(group, Group):
        made._hook("dump", on_error=_dump_recorder_of_torch)
    return made


def _dump_recorder_of_torch(_: object) -> None:
    """Write torch's flight recorder into ``TORCH_FR_DUMP_TEMP_FILE`` with the rank behind it, once.

    torch 2.15 asks a back end in Python for no abort hooks, by which it writes the recorder for its own ones.
    """
    if c10d_private.dump_fr_trace_file is not None and not _dumped:
        _dumped.append(torch_distributed.get_rank())
        c10d_private.dump_fr_trace_file(_dumped[0], backend=NAME)


def _choose_recorder(of_torch: bool) -> None:
    """Let torch 2.15 hook its flight recorder into asyncdist's groups, or not.

    torch hooks it into groups of back ends that do not record themselves. asyncdist does, and the hook makes a small call
    take twice as long. A program that sets the size of torch's recorder asks for it.
    """
    c10d = c10d_private.distributed_c10d
    recording = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recording is not None:
        c10d._FR_SELF_RECORDING_BACKENDS = recording - _names if of_torch else recording | _names


def _is_whole(process_group: Any) -> bool:
    """Return whether asyncdist serves all devices of the process group that torch is making.

    torch does not say for which devices it calls. In ``"cpu:asyncdist,cuda:nccl"`` the default back end is NCCL's, and in
    ``"cuda:nccl,cpu:asyncdist"`` the back end of another device is there already.
    """
    return process_group.name() == "custom" and not process_group._device_types


def _default_world() -> World | None:
    """Return the world of torch's default group; None without a default group, or if it has another back end."""
    if not torch_distributed.is_initialized():
        return None
    group = group_of(torch_distributed.group.WORLD)
    return None if group is None else group.world


# The methods of torch's class call the group's Python methods and keep both halves of the Work that these return. A Work
# that is passed to C++ code directly loses its Python half, and waiting for it never ends.
_cpp: Any = torch_distributed.ProcessGroup


@cache
def register_kernels() -> None:
    """Register the kernels for tensors on the CPU. Idempotent."""
    if HAS_PYTHON_BACKENDS:
        return
    # Defines the operators.
    assert c10d_private.functional_collectives
    for kernel in (all_gather_into_tensor_out, batch_p2p_ops):
        operator = f"_c10d_functional::{kernel.__name__}"
        torch.library.impl(operator, "CPU", kernel)


def all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    """Start an all-gather of ``input`` into ``out``; ``wait_tensor(out)`` waits for it."""
    work = _cpp.all_gather_single_coalesced(_group(group_name), [out], [input.contiguous()])
    c10d_private.register_work(out, work)
    return out


def batch_p2p_ops(
    op_list: list[str], peer_list: list[int], tag_list: list[int], tensors: list[torch.Tensor], group_name: Any
) -> list[torch.Tensor]:
    """Start sends and receives with ranks of the group; ``wait_tensor`` of each result waits for its operation."""
    group = _group(group_name)
    started = []
    for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True):
        if op == "isend":
            tensor = tensor.contiguous()
            work = _cpp.send(group, [tensor], peer, tag)
        else:
            work = _cpp.recv(group, [tensor], peer, tag)
        c10d_private.register_work(tensor, work)
        started.append(tensor)
    return started


def _group(name: Any) -> Any:
    return c10d_private.resolve_process_group(name) if isinstance(name, str) else name
