"""The names of the collectives and reductions, with their numbers in fingerprints. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Collective(IntEnum):
    """Every operation of a group. Its number is part of the fingerprint of a call."""

    all_reduce = 1
    reduce = 2
    broadcast = 3
    all_gather = 4
    gather = 5
    scatter = 6
    reduce_scatter = 7
    all_to_all = 8
    barrier = 9
    all_reduce_coalesced = 10
    all_gather_coalesced = 11
    monitored_barrier = 12
    send = 13
    recv = 14
    all_gather_object = 15
    gather_object = 16
    scatter_object_list = 17
    broadcast_object_list = 18


PREPARES = len(Collective)
"""Added to the number of a collective, at most 11, in the fingerprint with which ranks prepare a persistent one.

Numbers above 31 would give fingerprints that are no positive numbers of 64 bits with a sign.
"""


def is_message(op: str) -> bool:
    """Return whether an operation is point-to-point. Its sequence number is then its tag, which messages may share."""
    return op.startswith(("send", "recv"))


class ReduceOp(Enum):
    """Element-wise reductions, by torch.distributed's names.

    ``AVG`` divides the sum by the number of ranks. As in NCCL, integers are summed in their own dtype, which may overflow,
    and the quotient is truncated towards zero. ``AVG`` is not defined for bool. ``PREMUL_SUM`` multiplies each rank's input
    by a factor before the sum: pass ``premul_sum(factor)``. It is not defined for integers.
    """

    SUM = 1
    AVG = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8
    PREMUL_SUM = 9

    # Members are unique. Enum's own hash is a Python function, which slows down every look-up.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class PremulSum:
    """A `ReduceOp.PREMUL_SUM` with its factor; made by `premul_sum`."""

    factor: float

    @property
    def name(self) -> str:
        return "PREMUL_SUM"


Reduction = ReduceOp | PremulSum


def premul_sum(factor: float) -> PremulSum:
    """Return the reduction that sums ``factor * tensor`` over the ranks; each rank may have its own factor."""
    try:
        return PremulSum(float(factor))
    except (TypeError, ValueError):
        raise ValueError(f"a factor of premul_sum is a number, not {factor!r}") from None
