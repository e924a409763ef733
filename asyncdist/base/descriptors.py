"""Descriptors: what closes them, files that no other user can have written, and errors of ``accept`` and of too few."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from asyncdist.errors import AddressError, RendezvousError

_ONE_CONNECTION_FAILED = {
    getattr(errno, name)
    for name in (
        "ECONNABORTED", "ECONNRESET", "EINTR", "EPROTO", "ENETDOWN", "ENOPROTOOPT", "EHOSTDOWN", "ENONET", "EHOSTUNREACH",
        "EOPNOTSUPP", "ENETUNREACH",
    )
    if hasattr(errno, name)
}  # fmt: skip
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)


class ClosingOnError:
    """Closes something at the end of a block that fails or is cancelled: ``async with`` awaits its ``close``."""

    def __init__(self, resource: Any) -> None:
        self._resource = resource

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._resource.close()

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            await self._resource.close()


def close_all(descriptors: Iterable[int]) -> None:
    for each in descriptors:
        os.close(each)


def is_transient(cause: OSError) -> bool:
    """Return whether ``accept`` failed for one connection only (see accept(2)), so that the next call may succeed."""
    return cause.errno in _ONE_CONNECTION_FAILED


def is_exhausted(cause: BaseException) -> bool:
    """Return whether the process or the machine is out of file descriptors."""
    return isinstance(cause, OSError) and cause.errno in _EXHAUSTED


def describe_exhaustion(cause: OSError) -> str:
    """Describe an error for which `is_exhausted` holds, as the rest of a sentence that begins with a rank."""
    if cause.errno == errno.ENFILE:
        return "cannot open a file descriptor: the machine has reached its limit (fs.file-max)"
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"has no free file descriptor, the limit is {limit}"


@contextlib.contextmanager
def naming_exhaustion() -> Iterator[None]:
    """Raise RendezvousError instead of an error for which `is_exhausted` holds."""
    try:
        yield
    except OSError as cause:
        if not is_exhausted(cause):
            raise
        raise RendezvousError(
            f"this process {describe_exhaustion(cause)}; raise the limit on open files (ulimit -n) or close some"
        ) from cause


def open_trusted(path: Path, flags: int) -> int:
    """Open a file that says where this process connects to, or what others have told it.

    It does not wait for the other end of a FIFO. The caller checks that it is a regular file.

    Raises:
        AddressError: The path is a symbolic link, or another user owns the file or may write it.
        OSError: The file cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise AddressError(f"{path} is a symbolic link, which another user may have made: name the file") from None
        raise
    try:
        who = _other_writer(descriptor, path)
        if who:
            raise AddressError(f"{who} {path}, and could let this process connect anywhere: remove it, or name another")
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _other_writer(descriptor: int, path: Path) -> str:
    """Return which other user can write a file, and how; empty if none."""
    found = os.fstat(descriptor)
    own = {0, os.getuid()}
    if not stat.S_ISREG(found.st_mode) or (found.st_uid in own and not found.st_mode & stat.S_IWOTH):
        return ""
    # A file system may map users, as NFS does with root, or know neither owners nor modes.
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=path.parent) as probe:
        made = os.fstat(probe.fileno())
        if (made.st_uid, made.st_mode & stat.S_IWOTH) == (found.st_uid, found.st_mode & stat.S_IWOTH):
            return ""
    return "every user may write" if found.st_uid in own else f"another user ({found.st_uid}) owns"
