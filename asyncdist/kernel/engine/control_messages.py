"""Control messages: the notice that a group has failed, and the last frames of a rank that leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgpack

from asyncdist.base.backoff import Backoff, Sleep
from asyncdist.base.deadline import Deadline
from asyncdist.errors import GroupAbortedError, GroupError, MismatchError, OperationTimeoutError, PeerLostError
from asyncdist.kernel.engine.executor import EngineHost
from asyncdist.kernel.transport.wire_format import ABORT, GOODBYE, pack_header, pack_key

LEFT = "it has destroyed its process group"
ENDED = "its process has ended"
EXCLUDES = "it has declared this rank lost"
"""The goodbye to a peer that is lost here, and may be alive. The sender has not left."""
MAX_CLOSING_FAILURES = 64
"""The number of failures in the closing frames of a rank."""
_MOST_NOTIFIED = 64
"""The members of a group whose failure one rank tells to all others."""
_LAST_WORDS, _FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 1e-3, 8e-3
"""Seconds for which a rank that leaves may wait until its notices and last bytes are sent, and between two looks."""
_LONGEST_REASON = 1024
"""The characters of a reason that a message contains: a transport limits the bytes of all closing frames."""


def encode_abort(error: GroupError, rank: int) -> bytes:
    """Return a failure as the body of a notice from ``rank``."""
    packed: bytes = msgpack.packb(
        {
            "kind": type(error).__name__,
            "reason": error.reason[:_LONGEST_REASON],
            "peer": getattr(error, "peer", None),
            "by": rank if error.by is None else error.by,
            "noticed": getattr(error, "noticed", None),
            "last_heard": getattr(error, "last_heard", None),
        }
    )
    return packed


def decode_abort(body: bytes, peer: int, host: EngineHost) -> GroupError:
    """Return the error for the rank of ``host`` of a notice from ``peer``."""
    try:
        notice = msgpack.unpackb(body)
        kind, reason, by = str(notice["kind"]), str(notice["reason"]), int(notice["by"])
        about, noticed, last_heard = notice["peer"], notice["noticed"], notice["last_heard"]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException):
        return GroupAbortedError(f"rank {peer} aborted the group without a legible reason", peer=peer)
    error: GroupError
    if kind == PeerLostError.__name__ and about == host.rank:
        error = PeerLostError(by, f"it found that {reason}")
    elif kind == PeerLostError.__name__ and isinstance(about, int):
        error = PeerLostError(about, "")
        error.reason = reason if "noticed by" in reason else f"{reason}, noticed by rank {by}"
    elif kind == MismatchError.__name__ and isinstance(about, int):
        names_finder = "found that" in reason or reason.startswith(f"rank {by} ")
        error = MismatchError(by, reason if names_finder else f"rank {by} found that {reason}")
    elif kind == OperationTimeoutError.__name__:
        error = GroupAbortedError(f"rank {by} {reason}", peer=by)
        error.explain(host.connectivity_problem([by]))
    else:
        error = GroupAbortedError(reason if reason.startswith("rank") else f"rank {by}: {reason}", peer=by)
    if isinstance(error, PeerLostError):
        error.noticed = str(noticed or error.noticed)
        error.last_heard = last_heard if isinstance(last_heard, float) else None
    error.by = by
    return error


def ranks_to_notify(members: Sequence[int], rank: int, notified_by: int | None) -> list[int]:
    """Return the ranks that ``rank`` notifies: in a small group all members if it detected the failure itself.

    Else those at distances 1, 2, 4, …, which pass the notice on: it reaches all members in a logarithmic number of steps,
    also if some are lost. Connections of one rank to all members of a large group would take longer.
    """
    others, size = members, len(members)
    if notified_by is not None or size > _MOST_NOTIFIED:
        own = members.index(rank)
        others = [members[(own + (1 << k)) % size] for k in range(max(1, (size - 1).bit_length()))]
    return [member for member in others if member not in (rank, notified_by)]


def closing_frames(failures: Mapping[int, GroupError], rank: int, reason: str) -> bytes:
    """Return the last bytes of ``rank`` on a connection: the failures of groups, by channel number, then goodbye.

    The failures come first: if a rank leaves because of a failure, its peers must not see its departure as the cause.
    """
    frames = []
    for number, error in failures.items():
        body = encode_abort(error, rank)
        frames.append(pack_header(pack_key(number, 0, 0), 0, len(body), ABORT) + body)
    goodbye = reason[:_LONGEST_REASON].encode()
    return b"".join(frames) + pack_header(pack_key(0, 0, 0), 0, len(goodbye), GOODBYE) + goodbye


def last_words(pause: Sleep | None = None) -> Backoff:
    """Return the looks of a rank that leaves at whether its last bytes have been sent, which no event reports."""
    return Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, Deadline.after(_LAST_WORDS), sleep=pause)
