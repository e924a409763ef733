"""FileStore: a store in a file, for processes that share only a file system. Users' programs create it.

The file is a log (`log_format`) of the requests that change the store, each one encoded by
`codec`. To change the store, a process locks the file, executes the requests that others have appended, appends its own
and executes that. All processes execute the same requests in the same order, and so have the same state. A process that
waits for a key reads the file again after pauses of at most 50 ms. The log only grows, so a file store suits a
rendezvous, and not a program that makes many changes. `locked_file` states the requirements on the file system.

A process that is killed while it appends leaves an incomplete frame. The next process that appends cuts it off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import weakref
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from asyncdist.base import lifecycle
from asyncdist.base.backoff import Backoff
from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.base.lifecycle import WeakRegistry
from asyncdist.errors import ProtocolError, StoreConnectionError, StoreError, UnsupportedError, UsageError
from asyncdist.store.base import BlockingStream, Store
from asyncdist.store.client.local import DEFAULT_TIMEOUT
from asyncdist.store.client.locked_file import LockedFile
from asyncdist.store.client.pending import CallGuard
from asyncdist.store.persistence import log_format
from asyncdist.store.protocol.client_protocol import refusal
from asyncdist.store.protocol.codec import decode_request, messages_in, packer
from asyncdist.store.protocol.operations import KEY_CHANGES, Command, Op, OperationKind, Reply
from asyncdist.store.state.machine import StoreState

T = TypeVar("T")

_WAITING = frozenset((Op.GET, Op.WAIT, Op.MULTI_GET))
_SUPPORTED = KEY_CHANGES | _WAITING | {Op.CHECK, Op.NUM_KEYS, Op.LIST_KEYS}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two reads of the file while a process waits for a key."""
_DROP_PATIENCE = 0.1
"""Seconds for which the garbage collector waits for the lock of the file, which a process holds for milliseconds."""

log = logging.getLogger("asyncdist")


