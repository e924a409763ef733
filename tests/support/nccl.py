"""A pretended NCCL between the threads of one process: the interface of ``cupy.cuda.nccl`` over host memory.

Each rank is a thread. A call blocks until the other ranks have made it too, and is complete when it returns. An
AssertionError names the rule that was broken: calls that differ between ranks, counts that do not fit, two threads in one
communicator.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.testing.arithmetic import reduced
from asyncdist_transports.nccl import Nccl
from asyncdist_transports.nccl.bindings import Bindings

UNIQUE_ID_NBYTES = 128
_DTYPES = [
    torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64,
    torch.float16, torch.float32, torch.float64, torch.bfloat16,
]  # fmt: skip
_OPERATIONS = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.AVG]
# Seconds after which a rank stops waiting for a peer: their calls differ.
_PEER_TIMEOUT = 20.0


class NcclError(RuntimeError):
    """The error of cupy, which has no name for status 7 and raises KeyError for it."""

    def __init__(self, status: int) -> None:
        words = {1: "UNHANDLED_CUDA_ERROR", 3: "INTERNAL_ERROR", 4: "INVALID_ARGUMENT", 6: "REMOTE_ERROR"}
        super().__init__(f"NCCL_ERROR_{words[status]}")
        self.status = status


class PretendNccl:
    """Replaces the module. With ``signed``, unique ids are tuples of signed numbers, as in cupy 13.

    ``communicators`` are all that were created; ``collected`` counts those that were collected before they had ended.
    """

    NcclError = NcclError
    available = True

    def __init__(self, *, version: int = 22907, signed: bool = False) -> None:
        self.signed = signed
        self.communicators: list[PretendCommunicator] = []
        self.collected = 0
        self._version = version
        self.num_unique_ids = 0
        self._meetings: dict[bytes, _Meeting] = {}
        self._lock = threading.Lock()
        self._group = threading.local()
        splits = {} if signed else {"commSplit": _split}
        self.NcclCommunicator = type("NcclCommunicator", (PretendCommunicator,), {"nccl": self, **splits})

    def get_version(self) -> int:
        return self._version

    def get_unique_id(self) -> bytes | tuple[int, ...]:
        self.num_unique_ids += 1
        number = 255 - self.num_unique_ids
        return (number - 256,) * UNIQUE_ID_NBYTES if self.signed else bytes([number]) * UNIQUE_ID_NBYTES

    def groupStart(self) -> None:
        assert self.calls is None, "groups are not nested here"
        self._group.calls = []

    def groupEnd(self) -> None:
        calls, self._group.calls = self.calls, None
        assert calls is not None, "groupEnd without groupStart"
        _run(calls)

    @property
    def calls(self) -> list[_Call] | None:
        """The calls of the group that this thread has started, None without a group."""
        found: list[_Call] | None = getattr(self._group, "calls", None)
        return found

    def fail_creation(self, rank: int, after: Callable[[], object] = lambda: None) -> None:
        """Let the creation of one rank's communicators raise, after a call of ``after``."""
        plain = self.NcclCommunicator.__init__

        def init(communicator: PretendCommunicator, size: int, unique_id: Any, its_rank: int) -> None:
            if its_rank == rank:
                after()
                raise NcclError(1)
            plain(communicator, size, unique_id, its_rank)

        self.NcclCommunicator.__init__ = init  # type: ignore[method-assign]

    def hang_up(self) -> None:
        """Raise an error on all waiting ranks, as closed sockets do."""
        for meeting in self._meetings.values():
            with meeting.changed:
                meeting.broken = True
                meeting.changed.notify_all()

    def meeting(self, unique_id: bytes, size: int) -> _Meeting:
        with self._lock:
            return self._meetings.setdefault(unique_id, _Meeting(size))


def nccl_over(nccl: PretendNccl) -> type[Nccl]:
    """Return the NCCL backend over a pretended NCCL."""
    made = Bindings(nccl)
    return type("NcclOfTest", (Nccl,), {"load": staticmethod(lambda: made)})


