"""The groups of one rank, the peers that it has lost, and what becomes of a failure.

A failure has one of two radii: a lost peer fails every group that holds it; any other failure (a deadline, a mismatch, an
abort) fails one group. The rank that notices a failure tells the members of the group at once. Each of them passes the
notice on to the ranks at distances 1, 2, 4, …, so that it arrives even if the first rank dies while telling.

The `Endpoint` owns one `GroupFailures` and calls it under the lock of its `Progress`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from time import monotonic

from asyncdist.base.descriptors import is_exhausted
from asyncdist.base.timers import TimerTable
from asyncdist.config import Config
from asyncdist.engine.control_messages import ENDED, LEFT, abort, closing_frames, decode_abort, to_tell
from asyncdist.engine.executor import Executor
from asyncdist.engine.operation import Channel, local_failure
from asyncdist.engine.routing import TransportSelector
from asyncdist.errors import GroupAbortedError, GroupError, PeerLostError, TransportUnavailableError
from asyncdist.tracing.recorder import Recorder
from asyncdist.transport.base import Link, Outgoing

log = logging.getLogger("asyncdist")

_MOST_ENDED = 1 << 16
"""Ended groups that are remembered, because their last messages may still be under way."""
GRACE = 0.5
"""Seconds between the suspicion that a peer is lost and the failure; the peer may just have left in order."""
_NOTIFY_AGAIN = 1.0
"""Seconds until a notice is sent again for which this process had no file descriptor."""


class GroupFailures:
    """Which groups are open, which have failed, and which peers are lost.

    Args:
        recorder: The flight recorder, dumped at a failure.
        executor: The executor, whose operations fail with their groups.
        selector: The transports; they forget a lost peer.
        timers: The timers of the endpoint.
        link: Returns the link to a peer, and raises `GroupError` for a lost peer.
        discard: Drops the messages of a group, by the first 8 bytes of their keys.
        read_arrived: Reads what has arrived from a peer.
    """

    def __init__(
        self,
        config: Config,
        recorder: Recorder,
        executor: Executor,
        selector: TransportSelector,
        timers: TimerTable,
        link: Callable[[int], Link],
        discard: Callable[[bytes], None],
        read_arrived: Callable[[int], None],
    ) -> None:
        self._rank, self._world_size, self._config = recorder.rank, recorder.world_size, config
        self._recorder, self._executor, self._selector, self._timers = recorder, executor, selector, timers
        self._link, self._discard, self._read_arrived = link, discard, read_arrived
        self.channels: dict[bytes, Channel] = {}
        """The open groups, by the first 8 bytes of their messages' keys."""
        self.ended: dict[bytes, GroupError | None] = {}
        """The errors of failed groups, by the first 8 bytes of their messages' keys; None for groups that were left."""
        self.lost_peers: dict[int, GroupError] = {}
        """The errors of lost peers, by rank."""
        self._failed: dict[int, GroupError] = {}
        self._leaving: dict[int, str] = {}
        self._goodbye = LEFT

    # -- groups --------------------------------------------------------------------------------

    @property
    def any_failed(self) -> bool:
        """Whether a group has failed. This rank then stays reachable, so that its peers learn of the failure."""
        return bool(self._failed)

    def open(self, channel: Channel) -> None:
        """Accept operations and messages of a group from now on."""
        self.channels[channel.prefix] = channel
        if not channel.point_to_point:
            self._recorder.add_group(channel.name, channel.members, lambda: channel.highest)
        early = self.ended.pop(channel.prefix, None)
        if early is not None:  # a peer that made the group before this rank has failed it already
            self.fail(channel, early)
        for member in channel.members:
            if member in self.lost_peers and member not in self._leaving:
                self.fail(channel, self.lost_peers[member])

    def end(self, channel: Channel) -> None:
        """Forget a group: its pending operations fail, and later messages for it are discarded."""
        if self.channels.pop(channel.prefix, None) is None:
            return
        closed = GroupAbortedError("the group was destroyed while this operation was pending", peer=self._rank)
        if channel.error is None:
            channel.error = closed
        self._executor.abandon(channel, closed)
        self._forget(channel, None)

    def end_all(self) -> None:
        """Forget every group."""
        for channel in list(self.channels.values()):
            self.end(channel)

    def fail(self, channel: Channel, error: GroupError, *, told_by: int | None = None) -> None:
        """Fail a group: everything pending on it, and every later call."""
        if channel.error is not None:
            return
        self._failed[channel.number] = error
        log.info("rank %d: group %r failed: %s", self._rank, channel.name, error.reason)
        if self._config.dump_dir:
            self._recorder.dump(self._config.dump_dir, str(error))
        for one in (channel, channel.sibling):
            if one is not None and one.error is None:
                one.error = error
                self._executor.abandon(one, error)
                self._forget(one, error)
        peers = to_tell(channel.members, self._rank, told_by)
        self.notify(peers, lambda peer: abort(peer, channel.number, error, self._rank))

    def _fail_all(self, error: GroupError) -> None:
        for channel in list(self.channels.values()):
            self.fail(channel, error)

    def _forget(self, channel: Channel, error: GroupError | None) -> None:
        self.ended[channel.prefix] = error
        if len(self.ended) > _MOST_ENDED:
            del self.ended[next(iter(self.ended))]
        self._discard(channel.prefix)

    # -- notices -------------------------------------------------------------------------------

    def notify(self, peers: Iterable[int], notice: Callable[[int], Outgoing]) -> None:
        """Send a notice to each peer that can be reached."""
        for peer in peers:
            if not self.hears_notices(peer):
                continue
            try:
                self._link(peer).send(notice(peer))
            except TransportUnavailableError:  # it cannot be told
                pass
            except OSError as cause:
                if not is_exhausted(cause):
                    raise
                again = functools.partial(self.notify, [peer], notice)
                self._timers.schedule(again, monotonic() + _NOTIFY_AGAIN, again)

    def hears_notices(self, peer: int) -> bool:
        """Return whether a peer is neither lost nor leaving."""
        return peer not in self.lost_peers and peer not in self._leaving

    def told(self, peer: int, key: bytes, body: bytes, trouble: Callable[[Iterable[int]], str]) -> None:
        """Take a peer's notice that a group has failed."""
        error = decode_abort(body, peer, self._rank, trouble)
        channel = self.channels.get(key[:8])
        if channel is not None:
            self.fail(channel, error, told_by=peer)
        else:
            self.ended.setdefault(key[:8], error)

    @property
    def closing_frames(self) -> bytes:
        """The frames to write before a connection is closed: the failures of groups, then goodbye."""
        return closing_frames(self._failed, self._rank, self._goodbye)

    def end_with_process(self) -> None:
        """Say in the goodbye that the process has ended without destroying its groups."""
        self._goodbye = ENDED

    # -- peers ---------------------------------------------------------------------------------

    def leaves(self, peer: int, reason: str) -> None:
        """Take a peer's goodbye."""
        self._leaving[peer] = reason or LEFT

    def gone(self, peer: int) -> GroupError | None:
        """Return the error of a lost peer; None if the peer is not lost."""
        return self.lost_peers.get(peer)

    def lost(self, peer: int, reason: str) -> None:
        """Fail every group that contains a peer; if the peer has said goodbye, only those that wait for it."""
        if peer in self.lost_peers:
            return
        if peer in self._leaving:
            if any(transport.may_receive_from(peer) for transport in self._selector.transports):
                return  # what it sent before it left is still to be read
            reason = self._leaving[peer]
        error = self.lost_peers[peer] = PeerLostError(peer, reason)
        for channel in list(self.channels.values()):
            if peer in channel.members and (peer not in self._leaving or self._waits_for(channel, peer)):
                self.fail(channel, error)
        for transport in self._selector.transports:
            transport.disconnect(peer)

    def suspect(self, peer: int, reason: str) -> None:
        """Declare a peer lost after a grace period, unless a message explains the closed connection before."""
        if peer not in self.lost_peers:
            self._timers.schedule(peer, monotonic() + GRACE, functools.partial(self._give_up, peer, reason))

    def _give_up(self, peer: int, reason: str) -> None:
        # A process that was held up may not have read yet what arrived long ago.
        self._read_arrived(peer)
        self.lost(peer, reason)

    def _waits_for(self, channel: Channel, peer: int) -> bool:
        last = set(channel.members) - {self._rank} <= self.lost_peers.keys()
        return self._executor.waits_for(channel, peer, last=last)

    # -- this process --------------------------------------------------------------------------

    def interrupted(self, cause: BaseException) -> None:
        """Fail every group, because an exception has stopped the transports of this rank."""
        if is_exhausted(cause):  # no stream was cut
            self._fail_all(local_failure(cause, self._rank))
            return
        # A stream that was cut at an unknown byte carries no further notice; closing it tells the peers.
        reason = f"interrupted by {type(cause).__name__} in the middle of a transfer"
        error = GroupAbortedError(f"rank {self._rank} was {reason}", peer=self._rank)
        error.__cause__ = cause
        self.lost_peers.update(dict.fromkeys(range(self._world_size), error))
        self._fail_all(error)
        for transport in self._selector.transports:
            for peer in self.lost_peers:
                transport.disconnect(peer)

    def forked(self) -> None:
        """Fail every group in a forked child, which is not a rank. No peer is told."""
        error = GroupAbortedError(
            f"this process was forked from rank {self._rank} and is not a rank itself; create the world in the child",
            peer=self._rank,
        )
        self.lost_peers.update(dict.fromkeys(range(self._world_size), error))
        for channel in self.channels.values():
            channel.error = channel.error or error
            self._executor.abandon(channel, error)
