"""What the kernel says when it gives no descriptor, and when one that it would have given is gone already."""

from __future__ import annotations

import errno

_GONE = {
    getattr(errno, name)
    for name in (
        "ECONNABORTED", "ECONNRESET", "EINTR", "EPROTO", "ENETDOWN", "ENOPROTOOPT", "EHOSTDOWN", "ENONET", "EHOSTUNREACH",
        "EOPNOTSUPP", "ENETUNREACH",
    )
    if hasattr(errno, name)
}  # fmt: skip
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)


def is_gone(cause: OSError) -> bool:
    """Return whether ``accept`` failed for one connection only, as accept(2) of Linux lists; the next may succeed."""
    return cause.errno in _GONE


def is_exhausted(cause: BaseException) -> bool:
    """Return whether the process or the machine is out of descriptors."""
    return isinstance(cause, OSError) and cause.errno in _EXHAUSTED
