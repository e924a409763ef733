"""How a rank lets go of what others map of it, and it of them: when its device is done, and else not at all.

A stream that waits for the event of a process that was killed waits for ever. Then what it may still use stays as it is,
until this process ends; and so does an event that others may not wait for yet.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import Any

from asyncdist.errors import TransportUnavailableError
from asyncdist.transport.device_streams import Streams, completes_within
from asyncdist_transports.cuda_ipc.driver import Driver
from asyncdist_transports.cuda_ipc.handles import Exports, Imports

log = logging.getLogger("asyncdist")

_IDLE_TIMEOUT = 30.0
_CLOSE_TIMEOUT = 5.0  # seconds that the device has for what stands in our stream
_kept_events: deque[Any] = deque(maxlen=4096)  # events, for a while: peers may be about to wait for them
_kept_mappings: list[Any] = []


def release_all(
    streams: Streams, driver: Driver, imports: Imports, exports: Exports, probe_memory: int, events: Iterable[Any]
) -> None:
    """Unmap and free everything, if the device does nothing more with it; blocks for some seconds at most."""
    _kept_events.extend(events)
    if not _becomes_idle(streams):
        log.warning(
            "%s has not done, or failed at, what ranks had to do with one another's memory: it stays mapped until this "
            "process ends",
            streams.device,
        )
        _kept_mappings.append((driver, imports, exports))
        return
    imports.close()
    exports.close()
    driver.free(probe_memory)


def wait_until_idle(streams: Streams) -> None:
    """Block until the device has done what stands in our stream; TransportUnavailableError if it does not."""
    if not completes_within(streams.record_event(), _IDLE_TIMEOUT):
        raise TransportUnavailableError(
            f"{streams.device} has not done in {_IDLE_TIMEOUT:.0f} s what stands in its queue"
        )


def _becomes_idle(streams: Streams) -> bool:
    try:
        with streams.on_comm_stream():
            event = streams.record_event()
    except Exception:  # the device has failed
        return False
    return completes_within(event, _CLOSE_TIMEOUT)
