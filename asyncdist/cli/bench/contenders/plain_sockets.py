"""The contender "raw": the collectives' traffic and additions over plain sockets between the same processes.

The calling thread sends from and receives into the tensors without blocking, and calls `poll` only when no byte moves.
There are no frames and no checks. Every rank exchanges directly with every other rank. Only in small all-reduces and in
barriers between hosts with several ranks, the first rank of each host exchanges for all of them. Used by `contenders`.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
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
    """The connections of one rank, made by `pacing.connect_ranks`. Neighbouring ranks share a host."""

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
    first, *others = getattr(_Steps(sockets, case), case.name)()

    def call() -> None:
        first()
        for step in others:
            step()

    return call if others else first


def _bytes(tensor: torch.Tensor) -> memoryview:
    memory: Any = tensor.numpy()
    return memoryview(memory).cast("B")


class _Steps:
    """The steps of each collective on one rank. Rank 0 is the root."""

    def __init__(self, sockets: Sockets, case: Traffic) -> None:
        self._sockets, self._case = sockets, case
        self._peers, self._rank, self._ranks = sockets.peers, case.rank, case.ranks
        self._input, self._output = case.input, case.output
        self._is_small = case.nbytes <= _ONE_ROUND_NBYTES

    def _exchange(self, sends: Spans | None = None, receives: Spans | None = None) -> Callback:
        return partial(self._sockets.exchange, sends or {}, receives or {})

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Split a tensor into one part per rank, of nearly equal size."""
        return list(torch.tensor_split(tensor, self._ranks))

    def _spans(self, tensors: Sequence[torch.Tensor]) -> Spans:
        """Return the bytes of each peer's tensor, without empty ones."""
        return {peer: _bytes(tensors[peer]) for peer in self._peers if tensors[peer].numel()}

    def _to_all(self, tensor: torch.Tensor) -> Spans:
        return dict.fromkeys(self._peers, _bytes(tensor))

    def _reduce_into(self, target: torch.Tensor, sends: Spans) -> Callback:
        """Send each peer its span; add the data of every peer to ``target``."""
        buffers = {peer: torch.empty_like(target) for peer in self._peers}
        exchange = self._exchange(sends, {peer: _bytes(buffer) for peer, buffer in buffers.items() if buffer.numel()})

        def call() -> None:
            exchange()
            for tensor in buffers.values():
                target.add_(tensor)

        return call

    def _by_hosts(self, own: memoryview, other: memoryview, combine: Callback) -> list[Callback]:
        """Return the steps of an exchange by the first rank of each host, with recursive doubling between the hosts.

        ``combine`` combines this rank's bytes ``own`` with those that ``other`` has received, in ``own``. Empty unless
        there are several hosts, a power of two, with several ranks each.
        """
        rank, each = self._rank, self._sockets.ranks_per_host
        hosts = self._ranks // each
        if each == 1 or hosts == 1 or hosts & (hosts - 1):
            return []
        first = rank - rank % each
        if rank != first:
            return [self._exchange({first: own}), self._exchange(receives={first: own})]
        steps: list[Callback] = []
        for member in range(first + 1, first + each):
            steps += [self._exchange(receives={member: other}), combine]
        for bit in range(hosts.bit_length() - 1):
            peer = (rank // each ^ 1 << bit) * each
            steps += [self._exchange({peer: own}, {peer: other}), combine]
        return [*steps, self._exchange(dict.fromkeys(range(first + 1, first + each), own))]

    def all_reduce(self) -> list[Callback]:
        if self._is_small:
            other = torch.empty_like(self._input)
            steps = self._by_hosts(_bytes(self._input), _bytes(other), partial(self._input.add_, other))
            return steps or [self._reduce_into(self._input, self._to_all(self._input))]
        parts = self._parts(self._input)
        own, others = parts[self._rank], self._spans(parts)
        return [self._reduce_into(own, others), self._exchange(self._to_all(own), others)]

    def reduce(self) -> list[Callback]:
        if self._ranks > 2 and not self._is_small:
            parts = self._parts(self._input)
            own, others = parts[self._rank], self._spans(parts)
            gather = self._exchange({0: _bytes(own)}) if self._rank else self._exchange(receives=others)
            return [self._reduce_into(own, others), gather]
        return [self._exchange({0: _bytes(self._input)}) if self._rank else self._reduce_into(self._input, {})]

    def broadcast(self) -> list[Callback]:
        """Large tensors by van de Geijn's algorithm: the root scatters parts, and the other ranks all-gather them."""
        if self._ranks == 2 or self._is_small:
            whole = self._to_all(self._input)
            return [self._exchange(receives={0: whole[0]}) if self._rank else self._exchange(whole)]
        # Rank r gets part r - 1; the root has all parts.
        parts = torch.tensor_split(self._input, self._ranks - 1)
        spans = {rank: _bytes(parts[rank - 1]) for rank in range(1, self._ranks)}
        if self._rank == 0:
            return [self._exchange(spans)]
        own = spans.pop(self._rank)
        return [self._exchange(receives={0: own}), self._exchange(dict.fromkeys(spans, own), spans)]

    def all_gather(self) -> list[Callback]:
        parts = self._parts(self._output)
        copy = partial(parts[self._rank].copy_, self._input)
        return [copy, self._exchange(self._to_all(self._input), self._spans(parts))]

    def reduce_scatter(self) -> list[Callback]:
        parts = self._parts(self._input)
        copy = partial(self._output.copy_, parts[self._rank])
        return [copy, self._reduce_into(self._output, self._spans(parts))]

    def all_to_all(self) -> list[Callback]:
        inputs, outputs = self._parts(self._input), self._parts(self._output)
        copy = partial(outputs[self._rank].copy_, inputs[self._rank])
        return [copy, self._exchange(self._spans(inputs), self._spans(outputs))]

    def gather(self) -> list[Callback]:
        if self._rank:
            return [self._exchange({0: _bytes(self._input)})]
        parts = self._parts(self._output)
        return [partial(parts[0].copy_, self._input), self._exchange(receives=self._spans(parts))]

    def scatter(self) -> list[Callback]:
        if self._rank:
            return [self._exchange(receives={0: _bytes(self._output)})]
        parts = self._parts(self._input)
        return [partial(self._output.copy_, parts[0]), self._exchange(self._spans(parts))]

    def barrier(self) -> list[Callback]:
        own, *buffers = (memoryview(bytearray(1)) for _ in range(self._ranks))
        receives = dict(zip(self._peers, buffers, strict=True))
        steps = self._by_hosts(own, memoryview(bytearray(1)), lambda: None)
        return steps or [self._exchange(dict.fromkeys(self._peers, own), receives)]
