"""HTTP port of a store: ``/metrics`` for Prometheus, ``/healthz`` for a process supervisor.

It serves one GET or HEAD per connection. A store whose journal has failed answers
``/healthz`` with 503. Called by `daemon`; it needs prometheus-client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

from asyncdist.base.background_loop import cancel_all
from asyncdist.base.callables import Supplier
from asyncdist.errors import UsageError
from asyncdist.store.server import listener
from asyncdist.store.server.server import StoreServer

TIMEOUT = 10.0
"""Seconds that a client has to send its request and to read the response."""
_END_OF_HEAD = b"\r\n\r\n"
_REQUEST_NBYTES = 8 << 10
_CONNECTIONS = 32


MEANINGS = {
    "uptime_seconds": "seconds since the server was started",
    "connections": "connections that are open",
    "connections_limit": "limit of open connections",
    "connections_total": "connections that were accepted since the start",
    "refusals_total": "connections that were refused or dropped: no token, garbage, too many, too slow",
    "requests_total": "requests that have been executed since the start",
    "clients": "clients with a session, connected or not",
    "keys": "keys with a value",
    "queue_items": "items in queues",
    "waiting": "requests that wait for a key, an item, a barrier or messages",
    "stored_bytes": "bytes of keys, values, items and kept replies",
    "stored_bytes_limit": "limit of stored bytes (--max-memory)",
    "log_bytes": "bytes of log and snapshot that a restart would read (--data)",
    "commits_total": "times that changes were written since the start (--data)",
    "snapshots_total": "snapshots that were written since the start (--data)",
}
"""The meaning of each figure by its name. Figures whose names end in ``_total`` only grow."""


class Metrics:
    """The port. Create it with `start`, and `close` it."""

    _server: asyncio.Server

    def __init__(self, store: StoreServer, port: int, render: Supplier[bytes]) -> None:
        self.port = port
        self._store = store
        self._render = render
        self._requests: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, store: StoreServer, host: str, port: int) -> Metrics:
        """Listen at ``host`` and ``port``. Raises UsageError without prometheus-client, AddressError for the port."""
        check_available()
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(store))
        sockets = listener.listening_sockets(host, port, listener.resolve_listen_address(host, port))
        metrics = cls(store, sockets[0].getsockname()[1], partial(generate_latest, registry))
        metrics._server = await asyncio.start_server(metrics._handle, sock=sockets[0], limit=_REQUEST_NBYTES)
        for each in sockets[1:]:  # one address is enough
            each.close()
        return metrics

    async def close(self) -> None:
        self._server.close()
        await cancel_all(*self._requests)
        await self._server.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._requests) >= _CONNECTIONS:
                return
            self._requests.add(task)
            async with asyncio.timeout(TIMEOUT):
                request = await reader.readuntil(_END_OF_HEAD)
                writer.write(self._answer(request))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # the client has left, or this server closes
        finally:
            self._requests.discard(task)
            writer.close()

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"only GET and HEAD\n")
        response = self._get(rest.partition(b" ")[0].partition(b"?")[0])
        return response if method == b"GET" else response[: response.index(_END_OF_HEAD) + len(_END_OF_HEAD)]

    def _get(self, path: bytes) -> bytes:
        if path == b"/metrics":
            return _response("200 OK", self._render(), "text/plain; version=0.0.4; charset=utf-8")
        if path == b"/healthz":
            durability = self._store.durability
            if durability is not None and durability.failure.done():
                return _response("503 Service Unavailable", f"{durability.failure.exception()}\n".encode())
            return _response("200 OK", b"ok\n")
        return _response("404 Not Found", b"the paths are /metrics and /healthz\n")


def check_available() -> None:
    """Raise UsageError if prometheus-client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise UsageError(
            "--metrics-port needs the package prometheus-client: pip install prometheus-client, or omit the option"
        ) from None


def _response(status: str, body: bytes, kind: str = "text/plain; charset=utf-8") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


class _Collector:
    """Prometheus collector: reads the figures at each scrape."""

    def __init__(self, store: StoreServer) -> None:
        self._store = store

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, value in self._store.figures().items():
            full, meaning = f"asyncdist_store_{name}", MEANINGS[name]
            if name.endswith("_total"):
                yield CounterMetricFamily(full.removesuffix("_total"), meaning, value=value)
            else:
                yield GaugeMetricFamily(full, meaning, value=value)
