"""Classifies the errors of ``accept``, and the errors of a process or machine that is out of file descriptors."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from asyncdist.errors import RendezvousError

_ONE_CONNECTION_FAILED = {
    getattr(errno, name)
    for name in (
        "ECONNABORTED", "ECONNRESET", "EINTR", "EPROTO", "ENETDOWN", "ENOPROTOOPT", "EHOSTDOWN", "ENONET", "EHOSTUNREACH",
        "EOPNOTSUPP", "ENETUNREACH",
    )
    if hasattr(errno, name)
}  # fmt: skip
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)


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
    try:
        import resource
    except ImportError:  # Windows has no such limit.
        return "has no free file descriptor"
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
