"""The contender "raw": the collectives' traffic and additions over plain sockets between the same processes.

The calling thread sends from and receives into the tensors without blocking, and calls `poll` only when no byte moves.
There are no frames and no checks. Every rank exchanges directly with every other rank. Only in small all-reduces and in
barriers between hosts with several ranks, the first rank of each host exchanges for all of them. Used by `contenders`.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from asyncdist.base.callables import Callback
from asyncdist.cli.bench.traffic import Traffic

_ONE_ROUND_NBYTES = 64 << 10
_SEND_NBYTES = 1 << 20
_TIMEOUT_MS = 60_000

Spans = dict[int, memoryview]


class Sockets:
    """The connections of one rank.

    Args:
        rank: This rank.
        sockets: Connected, non-blocking sockets by rank; None for this rank.
        ranks_per_host: The number of ranks on each host. Neighbouring ranks share a host.
    """

    def __init__(self, rank: int, sockets: Sequence[socket.socket | None], ranks_per_host: int = 1) -> None:
        self.rank, self.ranks_per_host = rank, ranks_per_host
        self.ranks = len(sockets)
        self.peers = [peer for peer in range(len(sockets)) if peer != rank]
        self._sockets = {peer: sock for peer, sock in enumerate(sockets) if sock is not None}

    def exchange(self, sends: Spans, receives: Spans) -> None:
        """Send and receive all spans concurrently."""
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
                    received = self._sockets[peer].recv_into(span)
                except BlockingIOError:
                    continue
                if received == 0:
                    raise ConnectionError(f"rank {peer} of the benchmark has ended")
                moved = True
                _shorten(receives, peer, span, received)
            if not moved:
                self._wait(sends, receives)

    def _wait(self, sends: Spans, receives: Spans) -> None:
        poll = select.poll()
        for peer in sends.keys() | receives.keys():
            events = (select.POLLOUT if peer in sends else 0) | (select.POLLIN if peer in receives else 0)
            poll.register(self._sockets[peer], events)
        if not poll.poll(_TIMEOUT_MS):
            raise TimeoutError("no byte moved for 60 s between ranks of the benchmark")


def _shorten(spans: Spans, peer: int, span: memoryview, nbytes: int) -> None:
    if nbytes == len(span):
        del spans[peer]
    else:
        spans[peer] = span[nbytes:]


def prepare_socket_call(sockets: Sockets, case: Traffic) -> Callback:
    """Return a function that executes the collective once. Its receive buffers are allocated here."""
    first, *others = _STEPS[case.name](sockets, case)

    def call() -> None:
        first()
        for step in others:
            step()

    return call if others else first


def _bytes(tensor: torch.Tensor) -> memoryview:
    memory: Any = tensor.numpy()
    return memoryview(memory).cast("B")


def _spans(tensors: Sequence[torch.Tensor], peers: Sequence[int]) -> Spans:
    """Return the bytes of each peer's tensor, without empty ones."""
    return {peer: _bytes(tensors[peer]) for peer in peers if tensors[peer].numel()}


