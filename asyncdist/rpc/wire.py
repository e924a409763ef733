"""The messages of remote calls: msgpack lists that begin with their kind and the number of the call.

    CALL        number, name of the object or number of the reference, index, method, timeout or None,
                [arguments, keyword arguments]
    RESULT      number, value
    ITEM        number, value                        of a stream
    END         number                               of a stream
    FAILED      number, failure, texts
    CANCEL      number
    CREDIT      number, count                        of further items that the caller takes
    RELEASE     reference, count                     of holds that the sender returns
    GRANT       reference, port                      to which the sender gives a hold
    OFFER       offer, kind, back end, probe         to lend tensors of a device (see `asyncdist.rpc.loans`)
    ANSWER      offer, reason                        of the refusal; empty if the offer is accepted
    RETURNED    loan
    DECLINED    loan, reason
    LENT_BYTES  loan, reason                         why they do not come; empty if they are the buffers

A tensor in a value stands for a buffer of the message. If the arguments or the value are long, they are the first buffer of
the message, and None stands in their place. A message with lent tensors ends with the number of their loan, and its last
buffer has their locations.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgpack

CALL, RESULT, ITEM, END, FAILED, CANCEL, CREDIT, RELEASE, GRANT = range(9)
OFFER, ANSWER, RETURNED, DECLINED, LENT_BYTES = range(9, 14)

VERSION = 3
"""Of these messages. Processes with different versions do not call each other."""


class Failure(IntEnum):
    """Why a call failed. Each has texts: a reason, or those of `RemoteError`."""

    RAISED = 0
    REFUSED = 1
    RESULT_NOT_CARRIED = 2
    OVERLOADED = 3
    TIMED_OUT = 4


_packer = msgpack.Packer(strict_types=True, unicode_errors="surrogatepass")


def pack_plain(value: Any) -> bytes:
    """Return plain data as msgpack. Raises TypeError, ValueError or OverflowError for other objects.

    The packer is reused, because making one takes longer than packing a call. It is used on one thread at a time: those of
    the loops of one process hold the interpreter for the whole call.
    """
    packed: bytes = _packer.pack(value)
    return packed


class HasExtensions(Exception):
    """The bytes have values that plain msgpack does not know."""


def refuse_extension(code: int, data: bytes) -> Any:
    """Refuse a value that msgpack itself does not have."""
    raise HasExtensions
