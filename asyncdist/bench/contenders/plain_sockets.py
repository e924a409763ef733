"""The physical limit: the same traffic over plain sockets between the same processes, the additions included.

Used by `contenders`. No frames, no checks, no other operation in flight: non-blocking sends and receives straight from
and into the tensors, driven in the calling thread, `poll` only when nothing moves. Every rank exchanges directly with
every other one.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncdist.bench.workloads.collectives import Traffic

_ONE_ROUND_NBYTES = 64 << 10
_SEND_NBYTES = 1 << 20
_TIMEOUT_MS = 60_000

Spans = dict[int, memoryview]
Call = Callable[[], None]


class Sockets:
    """Connected, non-blocking sockets to every other rank, by rank; None for ourselves."""

    def __init__(self, rank: int, sockets: Sequence[socket.socket | None]) -> None:
        self.rank = rank
        self.ranks = len(sockets)
        self.peers = [peer for peer in range(len(sockets)) if peer != rank]
        self._sockets = {peer: sock for peer, sock in enumerate(sockets) if sock is not None}

    def exchange(self, sends: Spans, receives: Spans) -> None:
        """Send and fill all spans, all at once."""
        sends, receives = dict(sends), dict(receives)
        while sends or receives:
            moved = False
            for peer, span in list(sends.items()):
                try:
                    sent = self._sockets[peer].send(span[:_SEND_NBYTES])
                except BlockingIOError:
                    continue
                moved = True
                _shorten(sends, peer, span, sent)
            for peer, span in list(receives.items()):
                try:
                    got = self._sockets[peer].recv_into(span)
                except BlockingIOError:
                    continue
                if got == 0:
                    raise ConnectionError(f"rank {peer} of the benchmark has ended")
                moved = True
                _shorten(receives, peer, span, got)
            if not moved:
                self._wait(sends, receives)

    def _wait(self, sends: Spans, receives: Spans) -> None:
        poll = select.poll()
        for peer in sends.keys() | receives.keys():
            events = (select.POLLOUT if peer in sends else 0) | (select.POLLIN if peer in receives else 0)
            poll.register(self._sockets[peer], events)
        if not poll.poll(_TIMEOUT_MS):
            raise TimeoutError("a rank of the benchmark does nothing any more")


def _shorten(spans: Spans, peer: int, span: memoryview, nbytes: int) -> None:
    if nbytes == len(span):
        del spans[peer]
    else:
        spans[peer] = span[nbytes:]


def prepare_socket_call(sockets: Sockets, case: Traffic) -> Call:
    """Return what does the case's collective once. It keeps the memory that it needs for additions."""
    return _MAKERS[case.name](sockets, case)


def _bytes(tensor: torch.Tensor) -> memoryview:
    memory: Any = tensor.numpy()
    return memoryview(memory).cast("B")


