"""The average of a vector over a group, with compressed transfers, as a coroutine of awaited collectives.

Two ranks exchange their codes, and both decode both. More ranks make a compressed all-reduce: each rank sends a shard of
its vector to every other one, averages the shards that it receives in float32, and sends the code of the average to all.
The vector travels in pieces, of which several are on the wire while others are encoded and decoded.

Every rank decodes the same bytes in the same order, so all ranks end with the same bits. Error feedback covers both
encodings: the owner of a shard keeps what the second one loses, in proportion to the number of ranks.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.ddp.compression import ErrorFeedback, VectorCodec, drop_infinite
from asyncdist.groups import Group
from asyncdist.kernel import Work

PIECE_COUNT = 1 << 18
"""Elements of a piece: small enough to be encoded in about a millisecond."""
_DEPTH = 8
"""Pieces between two stages."""


class Average(NamedTuple):
    """What `average_of` returns.

    Attributes:
        values: The average, in a tensor of its own.
        lost: The loss that this rank's error feedback is to keep; None without a codec.
        sent_nbytes: Bytes that this rank has sent for it, without headers.
    """

    values: torch.Tensor
    lost: torch.Tensor | None
    sent_nbytes: int


async def average_of(
    group: Group, values: torch.Tensor, codec: VectorCodec | None = None, feedback: ErrorFeedback | None = None
) -> Average:
    """Average ``values`` over the group. Every member calls it, with the same number of elements and codec.

    Neither ``values`` nor ``feedback`` changes, so a failed call can be repeated. After a success the caller stores the
    loss: ``feedback.residual = average.lost``.

    Args:
        group: The group. The call issues several collectives in a fixed order.
        values: A contiguous vector of one dimension: float32, or any dtype of floats without a codec.
        codec: How the values travel; None sends them as they are, in one all-reduce.
        feedback: The error of earlier calls with this vector; None for no error.

    Raises:
        GroupError: A member is lost, or the group has failed.

    Example:
        >>> average = await average_of(group, gradients, IntegerCodec(8), feedback)
        >>> feedback.residual = average.lost
    """
    if codec is None:
        result = values.clone()
        await group.all_reduce(result, ReduceOp.AVG)
        return Average(result, None, 2 * values.nbytes * (group.size() - 1) // group.size())
    compensated = values.clone()
    if feedback is not None:
        feedback.add_to(compensated)
    if group.size() == 1:
        return Average(compensated, torch.zeros_like(values), 0)
    result, lost = torch.empty_like(values), torch.empty_like(values)
    kind = _ExchangedPiece if group.size() == 2 else _ReducedPiece
    step = max(codec.block, PIECE_COUNT // codec.block * codec.block)
    pieces = [
        kind(group, codec, *(tensor[start : start + step] for tensor in (compensated, result, lost)))
        for start in range(0, values.numel(), step)
    ]
    await _run(pieces)
    return Average(result, lost, sum(piece.sent_nbytes for piece in pieces))


async def _run(pieces: list[Any]) -> None:
    """Take the pieces through their stages. The order of the collectives depends on the number of pieces only."""
    count = len(pieces)
    try:
        for place in range(count + 2 * _DEPTH):
            if place < count:
                pieces[place].send()
            if 0 <= place - _DEPTH < count:
                await pieces[place - _DEPTH].reduce()
            if 0 <= place - 2 * _DEPTH < count:
                await pieces[place - 2 * _DEPTH].finish()
    except BaseException:
        for piece in pieces:
            piece.forget()
        raise


class _Piece:
    """A part of the vector, on its way through the stages send, reduce and finish."""

    def __init__(
        self, group: Group, codec: VectorCodec, values: torch.Tensor, result: torch.Tensor, lost: torch.Tensor
    ) -> None:
        self._group, self._codec = group, codec
        self._values, self._result, self._lost = values, result, lost
        self._work: Work[Any] | None = None
        self._codes: list[torch.Tensor] = []
        self.sent_nbytes = 0

    def _bytes_for(self, count: int) -> torch.Tensor:
        return torch.empty(self._codec.encoded_nbytes(count), dtype=torch.uint8, device=self._values.device)

    async def _received(self) -> None:
        assert self._work is not None
        await self._work
        self._work = None

    def _end(self) -> None:
        self._codes = []
        drop_infinite(self._lost)

    def forget(self) -> None:
        """Say that nothing waits for the pending operation any more, so that its error is not logged."""
        if self._work is not None:
            self._work.exception()


class _ExchangedPiece(_Piece):
    """Two ranks: each sends its code to the other one."""

    def send(self) -> None:
        own, count = self._codec.encode(self._values), self._values.numel()
        self._codes = [self._bytes_for(count) for _ in range(2)]
        self._work = self._group.all_gather(self._codes, own)
        self.sent_nbytes = own.numel()

    async def reduce(self) -> None:
        pass

    async def finish(self) -> None:
        await self._received()
        count = self._values.numel()
        decoded = [self._codec.decode(code, count) for code in self._codes]
        torch.sub(self._values, decoded[self._group.rank()], out=self._lost)
        torch.add(*decoded, out=self._result).mul_(0.5)
        self._end()


class _ReducedPiece(_Piece):
    """More ranks: an all-to-all of the codes of shards, and an all-gather of the codes of their averages."""

    def send(self) -> None:
        size, block = self._group.size(), self._codec.block
        share = -(-self._values.numel() // size)
        ends = [min(self._values.numel(), rank * (share + -share % block)) for rank in range(size + 1)]
        # Rounded up to whole blocks, the last shards may be short or empty.
        self._shards = [slice(start, end) for start, end in itertools.pairwise(ends)]
        outgoing = [self._codec.encode(self._values[shard]) for shard in self._shards]
        for shard, code in zip(self._shards, outgoing, strict=True):
            count = shard.stop - shard.start
            torch.sub(self._values[shard], self._codec.decode(code, count), out=self._lost[shard])
        own = self._shards[self._group.rank()]
        self._codes = [self._bytes_for(own.stop - own.start) for _ in range(size)]
        self._work = self._group.all_to_all(self._codes, outgoing)
        self.sent_nbytes = sum(code.numel() for rank, code in enumerate(outgoing) if rank != self._group.rank())

    async def reduce(self) -> None:
        await self._received()
        size, own = self._group.size(), self._shards[self._group.rank()]
        count = own.stop - own.start
        total = self._codec.decode(self._codes[0], count)
        for code in self._codes[1:]:
            total += self._codec.decode(code, count)
        total /= size
        code = self._codec.encode(total)
        # The next vector of this rank is divided by the number of ranks too.
        self._lost[own].add_(total.sub_(self._codec.decode(code, count)), alpha=size)
        self._codes = [self._bytes_for(shard.stop - shard.start) for shard in self._shards]
        self._work = self._group.all_gather(self._codes, code)
        self.sent_nbytes += code.numel() * (size - 1)

    async def finish(self) -> None:
        await self._received()
        for shard, code in zip(self._shards, self._codes, strict=True):
            self._result[shard] = self._codec.decode(code, shard.stop - shard.start)
        self._end()
