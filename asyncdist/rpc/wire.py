"""The messages of remote calls: msgpack lists of the kind, a number, and the fields that docs/wire-formats.md lists.

The number is that of the call, of the reference (RELEASE, GRANT), of the offer, or of the loan. A target is the name of an
object or the number of a reference. CREDIT lets the callee send further items, RELEASE returns holds, GRANT names the port
to which the sender gives a hold. An empty reason of an ANSWER accepts the offer; one of LENT_BYTES says that the content is
in the buffers.

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

VERSION = 4
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
