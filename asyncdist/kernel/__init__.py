"""What moves tensors, from the schedules of collectives to the bytes. This module is what other folders see of it.

Read the folders in this order:

algorithms     schedules: collective algorithms as generators without I/O, and their costs
memory         tensors as memory, reduction kernels, serialization, shared memory
transport      the contract of transports and device back ends, message matching, the wire format
tracing        the flight recorder, hooks, metrics, spans
membership     which peers go on after a loss: a state machine without I/O
engine         progress, executor, endpoint, works, comparison of calls
collectives    from a call to a plan: checks, memory, choice of the schedule
devices        tensors on CUDA devices
one_sided      registered memory, which other processes read and write

The names below are loaded when they are first used: `algorithms` and `membership` do not need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {
    "asyncdist.kernel.collectives.arguments": "whole_number_of",
    "asyncdist.kernel.devices.lending": "DeviceLending OwnerHasEnded",
    "asyncdist.kernel.devices.work": "DeviceWork",
    "asyncdist.kernel.engine.endpoint": "Endpoint",
    "asyncdist.kernel.engine.work": "Work completed",
    "asyncdist.kernel.engine.drivers.stalled_loop": "call_in_thread",
    "asyncdist.kernel.memory.buffers": "DTYPES DTYPE_NUMBERS flat_memory input_memory tensor_of",
    "asyncdist.kernel.memory.registered": "empty",
    "asyncdist.kernel.memory.shared_arena": "ALIGNMENT ArenaMapping arena",
    "asyncdist.kernel.memory.shared_segment": "ReadMapping SharedSegment can_share_segments",
    "asyncdist.kernel.memory.torch_compile": "excluded_from_compile",
    "asyncdist.kernel.one_sided.memory_port": "MemoryPort",
    "asyncdist.kernel.one_sided.registration": "Registration RemoteMemory",
    "asyncdist.kernel.one_sided.remote_port": "RemotePort",
    "asyncdist.kernel.tracing.hooks": "Hook OperationRecord",
    "asyncdist.kernel.transport.device_loans": "DeviceLoan DeviceLoans",
    "asyncdist.kernel.transport.device_p2p": "TransferRefused",
    "asyncdist.kernel.transport.device_streams": "DeviceEvent",
}
# Where each name lives.
_NAMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from asyncdist.kernel.collectives.arguments import whole_number_of as whole_number_of
    from asyncdist.kernel.devices.lending import DeviceLending as DeviceLending
    from asyncdist.kernel.devices.lending import OwnerHasEnded as OwnerHasEnded
    from asyncdist.kernel.devices.work import DeviceWork as DeviceWork
    from asyncdist.kernel.engine.drivers.stalled_loop import call_in_thread as call_in_thread
    from asyncdist.kernel.engine.endpoint import Endpoint as Endpoint
    from asyncdist.kernel.engine.work import Work as Work
    from asyncdist.kernel.engine.work import completed as completed
    from asyncdist.kernel.memory.buffers import DTYPE_NUMBERS as DTYPE_NUMBERS
    from asyncdist.kernel.memory.buffers import DTYPES as DTYPES
    from asyncdist.kernel.memory.buffers import flat_memory as flat_memory
    from asyncdist.kernel.memory.buffers import input_memory as input_memory
    from asyncdist.kernel.memory.buffers import tensor_of as tensor_of
    from asyncdist.kernel.memory.registered import empty as empty
    from asyncdist.kernel.memory.shared_arena import ALIGNMENT as ALIGNMENT
    from asyncdist.kernel.memory.shared_arena import ArenaMapping as ArenaMapping
    from asyncdist.kernel.memory.shared_arena import arena as arena
    from asyncdist.kernel.memory.shared_segment import ReadMapping as ReadMapping
    from asyncdist.kernel.memory.shared_segment import SharedSegment as SharedSegment
    from asyncdist.kernel.memory.shared_segment import can_share_segments as can_share_segments
    from asyncdist.kernel.memory.torch_compile import excluded_from_compile as excluded_from_compile
    from asyncdist.kernel.one_sided.memory_port import MemoryPort as MemoryPort
    from asyncdist.kernel.one_sided.registration import Registration as Registration
    from asyncdist.kernel.one_sided.registration import RemoteMemory as RemoteMemory
    from asyncdist.kernel.one_sided.remote_port import RemotePort as RemotePort
    from asyncdist.kernel.tracing.hooks import Hook as Hook
    from asyncdist.kernel.tracing.hooks import OperationRecord as OperationRecord
    from asyncdist.kernel.transport.device_loans import DeviceLoan as DeviceLoan
    from asyncdist.kernel.transport.device_loans import DeviceLoans as DeviceLoans
    from asyncdist.kernel.transport.device_p2p import TransferRefused as TransferRefused
    from asyncdist.kernel.transport.device_streams import DeviceEvent as DeviceEvent
