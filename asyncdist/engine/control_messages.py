"""Control messages about a group: that it failed, which call a rank waits in, and that a rank leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgpack

from asyncdist.errors import GroupAbortedError, GroupError, MismatchError, OperationTimeoutError, PeerLostError
from asyncdist.transport.matching import Outgoing
from asyncdist.transport.wire_format import ABORT, CALLED, GOODBYE, pack_header, pack_key

LEFT = "it has destroyed its process group"
ENDED = "its process has ended"
_MOST = 64  # failures that fit into the last words of a rank


def encode_abort(error: GroupError, rank: int) -> bytes:
    """Return a failure as the body of a notice from ``rank``."""
    said = {
        "kind": type(error).__name__,
        "reason": error.reason,
        "peer": getattr(error, "peer", None),
        "by": rank if error.by is None else error.by,
    }
    packed: bytes = msgpack.packb(said)
    return packed


def abort(peer: int, number: int, error: GroupError, rank: int) -> Outgoing:
    """Return the notice by which ``rank`` tells ``peer`` that a group has failed."""
    return Outgoing(peer, pack_key(number, 0, 0), 0, memoryview(encode_abort(error, rank)), None, ABORT)


def called(peer: int, operation: bytes, fingerprint: int) -> Outgoing:
    """Return the notice that tells ``peer`` what we called, where we wait for it (12 bytes of keys)."""
    return Outgoing(peer, operation + bytes(4), 0, memoryview(fingerprint.to_bytes(8, "little")), None, CALLED)


def decode_abort(body: bytes, peer: int, rank: int, trouble: Callable[[Sequence[int]], str]) -> GroupError:
    """Return the failure that a notice of ``peer`` tells of, from the view of ``rank``, which has ``trouble`` with some."""
    try:
        said = msgpack.unpackb(body)
        kind, reason, by = str(said["kind"]), str(said["reason"]), int(said["by"])
        about = said["peer"]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException):
        return GroupAbortedError(f"rank {peer} aborted the group without a legible reason", peer=peer)
    error: GroupError
    if kind == PeerLostError.__name__ and about == rank:
        error = PeerLostError(by, f"it found that {reason}")
    elif kind == PeerLostError.__name__ and isinstance(about, int):
        error = PeerLostError(about, "")
        error.reason = reason if "noticed by" in reason else f"{reason}, noticed by rank {by}"
    elif kind == MismatchError.__name__ and isinstance(about, int):
        error = MismatchError(by, f"rank {by} found that {reason}" if "found that" not in reason else reason)
    elif kind == OperationTimeoutError.__name__:
        error = GroupAbortedError(f"rank {by} {reason}", peer=by)
        error.explain(trouble([by]))
    else:
        error = GroupAbortedError(reason if reason.startswith("rank") else f"rank {by}: {reason}", peer=by)
    error.by = by
    return error


def to_tell(members: Sequence[int], rank: int, told_by: int | None) -> list[int]:
    """Return the ranks that ``rank`` notifies: all members if it detected the failure, else those at distances 1, 2,
    4, …"""
    if told_by is None:
        others = list(members)
    else:
        size, own = len(members), members.index(rank)
        others = [members[(own + (1 << k)) % size] for k in range(max(1, (size - 1).bit_length()))]
    return [member for member in others if member not in (rank, told_by)]


def closing_frames(failures: Mapping[int, GroupError], rank: int, reason: str) -> bytes:
    """Return what ``rank`` writes at the end of a connection: how groups (by number) have failed, then goodbye.

    The failures come first, so that a peer does not take a rank that leaves because of a failure for its cause.
    """
    frames = []
    for number, error in list(failures.items())[-_MOST:]:
        body = encode_abort(error, rank)
        frames.append(pack_header(pack_key(number, 0, 0), 0, len(body), ABORT) + body)
    said = reason.encode()
    return b"".join(frames) + pack_header(pack_key(0, 0, 0), 0, len(said), GOODBYE) + said
