"""FileStore: a store in a file, for processes that share nothing but a file system.

The file is the log (`log`) of the state machine's requests in order: ``[member, request id, op, argument…]`` each.
Whoever writes holds the file's lock, first reads what others have written, and appends; every member executes the same
log and so has the same state. What only reads is not logged. Those who wait look into the file every few milliseconds.
The log is never made shorter: it is for meeting, not for a long life of many sets. What is relied upon of the file
system, which may be one of several hosts, stands in `shared_file`.

A member that dies while it appends leaves part of a frame, or one with holes, which the next writer cuts off. One that
dies while it stands in a barrier or holds a queue item is found out by those who wait there, if it ran on the same host,
and they log that it left.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
import weakref
from pathlib import Path
from typing import Any

from asyncdist.base.backoff import Backoff
from asyncdist.base.deadline import Deadline
from asyncdist.errors import ProtocolError, StoreError, UsageError
from asyncdist.store.client.local import DEFAULT_TIMEOUT, LocalClient, LocalStore
from asyncdist.store.client.locked_file import SharedFile
from asyncdist.store.client.pending import PendingRequest
from asyncdist.store.persistence import log_format
from asyncdist.store.persistence.log_format import LogRecord
from asyncdist.store.protocol.operations import Client, Op, Reply

_READ_ONLY = frozenset((Op.GET, Op.WAIT, Op.CHECK, Op.NUM_KEYS, Op.MULTI_GET, Op.LIST_KEYS, Op.QUEUE_LEN, Op.WATCH))
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_ROLL_CALL_PAUSE = 0.5
_MEMBERS = "\0members"
"""The channel that members of known number listen to, so that the last one to leave can be told."""
_READERS = "\0readers"
"""The client name of this process's read-only requests, which are not logged."""


