"""The average of a vector over a group, with compressed transfers, as a coroutine of awaited collectives.

Two ranks exchange their codes, and both decode both. More ranks make a compressed all-reduce: each rank sends a shard of
its vector to every other one, averages the shards that it receives in float32, and sends the code of the average to all.
The vector travels in pieces, of which several are on the wire while others are encoded and decoded.

Every rank decodes the same bytes in the same order, so all ranks end with the same bits. Error feedback covers both
encodings: the owner of a shard keeps what the second one loses, in proportion to the number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

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
    average = _exchange if group.size() == 2 else _reduce
    step, sent = max(codec.block, PIECE_COUNT // codec.block * codec.block), list[int]()
    pieces = [
        average(group, codec, sent, *(tensor[start : start + step] for tensor in (compensated, result, lost)))
        for start in range(0, values.numel(), step)
    ]
    await _run(pieces)
    return Average(result, lost, sum(sent))


_Piece: TypeAlias = Iterator[Work[Any] | None]
"""A part of the vector, on its way. It yields each collective for which it waits."""


async def _run(pieces: list[_Piece]) -> None:
    """Take the pieces through their stages. The order of the collectives depends on the number of pieces only."""
    works: dict[int, Work[Any] | None] = {}
    try:
        for place in range(len(pieces) + 2 * _DEPTH):
            for number in (place, place - _DEPTH, place - 2 * _DEPTH):
                if 0 <= number < len(pieces):
                    if (work := works.get(number)) is not None:
                        await work
                    works[number] = next(pieces[number], None)
    except BaseException:
        for work in works.values():
            if work is not None:
                # Nothing waits for it any more: its error is not logged.
                work.exception()
        raise


def _exchange(
    group: Group, codec: VectorCodec, sent: list[int], values: torch.Tensor, result: torch.Tensor, lost: torch.Tensor
) -> _Piece:
    """Average over two ranks: each sends its code to the other one."""
    own, count = codec.encode(values), values.numel()
    codes = [torch.empty_like(own) for _ in range(2)]
    sent.append(own.numel())
    yield group.all_gather(codes, own)
    decoded = [codec.decode(code, count) for code in codes]
    torch.sub(values, decoded[group.rank()], out=lost)
    torch.add(*decoded, out=result).mul_(0.5)
    drop_infinite(lost)


def _reduce(
    group: Group, codec: VectorCodec, sent: list[int], values: torch.Tensor, result: torch.Tensor, lost: torch.Tensor
) -> _Piece:
    """Average over more ranks: an all-to-all of the codes of shards, and an all-gather of the codes of their averages."""
    size, rank = group.size(), group.rank()
    share = -(-values.numel() // size)
    ends = [min(values.numel(), each * (share + -share % codec.block)) for each in range(size + 1)]
    # Rounded up to whole blocks, the last shards may be short or empty.
    shards = list(itertools.starmap(slice, itertools.pairwise(ends)))
    counts = [shard.stop - shard.start for shard in shards]
    outgoing = [codec.encode(values[shard]) for shard in shards]
    for shard, code, count in zip(shards, outgoing, counts, strict=True):
        torch.sub(values[shard], codec.decode(code, count), out=lost[shard])
    codes = [torch.empty_like(outgoing[rank]) for _ in range(size)]
    sent += [code.numel() for peer, code in enumerate(outgoing) if peer != rank]
    yield group.all_to_all(codes, outgoing)
    own, count = shards[rank], counts[rank]
    total = codec.decode(codes[0], count)
    for code in codes[1:]:
        total += codec.decode(code, count)
    total /= size
    code = codec.encode(total)
    # The next vector of this rank is divided by the number of ranks too.
    lost[own].add_(total.sub_(codec.decode(code, count)), alpha=size)
    codes = [torch.empty_like(each) for each in outgoing]
    sent.append(code.numel() * (size - 1))
    yield group.all_gather(codes, code)
    for shard, code, count in zip(shards, codes, counts, strict=True):
        result[shard] = codec.decode(code, count)
    drop_infinite(lost)
