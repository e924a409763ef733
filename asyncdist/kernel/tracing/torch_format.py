"""Dumps in the format of torch's flight recorder, which torch's analyser ``torchfrtrace`` reads.

The format is version 2.10, that of torch 2.13 to 2.15 (``torch/csrc/distributed/c10d/FlightRecorder.hpp``): one pickle of
plain values for each rank, in a file whose name ends with the rank. Some values differ from those of torch's back ends:

- ``profiling_name`` begins with ``gloo:``, because the analyser of torch 2.13 accepts only back ends of torch.
- A size is a number of elements, because the recorder keeps no shapes. A size that it does not know is ``[]``. The output
  of an all-to-all has the size of its input.
- Stack frames, threads and timeouts are not recorded. Their fields are empty.
- Messages with one tag from one rank to another have a process group of their own. The analyser expects all members of a
  group to take part in each operation, and would report a message in a larger group as a call that ranks have not made.
- Only pending messages with a known peer are included. A small message is complete at the sender before it is received,
  and the analyser of torch 2.13 cannot read a receive from any rank.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from asyncdist.base.ops import Collective
from asyncdist.base.release import VERSION
from asyncdist.kernel.memory.buffers import DTYPES
from asyncdist.kernel.tracing.trace_record import TracedCall, TraceRecord
from asyncdist.kernel.transport.wire_format import RUNS, Fingerprint, shape_checksum

_FORMAT_VERSION = "2.10"
_LIBRARY = "gloo"
# torch's description of the default group, and of a group without a description.
_DEFAULT_GROUP, _NO_DESCRIPTION = "default_pg", "undefined"

# The analyser's names of the collectives. Forms of one collective that ranks may mix have one name.
_SAME_NAMES = "all_reduce reduce broadcast all_gather gather scatter reduce_scatter all_to_all barrier".split()
_NAMES = {Collective[name]: name for name in _SAME_NAMES} | {
    Collective.monitored_barrier: "barrier",
    Collective.all_gather_object: "all_gather_v",
    Collective.gather_object: "gather",
    Collective.scatter_object_list: "scatter",
    Collective.broadcast_object_list: "broadcast",
    Collective.all_reduce_coalesced: "allreduce_coalesced",
    Collective.all_gather_coalesced: "ALLGATHER_coalesced",
}

# The names of dtypes in C++ (c10::toString) that are not those of Python with a capital letter.
_DTYPE_NAMES = {
    torch.uint8: "Byte", torch.int8: "Char", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
    torch.float16: "Half", torch.float32: "Float", torch.float64: "Double", torch.bfloat16: "BFloat16",
    torch.complex32: "ComplexHalf", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
    torch.uint16: "UInt16", torch.uint32: "UInt32", torch.uint64: "UInt64",
}  # fmt: skip


def file_prefix(world: str) -> str:
    """Return the name of a rank's file without the rank, which is the analyser's option ``--prefix``."""
    return f"torch-trace-{world[:8]}-rank"


def torch_pickle(record: TraceRecord, evicted: Collection[tuple[str, int]] | None = None) -> bytes:
    """Return the content of a rank's file.

    Args:
        record: The dump of the rank.
        evicted: The result of `evicted_collectives` for all ranks; None if only this rank's dump is known. The analyser
            then guesses from ``record_id``, as for torch's own files, which collectives other ranks have evicted.
    """
    members = {name: ranks for name, ranks in record.groups.items() if record.rank in ranks}
    collectives = {name: record.collectives(name) for name in members}
    last = {name: record.last(name) for name in members}
    identifier = 0
    if evicted is None:
        identifier = sum(max(0, last[name] - len(calls)) for name, calls in collectives.items())
    configuration = {name: _configuration(name, ranks) for name, ranks in members.items()}
    entries = []
    sent: Counter[str] = Counter()
    for call in record.calls:
        if call.group not in members:
            continue
        if not call.is_message:
            # Calls of an earlier group of the same name and ranks have the numbers of later calls.
            if collectives[call.group][call.seq] is call and (call.group, call.seq) not in (evicted or ()):
                operation = _collective(call, members[call.group], record.rank)
                entries.append(_entry(call, identifier, list(configuration).index(call.group), operation, call.seq))
                identifier += 1
        elif call.finished is None and call.peer is not None:
            operation = _message(call, members[call.group], record.rank)
            configuration.setdefault(operation.group, _configuration(operation.group, operation.ranks))
            sent[operation.group] += 1
            place = list(configuration).index(operation.group)
            entries.append(_entry(call, identifier, place, operation, sent[operation.group]))
    status = {str(number): _status(last[name], collectives[name]) for number, name in enumerate(members)}
    content = {
        "version": _FORMAT_VERSION,
        "comm_lib_version": f"asyncdist {VERSION}",
        "pg_config": configuration,
        "pg_status": status,
        "entries": entries,
    }
    return pickle.dumps(content)


def evicted_collectives(records: Sequence[TraceRecord]) -> set[tuple[str, int]]:
    """Return (group, number) of the collectives that some ranks have recorded and others have evicted."""
    found = set()
    for group, ranks in {(name, ranks) for record in records for name, ranks in record.groups.items()}:
        members = [record for record in records if record.groups.get(group) == ranks]
        recorded = [record.collectives(group) for record in members]
        for number in set().union(*recorded):
            last = zip(members, recorded, strict=True)
            if any(number not in calls and number <= record.last(group) for record, calls in last):
                found.add((group, number))
    return found


# -- groups ---------------------------------------------------------------------------------------


def _description(group: str) -> str:
    return _DEFAULT_GROUP if group == "world" else _NO_DESCRIPTION


def _configuration(group: str, ranks: Sequence[int]) -> dict[str, str]:
    return {"name": group, "desc": _description(group), "ranks": str(list(ranks))}


def _status(last: int, calls: dict[int, TracedCall]) -> dict[str, int]:
    """Return the numbers of a group's last collectives."""
    opened = {number for number, call in calls.items() if call.finished is None or call.error}
    completed = next((number for number in range(last, 0, -1) if number not in opened), 0)
    return {"last_enqueued_collective": last, "last_started_collective": last, "last_completed_collective": completed}


