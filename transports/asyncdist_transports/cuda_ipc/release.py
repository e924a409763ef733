"""How a rank lets go of what others map of it, and it of them: when its device is done, and else not at all.

A stream that waits for the mark of a process that was killed waits for ever. Then what it may still use stays as it is,
until this process ends; and so does an event that others may not wait for yet.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import Any

from asyncdist.errors import TransportUnavailableError
from asyncdist.transport.device_streams import Streams, passed_within
from asyncdist_transports.cuda_ipc.driver import Driver
from asyncdist_transports.cuda_ipc.handles import Exports, Imports

log = logging.getLogger("asyncdist")

_PATIENCE = 30.0
_FAREWELL = 5.0  # seconds that the device has for what stands in our stream
_outlived: deque[Any] = deque(maxlen=4096)  # events, for a while: peers may be about to wait for them
_left: list[Any] = []


def leave(
    streams: Streams, driver: Driver, imports: Imports, exports: Exports, beacon: int, events: Iterable[Any]
) -> None:
    """Unmap and free everything, if the device does nothing more with it; blocks for some seconds at most."""
    _outlived.extend(events)
    if not _is_quiet(streams):
        log.warning(
            "%s has not done, or failed at, what ranks had to do with one another's memory: it stays mapped until this "
            "process ends",
            streams.device,
        )
        _left.append((driver, imports, exports))
        return
    imports.close()
    exports.close()
    driver.free(beacon)


def quiet(streams: Streams) -> None:
    """Block until the device has done what stands in our stream; TransportUnavailableError if it does not."""
    if not passed_within(streams.mark(), _PATIENCE):
        raise TransportUnavailableError(f"{streams.device} has not done in {_PATIENCE:.0f} s what stands in its queue")


def _is_quiet(streams: Streams) -> bool:
    try:
        with streams.ours():
            mark = streams.mark()
    except Exception:  # the device has failed
        return False
    return passed_within(mark, _FAREWELL)
