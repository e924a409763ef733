"""Memory order between processes, in a language that has no word for it.

A rank writes data and then a *word* that says so; a peer reads the word until it says so and then the data. Both rely on
the order in which their loads and stores take effect. x86 keeps all of that order but one: a load may overtake an
earlier store. arm64 keeps none. Whatever needs more asks for a `Fence`:

==========================  =======================================  ======  ======
where                       what must not pass what                  x86     arm64
==========================  =======================================  ======  ======
before a word is written    the data's loads and stores, the word    kept    fence
after a word was seen       the word's load, loads of the data       kept    fence
between telling and asking  the word's store, the sleeper's flag     fence   fence
==========================  =======================================  ======  ======

The fence is a lock that is always held, let go and taken again. Letting go is a release, taking an acquire, and a release
followed by an acquire is a full barrier on both: on x86 each is a locked instruction; on arm64 CPython's lock compiles to
load-acquire and store-release, which are not reordered with each other in this direction (the architecture's RCsc
rule), so that everything before the first comes before everything behind the second.

A word is 8 bytes at a multiple of 8, read and written through ``memoryview.cast("q")``, which compiles to one move: no
reader sees half of it.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable

_KEEPS_STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")


def _nothing() -> None:
    """Stand where the processor keeps the order by itself."""


class Fence:
    """Barriers for one user at a time: whoever holds the world's lock."""

    __slots__ = ("_lock", "full", "light")

    def __init__(self) -> None:
        lock = self._lock = threading.Lock()
        lock.acquire()
        release, acquire = lock.release, lock.acquire

        def full() -> None:
            try:
                release()
            finally:  # also when Ctrl-C comes between the two: others are to be told by us then
                acquire()

        self.full: Callable[[], None] = full
        """Let no load or store pass, in either direction."""
        self.light: Callable[[], None] = _nothing if _KEEPS_STORES_IN_ORDER else full
        """The same but for a store that is followed by a load, which may change places."""
