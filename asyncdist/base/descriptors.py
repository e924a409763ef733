"""Classify the errors of ``accept`` and of running out of file descriptors.

Listening sockets call it, and the engine when an operation cannot get a descriptor.
"""

from __future__ import annotations

import errno

_CONNECTION_GONE = {
    getattr(errno, name)
    for name in (
        "ECONNABORTED", "ECONNRESET", "EINTR", "EPROTO", "ENETDOWN", "ENOPROTOOPT", "EHOSTDOWN", "ENONET", "EHOSTUNREACH",
        "EOPNOTSUPP", "ENETUNREACH",
    )
    if hasattr(errno, name)
}  # fmt: skip
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)


def is_gone(cause: OSError) -> bool:
    """Return whether ``accept`` failed for one connection only, as Linux's accept(2) lists; the next may succeed."""
    return cause.errno in _CONNECTION_GONE


def is_exhausted(cause: BaseException) -> bool:
    """Return whether the process or the machine is out of file descriptors."""
    return isinstance(cause, OSError) and cause.errno in _EXHAUSTED


def exhaustion(cause: OSError) -> str:
    """Return what is out of descriptors, and at which limit, as the end of a sentence that begins with a rank."""
    if cause.errno == errno.ENFILE:
        return "cannot open a file descriptor: the machine has reached its limit (fs.file-max)"
    try:
        import resource
    except ImportError:  # Windows has no such limit.
        return "has no free file descriptor"
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"has no free file descriptor, the limit is {limit}"
