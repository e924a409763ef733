"""Memory order between processes, for a language without atomic operations.

A rank writes data and then a *word* that announces the data; a peer reads the word until it has the value and then reads
the data. Both rely on the order in which their loads and stores take effect. x86 keeps every order except one: a load may
pass an earlier store. arm64 keeps none. Code that needs more order uses a `Fence`:

=================================  =====================================  ======  ======
where                              what must not be reordered             x86     arm64
=================================  =====================================  ======  ======
before a word is written           the data's loads and stores, the word  kept    fence
after a word was seen              the word's load, loads of the data     kept    fence
between announcing and checking    the word's store, the sleep flag       fence   fence
=================================  =====================================  ======  ======

The fence is a lock that is always held: it is released and acquired again. A release followed by an acquire is a full
barrier on both: on x86 each is a locked instruction; on arm64 CPython's lock compiles to load-acquire and store-release,
which are not reordered with each other in this direction (the architecture's RCsc rule), so every access before the release
takes effect before every access after the acquire.

A word is 8 bytes at a multiple of 8, read and written through ``memoryview.cast("q")``, which compiles to one move: no
reader sees half a word.
"""

from __future__ import annotations

import platform
import threading

from asyncdist.base.callables import Callback

_KEEPS_STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
# Does nothing, where the processor keeps an order without a barrier: a function in C enters no Python frame.
_nothing: Callback = ().__len__


class Fence:
    """Memory barriers for one thread at a time: the thread that holds the world's lock."""

    __slots__ = ("_lock", "full", "light")

    def __init__(self) -> None:
        lock = self._lock = threading.Lock()
        lock.acquire()
        release, acquire = lock.release, lock.acquire

        def full() -> None:
            try:
                release()
            # A KeyboardInterrupt between the two must not leave the lock released.
            finally:
                acquire()

        self.full: Callback = full
        """A full barrier: no load or store passes it in either direction."""
        self.light: Callback = _nothing if _KEEPS_STORES_IN_ORDER else full
        """A barrier that orders everything except a store followed by a load."""