def _parts(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Split a tensor into one part per rank, of nearly equal size."""
    return list(torch.tensor_split(tensor, ranks))


def _reduce_into(target: torch.Tensor, sockets: Sockets, sends: Spans) -> Callback:
    """Send each peer its span; add the data of every peer to ``target``."""
    buffers = {peer: torch.empty_like(target) for peer in sockets.peers}
    receives = {peer: _bytes(buffer) for peer, buffer in buffers.items() if buffer.numel()}

    def call() -> None:
        sockets.exchange(sends, receives)
        for tensor in buffers.values():
            target.add_(tensor)

    return call


def _by_hosts(sockets: Sockets, own: memoryview, other: memoryview, combine: Callback) -> list[Callback] | None:
    """Return the steps of an exchange by the first rank of each host, with recursive doubling between the hosts.

    None unless there are several hosts, a power of two, with several ranks each.

    Args:
        sockets: The connections.
        own: This rank's bytes, and the result.
        other: Receives the bytes of another rank.
        combine: Combines both in ``own``.
    """
    rank, each = sockets.rank, sockets.ranks_per_host
    hosts = sockets.ranks // each
    if each == 1 or hosts == 1 or hosts & (hosts - 1):
        return None
    first = rank - rank % each
    if rank != first:
        return [partial(sockets.exchange, {first: own}, {}), partial(sockets.exchange, {}, {first: own})]
    steps: list[Callback] = []
    for member in range(first + 1, first + each):
        steps += [partial(sockets.exchange, {}, {member: other}), combine]
    for bit in range(hosts.bit_length() - 1):
        peer = (rank // each ^ 1 << bit) * each
        steps += [partial(sockets.exchange, {peer: own}, {peer: other}), combine]
    return [*steps, partial(sockets.exchange, dict.fromkeys(range(first + 1, first + each), own), {})]


def _all_reduce(sockets: Sockets, case: Traffic) -> list[Callback]:
    if case.nbytes <= _ONE_ROUND_NBYTES:
        other = torch.empty_like(case.input)
        steps = _by_hosts(sockets, _bytes(case.input), _bytes(other), partial(case.input.add_, other))
        if steps is not None:
            return steps
        return [_reduce_into(case.input, sockets, dict.fromkeys(sockets.peers, _bytes(case.input)))]
    parts = _parts(case.input, case.ranks)
    others, own = _spans(parts, sockets.peers), dict.fromkeys(sockets.peers, _bytes(parts[case.rank]))
    return [_reduce_into(parts[case.rank], sockets, others), partial(sockets.exchange, own, others)]


def _reduce(sockets: Sockets, case: Traffic) -> list[Callback]:
    if case.ranks > 2 and case.nbytes > _ONE_ROUND_NBYTES:
        parts = _parts(case.input, case.ranks)
        others = _spans(parts, sockets.peers)
        sends, receives = ({}, others) if case.rank == 0 else ({0: _bytes(parts[case.rank])}, {})
        return [_reduce_into(parts[case.rank], sockets, others), partial(sockets.exchange, sends, receives)]
    if case.rank == 0:
        return [_reduce_into(case.input, sockets, {})]
    return [partial(sockets.exchange, {0: _bytes(case.input)}, {})]


def _broadcast(sockets: Sockets, case: Traffic) -> list[Callback]:
    """Large tensors by van de Geijn's algorithm: the root scatters parts, and the other ranks all-gather them."""
    if case.ranks == 2 or case.nbytes <= _ONE_ROUND_NBYTES:
        whole = _bytes(case.input)
        return [
            partial(sockets.exchange, *(({}, {0: whole}) if case.rank else (dict.fromkeys(sockets.peers, whole), {})))
        ]
    # Rank r gets part r - 1; the root has all parts.
    parts = _parts(case.input, case.ranks - 1)
    spans = {rank: _bytes(parts[rank - 1]) for rank in range(1, case.ranks)}
    if case.rank == 0:
        return [partial(sockets.exchange, spans, {})]
    own = spans.pop(case.rank)
    return [partial(sockets.exchange, {}, {0: own}), partial(sockets.exchange, dict.fromkeys(spans, own), spans)]


def _all_gather(sockets: Sockets, case: Traffic) -> list[Callback]:
    parts, own = _parts(case.output, case.ranks), dict.fromkeys(sockets.peers, _bytes(case.input))
    copy = partial(parts[case.rank].copy_, case.input)
    return [copy, partial(sockets.exchange, own, _spans(parts, sockets.peers))]


def _reduce_scatter(sockets: Sockets, case: Traffic) -> list[Callback]:
    parts = _parts(case.input, case.ranks)
    copy = partial(case.output.copy_, parts[case.rank])
    return [copy, _reduce_into(case.output, sockets, _spans(parts, sockets.peers))]


def _all_to_all(sockets: Sockets, case: Traffic) -> list[Callback]:
    inputs, outputs = _parts(case.input, case.ranks), _parts(case.output, case.ranks)
    sends, receives = _spans(inputs, sockets.peers), _spans(outputs, sockets.peers)
    return [partial(outputs[case.rank].copy_, inputs[case.rank]), partial(sockets.exchange, sends, receives)]


def _gather(sockets: Sockets, case: Traffic) -> list[Callback]:
    if case.rank != 0:
        return [partial(sockets.exchange, {0: _bytes(case.input)}, {})]
    parts = _parts(case.output, case.ranks)
    return [partial(parts[0].copy_, case.input), partial(sockets.exchange, {}, _spans(parts, sockets.peers))]


def _scatter(sockets: Sockets, case: Traffic) -> list[Callback]:
    if case.rank != 0:
        return [partial(sockets.exchange, {}, {0: _bytes(case.output)})]
    parts = _parts(case.input, case.ranks)
    return [partial(case.output.copy_, parts[0]), partial(sockets.exchange, _spans(parts, sockets.peers), {})]


def _barrier(sockets: Sockets, case: Traffic) -> list[Callback]:
    byte, buffers = memoryview(bytearray(1)), {peer: memoryview(bytearray(1)) for peer in sockets.peers}
    steps = _by_hosts(sockets, byte, memoryview(bytearray(1)), lambda: None)
    return steps or [partial(sockets.exchange, dict.fromkeys(sockets.peers, byte), buffers)]


_STEPS: dict[str, Callable[[Sockets, Traffic], list[Callback]]] = {
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