# -- operations -----------------------------------------------------------------------------------


class _Operation(NamedTuple):
    """A call in the analyser's terms: its process group, its name, and the sizes of its tensors."""

    group: str
    ranks: Sequence[int]
    name: str
    inputs: list[list[int]]
    outputs: list[list[int]]
    dtype: str


def _entry(call: TracedCall, identifier: int, place: int, operation: _Operation, number: int) -> dict[str, Any]:
    created = int(call.issued * 1e9)
    completed = None if call.finished is None or call.error else int(call.finished * 1e9)
    return {
        "record_id": identifier,
        "pg_id": place,
        "process_group": (operation.group, _description(operation.group)),
        "collective_seq_id": number,
        "p2p_seq_id": number if call.is_message else 0,
        "op_id": number,
        "profiling_name": f"{_LIBRARY}:{operation.name}",
        "is_p2p": call.is_message,
        "input_sizes": operation.inputs,
        "input_dtypes": [operation.dtype for _ in operation.inputs],
        "output_sizes": operation.outputs,
        "output_dtypes": [operation.dtype for _ in operation.outputs],
        "time_created_ns": created,
        # An operation starts when it is called.
        "time_discovered_started_ns": created,
        "time_discovered_completed_ns": completed,
        "state": "started" if completed is None else "completed",
        "retired": call.finished is not None,
        "timeout_ms": None,
        "thread_id": "",
        "thread_name": "",
        "frames": [],
        **({} if completed is None else {"duration_ms": (completed - created) / 1e6}),
    }


def _collective(call: TracedCall, ranks: Sequence[int], rank: int) -> _Operation:
    fingerprint = Fingerprint.unpack(call.fingerprint)
    dtype = DTYPES.get(fingerprint.dtype)
    try:
        collective = Collective(fingerprint.collective)
        name = _NAMES[collective]
    except (ValueError, KeyError):
        return _Operation(call.group, ranks, "barrier", [], [], "")
    if dtype is None:
        return _Operation(call.group, ranks, name, [], [], "")
    total, size = call.nbytes // dtype.itemsize, len(ranks)
    whole, block = [total], [total // size]
    at_root = ranks.index(rank) == fingerprint.root - 1
    inputs, outputs = [whole], [whole]
    match collective:
        case Collective.gather:
            inputs, outputs = [block], [whole] if at_root else []
        case Collective.scatter:
            inputs, outputs = [whole] if at_root else [], [block]
        case Collective.all_gather if fingerprint.shape in _checksums_of_equal(fingerprint.dtype, block * size):
            inputs = [block]
        case Collective.reduce_scatter if fingerprint.shape == shape_checksum(block * size):
            outputs = [block]
        case Collective.all_gather | Collective.reduce_scatter:
            name = f"{name}_v"
            inputs, outputs = ([[]], [whole]) if collective is Collective.all_gather else ([whole], [[]])
        case Collective.all_gather_coalesced:
            inputs = [[]]
        case Collective.all_reduce if fingerprint.count != total & 0xFFFFFF:
            # A sparse tensor: its values and indices are sent.
            inputs = outputs = [[]]
    return _Operation(call.group, ranks, name, inputs, outputs, _dtype_name(dtype))


def _message(call: TracedCall, ranks: Sequence[int], rank: int) -> _Operation:
    assert call.peer is not None
    dtype = DTYPES.get(Fingerprint.unpack(call.fingerprint).dtype)
    sizes = [] if dtype is None else [[call.nbytes // dtype.itemsize]]
    sends = call.op.startswith("send")
    pair = sorted((rank, ranks[call.peer]))
    own, other = pair.index(rank), pair.index(ranks[call.peer])
    source, destination = (rank, ranks[call.peer]) if sends else (ranks[call.peer], rank)
    return _Operation(
        f"{call.group}: messages from rank {source} to rank {destination}, tag {call.seq}",
        pair,
        f"send {own}->{other}" if sends else f"recv {own}<-{other}",
        sizes if sends else [],
        [] if sends else sizes,
        "" if dtype is None else _dtype_name(dtype),
    )


def _checksums_of_equal(dtype: int, blocks: Sequence[int]) -> tuple[int, int]:
    """Return the checksums of an all-gather of equal blocks, which travel alone or in runs."""
    return shape_checksum((dtype, *blocks)), shape_checksum((dtype, *blocks, RUNS))


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return _DTYPE_NAMES.get(dtype) or name[0].upper() + name[1:]