def _parts(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Cut a tensor into one part a rank, as equal as they can be."""
    return list(torch.tensor_split(tensor, ranks))


def _filled(tensors: Sequence[torch.Tensor], peers: Sequence[int]) -> Spans:
    return {peer: _bytes(tensors[peer]) for peer in peers if tensors[peer].numel()}


def _reduce_into(target: torch.Tensor, sockets: Sockets, sends: Spans) -> Call:
    """Send each peer its span; add what every peer sends into ``target``."""
    spare = {peer: torch.empty_like(target) for peer in sockets.peers}
    receives = {peer: _bytes(tensor) for peer, tensor in spare.items() if tensor.numel()}

    def call() -> None:
        sockets.exchange(sends, receives)
        for tensor in spare.values():
            target.add_(tensor)

    return call


def _all_reduce(sockets: Sockets, case: Traffic) -> Call:
    if case.nbytes <= _ONE_ROUND_NBYTES:
        return _reduce_into(case.input, sockets, dict.fromkeys(sockets.peers, _bytes(case.input)))
    parts = _parts(case.input, case.ranks)
    theirs = _filled(parts, sockets.peers)
    reduce_scatter = _reduce_into(parts[case.rank], sockets, theirs)
    ours = dict.fromkeys(sockets.peers, _bytes(parts[case.rank]))

    def call() -> None:
        reduce_scatter()
        sockets.exchange(ours, theirs)

    return call


def _reduce(sockets: Sockets, case: Traffic) -> Call:
    if case.ranks > 2 and case.nbytes > _ONE_ROUND_NBYTES:
        parts = _parts(case.input, case.ranks)
        theirs = _filled(parts, sockets.peers)
        reduce_scatter = _reduce_into(parts[case.rank], sockets, theirs)
        ours = _bytes(parts[case.rank])

        def call() -> None:
            reduce_scatter()
            sockets.exchange({} if case.rank == 0 else {0: ours}, theirs if case.rank == 0 else {})

        return call
    if case.rank == 0:
        return _reduce_into(case.input, sockets, {})
    whole = _bytes(case.input)
    return lambda: sockets.exchange({0: whole}, {})


def _broadcast(sockets: Sockets, case: Traffic) -> Call:
    if case.ranks > 2 and case.nbytes > _ONE_ROUND_NBYTES:
        return _scatter_and_gather(sockets, case)
    whole = _bytes(case.input)
    if case.rank == 0:
        return lambda: sockets.exchange(dict.fromkeys(sockets.peers, whole), {})
    return lambda: sockets.exchange({}, {0: whole})


def _scatter_and_gather(sockets: Sockets, case: Traffic) -> Call:
    """Broadcast as van de Geijn does: the root deals out parts, which their holders pass to all others."""
    parts = _parts(case.input, case.ranks - 1)  # rank r holds part r - 1; the root needs none
    spans = {rank: _bytes(parts[rank - 1]) for rank in range(1, case.ranks)}
    if case.rank == 0:
        return lambda: sockets.exchange(spans, {})
    own = spans.pop(case.rank)

    def call() -> None:
        sockets.exchange({}, {0: own})
        sockets.exchange(dict.fromkeys(spans, own), spans)

    return call


def _all_gather(sockets: Sockets, case: Traffic) -> Call:
    parts = _parts(case.output, case.ranks)
    ours = dict.fromkeys(sockets.peers, _bytes(case.input))
    theirs = _filled(parts, sockets.peers)

    def call() -> None:
        parts[case.rank].copy_(case.input)
        sockets.exchange(ours, theirs)

    return call


def _reduce_scatter(sockets: Sockets, case: Traffic) -> Call:
    parts = _parts(case.input, case.ranks)
    reduce = _reduce_into(case.output, sockets, _filled(parts, sockets.peers))

    def call() -> None:
        case.output.copy_(parts[case.rank])
        reduce()

    return call


def _all_to_all(sockets: Sockets, case: Traffic) -> Call:
    ours, theirs = _parts(case.input, case.ranks), _parts(case.output, case.ranks)
    sends, receives = _filled(ours, sockets.peers), _filled(theirs, sockets.peers)

    def call() -> None:
        theirs[case.rank].copy_(ours[case.rank])
        sockets.exchange(sends, receives)

    return call


def _gather(sockets: Sockets, case: Traffic) -> Call:
    if case.rank != 0:
        ours = _bytes(case.input)
        return lambda: sockets.exchange({0: ours}, {})
    parts = _parts(case.output, case.ranks)
    receives = _filled(parts, sockets.peers)

    def call() -> None:
        parts[0].copy_(case.input)
        sockets.exchange({}, receives)

    return call


def _scatter(sockets: Sockets, case: Traffic) -> Call:
    if case.rank != 0:
        ours = _bytes(case.output)
        return lambda: sockets.exchange({}, {0: ours})
    parts = _parts(case.input, case.ranks)
    sends = _filled(parts, sockets.peers)

    def call() -> None:
        case.output.copy_(parts[0])
        sockets.exchange(sends, {})

    return call


def _barrier(sockets: Sockets, case: Traffic) -> Call:
    note, room = memoryview(b"!"), {peer: memoryview(bytearray(1)) for peer in sockets.peers}
    return lambda: sockets.exchange(dict.fromkeys(sockets.peers, note), room)


_MAKERS: dict[str, Callable[[Sockets, Traffic], Call]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}
