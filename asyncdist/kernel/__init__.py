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

# Where each name lives.
_NAMES: dict[str, str] = {
    "whole_number_of": "asyncdist.kernel.collectives.arguments",
    "DeviceLending": "asyncdist.kernel.devices.lending",
    "OwnerHasEnded": "asyncdist.kernel.devices.lending",
    "DeviceWork": "asyncdist.kernel.devices.work",
    "Endpoint": "asyncdist.kernel.engine.endpoint",
    "Work": "asyncdist.kernel.engine.work",
    "call_in_thread": "asyncdist.kernel.engine.drivers.stalled_loop",
    "completed": "asyncdist.kernel.engine.work",
    "DTYPES": "asyncdist.kernel.memory.buffers",
    "DTYPE_NUMBERS": "asyncdist.kernel.memory.buffers",
    "flat_memory": "asyncdist.kernel.memory.buffers",
    "input_memory": "asyncdist.kernel.memory.buffers",
    "tensor_of": "asyncdist.kernel.memory.buffers",
    "empty": "asyncdist.kernel.memory.registered",
    "ALIGNMENT": "asyncdist.kernel.memory.shared_arena",
    "ArenaMapping": "asyncdist.kernel.memory.shared_arena",
    "arena": "asyncdist.kernel.memory.shared_arena",
    "ReadMapping": "asyncdist.kernel.memory.shared_segment",
    "SharedSegment": "asyncdist.kernel.memory.shared_segment",
    "can_share_segments": "asyncdist.kernel.memory.shared_segment",
    "excluded_from_compile": "asyncdist.kernel.memory.torch_compile",
    "MemoryPort": "asyncdist.kernel.one_sided.memory_port",
    "Registration": "asyncdist.kernel.one_sided.registration",
    "RemoteMemory": "asyncdist.kernel.one_sided.registration",
    "RemotePort": "asyncdist.kernel.one_sided.remote_port",
    "Hook": "asyncdist.kernel.tracing.hooks",
    "OperationRecord": "asyncdist.kernel.tracing.hooks",
    "DeviceLoan": "asyncdist.kernel.transport.device_loans",
    "DeviceLoans": "asyncdist.kernel.transport.device_loans",
    "TransferRefused": "asyncdist.kernel.transport.device_p2p",
    "DeviceEvent": "asyncdist.kernel.transport.device_streams",
}


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