class _Meeting:
    """The ranks of one communicator, and the data in flight between them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.broken = False
        self.ranks: set[int] = set()
        self.messages: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self.collectives: dict[int, dict[int, tuple[Any, bytes]]] = defaultdict(dict)
        self.splits: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)


class PretendCommunicator:
    """One rank's communicator. ``log`` holds its calls with their streams.

    ``broken`` is the status that `check_async_error` raises; with ``background`` calls fail like nonblocking ones.
    """

    nccl: PretendNccl

    def __init__(self, size: int, unique_id: Any, rank: int) -> None:
        if not isinstance(unique_id, tuple if self.nccl.signed else bytes):
            raise TypeError("Argument 'commId' has incorrect type")
        assert len(unique_id) == UNIQUE_ID_NBYTES
        assert not self.nccl.signed or all(-128 <= number < 128 for number in unique_id)
        assert 0 <= rank < size
        self.join(size, bytes(number & 0xFF for number in unique_id), rank)

    def join(self, size: int, name: bytes, rank: int) -> None:
        """Become a rank of a communicator, and wait until all ranks have."""
        self.rank, self.size, self.name = rank, size, name
        self.log: list[tuple[Any, ...]] = []
        self.broken = 0
        self.background = False
        self.ended = ""
        self.inside: threading.Thread | None = None
        self.number = self.splits = 0
        self.nccl.communicators.append(self)
        self.meeting = self.nccl.meeting(name, size)
        with self.meeting.changed:
            assert rank not in self.meeting.ranks, f"two ranks {rank}"
            self.meeting.ranks.add(rank)
            self.meeting.changed.notify_all()
            self.wait_for(lambda: len(self.meeting.ranks) == size)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in _CALLS:
            raise AttributeError(name)
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> None:
        assert all(type(argument) is int for argument in arguments), f"{name}{arguments}: cupy takes numbers only"
        if self.background:
            raise KeyError(7)
        if self.ended:
            raise NcclError(4)
        self.log.append((name, *arguments))
        call = _Call(self, name, arguments)
        calls = self.nccl.calls
        if calls is None:
            _run([call])
        else:
            calls.append(call)

    def check_async_error(self) -> None:
        if self.background:
            raise KeyError(7)
        if self.broken or self.ended:
            raise NcclError(self.broken or 4)

    def destroy(self) -> None:
        assert self.inside is None, "destroyed while another thread is inside"
        self._end("destroyed")

    def abort(self) -> None:
        self._end("aborted")

    def _end(self, how: str) -> None:
        # A communicator whose creation has failed has no meeting.
        if "meeting" in self.__dict__:
            with self.meeting.changed:
                self.ended = self.ended or how
                # A peer that makes the call later does not find this rank in it.
                for round_ in self.meeting.collectives.values():
                    if len(round_) < self.size:
                        round_.pop(self.rank, None)
                self.meeting.changed.notify_all()

    def __del__(self) -> None:
        if "meeting" in self.__dict__ and not self.ended:
            self.nccl.collected += 1

    def wait_for(self, true: Callable[[], bool]) -> None:
        """Wait, holding ``meeting.changed``, until a condition holds; raise NcclError if this communicator is aborted."""
        meeting = self.meeting
        has_ended = meeting.changed.wait_for(lambda: true() or bool(self.ended) or meeting.broken, _PEER_TIMEOUT)
        assert has_ended, "a peer never made this call"
        if not true():
            raise NcclError(6 if meeting.broken else 3)


def _split(self: PretendCommunicator, color: int, key: int) -> PretendCommunicator | None:
    """Do what cupy's commSplit does, from 14 on."""
    if self.ended:
        raise NcclError(4)
    self.splits += 1
    with self.meeting.changed:
        assert self.inside is None, "split while another thread is inside"
        round_ = self.meeting.splits[self.splits]
        round_[self.rank] = color, key
        self.meeting.changed.notify_all()
        self.wait_for(lambda: len(round_) == self.size)
    if color < 0:
        return None
    members = sorted((its_key, rank) for rank, (its, its_key) in round_.items() if its == color)
    part: PretendCommunicator = type(self).__new__(type(self))
    part.join(len(members), self.name + bytes([self.splits, color]), members.index((key, self.rank)))
    return part


# -- calls ------------------------------------------------------------------------------------------

