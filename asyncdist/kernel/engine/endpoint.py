"""One rank's view of its world: its peers, the links and the matching queues to them, and its operations.

An `Endpoint` is the `Host` that transports report to, the `EngineHost` of its parts, and the `Machine` that `Progress`
drives. `GroupFailures` holds the groups and handles failures.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from time import monotonic
from typing import Any

from asyncdist.base import lifecycle
from asyncdist.base.callables import Callback
from asyncdist.base.error_text import describe_error
from asyncdist.base.timers import TimerTable
from asyncdist.config import DEFAULT_LANES, Config
from asyncdist.errors import GroupAbortedError, GroupError, MismatchError, TransportUnavailableError
from asyncdist.kernel.algorithms.selection import Model
from asyncdist.kernel.algorithms.sharing import Sharing
from asyncdist.kernel.engine.agreements import Agreements
from asyncdist.kernel.engine.call_checker import CollectiveChecker
from asyncdist.kernel.engine.control_messages import ENDED, last_words
from asyncdist.kernel.engine.direct_calls import DirectCalls
from asyncdist.kernel.engine.drivers.core_use import CoreUse
from asyncdist.kernel.engine.executor import Executor
from asyncdist.kernel.engine.group_failures import GroupFailures
from asyncdist.kernel.engine.heartbeat import Heartbeat
from asyncdist.kernel.engine.machine import Until
from asyncdist.kernel.engine.operation import Channel, Operation, Plan, awaited
from asyncdist.kernel.engine.progress import Progress
from asyncdist.kernel.engine.transport_selector import Addresses, TransportSelector
from asyncdist.kernel.engine.wait_probes import WaitProbes, timeout_error
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.memory.buffers import Scratch
from asyncdist.kernel.tracing.recorder import Entry, Recorder
from asyncdist.kernel.transport.address_search import AddressBook
from asyncdist.kernel.transport.base import (
    DiscardReceive,
    Link,
    MatchingQueue,
    Outgoing,
    Receive,
    Sleep,
    Transport,
    Wait,
)
from asyncdist.kernel.transport.wire_format import ABORT, AGREE, CALLED, GOODBYE, HEARD, PAGE, PROBE, SUSPECT, WAITING
from asyncdist.net.detector import Liveness
from asyncdist.net.process_identity import Neighbours

_MOST_PROBLEMS = 4
"""The number of connectivity problems that an error message lists."""
_MANY_RECEIVES = 64
"""The number of pending receives from which on each call no longer asks whether nothing else is pending."""


class Endpoint:
    """The peers of one rank in one world.

    To connect the ranks, call `listen`, exchange its results with all ranks, and pass them to `know`. Call `probe_peers`
    of the `transport_selector`, combine its results, and pass them to `finalize`. Links are made when they are first used.

    Args:
        world_id: Identifies the world in traces.
        kinds: The transports to use, the preferred first.
        home: The event loop that drives while no thread blocks; None for the background loop.
        backend: The argument of `init_process_group`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        world_id: str,
        config: Config,
        kinds: Sequence[type[Transport]],
        home: asyncio.AbstractEventLoop | None,
        backend: str = "auto",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.world_id = world_id
        self.config = config if config.lanes else config.with_(lanes=DEFAULT_LANES)
        """The settings of groups and connections that are made from now on."""
        kept = config.flight_recorder_size
        self.recorder = Recorder(rank, world_size, kept, world_id, config.dump_format, config.dump_dir)
        self.progress = Progress(self, home)
        self.links: dict[int, Link] = {}
        self.transport_selector = TransportSelector(self, [kind(self) for kind in kinds])
        self.of_parent: tuple[object, ...] = ()
        """In a forked child: the objects that only the parent may use, kept so that they are not collected."""
        scratch = Scratch()
        self._executor = Executor(self, scratch, config.piece_nbytes)
        self.operations, self.acting = self._executor.operations, self._executor.acting
        self.recorder.pending.append(self._executor.pending)
        self.inboxes: dict[int, MatchingQueue] = {}
        self.timers = TimerTable()
        self.failures = failures = GroupFailures(self, self._executor)
        self.lost_peers = failures.lost_peers
        # Bound here, because a forwarding method would cost each call a Python frame.
        self.fail, self.gone, self.lost, self.suspect = failures.fail, failures.gone, failures.lost, failures.suspect
        self.open, self.end = failures.open, failures.end
        self.no_room, self.closing_frames = failures.no_room, failures.closing_frames
        self.accepts_notices = failures.accepts_notices
        self.checker = CollectiveChecker(self, failures.channels)
        self.difference = self.checker.difference
        self.direct_calls = DirectCalls(self, self.checker, scratch, self.progress.waiting)
        self._probes = WaitProbes(self, monotonic)
        self.processes = Neighbours(rank)
        """The processes of this machine."""
        self.hosts: Sequence[bytes | None] = ()
        """The host of each rank, as a digest; None is not known yet."""
        self.agreements = Agreements(self, failures)
        failures.observers.append(self._on_change)
        self._heartbeat = Heartbeat(self, failures)
        self.silence_of, self.hears = self._heartbeat.silence_of, self._heartbeat.hears
        self.model = Model(segment_nbytes=config.segment_nbytes)
        """Selects the schedules of groups that are made from now on; equal on all ranks."""
        self.finished: list[Callback] = []
        self.backend = backend
        self.core_use = CoreUse(self)
        self.others_compete = self.core_use.others_compete
        lifecycle.register_hooks(self)

    # -- coming and going ----------------------------------------------------------------------

    def listen(self, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start every transport's listener at this machine's address.

        Returns:
            The addresses by transport: those for all ranks, and those for the ranks of this machine.
        """
        everywhere: dict[str, Any] = {}
        here: dict[str, Any] = {}
        for transport in self.transport_selector.transports:
            (here if transport.is_local else everywhere)[transport.name] = transport.listen(where)
        # A peer that opens its world earlier may connect from now on, and expects an answer.
        self._heartbeat.start(self.progress)
        return everywhere, here

    def know(
        self,
        addresses: Sequence[Addresses | None],
        hosts: Sequence[bytes | None],
        machine: Mapping[int, tuple[Mapping[str, Any] | None, Addresses]],
        offered: Mapping[str, bool],
        book: AddressBook | None = None,
    ) -> None:
        """Store the addresses and the host of each rank, the processes and local addresses of the ranks of this machine,
        which transports ranks have for ranks elsewhere, and whether all do, and where to find what is not known.
        """
        self.hosts = hosts
        self.processes = Neighbours(self.rank, {rank: process for rank, (process, _) in machine.items()})
        here = {rank: local for rank, (_, local) in machine.items()}
        self.transport_selector.know(addresses, here, offered, self.processes, book)

    def finalize(self, reached: Mapping[str, Sharing]) -> None:
        """Select transports from what all ranks have reached, by transport. Groups may be made afterwards."""
        self.transport_selector.reached = reached
        self.recorder.progress.append(self._executor.progress)
        self.recorder.details.append(self._state)
        used = self.transport_selector.used_in_world()
        spin, crowded = self.transport_selector.spin_policy(used)
        placement = self.transport_selector.placement if self.transport_selector.local_size > 1 else None
        await_spin = min(spin, self.config.await_spin_us * 1e-6)
        self.progress.waiting.configure(spin, await_spin, placement, crowded=crowded)
        self.progress.loop_driver.idle_watch.last_call = lambda: self.recorder.last
        self.progress.submit(lambda: self.transport_selector.end_all_but(used))
        self.progress.ensure_driven()

    def notices_flushed(self) -> Until:
        """Return a condition that holds once every failure notice has been sent, also over connections opened for it.

        Nor do bytes of messages then wait on this host that are complete.
        """
        selector, failures = self.transport_selector, self.failures
        begun: list[bool] = []

        def begin() -> None:
            begun.append(True)
            failures.warn_late_readers()

        self.progress.submit(begin)  # after the failures that other threads have submitted

        def flushed() -> bool:
            has_last_words = failures.failed or self.agreements.taken_part
            return bool(begun) and not (selector.undelivered() or (has_last_words and selector.busy()))

        return Until(flushed)

    def close(self) -> None:
        """Fail what is pending, say goodbye to every peer, and close every connection. Idempotent."""
        lifecycle.unregister_hooks(self)
        self._flush_notices()
        self._heartbeat.stop()
        self.progress.submit(self._close)
        self.progress.close()

    def end_with_process(self) -> None:
        """Say goodbye for a program that ends without destroying the world."""
        self.failures.goodbye = ENDED
        for operation in list(self._executor.operations.values()):
            operation.work.exception()  # the program ends: do not log the error as never retrieved
        self._flush_notices()
        self._heartbeat.stop()
        self.progress.submit(self._close)

    def _flush_notices(self) -> None:
        if asyncio._get_running_loop() is not None:  # `World.close` waits
            return
        flushed = self.notices_flushed()
        for _ in last_words(lambda pause: self.progress.drive(flushed, monotonic() + pause)):
            if flushed.is_completed():
                break

    def after_fork_in_child(self) -> None:
        """Fail everything in a forked child, which must neither use nor collect the parent's objects."""
        self.of_parent = (self.progress, self.transport_selector.transports)
        self.progress, self.transport_selector.transports = Progress(self), []
        # The timers of the transports use sockets of the parent.
        self.timers.clear()
        self._heartbeat.after_fork_in_child()
        self.failures.forked()
        self.agreements.end_all(self.lost_peers[self.rank])

    def _close(self) -> None:
        self.agreements.end_all(GroupAbortedError("the world was closed while this call was pending", peer=self.rank))
        self.failures.end_all()
        self.transport_selector.close()

    def assert_held(self) -> None:
        """Check that the calling thread holds the lock of this rank's `Progress`."""
        self.progress.turns.assert_held()

    # -- groups --------------------------------------------------------------------------------

    def refuse(self, channel: Channel, cause: Exception) -> None:
        """Fail a group for all its members because this rank cannot be in it."""

        def fail() -> None:
            self.open(channel)
            reason = f"rank {self.rank} cannot be in the group: {describe_error(cause)}"
            self.fail(channel, GroupAbortedError(reason, peer=self.rank))
            # The others regroup without this rank.
            self.agreements.leave(channel, reason, entirely=True)
            self.end(channel)

        self.progress.submit(fail)

    def start(self, operation: Operation) -> None:
        """Begin an operation. The caller holds the lock."""
        self.progress.turns.assert_held()
        channel = operation.channel
        if self.checker.early_calls:
            self.checker.compare(channel, operation.key, operation.plan.fingerprint)
        channel.started += 1
        channel.highest = max(channel.highest, operation.sequence)
        self._executor.start(operation)

    def discard(self, prefix: bytes) -> None:
        """Drop the messages of a group, by the first 8 bytes of their keys."""
        self.checker.forget(prefix)
        for inbox in self.inboxes.values():
            inbox.purge(prefix)

    def read_arrived(self, peer: int) -> None:
        """Read what has arrived from a peer."""
        self.transport_selector.read_arrived(self.inbox(peer))

    # -- what its parts need: EngineHost --------------------------------------------------------

    def link(self, peer: int) -> Link:
        """Return the link to a peer, made on first use; raise the peer's error if the peer is lost."""
        if peer in self.lost_peers:
            raise self.lost_peers[peer]
        link = self.links.get(peer)
        if link is None:
            link = self.links[peer] = self.transport_selector.link(peer)
        return link

    def inbox(self, peer: int) -> MatchingQueue:
        inbox = self.inboxes.get(peer)
        if inbox is None:
            inbox = self.inboxes[peer] = MatchingQueue(peer, self)
        return inbox

    def connectivity_problem(self, peers: Iterable[int]) -> str:
        said = (self.links[peer].connectivity_problem() for peer in peers if peer in self.links)
        return ", ".join(itertools.islice(filter(None, said), _MOST_PROBLEMS))

    def query_peers(self, operation: Operation, peers: Collection[int]) -> None:
        channel = operation.channel
        if channel.point_to_point:
            for peer in set(channel.members) - {self.rank} if -1 in peers else peers:
                self.watch(peer)
            return
        body = operation.plan.fingerprint.to_bytes(8, "little")
        self.failures.notify(peers, CALLED, operation.key + bytes(4), body)

    def probe_waits(self, operation: Operation) -> None:
        self._probes.begin(operation, operation.deadline - monotonic())

    def timeout_error(self, operation: Operation) -> GroupError:
        """Return the error of an operation whose deadline has passed."""
        trouble = self.connectivity_problem(awaited(operation))
        return timeout_error(operation, self._probes.findings(operation), trouble)

    def pending_for(self, key: bytes) -> tuple[Operation | None, bool]:
        """Return the operation with which to answer a probe about ``key``, and whether that collective is complete.

        It is the same collective if it is pending, else the oldest operation of the group, else the oldest of all.
        """
        channel, operation = self.failures.channels.get(key[:8]), self.operations.get(key[:12])
        if operation is None and channel is not None:
            if channel.has_ended(key):
                return None, True
            both = (channel, channel.sibling)
            operation = next((one for one in self.operations.values() if one.channel in both), None)
        return operation or next(iter(self.operations.values()), None), False

    def send_unordered(self, peer: int, kind: int, key: bytes, body: bytes) -> None:
        """Send a control message, unless the peer is gone or not reachable."""
        if self.accepts_notices(peer):
            with contextlib.suppress(TransportUnavailableError, OSError):
                self.link(peer).send_unordered(Outgoing(peer, key[:12] + bytes(4), 0, memoryview(body), None, kind))

    # -- who is there --------------------------------------------------------------------------

    def has_ended(self, peer: int) -> bool:
        """Return whether a peer takes part in nothing any more: it has said goodbye, or its process has ended here."""
        return peer in self.failures.left or self.processes.has_ended(peer)

    def _state(self) -> dict[str, Any]:
        """Return which peers are lost or have left, when the others were last heard, and how this rank waits.

        Any thread may call it.
        """
        gone = {peer: error.reason for peer, error in list(self.lost_peers.items())} | dict(self.failures.left)
        heard = sorted(self._heartbeat.silences().items())
        lanes, threads = self.config.lanes, self.config.tcp_threads
        return {
            "lost": sorted(gone.items()),
            "heard": heard,
            "waiting": self.progress.waiting.mode.value,
            "model": asdict(self.model),
            "tcp": {"lanes": lanes, "threads": threads, "others_compete": self.core_use.compete},
        }

    def watch(self, peer: int) -> None:
        """Open a link to a peer, so that its loss is noticed."""
        if self.accepts_notices(peer):
            with contextlib.suppress(TransportUnavailableError, OSError):
                self.link(peer).open()

    def _on_change(self, peer: int, liveness: Liveness, reason: str) -> None:
        if liveness is Liveness.LOST:
            # The link may keep the memory of a dead peer mapped.
            self.links.pop(peer, None)
            self.transport_selector.forget(peer)
            self.agreements.on_loss(peer)

    def call_later(self, callback: Callback) -> None:
        """Call a function of the program's after the lock is released."""
        self.finished.append(callback)

    # -- what transports report to: Host -------------------------------------------------------

    @property
    def expects_anybody(self) -> bool:
        return bool(self._executor.any_source)

    def unclaimed(self, peer: int, key: bytes, fingerprint: int, nbytes: int) -> Receive | None:
        if self.failures.drops(key):
            return DiscardReceive(peer, key, nbytes)
        if waiting := self._executor.any_source.get(key):
            receive = waiting.popleft()
            if not waiting:
                del self._executor.any_source[key]
            receive.peer = peer
            if receive.nbytes == nbytes and receive.fingerprint == fingerprint:
                return receive
            self.mismatch(peer, receive, fingerprint, nbytes)
            return DiscardReceive(peer, key, nbytes)
        if key[:8] in self.failures.ended or self.checker.refuses(peer, key, fingerprint):
            return DiscardReceive(peer, key, nbytes)
        return None

    def mismatch(self, peer: int, receive: Receive, fingerprint: int, nbytes: int) -> None:
        channel = self.failures.channels.get(receive.key[:8])
        if channel is None:
            return
        if receive.fingerprint != fingerprint:
            self.fail(channel, self.difference(peer, receive.fingerprint, fingerprint))
        else:
            reason = f"rank {peer} sent {nbytes} bytes where {receive.nbytes} were expected"
            self.fail(channel, MismatchError(peer, reason))

    def control(self, peer: int, kind: int, key: bytes, body: bytes) -> None:
        if kind == GOODBYE:
            self.failures.on_goodbye(peer, body.decode(errors="replace"))
        elif kind == AGREE:
            self.agreements.on_message(peer, key, body)
        elif self.failures.drops(key):
            return
        elif kind == ABORT:
            error = self.failures.on_abort(peer, key, body)
            # Later, because a look reads from connections, and this message is being read from one.
            self.post(functools.partial(self._heartbeat.on_loss_elsewhere, error))
        elif kind == CALLED and key[:8] not in self.failures.ended:
            self.checker.answer(peer, key, int.from_bytes(body, "little"))
        elif kind == PROBE:
            self._probes.on_probe(peer, key, body)
        elif kind == WAITING:
            self._probes.on_answer(peer, body)
        elif kind == SUSPECT:
            self._heartbeat.on_question(peer, body)
        elif kind == HEARD:
            self._heartbeat.on_answer(peer, body)
        elif kind == PAGE and self.transport_selector.search is not None:
            self.transport_selector.search.on_page(peer, body)

    def post(self, action: Callback) -> None:
        self.progress.post(action)

    def retire(self, sock: Any) -> None:
        self.progress.retire(sock)

    # -- what is driven: Machine ---------------------------------------------------------------

    def advance(self, ready: Iterable[int] | None) -> bool:
        moved = False
        for transport in self.transport_selector.transports:
            moved = transport.advance(ready) or moved
        return self._executor.run() or moved

    def waits(self) -> list[Wait] | None:
        waits: list[Wait] = []
        for transport in self.transport_selector.transports:
            wanted = transport.waits()
            if wanted is None:
                return None
            waits += wanted
        # Peers signal from now on. A peer that moved data just before did not signal, so check once more.
        return None if self._executor.run() else waits

    def sleep(self, peer: int) -> Sleep | None:
        inbox = self.inboxes.get(peer)
        if inbox is not None and inbox.source is not None:
            return Sleep(inbox.source.arrivals, None)
        for transport in self.transport_selector.transports:
            sleep = transport.sleep(peer)
            if sleep is not None:
                return sleep
        return None

    def interrupted(self, cause: BaseException) -> None:
        self.failures.interrupted(cause)
        if self.rank in self.lost_peers:
            self.agreements.end_all(self.lost_peers[self.rank])

    def busy(self) -> bool:
        # After a failure this rank stays reachable: a peer that connects later must learn of the failure too.
        return bool(self._executor.operations or self.failures.failing or self.timers) or self.transport_selector.busy()

    def only_receives(self) -> bool:
        if self.acting or self.failures.failing or self.timers or self.transport_selector.busy():
            return False
        if len(self.operations) > _MANY_RECEIVES:
            return False
        return not any(operation.work.has_callbacks for operation in list(self.operations.values()))

    def next_deadline(self) -> float:
        if self.timers:
            return min(self._executor.next_deadline, self.timers.next_due())
        return self._executor.next_deadline

    def expire(self, now: float) -> None:
        self.timers.run_due(now)
        self._executor.expire(now)

    def take_finished(self) -> list[Callback]:
        finished, self.finished = self.finished, []
        return finished

    # -- for groups ----------------------------------------------------------------------------

    def issue(self, channel: Channel, plan: Plan, entry: Entry, timeout: float, *, background: bool | None) -> Work:
        """Start a plan; drive it to its end in this thread, or with ``background`` let a driver continue it."""
        progress = self.progress
        work = Work(progress)
        start = functools.partial(self.start, Operation(channel, plan, work, timeout, entry))
        if background:
            progress.submit(start)
            if not work.is_completed() or channel.error is not None:
                progress.ensure_driven()
        else:
            try:
                progress.drive(work, math.inf, start)
            except BaseException:
                work.exception()  # the interrupted caller has no work from which to retrieve the error
                raise
        return work