class FileClient(LocalClient):
    """A replica of the state in a file, and our tickets there."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.name = (_host_name(), str(os.getpid()), _start_time(os.getpid()), secrets.token_hex(8))
        self._pid = os.getpid()
        self._members: set[Client] = set()
        self._offset = 0
        self._salt = b""
        self._number = 0  # of the frame that comes next
        self._file = SharedFile(path)
        try:
            with self._file.locked():
                self._read()
                if self._offset == 0:
                    self._salt = secrets.token_bytes(log_format.SALT_NBYTES)
                    self._file.write_at(0, log_format.header(self._salt))
                    self._offset = log_format.HEADER_NBYTES
        except BaseException:
            self._file.close()
            raise

    # -- requests ---------------------------------------------------------------------------------

    def execute(self, number: int, op: Op, args: tuple[Any, ...]) -> list[Reply]:
        if self._pid != os.getpid():
            raise UsageError("this FileStore was made before a fork and is the parent's: make a new one")
        if op in _READ_ONLY:
            self.look()
            return self.state.execute(_READERS, number, op, args)
        return self._log(LogRecord(self.name, number, op, args))

    def withdraw(self, number: int, op: Op) -> list[Reply]:
        if op in _READ_ONLY:
            return self.state.execute(_READERS, number, Op.CANCEL, (number,))
        return self.execute(number, Op.CANCEL, (number,))

    def leave(self) -> None:
        self._log(LogRecord(self.name, 0, Op.LEAVE, ()))

    def wait_for(self, pending: PendingRequest[Any], deadline: Deadline) -> None:
        backoff, roll_call = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, deadline), time.monotonic()
        with self.lock:
            event = self.event_of(pending)
        while True:
            with self.lock:
                if pending.ready:  # as it also is once the file is closed
                    return
                self.look()
                if not pending.ready and time.monotonic() >= roll_call:
                    roll_call = time.monotonic() + _ROLL_CALL_PAUSE
                    self._call_roll()
            if event.wait(backoff.next_pause()):
                return
            if deadline.expired():
                raise TimeoutError

    # -- the file. The lock is held in all of these ----------------------------------------

    def look(self) -> None:
        """Execute what others have written since we last looked."""
        with self._file.locked(shared=True):
            self._read()

    def _log(self, record: LogRecord) -> list[Reply]:
        body = log_format.encode_record(record)
        with self._file.locked():
            self._read()
            frame = log_format.frame_head(self._salt, self._number, body) + body
            self._file.write_at(self._offset, frame)
            self._offset += len(frame)
            self._number += 1
        return self._replay(record)

    def _read(self) -> None:
        """Execute the whole frames that follow what we have; the file's lock is held."""
        base = self._offset
        data = self._file.read_from(base)
        start = 0
        try:
            if self._offset == 0:
                if len(data) < log_format.HEADER_NBYTES and data.startswith(log_format.MAGIC[: len(data)]):
                    return
                self._salt, self._number = log_format.read_header(data)
                self._offset = start = log_format.HEADER_NBYTES
            while body := log_format.next_frame(data, start, self._salt, self._number):
                record = log_format.decode_record(data[slice(*body)])
                self._offset += body[1] - start
                start = body[1]
                self._number += 1
                self.deliver(self._replay(record))
        except log_format.DamagedError as error:
            misplaced = isinstance(error, log_format.MisplacedError)
            if self._salt and not misplaced and not log_format.has_frame_after(data, start, self._salt):
                return  # what a dead writer left, to be cut off
            raise self._damaged(str(error.after(base))) from None
        except ProtocolError as error:
            raise self._damaged(f"at offset {self._offset}: {error}") from None

    def _damaged(self, why: str) -> ProtocolError:
        return ProtocolError(f"{self.path} is no file of a store, or damaged ({why}): remove it, or name another")

    def _replay(self, record: LogRecord) -> list[Reply]:
        if not self._file.locks_reach_other_hosts and record.member[0].split()[0] != self.name[0].split()[0]:
            raise StoreError(
                f"{self.path} is used by hosts whose locks do not exclude each other: mount it without nolock and "
                "local_lock, or meet at a TCPStore"
            )
        if record.op is Op.SUBSCRIBE and record.args == (_MEMBERS,):
            self._members.add(record.member)
        replies = self.state.execute(*record)
        return [reply for reply in replies if reply.client == self.name or reply.client == _READERS]

    def _call_roll(self) -> None:
        """Say of members of this host that died that they have left."""
        for member in self.state.clients:
            if isinstance(member, tuple) and member != self.name and _is_dead(member):
                self.deliver(self._log(LogRecord(member, 0, Op.LEAVE, ())))

    # -- ends -------------------------------------------------------------------------------------

    def join(self) -> None:
        """Have ourselves counted."""
        with self.lock:
            self._log(LogRecord(self.name, -1, Op.SUBSCRIBE, (_MEMBERS,)))

    def close_file(self, world_size: int) -> None:
        """Leave, remove the file if all ``world_size`` members have been here and none is left, and close it."""
        try:
            if self._pid != os.getpid():
                return
            self.close()
            with self.lock:
                self.look()
                self._call_roll()
                with self._file.locked():  # no other process may join in between
                    self._read()
                    if 0 < world_size <= len(self._members) and not self.state.clients:
                        self._file.remove()
        finally:
            self._file.close()


class FileStore(LocalStore):
    """A store in the file ``file_name``, which every process names alike; torch's FileStore by name and methods.

    The file must not be left over from an earlier run. With ``world_size``, the last of so many to close (or to exit)
    removes it; without, nobody does. Needs a file system whose locks work, also between hosts where there are several
    (NFS, unless mounted with ``nolock``); waiting costs a look at the file every 50 ms at most.
    Raises AddressError when the file cannot be opened or locked, ProtocolError when it is something else; later, any
    operation raises StoreError when the file system fails, and whether it was done is then not known.
    """

    def __init__(self, file_name: str | os.PathLike[str], world_size: int = -1) -> None:
        desk = FileClient(Path(file_name))
        super().__init__(desk, DEFAULT_TIMEOUT)
        self._path = desk.path
        self._finalizer = weakref.finalize(self, FileClient.close_file, desk, world_size)
        if world_size > 0:
            desk.join()

    @property
    def path(self) -> str:
        return str(self._path)

    def close(self) -> None:
        self._finalizer()


# -- who is alive ----------------------------------------------------------------------------------


def _host_name() -> str:
    """Name the host and, where there are such things, the namespace in which process ids mean something."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _start_time(pid: int) -> str:
    """Return when a process started, so that another one with its id is told apart; "" where that is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _is_dead(member: tuple[str, ...]) -> bool:
    host, pid, started, _ = member
    if host != _host_name():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return started != _start_time(int(pid))
