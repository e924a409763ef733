"""Release of mapped memory: when the device has completed the work that uses it, else never.

A stream that waits for an event of a killed process never completes. The memory that its work may use then stays mapped
until this process ends. Events are kept for a while, because peers may be about to wait for them.
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
_CLOSE_TIMEOUT = 5.0
_kept_events: deque[Any] = deque(maxlen=4096)
_kept_mappings: list[Any] = []


def release_all(
    streams: Streams, driver: Driver, imports: Imports, exports: Exports, probe_memory: int, events: Iterable[Any]
) -> None:
    """Unmap and free everything if the device becomes idle within 5 s; otherwise keep it until the process ends."""
    _kept_events.extend(events)
    if not _becomes_idle(streams):
        log.warning(
            "%s has failed, or has not completed the work that uses other ranks' memory: the memory stays mapped until "
            "this process ends",
            streams.device,
        )
        _kept_mappings.append((driver, imports, exports))
        return
    imports.close()
    exports.close()
    driver.free(probe_memory)


def wait_until_idle(streams: Streams) -> None:
    """Block until the device has completed the work in this stream; raise TransportUnavailableError after 30 s."""
    if not completes_within(streams.record_event(), _IDLE_TIMEOUT):
        raise TransportUnavailableError(
            f"{streams.device} has not completed its queued work within {_IDLE_TIMEOUT:.0f} s"
        )


def _becomes_idle(streams: Streams) -> bool:
    try:
        with streams.on_comm_stream():
            event = streams.record_event()
    except Exception:
        return False
    return completes_within(event, _CLOSE_TIMEOUT)