# The arguments of each, but for the stream at the end.
_CALLS = {
    "send": ("buffer", "count", "type", "peer"),
    "recv": ("buffer", "count", "type", "peer"),
    "broadcast": ("send", "recv", "count", "type", "root"),
    "reduce": ("send", "recv", "count", "type", "op", "root"),
    "allReduce": ("send", "recv", "count", "type", "op"),
    "allGather": ("send", "recv", "count", "type"),
    "reduceScatter": ("send", "recv", "count", "type", "op"),
}


class _Call:
    """A call of one rank: it first publishes its data, then receives that of its peers."""

    def __init__(self, communicator: PretendCommunicator, name: str, arguments: Sequence[int]) -> None:
        names = (*_CALLS[name], "stream")
        assert len(arguments) == len(names), f"{name} takes {names}"
        self.communicator, self.name = communicator, name
        self.arguments = dict(zip(names, arguments, strict=True))
        self.dtype = _DTYPES[self.arguments["type"]]
        self.nbytes = self.arguments["count"] * self.dtype.itemsize
        for what in ("peer", "root"):
            assert 0 <= self.arguments.get(what, 0) < communicator.size
        assert self.arguments.get("peer") != communicator.rank, "a message to oneself"
        self.number = 0

    def publish(self) -> None:
        own, meeting = self.communicator, self.communicator.meeting
        if self.name == "recv":
            return
        if self.name == "send":
            meeting.messages[own.rank, self.arguments["peer"]].append(_read(self.arguments["buffer"], self.nbytes))
            return
        agreed = {key: self.arguments[key] for key in ("count", "type", "op", "root") if key in self.arguments}
        self.number = own.number = own.number + 1
        nbytes = self.nbytes * (own.size if self.name == "reduceScatter" else 1)
        sends = self.name != "broadcast" or own.rank == self.arguments["root"]
        data = _read(self.arguments["send"], nbytes) if sends else b""
        meeting.collectives[self.number][own.rank] = (self.name, agreed), data

    def receive(self) -> None:
        own, meeting = self.communicator, self.communicator.meeting
        if self.name == "send":
            return
        if self.name == "recv":
            messages = meeting.messages[self.arguments["peer"], own.rank]
            own.wait_for(lambda: bool(messages))
            data = messages.popleft()
            assert len(data) == self.nbytes, f"{len(data)} bytes were sent where {self.nbytes} are expected"
            _write(self.arguments["buffer"], data)
            return
        round_ = meeting.collectives[self.number]
        own.wait_for(lambda: len(round_) == own.size)
        for what, _ in round_.values():
            assert what == round_[own.rank][0], f"ranks differ: {[each for each, _ in round_.values()]}"
        if self.name != "reduce" or own.rank == self.arguments["root"]:
            _write(self.arguments["recv"], self._result([round_[rank][1] for rank in range(own.size)]))

    def _result(self, data: list[bytes]) -> bytes:
        if self.name == "broadcast":
            return data[self.arguments["root"]]
        if self.name == "allGather":
            return b"".join(data)
        if self.name == "reduceScatter":
            start = self.communicator.rank * self.nbytes
            data = [each[start : start + self.nbytes] for each in data]
        return _reduced(data, self.dtype, self.arguments["op"])


def _run(calls: Sequence[_Call]) -> None:
    """Run calls of one rank as a group."""
    if not calls:
        return
    own = calls[0].communicator
    with own.meeting.changed:
        assert own.inside is None, f"{own.inside} is inside the communicator already"
        own.inside = threading.current_thread()
        try:
            for call in calls:
                call.publish()
            own.meeting.changed.notify_all()
            for call in calls:
                call.receive()
        finally:
            own.inside = None


def _read(place: int, nbytes: int) -> bytes:
    assert place, "memory at address 0"
    return ctypes.string_at(place, nbytes)


def _write(place: int, data: bytes) -> None:
    assert place, "memory at address 0"
    ctypes.memmove(place, data, len(data))


def _reduced(inputs: Sequence[bytes], dtype: torch.dtype, operation: int) -> bytes:
    """Reduce the data of the ranks."""
    tensors = [torch.frombuffer(bytearray(each), dtype=dtype) for each in inputs]
    return reduced(tensors, _OPERATIONS[operation]).view(torch.uint8).numpy().tobytes()
