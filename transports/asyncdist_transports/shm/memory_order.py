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

import functools
import platform
import threading
from collections.abc import Callable

from asyncdist.base.callables import Callback

_KEEPS_STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
# Does nothing, where the processor keeps an order without a barrier: a function in C enters no Python frame.
_nothing: Callback = ().__len__


class Fence:
    """Memory barriers for one thread at a time: the thread that holds the world's lock.

    Attributes:
        full: A full barrier: no load or store passes it in either direction.
        light: A barrier that orders everything except a store followed by a load.
        is_needed: Whether `light` does anything.
        open: A full barrier, after which comes `close`, and no other of this fence but `light`.
        close: A full barrier, after `open`. Each of the pair is a half of `full` where one instruction is enough.
    """

    __slots__ = ("close", "full", "is_needed", "light", "open")

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        release, acquire = lock.release, functools.partial(lock.acquire, False)

        def full() -> None:
            # A KeyboardInterrupt between the two, or between `open` and `close`, must not leave the lock released.
            try:
                release()
            except RuntimeError:
                pass
            finally:
                acquire()

        self.is_needed = not _KEEPS_STORES_IN_ORDER
        self.full: Callback = full
        self.light: Callback = full if self.is_needed else _nothing
        self.open: Callback = full if self.is_needed else release
        self.close: Callable[[], object] = full if self.is_needed else acquire
