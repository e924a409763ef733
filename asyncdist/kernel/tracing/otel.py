"""OpenTelemetry spans of the operations of all groups of this process. It needs opentelemetry-api, the extra ``otel``."""

from __future__ import annotations

import time
from typing import Any

from asyncdist.base.error_text import describe_error
from asyncdist.errors import UsageError
from asyncdist.kernel.tracing.hooks import Hook, OperationRecord, register_hook


def trace_operations(tracer_provider: Any = None) -> Hook:
    """Make an OpenTelemetry span of each operation, from its call to its completion, on every group of this process.

    The span is a child of the span that is current at the call, and its name is that of the operation. Its attributes
    are ``asyncdist.group``, ``.rank``, ``.size``, ``.sequence``, ``.bytes``, and if there is one ``.dtype``, ``.peer`` and
    ``.longest_wait_rank`` with ``.longest_wait_seconds``. The span of a failed operation has the error's status.

    Args:
        tracer_provider: The provider of the spans; None takes the global one.

    Returns:
        The hook: ``remove()`` ends the tracing. Operations that are pending then get no span.

    Raises:
        UsageError: opentelemetry-api is not installed.

    Example:
        >>> hook = dist.trace_operations()
    """
    try:
        from opentelemetry import trace
    except ImportError:
        raise UsageError("spans need the package opentelemetry-api: pip install opentelemetry-api") from None
    tracer = trace.get_tracer("asyncdist", tracer_provider=tracer_provider)
    # OpenTelemetry's clock is the wall clock in nanoseconds, that of records is `time.perf_counter`.
    offset = time.time_ns() - time.perf_counter_ns()
    pending: dict[int, Any] = {}

    def nanoseconds(moment: float) -> int:
        return offset + int(moment * 1e9)

    def on_start(record: OperationRecord) -> None:
        span = tracer.start_span(record.op, attributes=_attributes(record), start_time=nanoseconds(record.start))
        pending[record.id] = span

    def finish(record: OperationRecord) -> None:
        span = pending.pop(record.id, None)
        if span is None:
            return
        if record.waits:
            rank, seconds = max(record.waits.items(), key=lambda each: each[1])
            span.set_attribute("asyncdist.longest_wait_rank", rank)
            span.set_attribute("asyncdist.longest_wait_seconds", seconds)
        if record.error is not None:
            span.set_status(trace.StatusCode.ERROR, describe_error(record.error))
            span.set_attribute("error.type", type(record.error).__name__)
        assert record.end is not None
        span.end(nanoseconds(record.end))

    return register_hook(on_start, finish, finish)


def _attributes(record: OperationRecord) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "asyncdist.group": record.group,
        "asyncdist.rank": record.rank,
        "asyncdist.size": len(record.ranks),
        "asyncdist.sequence": record.seq,
        "asyncdist.bytes": record.nbytes,
    }
    if record.dtype is not None:
        attributes["asyncdist.dtype"] = str(record.dtype).removeprefix("torch.")
    if record.peer is not None:
        attributes["asyncdist.peer"] = record.peer
    return attributes
