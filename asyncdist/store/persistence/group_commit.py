"""Group commit: the changes of one loop iteration are written together, and replies wait until they are safe.

One write, and one `fsync` if the policy requires it, serve all requests that were executed during the previous write.
Their replies wait for it, replies to reads included, because these may show a change that is not written yet. A thread
waits for the disk, while the loop continues to read and execute requests, up to a limit.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from asyncdist.base.callables import Supplier
from asyncdist.base.daemon_threads import DaemonThreadPool, start_daemon_thread
from asyncdist.base.error_text import describe_error
from asyncdist.config import Config
from asyncdist.errors import JournalError
from asyncdist.store.persistence.journal import Journal
from asyncdist.store.protocol.codec import message_limit
from asyncdist.store.state.change_log import ChangeLog
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.model import Contents
from asyncdist.store.state.sessions import SessionTable

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two syncs of the policy `Fsync.INTERVAL`."""
PENDING_NBYTES = 64 << 20
"""Bytes of changes that may wait for the disk; beyond that the server reads no requests."""
AT_ONCE_NBYTES = 1 << 20
"""Bytes of changes that the loop's thread writes itself if no sync is needed; another thread writes more than that."""
CHECK_INTERVAL = 0.05
"""Seconds between two comparisons with `PENDING_NBYTES` during a write."""


class Fsync(StrEnum):
    """When changes must be on disk."""

    ALWAYS = "always"
    """Before they are acknowledged: they survive a power failure."""
    INTERVAL = "interval"
    """Within a second. They are written before they are acknowledged, and survive the daemon."""
    NEVER = "never"
    """When the kernel writes them back. They are written before they are acknowledged, and survive the daemon."""


class ReplyReceiver(Protocol):
    """A connection whose replies wait until the changes they show are written."""

    def release(self, data: Any) -> None:
        """Send held data."""

    def settle(self) -> None:
        """Resume after all held data has been sent."""


class JournaledServer(Protocol):
    """What a journal needs of its server. `StoreServer` documents the methods."""

    change_log: ChangeLog
    config: Config
    limit: int
    lineage: str
    sessions: SessionTable
    state: StoreState

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def drop_all(self) -> None: ...


