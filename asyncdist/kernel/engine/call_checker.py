"""Checks that the members of a group call the same collective with the same arguments.

Each message carries the fingerprint of its sender's call. Ranks whose calls differ may also wait for each other without a
message, for example two ranks that each expect the other to be the root of a broadcast. A rank that has waited for a while
therefore sends its peers the fingerprint of its call.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncdist.errors import MismatchError
from asyncdist.kernel.engine.executor import EngineHost
from asyncdist.kernel.engine.operation import Channel
from asyncdist.kernel.transport.wire_format import Fingerprint, describe_call


class CollectiveChecker:
    """Compares the calls of one rank with those of its peers. Called under the lock of the world's `Progress`.

    A group in which calls differ fails. The flight recorder has the fingerprints of completed calls.

    Args:
        host: The rank's endpoint.
        channels: The open groups, by the first 8 bytes of their messages' keys.
    """

    def __init__(self, host: EngineHost, channels: Mapping[bytes, Channel]) -> None:
        self._recorder, self._operations = host.recorder, host.operations
        self._channels, self._fail = channels, host.fail
        self.early_calls: dict[bytes, set[tuple[int, int]]] = {}
        """(peer, fingerprint) of calls that peers have made before this rank, by the operation's key."""

    def difference(self, peer: int, own: int, other: int) -> MismatchError:
        """Return the error of two ranks whose calls have different fingerprints."""
        rank = self._recorder.rank
        return MismatchError(peer, describe_call(Fingerprint.unpack(own), rank, Fingerprint.unpack(other), peer))

    def compare(self, channel: Channel, key: bytes, own: int) -> None:
        """Compare a call of this rank with the fingerprints that peers have sent for it before."""
        for peer, other in self.early_calls.pop(key, ()):
            if other != own:
                self._fail(channel, self.difference(peer, own, other))

    def refuses(self, peer: int, key: bytes, other: int) -> bool:
        """Compare a message without a posted receive with this rank's call; return whether to discard it."""
        channel, operation = self._channels.get(key[:8]), self._operations.get(key[:12])
        if operation is not None:
            channel, own = operation.channel, operation.plan.fingerprint
            if other == own:
                return False
        elif channel is not None and channel.has_ended(key):  # no receive will be posted for it
            own = self._recorder.fingerprint(channel.name, key)
        else:
            if channel is None or not channel.point_to_point:
                self._record(peer, key, other)
            return False
        self._fail(channel, self.difference(peer, own, other))
        return True

    def answer(self, peer: int, key: bytes, other: int) -> None:
        """Compare the call of a peer that waits for this rank with this rank's call: pending, complete or in future."""
        channel, operation = self._channels.get(key[:8]), self._operations.get(key[:12])
        if operation is not None:
            own = operation.plan.fingerprint
        elif channel is not None and channel.has_ended(key):
            # If the recorder has dropped the call, do not report a mismatch.
            own = self._recorder.fingerprint(channel.name, key) or other
        else:
            self._record(peer, key, other)
            return
        if channel is not None and own != other:
            self._fail(channel, self.difference(peer, own, other))

    def _record(self, peer: int, key: bytes, other: int) -> None:
        self.early_calls.setdefault(key[:12], set()).add((peer, other))

    def forget(self, prefix: bytes) -> None:
        """Drop the early calls of a group that has ended, by the first 8 bytes of its keys."""
        for key in [key for key in self.early_calls if key.startswith(prefix)]:
            del self.early_calls[key]