class FileReplica(CallGuard):
    """The state of one `FileStore`: the result of all requests in the log that it has read. Threads may share it.

    When a store is opened, it appends RESUME with its host's name; when it is closed, it appends LEAVE. Both are
    counted, so that the last store that is closed can remove the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._host = socket.gethostname().encode()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._state = StoreState()
        self._pack = packer()
        self._num_opened = 0
        self._num_open = 0
        self._offset = 0
        self._salt = b""
        self._next_frame = 0
        self._file = LockedFile(path)
        self._file.open(self._record_opening)

    def _record_opening(self) -> None:
        self._execute_new_frames()
        if self._offset == 0:
            self._salt = secrets.token_bytes(log_format.SALT_NBYTES)
            self._file.write_at(0, log_format.header(self._salt))
            self._offset = log_format.HEADER_NBYTES
        self._append(Op.RESUME, (self._host, 0))

    def perform(self, command: Command[Any], limit: float) -> Any:
        """Carry out a command within ``limit`` seconds and return its result."""
        for _ in Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, Deadline.after(limit)):
            reply = self.guard(self._try, command)
            if reply is not None:
                return _result(reply)
        raise command.overdue(limit, f"the store in {self.path}")

    def _try(self, command: Command[Any]) -> Reply | None:
        """Execute a command and return its reply; None if it waits for a key that is not set."""
        op, args = command
        with self._lock:
            self._check_usable()
            if op in KEY_CHANGES:
                with self._file.locked():
                    self._execute_new_frames()
                    return self._append(op, args)
            with self._file.locked(shared=True):
                self._execute_new_frames()
            # The state machine would keep a request that blocks; this one is tried again after the pause.
            if op in _WAITING and not _result(self._execute(Op.CHECK, (list(command.keys),))):
                return None
            return self._execute(op, args)

    def close(self, world_size: int) -> None:
        """Close the file. Remove it if at least ``world_size`` stores have opened it and all of them have closed it."""
        self.guard(self._close, world_size)

    def drop(self, world_size: int) -> None:
        """Close the file for the garbage collector, which may run on any thread: without a long wait for its lock."""
        try:
            self._close(world_size, _DROP_PATIENCE)
        except StoreError as error:
            log.warning("a FileStore that the program has dropped stays counted as open: %s", error)

    def _close(self, world_size: int, patience: float | None = None) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                # The parent process, which has opened the store, appends LEAVE.
                if self._pid != os.getpid():
                    return
                with self._file.locked(patience=patience):
                    self._execute_new_frames()
                    self._append(Op.LEAVE, ())
                    if 0 < world_size <= self._num_opened and self._num_open == 0:
                        self._file.remove()
            finally:
                self._file.close()

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                f"the FileStore {self.path} belongs to the parent of this forked process: open another one"
            )
        if self._closed:
            raise StoreConnectionError(f"the FileStore {self.path} was closed by this process: open another one")

    # -- the log: the caller of these methods holds the file's lock -----------------------------------

    def _append(self, op: Op, args: tuple[Any, ...]) -> Reply | None:
        """Append a request and execute it. The caller has executed all frames before it."""
        try:
            # The request id is not used: 0.
            body = self._pack((0, op, *args))
        except ValueError as error:
            raise UsageError(f"store {op.name.lower()}: {error}") from None
        frame = log_format.frame_head(self._salt, self._next_frame, body) + body
        self._file.write_at(self._offset, frame)
        self._offset += len(frame)
        self._next_frame += 1
        return self._replay(op, args)

    def _execute_new_frames(self) -> None:
        """Execute the complete frames that follow the last one executed."""
        base = self._offset
        data = self._file.read_from(base)
        start = 0
        try:
            if self._offset == 0:
                # The file is empty, or its creator was killed: `_record_opening` writes the header.
                if len(data) < log_format.HEADER_NBYTES and data.startswith(log_format.MAGIC[: len(data)]):
                    return
                self._salt, self._next_frame = log_format.read_header(data)
                self._offset = start = log_format.HEADER_NBYTES
            file = BytesIO(data)
            file.seek(start)
            while True:
                body = log_format.read_frame(file, len(data) - start, self._offset, self._salt, self._next_frame)
                if body is None:
                    return
                (message,) = messages_in(body)
                _, op, args = decode_request(message)
                start = file.tell()
                self._offset = base + start
                self._next_frame += 1
                self._replay(op, args)
        except log_format.DamagedError as error:
            misplaced = isinstance(error, log_format.MisplacedError)
            # An incomplete last frame is no error: the next process that appends cuts it off.
            if self._salt and not misplaced and not log_format.has_frame_after(data, start, self._salt):
                return
            raise self._damaged(error.summary) from None
        except (ProtocolError, ValueError) as error:
            raise self._damaged(f"at offset {self._offset}: {error}") from None

    def _replay(self, op: Op, args: tuple[Any, ...]) -> Reply | None:
        """Execute a logged request and return its reply; RESUME and LEAVE have none and only count the open stores."""
        if op is Op.RESUME:
            if args[0] != self._host and not self._file.locks_reach_other_hosts:
                raise StoreError(
                    f"{self.path} is used by several hosts, but its file system does not lock between hosts: mount it "
                    "without nolock and local_lock, or use a TCPStore"
                )
            self._num_opened += 1
            self._num_open += 1
            return None
        if op is Op.LEAVE:
            self._num_open -= 1
            return None
        return self._execute(op, args)

    def _execute(self, op: Op, args: tuple[Any, ...]) -> Reply:
        (reply,) = self._state.execute("FileStore", 0, op, args)
        return reply

    def _damaged(self, why: str) -> ProtocolError:
        return ProtocolError(
            f"{self.path} is not the file of a store, or is damaged ({why}): remove it, or name another file"
        )


class FileStore(Store):
    """A store in the file ``file_name``, with the name and the methods of torch's FileStore.

    Every process names the same file, which must not be left over from an earlier run. The locks of the file system must
    work, also between hosts if there are several (on NFS: mounted without ``nolock``). A process that waits for a key
    reads the file at least every 50 ms. There are no queues, barriers, channels, watches or ephemeral keys.

    Args:
        file_name: The file; it is created if it does not exist.
        world_size: How many stores are opened on the file. The last one that is closed, or whose process exits, removes
            the file; a store whose process is killed stays counted as open. By default the file stays.

    Raises:
        AddressError: The file cannot be opened or locked.
        ProtocolError: The file is not that of a store, or is damaged.
        StoreError: In any operation: the file system failed. The operation may have been executed.
        UnsupportedError: In an operation that this store does not have.

    Example:
        >>> store = FileStore("/mnt/shared/job-17", world_size=2)
        >>> store.set("address/0", "10.0.0.1:4000")
        >>> store.get("address/1")  # waits until rank 1 has set it
        b'10.0.0.2:4000'
    """

    def __init__(self, file_name: str | os.PathLike[str], world_size: int = -1) -> None:
        if not isinstance(file_name, str | os.PathLike):
            raise UsageError(f"FileStore takes the path of a file, not {file_name!r}")
        super().__init__(DEFAULT_TIMEOUT)
        self._replica = FileReplica(Path(file_name))
        self._world_size = world_size
        self._finalizer = weakref.finalize(self, FileReplica.drop, self._replica, world_size)
        self._finalizer.atexit = False
        _open_stores.add(self)

    @property
    def path(self) -> str:
        return str(self._replica.path)

    def request(self, command: Command[T], timeout: Timeout = None) -> T:
        if command.op not in _SUPPORTED:
            raise _unsupported(command.name)
        result: T = self._replica.perform(command, self._timeout if timeout is None else seconds(timeout))
        return result

    def stream(self, command: Command[Any], hidden: str = "") -> BlockingStream[Any]:
        raise _unsupported(command.name)

    def clone(self) -> FileStore:
        """Open another store on the same file, with a timeout of its own. It counts as open until it is closed."""
        other = FileStore(self.path, self._world_size)
        other.set_timeout(self.timeout)
        return other

    def close(self) -> None:
        self._replica.close(self._world_size)
        self._finalizer.detach()


_open_stores: WeakRegistry[FileStore] = WeakRegistry()


def _close_at_exit() -> None:
    with contextlib.ExitStack() as stack:
        for store in _open_stores.living():
            stack.callback(store.close)


lifecycle.at_exit(lifecycle.Stage.SERVERS, _close_at_exit)


def _result(reply: Reply | None) -> Any:
    """Return the result in a reply, or raise the error of a refused request."""
    assert reply is not None
    if reply.kind is OperationKind.REFUSED:
        raise refusal(*reply.value)
    return reply.value


def _unsupported(operation: str) -> UnsupportedError:
    return UnsupportedError(
        f"store {operation}: a FileStore has no queues, barriers, channels, watches or ephemeral keys; use a TCPStore, or "
        "a HashStore between the threads of one process"
    )