class GroupCommit:
    """The journal of one server. ``failure`` gets a JournalError when the journal cannot be written any more."""

    def __init__(self, server: JournaledServer, journal: Journal, policy: Fsync) -> None:
        self.journal = journal
        self.policy = policy
        self.change_log = server.change_log
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self.failure.add_done_callback(lambda failure: failure.cancelled() or failure.exception())
        self.num_commits = self.num_snapshots = 0
        self._held: list[tuple[ReplyReceiver, bytes]] = []
        self._writing: asyncio.Future[Any] | None = None
        self._syncing: asyncio.Future[Any] | None = None
        self._snapshot: asyncio.Future[Any] | None = None
        self._rotates_next = False
        """Whether the next commit begins a new segment: little is unsynced, and the log is long."""
        self._writer = DaemonThreadPool("asyncdist-journal", max_threads=1)
        self._syncer = DaemonThreadPool("asyncdist-sync", max_threads=1)
        self._closing = False
        self._paused_reading = False
        self._sync_timer: asyncio.TimerHandle | None = None
        self._limit_timer: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, server: JournaledServer, folder: Path, policy: Fsync) -> GroupCommit:
        """Restore the server's state from ``folder``, and write its changes there from now on. Raises JournalError."""
        journal = await asyncio.to_thread(Journal, folder, compact_nbytes=server.config.store_compact_nbytes)
        durability = cls(server, journal, policy)
        contents, journal.contents = journal.contents or Contents(), None
        server.state.restore(contents)
        server.limit = max(server.limit, message_limit(*contents.longest_nbytes))  # stored values can be read
        server.sessions.restore(contents.members, time.monotonic())
        server.change_log.start(durability._wake)
        server.lineage = journal.lineage
        return durability

    def _gather(self) -> Supplier[Contents]:
        """Return a function that makes, in any thread, a copy of what a later server needs of the present state."""
        contents, members = self._server.state.gather(), self._server.sessions.gather()

        def gathered() -> Contents:
            made = contents()
            made.members = members()
            return made

        return gathered

    # -- for connections --------------------------------------------------------------------------

    @property
    def holding(self) -> bool:
        """Whether replies have to wait, because a change is not written as the policy says."""
        return self._writing is not None or self.change_log.pending or self.failure.done()

    def hold(self, connection: ReplyReceiver, data: bytes) -> None:
        """Hold data until all changes so far are written; then pass the data to `ReplyReceiver.release`."""
        self._held.append((connection, data))

    # -- writing ----------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Write the changes after this iteration of the loop, or after the write in progress."""
        if self._writing is None:
            self._loop.call_soon(self._commit)
        else:
            self._limit_pending()

    def _limit_pending(self) -> None:
        """Pause reading if too many changes wait for the write in progress, else check again later."""
        if self.change_log.pending_nbytes > PENDING_NBYTES:
            self._paused_reading = True
            self._server.pause_reading()
        else:
            self._limit_timer = self._loop.call_later(CHECK_INTERVAL, self._limit_pending)

    def _commit(self) -> None:
        if self._writing is not None or self.failure.done() or not (self.change_log.pending or self._rotates_next):
            return
        self.num_commits += 1
        body = self.change_log.take()
        held, self._held = self._held, []
        gather = self._gather() if self._rotates_next and self._wants_compaction else None
        self._rotates_next = False
        self._sync_later()
        if gather is None and self._writes_at_once(body):
            try:
                self.journal.commit(*body, sync=False)
            except OSError as error:
                self._fail(error)
            else:
                self._release(held)
            return
        syncs = self.policy is Fsync.ALWAYS or gather is not None
        job = functools.partial(self._write, body, rotate=gather is not None)
        self._writing = self._loop.run_in_executor(self._syncer if syncs else self._writer, job)
        self._writing.add_done_callback(functools.partial(self._written, held, gather))

    def _writes_at_once(self, body: list[bytes]) -> bool:
        """Return whether the loop's thread may write these pieces. During a sync a write may wait: 12 of 28 ms on ext4."""
        return self.policy is not Fsync.ALWAYS and self._syncing is None and sum(map(len, body)) <= AT_ONCE_NBYTES

    def _write(self, body: list[bytes], *, rotate: bool) -> int:
        self.journal.commit(*body, sync=self.policy is Fsync.ALWAYS)
        return self.journal.rotate() if rotate else 0

    def _written(
        self, held: list[tuple[ReplyReceiver, bytes]], gather: Supplier[Contents] | None, job: asyncio.Future[int]
    ) -> None:
        self._writing = None
        if self._limit_timer is not None:
            self._limit_timer.cancel()
        error = job.exception()
        if error is not None:
            self._fail(error, syncing=gather is not None)
            return
        if gather is not None:
            self._begin_snapshot(job.result(), gather)
        if not self.change_log.pending:
            held += self._held  # these replies show nothing newer than this write
            self._held = []
        self._release(held)
        self._commit()
        if self._paused_reading:
            self._paused_reading = False
            self._server.resume_reading()

    def _release(self, held: list[tuple[ReplyReceiver, bytes]]) -> None:
        for connection, data in held:
            connection.release(data)
        for connection in dict.fromkeys(connection for connection, _ in held):
            connection.settle()  # only now, because a later reply must not overtake these
        if self._wants_compaction:
            self._sync()

    # -- syncing: in a thread of its own, because no reply waits for a sync --------------------------

    def _sync_later(self) -> None:
        if self.policy is Fsync.INTERVAL and self._sync_timer is None and not self._closing:
            self._sync_timer = self._loop.call_later(INTERVAL, self._sync_in_turn)

    def _sync_in_turn(self) -> None:
        self._sync_timer = None
        if self._syncing is None and self._writing is None:
            self._sync()
        else:  # this sync, or the one in progress, may not cover the current write
            self._sync_later()

    def _sync(self) -> None:
        if self._syncing is None and not self.failure.done():
            self._syncing = self._loop.run_in_executor(self._syncer, self.journal.sync)
            self._syncing.add_done_callback(self._synced)

    def _synced(self, job: asyncio.Future[None]) -> None:
        self._syncing = None
        error = job.exception()
        if error is not None:
            self._fail(error, syncing=True)
        self._rotates_next = self._wants_compaction
        self._commit()

    def _fail(self, error: BaseException, *, syncing: bool = False) -> None:
        """End the journal: log the error and drop all connections, whose replies would not be durable."""
        if not self.failure.done():
            why = describe_error(error)
            extent = "everything acknowledged so far is there"
            if syncing and self.policy is not Fsync.ALWAYS:
                extent = "changes acknowledged since the last sync may be lost"
            text = (
                f"the store's data in {self.journal.folder} cannot be written ({why}): {extent}; free or "
                "repair the disk, then start the store again"
            )
            logger.critical("%s", text)
            self.failure.set_exception(JournalError(text))
        self._server.drop_all()

    # -- compaction: after a sync, because replies wait while a new segment is begun -----------------

    @property
    def _wants_compaction(self) -> bool:
        return self._snapshot is None and not self._closing and self.journal.wants_compaction

    def _begin_snapshot(self, number: int, gather: Supplier[Contents]) -> None:
        def job() -> None:
            self.journal.write_snapshot(number, gather(), self._pause_snapshot)

        self._snapshot = asyncio.wrap_future(start_daemon_thread(job, "asyncdist-snapshot"))
        self._snapshot.add_done_callback(self._snapshot_done)

    def _pause_snapshot(self) -> bool:
        time.sleep(0.0005)  # so that the loop's thread gets the interpreter lock
        return not self._closing

    def _snapshot_done(self, job: asyncio.Future[None]) -> None:
        self._snapshot = None
        error = job.exception()
        self.num_snapshots += error is None
        if error is not None:  # the log is complete without a snapshot, and grows until the next one succeeds
            logger.error("store: cannot write a snapshot in %s: %s", self.journal.folder, error)

    # -- ends -------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Return when all changes are written as the policy says, and all held replies are sent."""
        while (self._writing is not None or self.change_log.pending) and not self.failure.done():
            if self._writing is None:
                self._commit()
            if self._writing is not None:
                await asyncio.wait([self._writing])

    async def close(self) -> None:
        """Write the pending changes, abort a snapshot in progress, and close the journal."""
        self._closing = True
        if self._sync_timer is not None:
            self._sync_timer.cancel()
        await self.flush()
        for job in (self._writing, self._syncing, self._snapshot):
            if job is not None:
                await asyncio.wait([job])
        try:
            if self.policy is not Fsync.NEVER and not self.failure.done():
                await self._loop.run_in_executor(self._syncer, self.journal.sync)
        except OSError as error:
            self._fail(error, syncing=True)
        finally:
            self._writer.shutdown()
            self._syncer.shutdown()
            self.journal.close()
